import io

from fairseq.data import Dictionary

from data_prep.tokenization.tokenizers import dictionary_names, dictionary_size, dictionary_text


def load(text: str) -> Dictionary:
    dictionary = Dictionary()
    dictionary.add_from_file(io.StringIO(text))
    return dictionary


def test_sizes_are_padded_to_a_multiple_of_eight():
    # 4 special symbols + 4 symbols are 8; one more symbol makes 16.
    assert [dictionary_size(num_symbols) for num_symbols in (4, 5, 12, 13)] == [8, 16, 16, 24]


def test_fairseq_reads_tokenizer_id_i_as_i_plus_four():
    names = dictionary_names(["a", "Ġb", "é"])
    assert names == ["a", "Ġb", "é", "madeupword0000"]
    dictionary = load(dictionary_text(names))
    assert [dictionary.index(name) for name in names] == [4, 5, 6, 7]
    assert len(dictionary) == 8
    dictionary.pad_to_multiple_(8)  # as fairseq-preprocess may do: nothing left to pad
    assert len(dictionary) == 8


def test_names_hold_no_white_space_and_are_taken_once():
    symbols = ["<unk>", "\n", "\u2581\t", "<U+000A>", "</s>", "\x1c", "madeupword0000", "#fairseq:overwrite"]
    names = dictionary_names(symbols)
    assert names[:8] == [
        "<unk>#0",
        "<U+000A>",
        "\u2581<U+0009>",
        "<U+000A>#3",
        "</s>#4",
        "<U+001C>",
        "madeupword0000",
        "#fairseq:overwrite",
    ]
    assert names[8] == "madeupword0000#8"  # the first of the padding
    dictionary = load(dictionary_text(names))
    assert [dictionary.index(name) for name in names] == list(range(4, 16))

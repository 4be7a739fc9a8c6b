"""Training on counted words gives the same tokenizer.json as the tokenizers library gives for the text itself."""

import random
from collections import Counter
from pathlib import Path

import pytest

from data_prep.sources import python_docs
from data_prep.tokenization.tokenizers import ByteBPE
from data_prep.tokenization.word_counts import added_tables, count_words, texts_with_counts, write_table

CODE = Path(__file__).read_text(encoding="utf-8")
CHINESE = ["機器學習，大規模資料。", "他說：「好的」，然後走了\u3000很遠。", "第一段\n\n第二段 with English"] * 20
EMOJI = ["👩‍👩‍👧 and 👍🏽!", "naïve café 😀😀😀 it's we'll I'D", "\ufeff\u200bzero\0width\u0301"] * 20
SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


def odd_texts() -> list[str]:
    rng = random.Random(1)
    letters = [
        *"abé'sdm10²٣.,-_\u2581\u0120\u010a",
        "'ll",
        " the",
        "単",
        "😀",
        "\0",
        "\u200b",
        "\x1c",
        *SPACES,
        *" \n" * 9,
    ]
    return ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(3000)]


def trained_by_the_library(texts: list[str], vocab_size: int) -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=False).encode("utf-8")


@pytest.mark.parametrize(
    "texts",
    [[CODE], CHINESE, EMOJI, odd_texts(), SPACES, ["a" * 1024 + " b"] * 3, ["the"] * 5000, [""], []],
    ids=["code", "Chinese", "emoji", "odd", "spaces", "long", "frequent", "empty", "none"],
)
def test_counted_words_give_the_bytes_of_the_library(texts):
    assert ByteBPE.train(iter(texts), 700) == trained_by_the_library(texts, 700)


def test_books_and_docstrings_give_the_bytes_of_the_library(shared_data):
    book = Path(shared_data, "books", "homer_the_iliad.md").read_text(encoding="utf-8")
    docs = [python_docs.docstrings(path.read_bytes()) for path in python_docs.module_files()[:100]]
    texts = [book[:500_000], *docs]
    assert ByteBPE.train(iter(texts), 3000) == trained_by_the_library(texts, 3000)


def test_words_are_those_of_gpt2_one_letter_per_byte():
    assert count_words(["it's  the é\n", "the the"]) == Counter(
        {"it": 1, "'s": 1, "Ġ": 1, "Ġthe": 2, "ĠÃ©": 1, "Ċ": 1, "the": 1}
    )


def test_tables_are_sorted_and_added(tmp_path):
    write_table(Counter({"Ġthe": 2, "a": 1, "a!": 5}), tmp_path / "0")
    write_table(Counter({"b": 3, "a": 4}), tmp_path / "1")
    write_table(Counter(), tmp_path / "2")
    assert (tmp_path / "0").read_text(encoding="utf-8") == "a 1\na! 5\nĠthe 2\n"
    added = list(added_tables([tmp_path / str(number) for number in range(3)]))
    assert added == [("a", 5), ("a!", 5), ("b", 3), ("Ġthe", 2)]


def test_every_word_is_repeated_as_often_as_it_was_counted():
    counts = {"ab": 2500, "cd": 1, "x" * 40_000: 5, "ef": 1024, "a": 9}
    texts = list(texts_with_counts(counts.items()))
    # "a" alone has no pair of letters to merge.
    assert Counter(word for text in texts for word in text.split("\n")) == Counter(counts) - Counter({"a": 9})
    assert max(map(len, texts)) < 200_000

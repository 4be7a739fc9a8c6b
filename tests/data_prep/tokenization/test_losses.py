"""Text that a tokenizer loses is counted, with the characters."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.tokenization.losses import added_losses, losses, losses_summary, losses_text
from data_prep.tokenization.tokenizers import SentencePiece, load_tokenizer


def loaded(folder, model, cutting=None, decoder=None, normalizer=None, special=()):
    tokenizer = Tokenizer(model)
    if cutting:
        tokenizer.pre_tokenizer = cutting
    if decoder:
        tokenizer.decoder = decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def lost_by(tokenizer, *texts):
    return losses(tokenizer, texts, tokenizer.encode(list(texts)))


def word_level(folder, **more):
    model = models.WordLevel({"[UNK]": 0, "the": 1, "end": 2}, unk_token="[UNK]")
    return loaded(folder, model, pre_tokenizers.Whitespace(), **more)


def test_unknown_words_are_counted_with_their_characters(tmp_path):
    # "rose" and "ore" are unknown: r, o and e twice, s once.
    assert lost_by(word_level(tmp_path), "the rose ore", "the end") == {
        "unknown_tokens": 2,
        "characters": 7,
        "of_characters": 19,
        "changed_passages": 1,
        "most_frequent": {"U+0065": 2, "U+006F": 2, "U+0072": 2, "U+0073": 1},
    }


def test_the_name_of_the_unknown_symbol_in_the_text_is_no_loss(tmp_path):
    lost = lost_by(word_level(tmp_path, special=["[UNK]"]), "the [UNK] end", "the [UNK] x")
    assert (lost["unknown_tokens"], lost["characters"]) == (1, 1)


def test_characters_that_a_bpe_without_unknown_symbol_drops_are_counted(tmp_path):
    tokenizer = loaded(tmp_path, models.BPE({"a": 0, "b": 1, "▁": 2}, []), pre_tokenizers.Metaspace())
    lost = lost_by(tokenizer, "ab 😀ü", "b\u2581")
    assert lost["unknown_tokens"] == 0
    assert lost["most_frequent"] == {"U+00FC": 1, "U+1F600": 1}


def test_what_a_normalizer_replaces_is_counted(tmp_path):
    tokenizer = word_level(tmp_path, normalizer=normalizers.Lowercase())
    assert lost_by(tokenizer, "The THE the")["most_frequent"] == {"U+0054": 2, "U+0045": 1, "U+0048": 1}


def test_a_byte_level_tokenizer_loses_nothing_unless_bytes_are_missing(tmp_path):
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    cutting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert lost_by(loaded(tmp_path, models.BPE(alphabet, []), cutting), "ü😀") == {}
    ascii_only = {chr(code): code - 33 for code in range(33, 127)}
    assert lost_by(loaded(tmp_path, models.BPE(ascii_only, []), cutting), "aü")["most_frequent"] == {"U+00FC": 1}


def test_white_space_that_a_byte_level_tokenizer_adds_or_takes_is_counted(tmp_path):
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    cutting = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = loaded(tmp_path, models.BPE(alphabet, []), cutting)
    assert lost_by(tokenizer, "one", " two")["changed_passages"] == 1
    cutting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = loaded(tmp_path, models.BPE(alphabet, []), cutting, special=[AddedToken("<mask>", lstrip=True)])
    assert lost_by(tokenizer, "one <mask>", "two", "three<mask>")["changed_passages"] == 1
    tokenizer = loaded(tmp_path, models.BPE(alphabet, []), cutting, decoders.WordPiece())
    assert lost_by(tokenizer, "one ü")["changed_passages"] == 1


def test_a_file_without_decoder_is_decoded_before_it_is_judged(tmp_path):
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = loaded(
        tmp_path,
        models.BPE(alphabet, []),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizer=normalizers.NFC(),
    )
    assert lost_by(tokenizer, "ü 😀")["changed_passages"] == 0


def test_a_decoder_that_shortens_words_is_no_loss(tmp_path):
    model = models.WordPiece({"[UNK]": 0, "do": 1, "not": 2, "we": 3}, unk_token="[UNK]")
    tokenizer = loaded(tmp_path, model, pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=True))
    assert lost_by(tokenizer, "we do not")["changed_passages"] == 0


def test_our_sentencepiece_loses_only_its_sign_for_a_space(tmp_path):
    (tmp_path / SentencePiece.file_name).write_bytes(SentencePiece.train(iter(["the end of the stream"] * 50), 280))
    lost = lost_by(SentencePiece(tmp_path / SentencePiece.file_name), "ü😀 the\n end ", "a\u2581b")
    assert (lost["unknown_tokens"], lost["most_frequent"], lost["changed_passages"]) == (0, {"U+2581": 1}, 1)


def test_a_sentencepiece_model_without_byte_fallback_has_unknown_tokens(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the end of the stream"] * 50),
        model_prefix=str(tmp_path / "m"),
        vocab_size=20,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    lost = lost_by(SentencePiece(tmp_path / "m.model"), "the ü end 😀")
    assert (lost["unknown_tokens"], lost["most_frequent"]) == (2, {"U+00FC": 1, "U+1F600": 1})


def test_the_warning_gives_the_shares_and_the_most_frequent_characters(tmp_path):
    part = lost_by(word_level(tmp_path), "the rose ore", "the end")
    split = {"passages": 2, "tokens": 7, "sequences": 2, "lost": added_losses([part, {}, part])}
    text = losses_text({"valid": split, "test": {"passages": 1, "tokens": 9, "sequences": 1}})
    assert "4 of 13 tokens (30.77%) are its unknown symbol" in text
    assert "14 of 38 characters (36.84%)" in text and "U+0065 e 4 times" in text and "2 of 3 passages" in text
    assert "--tokenizer byte-bpe" in text
    assert losses_summary({"valid": split}) == ["lost by the tokenizer: 14 of 38 characters; unknown tokens: 4"]


def test_nothing_is_said_if_nothing_is_lost(tmp_path):
    split = {
        "passages": 1,
        "tokens": 3,
        "sequences": 1,
        "lost": added_losses([lost_by(word_level(tmp_path), "the end")]),
    }
    assert losses_text({"valid": split}) == "" and losses_summary({"valid": split}) == []


@pytest.mark.parametrize("text", ["", " \n"])
def test_white_space_alone_is_only_a_changed_passage(tmp_path, text):
    lost = lost_by(word_level(tmp_path), text)
    assert (lost["characters"], lost["changed_passages"]) == (0, int(text != ""))
    assert not np.any(lost["unknown_tokens"])

"""Symbols that are added to a byte-level BPE tokenizer."""

import json

from tokenizers import Tokenizer

from data_prep.tokenization.growth import pieces_of_new_symbols, with_more_symbols, words_as_symbols
from data_prep.tokenization.tokenizers import ByteBPE
from data_prep.tokenization.word_counts import count_words

BYTES = ByteBPE.train_on_counts([], 256)
"""A tokenizer with one symbol for each byte and no merges."""


def vocab(tokenizer: bytes) -> dict[str, int]:
    return json.loads(tokenizer)["model"]["vocab"]


def divided(tokenizer: bytes, text: str) -> list[str]:
    return Tokenizer.from_str(tokenizer.decode()).encode(text).tokens


def test_the_most_frequent_pairs_become_symbols_after_the_old_ones():
    """ab occurs 3 + 2 times, bc 3 times. After ab is merged, (ab, c) occurs 3 times."""
    grown = with_more_symbols(BYTES, {("a", "b", "c"): 3, ("a", "b"): 2, ("x", "y"): 1}, 2)
    assert vocab(grown) == {**vocab(BYTES), "ab": 256, "abc": 257}
    assert divided(grown, "abcabx") == ["abc", "ab", "x"]
    letters = [vocab(BYTES)[letter] for letter in "abc"]
    assert pieces_of_new_symbols(grown, 256) == {256: letters[:2], 257: letters}
    assert pieces_of_new_symbols(grown, 257) == {257: [256, letters[2]]}


def test_pairs_that_occur_once_add_no_symbol():
    assert vocab(with_more_symbols(BYTES, {("a", "b"): 1}, 5)) == vocab(BYTES)


def test_equal_neighbours_are_merged_from_left_to_right():
    """aaaaa has 4 pairs (a, a), but is divided into aa, aa and a, as BPE does."""
    grown = with_more_symbols(BYTES, {("a",) * 5: 2}, 1)
    assert vocab(grown) == {**vocab(BYTES), "aa": 256}
    assert divided(grown, "aaaaa") == ["aa", "aa", "a"]


def test_as_many_merges_as_the_library_learns_divide_a_text_as_well():
    text = "the cat sat on the mat and the hat of the cat sat there, naïve café größe"
    grown = with_more_symbols(BYTES, words_as_symbols(BYTES, count_words([text])), 6)
    assert len(vocab(grown)) == 256 + 6
    # The numbers of tokens, and not the merges, because of pairs that are equally frequent any may be the first.
    assert len(divided(grown, text)) == len(divided(ByteBPE.train([text], 256 + 6), text))


def test_a_grown_tokenizer_grows_from_its_symbols_and_not_from_letters():
    first = with_more_symbols(BYTES, {("a", "b"): 2}, 1)
    words = words_as_symbols(first, {"abc": 2, "xab": 1})
    assert words == {("ab", "c"): 2, ("x", "ab"): 1}
    assert vocab(with_more_symbols(first, words, 9)) == {**vocab(BYTES), "ab": 256, "abc": 257}


def test_merges_that_are_written_as_text_are_read_too():
    """Older versions of the library wrote "a b" and not ["a", "b"]."""
    described = json.loads(with_more_symbols(BYTES, {("a", "b"): 2}, 1))
    described["model"]["merges"] = [" ".join(pair) for pair in described["model"]["merges"]]
    grown = with_more_symbols(json.dumps(described).encode(), {("ab", "c"): 2}, 1)
    assert divided(grown, "abcab") == ["abc", "ab"]

"""Texts are split into words as by a regular expression that states the rules."""

import random
import re

import pytest

from data_prep.tokenization.word_counts import _SPACE, split_words

S = _SPACE.strip("[]")
WORD = re.compile(f" ?[^{S}]+|[{S}]+(?![^{S}])|[{S}]+")
SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


def words_of(texts: list[str]) -> list[list[str]]:
    words, result, start = split_words(texts), [], 0
    for end in words.ends.tolist():
        result.append([words.different[number].decode("utf-8") for number in words.numbers[start:end].tolist()])
        start = end
    return result


def test_words_are_those_of_the_regular_expression():
    rng = random.Random(1)
    # The last ones begin like white space of two or three bytes.
    letters = [
        "a",
        "b",
        "é",
        "単",
        "😀",
        "\0",
        "\x1c",
        *SPACES,
        *" \n" * 9,
        "\u200b",
        "\u2010",
        "“",
        "。",
        "\u1681",
        "¢",
    ]
    for _ in range(3000):
        texts = ["".join(rng.choices(letters, k=rng.randrange(12))) for _ in range(rng.randrange(6))]
        assert words_of(texts) == [WORD.findall(text) for text in texts], texts


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["a", "", "b "], [" ", " "], ["\u3000"], ["\u2003", "\u2003x"]])
def test_white_space_does_not_go_on_from_one_text_to_the_next(texts):
    assert words_of(texts) == [WORD.findall(text) for text in texts]


def test_different_words_are_in_the_order_of_their_first_occurrences():
    words = split_words(["b a b", "c a"])
    assert words.different == [b"b", b" a", b" b", b"c"]
    assert words.numbers.tolist() == [0, 1, 2, 3, 1]
    assert words.ends.tolist() == [3, 5]

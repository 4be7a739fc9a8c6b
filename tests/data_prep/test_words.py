"""What a word is, in languages with and without spaces, and in text that has neither spaces nor words."""

import random
import time

import numpy as np
import pytest

from data_prep.dividing.partition import cut_document
from data_prep.words import MAX_WORD_CHARACTERS, count_words, split_words, word_starts
from tests.data_prep.languages import PARAGRAPHS, WITHOUT_SPACES


@pytest.mark.parametrize("language", sorted(set(PARAGRAPHS) - set(WITHOUT_SPACES)))
def test_in_languages_with_spaces_words_stand_between_them(language):
    text = PARAGRAPHS[language]
    assert count_words(text) == len(text.split()) == len(word_starts(text))
    assert split_words(text) == text.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("学生读书。", ["学生", "读书。"]),  # students read books
        ("古い家", ["古い", "家"]),  # an old house
        ("ภาษาไทย", ["ภาษา", "ไทย"]),  # the Thai language
        ("ផ្ទះចាស់", ["ផ្ទះ", "ចាស់"]),  # an old house
        ("ເຮືອນເກົ່າ", ["ເຮືອນ", "ເກົ່າ"]),
        ("အိမ်ဟောင်း", ["အိမ်", "ဟောင်း"]),
        ("ཁང་པ་རྙིང་པ", ["ཁང་", "པ་", "རྙིང་", "པ"]),  # Tibetan marks the end of each syllable
    ],
)
def test_in_scripts_without_spaces_words_are_those_of_a_dictionary(text, words):
    assert split_words(text) == words
    assert count_words(text) == len(words)


def test_the_number_of_words_of_a_translation_is_that_of_the_original_whatever_the_script():
    counts = {language: count_words(text) for language, text in PARAGRAPHS.items()}
    assert counts["en"] == 33
    # All are translations of the same three sentences. By white space, Chinese would have one word, and Thai three.
    assert min(counts.values()) >= 0.5 * 33 and max(counts.values()) <= 1.2 * 33, counts


def test_punctuation_belongs_to_a_word_and_words_of_other_scripts_in_between_are_found():
    assert split_words("「世界」和 and/or don't 这") == ["「世界」", "和", "and/or", "don't", "这"]
    assert split_words("iPhone的价格") == ["iPhone", "的", "价格"]
    assert split_words("。。 -- 世") == ["。。", "--", "世"]
    assert split_words("😀世界😀和") == ["😀世界😀", "和"]  # characters that UTF-16 writes as two


def test_the_white_space_is_that_of_str_split():
    for code in [*range(0x21), 0x7F, 0x85, 0xA0, 0x1680, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x205F, 0x3000]:
        text = f"ab{chr(code)}cd"
        assert count_words(text) == len(word_starts(text)) == len(text.split()), hex(code)


def test_every_128_characters_without_the_end_of_a_word_are_a_word():
    assert MAX_WORD_CHARACTERS == 128
    assert word_starts("a" * 128).tolist() == [0]
    assert word_starts(f"x {'a' * 129} y").tolist() == [0, 2, 130, 132]
    assert count_words("acgt" * 32_000) == 1000
    assert count_words("é" * 1280) == 10


def test_counting_and_finding_words_agree_and_passages_have_the_words_of_the_document():
    rng = random.Random(0)
    pieces = [*PARAGRAPHS.values(), " ", "\n\n", "\u3000", "a" * 300, "“quoted”", "-", "😀", "\x85", "naïve", "/", "。"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        text = "".join(rng.sample(text, len(text))) if rng.random() < 0.3 else text
        starts = word_starts(text)
        assert count_words(text) == len(starts)
        assert np.all(np.diff(starts) > 0) and not any(text[start].isspace() for start in starts.tolist())
        passages = cut_document(text, passage_words=7, limit_words=10)
        assert "".join(passage.text for passage in passages) == text
        assert sum(passage.num_words for passage in passages) == len(starts)


@pytest.mark.parametrize("unit", [
        "a", "世界和平", "ภาษาไทย", "。", "\u0f0b", "a\u0301",
        *(pytest.param(unit, marks=pytest.mark.slow) for unit in ("x世", "\U0002a6d6")),
    ])  # fmt: skip
def test_the_time_grows_with_the_length_of_a_text_without_spaces(unit):
    def seconds(num_characters: int) -> float:
        text = unit * (num_characters // len(unit))
        times = []
        for _ in range(3):
            start = time.process_time()
            cut_document(text, passage_words=20, limit_words=100)
            times.append(time.process_time() - start)
        return min(times)

    seconds(1000)
    # Four times the text takes 16 times the time if it grows with the square.
    assert seconds(400_000) < 9 * seconds(100_000) + 0.02

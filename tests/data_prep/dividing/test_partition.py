import json
import random

import numpy as np
import pytest

from data_prep.dividing.layout import by_key, equal_layout
from data_prep.dividing.partition import Plan, cut_document, make_plan
from data_prep.errors import PrepError
from data_prep.reading.index import ENTRY, order_key


def test_defaults_are_one_percent_and_a_fifth_of_a_percent():
    # 60 600 words, 1% of them for validation: 606. (60 600 - 606) / 6 = 9999 words in each of B + 1 = 6 shares.
    assert make_plan(60_600, 5, None, None) == Plan(606, 9999, passage_words=19, limit_words=99)


def test_defaults_are_capped_for_large_corpora():
    plan = make_plan(1_800_000_000, 4, None, None)
    assert (plan.valid_words, plan.passage_words) == (500_000, 2000)


def test_the_error_of_too_little_text_says_what_was_found_and_what_is_needed():
    # Three shares of 1000 words and 30 words of validation.
    with pytest.raises(PrepError, match=r"found 3,029 words.*at least 3,030"):
        make_plan(3029, 2, 30, None)
    assert make_plan(3030, 2, 30, None).mega_batch_words == 1000


def test_passages_longer_than_one_percent_of_a_mega_batch_are_refused():
    assert make_plan(30_030, 2, 30, 100).passage_words == 100
    with pytest.raises(PrepError, match=r"passage_words=101 .* at most 100"):
        make_plan(30_030, 2, 30, 101)


def test_no_document_is_longer_than_half_of_a_held_out_set():
    plan = make_plan(60_000_000, 4, 50_000, None, test_words=200_000)
    assert (plan.passage_words, plan.limit_words) == (2000, 25_000)
    assert make_plan(60_000_000, 4, 50_000, None, test_words=6_000).limit_words == 3000
    assert make_plan(60_000_000, 4, 300, None).limit_words == 2000  # not shorter than a passage
    assert make_plan(60_000_000, 4, 50_000, None, whole_documents=True).limit_words == 119_900


def cut(text, passage_words, limit_words):
    """Return the texts of the passages of a document."""
    return [passage.text for passage in cut_document(text, passage_words, limit_words)]


def test_a_document_within_the_limit_stays_whole():
    assert cut("a b\n\nc d", passage_words=1, limit_words=4) == ["a b\n\nc d"]


def test_a_long_document_is_cut_at_paragraph_ends():
    # Paragraphs of 2, 1, 3 and 2 words, passages of up to 3.
    text = "a b\n\nc\n \n\nd e f\n\ng\nh"
    assert cut(text, passage_words=3, limit_words=4) == ["a b\n\nc\n \n\n", "d e f\n\n", "g\nh"]


def test_a_paragraph_is_cut_at_line_ends_only_if_it_is_longer_than_the_limit():
    text = "a b c d\n\ne f g\nh i\nj"
    # Limit 4: the first paragraph stays whole though it is longer than a passage; the second (6 words) does not.
    assert cut(text, passage_words=3, limit_words=4) == ["a b c d\n\n", "e f g\n", "h i\nj"]


def test_a_line_is_cut_between_words_only_if_it_is_longer_than_the_limit():
    assert cut("a b  c\td e", passage_words=2, limit_words=3) == ["a b  ", "c\td ", "e"]


@pytest.mark.parametrize(
    "text", ["  a b c d e\n\n\n", "\n\n a\r\n\r\nb\rc d\u00a0e\u2028f ", "x " * 50 + "\n" * 5 + "y"]
)
def test_passages_joined_are_the_document_and_keep_its_words(text):
    passages = cut_document(text, passage_words=2, limit_words=3)
    assert "".join(passage.text for passage in passages) == text
    assert [passage.num_words for passage in passages] == [len(passage.text.split()) for passage in passages]
    assert all(1 <= passage.num_words <= 3 for passage in passages)


def test_text_without_spaces_is_cut_between_the_words_of_its_script():
    # 学生 读书 (students read books), two words, twice; the full stop belongs to the word before it.
    passages = cut_document("学生读书。学生读书。", passage_words=2, limit_words=3)
    assert [(passage.text, passage.num_words) for passage in passages] == [("学生读书。", 2), ("学生读书。", 2)]


def test_a_text_without_any_words_is_cut_after_128_characters():
    passages = cut_document("acgt" * 96, passage_words=1, limit_words=2)
    assert [(passage.text, passage.num_words) for passage in passages] == [("acgt" * 32, 1)] * 3


def cuts_of(words, valid_words, num_mega_batches, test_words=None):
    entries = np.zeros(len(words), ENTRY)
    entries["num_words"], entries["key"] = words, [number.to_bytes(16) for number in range(len(words))]
    return equal_layout(entries, np.array([0]), valid_words, num_mega_batches, None, test_words).cuts


def test_cuts_fall_at_equal_word_counts():
    # 12 words: 2 for validation, then shares of (12 - 2) / 2 = 5: one mega-batch and the test set.
    assert cuts_of([2, 3, 2, 1, 4], 2, 1) == [0, 1, 3, 5]


def test_a_cut_falls_at_the_nearest_passage_end():
    # Shares of 10 end at 11, 21, 31; passages end at 1, 8, 12, 20, 22, 31. 12 is nearest to 11; of 20 and 22, equally
    # near to 21, the first is taken.
    assert cuts_of([1, 7, 4, 8, 2, 9], 1, 2) == [0, 1, 3, 4, 6]


def test_the_validation_set_is_never_empty():
    assert cuts_of([9, 9, 9], 1, 1) == [0, 1, 2, 3]


def test_mega_batches_are_equal_within_one_percent():
    rng = np.random.default_rng(0)
    words = rng.integers(1, 100, size=5000)  # no passage above 1% of a share: 250 000 / 25
    cuts = cuts_of(words, 2500, 24)
    shares = np.add.reduceat(words, cuts[:-1])[1:]
    assert np.abs(shares / shares.mean() - 1).max() < 0.01


def test_the_order_depends_on_seed_identity_and_passage_number():
    keys = {order_key(0, b"a", 0), order_key(1, b"a", 0), order_key(0, b"b", 0), order_key(0, b"a", 1)}
    assert len(keys) == 4
    assert order_key(0, b"a", 0) == order_key(0, b"a", 0)
    assert len(order_key(0, b"a", 0)) == 16


def test_passages_are_ordered_by_all_sixteen_bytes_of_their_key():
    keys = [b"\x01" + b"\0" * 15, b"\0" * 15 + b"\x02", b"\0" * 15 + b"\x01", b"\xff" * 16]
    entries = np.array([(key, key, 0, 0, 0, number, 0, 0, 0) for number, key in enumerate(keys)], dtype=ENTRY)
    assert entries[by_key(entries)]["num_words"].tolist() == [2, 1, 0, 3]


def test_the_test_set_has_the_size_that_was_asked_for():
    # 60 600 words: 606 for validation, 994 for the test, and 5 mega-batches of the other 59 000.
    assert make_plan(60_600, 5, None, None, test_words=994) == Plan(606, 11_800, passage_words=23, limit_words=118)
    words = np.full(6060, 10)
    cuts = cuts_of(words, 600, 5, 1000)
    assert (np.diff(cuts) * 10).tolist() == [600, *[11_800] * 5, 1000]
    assert np.diff(cuts_of(words, 600, 5, 1))[-1] == 1
    with pytest.raises(PrepError, match=r"and 500 test words need at least 2,530.*lower .*--test-words"):
        make_plan(2529, 2, 30, None, test_words=500)


def test_a_held_out_set_that_is_shorter_than_the_documents_has_its_size(tmp_path, alma_prep):
    rng = random.Random(0)
    for number in range(250):  # 80 words each, less than 1% of a mega-batch of 9900 words
        words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(80)]
        lines = [" ".join(words[start : start + 10]) for start in range(0, 80, 10)]
        (tmp_path / f"{number}.txt").write_text("\n\n".join(lines))
    sizes = ("--valid-words", "60", "--test-words", "100")
    assert alma_prep(tmp_path / "stream", f"books:{tmp_path}/*.txt", num_mega_batches=2, more=sizes) == 0
    splits = json.loads((tmp_path / "stream/stream.json").read_text())["splits"]
    assert [splits[name]["words"] for name in ("valid", "test")] == [60, 100]

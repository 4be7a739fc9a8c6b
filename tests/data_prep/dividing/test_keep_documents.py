"""A share of a chronological stream keeps whole documents."""

import numpy as np

from data_prep.dividing.shares import choose, keep_documents
from tests.data_prep.dividing.test_mixing import passages_of


def documents_in_passages(num_words, kinds=None, groups=None, length=10):
    """Passages of about `length` words of documents with these numbers of words."""
    owner = np.repeat(np.arange(len(num_words)), -(-np.array(num_words) // length))
    counts = np.bincount(owner)
    words = np.array(num_words)[owner] // counts[owner]
    kinds, groups = (np.zeros(len(num_words), int) if each is None else np.array(each) for each in (kinds, groups))
    passages = passages_of(words, kinds[owner], groups[owner])
    rng = np.random.default_rng(len(num_words))
    passages["document"] = np.array([rng.bytes(16) for _ in num_words], "V16")[owner]
    return passages


def hashes(passages):
    return {bytes(document) for document in passages["document"]}


def test_documents_that_fit_are_chosen_in_order_and_the_sum_is_nearest():
    assert choose(np.array([3, 4, 9, 2, 1]), 10).tolist() == [0, 1, 3, 4]
    assert choose(np.array([8, 8, 8]), 10).tolist() == [0]
    assert choose(np.array([8, 8, 7]), 13).tolist() == [0, 2]  # 15 is nearer than 8, and than 16
    assert choose(np.array([100, 90]), 10).tolist() == []
    assert choose(np.array([], int), 10).tolist() == []
    words = np.random.default_rng(0).integers(1, 1000, 10_000)
    assert abs(int(words[choose(words, 123_456)].sum()) - 123_456) <= 1


def test_shares_of_whole_documents():
    passages = documents_in_passages([300] * 40, kinds=[0, 1] * 20)
    kept = passages[keep_documents(passages, {0: 6000, 1: 1500}, 0, 0)]
    assert len(hashes(kept[kept["source"] == 0])) == 20
    assert len(hashes(kept[kept["source"] == 1])) == 5
    assert not hashes(kept) & hashes(passages[~keep_documents(passages, {0: 6000, 1: 1500}, 0, 0)])

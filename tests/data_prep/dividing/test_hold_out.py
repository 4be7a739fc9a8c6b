"""--hold-out documents: the validation set and the test set consist of whole documents, which are nowhere else."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from data_prep.dividing.hold_out import choose, document_layout, keep_documents
from data_prep.errors import PrepError
from tests.data_prep.dividing.test_mixing import passages_of
from tests.data_prep.test_corpora import texts_of


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


def splits_of(passages, layout):
    return [passages[order] for order in np.split(layout.order, layout.cuts[1:-1])]


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


@pytest.mark.parametrize("drifts", [False, True])
def test_no_held_out_document_is_in_a_mega_batch_whatever_the_order(drifts):
    rng = np.random.default_rng(1)
    num_words, groups = rng.integers(20, 600, 400), np.arange(400) % 4 if drifts else None
    passages = documents_in_passages(num_words, kinds=rng.integers(0, 2, 400), groups=groups)
    found = {}
    for order in (np.arange(len(passages)), rng.permutation(len(passages))):
        shuffled = passages[order]
        layout = document_layout(shuffled, np.array([0, 1]), 2000, 4, None, 7, drifts)
        splits = splits_of(shuffled, layout)
        valid, *batches, test = splits
        assert not hashes(valid) & hashes(test)
        for batch in batches:
            assert not (hashes(valid) | hashes(test)) & hashes(batch)
        assert sorted(layout.order.tolist()) == list(range(len(passages)))
        found[tuple(tuple(split["key"].tolist()) for split in splits)] = [int(s["num_words"].sum()) for s in splits]
        if drifts:
            assert [set(batch["group"].tolist()) for batch in batches] == [{0}, {1}, {2}, {3}]
            assert set(test["group"].tolist()) == {0, 1, 2, 3}
        of_kind_1 = np.average(test["source"], weights=test["num_words"])
        assert abs(of_kind_1 - np.average(passages["source"], weights=passages["num_words"])) < 0.05
    [words] = found.values()
    assert abs(words[0] - 2000) < (700 if drifts else 5)
    assert abs(words[-1] / np.mean(words[1:-1]) - 1) < 0.02
    if not drifts:
        assert np.ptp(words[1:-1]) <= 20
    other = document_layout(passages, np.array([0, 1]), 2000, 4, None, 8, drifts)
    assert hashes(splits_of(passages, other)[-1]) != hashes(test)


def test_the_validation_set_of_one_kind_and_shares_of_whole_documents():
    passages = documents_in_passages([300] * 40, kinds=[0, 1] * 20)
    layout = document_layout(passages, np.array([0, 1]), 600, 3, [1], 0, False)
    assert set(splits_of(passages, layout)[0]["source"].tolist()) == {1}
    kept = passages[keep_documents(passages, {0: 6000, 1: 1500}, 0, 0)]
    assert len(hashes(kept[kept["source"] == 0])) == 20
    assert len(hashes(kept[kept["source"] == 1])) == 5
    assert not hashes(kept) & hashes(passages[~keep_documents(passages, {0: 6000, 1: 1500}, 0, 0)])


def test_too_few_or_too_long_documents_are_an_error():
    for num_words, wanted in ([5000] * 3, 3), ([90_000] + [500] * 8, 3), ([30_000] * 2, 1):
        with pytest.raises(PrepError, match=r"documents are too few or too long|needs at least 1,000"):
            document_layout(documents_in_passages(num_words), np.array([0]), 100, wanted, None, 0, False)
    with pytest.raises(PrepError, match="have only 5,000 words"):
        document_layout(documents_in_passages([5000] * 9, [1] + [0] * 8), np.array([0, 1]), 9000, 2, [1], 0, False)


def test_whole_books_are_held_out(tmp_path, books, alma_prep, capsys):
    out, more = tmp_path / "out", ["--hold-out", "documents", "--duplicates", "exact"]
    assert alma_prep(out, f"books:{books}", more=more) == 0
    texts = [path.read_text(encoding="utf-8") for path in books.iterdir()]
    stream = json.loads((out / "stream.json").read_text(encoding="utf-8"))
    assert stream["settings"]["hold_out"] == "documents"
    # 12 books of 1200 words: one for validation, then a quarter of the others, nearest 3, for the test.
    assert [split["documents"] for split in stream["splits"].values()] == [1, 8, 8, 8, 3]
    for name, count in (("valid", 1), ("test", 3)):
        words = Counter(word for text in texts_of(out, name) for word in text.split())
        assert any(words == Counter(" ".join(some).split()) for some in itertools.combinations(texts, count))
    assert alma_prep(out, f"books:{books}", more=[*more[:-1], "keep"]) == 2
    assert "hold_out=documents needs duplicates=near or exact" in capsys.readouterr().err
    extend = ["--extend", "--duplicates", "keep"]
    from data_prep.cli import main

    assert main([str(out), "--source", f"books:{books}", *extend]) == 2
    assert "holds out whole documents" in capsys.readouterr().err

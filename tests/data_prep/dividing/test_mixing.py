"""Sources in proportion, shares, the validation set of one kind, and streams that drift."""

import tracemalloc

import numpy as np
import pytest

from data_prep.dividing.layout import (
    by_key,
    drifting_layout,
    equal_layout,
    extension_layout,
    mixed,
)
from data_prep.dividing.shares import keep_words, share_out
from data_prep.errors import PrepError
from data_prep.reading.index import ENTRY
from data_prep.sources import Source, SourceFile
from data_prep.sources.dates import groups_of, snapshot_of

ONE_KIND = np.array([0])


def passages_of(words, sources, groups=None, seed=0):
    rng = np.random.default_rng(seed)
    entries = np.zeros(len(words), ENTRY)
    entries["num_words"], entries["source"] = words, sources
    entries["group"] = 0 if groups is None else groups
    entries["key"] = entries["document"] = [rng.bytes(16) for _ in words]
    return entries


def test_one_kind_is_in_the_order_of_keys():
    passages = passages_of([3, 1, 4, 1, 5, 9, 2, 6], [0] * 8)
    assert mixed(passages, ONE_KIND).tolist() == by_key(passages).tolist()
    # And two folders of one kind are one.
    two = passages.copy()
    two["source"] = [0, 1] * 4
    assert mixed(two, np.array([0, 0])).tolist() == by_key(passages).tolist()


def test_any_stretch_has_the_kinds_in_proportion():
    rng = np.random.default_rng(1)
    words = rng.integers(1, 100, 3000)
    passages = passages_of(words, rng.choice(3, 3000, p=[0.6, 0.3, 0.1]))
    order = passages[mixed(passages, np.arange(3))]
    totals = np.bincount(order["source"], order["num_words"])
    for tenth in np.array_split(order, 10):
        shares = np.bincount(tenth["source"], tenth["num_words"], 3) / tenth["num_words"].sum()
        # In a tenth of 300 passages chance alone would leave several percent.
        assert np.abs(shares - totals / totals.sum()).max() < 0.01


def test_shares_use_as_much_as_they_can():
    assert share_out({0: 100, 1: 300}, {0: None, 1: None}) == {0: 100, 1: 300}
    assert share_out({0: 100, 1: 300}, {0: 0.5, 1: 0.5}) == {0: 100, 1: 100}
    assert share_out({0: 100, 1: 300}, {0: 0.1, 1: 0.9}) == {0: 33, 1: 300}
    # Those without a share divide the rest as they are.
    assert share_out({0: 100, 1: 300, 2: 100}, {0: 0.2, 1: None, 2: None}) == {0: 100, 1: 300, 2: 100}
    assert share_out({0: 100, 1: 300, 2: 100}, {0: 0.5, 1: None, 2: None}) == {0: 100, 1: 75, 2: 25}
    with pytest.raises(PrepError, match=r"sum to 1\.2, but must sum to 1 if every source has a share"):
        share_out({0: 1, 1: 1}, {0: 0.6, 1: 0.6})
    with pytest.raises(PrepError, match=r"sum to 0\.5"):
        share_out({0: 1, 1: 1}, {0: 0.2, 1: 0.3})
    with pytest.raises(PrepError, match="nothing is left for the sources without a share"):
        share_out({0: 1, 1: 1}, {0: 1.0, 1: None})


def test_a_source_keeps_the_wanted_number_of_words_and_another_extension_keeps_others():
    passages = passages_of([10] * 20, [0] * 10 + [1] * 10)
    kept = [keep_words(passages, {0: 30, 1: 100}, number) for number in (0, 0, 1)]
    for one in kept:
        assert np.bincount(passages["source"][one]).tolist() == [3, 10]
    assert (kept[0] == kept[1]).all()
    assert (kept[0] != kept[2]).any()


def test_the_validation_set_may_come_from_one_kind():
    passages = passages_of([10] * 3000, [0] * 2000 + [1] * 1000)
    layout = equal_layout(passages, np.array([0, 1]), 500, 4, valid_strata=[1])
    assert layout.cuts[1] == 50
    source = passages["source"][layout.order]
    assert (source[:50] == 1).all()
    for start, end in zip(layout.cuts[1:-1], layout.cuts[2:], strict=True):
        assert end - start == 590
        assert abs((source[start:end] == 1).sum() - 590 * 950 / 2950) <= 1
    assert sorted(layout.order.tolist()) == list(range(3000))


def test_a_drifting_stream_has_one_mega_batch_per_snapshot():
    groups = np.repeat([0, 1, 2], [1000, 3000, 2000])
    passages = passages_of([10] * 6000, [0] * 6000, groups)
    layout = drifting_layout(passages, ONE_KIND, 600, 3, None)
    splits = np.split(groups[layout.order], layout.cuts[1:-1])
    assert [len(split) for split in splits] == [60, 742, 2227, 1485, 1486]
    assert [set(split.tolist()) for split in splits[1:4]] == [{0}, {1}, {2}]
    # Validation and test are of every snapshot, by its size.
    assert np.bincount(splits[0]).tolist() == [10, 30, 20]
    assert np.bincount(splits[4]).tolist() == [248, 743, 495]
    with pytest.raises(
        PrepError, match=r"mega_batch_1 would have 30 words, but a mega-batch or test set needs at least 1,000"
    ):
        drifting_layout(passages_of([10] * 2004, [0] * 2004, [0] * 4 + [1] * 2000), ONE_KIND, 20, 2, None)


def test_memory_is_bounded_by_the_number_of_passages(tmp_path):
    """128 bytes a passage, its entry of 56 included."""
    count = 300_000
    passages = np.zeros(count, ENTRY)
    rng = np.random.default_rng(0)
    passages["key"] = np.frombuffer(rng.bytes(16 * count), "V16")
    passages["num_words"], passages["source"] = rng.integers(1, 100, count), rng.integers(0, 3, count)
    tracemalloc.start()
    layout = equal_layout(passages, np.arange(3), 1000, 4, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(layout.order) == count
    assert 56 + peak / count < 128


def test_an_extension_is_cut_into_equal_mega_batches_alone():
    layout = extension_layout(passages_of([10] * 900, [0] * 900), ONE_KIND, 3, 5)
    assert layout.cuts == [0, 300, 600, 900]
    assert layout.splits == ["mega_batch_5", "mega_batch_6", "mega_batch_7"]
    assert extension_layout(passages_of([10] * 9, [0] * 9), ONE_KIND, 1, 2).cuts == [0, 9]


@pytest.mark.parametrize(
    ("path", "found"),
    {
        "/data/CC-MAIN-2019-13/segments/x/wet/CC-MAIN-20190318132220-20190318153634-00064.warc.wet.gz": "2019-03-25",
        "/data/CC-MAIN-2020-05/x.gz": "2020-01-27",
        "enwiki-20230401-pages-articles.xml.bz2": "2023-04-01",
        "/news/2023-04/a.txt": "2023-04",
        "/news/2023-04-17.jsonl": "2023-04-17",
        "/data/moby-dick-1851.txt": None,
        "/data/id-123456789.txt": None,
        "/data/CC-MAIN-2019-99/x.gz": None,
    }.items(),
)
def test_the_snapshot_is_the_date_in_the_path(path, found):
    assert snapshot_of(path) == found


def files(*paths):
    from pathlib import Path

    return [SourceFile(Path(path), path, 1, 1) for path in paths]


def test_snapshots_are_in_the_order_of_their_dates():
    sources = {
        Source("text", "a"): files("n/2023-05/x.txt", "n/2021-01/x.txt"),
        Source("text", "b"): files("m/2023-05/y.txt"),
    }
    groups, names = groups_of("by-date", sources)
    assert names == ["2021-01", "2023-05"]
    assert list(groups.values()) == [[1, 0], [1]]
    assert groups_of("as-given", sources) == (
        {Source("text", "a"): [0, 0], Source("text", "b"): [1]},
        ["text:a", "text:b"],
    )
    assert groups_of("equal", sources)[1] is None
    with pytest.raises(PrepError, match=r"z\.txt has none \(1 files in all\)"):
        groups_of("by-date", {Source("text", "a"): files("n/2023-05/x.txt", "n/z.txt")})

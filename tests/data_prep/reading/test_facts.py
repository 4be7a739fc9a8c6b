"""Ids and dates of documents are looked up without loading those of all documents."""

import tracemalloc

import numpy as np
import pyarrow
import pytest

from data_prep.reading.facts import FactsWriter, names_of
from data_prep.reading.index import ENTRY

COUNTS = (100_000, 1, 4096)
"""Number of documents in each spool file."""


def name_of(shard, row):
    return f"http://example.com/{shard}/{row}/{'long' * 50}" if row % 3 else ""


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    """Three spool files, in which each document has 10 bytes."""
    folder = tmp_path_factory.mktemp("spool")
    for shard, count in enumerate(COUNTS):
        with FactsWriter(folder / f"{shard:06d}") as facts:
            for row in range(count):
                facts.add(10 * row, shard * 10**6 + row, name_of(shard, row))
    return folder


def test_names_and_dates_of_passages_in_any_order(spool):
    rng = np.random.default_rng(0)
    shards = np.repeat([0, 1, 2], [2000, 2, 500])
    rows = np.concatenate([rng.integers(0, count, n) for count, n in zip(COUNTS, (2000, 2, 500), strict=True)])
    rows[[0, 1, -1]] = [0, 99_999, 4095]
    order = rng.permutation(len(rows))
    shards, rows = shards[order], rows[order]
    entries = np.zeros(len(rows), ENTRY)
    entries["shard"], entries["offset"] = shards, 10 * rows + rng.integers(0, 10, len(rows))  # passages begin anywhere
    names_of(spool, entries[:1])  # imports libraries
    pool, default = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        ids, dates = names_of(spool, entries)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(default)
    assert ids == [name_of(shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
    assert dates.tolist() == (shards * 10**6 + rows).tolist()
    # All ids have 15 MB, and all facts 2.4 MB. 2000 ids have half a megabyte.
    assert pool.max_memory() < 2 << 20
    assert peak < 3 << 19

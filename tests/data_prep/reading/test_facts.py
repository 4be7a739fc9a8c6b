"""Ids and dates of documents are looked up without loading those of all documents."""

import numpy as np
import pyarrow
import pytest

from data_prep.reading.facts import dates_of, documents_path, ids_of, ids_writer, rows_by_shard
from data_prep.reading.index import ENTRY, SPOOLED

COUNTS = (100_000, 1, 4096)
"""Number of documents in each spool file."""


def name_of(shard, row):
    return f"http://example.com/{shard}/{row}/{'long' * 50}" if row % 3 else ""


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    """Three spool files, in which each document has 10 bytes."""
    folder = tmp_path_factory.mktemp("spool")
    for shard, count in enumerate(COUNTS):
        documents = np.zeros(count, SPOOLED)
        documents["offset"], documents["date"] = 10 * np.arange(count), shard * 10**6 + np.arange(count)
        with ids_writer(folder / f"{shard:06d}") as add_id:
            documents["id"] = [add_id(name_of(shard, row)) for row in range(count)]
        np.save(documents_path(folder, shard), documents)
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
    assert dates_of(spool, entries).tolist() == (shards * 10**6 + rows).tolist()
    pool, default = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    try:
        for shard, which, found in rows_by_shard(spool, entries):
            assert found["offset"].tolist() == sorted(rows[which].tolist())
            names = [name or "" for name in ids_of(spool, shard, found["offset"]).to_pylist()]
            assert names == [name_of(shard, row) for row in rows[which].tolist()]
    finally:
        pyarrow.set_memory_pool(default)
    # All ids have 15 MB. 2000 ids have half a megabyte.
    assert pool.max_memory() < 2 << 20

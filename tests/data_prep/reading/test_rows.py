"""The rows that a reading task collects: the bytes of np.save, and little more memory than these bytes."""

import tracemalloc

import numpy as np
import pytest

from data_prep.reading.facts import FACT, FactsWriter
from data_prep.reading.index import SPOOLED
from data_prep.reading.rows import Rows


@pytest.mark.parametrize("count", [0, 1, 65_536, 70_001])
@pytest.mark.parametrize("kind", [FACT, SPOOLED])
def test_rows_have_the_bytes_of_np_save(tmp_path, kind, count):
    raw = np.random.default_rng(count).integers(0, 256, count * kind.itemsize, np.uint8)
    wanted, rows = raw.view(kind), Rows(kind)
    for row in wanted.tolist():
        rows.add(row)
    assert len(rows) == count
    rows.write(tmp_path / "rows.npy")
    np.save(tmp_path / "wanted.npy", wanted)
    assert (tmp_path / "rows.npy").read_bytes() == (tmp_path / "wanted.npy").read_bytes()


def test_facts_of_many_documents_take_little_memory(tmp_path):
    count = 1 << 17
    tracemalloc.start()
    try:
        with FactsWriter(tmp_path / "000000") as facts:
            before, _ = tracemalloc.get_traced_memory()
            for row in range(count):
                facts.add(1000 * row, 1000 + row, "")
            now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now - before < 1.5 * FACT.itemsize * count
    assert np.load(tmp_path / "000000.facts.npy")["offset"].tolist() == list(range(0, 1000 * count, 1000))

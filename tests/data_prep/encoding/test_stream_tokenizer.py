"""The division of the training text of the tokenizer into tasks."""

import numpy as np
import pytest

from data_prep.encoding import stream_tokenizer
from data_prep.running.work_folder import WorkFolder


@pytest.mark.parametrize("pairs", [1, 50, 100, 256, 3000])
def test_there_are_few_enough_tables_to_open_all_of_them(tmp_path, monkeypatch, pairs):
    monkeypatch.setattr(stream_tokenizer, "TASK_BYTES", 1)
    monkeypatch.setattr(stream_tokenizer.Step, "run", lambda *arguments: [])
    num_bytes = np.array([1, 1_000_000] * pairs, np.int64)  # each passage can be a range of its own
    step = stream_tokenizer._count_words(
        ("spool", "index", ""), num_bytes, range(len(num_bytes)), WorkFolder(tmp_path), None
    )
    assert len(step.tasks) <= stream_tokenizer.MAX_TABLES + 1
    assert step.tasks[-1].end == len(num_bytes)

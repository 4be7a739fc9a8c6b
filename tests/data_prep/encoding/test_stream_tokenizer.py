"""The division of the training text of the tokenizer into tasks."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.encoding import stream_tokenizer
from data_prep.reading.index import ENTRY, Index
from data_prep.running.tasks import Step
from data_prep.running.work_folder import WorkFolder
from data_prep.running.workers import Workers


@pytest.mark.parametrize("one_in", [2, 3, 10])
def test_the_sample_to_train_on_has_both_of_two_sources_that_alternate(one_in):
    # The stream has a passage of each source in turn, as with two sources of equal shares and lengths.
    passages = np.zeros(6000, ENTRY)
    passages["key"] = np.sort(np.frombuffer(np.random.default_rng(one_in).bytes(16 * 6000), "S16")).view("V16")
    passages["source"] = np.arange(6000) % 2
    keys = stream_tokenizer._sampling_keys(passages)
    chosen = passages["source"][np.argsort(keys)[: 6000 // one_in]]
    # Within five standard errors of a half. Every second passage would be of one source only.
    assert abs(chosen.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(chosen))


@pytest.mark.parametrize("pairs", [1, 50, 100, 256, 3000])
def test_there_are_few_enough_tables_to_open_all_of_them(tmp_path, monkeypatch, pairs):
    monkeypatch.setattr(stream_tokenizer, "TASK_BYTES", 1)
    monkeypatch.setattr(Step, "run", lambda *arguments: [])
    monkeypatch.setattr(Step, "results", lambda step: [])
    num_bytes = np.array([1, 1_000_000] * pairs, np.int64)  # each passage can be a range of its own
    all_passages = np.arange(len(num_bytes))
    index = Index(Path("index"), "", Path("spool"), [], [])
    work = WorkFolder(tmp_path, executor=Workers)
    step = stream_tokenizer._count_words(index, num_bytes, all_passages, 0, work)
    assert len(step.tasks) <= stream_tokenizer.MAX_TABLES + 1
    assert step.tasks[-1].texts.end == len(num_bytes)

"""The study of few and many arrivals, results/frontier/arrivals.py."""

import json
from types import SimpleNamespace

import pytest

from tests.studies import study_module


@pytest.fixture(scope="module")
def study():
    return study_module("frontier/arrivals.py")


def test_documents_are_cut_and_keep_their_dates(study, tmp_path):
    line = "word " * 90
    documents = [{"date": "1790-01-08", "text": "\n".join([line] * 6)}, {"date": "1791-01-08", "text": "short"}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    study._write_documents(tmp_path / "out.jsonl", tmp_path / "corpus.jsonl")
    found = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["date"], len(one["text"].split())) for one in found] == [("1790-01-08", 270)] * 2


@pytest.mark.parametrize("corpus", ["sotu", "peps"])
def test_runs_with_few_and_many_stages_train_on_the_same_text(study, corpus):
    limits = study.LIMITS[corpus].split(",")
    assert limits == sorted(set(limits))
    assert len(limits) + 1 == study.PERIODS
    for row in study.STUDIES[corpus].rows:
        wait = next(text for text in row.settings if text.startswith("wait="))
        times = json.loads(wait.removeprefix("wait="))
        assert times[0] == study.FIRST
        assert times[-1] == study.PERIODS
        assert len(times) == int(row.name.rsplit("_", 1)[1])
        assert row.steps == "updates_per_mega_batch"


def run(study, level, flops=1.0):
    """Rows with `level` bits per byte on the periods that have arrived, from t = 8 on, and 50 on all others."""
    rows = []
    for t in range(study.PERIODS + 1):
        bits = [level if t >= study.FIRST and period <= t else 50 for period in range(1, study.PERIODS + 1)]
        scores = SimpleNamespace(period_perplexities=[2.0**one for one in bits])
        rows.append(SimpleNamespace(t=t, scores=scores, spent=SimpleNamespace(train_flops=flops)))
    return rows


def test_the_table_has_differences_from_33_stages_and_regrets_against_retraining(study, monkeypatch):
    runs = {
        "sotu_arrivals_anytime_33": {0: run(study, 2), 1: run(study, 4)},
        "sotu_arrivals_anytime_5": {1: run(study, 5)},
        "sotu_arrivals_oracle_5": {0: run(study, 1, flops=3.0), 1: run(study, 2, flops=3.0)},
    }
    monkeypatch.setattr(study.ArrivalStudy, "rows_by_seed", lambda self, name: runs.get(name, {}))
    lines = study._rows("sotu", [{"test": {"tokens": 1, "bytes": 1}}] * study.PERIODS)
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    half, double, none = "-50.0 ± 0.0", "+100.0 ± 0.0", "+0.0 ± 0.0"
    assert cells == [
        ["**anytime**", "33", "", "", "", *[double] * 5, "2", "1.00"],
        ["**anytime**", "5", "+25.0", "+25.0", "+0.0", *["+150.0"] * 5, "1", "1.00"],
        ["retrained on all text, constant rate and average", "5", half, half, none, *[""] * 5, "2", "3.00"],
    ]


def test_there_is_no_table_without_the_runs_to_compare_with(study, monkeypatch):
    monkeypatch.setattr(study.ArrivalStudy, "rows_by_seed", lambda self, name: {})
    assert study._rows("sotu", []) == []

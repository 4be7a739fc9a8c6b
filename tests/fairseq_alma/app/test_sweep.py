"""The order of the jobs of a sweep."""

import json

import pytest

from fairseq_alma.app.sweep import BestByValidation, score_key
from tests.fairseq_alma.report.ledgers import write_vision


def test_the_prequential_score_counts_if_all_runs_have_it():
    whole, old = {"final_validation": 0.5, "prequential_error_rate": 0.6}, {"final_validation": 0.4}
    assert score_key([whole]) == "prequential_error_rate"
    assert score_key([whole, old]) == score_key([old]) == "final_validation"
    assert score_key([{"final_validation": 9.0, "prequential_perplexity": 9.5}]) == "prequential_perplexity"


def test_a_diverged_run_does_not_change_the_rule():
    run = {"final_validation": 9.0, "prequential_perplexity": 9.5}
    assert score_key([run, {"final_validation": float("nan")}]) == "prequential_perplexity"
    assert score_key([{"final_validation": float("nan")}]) == "final_validation"


@pytest.mark.parametrize(
    ("with_old", "order", "title"),
    [
        (False, ["wait=2", "wait=1"], "sorted by prequential validation error rate, best first\n"),
        (True, ["wait=1", "wait=2", "wait=3"], "sorted by final validation error rate, best first (too low for small"),
    ],
)
def test_a_sweep_is_sorted_by_one_rule_and_names_it(tmp_path, capsys, with_old, order, title):
    runs = {"wait=1": (0.1, 0.5), "wait=2": (0.2, 0.4), **({"wait=3": (0.3, None)} if with_old else {})}
    for name, (validation, prequential) in runs.items():
        ahead = {} if prequential is None else {"prequential_error_rate": prequential}
        written = {"num_arrivals": 2, "final_validation": validation, "final": 0.5, "cer": 1.0, "comp": 1, **ahead}
        write_vision(tmp_path / name, [0.9, 0.5, 0.5], digests=["a", "b"], written=written)

    class Config:
        class hydra:  # noqa: N801
            class sweep:  # noqa: N801
                dir = tmp_path

    BestByValidation().on_multirun_end(Config)
    assert [run["run"] for run in json.loads((tmp_path / "sweep.json").read_text())] == order
    assert title in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())

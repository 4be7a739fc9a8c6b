"""The order of the jobs of a sweep."""

import json
import shutil
from math import isnan, nan

import pytest
from omegaconf import OmegaConf

from fairseq_alma.core.metrics import score_of
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.objectives import validation_score
from fairseq_alma.report.reading import read_run
from fairseq_alma.report.sweep import BestByValidation
from tests.fairseq_alma.report.ledgers import only_comparison, write_text, write_vision


def test_the_score_of_one_run_is_prequential_if_it_has_one_and_has_not_diverged():
    assert score_of({"final_validation": 0.5, "prequential_error_rate": 0.6}) == 0.6
    assert score_of({"final_validation": 9.0, "prequential_perplexity": 9.5}) == 9.5
    assert score_of({"final_validation": 0.4}) == 0.4
    assert isnan(score_of({"final_validation": nan, "prequential_error_rate": 0.6}))
    assert isnan(score_of({"final_validation": None}))


def sweep(folder, of_text=False):
    """Return what sweep.json says after the end of a sweep."""
    stream = {"stream": "s"} if of_text else {}
    BestByValidation().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}, **stream}))
    return json.loads((folder / "sweep.json").read_text())


def test_of_language_models_those_without_the_prequential_score_come_last(tmp_path):
    # The report does not choose a run without it, and compares the others by it.
    for name, validation in (("a", 8.0), ("b", 9.5), ("c", 9.0)):
        written = {"num_arrivals": 2, "final_validation": validation, "final": 1.0, "comp": 200}
        if name != "a":
            written["prequential_perplexity"] = validation
        validations = [50.0, validation, validation]
        write_text(tmp_path / name, [9.0, 5.0, 1.0], validations=validations, digests=["a", "b"], written=written)
    assert [run["run"] for run in sweep(tmp_path, of_text=True)] == ["c", "b", "a"]


@pytest.mark.parametrize("wait", [1, 2, 4])
def test_the_average_validation_error_is_that_of_the_report(tmp_path, wait):
    run = write_vision(
        tmp_path / "a", [0.9, 0.6, 0.5, 0.4, 0.3], validations=[None, 0.61, 0.52, 0.43, 0.34], wait=wait,
        digests=["a", "b", "c", "d"],
        written={"num_arrivals": 4, "final_validation": 0.34, "final": 0.3, "cer": 1.8, "comp": 400},
    )  # fmt: skip
    expected = {1: (0.61 + 0.52 + 0.43 + 0.34) / 4, 2: (0.9 + 0.52 + 0.43 + 0.34) / 4, 4: (0.9 * 3 + 0.34) / 4}[wait]
    assert sweep(tmp_path)[0]["average_validation_error_rate"] == pytest.approx(expected)
    assert validation_score(read_run(run), "all", "validation", untrained=0.9) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("with_old", "order", "title"),
    [
        (False, ["wait=2", "wait=1"], "sorted by prequential validation error rate, best first\n"),
        (True, ["wait=3", "wait=1", "wait=2"], "sorted by average validation error rate, best first (too low for sma"),
    ],
)
def test_a_sweep_is_sorted_by_the_measure_of_the_report_and_names_it(tmp_path, capsys, with_old, order, title):
    """Of the run wait=3, there is no prequential score. It is last by the final validation error, which is not used."""
    runs = {"wait=1": (0.5, 0.1, 0.5), "wait=2": (0.8, 0.2, 0.4), **({"wait=3": (0.1, 0.3, None)} if with_old else {})}
    for name, (first, last, prequential) in runs.items():
        ahead = {} if prequential is None else {"prequential_error_rate": prequential}
        written = {"num_arrivals": 2, "final_validation": last, "final": 0.5, "cer": 1.0, "comp": 200, **ahead}
        write_vision(
            tmp_path / name, [0.9, 0.5, 0.5], digests=["a", "b"], written=written, validations=[None, first, last],
            prequential=[None, 0.9, prequential], lr=float(name[-1]),
        )  # fmt: skip

    of_text = {"num_arrivals": 2, "final_validation": 1.0, "final": 1.0, "comp": 200}
    other = write_text(tmp_path / "text", [9.0, 5.0, 1.0], digests=["a", "b"], written=of_text)
    found = sweep(tmp_path)
    shutil.rmtree(other)  # the sweep did not compare it with images, and neither does the report
    assert [run["run"] for run in found] == order
    comparison = only_comparison(tmp_path)
    numbers = all_numbers(comparison)
    ranked = sorted(range(len(numbers)), key=lambda index: numbers[index].validation_score)
    assert [comparison.groups[index].folder.name for index in ranked] == order
    assert title in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_the_name_of_a_job_is_not_cut_within_a_list(tmp_path, capsys):
    for wait in ([1, 2, 4], [1, 3, 4]):
        name = f"lr=1,wait={wait}".replace(" ", "")
        written = {"num_arrivals": 4, "final_validation": 0.2, "final": 0.2, "cer": 1.4, "comp": 400}
        write_vision(tmp_path / name, [0.9, 0.5, 0.4, 0.3, 0.2], wait=wait, digests=list("abcd"), written=written)
    sweep(tmp_path)
    out = capsys.readouterr().out
    assert "wait=[1,2,4]" in out and "wait=[1,3,4]" in out and "lr=1" not in out

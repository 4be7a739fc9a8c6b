"""What the report says about a single long run: its last arrivals, the gate, and forgetting."""

import json
import math
from dataclasses import replace

import pytest

from fairseq_alma.core.ledger import Prequential
from fairseq_alma.report.arrivals import last_arrivals
from fairseq_alma.report.cli import make
from fairseq_alma.report.figures.arrivals import forgetting, period_lines
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.ledgers import text_rows, write_run, write_text

PERIODS = {1: [5.0, 9, 9, 9], 2: [6.0, 5, 9, 9], 3: [8.0, 7, 4, 8], 4: [7.0, 6, 5, 4]}


@pytest.fixture
def run(tmp_path):
    """Four months. The second was scrambled and refused, the third skipped."""
    rows = text_rows([100.0, 9, 8, 8, 6])
    losses = {2: math.log(800), 3: math.log(4), 4: math.log(3)}
    for t, loss in losses.items():
        rows[t] = replace(rows[t], prequential=Prequential(None, loss, 50))
    for t, perplexities in PERIODS.items():
        rows[t] = replace(rows[t], scores=replace(rows[t].scores, period_perplexities=perplexities))
    check = {"text": "validation set", "deployed": 9.0, "new": 20.0, "passed": False}
    refused = {"passed": False, "deployed": 1, "checks": [check]}
    rows[2] = replace(rows[2], scores=replace(rows[2].scores, gate=refused))
    rows[3] = replace(rows[3], is_skipped=True, updated=False, stage=2, scores=rows[2].scores)
    gate = {"passed": True, "deployed": 3, "checks": []}
    rows[4] = replace(rows[4], stage=3, scores=replace(rows[4].scores, gate=gate))
    return write_run(tmp_path / "runs/a", rows)


def test_the_last_arrivals_and_what_the_gate_decided(run):
    (comparison,) = read_runs([run]).comparisons
    table = last_arrivals(comparison)
    assert table.columns == ("arrival", "new text, before", "stage", "validation", "test", "gate")
    assert table.rows == (
        ("4", "3.0", "3", "6.00", "6.00", "passed"),
        ("3", "4.0", "skipped", "8.00", "8.00", ""),
        ("2", "800.0 (unusual)", "2", "8.00", "8.00", "refused (validation set); stage 1 stays"),
        ("1", "", "1", "9.00", "9.00", ""),
    )


def test_the_lines_of_the_picture_are_those_of_the_ledger(run):
    (comparison,) = read_runs([run]).comparisons
    lines = period_lines(comparison.groups[0].counted_runs[0])
    assert lines["before"] == pytest.approx({2: 800, 3: 4, 4: 3})
    assert lines["after"] == {1: 5.0, 2: 5, 4: 4}  # the third was skipped
    assert lines["now"] == {1: 7.0, 2: 6, 4: 4}
    figure = forgetting(comparison, all_numbers(comparison))
    (axes,) = figure.axes
    drawn = {line.get_label(): [*line.get_xdata()] for line in axes.get_lines()}
    assert drawn.items() >= {"before training on it": [2, 3, 4], "just after": [1, 2, 4], "now": [1, 2, 4]}.items()
    assert [*axes.get_lines()[3].get_xdata()] == [2]  # the circle of the unusual month


def test_the_page_of_a_single_run_has_them_and_that_of_several_has_not(run, tmp_path):
    make([str(run)], tmp_path / "one")
    page = (tmp_path / "one/index.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["comparisons"][0]["arrivals"]["rows"][0][0] == "4"
    assert data["comparisons"][0]["figures"][-1] == "forgetting"
    assert page.index("arrivals-section") < page.index("answer-section")
    assert [*(tmp_path / "one/tables").rglob("arrivals.csv")]
    write_text(tmp_path / "runs/b", [100.0, 9, 8, 8, 7], lr=0.5)
    (comparison,) = read_runs([tmp_path / "runs"]).comparisons
    assert last_arrivals(comparison) is None

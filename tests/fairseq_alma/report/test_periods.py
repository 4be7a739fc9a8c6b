"""The matrix of perplexities by period: its averages, the regret, the table and the figure."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.report.figures.maps import perplexities_by_period
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.periods import common_periods, matrix_of, reference_of, regret_of
from fairseq_alma.report.reading import read_run
from fairseq_alma.report.tables import by_period, tables_of
from tests.fairseq_alma.report.ledgers import only_comparison, text_rows, write_run

IN_SEQUENCE = [[100, 200, 400], [80, 50, 100], [80, 40, 20]]
"""Perplexities after each arrival, [arrivals, periods]."""
AT_ONCE = [[8000] * 3, [8000] * 3, [40, 40, 40]]


def write(folder, matrix, wait=1, **settings):
    """Write a run with this matrix. Its perplexity is that of the last period."""
    rows = text_rows([9000.0, *(float(row[-1]) for row in matrix)], wait=wait)
    rows = [rows[0], *(
        replace(row, scores=replace(row.scores, period_perplexities=list(map(float, one))))
        for row, one in zip(rows[1:], matrix, strict=True)
    )]  # fmt: skip
    return write_run(folder, rows, wait=wait, mega_batches=len(matrix), **settings)


@pytest.fixture
def runs(tmp_path):
    """A run in sequence, of two seeds, and one that was trained once on all periods."""
    write(tmp_path / "sequence/0", IN_SEQUENCE, seed=0)
    write(tmp_path / "sequence/1", (4 * np.array(IN_SEQUENCE)).tolist(), seed=1)
    write(tmp_path / "once", AT_ONCE, wait=3)
    return only_comparison(tmp_path)


def group_with_wait(comparison, wait):
    return next(group for group in comparison.groups if group.wait == wait)


def test_the_matrix_is_the_geometric_mean_over_seeds(runs):
    matrix = matrix_of(group_with_wait(runs, 1))
    assert np.exp(matrix) == pytest.approx(2 * np.array(IN_SEQUENCE))


def test_the_regret_is_against_the_run_that_was_trained_once_on_everything(runs):
    reference = reference_of(runs)
    assert runs.groups[reference.index].wait == 3
    regret = regret_of(group_with_wait(runs, 1), reference, common_periods(runs.groups))
    means = {"in_distribution": (200, 100, 40), "backward": (160, 160, 80), "forward": (400, 800, 200)}
    wanted = {name: sum(math.log(value / 40) for value in values) / 3 for name, values in means.items()}
    assert regret == pytest.approx(wanted)


def test_a_stream_that_was_extended_has_all_its_periods(tmp_path):
    """Rows from before the extension have no losses of the new period."""
    shorter = [row[:2] for row in IN_SEQUENCE[:2]]
    write(tmp_path / "sequence", [*shorter, IN_SEQUENCE[2]])
    write(tmp_path / "once", AT_ONCE, wait=3)
    comparison = only_comparison(tmp_path)
    group = group_with_wait(comparison, 1)
    expected = np.array([[100, 200, np.nan], [80, 50, np.nan], [80, 40, 20]])
    assert np.exp(matrix_of(group)) == pytest.approx(expected, nan_ok=True)
    regret = regret_of(group, reference_of(comparison), common_periods(comparison.groups))
    means = {"in_distribution": (100, 50, 20), "backward": (80, 80, 40), "forward": (200,)}
    wanted = {name: sum(math.log(value / 40) for value in values) / len(values) for name, values in means.items()}
    assert regret == pytest.approx(wanted)


def test_a_run_on_an_extended_stream_is_compared_over_the_periods_that_both_runs_have(tmp_path):
    """The second run differs only in that it began when the stream had all its periods."""
    shorter = [row[:2] for row in IN_SEQUENCE[:2]]
    write(tmp_path / "continued", [*shorter, IN_SEQUENCE[2]], lr=0.1)
    write(tmp_path / "fresh", IN_SEQUENCE, lr=0.2)
    write(tmp_path / "once", AT_ONCE, wait=3, lr=0.1)
    table = by_period(only_comparison(tmp_path))
    first, second = (row for row in table.rows if "wait 1" in row[0])
    assert first[1:] == second[1:]
    assert dict(zip(table.columns, first, strict=True))["forward perplexity"] == "200.00"
    assert "did not know yet" in table.note


def test_without_such_a_run_there_is_no_regret(tmp_path):
    write(tmp_path / "a", IN_SEQUENCE)
    write(tmp_path / "b", IN_SEQUENCE, wait=2)
    comparison = only_comparison(tmp_path)
    assert reference_of(comparison) is None
    table = by_period(comparison)
    assert not any("regret" in column for column in table.columns)
    assert len(table.rows) == 2


def test_the_table_of_periods(runs):
    table = next(table for table in tables_of(runs, all_numbers(runs)) if table.name == "periods")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    row = next(row for label, row in rows.items() if "wait 1" in label)
    mean = (100 * 50 * 20) ** (1 / 3)
    assert row["in-distribution perplexity"] == f"{2.5 * mean:.2f} ± {1.5 * mean:.2f}"
    assert row["regret, forward"] == f"{math.log(400 * 800 * 200 / 40**3) / 3:+.3f}"
    once = next(row for label, row in rows.items() if "wait 3" in label)
    assert once["regret, forward"] == ""  # the reference itself
    assert "trained once on all periods" in table.note
    assert "did not know yet" not in table.note


def test_runs_without_periods_have_neither_table_nor_figure(tmp_path):
    write_run(tmp_path / "a", text_rows([9000.0, 100.0, 50.0]), mega_batches=2)
    comparison = only_comparison(tmp_path)
    assert by_period(comparison) is None
    assert perplexities_by_period(comparison, all_numbers(comparison)) is None


def test_the_figure_shows_trained_learners_and_leaves_untrained_ones_grey(runs):
    figure = perplexities_by_period(runs, all_numbers(runs))
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    once = next(axes for title, axes in panels.items() if "wait 3" in title)
    drawn = once.images[0].get_array()
    assert drawn.mask[:2].all() and np.allclose(drawn[2], 40)
    assert {text.get_text() for text in once.texts} == {"40"}
    low, high = once.images[0].get_clim()
    assert (low, high) == pytest.approx((40, 800))  # 8000, of the untrained learner, is not on the scale


@pytest.mark.parametrize("damaged", [["a"], [0.0, 1.0], 3])
def test_a_damaged_row_is_named(tmp_path, damaged):
    folder = write(tmp_path / "a", IN_SEQUENCE)
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "period_perplexities": damaged})
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        RunError,
        match=r"ledger\.jsonl, line 3 is damaged \(period_perplexities.* is .*, expected a (list|number)",
    ):
        read_run(folder)


def test_a_run_that_has_skipped_a_period_is_no_reference(tmp_path):
    run = write(tmp_path / "once", AT_ONCE, wait=3)
    assert reference_of(only_comparison(tmp_path)) is not None
    rows = [replace(row, is_skipped=row.t == 2) for row in Ledger(run / "ledger.jsonl").rows()]
    (run / "ledger.jsonl").unlink()
    Ledger(run / "ledger.jsonl").append(*rows)
    assert reference_of(only_comparison(tmp_path)) is None

"""Policies that decide when to train, simulated on the paths that ledgers have measured."""

import json
import math
import sys
from dataclasses import replace

import pytest

import vision
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.metrics import read_summary
from fairseq_alma.report.cli import main
from fairseq_alma.report.decide import compare, over_streams, policy_named, tables
from fairseq_alma.report.policies import History, cara_cumulative, cara_threshold, upf, waiting
from fairseq_alma.report.reading import read_run, read_runs
from fairseq_alma.report.simulation import Matrix, nearest, path_of
from tests.fairseq_alma.report.ledgers import write_run, write_text

PATHS = ((4,), (1, 4), (2, 4), (3, 4), (1, 2, 4), (1, 3, 4), (2, 3, 4), (1, 2, 3, 4))
"""All paths of four arrivals with a stage at the last one."""


def error_of(path):
    """The test error rate of a model: 3/4 untrained; later arrivals help by a half, earlier stages by a sixteenth."""
    return 2.0 ** -path[-1] - (len(path) - 1) / 64 if path else 0.75


def ledger(path, num_arrivals=4, shift=0.0):
    """Return the rows of a path. A stage at arrival t costs t TFLOP. The known errors are the test errors + shift."""
    rows = []
    for t in range(num_arrivals + 1):
        before, after = (tuple(one for one in path if one <= at) for at in (t - 1, t))
        scores = Scores(num_params=1, forward_flops=1, error_rate=error_of(after))
        spent = Spent(train_flops=t * 10**12) if t in path else Spent()
        ahead = Prequential(error_of(before) + shift, loss=1.0) if t else None
        rows.append(LedgerRow(t, len(after), t in path, scores, spent, prequential=ahead))
    return rows


def matrix(*paths, **more):
    return Matrix({path: ledger(path) for path in paths}, **more)


def write_paths(folder, *paths, shift=0.0, **settings):
    for path in paths:
        write_run(folder / "_".join(map(str, path)), ledger(path, shift=shift), wait=list(path), **settings)


def decide(monkeypatch, *arguments):
    """Run the command in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["alma-report", "decide", *map(str, arguments)])
    try:
        return main()
    except SystemExit as ended:
        return ended.code


# ---- the simulation is the ledger
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Real runs of all paths through three mega-batches, and of two waits that the simulation shall predict."""
    folder = tmp_path_factory.mktemp("runs")
    for wait in ([3], [1, 3], [2, 3], [1, 2, 3], 2, "auto"):
        name = "waits" if wait in (2, "auto") else "paths"
        out = folder / name / str(wait)
        vision.run(dataset="digits", mega_batches=3, epochs=1, width=4, wait=wait, out=out)
    return folder


@pytest.mark.parametrize("wait", [2, "auto"])
def test_the_simulated_score_of_a_wait_is_that_of_its_ledger_to_the_digit(trained, wait):
    paths = [read_run(folder) for folder in sorted((trained / "paths").iterdir())]
    measured = Matrix({path_of(run.rows): run.rows for run in paths})
    assert len(measured.ledgers) == 4
    run, found = read_run(trained / f"waits/{wait}"), measured.simulate(waiting(wait))
    summary = read_summary(trained / f"waits/{wait}")
    assert found.path == path_of(run.rows)
    assert (found.error, found.tflop) == (summary["cer"], summary["comp"] / 1e12)
    assert found.known / 2 == summary["prequential_error_rate"]
    assert found.num_estimated == 0


def test_the_score_of_a_language_model_is_its_average_perplexity_times_the_arrivals():
    perplexities, updated = [900.0, 900.0, 30.1, 30.1], [False, False, True, False]
    rows = [
        LedgerRow(
            t, int(t > 1), updated[t], Scores(1, 1, perplexity=p, validation_perplexity=p + 1), Spent(7 * (t == 2))
        )
        for t, p in enumerate(perplexities)
    ]
    found = Matrix({(2,): rows}).simulate(waiting(2))
    assert found.error == 900.0 + 30.1 + 30.1
    assert found.errors == (901.0, 901.0, 31.1)
    assert (found.path, found.tflop) == ((2,), 7e-12)


# ---- paths that were not run
def test_the_most_similar_path_has_the_same_last_stages_then_a_last_stage_of_similar_size():
    assert nearest((1, 3), [(3,), (1, 3), (2, 3)]) == (1, 3)
    assert nearest((1, 3, 4), [(2, 4), (1, 2, 4), (3, 4)]) == (3, 4)
    assert nearest((1, 2, 4), [(3, 4), (1, 3, 4), (4,)]) == (1, 3, 4)
    assert nearest((2, 4), [(1, 3, 4), (4,)]) == (1, 3, 4)  # its last stage has 1 mega-batch instead of 2, not 4


def test_a_path_that_was_not_run_is_estimated_and_its_arrivals_are_counted():
    # (1, 3) is in no ledger: at arrivals 3 and 4, it is like (3,).
    found = matrix((1, 4), (3, 4)).simulate(waiting([1, 3]))
    assert found.path == (1, 3, 4)
    # 1/2 + 1/2 of (1,), then 1/8 of (3,) and 1/16 - 1/64 of (3, 4)
    assert found.error == 1 + 1 / 8 + 3 / 64
    assert (found.tflop, found.num_estimated) == (1 + 3 + 4, 2)


def test_a_path_whose_parts_are_in_several_ledgers_is_exact():
    all_but_one = [path for path in PATHS if path != (1, 3, 4)]
    found = matrix(*all_but_one, (1, 3)).simulate(waiting([1, 3]))
    assert (found.path, found.num_estimated) == ((1, 3), 0)


def test_the_last_arrival_is_trained_on_if_all_runs_did_that():
    assert matrix((1, 4), (2, 4)).simulate(waiting([1])).path == (1, 4)
    assert matrix((1,), (2, 4)).simulate(waiting([1])).path == (1,)


def test_an_arrival_at_which_no_run_has_trained_is_not_guessed():
    with pytest.raises(RunError, match=r"no run has trained a stage at arrival 3: add one, with wait=\[3\]"):
        matrix((1, 4), (2, 4)).simulate(waiting(3))


def test_the_error_of_the_estimate_is_that_of_ledgers_that_are_left_out():
    # Without (1, 3, 4), its models (1, 3) and (1, 3, 4) are estimated by (3,) and (3, 4). Each has 1/64 more.
    cer = 0.5 + 0.5 + (1 / 8 - 1 / 64) + (1 / 16 - 2 / 64)
    assert matrix((1, 4), (3, 4), (1, 3, 4)).estimation_errors()[-1] == (pytest.approx(2 / 64 / cer), 0.0)
    # No other run has trained at arrival 1 or 3.
    assert matrix((1, 4), (3, 4)).estimation_errors() == []
    assert matrix((1, 4)).estimation_errors() == []


def test_with_new_networks_on_all_data_only_the_last_arrival_matters():
    found = matrix((1, 4), (3, 4), forgets_path=True).simulate(waiting([1, 3]))
    assert (found.path, found.num_estimated) == ((1, 3, 4), 0)


def test_the_best_path_in_hindsight():
    assert matrix(*PATHS).best().path == (1, 2, 3, 4)
    # With a price of 1/8: (1, 4) costs 0.5 * 3 + 3/64 + 5/8, (1, 2, 4) costs 0.5 + 2 * (1/4 - 1/64) + 2/64 + 7/8,
    # and (4,) costs 3 * 3/4 + 1/16 + 4/8.
    assert matrix(*PATHS).best(0.125).path == (1, 2, 4)
    assert matrix(*PATHS).best(0.125).cost(0.125) == 0.5 + 2 * 15 / 64 + 2 / 64 + 7 / 8
    # Only models of these two paths are exact, unless models forget their path. The CER of (2, 4) is 3/64 + 5/4; that
    # of (1, 4) is 3/64 + 3/2.
    assert matrix((1, 4), (2, 4)).best().path == (2, 4)
    assert matrix((1, 4), (2, 4), forgets_path=True).best().path == (1, 2, 4)


# ---- policies
def history(errors, stages=(), next_tflop=1.0, price=0.0):
    return History(len(errors), tuple(stages), tuple(errors), (1.0,) * len(stages), next_tflop, price)


def test_a_policy_sees_what_was_known_before_the_decision_and_no_test_score():
    seen = []
    paths = {path: ledger(path, shift=0.125) for path in PATHS}
    Matrix(paths).simulate(lambda known: bool(seen.append(known)) or known.t == 2, price=0.5)
    assert seen == [
        History(1, (), (0.875,), (), 1.0, 0.5),
        History(2, (), (0.875, 0.875), (), 2.0, 0.5),
        History(3, (2,), (0.875, 0.875, 0.375), (2.0,), 3.0, 0.5),
        History(4, (2,), (0.875, 0.875, 0.375, 0.375), (2.0,), 4.0, 0.5),
    ]


def test_cara_trains_at_a_threshold_of_the_last_error_or_of_the_sum_since_the_last_stage():
    known = history([0.9, 0.25, 0.25], stages=[1])
    assert [cara_threshold(level)(known) for level in (0.2, 0.25, 0.3)] == [True, True, False]
    assert [cara_cumulative(level)(known) for level in (0.4, 0.5, 0.6)] == [True, True, False]


def test_upf_trains_at_once_and_then_if_the_forecast_saving_is_above_the_cost():
    assert upf(0)(history([0.9], price=1000.0))
    known = history([0.9, 0.5, 0.5, 0.5], stages=[1])
    # Before errors say more, the error falls as t^-0.5: a model of arrival 4 has half the error, 1 of about 4 * 0.5.
    assert upf(0)(known)
    assert upf(0)(replace(known, price=0.5))
    assert not upf(0)(replace(known, price=1.5))
    assert not upf(0)(replace(known, price=0.5, next_tflop=3.0))
    assert not upf(3)(replace(known, price=0.5))


def test_policies_without_a_known_error_wait():
    assert not cara_threshold(0.1)(history([math.nan]))
    assert not upf(0)(history([math.nan, math.nan], stages=[1], price=1.0))


def test_policies_by_name(tmp_path, monkeypatch):
    known = history([0.9, 0.5, 0.5], stages=[1])
    names = ("2", "3", "geometric:1", "cara-threshold:0.6", "cara-periodic:2", "upf:0", "[1,3]", "[1,4]")
    assert [policy_named(name)(known) for name in names] == [True, False, True, False, True, True, True, False]
    (tmp_path / "own_policy.py").write_text("def often(known): return known.t % 3 == 0\ndef bad(known): return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert policy_named("own_policy:often")(known)
    with pytest.raises(SettingError, match=r"--policy own_policy:bad: bad failed with ZeroDivisionError"):
        policy_named("own_policy:bad")(known)
    for name, message in {
        "upf": "expected upf:NUMBER",
        "upf:nan": "expected upf:NUMBER",
        "cara-threshold:-inf": "expected cara-threshold:NUMBER",
        "cara-periodic:0": "expected cara-periodic:NUMBER",
        "cara-periodic:2.5": "expected cara-periodic:NUMBER",
        "[3,1]": "must be a list of arrivals",
        "[3": "must be an integer of at least 1",
        "0": "wait=0 must be",
        "geometric:0": "with a ratio above 0",
        "sometimes": "must have the form MODULE:FUNCTION",
    }.items():
        with pytest.raises(SettingError, match=message):
            policy_named(name)


# ---- the command
def cells(table):
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_the_table_has_error_cost_and_regret_over_the_seeds(tmp_path):
    write_paths(tmp_path / "a", *PATHS, seed=0)
    write_paths(tmp_path / "b", *PATHS, seed=1)
    [table] = tables(compare(read_runs([tmp_path]), price=0.125)).values()
    found = cells(table)
    # CER of wait 2: 3/4 + 1/4 + 1/4 + 3/64 = 1.297; cost: + 6 / 8. The best path costs 1.875 (see above).
    assert found["wait 2"] == {
        "policy": "wait 2", "chosen": "", "seeds": "2", "CER": "1.297 ± 0.000", "training TFLOP": "6",
        "cost": "2.047 ± 0.000", "regret": "0.172 ± 0.000", "stages at": "2, 4", "estimated": "0",
    }  # fmt: skip
    assert found["best path in hindsight"]["stages at"] == "1, 2, 4"
    assert "(8 paths were run)" in table.note


def test_numbers_are_chosen_by_the_known_errors_of_other_streams_only(tmp_path):
    def chosen(own, other):
        """Return the threshold of CARA on mnist. The known errors of the two streams are shifted by these numbers."""
        folder = tmp_path / f"{own} {other}"
        write_paths(folder / "mnist", *PATHS, dataset="mnist", shift=own)
        write_paths(folder / "digits", *PATHS, dataset="digits", shift=other)
        return float(cells(tables(compare(read_runs([folder])))["mnist_B4"])["CARA, threshold"]["chosen"])

    first = chosen(own=0.0, other=0.0)
    assert chosen(own=0.125, other=0.0) == first
    # The levels of the other stream's errors are higher by its shift.
    assert chosen(own=0.0, other=0.125) == pytest.approx(first + 0.125, abs=0.001)


def test_several_streams_have_a_table_of_their_own_and_one_over_all(tmp_path):
    write_paths(tmp_path / "a", *PATHS)
    write_paths(tmp_path / "b", (4,), (1, 4), dataset="digits")
    compared = compare(read_runs([tmp_path]))
    found = tables(compared)
    assert list(found) == ["digits_B4", "mnist_B4"]
    assert "Not simulated: wait 1 (no run has trained a stage at arrival 2: add one" in found["digits_B4"].note
    over_all = cells(over_streams(compared))
    digits, mnist = (float(over_all["wait 4"][name]) for name in ("digits, B = 4", "mnist, B = 4"))
    assert float(over_all["wait 4"]["regret, %"].split(" ±")[0]) == pytest.approx((digits + mnist) / 2, abs=0.1)
    assert "wait 4" in over_all and "wait 1" not in over_all
    regrets = [float(row["regret, %"].split(" ±")[0]) for row in over_all.values()]
    assert regrets == sorted(regrets)


def test_one_seed_of_one_stream_chooses_nothing_and_other_runs_are_left_out(tmp_path):
    write_paths(tmp_path / "a", (4,), (1, 4))
    rows = [replace(row, is_skipped=row.t == 2) for row in ledger((1, 2, 4))]
    write_run(tmp_path / "skipped", rows, wait=[1, 2, 4])
    data = read_runs([tmp_path])
    [table] = tables(compare(data)).values()
    assert "CARA, threshold" not in cells(table)
    assert any("it was forked, or has skipped mega-batches" in note for note in data.notes)


def test_the_command_prints_and_writes_the_tables(tmp_path, monkeypatch, capsys):
    write_paths(tmp_path / "runs", *PATHS)
    (tmp_path / "own_rule.py").write_text("def half(known): return known.errors[-1] > 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert decide(monkeypatch, "runs", "--price", 0.125, "--policy", "own_rule:half", "--out", "report") == 0
    printed = capsys.readouterr().out
    assert "| own_rule:half |" in printed
    assert (tmp_path / "report/tables/mnist_B4/decide.md").read_text() in printed
    assert decide(monkeypatch, "runs", "--price", -1) == 2
    assert "--price -1: give a number of at least 0" in capsys.readouterr().err
    assert decide(monkeypatch, "runs", "--policy", "own_rule:gone") == 2
    assert "the module own_rule has no function gone" in capsys.readouterr().err
    settings = json.loads((tmp_path / "runs/4/settings.json").read_text())
    (tmp_path / "runs/4/settings.json").write_text(json.dumps({**settings, "arrivals": 9, "mega_batches": 9}))
    assert decide(monkeypatch, "runs/4") == 2
    assert "no run is finished" in capsys.readouterr().err


def test_streams_whose_names_differ_in_a_sign_have_tables_of_their_own(tmp_path):
    for name, stream, digest, lr in (("1", "a-b", "1", 1.0), ("2", "a-b", "1", 0.5), ("3", "a_b", "2", 1.0)):
        write_text(tmp_path / name, [900.0, 50.0, 20.0], stream=stream, evaluated_on=[digest], lr=lr)
    found = tables(compare(read_runs([tmp_path])))
    assert len(found) == 3 and {table.title.split(",")[0] for table in found.values()} == {"a-b", "a_b"}


@pytest.mark.parametrize(("sizes", "best"), [({1: 1}, "1, 2, 4"), ({1: 1, 2: 9}, "2, 4")])
def test_a_model_that_grows_does_not_forget_its_path(tmp_path, sizes, best):
    for path in ((1, 4), (2, 4)):
        rows = [
            replace(row, scores=replace(row.scores, num_params=sizes.get(row.stage, max(sizes.values()))))
            for row in ledger(path)
        ]
        write_run(tmp_path / str(path[0]), rows, wait=list(path), from_scratch=True, replay="all")
    [table] = tables(compare(read_runs([tmp_path]))).values()
    assert cells(table)["best path in hindsight"]["stages at"] == best

import json
from dataclasses import replace

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import Ledger, LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.metrics import (
    average_perplexity,
    average_perplexity_after_first_stage,
    cumulative_error_rate,
    cumulative_flops,
    cumulative_params,
    mean_and_standard_error,
    prequential_error_rate,
    prequential_perplexity,
    summarize,
)


def vision_rows():
    """B = 4, w = 3: untrained until t = 3, and a last group of one that makes the learner grow."""
    untrained = Scores(num_params=10, forward_flops=2, error_rate=0.9)
    first = Scores(num_params=10, forward_flops=2, error_rate=0.3, validation_error_rate=0.25)
    second = Scores(num_params=15, forward_flops=3, error_rate=0.2, validation_error_rate=0.0)
    return [
        LedgerRow(0, 0, False, untrained),
        LedgerRow(1, 0, False, untrained),
        LedgerRow(2, 0, False, untrained),
        LedgerRow(3, 1, True, first, Spent(train_flops=600, num_updates=6, train_seconds=1.5, validation_flops=50)),
        LedgerRow(4, 2, True, second, Spent(train_flops=300, num_updates=2, train_seconds=0.5, validation_flops=50)),
    ]


def text_rows(perplexities, first_trained_t):
    """Row t of B = len(perplexities) - 1, trained from `first_trained_t` on."""
    return [
        LedgerRow(t, int(t >= first_trained_t), t == first_trained_t, Scores(1, 1, perplexity=perplexity))
        for t, perplexity in enumerate(perplexities)
    ]


def test_waiting_is_charged_to_the_learner_and_the_untrained_arrival_is_not():
    # 0.9 + 0.9 while waiting, then 0.3 + 0.2; the 0.9 of t = 0 is left out.
    assert cumulative_error_rate(vision_rows()) == pytest.approx(2.3)


def test_average_perplexity_charges_waiting_and_leaves_t_0_out():
    rows = text_rows([100.0, 100.0, 40.0, 10.0], first_trained_t=2)
    assert average_perplexity(rows) == 50.0
    assert average_perplexity_after_first_stage(rows) == 25.0


def test_before_the_first_stage_there_is_no_average_after_it():
    assert average_perplexity_after_first_stage(text_rows([100.0, 100.0], first_trained_t=2)) is None


def test_mem_sums_parameters_from_t_0_on():
    assert cumulative_params(vision_rows()) == 10 + 10 + 10 + 10 + 15


def test_comp_sums_training_and_not_validation():
    assert cumulative_flops(vision_rows()) == 900


def test_flops_beyond_what_a_float_counts_stay_exact(tmp_path):
    huge = 10**18 + 1  # a float would round it to 10**18
    rows = [LedgerRow(t, 1, True, Scores(huge, 1, perplexity=2.0), Spent(train_flops=huge)) for t in range(3)]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for row in rows:
        ledger.append(row)
    assert cumulative_flops(ledger.rows()) == cumulative_params(ledger.rows()) == 3 * 10**18 + 3
    assert summarize(ledger.rows())["comp"] == 3 * 10**18 + 3


def test_asking_error_rates_of_a_ledger_of_perplexities_is_an_error():
    with pytest.raises(ValueError, match="lacks the requested metric"):
        cumulative_error_rate(text_rows([8.0, 4.0], first_trained_t=1))


def test_the_summary_of_error_rates():
    summary = summarize(vision_rows())
    assert summary.pop("cer") == pytest.approx(2.3)
    assert summary == {
        "final": 0.2,
        "final_validation": 0.0,
        "mem": 55,
        "comp": 900,
        "num_arrivals": 4,
        "num_stages": 2,
    }


def test_the_summary_of_perplexities():
    assert summarize(text_rows([8.0, 8.0, 4.0], first_trained_t=2)) == {
        "average_perplexity": 6.0,
        "average_perplexity_after_first_stage": 4.0,
        "final": 4.0,
        "final_validation": None,
        "mem": 3,
        "comp": 0,
        "num_arrivals": 2,
        "num_stages": 1,
    }


def with_prequential(rows, error_rates):
    """Return the rows with these prequential error rates; None leaves a row as it is."""
    return [
        row if rate is None else replace(row, prequential=Prequential(rate, loss=1.0))
        for row, rate in zip(rows, error_rates, strict=True)
    ]


def test_the_prequential_error_is_the_mean_over_the_second_to_last_arrival():
    # w = 3: at t = 2 and 3 the predictor is untrained and is charged 0.75 and 0.875; at t = 4 it is that of stage 1.
    rows = with_prequential(vision_rows(), [None, 0.5, 0.75, 0.875, 0.25])
    assert prequential_error_rate(rows) == (0.75 + 0.875 + 0.25) / 3
    assert summarize(rows)["prequential_error_rate"] == 0.625


@pytest.mark.parametrize("error_rates", [[None] * 5, [None, 0.5, 0.75, None, 0.25], [None, 0.5, None, 0.75, 0.25]])
def test_the_prequential_error_is_missing_if_one_arrival_lacks_it(error_rates):
    rows = with_prequential(vision_rows(), error_rates)
    assert prequential_error_rate(rows) is None
    assert "prequential_error_rate" not in summarize(rows)


def test_one_arrival_has_no_prequential_error():
    assert prequential_error_rate(with_prequential(vision_rows(), [None, 0.5, 0.75, 0.75, 0.25])[:2]) is None


def test_the_prequential_perplexity_is_the_geometric_mean_of_the_validation_perplexities():
    # Untrained at t = 0 (left out) and t = 1: sqrt(1000 * 10) = 100.
    rows = [LedgerRow(t, t // 2, t == 2, Scores(1, 1, perplexity=5.0, validation_perplexity=value))
            for t, value in enumerate([2000.0, 1000.0, 10.0])]  # fmt: skip
    assert prequential_perplexity(rows) == pytest.approx(100.0)
    assert summarize(rows)["prequential_perplexity"] == pytest.approx(100.0)
    diverged = [*rows, LedgerRow(3, 2, True, Scores(1, 1, perplexity=5.0, validation_perplexity=float("nan")))]
    assert prequential_perplexity(diverged) is None
    assert prequential_perplexity(text_rows([8.0, 8.0, 4.0], first_trained_t=2)) is None


def test_the_averages_of_a_matrix_of_perplexities_are_geometric_means():
    matrix = [[9.0, 9.0, 9.0], [2.0, 8.0, 32.0], [4.0, 2.0, 2.0], [1.0, 16.0, 4.0]]  # row 0 is untrained
    rows = [
        replace(row, scores=replace(row.scores, period_perplexities=perplexities))
        for row, perplexities in zip(text_rows([9.0, 8.0, 4.0, 3.0], first_trained_t=1), matrix, strict=True)
    ]
    summary = summarize(rows)
    assert summary["backward_perplexity"] == pytest.approx((4 * 1 * 16) ** (1 / 3))
    assert summary["in_distribution_perplexity"] == pytest.approx((2 * 2 * 4) ** (1 / 3))
    assert summary["forward_perplexity"] == pytest.approx((8 * 32 * 2) ** (1 / 3))
    # With one arrival there is nothing below the diagonal, and without periods there are no averages.
    assert "backward_perplexity" not in summarize(rows[:2])
    assert not {name for name in summarize(text_rows([9.0, 8.0], first_trained_t=1)) if "backward" in name}
    assert LedgerRow.from_json(json.loads(json.dumps(rows[1].to_json()))) == rows[1]


def test_a_row_with_prequential_scores_is_read_as_it_was_written(tmp_path):
    row = replace(vision_rows()[0], prequential=Prequential(0.25, 1.5))
    assert row.to_json()["prequential_error_rate"] == 0.25 and row.to_json()["prequential_loss"] == 1.5
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row)
    assert ledger.rows() == [row]
    assert not any(name.startswith("prequential") for name in vision_rows()[0].to_json())


def test_there_is_no_summary_before_the_first_arrival():
    with pytest.raises(ValueError, match="the ledger has no arrival yet"):
        summarize(vision_rows()[:1])


def test_what_two_steps_spent_adds_up():
    total = Spent(100, 2, 0.5, 7) + Spent(10, 1, 0.25, 3)
    assert total == Spent(train_flops=110, num_updates=3, train_seconds=0.75, validation_flops=10)


def test_scores_hold_an_error_rate_or_a_perplexity():
    with pytest.raises(ValueError, match="either"):
        Scores(1, 1)
    with pytest.raises(ValueError, match="either"):
        Scores(1, 1, error_rate=0.5, perplexity=2.0)


def test_a_row_is_flat_json_without_what_does_not_apply():
    row = LedgerRow(1, 1, True, Scores(10, 2, perplexity=4.5, num_experts=2), Spent(100, 2, 0.5, 7))
    assert row.to_json() == {
        "t": 1,
        "stage": 1,
        "updated": True,
        "num_params": 10,
        "forward_flops": 2,
        "perplexity": 4.5,
        "num_experts": 2,
        "train_flops": 100,
        "num_updates": 2,
        "train_seconds": 0.5,
        "validation_flops": 7,
    }


def test_rows_come_back_equal_from_the_file(tmp_path):
    rows = vision_rows()
    rows.append(LedgerRow(5, 2, False, Scores(15, 3, error_rate=0.1 + 0.2, expert_load=[[0.25, 0.75]], overflow=0.1)))
    ledger = Ledger(tmp_path / "new" / "ledger.jsonl")
    assert ledger.rows() == []
    for row in rows:
        ledger.append(row)
    assert Ledger(ledger.path).rows() == rows
    assert ledger.path.read_text().count("\n") == 6


def test_keys_of_a_later_release_are_passed_over():
    row = vision_rows()[3]
    assert LedgerRow.from_json({**row.to_json(), "carbon_grams": 3}) == row


@pytest.fixture
def ledger(tmp_path):
    """A file of three rows."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for row in vision_rows()[:3]:
        ledger.append(row)
    return ledger


@pytest.mark.parametrize(
    "damaged",
    [b'{"t": 1, "stage"', b"", b"[]", b"null", b'{"t": 1}', b"\xff\x00\x00",
     b'{"t": 1, "stage": 0, "updated": false, "num_params": 1, "forward_flops": 1}'],
)  # fmt: skip
def test_a_damaged_line_is_named_by_file_and_number(ledger, damaged):
    lines = ledger.path.read_bytes().splitlines()
    ledger.path.write_bytes(b"\n".join([lines[0], damaged, lines[2], b""]))
    with pytest.raises(RunError, match=r"ledger.jsonl, line 2 is damaged .*: restore the file"):
        ledger.rows()


def test_a_lost_line_is_named(ledger):
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text(lines[0] + lines[2])
    with pytest.raises(RunError, match=r"ledger.jsonl, line 2 contains arrival t=2, expected t=1"):
        ledger.rows()


def test_wherever_the_last_line_was_cut_it_is_no_row_and_append_mends_it(ledger):
    whole = ledger.path.read_bytes()
    last_line = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last_line) + 1):
        ledger.path.write_bytes(whole[:-cut])
        assert ledger.rows() == vision_rows()[:2]
        ledger.append(vision_rows()[2])
        assert ledger.path.read_bytes() == whole


def test_bytes_that_are_no_text_after_the_last_line_are_cut_off(ledger):
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + b"\x00\xc3\xff")
    assert len(ledger.rows()) == 3
    ledger.append(vision_rows()[3])
    assert ledger.path.read_bytes().startswith(whole)
    assert ledger.rows() == vision_rows()[:4]


def test_a_ledger_with_the_line_ends_of_windows_loses_nothing(ledger):
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"\n", b"\r\n"))
    ledger.append(vision_rows()[3])
    assert ledger.rows() == vision_rows()[:4]


def test_a_diverged_perplexity_comes_back(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(LedgerRow(0, 0, False, Scores(1, 1, perplexity=float("inf"))))
    assert ledger.rows()[0].scores.perplexity == float("inf")


def test_mean_and_standard_error_over_three_seeds():
    # CER 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, standard error sqrt(7 / 3).
    over_seeds = mean_and_standard_error([{"cer": 1.0, "mem": 5}, {"cer": 2.0, "mem": 5}, {"cer": 6.0, "mem": 5}])
    assert over_seeds["mean"] == {"cer": 3.0, "mem": 5.0}
    assert over_seeds["stderr"] == {"cer": pytest.approx((7 / 3) ** 0.5), "mem": 0.0}
    assert over_seeds["per_seed"][2] == {"cer": 6.0, "mem": 5}


def test_one_seed_has_no_standard_error():
    assert mean_and_standard_error([{"cer": 1.5}]) == {
        "mean": {"cer": 1.5},
        "stderr": {"cer": None},
        "per_seed": [{"cer": 1.5}],
    }


def test_a_scalar_that_one_seed_lacks_has_no_mean():
    per_seed = [{"final": 2.0, "final_validation": None}, {"final": 4.0, "final_validation": 3.0}]
    assert mean_and_standard_error(per_seed)["mean"] == {"final": 3.0}


def test_the_mean_over_seeds_is_json():
    assert json.loads(json.dumps(mean_and_standard_error([{"comp": 10**30}, {"comp": 10**30}])))["stderr"]["comp"] == 0

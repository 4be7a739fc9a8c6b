"""The setting wait=auto: how a ratio follows from errors, and that a run repeats its decisions."""

import math
from dataclasses import replace

import pytest

from fairseq_alma.core.error_curve import (
    MAX_RATIO,
    PRIOR_EXPONENT,
    PRIOR_WEIGHT,
    ErrorCurve,
    auto_ratio,
    best_ratio,
    known_error,
    relative_charge,
    stage_exponent,
)
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.ledger import Prequential, Scores
from tests.fairseq_alma.core.tiny_learner import TinyEvaluator, TinyLearner, ledger_without_seconds, tiny_run


def curve_of(errors_by_num_past):
    curve = ErrorCurve()
    for num_past, errors in errors_by_num_past.items():
        for error in errors:
            curve.add(num_past, error)
    return curve


def test_the_exponent_of_a_power_law_is_found_and_drawn_towards_the_prior():
    # Errors N^-0.2 at N = 1, e, e^2, e^3 would need non-integers; at 1, 2, 4, 8, log2 N is 0, 1, 2, 3, with variance
    # sum 5 log(2)^2 for one error each. Each error counts 100 times.
    curve = curve_of({num: [num**-0.2] * 100 for num in (1, 2, 4, 8)})
    variance = 100 * 5 * math.log(2) ** 2
    expected = (PRIOR_WEIGHT * PRIOR_EXPONENT + variance * 0.2) / (PRIOR_WEIGHT + variance)
    assert curve.exponent() == pytest.approx(expected)
    assert curve.exponent() == pytest.approx(0.2, abs=0.03)
    # With one error each, the prior counts more.
    assert curve_of({num: [num**-0.2] for num in (1, 2, 4, 8)}).exponent() == pytest.approx(
        (20 * 0.5 + 5 * math.log(2) ** 2 * 0.2) / (20 + 5 * math.log(2) ** 2)
    )


def test_errors_of_the_untrained_predictor_and_unknown_ones_do_not_count():
    curve = curve_of({0: [0.9], 1: [0.5], 2: [0.4], 3: [0.3]})
    curve.add(5, None)
    curve.add(5, math.inf)
    curve.add(5, 0.0)  # its logarithm does not exist
    assert curve.means == {1: (0.5, 1), 2: (0.4, 1), 3: (0.3, 1)}
    assert curve.exponent() is None
    curve.add(5, 0.4)
    assert curve.means[5] == (0.2, 2)
    assert curve.exponent() is not None


def test_the_charge_is_the_sum_over_a_stream():
    """For b = 0.5 and s = 0, stages at 1, 4, 16, ..., 4^11 (ratio 3) cost the sum of 3 N N^-0.5 = 3 (2^12 - 1)."""
    stages = [4**k for k in range(12)]
    total = sum(3 * num * num**-0.5 for num in stages)
    assert total == 3 * (2**12 - 1)
    last = 4**12
    assert total / last**0.5 == pytest.approx(relative_charge(3, 0.5, 0.0), rel=1e-3)
    # With s = 0.15, the error of a stage is larger by (n / N)^-0.15, and n is three quarters of N.
    assert relative_charge(3, 0.5, 0.15) == pytest.approx(3 * 0.75**-0.15)


def test_waits_are_short_if_the_error_falls_fast_and_long_if_a_small_stage_costs_much():
    assert best_ratio(0.3, 0.0) == 0.0
    ratios = [best_ratio(exponent, 0.15) for exponent in (0.8, 0.5, 0.4, 0.2)]
    assert ratios == [0.35, 0.55, 0.65, MAX_RATIO]
    assert best_ratio(5.0, 0.15) == best_ratio(0.9, 0.15)
    assert best_ratio(0.5, 0.05) < best_ratio(0.5, 0.15)


def test_replay_makes_the_size_of_a_stage_unimportant():
    assert stage_exponent(False) == 0.15
    assert stage_exponent(0.75) == 0.15 / 4
    assert stage_exponent("auto") == stage_exponent(0.5) == 0.15 / 2
    assert stage_exponent("uniform") == stage_exponent("all") == 0
    assert auto_ratio(ErrorCurve(), "uniform", 0.5) == (0.0, "replay=uniform: waiting would only delay")


def test_the_default_is_used_while_the_curve_is_not_known_or_does_not_fall():
    assert auto_ratio(ErrorCurve(), False, 0.5)[0] == 0.5
    flat = curve_of({num: [0.5] * 100 for num in (1, 2, 4, 8)})
    assert auto_ratio(flat, False, 0.5) == (
        0.5,
        "ratio 0.5, because the error does not fall as a power law (N^-0.04)",  # 20 * 0.5 / (20 + 500 log(2)^2)
    )
    steep = curve_of({num: [num**-0.8] * 1000 for num in (1, 2, 4, 8)})
    assert auto_ratio(steep, False, 0.5) == (0.35, "ratio 0.35, because the error falls as N^-0.80")


def test_the_known_error_is_the_mean_over_the_seeds_and_never_a_test_score():
    scores = Scores(1, 1, error_rate=0.1, validation_error_rate=0.2)
    assert known_error([Prequential(0.25, 1.0), Prequential(0.75, 1.0)], [scores, scores]) == 0.5
    assert known_error([None, None], [scores, scores]) is None
    text = Scores(1, 1, perplexity=10.0, validation_perplexity=30.0)
    assert known_error(None, [text]) == 30.0
    assert known_error(None, [replace(text, validation_perplexity=None)]) is None


class PowerLaw(TinyEvaluator):
    """The validation perplexity is 100 N^-0.2 after N numbers; the test perplexity is that of the tiny learner."""

    def __init__(self, test_numbers=range(1, 8)):
        super().__init__()
        self.test_set.numbers = frozenset(test_numbers)

    def __call__(self, learner):
        (scores,) = super().__call__(learner)
        return [replace(scores, validation_perplexity=100 * max(1, len(learner.numbers)) ** -0.2)]


def auto_run(out, num_mega_batches=30, **arguments):
    rows = tiny_run(out, num_mega_batches, wait="auto", **{"evaluate": PowerLaw(), **arguments})
    return [row.t for row in rows if row.updated]


def test_the_errors_before_the_first_new_mega_batch_are_no_points_of_the_curve(tmp_path):
    assert auto_run(tmp_path, num_known=10)[0] == 15  # the ratio is 0.5
    *_, (t, reason) = [(one["t"], one["reason"]) for one in JsonLines(tmp_path / "decisions.jsonl").values()[10:15]]
    assert (t, "errors of 4 stages are not known yet" in reason) == (15, True)


def test_each_decision_is_recorded_with_its_reason(tmp_path):
    # At t = 6, the perplexities after 1, 2, 3 (twice) and 5 are known. The weighted variance of log N is 1.38, so b is
    # (20 * 0.5 + 1.38 * 0.2) / (20 + 1.38) = 0.48. It falls to 0.41 when 9 more are needed after 13.
    assert auto_run(tmp_path) == [1, 2, 3, 5, 8, 13, 22, 30]
    lines = JsonLines(tmp_path / "decisions.jsonl").values()
    assert lines[3] == {
        "t": 4,
        "due": False,
        "reason": "1 new after 3: ratio 0.5, because errors of 4 stages are not known yet",
    }
    assert lines[5] == {"t": 6, "due": False, "reason": "1 new after 5: ratio 0.55, because the error falls as N^-0.48"}
    assert lines[29] == {"t": 30, "due": True, "reason": "the stream ends"}


def test_decisions_depend_neither_on_the_test_set_nor_on_the_length_of_the_stream(tmp_path):
    auto_run(tmp_path / "a", 14)
    auto_run(tmp_path / "b", 18, evaluate=PowerLaw(test_numbers=range(20, 30)))
    first, second = (JsonLines(tmp_path / name / "decisions.jsonl").values() for name in "ab")
    assert first[:13] == second[:13]


def test_a_stream_that_is_extended_continues_as_one_that_was_whole(tmp_path):
    for count in (4, 7, 15):
        auto_run(tmp_path / "grown", count, last_group="wait")
    auto_run(tmp_path / "whole", 15, last_group="wait")
    for read in (ledger_without_seconds, lambda out: (out / "decisions.jsonl").read_text()):
        assert read(tmp_path / "grown") == read(tmp_path / "whole")


class Killed(BaseException):
    """Stands for kill -9: no code of the run catches it."""


@pytest.mark.parametrize("num_lines", [0, 1, 2, 11, 12, 16, 17])
def test_killed_between_any_two_lines_a_run_repeats_its_decisions(tmp_path, monkeypatch, num_lines):
    """The row t = 0 is the first line. Then each arrival adds a decision and a row: line 16 is the decision at 8."""
    auto_run(tmp_path / "whole", 9)
    append, lines = JsonLines.append, []

    def append_or_die(self, value):
        if len(lines) == num_lines:
            raise Killed
        lines.append(value)
        append(self, value)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(JsonLines, "append", append_or_die)
        auto_run(tmp_path / "killed", 9)
    auto_run(tmp_path / "killed", 9, learner=TinyLearner())
    for read in (ledger_without_seconds, lambda out: (out / "decisions.jsonl").read_text()):
        assert read(tmp_path / "killed") == read(tmp_path / "whole")

"""The three objectives on ledgers worked out by hand, which run is best, and what the report says about it."""

import math

import pytest

from fairseq_alma.report.numbers import all_numbers, best_of, ranking
from fairseq_alma.report.objectives import (
    OBJECTIVES,
    explanation,
    objective_name,
    rule_of,
    score_name,
    score_scale,
    validation_score,
)
from fairseq_alma.report.tables import summary
from tests.fairseq_alma.report.ledgers import only_comparison, write_text, write_vision


def results(folder):
    comparison = only_comparison(folder)
    return comparison, {
        group.wait: result for group, result in zip(comparison.groups, all_numbers(comparison), strict=True)
    }


def test_the_three_objectives_of_a_vision_run(tmp_path):
    # Trains at t = 2 and 4. The prequential scores are of the predictors from before t = 2, 3 and 4.
    write_vision(
        tmp_path / "a", [0.9, 0.9, 0.5, 0.4, 0.2], wait=2, validations=[0, 0, 0.44, 0.44, 0.1],
        prequential=[None, 0.91, 0.92, 0.6, 0.5],
    )  # fmt: skip
    comparison, [result] = results(tmp_path)[0], results(tmp_path)[1].values()
    assert {name: result.scores[name].value.mean for name in OBJECTIVES} == pytest.approx(
        {"all": (0.9 + 0.5 + 0.4 + 0.2) / 4, "after": (0.5 + 0.4 + 0.2) / 3, "final": 0.2}
    )
    # Only the predictors from before t = 3 and 4 were trained. No data arrive after the last stage.
    assert {name: result.scores[name].score for name in OBJECTIVES} == pytest.approx(
        {"all": (0.92 + 0.6 + 0.5) / 3, "after": (0.6 + 0.5) / 2, "final": 0.1}
    )
    assert [rule_of(comparison, name) for name in OBJECTIVES] == ["prequential", "prequential", "validation"]
    assert result.quality.mean == pytest.approx(4 * result.scores["all"].value.mean)  # CER is the sum


def test_the_three_objectives_of_a_language_model_have_geometric_means(tmp_path):
    write_text(tmp_path / "a", [900.0, 800.0, 50.0, 20.0], wait=2, validations=[900.0, 700.0, 60.0, 10.0])
    [result] = results(tmp_path)[1].values()
    assert {name: result.scores[name].value.mean for name in OBJECTIVES} == pytest.approx(
        {"all": (800 * 50 * 20) ** (1 / 3), "after": 1000**0.5, "final": 20}
    )
    assert {name: result.scores[name].score for name in OBJECTIVES} == pytest.approx(
        {"all": (700 * 60 * 10) ** (1 / 3), "after": 600**0.5, "final": 10}
    )
    assert result.quality.mean == pytest.approx((800 + 50 + 20) / 3)  # the paper's arithmetic mean
    assert (objective_name("all", False), objective_name("final", False)) == (
        "geometric mean perplexity over all arrivals", "final perplexity",
    )  # fmt: skip


def test_the_objective_decides_the_answer(tmp_path):
    """Wait 1 is best over all arrivals. Waiting costs nothing after the first stage, where wait 4 has one arrival."""
    write_vision(tmp_path / "1", [0.9, 0.5, 0.45, 0.4, 0.35], wait=1)
    write_vision(tmp_path / "2", [0.9, 0.9, 0.4, 0.4, 0.3], wait=2)
    write_vision(tmp_path / "4", [0.9, 0.9, 0.9, 0.9, 0.32], wait=4)
    comparison, by_wait = results(tmp_path)
    numbers = all_numbers(comparison)
    assert {wait: result.scores["after"].score for wait, result in by_wait.items()} == pytest.approx(
        {1: 0.425, 2: 1.1 / 3, 4: 0.32}
    )

    best = {name: comparison.groups[best_of(numbers, name)].wait for name in OBJECTIVES}
    assert best == {"all": 1, "after": 4, "final": 2}


def test_the_untrained_perplexity_no_longer_decides_alone(tmp_path):
    """Arithmetic means: 2540 and 2138. The second run is better only in the two untrained arrivals."""
    write_text(tmp_path / "a", [5000.0, 5000.0, 5000.0, 100.0, 60.0], wait=3)
    write_text(tmp_path / "b", [4000.0, 4000.0, 4000.0, 300.0, 250.0], wait=3, lr=0.1)
    comparison = only_comparison(tmp_path)
    numbers = all_numbers(comparison)
    assert [round(result.quality.mean) for result in numbers] == [2540, 2138]
    assert comparison.groups[best_of(numbers)].settings["lr"] == 0.001


def test_a_run_without_a_score_after_its_first_stage_changes_the_rule_of_this_objective_only(tmp_path):
    """A run that waits for all data has one stage, at the last arrival. No data arrive after it."""
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], prequential=[None, 0.9, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.3], wait=2, prequential=[None, 0.9, 0.9])
    comparison = only_comparison(tmp_path)
    assert [rule_of(comparison, name) for name in OBJECTIVES] == ["prequential", "validation", "validation"]
    [waits] = [group for group in comparison.groups if group.wait == 2]
    assert validation_score(waits.runs[0], "after", "prequential") is None
    assert "1 of 2 finished runs have no prequential score after the first stage" in explanation(comparison, "after")
    assert score_name(comparison, "after") == "average validation error after the first stage"
    assert score_name(comparison, "all") == "prequential error"


@pytest.mark.parametrize("wait", [1, 2, 5, 20, 7])
def test_the_final_validation_error_is_measured_on_the_last_tenth_of_the_stream(tmp_path, wait):
    """B = 20: on the mega-batches 19 and 20, each after the stage that trained on it. With wait 7 at t = 20."""
    validations = [0.0, *(t / 100 for t in range(1, 21))]
    write_vision(tmp_path / "a", [0.9] * 21, wait=wait, validations=validations)
    [result] = results(tmp_path)[1].values()
    expected = (0.19 + 0.20) / 2 if wait == 1 else 0.20
    assert result.scores["final"].score == result.final_validation.mean == pytest.approx(expected)


def test_an_error_of_zero_on_twelve_examples_is_not_the_final_validation_error(tmp_path):
    """The last mega-batch has too few validation examples: the mean over the last ten mega-batches of 100 says more."""
    write_vision(tmp_path / "a", [0.9] + [0.04] * 100, validations=[0.0] + [0.04] * 99 + [0.0])
    [result] = results(tmp_path)[1].values()
    assert result.final_validation.mean == pytest.approx(0.036)


def test_a_perplexity_that_is_not_a_number_gives_no_value_and_infinity_an_infinite_one(tmp_path):
    write_text(tmp_path / "a", [900.0, math.inf, 50.0], validations=[900.0, math.nan, 60.0])
    [result] = results(tmp_path)[1].values()
    assert result.scores["all"].value.mean == math.inf
    assert result.scores["all"].score is None
    assert (result.scores["final"].value.mean, result.scores["final"].score) == (50, 60)


def test_an_unfinished_run_has_no_result_under_any_objective(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], mega_batches=4)
    [result] = results(tmp_path)[1].values()
    assert all(result.scores[name].value is None and result.scores[name].score is None for name in OBJECTIVES)


def test_runs_are_ranked_by_validation_and_an_unfinished_one_is_last(tmp_path):
    """The order of their test errors is another."""
    write_vision(tmp_path / "a", [0.9, 0.1, 0.1], validations=[0, 0.5, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], validations=[0, 0.0, 0.2], wait=2)  # 0.9 while it waits, and 0.2
    write_vision(tmp_path / "c", [0.9, 0.4, 0.3], validations=[0, 0.2, 0.3], learner="gmoe")
    write_vision(tmp_path / "d", [0.9, 0.3, 0.3], validations=[0, 0.3, 0.3], replay="all")
    write_vision(tmp_path / "e", [0.9, 0.0], mega_batches=2, validations=[0, 0.0], width=8)
    comparison = only_comparison(tmp_path)
    numbers = all_numbers(comparison)
    order = [(comparison.label_of(comparison.groups[i]), numbers[i].validation_score) for i in ranking(numbers)]
    assert order == [
        ("gMoE, wait 1, width 4", pytest.approx(0.25)), ("SM, wait 1, replay, width 4", pytest.approx(0.3)),
        ("SM, wait 1, width 4", pytest.approx(0.5)), ("SM, wait 2, width 4", pytest.approx(0.55)),
        ("SM, wait 1, width 8", None),
    ]  # fmt: skip


def test_of_equal_runs_the_cheaper_is_best_and_the_summary_marks_it(tmp_path):
    write_vision(tmp_path / "dear", [0.9, 0.5], flops=20, width=4)
    write_vision(tmp_path / "cheap", [0.9, 0.5], flops=10, width=8)
    comparison = only_comparison(tmp_path)
    marked = [row[:2] for row in summary(comparison, all_numbers(comparison)).rows]
    assert marked == [("SM, width 4", ""), ("SM, width 8", "best")]


def test_without_a_finished_run_none_is_best(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], mega_batches=4)
    assert best_of(all_numbers(only_comparison(tmp_path))) is None


@pytest.fixture
def biased(tmp_path):
    """The validation error chooses wait 1, the prequential error wait 2."""
    write_vision(tmp_path / "a", [0.9, 0.5, 0.5], validations=[0, 0.1, 0.1], prequential=[None, 0.9, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], validations=[0, 0.9, 0.2], wait=2, prequential=[None, 0.9, 0.4])
    return tmp_path


def test_the_best_is_chosen_by_the_prequential_error_if_all_runs_have_it(biased):
    comparison = only_comparison(biased)
    numbers = all_numbers(comparison)
    assert rule_of(comparison) == "prequential"
    assert [result.validation_score for result in numbers] == [0.5, 0.4]
    assert comparison.groups[best_of(numbers)].wait == 2
    assert (score_name(comparison), score_scale(comparison)) == ("prequential error", 100)
    assert "before any stage uses it" in explanation(comparison)


@pytest.mark.parametrize("lacking", [[None, None, None], [None, 0.9, None]])
def test_one_run_without_the_prequential_error_brings_back_the_validation_error(biased, lacking):
    write_vision(biased / "c", [0.9, 0.6, 0.6], validations=[0, 0.6, 0.6], width=8, prequential=lacking)
    comparison = only_comparison(biased)
    numbers = all_numbers(comparison)
    assert rule_of(comparison) == "validation"
    assert [result.validation_score for result in numbers] == pytest.approx([0.1, (0.9 + 0.2) / 2, 0.6])
    assert comparison.groups[best_of(numbers)].wait == 1
    assert (score_name(comparison), score_scale(comparison)) == ("average validation error", 100)
    assert "1 of 3 finished runs have no prequential score" in explanation(comparison)
    assert "too low for small waits" in explanation(comparison)


def test_an_unfinished_run_does_not_change_the_rule(biased):
    write_vision(biased / "c", [0.9, 0.6], mega_batches=2, width=8)
    comparison = only_comparison(biased)
    assert rule_of(comparison) == "prequential"
    assert [result.validation_score for result in all_numbers(comparison)] == [0.5, 0.4, None]


def test_language_models_are_chosen_by_the_geometric_mean_and_a_diverged_one_never(tmp_path):
    # Arithmetic means 425 and 310, geometric means sqrt(800 * 50) = 200 and sqrt(600 * 20) = 109.5.
    write_text(tmp_path / "a", [900.0, 800.0, 50.0], wait=2)
    write_text(tmp_path / "b", [900.0, 600.0, 20.0])
    write_text(tmp_path / "c", [900.0, 50.0, 9.0], validations=[900.0, 50.0, float("nan")], lr=9.0)
    comparison = only_comparison(tmp_path)
    assert rule_of(comparison) == "prequential"
    scores = [result.validation_score for result in all_numbers(comparison)]
    assert sorted(score for score in scores if score) == pytest.approx([12000**0.5, 200])
    assert scores.count(None) == 1
    assert score_name(comparison) == "prequential perplexity"

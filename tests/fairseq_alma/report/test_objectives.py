"""The three objectives on ledgers worked out by hand, and what the report says about them."""

import math

import pytest
from fairseq_alma.report.choice import Budget, best_within

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.objectives import (
    OBJECTIVES,
    explanation,
    objective_name,
    rule_of,
    score_name,
    validation_score,
)
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

    def best(**budget):
        found = {name: best_within(numbers, Budget(**budget), name) for name in OBJECTIVES}
        return {name: None if i is None else comparison.groups[i].wait for name, i in found.items()}

    assert best() == {"all": 1, "after": 4, "final": 2}
    assert best(target=0.31) == {"all": None, "after": None, "final": 2}


def test_the_untrained_perplexity_no_longer_decides_alone(tmp_path):
    """Arithmetic means: 2540 and 2138. The second run is better only in the two untrained arrivals."""
    write_text(tmp_path / "a", [5000.0, 5000.0, 5000.0, 100.0, 60.0], wait=3)
    write_text(tmp_path / "b", [4000.0, 4000.0, 4000.0, 300.0, 250.0], wait=3, lr=0.1)
    comparison = only_comparison(tmp_path)
    numbers = all_numbers(comparison)
    assert [round(result.quality.mean) for result in numbers] == [2540, 2138]
    assert comparison.groups[best_within(numbers, Budget())].settings["lr"] == 0.001


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

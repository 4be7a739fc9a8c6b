import random

import pytest

from fairseq_alma.report.choice import Budget, alternatives, best_within, pareto_front
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.runs import label_of, read_runs
from fairseq_alma.report.tables import summary
from tests.fairseq_alma.report.ledgers import write_text, write_vision


def test_the_front_is_what_no_other_beats():
    #  (1, 5) and (2, 3) and (4, 1) are on it; (3, 3) is beaten by (2, 3); (2, 3) twice: neither beats the other.
    points = [(1.0, 5.0), (2.0, 3.0), (3.0, 3.0), (4.0, 1.0), (2.0, 3.0), (5.0, 1.0)]
    assert pareto_front(points) == [0, 1, 3, 4]
    assert pareto_front([]) == []


def test_the_front_of_three_costs():
    assert pareto_front([(1, 1, 9), (1, 2, 1), (2, 2, 2), (0, 9, 9)]) == [0, 1, 3]


def test_every_point_that_is_not_on_the_front_is_beaten_by_one_that_is():
    rng = random.Random(0)
    points = [(float(rng.randint(0, 20)), float(rng.randint(0, 20))) for _ in range(200)]
    front = pareto_front(points)
    for index, point in enumerate(points):
        beaten = any(points[i][0] <= point[0] and points[i][1] <= point[1] and points[i] != point for i in front)
        assert beaten == (index not in front)


@pytest.fixture
def comparison(tmp_path):
    """Validation scores 1.0, 0.7, 0.5, 0.6; test says otherwise."""
    write_vision(tmp_path / "a", [0.9, 0.1, 0.1], validations=[0, 0.5, 0.5], flops=10, params=10)
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], validations=[0, 0.0, 0.2], wait=2, flops=10, params=10)
    write_vision(
        tmp_path / "c", [0.9, 0.4, 0.3], validations=[0, 0.2, 0.3], learner="gmoe", flops=40, params=[10, 10, 30]
    )
    write_vision(tmp_path / "d", [0.9, 0.3, 0.3], validations=[0, 0.3, 0.3], replay="all", flops=20, params=10)
    write_vision(tmp_path / "e", [0.9, 0.0], mega_batches=2, validations=[0, 0.0], width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    return comparison


def names(comparison):
    return [label_of(run, comparison.varied) for run in comparison.runs]


def test_the_best_is_chosen_by_validation_within_the_budget(comparison):
    numbers, called = all_numbers(comparison), names(comparison)
    scores = {name: one.validation_score for name, one in zip(called, numbers, strict=True)}
    assert scores["SM, wait 1, width 4"] == pytest.approx(1.0)
    assert scores["SM, wait 2, width 4"] == pytest.approx(1.1)  # 0.9 while it waits, and 0.2
    assert scores["gMoE, wait 1, width 4"] == pytest.approx(0.5)
    assert scores["SM, wait 1, replay, width 4"] == pytest.approx(0.6)
    assert scores["SM, wait 1, width 8"] is None  # not finished

    def best(**budget):
        index = best_within(numbers, Budget(**budget))
        return None if index is None else called[index]

    assert best() == "gMoE, wait 1, width 4"
    assert best(num_params=10) == "SM, wait 1, replay, width 4"
    assert best(comp=20) == "SM, wait 1, width 4"
    assert best(final=0.2) == "SM, wait 2, width 4"
    assert best(final=0.1) is None
    assert best(comp=80, num_params=30, final=0.3) == "gMoE, wait 1, width 4"


def test_of_equals_the_cheaper_is_taken(tmp_path):
    write_vision(tmp_path / "dear", [0.9, 0.5], flops=20, width=4)
    write_vision(tmp_path / "cheap", [0.9, 0.5], flops=10, width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    assert comparison.runs[best_within(all_numbers(comparison), Budget())].settings["width"] == 8


def test_the_summary_marks_the_run_that_is_chosen(tmp_path):
    write_vision(tmp_path / "dear", [0.9, 0.5], flops=20, width=4)
    write_vision(tmp_path / "cheap", [0.9, 0.5], flops=10, width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    marked = [row[:2] for row in summary(comparison, all_numbers(comparison)).rows]
    assert marked == [("SM, width 4", ""), ("SM, width 8", "best")]


def test_growth_is_compared_from_the_same_size_on(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0], experts=4)
    write_text(tmp_path / "b", [900.0, 50.0], experts=12, row_experts=12)
    write_text(tmp_path / "c", [900.0, 50.0], experts=4, learner="gmoe", grow_experts=[2])
    [comparison] = read_runs([tmp_path]).comparisons
    assert alternatives(comparison) == [[("growth", 2)], [], [("growth", 0)]]


def test_what_another_decision_would_have_been(comparison):
    called = names(comparison)
    others = {
        called[i]: [(change, called[j]) for change, j in found] for i, found in enumerate(alternatives(comparison))
    }
    assert others["SM, wait 1, width 4"] == [
        ("wait", "SM, wait 2, width 4"),
        ("replay", "SM, wait 1, replay, width 4"),
        ("growth", "gMoE, wait 1, width 4"),
    ]
    assert others["gMoE, wait 1, width 4"] == [("growth", "SM, wait 1, width 4")]
    assert others["SM, wait 1, replay, width 4"] == [("replay", "SM, wait 1, width 4")]
    assert others["SM, wait 1, width 8"] == []

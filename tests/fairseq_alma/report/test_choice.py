import random
import statistics

import pytest
from fairseq_alma.report.choice import (
    Budget,
    best_within,
    difference,
    noise_of,
    pareto_front,
    rivals,
    slider_steps,
    values_by_seed,
)
from fairseq_alma.report.labels import group_label

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.objectives import BIAS, explanation, rule_of, score_name, score_scale
from fairseq_alma.report.page import comparison_data
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import summary
from tests.fairseq_alma.report.ledgers import write_text, write_vision


def test_the_front_has_the_points_that_no_other_beats():
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
    """Runs with validation scores 0.5, 0.55, 0.25, 0.3 and none; the order of their test scores is another."""
    write_vision(tmp_path / "a", [0.9, 0.1, 0.1], validations=[0, 0.5, 0.5], flops=10, params=10)
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], validations=[0, 0.0, 0.2], wait=2, flops=10, params=10)
    write_vision(
        tmp_path / "c", [0.9, 0.4, 0.3], validations=[0, 0.2, 0.3], learner="gmoe", flops=40, params=[10, 10, 30]
    )
    write_vision(tmp_path / "d", [0.9, 0.3, 0.3], validations=[0, 0.3, 0.3], replay="all", flops=20, params=10)
    write_vision(tmp_path / "e", [0.9, 0.0], mega_batches=2, validations=[0, 0.0], width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    return comparison


def labels_of(comparison):
    return [group_label(group, comparison.varied_settings) for group in comparison.groups]


def test_the_best_is_chosen_by_validation_within_the_budget(comparison):
    numbers, labels = all_numbers(comparison), labels_of(comparison)
    scores = {label: result.validation_score for label, result in zip(labels, numbers, strict=True)}
    assert scores["SM, wait 1, width 4"] == pytest.approx(0.5)
    assert scores["SM, wait 2, width 4"] == pytest.approx(0.55)  # the mean of 0.9 while it waits, and 0.2
    assert scores["gMoE, wait 1, width 4"] == pytest.approx(0.25)
    assert scores["SM, wait 1, replay, width 4"] == pytest.approx(0.3)
    assert scores["SM, wait 1, width 8"] is None  # not finished

    def best(**budget):
        index = best_within(numbers, Budget(**budget))
        return None if index is None else labels[index]

    assert best() == "gMoE, wait 1, width 4"
    assert best(num_params=10) == "SM, wait 1, replay, width 4"
    assert best(comp=20) == "SM, wait 1, width 4"
    # A target is a limit of the score, which the cheapest run reaches.
    assert best(target=0.2) is None
    assert best(target=0.29) == "gMoE, wait 1, width 4"
    assert best(target=0.35) == "SM, wait 1, replay, width 4"
    assert best(target=0.5) == "SM, wait 1, width 4"
    assert best(comp=20, target=0.52) == "SM, wait 1, width 4"


def test_budgets_that_are_almost_equal_are_one_step():
    assert slider_steps([]) == []
    assert slider_steps([12.65, 12.6, 3.0, 3.0]) == [3.0, 12.65]
    # 1.03 is within 2% of 1.015, but not of 1.0, where the step begins.
    assert slider_steps([1.0, 1.015, 1.02, 1.03, 1.05]) == [1.02, 1.05]
    assert slider_steps([0.0, 0.0, 1.0]) == [0.0, 1.0]


def test_differences_are_paired_over_the_seeds_that_both_runs_have(tmp_path):
    """The seeds differ by 0.2, the learners by 0.02: only pairs show the difference."""
    errors = {"sm": (0.30, 0.50, 0.40), "ens": (0.28, 0.48, 0.381), "gens": (0.35, 0.40, 0.45), "umix": (0.1,)}
    for learner, of_seeds in errors.items():
        for seed, error in enumerate(of_seeds):
            write_vision(tmp_path / f"{learner}_{seed}", [0.9, error], learner=learner, seed=seed)
    [comparison] = read_runs([tmp_path]).comparisons
    numbers = all_numbers(comparison)
    groups = {
        group.learner: values_by_seed(group, result)
        for group, result in zip(comparison.groups, numbers, strict=True)
    }  # fmt: skip
    found = difference(groups["sm"], groups["ens"])
    gaps = [-0.02, -0.02, -0.019]
    assert (found.num_pairs, found.mean) == (3, pytest.approx(statistics.mean(gaps)))
    assert found.margin == pytest.approx(4.30 * statistics.stdev(gaps) / 3**0.5)
    assert found.verdict == "better"
    assert difference(groups["ens"], groups["sm"]).verdict == "worse"
    assert difference(groups["sm"], groups["gens"]).verdict == "no clear difference"
    alone = difference(groups["sm"], groups["umix"])
    assert (alone.num_pairs, alone.margin, alone.verdict) == (1, None, "one seed")
    assert alone.mean == pytest.approx(0.1 - 0.3)  # seed 0 only


def test_runs_with_another_data_seed_are_paired_by_it(tmp_path):
    errors = {"sm": (0.30, 0.50, 0.40), "ens": (0.28, 0.48, 0.381)}
    for learner, of_seeds in errors.items():
        for seed, error in enumerate(of_seeds):
            out = tmp_path / f"{learner}_{seed}"
            write_vision(out, [0.9, error], learner=learner, seed=0, data_seed=seed, order_seed=None)
    [comparison] = read_runs([tmp_path]).comparisons
    sm, ens = (
        values_by_seed(group, result)
        for group, result in zip(comparison.groups, all_numbers(comparison), strict=True)
    )  # fmt: skip
    assert list(sm) == list(ens) == [0, "0 (data_seed 1)", "0 (data_seed 2)"]
    found = difference(sm, ens)
    assert (found.num_pairs, found.mean) == (3, pytest.approx(-0.059 / 3))
    assert difference(sm, sm).margin == 0
    assert all(group["seeds"] == list(sm) for group in comparison_data(comparison)["groups"])


def test_of_equal_runs_the_cheaper_is_chosen(tmp_path):
    write_vision(tmp_path / "dear", [0.9, 0.5], flops=20, width=4)
    write_vision(tmp_path / "cheap", [0.9, 0.5], flops=10, width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    assert comparison.groups[best_within(all_numbers(comparison), Budget())].settings["width"] == 8


def test_the_summary_marks_the_run_that_is_chosen(tmp_path):
    write_vision(tmp_path / "dear", [0.9, 0.5], flops=20, width=4)
    write_vision(tmp_path / "cheap", [0.9, 0.5], flops=10, width=8)
    [comparison] = read_runs([tmp_path]).comparisons
    marked = [row[:2] for row in summary(comparison, all_numbers(comparison)).rows]
    assert marked == [("SM, width 4", ""), ("SM, width 8", "best")]


@pytest.fixture
def biased(tmp_path):
    """The validation error chooses wait 1, the prequential error wait 2."""
    write_vision(tmp_path / "a", [0.9, 0.5, 0.5], validations=[0, 0.1, 0.1], prequential=[None, 0.9, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], validations=[0, 0.9, 0.2], wait=2, prequential=[None, 0.9, 0.4])
    return tmp_path


def test_the_best_is_chosen_by_the_prequential_error_if_all_runs_have_it(biased):
    [comparison] = read_runs([biased]).comparisons
    numbers = all_numbers(comparison)
    assert rule_of(comparison) == "prequential"
    assert [result.validation_score for result in numbers] == [0.5, 0.4]
    assert comparison.groups[best_within(numbers, Budget())].wait == 2
    assert (score_name(comparison), score_scale(comparison)) == ("prequential error", 100)
    assert "before any stage uses it" in explanation(comparison)


@pytest.mark.parametrize("lacking", [[None, None, None], [None, 0.9, None]])
def test_one_run_without_the_prequential_error_brings_back_the_validation_error(biased, lacking):
    write_vision(biased / "c", [0.9, 0.6, 0.6], validations=[0, 0.6, 0.6], width=8, prequential=lacking)
    [comparison] = read_runs([biased]).comparisons
    numbers = all_numbers(comparison)
    assert rule_of(comparison) == "validation"
    assert [result.validation_score for result in numbers] == pytest.approx([0.1, (0.9 + 0.2) / 2, 0.6])
    assert comparison.groups[best_within(numbers, Budget())].wait == 1
    assert (score_name(comparison), score_scale(comparison)) == ("average validation error", 100)
    assert "1 of 3 finished runs have no prequential score" in explanation(comparison)
    assert "too low for small waits" in explanation(comparison)


def test_an_unfinished_run_does_not_change_the_rule(biased):
    write_vision(biased / "c", [0.9, 0.6], mega_batches=2, width=8)
    [comparison] = read_runs([biased]).comparisons
    assert rule_of(comparison) == "prequential"
    assert [result.validation_score for result in all_numbers(comparison)] == [0.5, 0.4, None]


def test_language_models_are_chosen_by_the_geometric_mean_and_a_diverged_one_never(tmp_path):
    # Arithmetic means 425 and 310, geometric means sqrt(800 * 50) = 200 and sqrt(600 * 20) = 109.5.
    write_text(tmp_path / "a", [900.0, 800.0, 50.0], wait=2)
    write_text(tmp_path / "b", [900.0, 600.0, 20.0])
    write_text(tmp_path / "c", [900.0, 50.0, 9.0], validations=[900.0, 50.0, float("nan")], lr=9.0)
    [comparison] = read_runs([tmp_path]).comparisons
    assert rule_of(comparison) == "prequential"
    scores = [result.validation_score for result in all_numbers(comparison)]
    assert sorted(score for score in scores if score) == pytest.approx([12000**0.5, 200])
    assert scores.count(None) == 1
    assert score_name(comparison) == "prequential perplexity"


def write_seeds(folder, scores, **settings):
    """Write a run for each score: the prequential error, which is also the test error."""
    for seed, score in enumerate(scores):
        write_vision(
            folder / f"{settings}_{seed}", [0.9, score, score], prequential=[None, 0.9, score], seed=seed, **settings
        )


def rivals_in(folder, **budget):
    comparison = read_runs([folder]).comparisons[0]
    numbers = all_numbers(comparison)
    return [comparison.groups[i].settings["width"] for i in rivals(comparison, numbers, Budget(**budget))]


def test_rivals_are_the_runs_whose_score_differs_by_no_more_than_the_seeds(tmp_path):
    write_seeds(tmp_path, (0.30, 0.40), width=4)
    write_seeds(tmp_path, (0.31, 0.42), width=8)  # 0.015 worse, with a margin of 12.71 * 0.005
    write_seeds(tmp_path, (0.401, 0.5), width=16)  # 0.1005 worse, with a margin of 12.71 * 0.0005
    assert rivals_in(tmp_path) == [8]
    assert rivals_in(tmp_path, target=0.9) == []


def test_a_single_seed_is_judged_by_the_noise_of_the_others(tmp_path):
    write_seeds(tmp_path, (0.30, 0.34), width=4)  # variance 0.0008, mean 0.32
    write_seeds(tmp_path, (0.36,), width=8)  # 0.06 worse than seed 0
    write_seeds(tmp_path, (0.40,), width=16)
    comparison = read_runs([tmp_path]).comparisons[0]
    noise = noise_of(all_numbers(comparison), "all")
    assert noise == pytest.approx(0.0008**0.5 / 0.32)
    assert 0.06 < 2 * 2**0.5 * noise * 0.32 < 0.10
    assert rivals_in(tmp_path) == [8]


def test_with_one_seed_everywhere_the_noise_is_unknown(tmp_path):
    write_seeds(tmp_path, (0.30,), width=4)
    write_seeds(tmp_path, (0.30001,), width=8)
    comparison = read_runs([tmp_path]).comparisons[0]
    assert noise_of(all_numbers(comparison), "all") is None
    assert rivals_in(tmp_path) == []


def test_by_the_validation_error_a_longer_wait_is_a_rival_until_the_bias_is_exceeded(tmp_path):
    for wait, score in ((1, 0.4), (2, 0.4 / (1 - BIAS) - 0.001), (3, 0.4 / (1 - BIAS) + 0.001)):
        write_vision(tmp_path / str(wait), [0.9] + [score] * 6, wait=wait, validations=[0] + [score] * 6)
    # The untrained arrivals of longer waits are charged, so compare after the first stage.
    comparison = read_runs([tmp_path]).comparisons[0]
    numbers = all_numbers(comparison)
    found = rivals(comparison, numbers, Budget(), "after")
    assert [comparison.groups[i].wait for i in found] == [2]

"""The study of policies that decide when to train."""

import pytest

from fairseq_alma.report.policies import History
from results.policies.worse_than_usual import policy
from tests.studies import study_module


@pytest.fixture(scope="module")
def study():
    return study_module("policies/study.py")


def test_the_paths_are_all_sets_of_arrivals_with_the_last_one(study):
    assert len(study.PATHS) == 16 and all(path[-1] == 5 and path == sorted({*path}) for path in study.PATHS.values())
    assert len({*study.PATHS}) == len({tuple(path) for path in study.PATHS.values()})


def test_the_correlation_is_that_of_mean_costs_and_its_interval_that_over_seeds(study):
    sure = {"a": [1.0] * 5, "b": [2.0] * 5, "c": [3.0] * 5}
    assert study._correlation(sure, sure) == "1.00 (1.00 to 1.00)"
    assert study._correlation(sure, {"a": [9.0] * 5, "b": [8.0] * 5, "c": [7.0] * 5}) == "-1.00 (-1.00 to -1.00)"
    # Three seeds have the order a, b, c, and two the order c, b, a. The means have that of the three.
    unsure = {"a": [1.0, 3.0, 1.0, 3.0, 1.0], "b": [2.0] * 5, "c": [3.0, 1.0, 3.0, 1.0, 3.0]}
    assert study._correlation(sure, unsure) == "1.00 (-1.00 to 1.00)"


def test_a_correlation_of_few_seeds_has_no_interval(study):
    few = {"a": [1.0, 2.0], "b": [2.0, 3.0]}
    assert study._correlation(few, few) == "1.00"


def test_policies_with_the_same_costs_at_both_widths_count_once(study):
    small = {"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [1.0, 2.0]}
    large = {"a": [3.0, 4.0], "b": [3.0, 4.0], "c": [3.0, 5.0]}
    one, other = study._different(small, large)
    assert {*one} == {*other} == {"a", "c"}


def test_without_ledgers_there_are_no_tables(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "LEDGERS", tmp_path)
    assert study.tables() == {}


def test_the_policy_that_is_an_example_trains_first_and_then_when_it_gets_worse_than_usual():
    def trains(stages, *errors):
        return policy(History(len(errors), stages, errors, (1.0,) * len(stages), 1.0, 0.0))

    assert trains((), 0.9)
    assert trains((1,), 0.9, 0.2, 0.4) and not trains((1,), 0.9, 0.4, 0.2)
    assert not trains((1,), 0.9, 0.3, 0.3, 0.3) and not trains((1,), 0.9, 0.3)

"""The answers of the report on the committed studies.

They agree with the findings in results/*/README.md.
"""

import pytest

from fairseq_alma.report.numbers import all_numbers, ranking
from fairseq_alma.report.reading import read_runs
from tests.commands import ROOT


class Study:
    """A comparison of a committed study, with its labels."""

    def __init__(self, study, name):
        data = read_runs([ROOT / "results" / study / "ledgers"])
        [self.comparison] = [one for one in data.comparisons if one.name == name]
        self.numbers = all_numbers(self.comparison)
        self.labels = [self.comparison.label_of(group) for group in self.comparison.groups]

    def best(self, objective="all", **settings):
        """Return the label of the best run that has these settings."""
        groups = self.comparison.groups
        return next(
            self.labels[i]
            for i in ranking(self.numbers, objective)
            if all(groups[i].settings[name] == value for name, value in settings.items())
        )


def test_books_ensembles_are_best_and_waiting_costs_nothing_after_the_first_stage():
    study = Study("books", "books, B = 4")
    assert study.best() in ("Ens, wait 1, experts 4, updates 265", "gEns, wait 1, experts 4, updates 265")
    # Learning in sequence is harder than i.i.d.: after the first stage and at the end, waiting is better.
    for objective in ("after", "final"):
        assert study.best(objective) == "Ens, wait 4, experts 4, updates_per_mega_batch 265"


def test_cifar_an_intermediate_wait_and_the_largest_ensemble_are_best():
    study = Study("cifar10", "cifar10, B = 100")
    assert study.best() == "Ens, wait 10, width 16, epochs 20"
    assert study.best(epochs=10, learner="sm") == "SM, wait 10, width 9, epochs 10"


def test_the_demo_is_won_by_the_recipe_which_has_its_name():
    assert Study("demo", "demo, B = 4").best() == "anytime"


@pytest.mark.slow  # reads 201 runs of 500 rows
def test_mnist_ens_is_best_for_large_models_umix_for_small_ones_and_small_ones_wait():
    study = Study("mnist", "mnist, B = 500")
    assert study.best() == "Ens, wait 1, width 64"
    assert study.best(width=4, learner="sm", replay=False) == "SM, wait 10, width 4"
    # No final validation error of 0.00 beside a test error of several percent.
    for label, result in zip(study.labels, study.numbers, strict=True):
        assert result.final_validation.mean > 0.3 * result.final.mean, label
    # Waiting costs nothing after the first stage and at the end.
    assert [study.best(objective) for objective in ("after", "final")] == ["Ens, wait 500, width 64"] * 2

"""A browser, and the page of a report with random runs."""

import random

import pytest

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.browser import ARGUMENTS, CHROMIUM, PageView, Tab
from tests.fairseq_alma.report.ledgers import write_text, write_vision


@pytest.fixture(scope="module")  # a longer one would leave an event loop running in the tests of other modules
def tab(tmp_path_factory):
    """A tab of headless Chromium, without a network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield Tab(browser, tmp_path_factory.mktemp("tab"))
        browser.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """Write a page of 40 vision runs with random numbers, two of them unfinished, and a language model.

    Returns:
        The path of the page, and the data that it shows.
    """
    root, rng = tmp_path_factory.mktemp("report"), random.Random(0)
    for number in range(40):
        learner = ("sm", "ens", "gens", "gmoe")[number % 4]
        width, wait = (4, 16, 64)[number // 4 % 3], (1, 2, 4)[number // 12 % 3]
        end = round(rng.uniform(0.05, 0.5), 2)
        errors = [0.9] + [0.9 if t < wait else round(end + 0.3 * (4 - t) / 4, 3) for t in range(1, 5)]
        flops, params, validation = rng.randint(1, 20) * 10**9, rng.randint(1, 9) * 1000, rng.randint(1, 8) / 10
        for seed in range(2 if number % 3 else 1):
            write_vision(
                root / f"runs/v{number}_{seed}", errors[:3] if number > 37 else [e + seed / 100 for e in errors],
                learner=learner, width=width, wait=wait, seed=seed, replay="all" if number >= 36 else False,
                mega_batches=4, epochs=number // 30 + 1, flops=flops, params=params,
                validations=[round(validation + rng.uniform(0, 0.05), 3) for _ in range(5)],
            )  # fmt: skip
    write_text(root / "runs/text", [900.0, 50.0, 40.0])
    data = read_runs([root / "runs"])
    (root / "index.html").write_text(page_of(data), encoding="utf-8")
    return root / "index.html", data


@pytest.fixture
def opened(tab, report):
    """The page, showing the vision runs; with their comparison and numbers."""
    path, data = report
    number = next(i for i, comparison in enumerate(data.comparisons) if comparison.is_vision)
    with PageView(tab, path) as view:
        view.page.select_option("#comparison", data.comparisons[number].name)
        view.frame()
        yield view, data.comparisons[number], all_numbers(data.comparisons[number])

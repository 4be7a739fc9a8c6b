"""Questions that a reader asks of the page of the MNIST study.

The answers are computed here from the ledgers, without the code of the report, and then read from the page, after the
clicks that a reader would make.
"""

import gzip
import json
from functools import cache
from statistics import mean

import pytest

from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.commands import ROOT
from tests.fairseq_alma.report.browser import CHROMIUM, PageView

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)"),
    pytest.mark.slow,  # reads 230 ledgers of up to 500 rows
]

LEDGERS = ROOT / "results/mnist/ledgers"
LABELS = {"sm": "SM", "ens": "Ens", "umix": "UMix", "gens": "gEns", "gmoe": "gMoE"}


# ---- answers from the ledgers
@cache
def seeds(job):
    """Return the rows of each seed of a job, such as `ens_h64_w10`."""
    files = sorted((LEDGERS / job).glob("seed_*/ledger.jsonl.gz"))
    return [[json.loads(line) for line in gzip.open(file)] for file in files]


def jobs():
    """Return the jobs with B = 500."""
    return sorted(folder.name for folder in LEDGERS.iterdir() if "_h" in folder.name)


def label(job):
    """Return the name of a job on the page."""
    learner, width, wait, *replay = job.split("_")
    settings = json.loads((LEDGERS / job / "seed_0/settings.json").read_text())
    words = [LABELS[learner], f"wait {wait[1:]}", *(["replay"] if replay else []), f"width {width[1:]}"]
    return ", ".join([*words, *([f"grow_every {settings['grow_every']}"] if learner == "gmoe" else [])])


def cers(job):
    return [sum(row["error_rate"] for row in rows[1:]) for rows in seeds(job)]


def finals(job):
    return [100 * rows[-1]["error_rate"] for rows in seeds(job)]


def validation(job):
    """Return the average validation error over all arrivals. Untrained ones count with the mean error at t = 0."""
    return mean(mean(row.get("validation_error_rate", untrained()) for row in rows[1:]) for rows in seeds(job))


@cache
def untrained():
    return mean(rows[0]["error_rate"] for job in jobs() for rows in seeds(job))


def late_validation(job):
    """Return the mean validation error on mega-batches 451 to 500, each after the stage that trained on it."""
    errors = []
    for rows in seeds(job):
        updates = [row["t"] for row in rows if row["updated"]]
        ends = [next(t for t in updates if t >= mega_batch) for mega_batch in range(451, 501)]
        errors.append(mean(rows[t]["validation_error_rate"] for t in ends))
    return mean(errors)


# ---- what the page says
@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("mnist") / "index.html"
    file.write_text(page_of(read_runs([LEDGERS])), encoding="utf-8")
    return file


@pytest.fixture
def view(tab, path):
    with PageView(tab, path) as opened:
        yield opened


def answer(view):
    return view.page.inner_text("#answer strong")


def test_which_run_is_best(view):
    best = min(jobs(), key=validation)
    assert answer(view) == label(best) == "Ens, wait 1, width 64"
    assert f"its CER {mean(cers(best)):.2f} ± " in view.page.inner_text("#answer")


def test_which_run_of_wait_10_is_best(view):
    view.filter("wait", 10)
    assert answer(view) == label(min((job for job in jobs() if job.endswith("_w10")), key=validation))


def test_which_wait_is_best_for_a_small_single_model(view):
    view.filter("learner", "sm")
    view.filter("width", 4)
    view.filter("replay", "no")
    view.page.click("#runs th button:text-is('CER')")
    first = view.column("run")[0]
    waits = [job for job in jobs() if job.startswith("sm_h4_") and "replay" not in job]
    assert len(view.rows()) == len(waits) == 5
    assert first == label(min(waits, key=lambda job: mean(cers(job)))) == "SM, wait 10, width 4"


def test_which_run_is_best_at_the_end(view):
    view.objective("final")
    best = min(jobs(), key=late_validation)
    assert answer(view) == label(best)
    assert f"its final error is {mean(finals(best)):.2f} ± " in view.page.inner_text("#answer")

"""Questions that a reader asks of the page of the MNIST study.

The answers are computed here from the ledgers, without the code of the report, and then read from the page, after the
clicks that a reader would make.
"""

import gzip
import json
import re
from functools import cache
from statistics import mean, stdev

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
T_95 = 4.303
"""Student's t for a two-sided 95% interval of three pairs."""


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


def comp(job):
    return mean(sum(row["train_flops"] for row in rows) for rows in seeds(job))


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


def paired(first, second):
    """Return the mean difference over seeds, half of its 95% interval, and what a reader may conclude."""
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    margin = T_95 * stdev(gaps) / len(gaps) ** 0.5
    verdict = "no clear difference" if abs(mean(gaps)) <= margin else "worse" if mean(gaps) > 0 else "better"
    return mean(gaps), margin, verdict


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


def compared(view, first, second):
    """Choose two jobs to compare, and return the rows of the table: name -> cells."""
    view.page.select_option("#pair-first", label=label(first))
    view.page.select_option("#pair-second", label=label(second))
    view.frame()
    return {name: cells for name, *cells in view.table("#pair")}


def press(view, name, value):
    view.page.click(f"#filters .chip[data-filter={name}][data-value='{value}']")
    view.frame()


def typed(view, name, text):
    view.page.fill(f"#{name}-typed", text)
    view.frame()


def answer(view):
    return view.page.inner_text("#answer .best")


def assert_compared(cells, first, second):
    """Check the cells of a row against the values of two jobs."""
    gap, margin, verdict = paired(first, second)
    numbers = [float(re.match(r"[+-]?[0-9.]+", cell)[0]) for cell in cells[:3]]
    assert numbers == pytest.approx([mean(first), mean(second), gap], abs=0.0051)
    assert float(cells[2].split(" ± ")[1]) == pytest.approx(margin, abs=0.02)
    assert cells[3] == verdict
    return verdict


def test_which_learner_for_100_gflop(view):
    best = min((job for job in jobs() if comp(job) <= 100e9), key=validation)
    typed(view, "comp", "100G")
    assert answer(view) == label(best)
    assert f"CER {mean(cers(best)):.2f}" in view.page.inner_text("#facts")


def test_which_learner_for_348_gflop_and_is_it_sure(view):
    within = [job for job in jobs() if comp(job) <= 348e9]
    best = min(within, key=validation)
    typed(view, "comp", "348G")
    assert answer(view) == label(best) == "UMix, wait 1, width 4"
    # The data of the choice cannot tell whether wait 10 is better. The same paragraph has what the test data say.
    gap, _, verdict = paired([c / 5 for c in cers(best)], [c / 5 for c in cers("umix_h4_w10")])
    said = view.page.locator("#answer .doubt").first.inner_text()
    assert "The validation data cannot tell whether" in said
    assert f"UMix, wait 10, width 4: validation {100 * validation('umix_h4_w10'):.2f} %" in said
    assert f"test: {verdict} ({gap:+.2f} ± " in said


def test_what_does_waiting_for_50_cost(view):
    cells = compared(view, "ens_h64_w1", "ens_h64_w50")
    assert assert_compared(cells["CER"], cers("ens_h64_w1"), cers("ens_h64_w50")) == "worse"
    assert assert_compared(cells["final error, %"], finals("ens_h64_w1"), finals("ens_h64_w50")) == "better"
    assert cells["training FLOPs"][3] == "equal" and comp("ens_h64_w1") == comp("ens_h64_w50")


@pytest.mark.parametrize(("size", "expected"), [("h4", "better"), ("h64", "worse")])
def test_ens_or_umix_at_the_same_budget(view, size, expected):
    ens, umix = f"ens_{size}_w10", f"umix_{size}_w10"
    cells = compared(view, ens, umix)
    assert assert_compared(cells["CER"], cers(ens), cers(umix)) == expected
    assert cells["training FLOPs"][3] == "equal"


def test_the_cheapest_run_with_a_test_error_under_6_percent(view):
    reaching = [job for job in jobs() if mean(finals(job)) <= 6]
    cheapest = min(reaching, key=lambda job: (comp(job), mean(finals(job))))
    view.objective("final")
    typed(view, "target", "6 %")
    by_validation = [job for job in jobs() if round(100 * late_validation(job), 2) <= 6]
    chosen = min(by_validation, key=lambda job: (comp(job), late_validation(job)))
    assert answer(view) == label(chosen)
    named = view.page.inner_text("#answer")
    assert label(cheapest) in named and f"final error {mean(finals(cheapest)):.2f}" in named
    assert comp(chosen) == comp(cheapest)


def test_does_replay_help_at_wait_10(view):
    assert not [job for job in jobs() if job.endswith("_w10_replay")]
    press(view, "wait", 10)
    best = min((job for job in jobs() if job.endswith("_w10")), key=validation)
    assert answer(view) == label(best)
    said = view.page.inner_text("#alternatives")
    assert re.search(r"replay\s+not run\. The command that runs it:\s+alma-vision .*wait=10 .*replay=all", said)
    press(view, "replay", "all")
    assert view.page.inner_text("#count") == "0 of 67 runs"


def test_does_replay_help_at_wait_50_and_what_does_it_cost(view):
    plain, replay = "sm_h64_w50", "sm_h64_w50_replay"
    cells = compared(view, plain, replay)
    assert assert_compared(cells["CER"], cers(plain), cers(replay)) == "better"
    ratio = float(re.search(r"× ([0-9.]+)", cells["training FLOPs"][2])[1])
    assert ratio == pytest.approx(comp(replay) / comp(plain), rel=0.005)
    assert cells["training FLOPs"][3] == "more"


def test_is_growing_experts_better_than_the_single_model_at_wait_10(view):
    cells = compared(view, "sm_h64_w10", "gmoe_h64_w10")
    assert assert_compared(cells["CER"], cers("sm_h64_w10"), cers("gmoe_h64_w10")) == "no clear difference"


def test_which_wait_is_best_for_a_small_single_model(view):
    press(view, "learner", "sm")
    press(view, "width", 4)
    press(view, "replay", "no")
    view.page.click("#runs th button:text-is('CER')")
    first = view.table("#runs")[0][0]
    waits = [job for job in jobs() if job.startswith("sm_h4_") and "replay" not in job]
    assert len(view.rows()) == len(waits) == 5
    assert first == label(min(waits, key=lambda job: mean(cers(job)))) == "SM, wait 10, width 4"


def test_which_run_for_at_most_20000_parameters(view):
    small = [job for job in jobs() if seeds(job)[0][-1]["num_params"] <= 20_000]
    typed(view, "params", "20k")
    assert answer(view) == label(min(small, key=validation))


def test_which_run_is_best_at_the_end(view):
    view.objective("final")
    best = min(jobs(), key=late_validation)
    assert answer(view) == label(best)
    assert f"final error {mean(finals(best)):.2f}" in view.page.inner_text("#facts")


def test_how_long_does_the_best_run_train_and_what_does_it_cost(view):
    best = min(jobs(), key=validation)
    seconds = [sum(row["train_seconds"] for row in rows) for rows in seeds(best)]
    view.page.fill("#price", "60")  # one unit a minute, so that prices are minutes
    view.frame()
    head = view.page.locator("#costs thead th").all_inner_texts()
    costs = dict(zip(head, view.table("#costs")[0], strict=True))
    assert costs["run"] == label(best)
    assert float(costs["price, one seed"]) == pytest.approx(mean(seconds) / 60, rel=0.006)
    assert float(costs["price, all seeds"]) == pytest.approx(sum(seconds) / 60, rel=0.006)
    assert costs["time, all seeds"] == f"{sum(seconds) / 60:.3g} min (3 seeds)"


def test_in_the_first_versions_setting_umix_is_better_than_sm(view):
    view.page.select_option("#comparison", label="mnist, B = 50, CER from t = 0 (15 runs)")
    view.page.select_option("#pair-first", label="SM, wait 1")
    view.page.select_option("#pair-second", label="UMix, wait 1")
    view.frame()
    cells = {name: row for name, *row in view.table("#pair")}["CER from t = 0"]
    first, second = (
        [sum(row["error_rate"] for row in rows) for rows in seeds(f"v1_{name}_w1")] for name in ("sm", "umix")
    )
    assert assert_compared(cells, first, second) == "better"

"""The page in a real browser, loaded from disk, without a network."""

import random
import shutil
from urllib.parse import quote

import pytest

from fairseq_alma.report.choice import Budget, best_within, difference, pareto_front, slider_steps
from fairseq_alma.report.labels import group_label
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.ledgers import write_text, write_vision
from tests.fairseq_alma.report.test_page import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
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
        write_vision(
            root / f"runs/v{number}", errors[:3] if number > 37 else errors, learner=learner, width=width, wait=wait,
            replay="all" if number >= 36 else False, mega_batches=4, epochs=number // 30 + 1,
            validations=[round(rng.uniform(0.05, 0.9), 2) for _ in range(5)],
            flops=rng.randint(1, 20) * 10**9, params=rng.randint(1, 9) * 1000,
        )  # fmt: skip
    write_text(root / "runs/text", [900.0, 50.0, 40.0])
    data = read_runs([root / "runs"])
    (root / "index.html").write_text(page_of(data), encoding="utf-8")
    return root / "index.html", data


class PageView:
    """An open page, with the messages of its console and the addresses that it requested."""

    def __init__(self, browser, path, width=1600, height=1000):
        self.context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        self.page = self.context.new_page()
        self.messages = []
        self.page.on("console", lambda message: self.messages.append((message.type, message.text)))
        self.page.on("pageerror", lambda error: self.messages.append(("error", str(error))))
        self.page.on("dialog", lambda dialog: (self.messages.append(("dialog", dialog.message)), dialog.dismiss()))
        self.page.on("request", lambda request: self._requested(request.url))
        self.requests = []
        self.page.goto(f"file://{path}")
        self.page.wait_for_selector("#tradeoff .main-svg")

    def _requested(self, url):
        if not url.startswith(("file:", "data:", "blob:")):
            self.requests.append(url)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.context.close()
        if exception == (None, None, None):
            assert self.messages == []
            assert self.requests == []

    def frame(self):
        """Wait until the page has been drawn after an event."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def best(self):
        """Return the index of the group that the page recommends, or None."""
        value = self.page.get_attribute("#answer", "data-best")
        return int(value) if value else None

    def front(self):
        """Return the indices of the groups on the Pareto front."""
        value = self.page.get_attribute("#front", "data-front")
        return sorted(int(index) for index in value.split(",")) if value else []

    def slide(self, name, step):
        """Move a slider to a step."""
        self.page.evaluate(
            "([name, step]) => { const input = document.getElementById(name); input.value = String(step);"
            " input.dispatchEvent(new Event('input')); }",
            [name, step],
        )
        self.frame()

    def rows(self):
        """Return the indices of the groups in the table, from top to bottom."""
        return [
            int(value)
            for value in self.page.eval_on_selector_all("#runs tbody tr", "rows => rows.map((row) => row.dataset.run)")
        ]


@pytest.fixture
def opened(browser, report):
    """The page, showing the vision runs; with their comparison and numbers."""
    path, data = report
    number = next(i for i, comparison in enumerate(data.comparisons) if comparison.is_vision)
    with PageView(browser, path) as view:
        view.page.select_option("#comparison", str(number))
        view.frame()
        yield view, data.comparisons[number], all_numbers(data.comparisons[number])


def test_the_page_opens_from_disk_without_a_network_or_a_message(opened):
    view, comparison, _ = opened
    assert view.page.title() == "ALMA report: books, B = 2; mnist, B = 4"
    assert sorted(view.rows()) == list(range(40))
    assert view.page.inner_text("#count") == "40 of 40 runs"
    assert len(comparison.finished_groups) == 38


@pytest.mark.parametrize("num_budgets", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_sliders_change_the_answer_to_the_one_that_python_computes(opened, num_budgets):
    view, comparison, numbers = opened
    finished = [n for n, group in zip(numbers, comparison.groups, strict=True) if group.is_finished]
    steps = {
        "comp": slider_steps([n.comp for n in finished]),
        "params": slider_steps([n.num_params for n in finished]),
        "final": slider_steps([float(f"{n.final_validation.mean:.6g}") for n in finished]),
    }
    assert view.best() == best_within(numbers, Budget())
    rng, answers = random.Random(1), set()
    for _ in range(num_budgets):
        budget = {}
        for name, values in steps.items():
            step = rng.randint(0, len(values))
            view.slide(name, step)
            budget[name] = values[step] if step < len(values) else None
        wanted = best_within(numbers, Budget(budget["comp"], budget["params"], budget["final"]))
        assert view.best() == wanted, budget
        answers.add(wanted)
        beyond = view.page.eval_on_selector_all("#runs tr.beyond", "rows => rows.map((row) => Number(row.dataset.run))")
        assert set(beyond) == {
            i
            for i, n in enumerate(numbers)
            if (budget["comp"] is not None and n.comp > budget["comp"])
            or (budget["params"] is not None and n.num_params > budget["params"])
            or (budget["final"] is not None and n.final_validation.mean > budget["final"] + 1e-12)
        }
        if wanted is not None:
            assert view.page.inner_text("#answer .best") == group_label(
                comparison.groups[wanted], comparison.varied_settings
            )
    assert len(answers) > 3


def test_a_budget_that_no_run_keeps_gives_a_message(opened):
    view, _, _ = opened
    for name in ("comp", "params", "final"):
        view.slide(name, 0)
    assert view.best() is None
    assert "No run keeps to this budget" in view.page.inner_text("#answer")
    for name in ("params", "final"):
        view.slide(name, 10**6)
    view.slide("final", 0)
    view.slide("comp", 0)
    said = view.page.inner_text("#answer")
    assert "the lowest final error on validation data is" in said
    assert "the least training is" in said


def test_the_pareto_front_equals_that_of_python_on_every_axis_and_under_every_filter(opened):
    view, comparison, numbers = opened
    xs = {
        "comp": lambda n: n.comp,
        "params": lambda n: n.num_params,
        "mem": lambda n: n.mem,
        "wall": lambda n: n.wall_seconds,
    }
    ys = {"quality": lambda n: n.quality.mean, "final": lambda n: n.final.mean, "score": lambda n: n.validation_score}
    for learner in (None, "gens"):
        if learner:
            view.page.click(f"#filters .chip[data-filter=learner][data-value={learner}]")
        shown = [
            i
            for i, group in enumerate(comparison.groups)
            if group.is_finished and (learner is None or group.learner == learner)
        ]  # fmt: skip
        for x, of_x in xs.items():
            for y, of_y in ys.items():
                view.page.select_option("#x-axis", x)
                view.page.select_option("#y-axis", y)
                view.frame()
                points = [(of_x(numbers[i]), of_y(numbers[i])) for i in shown]
                assert view.front() == sorted(shown[i] for i in pareto_front(points)), (learner, x, y)


def test_filters_change_what_is_shown(opened):
    view, comparison, _ = opened
    view.page.click("#filters .chip[data-filter=wait][data-value='2']")
    view.frame()
    assert set(view.rows()) == {i for i, group in enumerate(comparison.groups) if group.wait == 2}
    of_markers = "document.getElementById('tradeoff').data.filter((t) => t.mode === 'markers')"
    points = view.page.evaluate(f"() => {of_markers}.flatMap((t) => t.customdata)")
    assert set(points) == {i for i, group in enumerate(comparison.groups) if group.wait == 2 and group.is_finished}
    curves = view.page.get_attribute("#curves", "data-shown")
    assert set(map(int, curves.split(","))) <= set(view.rows())
    view.page.click("#filters .chip[data-filter=wait][data-value='4']")
    view.frame()
    assert set(view.rows()) == {i for i, group in enumerate(comparison.groups) if group.wait in (2, 4)}
    view.page.click("#show-all")
    assert len(view.rows()) == 40


def test_the_table_sorts_both_ways_and_unknown_values_come_last(opened):
    view, comparison, numbers = opened
    view.page.click("#runs th button:has-text('training FLOPs')")
    flops = [numbers[i].comp for i in view.rows()]
    assert flops == sorted(flops)
    view.page.click("#runs th button:has-text('training FLOPs')")
    flops = [numbers[i].comp for i in view.rows()]
    assert flops == sorted(flops, reverse=True)
    view.page.click("#runs th button:has-text('CER') >> nth=0")
    assert {i for i, group in enumerate(comparison.groups) if not group.is_finished} == set(view.rows()[-2:])


def test_a_run_that_is_clicked_shows_its_settings_and_its_command(opened):
    view, comparison, _ = opened
    view.page.click("#runs tr[data-run='7']")
    group = comparison.groups[7]
    assert view.page.inner_text("#command") == "alma-vision dataset=mnist"
    detail = view.page.inner_text("#detail")
    assert group_label(group, comparison.varied_settings) in detail
    assert str(group.folder) in detail
    assert view.page.get_attribute("#runs tr[data-run='7']", "class").split()[-1] == "chosen"
    assert "7" in view.page.get_attribute("#curves", "data-shown").split(",")


def test_the_alternatives_of_the_best_run_are_shown(opened):
    view, comparison, numbers = opened
    best = view.best()
    rows = view.page.eval_on_selector_all(
        "#alternatives tbody tr",
        "rows => rows.map((row) => [0, 3, 4].map((i) => row.cells[i].textContent).concat(Number(row.dataset.run)))",
    )
    assert rows
    for change, gap, verdict, other in rows:
        alternative = comparison.groups[other]
        if change == "wait":
            assert alternative.wait != comparison.groups[best].wait
        assert gap == f"{numbers[other].quality.mean - numbers[best].quality.mean:+.2f}"
        assert verdict == difference(comparison.groups[best], alternative).verdict == "one seed"


def test_sliders_filters_and_the_chosen_run_survive_a_reload(opened):
    view, _, _ = opened
    view.slide("comp", 3)
    view.page.click("#filters .chip[data-filter=learner][data-value=ens]")
    view.page.select_option("#y-axis", "final")
    view.page.click("#runs tbody tr >> nth=2")
    view.frame()
    before = (
        view.best(),
        view.front(),
        view.rows(),
        view.page.inner_text("#comp-value"),
        view.page.inner_text("#detail"),
    )
    view.page.reload()
    view.page.wait_for_selector("#tradeoff .main-svg")
    view.frame()
    assert before == (
        view.best(),
        view.front(),
        view.rows(),
        view.page.inner_text("#comp-value"),
        view.page.inner_text("#detail"),
    )
    assert view.page.input_value("#y-axis") == "final"


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_is_usable_when_narrow_and_when_wide(browser, report, width, tmp_path):
    with PageView(browser, report[0], width=width, height=900) as view:
        view.page.select_option("#comparison", "1")
        view.frame()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#comp", "#params", "#final", "#tradeoff", "#curves", "#answer", "#comparison"):
            box = view.page.locator(selector).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, selector
            assert box["width"] >= 0.25 * min(width, 600) or selector == "#comparison", selector
        for chip in view.page.locator(".chip").all():
            assert chip.bounding_box()["height"] >= 24  # large enough for a finger
        # Use a filter, a slider and a row.
        view.page.click("#filters .chip[data-filter=learner][data-value=sm]")
        view.page.locator("#comp").focus()
        view.page.keyboard.press("ArrowLeft")
        view.frame()
        assert view.page.inner_text("#comp-value") != "no limit"
        view.page.locator("#runs tbody tr").first.click()
        assert view.page.inner_text("#command")
        view.page.screenshot(path=tmp_path / "page.png", full_page=True)


def test_hostile_settings_are_text(browser, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, command=[HOSTILE], dataset=HOSTILE)
    write_vision(tmp_path / "b", [0.9, 0.6], learner="<img src=x onerror=alert(2)>", knob="2", dataset=HOSTILE)
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with PageView(browser, tmp_path / "index.html") as view:
        for row in (0, 1):
            view.page.click(f"#runs tr[data-run='{row}']")
            view.frame()
        assert HOSTILE.replace("\u2028", "") in view.page.text_content("#runs").replace("\u2028", "")
        assert view.page.locator("img").count() == 0


def test_a_diverged_run_is_beaten_by_every_other(browser, tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0, float("inf")], validations=[900.0, 50.0, float("inf")])
    write_text(tmp_path / "b", [900.0, 900.0, 40.0], wait=2)
    data = read_runs([tmp_path])
    (tmp_path / "index.html").write_text(page_of(data), encoding="utf-8")
    with PageView(browser, tmp_path / "index.html") as view:
        [comparison] = data.comparisons
        assert comparison.groups[view.best()].wait == 2
        assert "inf" in view.page.inner_text("#alternatives") and "-" not in view.page.inner_text(
            "#alternatives td.worse"
        )
        view.page.select_option("#y-axis", "final")
        view.frame()
        assert view.front() == [view.best()]


def test_a_setting_is_no_link_in_a_legend(browser, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner="<a href='https://evil.example'>click</a>")
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with PageView(browser, tmp_path / "index.html") as view:
        assert view.page.locator("#tradeoff a[*|href*=evil], #curves a[*|href*=evil]").count() == 0


def test_the_chosen_run_is_found_again_in_a_report_with_more_runs(browser, tmp_path):
    write_vision(tmp_path / "runs/b", [0.9, 0.5], learner="gmoe", row_experts=[1, 1])
    index = tmp_path / "index.html"
    index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
    with PageView(browser, index) as view:
        view.page.click("#runs tbody tr")
        before = view.page.inner_text("#detail")
        write_vision(tmp_path / "runs/a", [0.9, 0.4], learner="sm")
        write_vision(tmp_path / "runs/c", [0.9, 0.4], dataset="digits")
        index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
        view.page.reload()
        view.page.wait_for_selector("#tradeoff .main-svg")
        assert "gMoE" in view.page.inner_text("#detail").splitlines()[0] and "gMoE" in before
        assert view.page.input_value("#comparison") == "1"


@pytest.mark.parametrize("state", ['{"off":{"learner":5}}', '{"comp":[],"x":"toString"}', '{"c":"length","chosen":9}'])
def test_an_address_with_an_invalid_state_opens_the_page_without_it(browser, report, state):
    with PageView(browser, f"{report[0]}#{quote(state)}") as view:
        assert view.rows()


def test_for_a_language_model_the_page_shows_perplexities(browser, report):
    with PageView(browser, report[0]) as view:
        view.page.select_option("#comparison", "0")
        view.frame()
        assert "average perplexity 45.00" in view.page.inner_text("#answer")
        assert view.page.inner_text("#final-label").startswith("Target: final perplexity")


@pytest.mark.parametrize("is_old", [False, True])
def test_the_page_answers_by_the_prequential_error_and_says_so(browser, tmp_path, is_old):
    """Wait 1 has the lower validation error, and wait 2 the lower prequential error."""
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.5], validations=[0, 0.1, 0.1], prequential=[None, 0.9, 0.5])
    late = [None, 0.9, None if is_old else 0.4]
    write_vision(tmp_path / "runs/b", [0.9, 0.9, 0.2], validations=[0, 0.9, 0.2], wait=2, prequential=late)
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
    with PageView(browser, tmp_path / "index.html") as view:
        answer, head = view.page.inner_text("#answer"), view.page.inner_text("#runs thead")
        assert view.page.inner_text("#answer .best") == ("SM, wait 1" if is_old else "SM, wait 2")
        if is_old:
            assert "Lowest CER on validation data (0.20) of 2 runs within the budget." in answer
            assert "1 of 2 finished runs have no prequential score" in answer
            assert "CER on validation data" in head
        else:
            assert "Lowest prequential error (40.00 %) of 2 runs within the budget." in answer
            assert "before any stage uses it" in answer
            assert "prequential error, %" in head
            assert "40.00" in view.page.inner_text("#runs tbody")

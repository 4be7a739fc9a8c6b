"""The page in a real browser, loaded from disk, without a network."""

import random
import shutil
from urllib.parse import quote

import pytest

from fairseq_alma.report.choice import Budget, best_within, pareto_front
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


class OpenPage:
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
        value = self.page.get_attribute("#answer", "data-best")
        return int(value) if value else None

    def front(self):
        value = self.page.get_attribute("#front", "data-front")
        return sorted(int(one) for one in value.split(",")) if value else []

    def slide(self, name, step):
        self.page.evaluate(
            "([name, step]) => { const input = document.getElementById(name); input.value = String(step);"
            " input.dispatchEvent(new Event('input')); }",
            [name, step],
        )
        self.frame()

    def rows(self):
        return [
            int(value)
            for value in self.page.eval_on_selector_all("#runs tbody tr", "rows => rows.map((row) => row.dataset.run)")
        ]


@pytest.fixture
def opened(browser, report):
    path, data = report
    number = next(i for i, one in enumerate(data.comparisons) if one.is_vision)
    with OpenPage(browser, path) as one:
        one.page.select_option("#comparison", str(number))
        one.frame()
        yield one, data.comparisons[number], all_numbers(data.comparisons[number])


def test_the_page_opens_from_disk_without_a_network_or_a_message(opened):
    one, comparison, _ = opened
    assert one.page.title() == "ALMA report: books, B = 2; mnist, B = 4"
    assert sorted(one.rows()) == list(range(40))
    assert one.page.inner_text("#count") == "40 of 40 runs"
    assert len(comparison.finished_groups) == 38


def test_the_sliders_change_the_answer_as_python_has_it(opened):
    one, comparison, numbers = opened
    finished = [n for n, group in zip(numbers, comparison.groups, strict=True) if group.is_finished]
    steps = {
        "comp": sorted({n.comp for n in finished}),
        "params": sorted({n.num_params for n in finished}),
        "final": sorted({float(f"{n.final_validation.mean:.6g}") for n in finished}),
    }
    assert one.best() == best_within(numbers, Budget())
    rng, answers = random.Random(1), set()
    for _ in range(25):
        budget = {}
        for name, values in steps.items():
            step = rng.randint(0, len(values))
            one.slide(name, step)
            budget[name] = values[step] if step < len(values) else None
        wanted = best_within(numbers, Budget(budget["comp"], budget["params"], budget["final"]))
        assert one.best() == wanted, budget
        answers.add(wanted)
        beyond = one.page.eval_on_selector_all("#runs tr.beyond", "rows => rows.map((row) => Number(row.dataset.run))")
        assert set(beyond) == {
            i
            for i, n in enumerate(numbers)
            if (budget["comp"] is not None and n.comp > budget["comp"])
            or (budget["params"] is not None and n.num_params > budget["params"])
            or (budget["final"] is not None and n.final_validation.mean > budget["final"] + 1e-12)
        }
        if wanted is not None:
            assert one.page.inner_text("#answer .best") == group_label(
                comparison.groups[wanted], comparison.varied_settings
            )
    assert len(answers) > 3


def test_a_budget_that_no_run_keeps_gives_a_message(opened):
    one, _, _ = opened
    for name in ("comp", "params", "final"):
        one.slide(name, 0)
    assert one.best() is None
    assert "No run keeps to this budget" in one.page.inner_text("#answer")


def test_the_pareto_front_is_pythons_on_every_axis_and_under_every_filter(opened):
    one, comparison, numbers = opened
    xs = {
        "comp": lambda n: n.comp,
        "params": lambda n: n.num_params,
        "mem": lambda n: n.mem,
        "wall": lambda n: n.wall_seconds,
    }
    ys = {"quality": lambda n: n.quality.mean, "final": lambda n: n.final.mean, "score": lambda n: n.validation_score}
    for learner in (None, "gens"):
        if learner:
            one.page.click(f"#filters .chip[data-filter=learner][data-value={learner}]")
        shown = [
            i
            for i, group in enumerate(comparison.groups)
            if group.is_finished and (learner is None or group.learner == learner)
        ]  # fmt: skip
        for x, of_x in xs.items():
            for y, of_y in ys.items():
                one.page.select_option("#x-axis", x)
                one.page.select_option("#y-axis", y)
                one.frame()
                points = [(of_x(numbers[i]), of_y(numbers[i])) for i in shown]
                assert one.front() == sorted(shown[i] for i in pareto_front(points)), (learner, x, y)


def test_filters_change_what_is_shown(opened):
    one, comparison, _ = opened
    one.page.click("#filters .chip[data-filter=wait][data-value='2']")
    one.frame()
    assert set(one.rows()) == {i for i, group in enumerate(comparison.groups) if group.wait == 2}
    of_markers = "document.getElementById('tradeoff').data.filter((t) => t.mode === 'markers')"
    points = one.page.evaluate(f"() => {of_markers}.flatMap((t) => t.customdata)")
    assert set(points) == {i for i, group in enumerate(comparison.groups) if group.wait == 2 and group.is_finished}
    curves = one.page.get_attribute("#curves", "data-shown")
    assert set(map(int, curves.split(","))) <= set(one.rows())
    one.page.click("#filters .chip[data-filter=wait][data-value='4']")
    one.frame()
    assert set(one.rows()) == {i for i, group in enumerate(comparison.groups) if group.wait in (2, 4)}
    one.page.click("#show-all")
    assert len(one.rows()) == 40


def test_the_table_sorts_both_ways_and_unknown_values_come_last(opened):
    one, comparison, numbers = opened
    one.page.click("#runs th button:has-text('training FLOPs')")
    flops = [numbers[i].comp for i in one.rows()]
    assert flops == sorted(flops)
    one.page.click("#runs th button:has-text('training FLOPs')")
    flops = [numbers[i].comp for i in one.rows()]
    assert flops == sorted(flops, reverse=True)
    one.page.click("#runs th button:has-text('CER') >> nth=0")
    assert {i for i, group in enumerate(comparison.groups) if not group.is_finished} == set(one.rows()[-2:])


def test_a_run_that_is_clicked_shows_its_settings_and_its_command(opened):
    one, comparison, _ = opened
    one.page.click("#runs tr[data-run='7']")
    group = comparison.groups[7]
    assert one.page.inner_text("#command") == "alma-vision dataset=mnist"
    detail = one.page.inner_text("#detail")
    assert group_label(group, comparison.varied_settings) in detail
    assert str(group.folder) in detail
    assert one.page.get_attribute("#runs tr[data-run='7']", "class").split()[-1] == "chosen"
    assert "7" in one.page.get_attribute("#curves", "data-shown").split(",")


def test_the_alternatives_of_the_best_run_are_shown(opened):
    one, comparison, numbers = opened
    best = one.best()
    rows = one.page.eval_on_selector_all(
        "#alternatives tbody tr",
        "rows => rows.map((row) => [row.cells[0].textContent, Number(row.dataset.run), row.cells[3].textContent])",
    )
    assert rows
    for change, other, difference in rows:
        alternative = comparison.groups[other]
        if change == "wait":
            assert alternative.wait != comparison.groups[best].wait
        assert difference == f"{numbers[other].quality.mean - numbers[best].quality.mean:+.2f}"


def test_sliders_filters_and_the_chosen_run_survive_a_reload(opened):
    one, _, _ = opened
    one.slide("comp", 3)
    one.page.click("#filters .chip[data-filter=learner][data-value=ens]")
    one.page.select_option("#y-axis", "final")
    one.page.click("#runs tbody tr >> nth=2")
    one.frame()
    before = (one.best(), one.front(), one.rows(), one.page.inner_text("#comp-value"), one.page.inner_text("#detail"))
    one.page.reload()
    one.page.wait_for_selector("#tradeoff .main-svg")
    one.frame()
    assert before == (
        one.best(),
        one.front(),
        one.rows(),
        one.page.inner_text("#comp-value"),
        one.page.inner_text("#detail"),
    )
    assert one.page.input_value("#y-axis") == "final"


@pytest.mark.parametrize("width", [400, 1600])
def test_it_is_usable_when_narrow_and_when_wide(browser, report, width, tmp_path):
    with OpenPage(browser, report[0], width=width, height=900) as one:
        one.page.select_option("#comparison", "1")
        one.frame()
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#comp", "#params", "#final", "#tradeoff", "#curves", "#answer", "#comparison"):
            box = one.page.locator(selector).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, selector
            assert box["width"] >= 0.25 * min(width, 600) or selector == "#comparison", selector
        for chip in one.page.locator(".chip").all():
            assert chip.bounding_box()["height"] >= 24  # large enough for a finger
        # Use a filter, a slider and a row.
        one.page.click("#filters .chip[data-filter=learner][data-value=sm]")
        one.page.locator("#comp").focus()
        one.page.keyboard.press("ArrowLeft")
        one.frame()
        assert one.page.inner_text("#comp-value") != "no limit"
        one.page.locator("#runs tbody tr").first.click()
        assert one.page.inner_text("#command")
        one.page.screenshot(path=tmp_path / "page.png", full_page=True)


def test_hostile_settings_are_text(browser, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, command=[HOSTILE], dataset=HOSTILE)
    write_vision(tmp_path / "b", [0.9, 0.6], learner="<img src=x onerror=alert(2)>", knob="2", dataset=HOSTILE)
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with OpenPage(browser, tmp_path / "index.html") as one:
        for row in (0, 1):
            one.page.click(f"#runs tr[data-run='{row}']")
            one.frame()
        assert HOSTILE.replace("\u2028", "") in one.page.text_content("#runs").replace("\u2028", "")
        assert one.page.locator("img").count() == 0


def test_a_diverged_run_is_beaten_by_every_other(browser, tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0, float("inf")], validations=[900.0, 50.0, float("inf")])
    write_text(tmp_path / "b", [900.0, 900.0, 40.0], wait=2)
    data = read_runs([tmp_path])
    (tmp_path / "index.html").write_text(page_of(data), encoding="utf-8")
    with OpenPage(browser, tmp_path / "index.html") as one:
        [comparison] = data.comparisons
        assert comparison.groups[one.best()].wait == 2
        assert "inf" in one.page.inner_text("#alternatives") and "-" not in one.page.inner_text(
            "#alternatives td.worse"
        )
        one.page.select_option("#y-axis", "final")
        one.frame()
        assert one.front() == [one.best()]


def test_a_setting_is_no_link_in_a_legend(browser, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner="<a href='https://evil.example'>click</a>")
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with OpenPage(browser, tmp_path / "index.html") as one:
        assert one.page.locator("#tradeoff a[*|href*=evil], #curves a[*|href*=evil]").count() == 0


def test_the_chosen_run_is_found_again_in_a_report_with_more_runs(browser, tmp_path):
    write_vision(tmp_path / "runs/b", [0.9, 0.5], learner="gmoe", row_experts=[1, 1])
    index = tmp_path / "index.html"
    index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
    with OpenPage(browser, index) as one:
        one.page.click("#runs tbody tr")
        before = one.page.inner_text("#detail")
        write_vision(tmp_path / "runs/a", [0.9, 0.4], learner="sm")
        write_vision(tmp_path / "runs/c", [0.9, 0.4], dataset="digits")
        index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
        one.page.reload()
        one.page.wait_for_selector("#tradeoff .main-svg")
        assert "gMoE" in one.page.inner_text("#detail").splitlines()[0] and "gMoE" in before
        assert one.page.input_value("#comparison") == "1"


@pytest.mark.parametrize("state", ['{"off":{"learner":5}}', '{"comp":[],"x":"toString"}', '{"c":"length","chosen":9}'])
def test_an_address_with_an_invalid_state_opens_the_page_without_it(browser, report, state):
    with OpenPage(browser, f"{report[0]}#{quote(state)}") as one:
        assert one.rows()


def test_for_a_language_model_the_page_shows_perplexities(browser, report):
    with OpenPage(browser, report[0]) as one:
        one.page.select_option("#comparison", "0")
        one.frame()
        assert "average perplexity 45.00" in one.page.inner_text("#answer")
        assert one.page.inner_text("#final-label").startswith("Final perplexity")

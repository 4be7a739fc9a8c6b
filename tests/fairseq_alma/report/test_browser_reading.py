"""What helps to read the page: explanations, legends, marks, costs, links, and labels for screen readers."""

import re

import pytest
from fairseq_alma.report.glossary import glossary
from fairseq_alma.report.write import write_report

from fairseq_alma.report.objectives import objective_name, value_explanation
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.browser import CHROMIUM, PageView
from tests.fairseq_alma.report.ledgers import write_vision

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


def test_terms_are_explained_by_the_mouse_and_by_the_keyboard(opened):
    view, _, _ = opened
    tip, term = view.page.locator("#tip"), view.page.locator("#filters legend .term:text-is('wait')")
    assert tip.is_hidden()
    term.hover()
    assert tip.inner_text() == f"wait: {glossary()['wait']}"
    view.page.mouse.move(1, 1)
    assert tip.is_hidden()
    term.focus()
    assert tip.is_visible() and term.get_attribute("aria-describedby") == "tip"
    view.page.keyboard.press("Escape")
    assert tip.is_hidden()
    view.page.focus("#runs th button:text-is('Mem')")
    assert tip.inner_text() == f"Mem: {glossary()['mem']}"
    for objective in ("after", "final"):  # columns of the objectives that are not chosen
        view.page.focus(f"#runs th button:text-is('{objective_name(objective, is_vision=True)}, %')")
        assert tip.inner_text().endswith(f": {value_explanation(objective, is_vision=True)}")
    view.page.focus("#answer .term:text-is('prequential score')")
    assert glossary()["prequentialerror"] in tip.inner_text()
    view.page.focus(".chip[data-value=gens]")
    assert glossary()["gens"] in tip.inner_text()


def test_no_two_curves_have_the_same_marks_and_there_are_eight_until_one_asks_for_more(opened):
    view, _, _ = opened
    for number in (8, 30):
        shown = view.page.get_attribute("#curves", "data-shown").split(",")
        assert len(shown) == number
        for plot in ("curves", "waits"):
            marks = view.page.evaluate(
                f"document.getElementById('{plot}')"
                ".data.map((t) => [t.line.color, t.line.dash, t.marker.symbol].join())"
            )
            assert len(set(marks)) == len(marks) <= number, plot
        assert view.page.locator("#curves-legend li").count() == number
        if number == 8:
            view.page.click("#curves-note button:text-is('show up to 30 curves')")
            view.frame()
    view.page.click("#curves-note button:text-is('show 8 curves')")
    assert view.page.locator("#curves-legend li").count() == 8


@pytest.mark.parametrize("width", [400, 1600])
def test_a_legend_covers_no_axis(tab, report, width):
    with PageView(tab, report[0], width=width, height=900) as view:
        view.page.select_option("#comparison", "1")
        view.frame()
        for plot in ("tradeoff", "waits", "curves"):
            assert view.page.locator(f"#{plot} .legend").count() == 0
            drawn = view.page.locator(f"#{plot} .main-svg").first.bounding_box()
            assert view.page.locator(f"#{plot}-legend").bounding_box()["y"] >= drawn["y"] + drawn["height"], plot
            title = view.page.locator(f"#{plot} .ytitle").bounding_box()
            assert drawn["y"] <= title["y"] and title["y"] + title["height"] <= drawn["y"] + drawn["height"], plot


def test_a_narrow_screen_shows_the_columns_that_decide(tab, report):
    with PageView(tab, report[0], width=400, height=900) as view:
        view.page.select_option("#comparison", "1")
        view.frame()
        heads = [cell for cell in view.page.locator("#runs th").all() if cell.is_visible()]
        assert [head.inner_text().rstrip(" ↑") for head in heads] == [
            "run", "average error over all arrivals, % (test)", "average validation error, %", "training FLOPs",
        ]  # fmt: skip
        for cell in (*heads, *view.page.locator("#alternatives thead th:not(.minor)").all()):
            box = cell.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 400
        view.page.check("#all-columns")
        assert view.page.locator("#runs th button:text-is('Mem')").is_visible()


def test_the_wait_plot_joins_runs_that_differ_only_in_the_wait(opened):
    view, comparison, numbers = opened
    traces = view.page.evaluate("document.getElementById('waits').data.map((t) => [t.customdata, t.x, t.y])")
    assert traces
    for indices, waits, values in traces:
        groups = [comparison.groups[i] for i in indices]
        assert waits == sorted(group.wait for group in groups) == [group.wait for group in groups]
        others = [{k: v for k, v in group.settings.items() if k != "wait"} for group in groups]
        assert all(one == others[0] for one in others)
        assert values == pytest.approx([100 * numbers[i].scores["all"].value.mean for i in indices], rel=1e-5)


def test_the_cost_panel_gives_hours_and_money(opened):
    view, comparison, numbers = opened
    best = view.best()
    row = view.page.locator(f"#costs tr[data-run='{best}']")
    hours = numbers[best].train_seconds / 3600
    assert float(row.get_attribute("data-hours")) == pytest.approx(hours, rel=1e-3)
    assert "not measured" not in row.inner_text()
    view.page.fill("#price", "3600")
    view.frame()
    assert float(row.locator("td").last.inner_text()) == pytest.approx(
        3600 * hours * len(comparison.groups[best].counted_runs), rel=1e-2
    )
    view.page.fill("#speed", "0.001")  # 1 GFLOP per second
    view.frame()
    assert float(row.get_attribute("data-hours")) == pytest.approx(numbers[best].comp / 1e9 / 3600)
    assert "the given speed" in view.page.inner_text("#costs caption")


def test_the_page_links_to_the_printed_figures(tab, tmp_path):
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.4])
    data = read_runs([tmp_path / "runs"])
    write_report(data, tmp_path / "report")
    with PageView(tab, tmp_path / "report/index.html") as view:
        targets = [link.get_attribute("href") for link in view.page.locator("#figures a").all()]
        assert targets and all((tmp_path / "report" / target).is_file() for target in targets)
    write_report(data, tmp_path / "page", page_only=True)
    with PageView(tab, tmp_path / "page/index.html") as view:
        assert view.page.locator("#figures-section").is_hidden()


def test_every_control_and_every_plot_has_a_name_for_screen_readers(opened):
    view, _, _ = opened
    unnamed = view.page.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=figure]')].filter((one) =>"
        " !one.closest('.modebar') && !one.labels?.length && !one.textContent.trim() &&"
        " !one.getAttribute('aria-label'))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []
    for plot in ("tradeoff", "waits", "curves"):
        assert len(view.page.get_attribute(f"#{plot}", "aria-label")) > 20


def test_the_objective_is_chosen_by_the_keyboard(opened):
    view, _, _ = opened
    view.page.focus("#objectives input[value=all]")
    view.page.keyboard.press("ArrowRight")
    view.frame()
    assert view.page.is_checked("#objectives input[value=after]")
    assert view.page.evaluate("document.activeElement.value") == "after"
    assert "average error after the first stage" in view.page.inner_text("#answer")


def test_points_have_tooltips_with_the_run_and_its_results(opened):
    view, _, numbers = opened
    texts = view.page.evaluate(
        "document.getElementById('tradeoff').data.filter((t) => t.mode === 'markers')"
        ".flatMap((t) => t.customdata.map((index, i) => [index, t.text[i]]))"
    )
    for index, text in texts:
        shown = float(re.search(r"<br>CER: ([0-9.]+)", text)[1])
        assert shown == pytest.approx(numbers[index].quality.mean, abs=0.0051)
        assert "FLOP of training" in text


def test_doubts_are_said(tab, tmp_path):
    """The scores differ by less than the seeds do, and on test data the other run is better in every seed."""
    for seed in (0, 1):
        ahead = 0.3 + seed / 10
        write_vision(tmp_path / f"runs/a{seed}", [0.9, 0.5, 0.5], prequential=[None, 0.9, ahead], seed=seed)
        write_vision(
            tmp_path / f"runs/b{seed}", [0.9, 0.45, 0.45], prequential=[None, 0.9, 0.402 - seed / 100], seed=seed,
            replay="all", flops=300,
        )  # fmt: skip
    write_report(read_runs([tmp_path / "runs"]), tmp_path / "report", page_only=True)
    with PageView(tab, tmp_path / "report/index.html") as view:
        said = view.page.locator("#answer .doubt").all_inner_texts()
        assert view.page.inner_text("#answer .best") == "SM"
        assert any(
            text.startswith("The validation data cannot tell whether another run") and "SM, replay" in text
            for text in said
        )
        # Paired over the two seeds, replay has 5 points less error in each.
        assert any("test: better (-5.00 ± 0.00 points)" in text for text in said)

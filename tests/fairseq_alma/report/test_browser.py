"""The page in a real browser, loaded from disk, without a network."""

from urllib.parse import quote

import pytest
from fairseq_alma.report.choice import pareto_front
from fairseq_alma.report.labels import group_label

from fairseq_alma.core.printing import printable
from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.browser import CHROMIUM, PageView
from tests.fairseq_alma.report.ledgers import write_text, write_vision
from tests.fairseq_alma.report.test_page import HOSTILE

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


def test_the_page_opens_from_disk_without_a_network_or_a_message(opened):
    view, comparison, _ = opened
    assert view.page.title() == "ALMA report: books, B = 2; mnist, B = 4"
    assert sorted(view.rows()) == list(range(40))
    assert view.page.inner_text("#count") == "40 of 40 runs"
    assert len(comparison.finished_groups) == 38


def test_a_budget_that_no_run_keeps_gives_a_message(opened):
    view, _, _ = opened
    for name in ("comp", "params", "target"):
        view.slide(name, 0)
    assert view.best() is None
    assert "No run keeps to this budget" in view.page.inner_text("#answer")
    for name in ("params", "target"):
        view.slide(name, 10**6)
    view.slide("target", 0)
    view.slide("comp", 0)
    said = view.page.inner_text("#answer")
    assert "the lowest average validation error is" in said
    assert "the least training is" in said


def test_the_pareto_front_equals_that_of_python_on_every_axis_and_under_every_filter(opened):
    view, comparison, numbers = opened
    xs = {
        "comp": lambda n: n.comp,
        "params": lambda n: n.num_params,
        "mem": lambda n: n.mem,
        "wall": lambda n: n.wall_seconds,
    }
    for learner, objective in ((None, "all"), (None, "final"), ("gens", "after")):
        ys = {
            "quality": lambda n: n.quality.mean,
            "value": lambda n, objective=objective: n.scores[objective].value.mean,
            "score": lambda n, objective=objective: n.scores[objective].score,
        }
        view.objective(objective)
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
                assert view.front() == sorted(shown[i] for i in pareto_front(points)), (objective, x, y)


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
    view.page.click("#runs th button:text-is('CER')")
    assert {i for i, group in enumerate(comparison.groups) if not group.is_finished} == set(view.rows()[-2:])


def test_a_run_that_is_clicked_shows_its_settings_and_its_command(opened):
    view, comparison, _ = opened
    view.page.click("#runs tr[data-run='7']")
    group = comparison.groups[7]
    assert view.page.inner_text("#command") == "alma-vision dataset=mnist out=runs/runs"
    detail = view.page.inner_text("#detail")
    assert group_label(group, comparison.varied_settings) in detail
    assert str(group.folder) in detail
    assert view.page.get_attribute("#runs tr[data-run='7']", "class").split()[-1] == "chosen"
    assert "7" in view.page.get_attribute("#curves", "data-shown").split(",")


def test_sliders_filters_and_the_chosen_run_survive_a_reload(opened):
    view, _, _ = opened
    view.objective("final")
    view.slide("comp", 3)
    view.page.fill("#price", "2.5")
    view.page.click("#filters .chip[data-filter=learner][data-value=ens]")
    view.page.select_option("#y-axis", "score")
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
    assert view.page.input_value("#y-axis") == "score"
    assert view.page.input_value("#price") == "2.5"
    assert view.page.is_checked("#objectives input[value=final]")


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_is_usable_when_narrow_and_when_wide(tab, report, width, tmp_path):
    with PageView(tab, report[0], width=width, height=900) as view:
        view.page.select_option("#comparison", "1")
        view.frame()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#comp", "#params", "#target", "#tradeoff", "#waits", "#curves", "#answer", "#comparison"):
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


def test_hostile_settings_are_text(tab, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, command=[HOSTILE], dataset=HOSTILE)
    write_vision(tmp_path / "b", [0.9, 0.6], learner="<img src=x onerror=alert(2)>", knob="2", dataset=HOSTILE)
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with PageView(tab, tmp_path / "index.html") as view:
        for row in (0, 1):
            view.page.click(f"#runs tr[data-run='{row}']")
            view.frame()
        assert printable(HOSTILE) in view.page.text_content("#runs")
        assert view.page.locator("img").count() == 0


def test_a_diverged_run_is_beaten_by_every_other(tab, tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0, float("inf")], validations=[900.0, 50.0, float("inf")])
    write_text(tmp_path / "b", [900.0, 900.0, 40.0], wait=2)
    data = read_runs([tmp_path])
    (tmp_path / "index.html").write_text(page_of(data), encoding="utf-8")
    with PageView(tab, tmp_path / "index.html") as view:
        [comparison] = data.comparisons
        assert comparison.groups[view.best()].wait == 2
        assert "inf" in view.page.inner_text("#alternatives td.worse")
        assert "-" not in view.page.inner_text("#alternatives td.worse")
        view.objective("final")
        assert view.front() == [view.best()]


def test_a_setting_is_no_link_in_a_legend(tab, tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner="<a href='https://evil.example'>click</a>")
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path])), encoding="utf-8")
    with PageView(tab, tmp_path / "index.html") as view:
        assert view.page.locator("#tradeoff a[*|href*=evil], #curves a[*|href*=evil]").count() == 0


def test_the_chosen_run_is_found_again_in_a_report_with_more_runs(tab, tmp_path):
    write_vision(tmp_path / "runs/b", [0.9, 0.5], learner="gmoe", row_experts=[1, 1])
    index = tmp_path / "index.html"
    index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
    with PageView(tab, index) as view:
        view.page.click("#runs tbody tr")
        before = view.page.inner_text("#detail")
        write_vision(tmp_path / "runs/a", [0.9, 0.4], learner="sm")
        write_vision(tmp_path / "runs/c", [0.9, 0.4], dataset="digits")
        index.write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
        view.page.reload()
        view.page.wait_for_selector("#tradeoff .main-svg")
        assert "gMoE" in view.page.inner_text("#detail").splitlines()[0] and "gMoE" in before
        assert view.page.inner_text("#comparison option:checked").startswith("mnist")


@pytest.mark.parametrize("state", ['{"only":{"learner":5}}', '{"comp":[],"x":"toString"}', '{"c":"length","chosen":9}'])
def test_an_address_with_an_invalid_state_opens_the_page_without_it(tab, report, state):
    with PageView(tab, report[0], state=quote(state)) as view:
        assert view.rows()


def test_for_a_language_model_the_page_shows_perplexities(tab, report):
    with PageView(tab, report[0]) as view:
        view.page.select_option("#comparison", "0")
        view.frame()
        answer = view.page.inner_text("#answer")
        # sqrt(50 * 40), and (50 + 40) / 2.
        assert "geometric mean perplexity over all arrivals 44.72" in answer
        assert "arithmetic mean, as in the paper, 45.00" in answer
        assert "averaged as logarithms" in view.page.inner_text("#objective-note")
        assert view.page.inner_text("#target-label").startswith("Target: prequential perplexity")
        view.objective("final")
        assert "final perplexity 40.00" in view.page.inner_text("#answer")


@pytest.mark.parametrize("is_old", [False, True])
def test_the_page_answers_by_the_prequential_error_and_says_so(tab, tmp_path, is_old):
    """Wait 1 has the lower validation error, and wait 2 the lower prequential error."""
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.5], validations=[0, 0.1, 0.1], prequential=[None, 0.9, 0.5])
    late = [None, 0.9, None if is_old else 0.4]
    write_vision(tmp_path / "runs/b", [0.9, 0.9, 0.2], validations=[0, 0.9, 0.2], wait=2, prequential=late)
    (tmp_path / "index.html").write_text(page_of(read_runs([tmp_path / "runs"])), encoding="utf-8")
    with PageView(tab, tmp_path / "index.html") as view:
        answer, head = view.page.inner_text("#answer"), view.page.inner_text("#runs thead")
        assert view.page.inner_text("#answer .best") == ("SM, wait 1" if is_old else "SM, wait 2")
        if is_old:
            assert "the lowest average validation error (10.00 %) of 2 runs within the budget." in answer
            assert "1 of 2 finished runs have no prequential score" in answer
            assert "average validation error, %" in head
        else:
            assert "the lowest prequential error (40.00 %) of 2 runs within the budget." in answer
            assert "before any stage uses it" in answer
            assert "prequential error, %" in head
            assert "40.00" in view.page.inner_text("#runs tbody")

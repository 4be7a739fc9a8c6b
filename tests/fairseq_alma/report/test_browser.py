"""The page in a real browser, loaded from disk, without a network."""

import re
from urllib.parse import quote

import pytest

from fairseq_alma.core.printing import printable
from fairseq_alma.report.cli import write_report
from fairseq_alma.report.numbers import best_of
from fairseq_alma.report.objectives import OBJECTIVES, value_explanation
from fairseq_alma.report.page import glossary
from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.browser import CHROMIUM, PageView
from tests.fairseq_alma.report.ledgers import write_text, write_vision
from tests.fairseq_alma.report.test_page import HOSTILE

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


def write_page(folder):
    """Write the page of the runs in folder/runs, and return its path."""
    path = folder / "index.html"
    path.write_text(page_of(read_runs([folder / "runs"])), encoding="utf-8")
    return path


def pareto_front(points):
    """Return the indices of the points that no other point beats: small coordinates are good."""

    def beats(a, b):
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def test_the_page_opens_from_disk_without_a_network_or_a_message(opened):
    view, comparison, _ = opened
    assert view.page.title() == "ALMA report: books, B = 2; mnist, B = 4"
    assert sorted(view.rows()) == list(range(40))
    assert view.page.inner_text("#count") == "40 of 40 runs"
    assert len(comparison.finished_groups) == 38


def test_the_page_opens_on_the_comparison_with_the_most_runs(tab, report):
    path, data = report
    assert [len(comparison.groups) for comparison in data.comparisons] == [1, 40]
    with PageView(tab, path) as view:
        assert view.page.inner_text("#comparison option:checked") == "mnist, B = 4 (40 runs)"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_best_run_and_its_numbers_are_on_top(opened, objective):
    view, comparison, numbers = opened
    view.objective(objective)
    best = best_of(numbers, objective)
    assert view.best() == best == view.rows()[0]
    assert view.page.inner_text("#answer strong") == comparison.label_of(comparison.groups[best])
    said, score = view.page.inner_text("#answer"), numbers[best].scores[objective]
    assert f"of 38 runs, on validation data: {score.validation_estimate.text(2, 100)} % (" in said
    assert f"is {score.value.text(2, 100)} %, its CER {numbers[best].quality.text()}" in said
    assert value_explanation(objective, is_vision=True) in view.page.inner_text("#meaning")
    assert f"<b>{comparison.label_of(comparison.groups[best])}</b>" in view.page.evaluate(
        "document.getElementById('curves').data.map((trace) => trace.name.replaceAll('<br>', ' '))"
    )


@pytest.mark.parametrize(
    ("learner", "objective"),
    [(None, "all"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((None, "final"), ("gens", "after")))],
)
def test_the_pareto_front_is_right_on_every_axis_and_under_every_filter(opened, learner, objective):
    view, comparison, numbers = opened
    xs = {
        "comp": lambda n: n.comp,
        "params": lambda n: n.num_params,
        "mem": lambda n: n.mem,
        "wall": lambda n: n.wall_seconds,
    }
    ys = {
        "quality": lambda n: n.quality.mean,
        "value": lambda n: n.scores[objective].value.mean,
        "score": lambda n: n.scores[objective].score,
    }
    view.objective(objective)
    if learner:
        view.filter("learner", learner)
    shown = [
        i
        for i, group in enumerate(comparison.groups)
        if group.is_finished and (learner is None or group.learner == learner)
    ]  # fmt: skip
    for x, of_x in xs.items():
        for y, of_y in ys.items():
            view.page.select_option("#x-axis", x)
            view.page.select_option("#y-axis", y)
            points = [(of_x(numbers[i]), of_y(numbers[i])) for i in shown]
            assert view.front() == sorted(shown[i] for i in pareto_front(points)), (x, y)
    view.page.select_option("#x-axis", "wait")
    assert view.front() == []


def test_filters_change_what_is_shown_and_have_a_way_back(opened):
    view, comparison, numbers = opened

    def with_value(name, *values):
        return {i for i, group in enumerate(comparison.groups) if getattr(group, name) in values}

    view.filter("wait", "2")
    assert set(view.rows()) == with_value("wait", 2)
    points = view.page.evaluate(
        "document.getElementById('tradeoff').data.filter((t) => t.mode === 'markers').flatMap((t) => t.customdata)"
    )
    assert set(points) == {i for i in with_value("wait", 2) if comparison.groups[i].is_finished}
    curves = view.page.get_attribute("#curves", "data-shown")
    assert set(map(int, curves.split(","))) <= set(view.rows())
    best = min(points, key=lambda i: numbers[i].validation_score)
    assert view.best() == best  # the filters limit which runs can be best
    view.filter("wait", "4")
    assert set(view.rows()) == with_value("wait", 2, 4)
    view.filter("learner", "ens")
    assert set(view.rows()) == with_value("wait", 2, 4) & with_value("learner", "ens")
    for value in ("2", "4"):
        view.filter("wait", value)
    assert set(view.rows()) == with_value("learner", "ens")
    view.page.focus("#filters input[value=ens]")
    view.page.keyboard.press("Space")
    assert len(view.rows()) == 40


def test_without_a_finished_run_the_page_says_so(tab, tmp_path):
    write_vision(tmp_path / "runs/a", [0.9, 0.5], mega_batches=4)
    with PageView(tab, write_page(tmp_path)) as view:
        assert view.best() is None
        assert "none can be chosen" in view.page.inner_text("#answer")


def test_the_table_sorts_both_ways_and_unknown_values_come_last(opened):
    view, comparison, numbers = opened
    comp = "#runs th button:has-text('Comp, TFLOP')"
    view.page.click(comp)
    flops = [numbers[i].comp for i in view.rows()]
    assert flops == sorted(flops)
    view.page.click(comp)
    flops = [numbers[i].comp for i in view.rows()]
    assert flops == sorted(flops, reverse=True)
    for clicks in (1, 2):
        view.page.click("#runs th button:has-text('CER')")
        assert {i for i, group in enumerate(comparison.groups) if not group.is_finished} == set(view.rows()[-2:]), (
            clicks
        )
    view.page.click("#runs th button:has-text('wall time')")
    seconds = [numbers[i].wall_seconds for i in view.rows()]
    assert seconds == sorted(seconds)


def test_a_run_that_is_clicked_shows_its_settings_and_its_command(opened):
    view, comparison, _ = opened
    view.page.click("#runs tr[data-run='7']")
    group = comparison.groups[7]
    assert view.page.inner_text("#command") == "alma-vision dataset=mnist out=runs/runs"
    detail = view.page.inner_text("#detail")
    assert comparison.label_of(group) in detail and str(group.folder) in detail
    assert view.page.get_attribute("#runs tr[data-run='7']", "class") == "chosen"
    assert "7" in view.page.get_attribute("#curves", "data-shown").split(",")


def test_code_with_changes_is_named_in_the_details(tab, tmp_path):
    run = write_vision(tmp_path / "runs/a", [0.9, 0.5])
    path = run / "provenance.json"
    path.write_text(path.read_text().replace("abc123", "abc123-dirty"))
    with PageView(tab, write_page(tmp_path)) as view:
        assert "had changes that its commit does not contain" in view.page.inner_text("#detail")


def test_filters_and_the_chosen_run_survive_a_reload(opened):
    view, _, _ = opened
    view.objective("final")
    view.filter("learner", "ens")
    view.page.select_option("#y-axis", "score")
    view.page.click("#runs th button:has-text('CER')")
    view.page.click("#runs tbody tr >> nth=2")
    before = (view.best(), view.front(), view.rows(), view.page.inner_text("#detail"))
    view.page.reload()
    view.page.wait_for_selector("#tradeoff .main-svg")
    assert before == (view.best(), view.front(), view.rows(), view.page.inner_text("#detail"))
    assert view.page.input_value("#y-axis") == "score"
    assert view.page.input_value("#objective") == "final"


@pytest.mark.parametrize("width", [400, pytest.param(1600, marks=pytest.mark.slow)])
def test_the_page_shows_the_plots_first_and_is_usable_when_narrow_and_when_wide(tab, report, width):
    with PageView(tab, report[0], width=width, height=900) as view:
        assert view.page.evaluate("document.documentElement.scrollWidth") <= width
        for selector in ("#answer", "#curves", "#tradeoff", "#filters", "#comparison", "#objective"):
            box = view.page.locator(selector).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, selector
        tops = [view.page.locator(f"#{name}").bounding_box()["y"] for name in ("answer", "curves", "filters", "runs")]
        assert tops == sorted(tops) and tops[1] < 900
        for plot in ("curves", "tradeoff"):  # the legend covers neither the curves nor the titles of the axes
            legend = view.page.locator(f"#{plot} .legend").bounding_box()
            for part in ("xtitle", "ytitle"):
                box = view.page.locator(f"#{plot} .{part}").bounding_box()
                assert box["y"] + box["height"] <= legend["y"] + 1, (plot, part)
        for chip in view.page.locator(".chip").all():
            assert chip.bounding_box()["height"] >= 24  # large enough for a finger
        view.filter("learner", "sm")
        view.page.locator("#runs tbody tr").first.click()
        assert view.page.inner_text("#command")


def test_hostile_settings_are_text(tab, tmp_path):
    write_vision(tmp_path / "runs/a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, command=[HOSTILE], dataset=HOSTILE)
    link = "<a href='https://evil.example'>click</a><img src=x onerror=alert(2)>"
    write_vision(tmp_path / "runs/b", [0.9, 0.6], learner=link, knob="2", dataset=HOSTILE)
    with PageView(tab, write_page(tmp_path)) as view:
        for row in (0, 1):
            view.page.click(f"#runs tr[data-run='{row}']")
        assert printable(HOSTILE) in view.page.text_content("#runs")
        assert view.page.locator("img").count() == 0
        assert view.page.locator("a[*|href*=evil]").count() == 0


def test_a_diverged_run_is_beaten_by_every_other(tab, tmp_path):
    write_text(tmp_path / "runs/a", [900.0, 50.0, float("inf")], validations=[900.0, 50.0, float("inf")])
    write_text(tmp_path / "runs/b", [900.0, 900.0, 40.0], wait=2)
    with PageView(tab, write_page(tmp_path)) as view:
        assert view.page.inner_text("#answer strong") == "SM, wait 2"
        assert view.column("final perplexity") == ["40.00", "inf"]
        view.objective("final")
        assert view.front() == [view.best()]


def test_the_chosen_run_is_found_again_in_a_report_with_more_runs(tab, tmp_path):
    write_vision(tmp_path / "runs/b", [0.9, 0.5], learner="gmoe", row_experts=[1, 1], width=8)
    write_vision(tmp_path / "runs/d", [0.9, 0.4], learner="gmoe", row_experts=[1, 1], width=4)
    with PageView(tab, write_page(tmp_path)) as view:
        view.page.click("#runs tbody tr >> nth=1")
        before = view.page.inner_text("#detail")
        write_vision(tmp_path / "runs/a", [0.9, 0.4], width=4)
        write_vision(tmp_path / "runs/c", [0.9, 0.4], dataset="digits")
        write_page(tmp_path)
        view.page.reload()
        view.page.wait_for_selector("#tradeoff .main-svg")
        assert "gMoE, width 8" in view.page.inner_text("#detail").splitlines()[0] and "gMoE, width 8" in before
        assert view.page.inner_text("#comparison option:checked").startswith("mnist")


@pytest.mark.parametrize(
    "state",
    [
        '{"only":{"learner":5}}',
        pytest.param('{"comp":[],"x":"toString"}', marks=pytest.mark.slow),
        pytest.param('{"c":"length","chosen":9}', marks=pytest.mark.slow),
        pytest.param('{"only":null,"objective":"x","sort":"none"}', marks=pytest.mark.slow),
    ],
)
def test_an_address_with_an_invalid_state_opens_the_page_without_it(tab, report, state):
    with PageView(tab, report[0], state=quote(state)) as view:
        assert len(view.rows()) == 40


def test_for_a_language_model_the_page_shows_perplexities(tab, report):
    with PageView(tab, report[0]) as view:
        view.page.select_option("#comparison", "books, B = 2")
        answer = view.page.inner_text("#answer")
        # sqrt(50 * 40), and (50 + 40) / 2.
        assert "its geometric mean perplexity over all arrivals is 44.72, its average perplexity 45.00" in answer
        assert "SM has the lowest prequential perplexity of 1 run, on validation data: 44.72 (1 seed)." in answer
        assert "geometric mean" in view.page.inner_text("#meaning")
        view.objective("final")
        assert "its final perplexity is 40.00" in view.page.inner_text("#answer")
        assert view.page.evaluate("document.getElementById('curves').data[0].x") == [1, 2]  # from the first stage on


@pytest.mark.parametrize("is_old", [False, True])
def test_the_page_answers_by_the_prequential_error_and_says_so(tab, tmp_path, is_old):
    """Wait 1 has the lower validation error, and wait 2 the lower prequential error."""
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.5], validations=[0, 0.1, 0.1], prequential=[None, 0.9, 0.5])
    late = [None, 0.9, None if is_old else 0.4]
    write_vision(tmp_path / "runs/b", [0.9, 0.9, 0.2], validations=[0, 0.9, 0.2], wait=2, prequential=late)
    with PageView(tab, write_page(tmp_path)) as view:
        answer, meaning = view.page.inner_text("#answer"), view.page.inner_text("#meaning")
        if is_old:
            assert answer.startswith("SM, wait 1 has the lowest average validation error of 2 runs")
            assert "10.00 % (1 seed); the next is SM, wait 2 with 55.00 % (1 seed)." in answer
            assert "1 of 2 finished runs have no prequential score" in meaning
            assert view.column("average validation error, % (validation)") == ["10.00", "55.00"]
        else:
            assert answer.startswith("SM, wait 2 has the lowest prequential error of 2 runs")
            assert "before any stage uses it" in meaning
            assert view.column("prequential error, % (validation)") == ["40.00", "50.00"]


def test_terms_are_explained(opened):
    view, _, _ = opened
    assert view.page.get_attribute("#filters legend .term:text-is('wait')", "title") == glossary()["Wait"]
    assert view.page.get_attribute("#runs th button:text-is('Mem')", "title") == glossary()["Mem"]
    view.page.click("#glossary summary")  # for the keyboard and for fingers
    assert glossary()["gEns"] in view.page.inner_text("#glossary")


def test_no_two_curves_have_the_same_marks(opened):
    view, _, _ = opened
    marks = view.page.evaluate(
        "document.getElementById('curves').data.map((t) => [t.line.color, t.line.dash, t.marker.symbol].join())"
    )
    assert len(set(marks)) == len(marks) == 8
    assert view.page.inner_text("#curves-note").startswith("8 of 40 runs: the best by validation.")


def test_the_page_shows_the_printed_figures(tab, tmp_path):
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.4])
    data = read_runs([tmp_path / "runs"])
    write_report(data, tmp_path / "report")
    with PageView(tab, tmp_path / "report/index.html") as view:
        targets = [link.get_attribute("href") for link in view.page.locator("#figures a").all()]
        targets += [image.get_attribute("src") for image in view.page.locator("#figures img").all()]
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
    for plot in ("tradeoff", "curves"):
        assert len(view.page.get_attribute(f"#{plot}", "aria-label")) > 20


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

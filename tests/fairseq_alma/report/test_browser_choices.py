"""What a reader can choose on the page: the stream, filters, budgets as numbers, and two runs to compare."""

import pytest
from fairseq_alma.report.choice import Budget, difference, rivals, same_results, values_by_seed
from fairseq_alma.report.labels import group_label

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.objectives import OBJECTIVES
from fairseq_alma.report.page import page as page_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.browser import CHROMIUM, PageView
from tests.fairseq_alma.report.ledgers import only_comparison, write_vision

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


def write_page(folder):
    """Write the page of the runs in folder/runs, and return its path."""
    path = folder / "index.html"
    path.write_text(page_of(read_runs([folder / "runs"])), encoding="utf-8")
    return path


def doubts_of(view):
    return " ".join(view.page.locator("#answer .doubt").all_inner_texts())


def test_the_page_opens_on_the_comparison_with_the_most_runs(tab, report):
    path, data = report
    assert [len(comparison.groups) for comparison in data.comparisons] == [1, 40]
    with PageView(tab, path) as view:
        assert view.page.inner_text("#comparison option:checked") == "mnist, B = 4 (40 runs)"
        assert view.page.inner_text("#count") == "40 of 40 runs"


def test_every_filter_has_one_rule_and_a_way_back(opened):
    """`replay` has two values and `learner` four: a click shows only the pressed values of both."""
    view, comparison, _ = opened

    def pressed(name):
        chips = view.page.locator(f"#filters fieldset:has([data-any={name}]) .chip[aria-pressed=true]")
        return chips.all_inner_texts()

    def rows_with(name, *values):
        return {i for i, group in enumerate(comparison.groups) if getattr(group, name) in values}

    assert pressed("replay") == pressed("learner") == ["any"]
    view.page.click("#filters .chip[data-filter=replay][data-value=all]")
    assert set(view.rows()) == rows_with("replay", "all") and pressed("replay") == ["all"]
    view.page.click("#filters .chip[data-filter=replay][data-value=all]")
    assert len(view.rows()) == 40 and pressed("replay") == ["any"]
    view.page.click("#filters .chip[data-filter=learner][data-value=ens]")
    view.page.click("#filters .chip[data-filter=learner][data-value=sm]")
    assert set(view.rows()) == rows_with("learner", "ens", "sm") and pressed("learner") == ["sm", "ens"]
    view.page.click("#filters .chip[data-any=learner]")
    assert len(view.rows()) == 40 and pressed("learner") == ["any"]
    view.page.focus("#filters .chip[data-filter=wait][data-value='2']")
    view.page.keyboard.press("Enter")
    assert set(view.rows()) == rows_with("wait", 2)
    assert view.page.evaluate("document.activeElement.dataset.value") == "2"  # the focus stays where it was


@pytest.mark.parametrize(
    ("typed", "limit", "allowed"),
    [
        ("12.6T", "12.6 TFLOP", {4, 8, 16}),  # 12.60894 T reads "12.6 T" on the page
        ("12.60T", "12.6 TFLOP", {4, 8}),
        (" 100 GFLOP", "100 GFLOP", {4}),
        ("1e11", "100 GFLOP", {4}),
        ("100,000,000,000", "100 GFLOP", {4}),
        ("50g", "50 GFLOP", {4}),
        ("49G", "49 GFLOP", set()),
        ("", "no limit", {4, 8, 16}),
    ],
)
def test_a_budget_can_be_typed(three_costs, typed, limit, allowed):
    view, widths = three_costs
    view.page.fill("#comp-typed", "1")
    view.page.fill("#comp-typed", typed)
    view.frame()
    assert view.page.inner_text("#comp-value") == limit
    beyond = view.page.eval_on_selector_all("#runs tr.beyond", "rows => rows.map((row) => Number(row.dataset.run))")
    assert {width for index, width in enumerate(widths) if index not in beyond} == allowed
    assert view.best() == (max((i for i, width in enumerate(widths) if width in allowed), default=None))


def test_a_text_that_is_no_number_is_refused_and_a_slider_removes_it(three_costs):
    view, _ = three_costs
    for wrong in ("12,6T", "much", "-3G", "1e999"):
        view.page.fill("#comp-typed", wrong)
        assert f'"{wrong}" is not a number. Type a number such as 100G' in view.page.inner_text("#comp-error")
        assert view.page.get_attribute("#comp-typed", "aria-invalid") == "true"
        assert view.page.inner_text("#comp-value") == "no limit"
    view.slide("comp", 0)
    assert view.page.inner_text("#comp-error") == view.page.input_value("#comp-typed") == ""
    assert view.page.inner_text("#comp-value") == "50 GFLOP"


def test_a_target_is_typed_in_percent(three_costs):
    view, widths = three_costs
    view.page.fill("#target-typed", "70%")  # (0.9 + 0.5) / 2
    view.frame()
    assert view.page.inner_text("#target-value") == "70.00 %"
    assert widths[view.best()] == 8


@pytest.fixture
def three_costs(tab, tmp_path):
    """Runs of 50 G, 12.6 T and 12.60894 T; more training is better. The page, and the width of each run."""
    ends = {4: (25_000_000_000, 0.6), 8: (6_300_000_000_000, 0.5), 16: (6_304_470_000_000, 0.4)}
    for width, (flops, end) in ends.items():
        write_vision(tmp_path / f"runs/{width}", [0.9, 0.9, end], wait=2, width=width, flops=flops)
    comparison = only_comparison(tmp_path / "runs")
    with PageView(tab, write_page(tmp_path)) as view:
        yield view, [group.settings["width"] for group in comparison.groups]


def test_any_two_runs_can_be_compared_and_the_numbers_are_those_of_python(opened):
    view, comparison, numbers = opened
    labels = [group_label(group, comparison.varied_settings) for group in comparison.groups]
    verdicts = set()
    values = {
        index: values_by_seed(group, result)
        for index, (group, result) in enumerate(zip(comparison.groups, numbers, strict=True))
        if group.is_finished
    }
    pairs = {difference(values[i], values[j]).verdict: (i, j) for i in values for j in values if i != j}
    assert set(pairs) == {"one seed", "no clear difference", "better", "worse"}
    for first, second in pairs.values():
        view.page.select_option("#pair-first", label=labels[first])
        view.page.select_option("#pair-second", label=labels[second])
        view.frame()
        rows = {row[0]: row[1:] for row in view.table("#pair")}
        pair = [(comparison.groups[i], numbers[i]) for i in (first, second)]
        names = dict(zip(OBJECTIVES, list(rows)[1:4], strict=True))
        for objective in OBJECTIVES:
            found = difference(*(values_by_seed(group, result, objective) for group, result in pair))
            shown = rows[names[objective]]
            assert float(shown[0].split()[0]) == pytest.approx(
                100 * pair[0][1].scores[objective].value.mean, abs=0.0051
            )
            assert float(shown[2].split()[0]) == pytest.approx(100 * found.mean, abs=0.0051)
            assert shown[3] == found.verdict
            verdicts.add(found.verdict)
        cer = [
            dict(zip((run.seed for run in group.counted_runs), result.quality_by_seed, strict=True))
            for group, result in pair
        ]
        found = difference(*cer)
        assert float(rows["CER"][2].split()[0]) == pytest.approx(found.mean, abs=0.0051)
        assert rows["CER"][3] == found.verdict
        gap = pair[1][1].comp - pair[0][1].comp
        assert rows["training FLOPs"][3] == ("equal" if gap == 0 else "more" if gap > 0 else "fewer")
        assert f"{labels[second]} minus {labels[first]}" in view.page.inner_text("#pair-note")
    assert verdicts == set(pairs)


def test_a_run_of_the_table_is_compared_with_the_run_on_top_and_this_survives_a_reload(opened):
    view, comparison, _ = opened
    labels = [group_label(group, comparison.varied_settings) for group in comparison.groups]
    other = next(index for index in view.rows() if index != view.best())
    view.page.click(f"#runs tr[data-run='{other}']")
    view.page.click("#compare-chosen")
    view.frame()
    head = view.page.locator("#pair thead th").all_inner_texts()
    assert head[1:3] == [labels[view.best()], labels[other]]
    view.page.reload()
    view.page.wait_for_selector("#tradeoff .main-svg")
    assert view.page.locator("#pair thead th").all_inner_texts() == head
    view.page.select_option("#pair-first", label=labels[other])
    assert "the same run" in view.page.inner_text("#pair-note")


def test_runs_with_the_same_results_are_no_rivals(tab, tmp_path):
    """SM and gEns with one stage compute the same, and so do UMix and Ens here. Only one of the latter is a rival."""
    for learner in ("sm", "gens", "umix", "ens"):
        for seed, end in ((0, 0.4), (1, 0.5)):
            late = end + (0.01 - seed / 40 if learner in ("umix", "ens") else 0)
            write_vision(tmp_path / f"runs/{learner}{seed}", [0.9, 0.9, late], learner=learner, wait=2, seed=seed)
    comparison = only_comparison(tmp_path / "runs")
    numbers = all_numbers(comparison)
    by_learner = {group.learner: index for index, group in enumerate(comparison.groups)}
    first = same_results(comparison, numbers)
    assert first[by_learner["gens"]] == by_learner["sm"] and first[by_learner["umix"]] == by_learner["ens"]
    with PageView(tab, write_page(tmp_path)) as view:
        assert comparison.groups[view.best()].learner == "ens"
        assert view.rivals() == [by_learner["sm"]]
        said = view.page.inner_text("#answer")
        assert "The same results, number for number, because the computation is the same: UMix." in said
        assert "gEns" not in said


def test_a_run_that_the_filter_hides_is_not_named_in_the_answer(tab, tmp_path):
    """Replay is better on test data in every seed, and worse on validation data."""
    for seed in (0, 1):
        ahead = 0.3 + seed / 10
        write_vision(tmp_path / f"runs/a{seed}", [0.9, 0.5, 0.5], prequential=[None, 0.9, ahead], seed=seed)
        write_vision(
            tmp_path / f"runs/b{seed}", [0.9, 0.45, 0.45], prequential=[None, 0.9, ahead + 0.2], seed=seed, replay="all"
        )
    with PageView(tab, write_page(tmp_path)) as view:
        assert "another run within the budget is better than the run on top: SM, replay." in doubts_of(view)
        view.page.click("#filters .chip[data-filter=replay][data-value=no]")
        view.frame()
        assert "SM, replay" not in doubts_of(view)
        assert "SM, replay (hidden by the filter)" in view.page.inner_text("#alternatives")


def test_the_page_says_so_if_nothing_is_doubtful_and_leads_from_a_name_to_the_details(tab, tmp_path):
    for seed in (0, 1):
        for width, end in ((4, 0.8), (8, 0.3)):
            write_vision(
                tmp_path / f"runs/{width}_{seed}", [0.9, 0.5, end], validations=[0, 0.5, end + seed / 100], seed=seed,
                width=width,
            )  # fmt: skip
    for path in (tmp_path / "runs").glob("8_*/provenance.json"):
        path.write_text(path.read_text().replace("abc123", "abc123-dirty"))
    with PageView(tab, write_page(tmp_path)) as view:
        assert doubts_of(view) == ""
        assert "the other run within the budget is worse by more than the variation" in view.page.inner_text("#answer")
        view.page.click("#answer .best button")
        view.frame()
        box = view.page.locator("#detail-section").bounding_box()
        assert 0 <= box["y"] < 900
        assert "had changes that its commit does not contain" in view.page.inner_text("#detail")


def test_a_better_run_is_named_also_if_it_differs_in_several_decisions(tab, tmp_path):
    """Ens at wait 2 is no alternative to SM at wait 1. By test data it is better in every seed, by validation worse."""
    for seed in (0, 1):
        ahead, more = 0.3 + seed / 10, {"seed": seed, "width": 8, "wait": 2, "learner": "ens", "members": 3}
        write_vision(tmp_path / f"runs/a{seed}", [0.9, 0.5, 0.5], prequential=[None, 0.9, ahead], seed=seed, width=4)
        write_vision(tmp_path / f"runs/b{seed}", [0.9, 0.3, 0.2], prequential=[None, 0.9, ahead + 0.2], **more)
    with PageView(tab, write_page(tmp_path)) as view:
        assert view.page.inner_text("#answer .best").startswith("SM")
        assert "another run within the budget is better than the run on top: Ens" in doubts_of(view)
        assert "Ens" not in view.page.inner_text("#alternatives")


def test_a_typed_budget_stays_in_its_field_under_another_objective(three_costs):
    view, _ = three_costs
    view.page.fill("#comp-typed", "150G")
    view.page.check("input[name=objective][value=final]")
    view.frame()
    assert view.page.input_value("#comp-typed") == "150G"
    view.page.fill("#comp-typed", "")
    view.frame()
    assert view.page.inner_text("#comp-value") == "no limit"
    view.page.check("input[name=objective][value=all]")


def test_the_answer_says_by_which_data_each_verdict_judges(tab, tmp_path):
    """By the validation error, wait 2 may be better, because the score of wait 1 is too low. Test data say: worse."""
    for seed in (0, 1):
        write_vision(tmp_path / f"runs/a{seed}", [0.9, 0.5, 0.5], validations=[0, 0.5, 0.5], seed=seed)
        write_vision(
            tmp_path / f"runs/b{seed}", [0.9, 0.9, 0.4 + seed / 100], validations=[0, 0.9, 0.2], wait=2, seed=seed
        )
    comparison = only_comparison(tmp_path / "runs")
    assert rivals(comparison, all_numbers(comparison), Budget())
    with PageView(tab, write_page(tmp_path)) as view:
        assert view.page.inner_text("#rule").startswith(
            "Chosen by validation data, never by test data: the lowest average"
        )
        assert view.page.inner_text("#facts").startswith("Measured on test data, mean of 2 seeds: ")
        # The mean differences of the two seeds are 0.15 and 0.155: 0.1525 +- 12.71 * 0.0025.
        assert "SM, wait 2: validation 55.00 % (this run 50.00 %); test: worse (+15.25 ± 3.18 points)" in doubts_of(
            view
        )
        assert "judged by test data" in view.page.inner_text("#alternatives caption")


def test_with_a_target_the_cheapest_run_by_test_data_is_named_too(tab, tmp_path):
    """By validation data, only the large run reaches 60 %; on test data, both do."""
    write_vision(tmp_path / "runs/a", [0.9, 0.5], validations=[0, 0.7], width=4, flops=100)
    write_vision(tmp_path / "runs/c", [0.9, 0.55], validations=[0, 0.7], width=5, flops=101)
    write_vision(tmp_path / "runs/b", [0.9, 0.5], validations=[0, 0.5], width=8, flops=900)
    with PageView(tab, write_page(tmp_path)) as view:
        view.page.fill("#target-typed", "60")
        view.frame()
        assert view.page.inner_text("#answer .best") == "SM, width 8"
        assert "the cheapest run that reaches the target is SM, width 4: average error over all arrivals 50.00 %" in (
            doubts_of(view)
        )
        assert "Others reach it at the same training cost: SM, width 5." in doubts_of(view)


def test_runs_that_reach_a_target_at_the_same_cost_are_named(tab, tmp_path):
    """Widths 8 and 16 cost the same within 2 %, width 32 costs more."""
    for width, flops in ((8, 1000), (16, 1015), (32, 1100)):
        write_vision(tmp_path / f"runs/{width}", [0.9, 0.5, 0.4], width=width, flops=flops)
    with PageView(tab, write_page(tmp_path)) as view:
        assert "same training cost" not in view.page.inner_text("#rule")
        view.page.fill("#target-typed", "60")
        view.frame()
        assert view.page.inner_text("#answer .best") == "SM, width 8"
        assert view.page.inner_text("#rule").endswith(
            "Others reach it at the same training cost, within 2 %: SM, width 16."
        )


def test_the_cost_of_seeds_that_were_trained_together_says_what_it_covers(tab, tmp_path):
    """A ledger has 1.5 s for each mega-batch and seed: 3 s for one seed, 6 s for the two together."""
    for seed in (0, 1):
        write_vision(tmp_path / f"runs/a/seed_{seed}", [0.9, 0.5, 0.4], seed=seed, seeds=2, wall_seconds=9)
    with PageView(tab, write_page(tmp_path)) as view:
        view.page.fill("#price", "3600")
        view.frame()
        head = view.page.locator("#costs thead th").all_inner_texts()
        [row] = view.table("#costs")
        costs = dict(zip(head, row, strict=True))
        assert (costs["time, one seed"], costs["time, all seeds"]) == ("3 s", "6 s (2 seeds)")
        assert (costs["price, one seed"], costs["price, all seeds"]) == ("3.00", "6.00")
        assert "The seeds of each run were trained together, in one process." in view.page.inner_text("#costs caption")
        assert "do not record the machine" in view.page.inner_text("#costs-note")
        assert "Wall time: 9.0 s for all 2 seeds together." in view.page.inner_text("#facts")


def test_where_cer_starts_at_the_untrained_network_the_page_says_so(tab, tmp_path):
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.4], cer_from=0)
    with PageView(tab, write_page(tmp_path)) as view:
        view.page.focus("#runs th button:text-is('CER from t = 0')")
        assert "summed over t = 0 to B" in view.page.inner_text("#tip")
        view.page.focus("#runs th button:text-is('run')")
        assert "runs that differ only in the seed" in view.page.inner_text("#tip")
        assert "The error at t = 0" in view.page.inner_text("#objective-note")


def test_ticks_have_three_digits_and_differ_where_all_costs_are_almost_equal(tab, tmp_path):
    for width, flops in ((4, 618_623_999_999), (8, 618_700_000_001)):
        write_vision(tmp_path / f"runs/{width}", [0.9, 0.5, 0.4 + width / 100], width=width, flops=flops)
    with PageView(tab, write_page(tmp_path)) as view:
        ticks = view.page.locator("#tradeoff .xtick text").all_text_contents()
        assert len(ticks) > 1 and len(set(ticks)) == len(ticks)
        assert all(len(tick.rstrip("kMGTPE").replace(".", "")) <= 3 for tick in ticks), ticks

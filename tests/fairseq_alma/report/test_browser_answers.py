"""The answers of the page in a real browser are those that Python computes."""

import random

import pytest
from fairseq_alma.report.alternatives import alternatives
from fairseq_alma.report.choice import Budget, best_within, difference, rivals, slider_steps, values_by_seed
from fairseq_alma.report.labels import group_label

from fairseq_alma.report.objectives import OBJECTIVES
from tests.fairseq_alma.report.browser import CHROMIUM

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt-get install chromium)")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("num_budgets", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_the_sliders_change_the_answer_to_the_one_that_python_computes(opened, num_budgets, objective):
    view, comparison, numbers = opened
    view.objective(objective)
    finished = [n for n, group in zip(numbers, comparison.groups, strict=True) if group.is_finished]
    steps = {
        "comp": slider_steps([n.comp for n in finished]),
        "params": slider_steps([n.num_params for n in finished]),
        "target": slider_steps([n.scores[objective].score for n in finished]),
    }
    assert view.best() == best_within(numbers, Budget(), objective)
    assert view.rivals() == rivals(comparison, numbers, Budget(), objective)
    rng, answers, num_rivals = random.Random(1), set(), 0
    for _ in range(num_budgets):
        # Half of the budgets have no target: only they have rivals.
        chosen = {name: rng.randint(0, len(values)) for name, values in steps.items()}
        if rng.random() < 0.5:
            chosen["target"] = len(steps["target"])
        seen = view.answer_for(chosen)
        comp, params, target = ([*values, None][chosen[name]] for name, values in steps.items())
        limits = Budget(comp, params, target)
        wanted = best_within(numbers, limits, objective)
        assert seen["best"] == ("" if wanted is None else str(wanted)), limits
        found = rivals(comparison, numbers, limits, objective)
        assert seen["rivals"] == ",".join(map(str, found)), limits
        assert set(seen["beyond"]) == {i for i, n in enumerate(numbers) if not limits.allows(n, objective)}
        if wanted is not None:
            assert seen["label"] == group_label(comparison.groups[wanted], comparison.varied_settings)
        num_rivals += len(found)
        answers.add(wanted)
    assert len(answers) > 3 and num_rivals > 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_alternatives_of_the_best_run_are_those_that_python_finds(opened, objective):
    view, comparison, numbers = opened
    view.objective(objective)
    expected, verdicts = alternatives(comparison, numbers), set()
    for step in (10**6, 12, 6, 3, 1):
        view.slide("comp", step)
        best = view.best()
        rows = view.page.eval_on_selector_all(
            "#alternatives tr[data-run]",
            "rows => rows.map((row) => [row.dataset.change, Number(row.dataset.run),"
            " ...[...row.querySelectorAll('td')].slice(2, 4).map((cell) => cell.textContent)])",
        )
        shown = {}
        for change, other, gap, verdict in rows:
            shown.setdefault(change, []).append(other)
            groups = [(comparison.groups[i], numbers[i]) for i in (best, other)]
            found = difference(*(values_by_seed(group, result, objective) for group, result in groups))
            assert float(gap.split(" ")[0]) == pytest.approx(100 * found.mean, abs=0.0051)
            assert verdict == found.verdict
            verdicts.add(verdict)
        for change, one in expected[best].items():
            by_score = sorted(one.runs, key=lambda i: (numbers[i].scores[objective].score, i))
            assert shown.get(change, []) == by_score[:4], change
        missing = view.page.locator("#alternatives .missing").all_inner_texts()
        commands = [one.command for one in expected[best].values() if one.command]
        assert view.page.locator("#alternatives pre.command").all_inner_texts() == commands
        reasons = [one.reason for one in expected[best].values() if one.reason]
        assert len(missing) == len(reasons) + len(commands)
        assert all(any(reason in text for text in missing) for reason in reasons)
    assert len(verdicts) > 1

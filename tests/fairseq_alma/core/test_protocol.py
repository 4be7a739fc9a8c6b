"""Algorithm 1, with a learner whose every number can be worked out by hand (see tiny_learner.py)."""

import gc
import types
from dataclasses import replace

import pytest

from fairseq_alma.core.arrivals import Arrivals
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.ledger import Ledger, Prequential
from fairseq_alma.core.protocol import StreamSettings
from tests.fairseq_alma.core.tiny_learner import TestSet, TinyEvaluator, TinyLearner, ledger_without_seconds, tiny_run


def times(mega_batches):
    return [m.t for m in mega_batches]


@pytest.mark.parametrize(
    ("wait", "new", "past"),
    [
        (1, [[1], [2], [3], [4]], [[], [1], [1, 2], [1, 2, 3]]),
        (3, [[1, 2, 3], [4]], [[], [1, 2, 3]]),  # the last group is smaller and trained on all the same
        (4, [[1, 2, 3, 4]], [[]]),
    ],
)
def test_what_each_stage_sees(tmp_path, wait, new, past):
    learner = TinyLearner()
    tiny_run(tmp_path, num_mega_batches=4, wait=wait, learner=learner)
    assert [times(stage.new) for stage in learner.stages] == new
    assert [times(stage.past) for stage in learner.stages] == past
    assert [stage.index for stage in learner.stages] == list(range(1, len(new) + 1))
    assert [stage.folder for stage in learner.stages] == [
        tmp_path / "stages" / f"stage_{k:03d}" for k in range(1, len(new) + 1)
    ]


def test_the_ledger_of_4_mega_batches_at_wait_3(tmp_path):
    rows = tiny_run(tmp_path, num_mega_batches=4, wait=3)
    assert [row.t for row in rows] == [0, 1, 2, 3, 4]
    assert [row.stage for row in rows] == [0, 0, 0, 1, 2]
    assert [row.updated for row in rows] == [False, False, False, True, True]
    assert [row.scores.perplexity for row in rows] == [8, 8, 8, 5, 4]  # between stages the last value again
    assert [row.scores.num_params for row in rows] == [10, 10, 10, 10, 20]
    assert [row.spent.train_flops for row in rows] == [0, 0, 0, 300, 100]
    assert [row.spent.num_updates for row in rows] == [0, 0, 0, 3, 1]
    assert [row.spent.validation_flops for row in rows] == [0, 0, 0, 0, 7]  # what growing spent is in its row


def test_growth_comes_from_the_second_stage_on_and_before_training(tmp_path):
    calls = []
    tiny_run(tmp_path, num_mega_batches=5, wait=2, learner=TinyLearner(calls), evaluate=TinyEvaluator(calls))
    assert calls == [
        ("evaluate", []),
        ("train", 1),
        ("evaluate", [1, 2]),
        ("grow", 2),
        ("train", 2),
        ("evaluate", [1, 2, 3, 4]),
        ("grow", 3),
        ("train", 3),
        ("evaluate", [1, 2, 3, 4, 5]),
    ]


def test_the_model_is_evaluated_once_per_change(tmp_path):
    evaluate = TinyEvaluator()
    rows = tiny_run(tmp_path, num_mega_batches=7, wait=7, evaluate=evaluate)
    assert len(evaluate.calls) == 2  # untrained, and after the only stage
    assert [row.scores.perplexity for row in rows] == [8] * 7 + [1]


def test_scores_are_completed_at_new_arrivals_that_wait_and_only_there(tmp_path):
    calls = []

    def complete(num_periods):
        def add_periods(learner, scores):
            calls.append(sorted(learner.numbers))
            return [replace(scores[0], period_perplexities=[9.0] * num_periods)]

        return add_periods

    def num_periods(rows):
        return [len(row.scores.period_perplexities or ()) for row in rows]

    rows = tiny_run(tmp_path, num_mega_batches=2, wait=2, last_group="wait", complete=complete(2))
    assert num_periods(rows) == [0, 2, 0]
    assert calls == [[]]
    rows = tiny_run(tmp_path, num_mega_batches=3, wait=2, last_group="wait", complete=complete(3))
    assert num_periods(rows) == [0, 2, 0, 3]
    assert calls == [[], [1, 2]]
    # Rows that the ledger has are not measured again, and the learner is trained further as without this.
    rows = tiny_run(tmp_path, num_mega_batches=4, wait=2, last_group="wait", complete=complete(4))
    assert num_periods(rows) == [0, 2, 0, 3, 0]
    assert calls == [[], [1, 2]]
    assert [row.scores.perplexity for row in rows] == [8, 8, 6, 6, 4]


def test_with_replay_a_stage_may_train_on_the_past_again(tmp_path):
    learner = TinyLearner(replay=True)
    rows = tiny_run(tmp_path, num_mega_batches=3, wait=1, replay="all", learner=learner)
    assert [stage.replay for stage in learner.stages] == ["all"] * 3
    assert learner.numbers == [1, 1, 2, 1, 2, 3]
    assert [row.spent.train_flops for row in rows] == [0, 100, 200, 300]


@pytest.mark.parametrize("wait", [1, 2])
def test_known_mega_batches_are_the_past_and_no_stage_is_trained_on_them(tmp_path, wait):
    learner, scored = TinyLearner(), []

    def prequential(learner, mega_batch):
        scored.append(mega_batch.t)
        return [Prequential(0.5, 1.0)]

    more = {"num_mega_batches": 5, "wait": wait, "prequential": prequential, "num_known": 3}
    rows = tiny_run(tmp_path / "run", learner=learner, **more)
    assert [times(stage.new) for stage in learner.stages] == ([[4], [5]] if wait == 1 else [[4, 5]])
    assert [times(stage.past) for stage in learner.stages] == ([[1, 2, 3], [1, 2, 3, 4]] if wait == 1 else [[1, 2, 3]])
    assert scored == [4, 5]  # the others are no new text for the model
    assert [row.is_skipped for row in rows] == [False] * 6
    # A run that is continued at each arrival is the same.
    for number in range(3, 6):
        tiny_run(tmp_path / "parts", **more | {"num_mega_batches": number, "last_group": "wait"})
    assert ledger_without_seconds(tmp_path / "parts") == ledger_without_seconds(tmp_path / "run")
    with pytest.raises(SettingError, match="known_mega_batches=3 is more than the 2 mega-batches"):
        StreamSettings(2, num_known=3)


@pytest.mark.parametrize("replay", [False, "all", "uniform", "auto", 0.5, 0.001])
def test_replay_is_false_all_uniform_auto_or_a_share(replay):
    assert StreamSettings(4, replay=replay).replay == replay


@pytest.mark.parametrize("replay", [True, 0, 0.0, 1, 1.0, -0.5, 1.5, "none", None, float("nan")])
def test_other_replays_are_refused(replay):
    with pytest.raises(SettingError, match=r"must be false, all, uniform, a share between 0 and 1, or for text auto"):
        StreamSettings(4, replay=replay)


@pytest.mark.parametrize("wait", [0, -1])
def test_the_wait_is_at_least_1(wait):
    with pytest.raises(SettingError, match=f"wait={wait} must be an integer of"):
        StreamSettings(4, wait)


def test_mega_batches_that_wait_are_trained_on_with_last_group_train_also_if_they_are_fewer_than_the_wait(tmp_path):
    for count in (1, 2):
        out = tmp_path / str(count)
        assert not any(row.updated for row in tiny_run(out, count, wait=3, last_group="wait"))
        rows = tiny_run(out, count, wait=3, last_group="train")
        assert [row.updated for row in rows] == [False] * count + [True]
        assert read_json(out / "summary.json")["num_stages"] == 1


def test_a_stage_at_a_chosen_arrival_is_trained_without_the_mega_batch_that_is_skipped(tmp_path):
    learner = TinyLearner()
    rows = tiny_run(tmp_path, 8, wait=[1, 4, 8], learner=learner, skip=(4,), last_group="wait")
    assert [row.t for row in rows if row.updated] == [1, 4, 8]
    assert [times(stage.new) for stage in learner.stages] == [[1], [2, 3], [5, 6, 7, 8]]


def test_decisions_are_recorded(tmp_path):
    tiny_run(tmp_path, num_mega_batches=4, wait=3)
    digests = ["digest of 1", "digest of 2", "digest of 3", "digest of 4"]
    assert read_json(tmp_path / "arrivals.json") == {"digests": digests}
    assert JsonLines(tmp_path / "decisions.jsonl").values() == [
        {"t": 1, "due": False},
        {"t": 2, "due": False},
        {"t": 3, "due": True},
        {"t": 4, "due": True},
    ]


def test_an_extended_stream_continues_the_run_and_repeats_its_decisions(tmp_path):
    before = tiny_run(tmp_path, num_mega_batches=4, wait=3)
    written = (tmp_path / "ledger.jsonl").read_bytes()
    learner = TinyLearner()
    after = tiny_run(tmp_path, num_mega_batches=7, wait=3, learner=learner)
    assert after[:5] == before
    assert (tmp_path / "ledger.jsonl").read_bytes().startswith(written)
    # A run of 7 from its start would train at t = 3, 6 and 7. This one has trained at 4, where its stream ended.
    assert [row.stage for row in after] == [0, 0, 0, 1, 2, 2, 2, 3]
    assert [row.scores.perplexity for row in after] == [8, 8, 8, 5, 4, 4, 4, 1]
    assert learner.calls == [("grow", 3), ("train", 3)]
    assert times(learner.stages[0].new) == [5, 6, 7]
    assert times(learner.stages[0].past) == [1, 2, 3, 4]
    assert read_json(tmp_path / "summary.json")["num_arrivals"] == 7


def killed(*arguments):
    raise KeyboardInterrupt


def test_mega_batches_wait_for_those_that_will_arrive_later(tmp_path):
    """Six, then seven, then eight mega-batches at wait 2: the ledger of one run over eight."""
    assert StreamSettings(7, 2, last_group="wait").num_stages == 3
    for count, stages in ((6, 3), (7, 3), (8, 4)):
        rows = tiny_run(tmp_path / "grown", count, wait=2, last_group="wait")
        assert (rows[-1].t, rows[-1].stage) == (count, stages)
    tiny_run(tmp_path / "whole", 8, wait=2)
    assert ledger_without_seconds(tmp_path / "grown") == ledger_without_seconds(tmp_path / "whole")


@pytest.mark.parametrize("killed_in", [None, (Ledger, "remove_from"), (Arrivals, "add"), (Ledger, "append")])
def test_the_last_mega_batches_can_be_trained_on_after_all(tmp_path, monkeypatch, killed_in):
    waiting = tiny_run(tmp_path / "later", 5, wait=3, last_group="wait", prequential=share_not_met)
    assert [row.stage for row in waiting] == [0, 0, 0, 1, 1, 1]
    if killed_in:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*killed_in, killed)
            tiny_run(tmp_path / "later", 5, wait=3, prequential=share_not_met)
    tiny_run(tmp_path / "later", 5, wait=3, prequential=share_not_met)
    tiny_run(tmp_path / "at once", 5, wait=3, prequential=share_not_met)
    assert ledger_without_seconds(tmp_path / "later") == ledger_without_seconds(tmp_path / "at once")
    later, at_once = (read_json(tmp_path / name / "summary.json") for name in ("later", "at once"))
    assert later["average_perplexity"] == at_once["average_perplexity"]
    # The decision stands: the stream may grow, and the waiting may be asked for again.
    rows = tiny_run(tmp_path / "later", 6, wait=3, last_group="wait", prequential=share_not_met)
    assert [row.stage for row in rows] == [0, 0, 0, 1, 1, 2, 2]


def share_not_met(learner, mega_batch):
    """Return the error rate of the tiny learner on mega-batch t: the share of the numbers 1..t that it has not met."""
    numbers = set(range(1, mega_batch.t + 1))
    return [Prequential(len(numbers - set(learner.numbers)) / len(numbers), loss=float(mega_batch.t))]


def ahead(rows):
    return [row.prequential and (row.prequential.error_rate, row.prequential.loss) for row in rows]


@pytest.mark.parametrize(
    ("wait", "error_rates"),
    # At arrival t, the learner has not met the mega-batches since its last stage, and t is always among them.
    [(1, [1, 1 / 2, 1 / 3, 1 / 4]), (3, [1, 1, 1, 1 / 4]), (4, [1, 1, 1, 1])],
)
def test_each_arrival_is_scored_with_the_predictor_from_before_it(tmp_path, wait, error_rates):
    rows = tiny_run(tmp_path, num_mega_batches=4, wait=wait, prequential=share_not_met)
    assert ahead(rows) == [None, *((rate, float(t)) for t, rate in enumerate(error_rates, start=1))]
    lines = JsonLines(tmp_path / "decisions.jsonl").values()
    assert [line["prequential_error_rate"] for line in lines] == error_rates


def test_a_continued_run_takes_the_prequential_scores_that_are_stored(tmp_path):
    before = tiny_run(tmp_path, num_mega_batches=3, wait=2, prequential=share_not_met)
    measured = []

    def measure(learner, mega_batch):
        measured.append(mega_batch.t)
        return share_not_met(learner, mega_batch)

    after = tiny_run(tmp_path, num_mega_batches=5, wait=2, prequential=measure)
    assert measured == [4, 5]
    assert after[:4] == before  # no row changes when mega-batches are added
    assert ahead(after)[4:] == [(1 / 4, 4.0), (2 / 5, 5.0)]  # it has met 1..3 before t = 4, and still at t = 5


def reachable_from(start):
    """Every object that references lead to, as the learner's own code could follow them: through its attributes,
    containers and closures; not through modules, classes and globals, which every Python object leads to."""
    seen, left = {}, [start]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, type | types.ModuleType):
            continue
        seen[id(found)] = found
        if isinstance(found, types.FunctionType):
            left += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            left += gc.get_referents(found)
    return list(seen.values())


def holds_test_data(learner):
    return any(isinstance(found, TestSet) for found in reachable_from(learner))


def test_no_reference_leads_from_the_learner_to_the_test_set(tmp_path):
    learner, evaluate = TinyLearner(), TinyEvaluator()
    tiny_run(tmp_path, num_mega_batches=4, wait=2, learner=learner, evaluate=evaluate)
    assert learner.stages[1].past[0].data == 1  # it has kept its stages, and the walk goes through them:
    assert any(found is learner.stages[1].past[0] for found in reachable_from(learner))
    assert not holds_test_data(learner)


def test_the_walk_would_find_a_learner_that_cheats():
    evaluate = TinyEvaluator()
    by_attribute, by_closure = TinyLearner(), TinyLearner()
    by_attribute.teacher = {"deep": [evaluate]}
    by_closure.ask = lambda: evaluate(by_closure)
    assert holds_test_data(by_attribute)
    assert holds_test_data(by_closure)

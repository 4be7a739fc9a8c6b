"""Seeds in lock step: saved together, a ledger each. The learner is the one of tiny_learner.py, S at a time."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_alma.core import stack_record
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.ledger import Prequential, Spent
from fairseq_alma.core.protocol import StreamSettings, run_stream
from fairseq_alma.core.run_record import RunRecord, find_runs
from fairseq_alma.core.stack_record import StackRecord
from tests.fairseq_alma.core.earlier_runs import EarlierRecord
from tests.fairseq_alma.core.test_run_record import Executioner, Killed, share_met
from tests.fairseq_alma.core.tiny_learner import TinyEvaluator, TinyLearner, ledger_without_seconds, tiny_stream

SEEDS = (5, 6)


class TwoLearners(TinyLearner):
    """What the tiny learner does, said for two seeds; the second has spent one update more."""

    def grow(self, stage):
        return [super().grow(stage)] * 2

    def train(self, stage):
        spent = super().train(stage)
        return [spent, spent + Spent(num_updates=1)]


class TwoScores(TinyEvaluator):
    """The second seed has a perplexity that is higher by a half."""

    def __call__(self, learner):
        scores = super().__call__(learner)
        return [scores, replace(scores, perplexity=scores.perplexity + 0.5)]


def stack_run(folder, wait=3, learner=None, evaluate=None, num_mega_batches=4, prequential=None, kind=StackRecord):
    """Run, or run what is left."""
    stream = tiny_stream(num_mega_batches)
    records = [
        RunRecord(folder / f"seed_{seed}", {"seed": seed, "wait": wait}, stream.digests, stages=folder / "stages")
        for seed in SEEDS
    ]
    settings = StreamSettings(num_mega_batches, wait)
    record = kind(records)
    return run_stream(stream, learner or TwoLearners(), evaluate or TwoScores(), settings, record, prequential)


def test_each_seed_has_a_ledger_of_its_own_numbers(tmp_path):
    first, second = stack_run(tmp_path)
    assert [row.scores.perplexity for row in first] == [8, 8, 8, 5, 4]
    assert [row.scores.perplexity for row in second] == [8.5, 8.5, 8.5, 5.5, 4.5]
    assert [row.spent.num_updates for row in first] == [0, 0, 0, 3, 1]
    assert [row.spent.num_updates for row in second] == [0, 0, 0, 4, 2]
    assert read_json(tmp_path / "seed_5/summary.json")["average_perplexity"] == (8 + 8 + 5 + 4) / 4
    assert read_json(tmp_path / "seed_6/summary.json")["average_perplexity"] == (8.5 + 8.5 + 5.5 + 4.5) / 4


def files_in_stages(folder):
    return sorted(str(path.relative_to(folder / "stages")) for path in folder.glob("stages/*/**/*") if path.is_file())


def test_quick_stages_are_saved_once_at_the_end_with_the_costs_of_both_seeds(tmp_path):
    stack_run(tmp_path)
    assert files_in_stages(tmp_path) == ["stage_002/train.done.json", "stage_002/train/model.json"]
    costs = read_json(tmp_path / "stages/stage_002/train.done.json")
    assert [(spent["num_updates"], spent["validation_flops"]) for spent in costs] == [(1, 7), (2, 7)]  # 7 is of growth
    assert find_runs(tmp_path) == [tmp_path / "seed_5", tmp_path / "seed_6"]


def test_a_slow_step_is_saved_at_once_and_the_marks_of_earlier_stages_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_record, "SAVE_SECONDS", 0)
    stack_run(tmp_path)
    assert [name for name in files_in_stages(tmp_path) if name.endswith(".done.json")] == [
        "stage_002/grow.done.json",
        "stage_002/train.done.json",
    ]
    costs = read_json(tmp_path / "stages/stage_002/train.done.json")
    assert [(spent["num_updates"], spent["validation_flops"]) for spent in costs] == [(1, 0), (2, 0)]


def share_met_by_both(learner, mega_batch):
    score = share_met(learner, mega_batch)
    return [score, replace(score, loss=score.loss + 1)]


def attempt(folder, monkeypatch, kill_at=None, **more):
    """One process of a run with B = 5 and w = 2. Returns the learner's calls, and the executioner."""
    executioner, calls = Executioner(kill_at), []
    learner = TwoLearners(calls)
    for name in ("grow", "train", "save", "load"):
        setattr(learner, name, executioner.around(getattr(learner, name)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", executioner.around(os.replace))
        patch.setattr(os, "fsync", lambda descriptor: executioner.moment())
        unlink = Path.unlink
        watched = executioner.around(unlink)  # of done marks; written_aside also deletes its own file
        patch.setattr(Path, "unlink", lambda path, **kw: (watched if path.match("*.done.json") else unlink)(path, **kw))
        try:
            stack_run(folder, 2, learner, num_mega_batches=5, prequential=share_met_by_both, **more)
        except Killed:
            assert kill_at
    return calls, executioner


def numbers_of(folder):
    """All that equal runs agree in. The time decides whether growth has a mark, and whose mark has its cost."""
    ledgers = [ledger_without_seconds(folder / f"seed_{seed}") for seed in SEEDS]
    decisions = [(folder / f"seed_{seed}/decisions.jsonl").read_text() for seed in SEEDS]
    summaries = [read_json(folder / f"seed_{seed}/summary.json") for seed in SEEDS]
    for one in summaries:
        del one["wall_seconds"]
    return ledgers, decisions, summaries, (folder / "stages/stage_003/train/model.json").read_text()


@pytest.mark.parametrize("save_seconds", [0, math.inf], ids=["saved at each step", "saved at the end"])
def test_killed_at_any_moment_the_same_command_finishes_the_run(tmp_path, monkeypatch, save_seconds):
    monkeypatch.setattr(stack_record, "SAVE_SECONDS", save_seconds)
    _, whole = attempt(tmp_path / "whole", monkeypatch)
    assert whole.num_moments > 50
    for kill_at in range(1, whole.num_moments + 1):
        folder = tmp_path / f"killed_at_{kill_at}"
        attempt(folder, monkeypatch, kill_at)
        attempt(folder, monkeypatch)
        assert numbers_of(folder) == numbers_of(tmp_path / "whole"), f"killed at moment {kill_at}"
        assert files_in_stages(folder) == files_in_stages(tmp_path / "whole"), f"killed at moment {kill_at}"


def test_killed_while_it_saves_now_and_then_the_run_ends_all_the_same(tmp_path, monkeypatch):
    """The first process is killed, the second saves at each step and is killed, and so on."""
    attempt(tmp_path / "whole", monkeypatch)
    folder, num_attempts, executioner = tmp_path / "run", 0, None
    while executioner is None or executioner.num_moments == executioner.kill_at:
        num_attempts += 1
        monkeypatch.setattr(stack_record, "SAVE_SECONDS", math.inf if num_attempts % 2 else 0)
        _, executioner = attempt(folder, monkeypatch, kill_at=30 + num_attempts)
        assert num_attempts < 50
    assert num_attempts > 3
    assert numbers_of(folder) == numbers_of(tmp_path / "whole")


def test_a_run_of_an_earlier_version_killed_at_any_moment_is_continued(tmp_path, monkeypatch):
    attempt(tmp_path / "whole", monkeypatch)
    _, earlier = attempt(tmp_path / "earlier", monkeypatch, kind=EarlierRecord)
    assert (tmp_path / "earlier/stages/stage_001/evaluate.done.json").exists()
    content = {path: path.read_bytes() for path in (tmp_path / "earlier").rglob("*") if path.is_file()}
    assert attempt(tmp_path / "earlier", monkeypatch)[0] == []  # it is finished, and stays as it is
    assert {path: path.read_bytes() for path in (tmp_path / "earlier").rglob("*") if path.is_file()} == content
    for kill_at in range(1, earlier.num_moments + 1, 3):
        folder = tmp_path / f"killed_at_{kill_at}"
        attempt(folder, monkeypatch, kill_at, kind=EarlierRecord)
        num_trained = len(list(folder.glob("stages/*/train.done.json")))
        calls, _ = attempt(folder, monkeypatch)
        assert [k for name, k in calls if name == "train"] == [1, 2, 3][num_trained:], f"killed at moment {kill_at}"
        assert numbers_of(folder) == numbers_of(tmp_path / "whole"), f"killed at moment {kill_at}"


def test_every_seed_remembers_when_it_trained(tmp_path):
    stack_run(tmp_path)
    for seed in SEEDS:
        lines = JsonLines(tmp_path / f"seed_{seed}" / "decisions.jsonl").values()
        assert [(line["t"], line["due"]) for line in lines] == [(1, False), (2, False), (3, True), (4, True)]


def test_seeds_that_are_trained_together_have_one_decision_that_follows_from_their_mean(tmp_path):
    """The mean error after N mega-batches is 0.5 N^-0.2, though neither seed's is: one is above, the other below."""

    def measure(learner, mega_batch):
        mean = 0.5 * max(1, len(learner.numbers)) ** -0.2
        deviation = 0.1 if mega_batch.t % 3 else -0.1
        return [Prequential(mean + deviation, 1.0), Prequential(mean - deviation, 1.0)]

    stack_run(tmp_path / "two", "auto", num_mega_batches=10, prequential=measure)
    first, second = (JsonLines(tmp_path / f"two/seed_{seed}/decisions.jsonl").values() for seed in SEEDS)
    decisions = [[(line["due"], line["reason"]) for line in lines] for lines in (first, second)]
    assert decisions[0] == decisions[1]

    def mean_alone(learner, mega_batch):
        return [Prequential(one, 1.0) for one in [0.5 * max(1, len(learner.numbers)) ** -0.2] * 2]

    stack_run(tmp_path / "mean", "auto", num_mega_batches=10, prequential=mean_alone)
    alone = JsonLines(tmp_path / "mean/seed_5/decisions.jsonl").values()
    assert decisions[0] == [(line["due"], line["reason"]) for line in alone]
    assert "falls as N^" in alone[8]["reason"]


def without_last_line(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_the_first_seed_decides_where_a_kill_came_before_the_second_wrote_it_down(tmp_path):
    """B was 4 and is 7: without the first seed's memory stage 2 would not have been trained at t = 4."""
    stack_run(tmp_path)
    path = tmp_path / "seed_6/decisions.jsonl"
    without_last_line(path)
    first, second = stack_run(tmp_path, num_mega_batches=7)
    assert [row.stage for row in first] == [row.stage for row in second] == [0, 0, 0, 1, 2, 2, 2, 3]
    assert JsonLines(path).values()[3] == {"t": 4, "due": True}


def test_each_seed_has_prequential_scores_of_its_own_also_after_a_kill_between_two_seeds(tmp_path, monkeypatch):
    asked = []

    def measure(learner, mega_batch):
        asked.append((mega_batch.t, sorted(learner.numbers)))
        return [Prequential(0.25, float(mega_batch.t)), Prequential(0.75, float(mega_batch.t))]

    whole = stack_run(tmp_path / "whole", prequential=measure)
    assert asked == [(1, []), (2, []), (3, []), (4, [1, 2, 3])]  # once for both seeds
    assert [[row.prequential and row.prequential.error_rate for row in rows] for rows in whole] == [
        [None, 0.25, 0.25, 0.25, 0.25],
        [None, 0.75, 0.75, 0.75, 0.75],
    ]
    monkeypatch.setattr(stack_record, "SAVE_SECONDS", 0)
    killed = tmp_path / "killed"
    with pytest.raises(Killed):
        stack_run(killed, learner=DiesInStage2(), prequential=measure)
    without_last_line(killed / "seed_6/decisions.jsonl")
    (killed / "stages/stage_002/grow.done.json").unlink()
    asked.clear()
    stack_run(killed, prequential=measure)
    assert asked == [(4, [1, 2, 3])]
    for seed in SEEDS:
        for read in (ledger_without_seconds, lambda folder: (folder / "decisions.jsonl").read_text()):
            assert read(killed / f"seed_{seed}") == read(tmp_path / f"whole/seed_{seed}")


def test_a_finished_run_of_several_seeds_is_passed_over(tmp_path):
    before = stack_run(tmp_path)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    learner, evaluate = TwoLearners(), TwoScores()
    assert stack_run(tmp_path, learner=learner, evaluate=evaluate) == before
    assert learner.calls == evaluate.calls == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


@pytest.mark.parametrize("rows_left", range(4))
def test_a_ledger_that_has_lost_rows_of_saved_stages_is_named(tmp_path, rows_left):
    stack_run(tmp_path)
    path = tmp_path / "seed_6/ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:rows_left]))
    with pytest.raises(
        RunError, match=r"contains the networks of stage 2, but not all results .*: restore ledger\.jsonl"
    ):
        stack_run(tmp_path)


@pytest.mark.parametrize("rows_left", [4, 5])
def test_a_kill_between_the_ledgers_of_two_seeds_leaves_no_gap(tmp_path, rows_left):
    """The first seed's row is there, the second's is not: the next process adds what is missing."""
    stack_run(tmp_path / "whole")
    stack_run(tmp_path / "killed")
    path = tmp_path / "killed/seed_6/ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:rows_left]))
    learner = TwoLearners()
    stack_run(tmp_path / "killed", learner=learner)
    assert learner.calls == []
    for seed in SEEDS:
        ledgers = [ledger_without_seconds(tmp_path / name / f"seed_{seed}") for name in ("whole", "killed")]
        assert ledgers[0] == ledgers[1]


class DiesInStage2(TwoLearners):
    def train(self, stage):
        spent = super().train(stage)
        if stage.index == 2:
            raise Killed
        return spent


def test_a_stage_that_is_not_finished_is_done_again_for_all_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_record, "SAVE_SECONDS", 0)
    stack_run(tmp_path / "whole")
    with pytest.raises(Killed):
        stack_run(tmp_path / "killed", learner=DiesInStage2())
    learner = TwoLearners()
    stack_run(tmp_path / "killed", learner=learner)
    assert learner.calls == [("train", 2)]
    for seed in SEEDS:
        ledgers = [ledger_without_seconds(tmp_path / name / f"seed_{seed}") for name in ("whole", "killed")]
        assert ledgers[0] == ledgers[1]


def test_a_learner_that_answers_for_one_seed_alone_is_told(tmp_path):
    evaluate = TwoScores()
    with pytest.raises(ValueError, match="step 'evaluate' of stage 0 returned 1 results for 2 seeds"):
        stack_run(tmp_path, evaluate=lambda learner: evaluate(learner)[:1])


def test_other_settings_are_refused_before_any_seed_goes_on(tmp_path):
    stack_run(tmp_path, wait=3)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="wait: was 3, is 2"):
        stack_run(tmp_path, wait=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content

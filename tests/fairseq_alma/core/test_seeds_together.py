"""Seeds in lock step: saved together, a ledger each. The learner is the one of tiny_learner.py, S at a time."""

import gzip
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_alma.core import run_record
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.ledger import Prequential, Spent
from fairseq_alma.core.protocol import StreamSettings, run_stream
from fairseq_alma.core.run_folder import find_runs
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from tests.fairseq_alma.core.test_run_record import Executioner, Killed, share_met
from tests.fairseq_alma.core.tiny_learner import TinyEvaluator, TinyLearner, ledger_without_seconds, tiny_stream

SEEDS = (5, 6)
SAVE_SECONDS = 1.0
THIS = sys.modules[__name__]


class TwoLearners(TinyLearner):
    """What the tiny learner does, said for two seeds; the second has spent one update more."""

    def grow(self, stage):
        return super().grow(stage) * 2

    def train(self, stage):
        (spent,) = super().train(stage)
        return [spent, spent + Spent(num_updates=1)]


class TwoScores(TinyEvaluator):
    """The second seed has a perplexity that is higher by a half."""

    def __call__(self, learner):
        (scores,) = super().__call__(learner)
        return [scores, replace(scores, perplexity=scores.perplexity + 0.5)]


def stack_run(folder, wait=3, learner=None, evaluate=None, num_mega_batches=4, prequential=None):
    """Run, or run what is left."""
    stream = tiny_stream(num_mega_batches)
    records = [
        SeedRecord(folder / f"seed_{seed}", {"seed": seed, "wait": wait}, stream.digests, shared=folder)
        for seed in SEEDS
    ]
    settings = StreamSettings(num_mega_batches, wait)
    record = RunRecord(records, SAVE_SECONDS, lambda: None)
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
    costs = read_json(tmp_path / "stages/stage_002/train.done.json")["result"]
    assert [(spent["num_updates"], spent["validation_flops"]) for spent in costs] == [(1, 7), (2, 7)]  # 7 is of growth
    assert find_runs(tmp_path) == [tmp_path / "seed_5", tmp_path / "seed_6"]


def test_a_slow_step_is_saved_at_once_and_the_marks_of_earlier_stages_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(THIS, "SAVE_SECONDS", 0)
    stack_run(tmp_path, wait=2, num_mega_batches=6)
    assert [name for name in files_in_stages(tmp_path) if name.endswith(".done.json")] == [
        "stage_002/grow.done.json",  # the save before: a power failure may damage the last one
        "stage_002/train.done.json",
        "stage_003/grow.done.json",
        "stage_003/train.done.json",
    ]
    costs = read_json(tmp_path / "stages/stage_003/train.done.json")["result"]
    assert [(spent["num_updates"], spent["validation_flops"]) for spent in costs] == [(2, 0), (3, 0)]


def share_met_by_both(learner, mega_batch):
    (score,) = share_met(learner, mega_batch)
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
        # Only of done marks: written_aside also deletes its own file.
        watched = executioner.around(lambda path: unlink(path, missing_ok=True))
        patch.setattr(
            Path, "unlink", lambda path, **kw: watched(path) if path.match("*.done.json") else unlink(path, **kw)
        )
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
    monkeypatch.setattr(THIS, "SAVE_SECONDS", save_seconds)
    _, whole = attempt(tmp_path / "whole", monkeypatch)
    assert whole.num_moments > 50
    for kill_at in range(1, whole.num_moments + 1):
        folder = tmp_path / f"killed_at_{kill_at}"
        attempt(folder, monkeypatch, kill_at)
        attempt(folder, monkeypatch)
        assert numbers_of(folder) == numbers_of(tmp_path / "whole"), f"killed at moment {kill_at}"
        # Which earlier saves are left depends on the kill.
        last = [[name for name in files_in_stages(one) if "003" in name] for one in (folder, tmp_path / "whole")]
        assert last[0] == last[1], f"killed at moment {kill_at}"


def test_killed_while_it_saves_now_and_then_the_run_ends_all_the_same(tmp_path, monkeypatch):
    """The first process is killed, the second saves at each step and is killed, and so on."""
    attempt(tmp_path / "whole", monkeypatch)
    folder, num_attempts, executioner = tmp_path / "run", 0, None
    while executioner is None or executioner.num_moments == executioner.kill_at:
        num_attempts += 1
        monkeypatch.setattr(THIS, "SAVE_SECONDS", math.inf if num_attempts % 2 else 0)
        _, executioner = attempt(folder, monkeypatch, kill_at=30 + num_attempts)
        assert num_attempts < 50
    assert num_attempts > 3
    assert numbers_of(folder) == numbers_of(tmp_path / "whole")


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
    monkeypatch.setattr(THIS, "SAVE_SECONDS", 0)
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


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("save_seconds", [0, math.inf], ids=["saved at each step", "saved at the end"])
@pytest.mark.parametrize("damage", ["missing", "cut to 1", "cut to 2", "compressed"])
def test_a_ledger_that_has_lost_rows_of_saved_stages_is_named_and_nothing_is_changed(
    tmp_path, monkeypatch, damage, save_seconds
):
    monkeypatch.setattr(THIS, "SAVE_SECONDS", save_seconds)
    stack_run(tmp_path)
    path = tmp_path / "seed_6/ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "compressed":
        (tmp_path / "seed_6/ledger.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink() if damage[:3] != "cut" else path.write_bytes(b"".join(lines[: int(damage[-1])]))
    before = content_of(tmp_path)
    with pytest.raises(RunError, match=r"gunzip" if damage == "compressed" else r"ledger\.jsonl.*"):
        stack_run(tmp_path)
    assert content_of(tmp_path) == before


def test_a_finished_run_whose_stages_are_gone_stays_as_it_is(tmp_path):
    rows = stack_run(tmp_path)
    shutil.rmtree(tmp_path / "stages")
    before, learner = content_of(tmp_path), TwoLearners()
    assert stack_run(tmp_path, learner=learner) == rows
    assert (learner.calls, content_of(tmp_path)) == ([], before)
    with pytest.raises(RunError, match=r"restore ledger\.jsonl, decisions\.jsonl and the folder stages"):
        stack_run(tmp_path, num_mega_batches=7)  # it would have to train more


def test_an_unfinished_run_whose_stages_are_gone_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(THIS, "SAVE_SECONDS", 0)
    with pytest.raises(Killed):
        stack_run(tmp_path, learner=DiesInStage2())
    shutil.rmtree(tmp_path / "stages")
    before = content_of(tmp_path)
    with pytest.raises(RunError, match="are those of stage 0"):
        stack_run(tmp_path)
    assert content_of(tmp_path) == before


def test_without_the_last_save_a_run_continues_from_the_one_before(tmp_path, monkeypatch):
    """As after a power failure. Nothing that is written changes, although two stages are trained again."""
    monkeypatch.setattr(THIS, "SAVE_SECONDS", 0)
    stack_run(tmp_path / "whole", 2, num_mega_batches=7)
    folder, learner = tmp_path / "run", TwoLearners()
    learner.train = lambda stage: dies_in_stage(4, learner, stage)
    with pytest.raises(Killed):
        stack_run(folder, 2, num_mega_batches=7, learner=learner)
    (folder / "stages/stage_004/grow.done.json").write_text("")
    ledger = (folder / "seed_5/ledger.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"grow\.done\.json is not a valid done mark .* continues from the save before"):
        stack_run(folder, 2, num_mega_batches=7)
    for name in ("stage_004/grow", "stage_003/train", "stage_003/grow"):
        (folder / f"stages/{name}.done.json").unlink()
    learner = TwoLearners()
    stack_run(folder, 2, num_mega_batches=7, learner=learner)
    assert learner.calls == [("grow", 3), ("train", 3), ("grow", 4), ("train", 4)]
    assert (folder / "seed_5/ledger.jsonl").read_bytes().startswith(ledger)
    for seed in SEEDS:
        for read in (ledger_without_seconds, lambda one: (one / "decisions.jsonl").read_text()):
            assert read(folder / f"seed_{seed}") == read(tmp_path / f"whole/seed_{seed}")


def dies_in_stage(k, learner, stage):
    if stage.index == k:
        raise Killed
    return TwoLearners.train(learner, stage)


def test_rows_are_reported_when_they_are_written_and_curves_survive_a_kill(tmp_path, monkeypatch):
    """No row is reported that the ledger lacks, and each process reports all rows from the first one on."""
    monkeypatch.setattr(THIS, "SAVE_SECONDS", math.inf)

    def run(learner, seen):
        record = SeedRecord(
            tmp_path / "seed_5", {}, tiny_stream(6).digests, shared=tmp_path,
            on_rows=lambda rows: seen.append(
                (len(rows), len((tmp_path / "seed_5/ledger.jsonl").read_text().splitlines()))
            ),
        )  # fmt: skip
        evaluate = lambda learner: TwoScores()(learner)[:1]  # noqa: E731
        run_stream(
            tiny_stream(6), learner, evaluate, StreamSettings(6, 2), RunRecord([record], SAVE_SECONDS, lambda: None)
        )

    learner, seen = OneLearner(), []
    learner.train = lambda stage: dies_in_stage(3, learner, stage)[:1]
    with pytest.raises(Killed):
        run(learner, seen)
    assert seen == [(1, 1), (2, 2)]  # the rows after stage 1 are not written, because the learner is not saved
    assert not (tmp_path / "seed_5/summary.json").exists() or read_json(
        tmp_path / "seed_5/summary.json"
    )["num_arrivals"] == 1  # fmt: skip
    seen.clear()
    run(OneLearner(), seen)
    assert seen == [(2, 2), (7, 7)]


class OneLearner(TwoLearners):
    def grow(self, stage):
        return super().grow(stage)[:1]

    def train(self, stage):
        return super().train(stage)[:1]


def test_a_learner_that_grows_is_saved_after_its_training_and_after_a_slow_growth_only(tmp_path, monkeypatch):
    """Time stands still while a stage is trained, and passes while it is evaluated."""
    now = [0.0]
    monkeypatch.setattr(run_record.time, "monotonic", lambda: now[0])
    saved, learner, evaluate = [], TwoLearners(), TwoScores()
    learner.save = lambda folder: (saved.append(str(folder)[-11:]), TwoLearners.save(learner, folder))

    def slow_evaluation(learner):
        now[0] += 0.6
        return evaluate(learner)

    def grow(stage):
        now[0] += 5 * (stage.index == 4)
        return TwoLearners.grow(learner, stage)

    learner.grow = grow
    stack_run(tmp_path, 1, learner=learner, evaluate=slow_evaluation, num_mega_batches=5)
    assert [one.split("_")[-1] for one in saved] == ["001/train", "003/train", "004/grow", "004/train", "005/train"]


@pytest.mark.parametrize("rows_left", [3, 4, 5])
def test_a_kill_between_the_ledgers_of_two_seeds_leaves_no_gap(tmp_path, rows_left, monkeypatch):
    """The first seed's row is there, the second's is not: the next process adds what is missing."""
    monkeypatch.setattr(THIS, "SAVE_SECONDS", math.inf)  # on a slow machine, too
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
    monkeypatch.setattr(THIS, "SAVE_SECONDS", 0)
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
    with pytest.raises(ValueError, match="the evaluation at arrival 0 returned 1 results for 2 seeds"):
        stack_run(tmp_path, evaluate=lambda learner: evaluate(learner)[:1])


def test_other_settings_are_refused_before_any_seed_goes_on(tmp_path):
    stack_run(tmp_path, wait=3)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="wait: was 3, is 2"):
        stack_run(tmp_path, wait=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content

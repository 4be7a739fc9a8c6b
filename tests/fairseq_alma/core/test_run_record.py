"""The run folder: what it refuses, what it writes, and that the same command finishes what was killed anywhere."""

import json
import os
import platform

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Prequential, Scores, Spent
from fairseq_alma.core.provenance import machine_gpus
from fairseq_alma.core.recorded_settings import differing_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from tests.fairseq_alma.core.tiny_learner import TinyEvaluator, TinyLearner, ledger_without_seconds, tiny_run

STEPS = [(0, "evaluate"), (1, "train"), (1, "evaluate"), (2, "grow"), (2, "train"), (2, "evaluate")]
"""Of a run with B = 3 and w = 2."""


class Killed(BaseException):
    """Stands for kill -9: nothing between the side effect and the test catches it."""


class Executioner:
    """Ends the run at its n-th side effect: before or after it."""

    def __init__(self, kill_at=None):
        self.kill_at = kill_at
        self.num_moments = 0

    def moment(self):
        self.num_moments += 1
        if self.num_moments == self.kill_at:
            raise Killed

    def around(self, function):
        def watched(*arguments):
            self.moment()
            result = function(*arguments)
            self.moment()
            return result

        return watched


def share_met(learner, mega_batch):
    """A prequential score that shows which numbers the predictor has met: another one after each stage."""
    return [Prequential(len(learner.numbers) / 8, loss=float(mega_batch.t))]


def attempt(folder, monkeypatch, kill_at=None):
    """One process of the run, with objects of its own. Returns the calls, and the executioner."""
    executioner, calls = Executioner(kill_at), []
    learner, evaluate = TinyLearner(calls), TinyEvaluator(calls)
    for name in ("grow", "train", "save", "load"):
        setattr(learner, name, executioner.around(getattr(learner, name)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", executioner.around(os.replace))  # of every file that is written whole
        patch.setattr(os, "fsync", lambda descriptor: executioner.moment())  # a ledger line among them
        try:
            tiny_run(
                folder, num_mega_batches=3, wait=2, learner=learner, evaluate=executioner.around(evaluate),
                prequential=executioner.around(share_met),
            )  # fmt: skip
        except Killed:
            assert kill_at
    return calls, executioner


def finished_steps(folder):
    """An evaluation is finished when its row is written: the first, third and fourth row of the ledger."""
    path = folder / "ledger.jsonl"
    stages = {json.loads(line)["stage"] for line in path.read_text().splitlines()} if path.exists() else set()
    return [
        (k, name)
        for k, name in STEPS
        if k in stages or (folder / "stages" / f"stage_{k:03d}" / f"{name}.done.json").exists()
    ]


def numbers_of(folder):
    """All that equal runs agree in."""
    summary = read_json(folder / "summary.json")
    del summary["wall_seconds"]
    decisions = (folder / "decisions.jsonl").read_text()
    return ledger_without_seconds(folder), summary, read_json(folder / "arrivals.json"), decisions


def test_killed_at_any_moment_the_same_command_finishes_the_run_and_does_no_finished_step_twice(tmp_path, monkeypatch):
    calls, whole = attempt(tmp_path / "whole", monkeypatch)
    assert len(calls) == len(STEPS)
    assert finished_steps(tmp_path / "whole") == STEPS
    assert whole.num_moments > 50
    for kill_at in range(1, whole.num_moments + 1):
        folder = tmp_path / f"killed_at_{kill_at}"
        attempt(folder, monkeypatch, kill_at)
        finished = finished_steps(folder)
        calls, _ = attempt(folder, monkeypatch)
        wanted = [name for k, name in STEPS if (k, name) not in finished]
        assert [name for name, _ in calls] == wanted, f"killed at moment {kill_at}"
        assert numbers_of(folder) == numbers_of(tmp_path / "whole"), f"killed at moment {kill_at}"


def test_killed_again_and_again_the_run_ends_all_the_same(tmp_path, monkeypatch):
    folder, num_attempts = tmp_path / "run", 0
    while True:  # each attempt gets a few writes beyond what it takes to start
        num_attempts += 1
        _, executioner = attempt(folder, monkeypatch, kill_at=25)
        if executioner.num_moments < 25:
            break
        assert num_attempts < 50
    attempt(tmp_path / "whole", monkeypatch)
    assert num_attempts > 3
    assert numbers_of(folder) == numbers_of(tmp_path / "whole")


def test_a_finished_run_is_passed_over(tmp_path, monkeypatch):
    attempt(tmp_path, monkeypatch)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    calls, _ = attempt(tmp_path, monkeypatch)
    assert calls == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


@pytest.fixture
def run_folder(tmp_path):
    """A finished run of B = 4, w = 3."""
    folder = tmp_path / "größe"
    tiny_run(folder)
    return folder


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


DIGESTS = [f"digest of {t}" for t in range(1, 5)]


def test_a_fork_uses_other_settings_from_the_first_unfinished_stage_on_and_keeps_all_finished_ones(run_folder):
    before = json.loads((run_folder / "settings.json").read_text())
    finished = [k for k in (1, 2, 3) if (run_folder / f"stages/stage_00{k}/train.done.json").exists()]
    k = len(finished) + 1
    member = run_folder / f"stages/stage_00{k}/member_1"
    member.mkdir(parents=True)
    (member / "checkpoint_last.pt").write_text("unfinished")
    kept = {path: content for path, content in content_of(run_folder / "stages").items() if path.parent != member}
    settings = {**before, "lr": 7.0}
    with pytest.raises(RunError) as error:  # the run is finished
        SeedRecord(run_folder, settings, DIGESTS, forkable=["lr"], fork=True)
    assert "fork=true" not in str(error.value)
    longer = [*DIGESTS, "digest of 5"]
    with pytest.raises(RunError, match=f"from stage {k} on, add fork=true"):
        SeedRecord(run_folder, settings, longer, forkable=["lr"])
    with Lease(member), pytest.raises(RunError, match="is in use by process"):
        SeedRecord(run_folder, settings, longer, forkable=["lr"], fork=True)
    SeedRecord(run_folder, settings, longer, forkable=["lr"], fork=True)
    assert content_of(run_folder / "stages") == kept
    forks = {str(k): {"lr": [before.get("lr"), 7.0]}}
    assert json.loads((run_folder / "settings.json").read_text()) == {**settings, "forks": forks}
    SeedRecord(run_folder, settings, longer)  # continued with the settings that it has now
    assert json.loads((run_folder / "settings.json").read_text())["forks"] == forks
    SeedRecord(run_folder, before, longer, forkable=["lr"], fork=True)  # changed back
    assert json.loads((run_folder / "settings.json").read_text()) == before


def test_a_run_whose_last_mega_batches_wait_is_forked_at_the_stage_that_waits(tmp_path):
    tiny_run(tmp_path, num_mega_batches=4, wait=3, last_group="wait")
    settings = {**json.loads((tmp_path / "settings.json").read_text()), "lr": 7.0}
    with pytest.raises(RunError, match="from stage 2 on, add fork=true"):
        SeedRecord(tmp_path, settings, DIGESTS, forkable=["lr"])
    SeedRecord(tmp_path, settings, DIGESTS, forkable=["lr"], fork=True)
    assert json.loads((tmp_path / "settings.json").read_text())["forks"] == {"2": {"lr": [None, 7.0]}}


def test_other_settings_are_refused_by_name_with_old_and_new_and_nothing_is_written(run_folder):
    content = content_of(run_folder)
    with pytest.raises(RunError) as error:
        SeedRecord(run_folder, {"wait": 2, "seed": 5, "replay": False, "lr": 0.1}, DIGESTS)
    lines = str(error.value).splitlines()
    assert lines == [
        f"{run_folder} contains a run with other settings:",
        "  lr: was 'not set', is 0.1",
        "  wait: was 3, is 2",
        "Use the same settings to continue this run, or choose another out= for a new run.",
    ]
    assert content_of(run_folder) == content


def finish_first_step(record):
    RunRecord([record]).arrival(0, 0, False, [Scores(num_params=1, forward_flops=1, error_rate=0.9)], [])


def test_before_its_first_step_is_done_a_run_takes_other_settings(tmp_path):
    # It may have failed for its settings: there is nothing to protect yet.
    record = SeedRecord(tmp_path, {"width": -1}, DIGESTS)
    folder = RunRecord([record]).stage_folder(0)
    folder.mkdir(parents=True)
    (folder / "untrained.pt").write_text("made with width -1")
    record = SeedRecord(tmp_path, {"width": 4}, DIGESTS)
    assert read_json(tmp_path / "settings.json") == {"width": 4}
    assert not (tmp_path / "stages").exists()
    finish_first_step(record)
    with pytest.raises(RunError, match="width: was 4, is 8"):
        SeedRecord(tmp_path, {"width": 8}, DIGESTS)


def test_a_setting_inside_another_is_named_with_its_path(tmp_path):
    finish_first_step(SeedRecord(tmp_path, {"grow": {"experts": [2, 2], "rank": "loss"}}, DIGESTS))
    with pytest.raises(RunError, match=r"grow\.experts: was \[2, 2\], is \[2, 4\]\n"):
        SeedRecord(tmp_path, {"grow": {"experts": [2, 4], "rank": "loss"}}, DIGESTS)


def test_free_settings_may_differ_and_the_last_ones_are_kept(tmp_path):
    free = ("out", "cluster")
    SeedRecord(tmp_path, {"out": "here", "cluster": {"partition": "day"}, "seed": 0}, DIGESTS, free)
    finish_first_step(
        SeedRecord(tmp_path, {"out": "there", "cluster": {"partition": "week"}, "seed": 0}, DIGESTS, free)
    )
    assert read_json(tmp_path / "settings.json")["out"] == "there"
    with pytest.raises(RunError, match="seed: was 0, is 1"):
        SeedRecord(tmp_path, {"out": "there", "cluster": {}, "seed": 1}, DIGESTS, free)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_another_stream_is_refused_with_the_mega_batch_that_differs(run_folder, t):
    content = content_of(run_folder)
    digests = [*DIGESTS]
    digests[t - 1] = "other"
    with pytest.raises(RunError, match=f"used another stream: mega-batch {t} differs.*another out="):
        SeedRecord(run_folder, {"wait": 3, "replay": False, "seed": 5}, digests)
    assert content_of(run_folder) == content


def test_a_shorter_stream_is_refused_with_both_lengths(run_folder):
    with pytest.raises(RunError, match="has 4 mega-batches, but here are only 2: give the complete stream"):
        SeedRecord(run_folder, {"wait": 3, "replay": False, "seed": 5}, DIGESTS[:2])


@pytest.mark.parametrize("content", ['{"train_flops": 3', '{"speed": 3}', "[1, 2]", "3"])
def test_a_damaged_mark_is_named(run_folder, content):
    mark = run_folder / "stages" / "stage_002" / "train.done.json"
    mark.write_text(content)
    with pytest.raises(RunError, match=r"train\.done\.json is not"):
        tiny_run(run_folder)


@pytest.mark.parametrize("name", ["settings.json", "arrivals.json", "summary.json"])
def test_a_damaged_file_of_the_run_is_named(run_folder, name):
    (run_folder / name).write_text('{"half')
    with pytest.raises(RunError, match=f"{name} is not valid JSON"):
        tiny_run(run_folder)


@pytest.mark.parametrize(
    "line", ['{"t": 1, "du', "[]", '{"due": true}', '{"t": 1, "due": true, "prequential_loss": 1}']
)
def test_a_damaged_decision_is_named_by_file_and_line(run_folder, line):
    path = run_folder / "decisions.jsonl"
    first, _, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *others, ""]))
    with pytest.raises(RunError, match=r"decisions\.jsonl, line 2 is damaged"):
        tiny_run(run_folder)


def test_a_ledger_without_its_settings_is_not_written_to(run_folder):
    (run_folder / "settings.json").unlink()
    with pytest.raises(
        RunError, match=r"has a ledger but no settings.json, so the run cannot be continued: choose another out="
    ):
        tiny_run(run_folder)


def test_stages_of_a_run_of_several_seeds_are_not_used(tmp_path):
    """alma-vision trains several seeds together, in one folder of stages."""
    (tmp_path / "stages" / "stage_001").mkdir(parents=True)
    with pytest.raises(RunError, match=r"has stages but no settings.json, so the run cannot be continued"):
        tiny_run(tmp_path)


def test_a_diverged_run_whose_scores_are_not_a_number_continues(tmp_path):
    class Diverged(TinyEvaluator):
        def __call__(self, learner):
            super().__call__(learner)
            return [Scores(learner.num_params, 3, perplexity=float("nan"))]

    before = tiny_run(tmp_path, num_mega_batches=2, wait=1, evaluate=Diverged())
    evaluate = Diverged()
    assert len(tiny_run(tmp_path, num_mega_batches=3, wait=1, evaluate=evaluate)) == len(before) + 1
    assert evaluate.calls == [("evaluate", [1, 2, 3])]


def test_the_summary_holds_the_scalars(run_folder):
    # Perplexities 8 | 8 8 5 4 and parameters 10 10 10 10 20: worked out in test_protocol.py.
    summary = read_json(run_folder / "summary.json")
    assert 0 <= summary.pop("wall_seconds") < 60
    assert summary == {
        "average_perplexity": 6.25,
        "average_perplexity_after_first_stage": 4.5,
        # The geometric mean of 8 8 5 4, since the tiny evaluator's validation perplexity is its perplexity.
        "prequential_perplexity": pytest.approx(1280**0.25),
        "final": 4.0,
        "final_validation": 4.0,
        "mem": 60,
        "comp": 400,
        "num_arrivals": 4,
        "num_stages": 2,
    }


def test_the_seconds_of_earlier_processes_count(run_folder):
    summary = read_json(run_folder / "summary.json")
    write_json(run_folder / "summary.json", {**summary, "wall_seconds": 1000.0})
    tiny_run(run_folder, num_mega_batches=5)
    assert 1000 <= read_json(run_folder / "summary.json")["wall_seconds"] < 1060


def test_the_summary_over_seeds_that_lies_in_a_folder_does_not_stop_a_run_there(tmp_path):
    write_json(tmp_path / "summary.json", {"mean": {"mem": 60}, "stderr": {"mem": 0.0}, "per_seed": []})
    tiny_run(tmp_path)
    assert read_json(tmp_path / "summary.json")["mem"] == 60


def test_provenance_tells_command_commit_versions_machine_and_seed(run_folder):
    provenance = read_json(run_folder / "provenance.json")
    assert provenance["command"]
    assert provenance["commit"] is None or len(provenance["commit"].removesuffix("-dirty")) >= 7
    assert provenance["versions"]["python"] == platform.python_version()
    assert "torch" in provenance["versions"]
    assert provenance["machine"]["host"] == platform.node()
    assert provenance["machine"]["cpus"] >= 1
    assert provenance["machine"]["gpus"] == machine_gpus()
    assert provenance["seed"] == 5


def test_provenance_names_the_gpus_as_the_driver_does(tmp_path):
    for number, model in enumerate(("NVIDIA H200", "NVIDIA GeForce RTX 3090")):
        (folder := tmp_path / f"0000:0{number}:00.0").mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 45\nGPU UUID: \t GPU-1:2\n")
    assert machine_gpus(tmp_path) == ["NVIDIA H200", "NVIDIA GeForce RTX 3090"]
    assert machine_gpus(tmp_path / "missing") == []


def test_two_equal_runs_differ_only_in_seconds(tmp_path):
    for name in ("one", "two"):
        tiny_run(tmp_path / name)
    assert ledger_without_seconds(tmp_path / "one") == ledger_without_seconds(tmp_path / "two")
    one, two = ((tmp_path / name / "ledger.jsonl").read_text().splitlines() for name in ("one", "two"))
    differing = {
        key
        for row_one, row_two in zip(map(json.loads, one), map(json.loads, two), strict=True)
        for key in row_one
        if row_one[key] != row_two[key]
    }
    assert differing == {"train_seconds"}  # the tiny learner reads a clock there; nothing else may


def test_a_row_is_not_appended_twice(tmp_path):
    row = (0, 0, False, Scores(1, 1, perplexity=2.0), Spent())
    for _ in range(2):
        record = SeedRecord(tmp_path, {}, DIGESTS)
        record.arrival(*row)
        record.arrival(*row)
        record.write()
    assert len(record.ledger.rows()) == 1


def test_a_run_continued_by_other_means_keeps_the_first_ones_provenance(run_folder, monkeypatch):
    path = run_folder / "provenance.json"
    before = read_json(path)
    settings, digests = read_json(run_folder / "settings.json"), read_json(run_folder / "arrivals.json")["digests"]
    SeedRecord(run_folder, settings, digests)
    assert read_json(path) == before  # the same means: nothing new
    monkeypatch.setattr("sys.argv", ["alma-lm", "on", "another", "machine"])
    SeedRecord(run_folder, settings, digests)
    SeedRecord(run_folder, settings, digests)
    after = read_json(path)
    assert after["command"] == before["command"]
    assert [entry["command"] for entry in after["continued"]] == [["alma-lm", "on", "another", "machine"]]


def test_runs_are_found_at_any_depth_and_not_below_a_run(tmp_path):
    for name in ("a/settings.json", "b/deep/er/settings.json", "b/deep/er/stages/settings.json", "c/ledger.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b/deep/er", tmp_path / "c"]


def test_a_run_inside_another_run_is_refused(tmp_path):
    tiny_run(tmp_path / "run")
    RunFolder(tmp_path / "run").refuse_nested()
    with pytest.raises(RunError, match="is inside the run folder"):
        RunFolder(tmp_path / "run" / "some" / "inner").refuse_nested()


def test_a_run_in_a_folder_of_another_command_is_refused(tmp_path):
    for name, what in (
        ("stream.json", "a stream"),
        ("alma_export.json", "an exported model"),
        ("deployed.json", "a deployed predictor"),
        ("stage_001/deployed.json", "deployed predictors"),
    ):
        path = tmp_path / what / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        with pytest.raises(RunError, match=f"contains {what}: give another folder, out=FOLDER"):
            RunFolder(tmp_path / what).refuse_nested()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("a plan")
    RunFolder(tmp_path / "mine").refuse_nested()


def test_a_stream_with_fewer_mega_batches_is_refused_with_the_way_back(tmp_path):
    tiny_run(tmp_path, num_mega_batches=4, wait=2)
    settings = json.loads((tmp_path / "settings.json").read_text())
    for digests in (DIGESTS[:3], [*DIGESTS[:3], "another"]):
        with pytest.raises(RunError) as error:
            SeedRecord(tmp_path, settings, digests)
        assert "rollback" not in str(error.value)  # for images, there is none
        write_json(tmp_path / "settings.json", {**settings, "stream": "streams/mine"})
        with pytest.raises(RunError, match=rf"first run `alma-lm rollback {tmp_path} --to-stage 1`"):
            SeedRecord(tmp_path, {**settings, "stream": "streams/mine"}, digests)
        write_json(tmp_path / "settings.json", settings)


def test_another_stream_and_another_learner_are_named_for_what_they_are(tmp_path):
    before = {"learner": "sm", "stream": "a", "dictionary": "d" * 64, "evaluated_on": ["v" * 64, "t" * 64]}
    write_json(tmp_path / "settings.json", before)
    assert differing_settings(tmp_path, {**before, "learner": "ens"}, ["stream"]) == ["learner: was 'sm', is 'ens'"]
    assert differing_settings(tmp_path, {**before, "stream": "b"}, ["stream"]) == []  # it was moved
    now = {**before, "stream": "b", "evaluated_on": ["w" * 64, "t" * 64]}
    assert differing_settings(tmp_path, now, ["stream"]) == [
        "stream: was 'a', is 'b'",
        f"evaluated_on: was {['v' * 12, 't' * 12]}, is {['w' * 12, 't' * 12]} (the validation or test text of the "
        "stream has changed)",
    ]
    assert differing_settings(tmp_path, {**before, "learner_digest": "x"}, []) == [
        "learner_digest: was 'not set', is 'x' (the source code of the learner has changed)"
    ]

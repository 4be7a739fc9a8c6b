"""alma-lm rollback: a run is taken back to an earlier stage, and continues from there, also without a mega-batch."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fairseq_alma.app.run_commands import state_of
from fairseq_alma.checkpoints import CONTINUATION
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.lm.rollback import roll_back, roll_back_runs, stage_before
from tests.commands import RUN, run_command
from tests.fairseq_alma.killing import files, rows_without_seconds, same_run
from tests.streams import make_stream

SHORT = (*RUN, "updates=2", "validations=1", "experts=2")


@pytest.fixture(scope="module")
def months(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("months") / "stream", num_mega_batches=4, tokens=1500)


def lm(stream: Path, out: Path, *settings: str) -> str:
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *SHORT, *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def back(out: Path, stage: int, status: int = 0) -> str:
    result = run_command("alma-lm", "rollback", out, "--to-stage", stage)
    assert result.returncode == status, result.stderr[-3000:]
    return result.stdout + result.stderr


def corrected(stream: Path, folder: Path, t: int) -> Path:
    """Return a copy of a stream in which mega-batch t has other text, as after alma-prep --drop-last and --extend."""
    other = make_stream(folder / "other", num_mega_batches=t, tokens=1500, seed=9)
    copy = shutil.copytree(stream, folder / "corrected")
    description, source = (json.loads((one / "stream.json").read_text()) for one in (copy, other))
    shutil.rmtree(copy / f"mega_batch_{t}")
    shutil.copytree(other / f"mega_batch_{t}", copy / f"mega_batch_{t}")
    description["splits"][f"mega_batch_{t}"] = source["splits"][f"mega_batch_{t}"]
    (copy / "stream.json").write_text(json.dumps(description))
    return copy


LEARNERS = {
    "sm": (),
    "ens": ("learner=ens", "members=2"),
    "gens": ("learner=gens",),
    "gmoe": ("learner=gmoe", "grow_experts=1"),
    "replay": ("replay=0.5", "wait=2"),
    "average": ("average=power:2", "optimizer_state=keep", "schedule=constant", "replay=uniform"),
}


@pytest.mark.parametrize(
    ("name", "last"), [("average", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in LEARNERS)]
)
def test_a_run_that_was_taken_back_continues_as_if_the_later_stages_had_never_been(months, tmp_path, name, last):
    """It trains another mega-batch instead of the last one, and ends like a run that never saw the bad one."""
    settings = (*LEARNERS[name], f"mega_batches={last}")
    lm(months, tmp_path / "run", *settings)
    before = rows_without_seconds(tmp_path / "run")
    k = before[-1]["stage"] - 1
    checkpoints = sorted((tmp_path / "run" / "stages").rglob("checkpoint*.pt"))
    said = back(tmp_path / "run", k)
    arrival = next(row["t"] for row in before if row["updated"] and row["stage"] == k)
    assert f"was set aside in {tmp_path}/run/set_aside/1. The next training command" in said
    assert f"continues with mega-batch {arrival + 1}, unless it has skip_mega_batches=[{arrival + 1}]" in said
    assert rows_without_seconds(tmp_path / "run") == before[: arrival + 1]
    deployed = (tmp_path / "run/predictor.json").read_text()
    assert deployed == (tmp_path / f"run/predictors/stage_{k:03d}.json").read_text()
    assert rows_without_seconds(tmp_path / "run/set_aside/1") == before
    moved = [path for path in checkpoints if not path.exists()]
    assert moved
    for path in moved:
        assert (tmp_path / "run/set_aside/1" / path.relative_to(tmp_path / "run")).is_file()
    stream = corrected(months, tmp_path, last)
    lm(stream, tmp_path / "run", *settings)
    lm(stream, tmp_path / "never", *settings)
    shutil.rmtree(tmp_path / "run/set_aside")
    same_run(tmp_path / "run", tmp_path / "never")


def test_a_mega_batch_is_skipped_after_a_rollback(months, tmp_path, capsys):
    """With replay, so that a later stage would show that it was used."""
    out, more = tmp_path / "run", ("replay=uniform", "mega_batches=2")
    lm(months, out, *more)
    result = run_command("alma-lm", f"stream={months}", f"out={out}", *SHORT, *more, "skip_mega_batches=[2]")
    assert (result.returncode, "--to-stage 1" in result.stderr) == (2, True)
    back(out, 1)
    lm(months, out, *more, "skip_mega_batches=[2]")
    lm(months, out, "replay=uniform", "mega_batches=3")  # the next command need not repeat what was skipped
    rows = rows_without_seconds(out)
    assert [(row["t"], row["stage"], row["updated"], row.get("skipped", False)) for row in rows] == [
        (0, 0, False, False), (1, 1, True, False), (2, 1, False, True), (3, 2, True, False),
    ]  # fmt: skip
    counts = json.loads((months / "stream.json").read_text())["splits"]
    used = sum(counts[f"mega_batch_{t}"]["tokens"] for t in (1, 3))
    assert rows[-1]["num_stored"] == used
    assert rows[2]["num_updates"] == 0
    config = OmegaConf.load(out / "stages/stage_002/member_1/config.yaml")
    assert str(config.task.replay_mega_batches) == "1"
    roll_back_runs(out, 0)
    assert "With skip_mega_batches=[2], it skips again what was skipped before." in capsys.readouterr().out


def test_a_run_of_images_is_not_taken_back(tmp_path):
    (tmp_path / "settings.json").write_text('{"dataset": "digits"}')
    with pytest.raises(RunError, match="is a run of alma-vision, but only runs of language models can be taken back"):
        roll_back_runs(tmp_path, 0)


@pytest.fixture(scope="module")
def kept(months, tmp_path_factory) -> Path:
    """A run of four stages that keeps the training state of the newest two."""
    out = tmp_path_factory.mktemp("kept") / "run"
    lm(months, out, "average=power:2", "updates=1")
    return out


def test_the_states_of_the_newest_stages_are_kept(kept):
    assert [path.parents[1].name for path in sorted(kept.glob(f"stages/*/member_*/{CONTINUATION}"))] == [
        "stage_003", "stage_004",
    ]  # fmt: skip
    before = files(kept)
    said = back(kept, 2, status=2)
    assert f"stage_002/member_1/{CONTINUATION} is missing" in said
    assert "can be taken back to stages 0, 3, 4; keep_states=" in said
    assert "no stage 5" in back(kept, 5, status=2)
    assert files(kept) == before
    assert "nothing came after it" in back(kept, 4)
    assert files(kept) == before
    assert [stage_before(kept, t) for t in (1, 2, 4)] == [0, 1, 3]


def test_a_run_that_was_taken_back_to_the_start_is_the_run_that_only_began(kept, tmp_path):
    out = shutil.copytree(kept, tmp_path / "run")
    roll_back(out, 0)
    assert files(out) - {path for path in files(out) if path.startswith("set_aside/")} == {
        "arrivals.json", "ledger.jsonl", "decisions.jsonl", "provenance.json", "settings.json",
        "stages/stage_000/member_1/checkpoint_untrained.pt",
    }  # fmt: skip
    assert json.loads((out / "arrivals.json").read_text()) == {"digests": []}
    assert state_of(out)["state"] == "unfinished"


def test_a_rollback_past_a_fork_brings_back_the_settings_from_before_it(months, tmp_path):
    out = tmp_path / "run"
    lm(months, out, "mega_batches=1", "lr=0.001")
    lm(months, out, "mega_batches=2", "lr=0.01", "fork=true")
    lm(months, out, "mega_batches=3", "lr=0.02", "dropout=0.3", "fork=true")
    roll_back(out, 2)
    settings = read_settings(out)
    assert (settings["lr"], settings["dropout"], settings["forks"]) == (0.01, 0.0, {"2": {"lr": [0.001, 0.01]}})
    roll_back(out, 1)
    assert (read_settings(out)["lr"], read_settings(out)["forks"]) == (0.001, {})
    refused = run_command("alma-lm", f"stream={months}", f"out={out}", *SHORT, "mega_batches=2", "lr=0.01")
    assert (refused.returncode, "lr" in refused.stderr) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_a_rollback_that_is_killed_at_any_moment_ends_like_one_that_is_not(kept, tmp_path, every):
    """The process is killed before a change of the file system: the first one, the one that is `every` later, ..."""
    small = shutil.copytree(kept, tmp_path / "small")
    for path in small.rglob("checkpoint*.pt"):  # so that the copies are quick; their digests are those of the files
        path.write_bytes(b"")
    for path in [*small.glob("stages/*/*/learner.json"), *small.glob("predictor*.json"), *small.glob("predictors/*")]:
        value = json.loads(path.read_text())
        value.pop("sha256_of_this_file", None)
        for one in [*value.get("checkpoints", []), *value.get("predictor", []), *value.get("continuations", [])]:
            one.pop("sha256")
        write_json(path, value)
    settings = json.loads((small / "settings.json").read_text())
    write_json(small / "settings.json", {**settings, "forks": {"2": {"lr": [1, 2]}, "4": {"lr": [2, 3]}}})
    whole = shutil.copytree(small, tmp_path / "whole")
    roll_back(whole, 3)
    expected = contents(whole)
    assert json.loads(expected["settings.json"])["forks"] == {"2": {"lr": [1, 2]}}
    for moment in range(1, 500, every):
        out = shutil.copytree(small, tmp_path / str(moment))
        was_killed = killed_at(moment, out, 3)
        roll_back(out, 3)
        assert contents(out) == expected, moment
        shutil.rmtree(out)
        if not was_killed:
            break
    assert not was_killed
    assert moment > 40


def contents(run: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    return {name: content for name, content in found.items() if not name.startswith(".lease")}


def killed_at(moment: int, out: Path, stage: int) -> bool:
    """Roll a run back in a child process, which is killed at an access to the file system. False: it ended before."""
    child = os.fork()
    if child == 0:
        count = 0

        def kill(event: str, arguments: tuple) -> None:
            nonlocal count
            is_change = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")
            if is_change or (event == "open" and arguments[1] and set(str(arguments[1])) & set("wa+x")):
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        roll_back(out, stage)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks a process")
def test_a_training_finishes_a_rollback_that_was_interrupted(months, tmp_path):
    out = tmp_path / "run"
    lm(months, out, "mega_batches=2")
    assert killed_at(20, out, 1)
    assert (out / "rollback.json").exists()
    lm(months, out, "mega_batches=2")
    assert not (out / "rollback.json").exists()
    assert (out / "set_aside/1/rollback.json").exists()
    assert [row["stage"] for row in rows_without_seconds(out)] == [0, 1, 2]


def test_a_run_at_work_is_not_taken_back(kept, tmp_path):
    out = shutil.copytree(kept, tmp_path / "run")
    child = os.fork()
    if child == 0:
        with Lease(out):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(RunError, match="is in use by"):
            roll_back(out, 3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

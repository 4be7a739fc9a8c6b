"""alma-forget on runs: they end as if the text had been masked from the start, and no longer know it."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fairseq_alma
from fairseq_alma.checkpoints import require_checkpoint
from fairseq_alma.core.files import sha256_of
from fairseq_alma.deploy import deploy, go_back
from fairseq_alma.forget.mask import certificates
from fairseq_alma.lm.rollback import roll_back
from tests.commands import ROOT, RUN, run_command
from tests.fairseq_alma.forget.test_stream import DOCUMENT_WORDS, WORDS, month, prep, text_of, write_month
from tests.fairseq_alma.killing import rows_without_seconds

CANARY = " ".join(random.Random(7).choices(WORDS, k=DOCUMENT_WORDS))
"""Words in an order that no other document has."""
COPIES = 40


def make_stream(folder: Path, months: int, t: int) -> Path:
    """Write a stream of some months. The canary arrives in month t, in several documents with other ids."""
    canaries = {f"canary-{number}": CANARY for number in range(COPIES)}
    for number in range(1, months + 1):
        texts = {**month(number, 120 if number > 1 else 250), **(canaries if number == t else {})}
        write_month(folder / "texts", number, texts)
    # Each month is added when it comes, so that the held-out text is from the first one.
    options = ("--vocab-size", "320", "--passage-words", "24", "--duplicates", "keep", "--valid-words", "240")
    out = folder / "stream"
    assert prep(out, folder / "texts" / "2020-01.jsonl", "--mega-batches", "1", *options) == 0
    for number in range(2, months + 1):
        extend(out, folder / "texts" / f"2020-{number:02d}.jsonl")
    return out


def extend(stream: Path, source: Path) -> None:
    assert prep(stream, source, "--extend", "--passage-words", "24", "--duplicates", "keep") == 0


@pytest.fixture(scope="module")
def two_months(tmp_path_factory) -> Path:
    """A stream of two months with canaries in the second. Tests must not change it."""
    return make_stream(tmp_path_factory.mktemp("two"), months=2, t=2)


def lm(stream: Path, out: Path, *settings: str) -> None:
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *RUN, *settings)
    assert result.returncode == 0, result.stderr[-3000:]


def forget(stream: Path, *more: object, status: int = 0) -> str:
    result = run_command("alma-forget", stream, "--document", "canary-0", *more)
    assert result.returncode == status, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


def files_of(run: Path, stages: Sequence[int]) -> dict[str, str]:
    """Digest of each file of some stages, but not of the training states, which later stages remove."""
    paths = [path for k in stages for path in (run / f"stages/stage_{k:03d}").rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): sha256_of(path) for path in paths if path.name != "checkpoint_continuation.pt"}


def same_weights(a: Path, b: Path) -> None:
    """Assert that two runs have the same checkpoints, with equal bits. The files have folders and clocks, too."""
    paths = sorted(path.relative_to(a) for path in a.glob("stages/**/*.pt"))
    assert paths and paths == sorted(path.relative_to(b) for path in b.glob("stages/**/*.pt"))
    for path in paths:
        one, other = (require_checkpoint(run / path)["model"] for run in (a, b))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), path


def known_by(run: Path, stage: int | None = None) -> float:
    """How much better the canary is predicted than random texts of the same kind, in standard deviations."""
    chance = random.Random(3)
    others = [" ".join(chance.choices(WORDS, k=DOCUMENT_WORDS)) for _ in range(40)]
    canary, *rest = (float(score.nats.mean()) for score in fairseq_alma.load(run, stage).score([CANARY, *others]))
    return (statistics.mean(rest) - canary) / statistics.stdev(rest)


def predicted(stream: Path, run: Path) -> int:
    return certificates(stream)[-1]["runs"][str(run)]["predicted_train_flops"]


def test_a_run_ends_as_if_the_text_had_been_masked_from_the_start(two_months, tmp_path):
    """Also with a mega-batch that came later, which the run has not seen, and does not see now."""
    stream = shutil.copytree(two_months, tmp_path / "stream")
    extend(stream, write_month(tmp_path / "texts", 3, month(3, 120)))
    settings = ("updates=20", "validations=1", "experts=2", "mega_batches=2")
    masked = shutil.copytree(stream, tmp_path / "masked")
    lm(stream, tmp_path / "run", *settings)
    assert known_by(tmp_path / "run") > 4
    before, rows = files_of(tmp_path / "run", [0, 1]), rows_without_seconds(tmp_path / "run")
    out = forget(stream, "--runs", tmp_path / "run")
    assert "one stage is trained again from stage 1" in out and "nothing was changed" in out
    assert (rows_without_seconds(tmp_path / "run"), CANARY in text_of(stream)) == (rows, True)
    deployed, other = tmp_path / "deployed", tmp_path / "other"
    for stage in (1, 2):
        deploy(tmp_path / "run", deployed, stage), deploy(tmp_path / "run", other, 3 - stage)
    out = forget(stream, "--runs", tmp_path / "run", "--yes", "--purge")
    assert f"still remembers: deployed model {deployed}/stage_002: it has learned from the text and is in use" in out
    assert [line for line in out.splitlines() if "remembers: source" in line] == [
        f"still remembers: source text:{two_months.parent}/texts/2020-02.jsonl: the input files of alma-prep are not "
        f"changed: remove the text there, too"
    ]
    assert not (other / "stage_002").exists() and (other / "stage_001").exists()
    assert files_of(tmp_path / "run", [0, 1]) == before
    assert not list(tmp_path.glob("run/set_aside/*"))
    forget(masked, "--no-runs", "--yes")
    lm(masked, tmp_path / "reference", *settings)
    same_weights(tmp_path / "run", tmp_path / "reference")
    assert rows_without_seconds(tmp_path / "run") == rows_without_seconds(tmp_path / "reference")
    assert abs(known_by(tmp_path / "run")) < 3
    (certificate,) = certificates(stream)
    (entry,) = certificate["runs"].values()
    assert entry["kept_unchanged"] and entry["train_flops"] == entry["predicted_train_flops"] > 0
    assert certificate["removed"] == [str(tmp_path / "run/set_aside/1"), str(other / "stage_002")]
    assert json.loads(run_command("alma-lm", "status", tmp_path / "run", "--json").stdout)["rollbacks"] == 0
    assert deploy(tmp_path / "run", deployed)[0].name == "stage_002_2"
    assert [path.name for path in sorted(deployed.iterdir())] == ["current", "stage_001", "stage_002_2"]
    # The run's own command agrees.
    lm(stream, tmp_path / "run", *settings)
    assert rows_without_seconds(tmp_path / "run") == rows_without_seconds(tmp_path / "reference")


LEARNERS = {
    "sm": (),
    "replay": ("replay=0.5",),
    "replay_all": ("replay=all", "wait=3"),
    "ens": ("learner=ens", "members=2", "replay=uniform"),
    "gens": ("learner=gens",),
    "gmoe": ("learner=gmoe", "grow_experts=1", "experts=2"),
    "average": ("average=power:2", "keep_states=5"),
    "kept": ("average=power:2", "optimizer_state=keep", "schedule=constant"),
}


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    """A stream of eight months with canaries in the fifth. Tests must not change it."""
    return make_stream(tmp_path_factory.mktemp("eight"), months=8, t=5)


SHORT = ("updates=60", "validations=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_eight_arrivals_with_canaries_in_the_fifth(eight, tmp_path, name):
    stream, masked = (shutil.copytree(eight, tmp_path / copy) for copy in ("stream", "masked"))
    settings, run = (*SHORT, *LEARNERS[name]), tmp_path / "run"
    lm(stream, run, *settings)
    first = next(row["stage"] for row in rows_without_seconds(run) if row["updated"] and row["t"] >= 5)
    # By default, the training states of the newest two stages are kept, and that of the stage before is not one.
    kept = 0 if name == "kept" else first - 1
    known, earlier = known_by(run, first), range(0, kept + 1)
    before = files_of(run, earlier)
    assert f"trained again from stage {kept}" in forget(stream, "--runs", run)
    flops = sum(row["train_flops"] for row in rows_without_seconds(run) if row["updated"] and row["stage"] > kept)
    forget(stream, "--runs", run, "--yes")
    if kept:
        assert files_of(run, earlier) == before
    assert predicted(stream, run) == flops
    forget(masked, "--no-runs", "--yes")
    lm(masked, tmp_path / "reference", *settings)
    same_weights(run, tmp_path / "reference")
    rows = rows_without_seconds(run)
    assert rows == rows_without_seconds(tmp_path / "reference")
    assert sum(row["train_flops"] for row in rows if row["updated"] and row["stage"] > kept) == pytest.approx(
        flops, rel=0.1
    )
    now = [known_by(run, first), known_by(run)]
    print(f"{name}: the canary is {known:.1f} standard deviations better than random texts; now {now}")
    assert known > 3 and max(map(abs, now)) < 3


def start(stream: Path, run: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "fairseq_alma.forget.cli", str(stream), "--document", "canary-0", "--yes"]
    words += ["--runs", str(run)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **quiet)


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(eight, tmp_path):
    """With a growing mixture and replay. A process group is killed as a whole, as by a power failure."""
    settings = ("updates=20", "validations=2", *LEARNERS["gmoe"], "replay=0.5")
    stream, masked = (shutil.copytree(eight, tmp_path / copy) for copy in ("stream", "masked"))
    lm(stream, tmp_path / "run", *settings)
    chance, kills = random.Random(11), 0
    for _ in range(40):
        process = start(stream, tmp_path / "run")
        try:
            assert process.wait(chance.uniform(0.5, 14)) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.5)
    else:
        assert start(stream, tmp_path / "run").wait(900) == 0
    forget(masked, "--no-runs", "--yes")
    lm(masked, tmp_path / "reference", *settings)
    same_weights(tmp_path / "run", tmp_path / "reference")
    assert rows_without_seconds(tmp_path / "run") == rows_without_seconds(tmp_path / "reference")
    (certificate,) = certificates(stream)
    (entry,) = certificate["runs"].values()
    assert (entry["state"], entry["kept_unchanged"]) == ("trained again", True)
    assert entry["train_flops"] == entry["predicted_train_flops"]
    assert kills > 2
    print(f"{kills} kills")


@pytest.mark.slow
def test_text_of_the_held_out_sets(two_months, tmp_path):
    """Of the validation set: the run begins anew. Of the test set only: nothing is trained again."""
    stream = shutil.copytree(two_months, tmp_path / "stream")
    settings = ("updates=5", "validations=1", "experts=2")
    lm(stream, tmp_path / "run", *settings)
    import pyarrow.parquet

    names = {
        split: set(pyarrow.parquet.read_table(stream / f"documents/{split}.parquet")["id"].to_pylist())
        for split in ("valid", "test", "mega_batch_1")
    }
    before = rows_without_seconds(tmp_path / "run")
    name = min(names["test"] - names["valid"] - names["mega_batch_1"])
    out = run_command("alma-forget", stream, "--document", name, "--runs", tmp_path / "run", "--yes")
    assert (out.returncode, "nothing is trained again" in out.stdout) == (0, True), out.stderr[-2000:]
    assert rows_without_seconds(tmp_path / "run") == before
    lm(stream, tmp_path / "run", *settings)
    name = min(names["valid"] - names["test"] - names["mega_batch_1"])
    out = run_command("alma-forget", stream, "--document", name, "--runs", tmp_path / "run", "--yes")
    assert (out.returncode, "from stage 0 (the validation set" in out.stdout) == (0, True), out.stderr[-2000:]
    lm(stream, tmp_path / "reference", *settings)
    same_weights(tmp_path / "run", tmp_path / "reference")
    assert rows_without_seconds(tmp_path / "run") == rows_without_seconds(tmp_path / "reference")


@pytest.mark.slow
def test_a_deployed_model_that_was_set_aside_is_found_and_one_from_before_the_text_stays(two_months, tmp_path):
    """Stage 2 has read the text, was taken back, and is trained again with another learning rate."""
    stream, run, to = shutil.copytree(two_months, tmp_path / "stream"), tmp_path / "run", tmp_path / "to"
    settings = ("updates=1", "validations=1", "experts=2")
    lm(stream, run, *settings)
    deploy(run, to, 1), deploy(run, to)
    assert run_command("alma-lm", "rollback", run, "--to-stage", 1).returncode == 0
    lm(stream, run, *settings, "lr=0.001", "fork=true")
    deploy(run, to)
    out = forget(stream, "--runs", run, "--yes")
    found = [line.split(":")[1] for line in out.splitlines() if "remembers: deployed model" in line]
    assert found == [f" deployed model {to}/stage_002", f" deployed model {to}/stage_002_2"]
    assert deploy(run, to)[0].name == "stage_002_3" and go_back(to).name == "stage_001"
    assert json.loads(run_command("alma-lm", "status", run, "--json").stdout)["rollbacks"] == 1


@pytest.mark.slow
def test_only_runs_that_have_used_the_text_are_trained_again(two_months, tmp_path):
    stream = shutil.copytree(two_months, tmp_path / "stream")
    lm(stream, tmp_path / "runs/early", "updates=1", "validations=1", "experts=2", "mega_batches=1")
    assert "trained again from" not in forget(stream, "--runs", tmp_path / "runs", "--yes")
    assert certificates(stream)[-1]["runs"] == {}
    error = run_command("alma-forget", stream, "--document", "canary-0", "--runs", tmp_path / "stream")
    assert (error.returncode, "there is no run in" in error.stderr) == (2, True)
    # A certificate may be somebody else's, so a run that it names is not changed unless the user names it.
    path, rows = stream / "forgotten/1.json", rows_without_seconds(tmp_path / "runs/early")
    certificate = json.loads(path.read_text())
    certificate["runs"][str(tmp_path / "runs/early")] = {"state": "taking back", "to_stage": 0}
    path.write_text(json.dumps(certificate))
    forget(stream, "--no-runs", "--yes", "--purge", status=1)
    assert rows_without_seconds(tmp_path / "runs/early") == rows


@pytest.mark.slow
def test_shared_members_that_have_read_the_text_are_removed(two_months, tmp_path, monkeypatch):
    stream, shared = shutil.copytree(two_months, tmp_path / "stream"), tmp_path / "shared"
    # A relative folder, which alma-forget finds from another one.
    settings = ("updates=1", "validations=1", "experts=2", f"reuse_from={os.path.relpath(shared)}")
    lm(stream, tmp_path / "run", *settings)
    before = {path.name for path in (shared / "trained").iterdir()}
    assert len(before) == 2
    # A member that a rollback has set aside has learned from the text, too.
    roll_back(tmp_path / "run", 1)
    lm(stream, tmp_path / "run", *settings, "dropout=0.3", "fork=true")
    before |= {path.name for path in (shared / "trained").iterdir()}
    assert len(before) == 3
    monkeypatch.chdir(tmp_path)
    out = forget(stream, "--runs", tmp_path / "run", "--yes", "--purge")
    assert "shared members" not in out
    after = {path.name for path in (shared / "trained").iterdir()}
    assert (len(after), len(after & before)) == (2, 1)  # that of stage 1 stays, and that of stage 2 is a new one


@pytest.mark.slow
@pytest.mark.parametrize("changed", [("lr=0.002", "fork=true"), ("skip_mega_batches=[3]",)])
def test_a_run_is_trained_again_as_it_was_with_its_forks_and_what_it_has_skipped(tmp_path, changed):
    stream = make_stream(tmp_path / "made", months=4, t=2)
    masked = shutil.copytree(stream, tmp_path / "masked")
    settings = ("updates=2", "validations=1", "experts=2", "wait=2")
    commands = (("mega_batches=3", "last_group=train"), (*changed, "mega_batches=4"))
    if "skip" in changed[0]:
        commands = (("mega_batches=2",), (*changed, "mega_batches=3"), ("mega_batches=4", "last_group=train"))
    for command in commands:
        lm(stream, tmp_path / "run", *settings, *command)
    forget(stream, "--runs", tmp_path / "run", "--yes", "--purge")
    forget(masked, "--no-runs", "--yes")
    for command in commands:
        lm(masked, tmp_path / "reference", *settings, *command)
    assert rows_without_seconds(tmp_path / "run") == rows_without_seconds(tmp_path / "reference")
    same_weights(tmp_path / "run", tmp_path / "reference")
    (entry,) = certificates(stream)[-1]["runs"].values()
    assert entry["train_flops"] == entry["predicted_train_flops"] > 0

"""The checkpoints from which stages continue if they are not those that predict."""

import ast
import random
import shutil
import sys
from pathlib import Path

import pytest

from fairseq_alma.checkpoints import CONTINUATION, GROWN
from fairseq_alma.core.learner_settings import LanguageModelGrowingMixtureSettings
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm import train_member
from fairseq_alma.lm.average import remove_old_continuations
from fairseq_alma.lm.fairseq_config import Member, TrainingConfigs
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.shared_members import TRAINING_CODE
from tests.commands import run_command
from tests.fairseq_alma.killing import KilledRun, Reference, end_all, rows_without_seconds, same_run
from tests.fairseq_alma.lm.test_average import SHORT, succeed
from tests.fairseq_alma.lm.test_stage_commands import config_of_stage


def continuations(out: Path) -> list[str]:
    return sorted(path.parents[1].name for path in out.glob(f"stages/*/member_*/{CONTINUATION}"))


def test_only_the_newest_continuations_are_kept(stream, tmp_path):
    for k in (1, 2, 3):
        for m in (1, 2):
            path = RunFolder(tmp_path).member(k, m) / CONTINUATION
            path.parent.mkdir(parents=True)
            path.touch()
    remove_old_continuations(RunFolder(tmp_path), 2)
    assert continuations(tmp_path) == ["stage_002"] * 2 + ["stage_003"] * 2
    remove_old_continuations(RunFolder(tmp_path), 3, num_kept=2)
    assert continuations(tmp_path) == ["stage_002"] * 2 + ["stage_003"] * 2
    remove_old_continuations(RunFolder(tmp_path), 3, num_kept=1)
    assert continuations(tmp_path) == ["stage_003"] * 2


@pytest.mark.slow
def test_a_run_whose_old_continuations_were_removed_is_continued_and_forked(stream, tmp_path):
    short = (*SHORT, "updates=4", "validations=1", "optimizer_state=keep", "schedule=constant", "keep_states=1")
    command = ("alma-lm", f"stream={stream}", f"out={tmp_path}", *short)
    succeed(*command, "mega_batches=2")
    assert continuations(tmp_path) == ["stage_002"]
    before = rows_without_seconds(tmp_path)
    forked = (*command, "mega_batches=3", "lr=0.001")
    succeed(*forked, "fork=true")
    assert continuations(tmp_path) == ["stage_003"]
    rows = rows_without_seconds(tmp_path)
    assert (rows[:3], rows[3]["changed_settings"]) == (before, {"lr": [0.005, 0.001]})
    # A run that has all rows of its ledger needs no stage. This one has lost the last row, too.
    shutil.rmtree(tmp_path / "stages/stage_003")
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "summary.json").unlink()
    result = run_command(*forked)
    assert result.returncode == 2, result.stderr
    assert f"stage_002/member_1/{CONTINUATION} is missing, but stage 3 needs it: restore it" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forked_run_that_is_killed_at_random_ends_like_an_uninterrupted_one(stream, tmp_path):
    """Stages continue from another checkpoint than the one that predicts."""
    first = (*SHORT, "optimizer_state=keep", "schedule=constant", "mega_batches=1")
    forked = (*first[:-1], "mega_batches=3", "lr=0.001", "fork=true")
    try:
        for name in ("whole", "run"):
            KilledRun(stream, tmp_path / name, first).finish()
        reference = Reference.of(stream, tmp_path / "whole", forked)
        run = KilledRun(stream, tmp_path / "run", (*forked, "checkpoint_minutes=0.001"))
        assert run.kill_at_random(3, reference, random.Random(5)) >= 2
        run.report()
        run.finish()
        same_run(run.out, reference.out)
    finally:
        end_all()


@pytest.mark.parametrize(
    ("schedule", "optimizer_state", "index", "warmup"),
    # In the first stage, mega-batch 1 was known (init_from=), and the optimizer begins.
    [("per_stage", "keep", 2, 4), ("constant", "keep", 1, 4), ("constant", "reset", 2, 4), ("constant", "keep", 2, 0)],
)  # fmt: skip
def test_a_constant_rate_needs_no_warm_up_if_the_optimizer_continues(
    stream, tmp_path, schedule, optimizer_state, index, warmup
):
    config = config_of_stage(
        stream, tmp_path, new=(2,), past=(1,), replay=False, updates=80, schedule=schedule,
        optimizer_state=optimizer_state, lr=0.1, index=index,
    )  # fmt: skip
    assert config.lr_scheduler.warmup_updates == warmup
    assert config.lr_scheduler.end_learning_rate == (0.1 if schedule == "constant" else 0.0)


@pytest.mark.parametrize(("added", "warmup"), [(2, 4), (0, 0)])
def test_a_grown_model_warms_up_because_its_optimizer_begins_again(stream, tmp_path, added, warmup):
    """The stage of this helper is the second one, with 80 updates."""
    config = config_of_stage(
        stream, tmp_path, new=(2,), past=(1,), replay=False, updates=80, schedule="constant", optimizer_state="keep",
        learner="gmoe", learner_settings=LanguageModelGrowingMixtureSettings(grow_experts=added),
    )  # fmt: skip
    assert config.lr_scheduler.warmup_updates == warmup


def constant_stage(stream, out, own_options=None, start=None):
    """The configuration of the second stage, of 80 updates at a constant rate of 0.1, with the optimizer kept."""
    settings = LanguageModelSettings(
        stream=str(stream), out=str(out), arch="switch_lm_tiny", tokens_per_sample=32, sequences_per_update=8,
        precision="float32",
        updates=80, schedule="constant", optimizer_state="keep", lr=0.1,
    )  # fmt: skip
    folder = StreamFolder.open(stream)
    past, new = [*folder.stream()][:2]
    configs = TrainingConfigs(settings, folder.without_test(), None, own_options=own_options)
    return configs.of(Member.of_run(1, 0, 1), stage=Stage(2, (new,), (past,), False, out), folder=out, start=start)


def test_a_stage_warms_up_after_a_learner_has_changed_the_weights(stream, tmp_path):
    """The checkpoint that `change_weights` writes has no state of the optimizer."""
    for name, warmup in ((GROWN, 4), (CONTINUATION, 0)):
        assert constant_stage(stream, tmp_path, start=tmp_path / name).lr_scheduler.warmup_updates == warmup


def test_a_constant_rate_of_a_learner_is_constant(stream, tmp_path):
    config = constant_stage(stream, tmp_path, own_options=lambda stage, updates: {"lr": [0.01]})
    assert (config.optimization.lr, config.lr_scheduler.lr) == ([0.01], [0.01])
    assert config.lr_scheduler.end_learning_rate == 0.01


def test_the_key_of_shared_members_covers_the_code_that_trains():
    """Every module of the training that train_member imports from these packages is part of the digest."""
    tree = ast.parse(Path(train_member.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    prefixes = ("fairseq_alma.lm.", "fairseq_alma.modules.", "fairseq_alma.core.averaging")
    files = {
        name.removeprefix("fairseq_alma.").replace(".", "/") + ".py" for name in imported if name.startswith(prefixes)
    }
    assert "lm/average.py" in files and "core/averaging.py" in files
    assert {name for name in files if name not in TRAINING_CODE and name.split("/")[0] not in TRAINING_CODE} == set()
    assert "lm/train_member.py" in TRAINING_CODE

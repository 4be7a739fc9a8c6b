import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_alma import checkpoints
from fairseq_alma.checkpoints import (
    BEST,
    LAST,
    drop_optimizer_state,
    num_updates,
    read_checkpoint,
    repair_stage_folder,
    write_checkpoint,
)
from fairseq_alma.core.errors import StageError
from fairseq_alma.lm.fairseq_config import write_untrained_checkpoint
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of


def write(path: Path, updates: int, val_loss: float | None, best: float | None) -> None:
    extra = {"val_loss": val_loss} | ({} if best is None else {"best": best})
    torch.save(
        {
            "model": {"w": torch.full((2000,), float(updates))},
            "last_optimizer_state": {"m": torch.zeros(4000)},
            "optimizer_history": [{"num_updates": updates}],
            "extra_state": extra,
        },
        path,
    )


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def state_of(folder: Path) -> dict[str, int]:
    return {path.name: num_updates(read_checkpoint(path)) for path in folder.glob("*.pt")}


def test_a_whole_folder_is_left_alone(tmp_path):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    write(tmp_path / LAST, 40, 6.0, 5.0)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {BEST: 20, LAST: 40}


def test_killed_while_last_was_copied(tmp_path):
    # fairseq had written the new best under its interval name and copied it to best, but not to last.
    for name in ("checkpoint_2_40.pt", BEST, LAST):
        write(tmp_path / name, 40, 4.0, 4.0)
    cut(tmp_path / LAST)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {"checkpoint_2_40.pt": 40, BEST: 40, LAST: 40}


def test_killed_while_best_was_copied(tmp_path):
    write(tmp_path / LAST, 20, 5.0, 5.0)
    for name in ("checkpoint_2_40.pt", BEST):
        write(tmp_path / name, 40, 4.0, 4.0)
    cut(tmp_path / BEST)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {"checkpoint_2_40.pt": 40, BEST: 40, LAST: 40}


def test_killed_before_best_was_copied(tmp_path):
    # Whole files everywhere, but best is still the one before.
    write(tmp_path / BEST, 20, 5.0, 5.0)
    write(tmp_path / LAST, 20, 5.0, 5.0)
    write(tmp_path / "checkpoint_2_40.pt", 40, 4.0, 4.0)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {"checkpoint_2_40.pt": 40, BEST: 40, LAST: 40}


def test_killed_while_a_worse_one_was_copied_to_last(tmp_path):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    write(tmp_path / "checkpoint_2_40.pt", 40, 6.0, 5.0)
    write(tmp_path / LAST, 40, 6.0, 5.0)
    cut(tmp_path / LAST)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {"checkpoint_2_40.pt": 40, BEST: 20, LAST: 40}


def test_killed_inside_the_first_write(tmp_path):
    (tmp_path / "checkpoint_1_10.pt.tmp").write_bytes(b"half")  # fairseq's name
    (tmp_path / ".checkpoint_best.4711.tmp.pt").write_bytes(b"half")  # ours
    repair_stage_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_out_of_file_handles_is_no_damage(tmp_path, monkeypatch):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    write(tmp_path / LAST, 40, 6.0, 5.0)

    def no_handles(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many"):
        patch.setattr(torch, "load", no_handles)
        repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {BEST: 20, LAST: 40}


def test_what_is_damaged_is_set_aside_not_deleted(tmp_path):
    for name in ("checkpoint_2_40.pt", BEST, LAST):
        write(tmp_path / name, 40, 4.0, 4.0)
    cut(tmp_path / LAST)
    repair_stage_folder(tmp_path)
    assert (tmp_path / f"{LAST}.damaged").exists()


def test_when_the_best_is_lost_the_training_continues_from_the_last(tmp_path):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    cut(tmp_path / BEST)
    write(tmp_path / LAST, 40, 6.0, 5.0)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {LAST: 40}


def test_the_written_average_is_left_alone(tmp_path, caplog):
    """A kill after the averaged weights of the last update were written, and before the member's done mark."""
    write(tmp_path / "checkpoint_last.pt", 6, val_loss=5.0, best=4.0)
    write(tmp_path / "checkpoint_best.pt", 6, val_loss=5.0, best=4.0)
    before = state_of(tmp_path)
    repair_stage_folder(tmp_path, needs_best=False)
    assert state_of(tmp_path) == before
    assert caplog.text == ""


def test_a_checkpoint_without_optimizer_state_keeps_the_model(tmp_path):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    before = (tmp_path / BEST).stat().st_size
    drop_optimizer_state(tmp_path / BEST)
    state = read_checkpoint(tmp_path / BEST)
    assert state["model"]["w"].tolist() == [20.0] * 2000
    assert "last_optimizer_state" not in state
    assert (tmp_path / BEST).stat().st_size < before / 2
    drop_optimizer_state(tmp_path / BEST)  # again: nothing to do


def test_a_missing_best_checkpoint_is_reported(tmp_path):
    with pytest.raises(StageError, match="run the same command again"):
        drop_optimizer_state(tmp_path / BEST)


def test_the_optimizer_state_of_a_real_checkpoint_of_fairseq_is_dropped(trained, tmp_path):
    copy = Path(shutil.copy(trained, tmp_path / BEST))
    assert num_updates(read_checkpoint(copy)) <= 30
    drop_optimizer_state(copy)
    assert read_checkpoint(copy)["model"].keys() == read_checkpoint(trained)["model"].keys()
    cut(copy)
    assert read_checkpoint(copy) is None


def test_a_checkpoint_without_optimizer_state_alone_cannot_be_resumed(tmp_path):
    # As after a kill while a shared stage was copied. Without the optimizer's state fairseq would start at update 0,
    # with trained weights and the counts of the whole stage.
    write(tmp_path / BEST, 20, 5.0, 5.0)
    drop_optimizer_state(tmp_path / BEST)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {}


def test_beside_the_last_checkpoint_a_best_one_without_optimizer_state_is_kept(tmp_path):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    write(tmp_path / LAST, 40, 6.0, 5.0)
    drop_optimizer_state(tmp_path / BEST)
    repair_stage_folder(tmp_path)
    assert state_of(tmp_path) == {BEST: 20, LAST: 40}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_as_such_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    write(tmp_path / BEST, 20, 5.0, 5.0)
    monkeypatch.setattr(checkpoints, "remove_unfinished", lambda _: None)  # the link below must stay
    (tmp_path / f".checkpoint_best.{os.getpid()}.tmp.pt").symlink_to("/dev/full")  # as written_aside names it
    with pytest.raises(OSError, match="No space left"):
        drop_optimizer_state(tmp_path / BEST)
    assert "last_optimizer_state" in read_checkpoint(tmp_path / BEST)
    assert [path.name for path in tmp_path.iterdir()] == [BEST]


def test_the_untrained_checkpoint_is_made_without_ranks_on_a_machine_of_many_gpus(stream, tmp_path):
    # fairseq takes the number of GPUs for that of ranks, and would look for the others.
    arguments = [str(stream), *map(str, STAGE), "--save-dir", str(tmp_path), "--distributed-world-size", "2"]
    write_untrained_checkpoint(config_of(arguments), tmp_path / "untrained.pt")
    assert num_updates(read_checkpoint(tmp_path / "untrained.pt")) == 0


def test_a_write_removes_what_a_killed_write_of_the_same_file_left(tmp_path):
    for name in (BEST, LAST):
        (tmp_path / f".{Path(name).stem}.4711.tmp.pt").write_bytes(b"half")
    write_checkpoint({"model": {}}, tmp_path / BEST)
    assert {path.name for path in tmp_path.iterdir()} == {BEST, ".checkpoint_last.4711.tmp.pt"}

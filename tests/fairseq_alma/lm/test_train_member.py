"""The program that trains a member: when it writes checkpoints, and how often."""

import multiprocessing
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fairseq_alma.checkpoints import BEST, LAST, num_updates, read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.protocol import Learner, Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.lm.test_learners import in_a_fork, train_member_in_a_fork
from tests.fairseq_alma.processes import NoProcesses


def prepared(stream, folder: Path, **more) -> list[str]:
    """Write the configuration of a stage on the first mega-batch, and return the command that trains it."""
    processes = NoProcesses()
    learner, stage = learner_and_stage(stream, folder, processes, **more)
    with pytest.raises(StageError):  # nothing is trained, but the configuration is written
        learner.train(stage)
    (command,) = processes.commands
    return command


def learner_and_stage(stream, folder: Path, processes: NoProcesses | None = None, **more) -> tuple[Learner, Stage]:
    settings = LanguageModelSettings.from_mapping({
        "stream": str(stream), "out": str(folder), "arch": "switch_lm_tiny", "tokens_per_sample": 32,
        "sequences_per_update": 8, "updates": 12, "validations": 2, "lr": 0.005, **more,
    })  # fmt: skip
    stream_folder = StreamFolder.open(stream)
    (first, *_) = stream_folder.stream()
    learner = make_learner(settings, stream_folder.without_test(), processes or NoProcesses())
    return learner, Stage(1, (first,), (), False, folder / "stages/stage_001")


@pytest.mark.parametrize(("minutes", "num_saved"), [(10, 2), pytest.param(1e-9, 12, marks=pytest.mark.slow)])
def test_checkpoints_are_written_after_validations_and_at_intervals_of_time(stream, tmp_path, minutes, num_saved):
    command = prepared(stream, tmp_path / "run", checkpoint_minutes=minutes)
    member = tmp_path / "run/stages/stage_001/member_1"
    assert train_member_in_a_fork(command, member / "log.txt") == 0
    log = (member / "log.txt").read_text()
    assert log.count("Finished saving checkpoint") == num_saved
    assert log.count('begin validation on "valid"') == 2
    assert {path.name for path in member.glob("*.pt*")} == {LAST, BEST}
    assert num_updates(read_checkpoint(member / LAST)) == 12
    best = read_checkpoint(member / BEST)
    assert best["extra_state"]["val_loss"] == read_checkpoint(member / LAST)["extra_state"]["best"]
    if num_updates(best) == 12 and minutes == 10:
        assert (member / BEST).samefile(member / LAST)  # written once


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def num_children(parent: int) -> int:
    """Not every kernel has /proc/PID/task/TID/children."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            count += int(path.read_text().rpartition(") ")[2].split()[1]) == parent
    return count


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [None, 1])
def test_processes_and_files_of_past_epochs_do_not_stay_open(stream, tmp_path, num_workers):
    """With 30 epochs of 3 updates and one checkpoint at the end."""
    options = "" if num_workers is None else f"--num-workers {num_workers}"
    command = prepared(
        stream, tmp_path / "run", sequences_per_update=32, updates=90, validations=1, checkpoint_minutes=1000,
        fairseq=options,
    )  # fmt: skip
    most = multiprocessing.get_context("fork").Array("i", 3)

    def watch(ended: threading.Event) -> None:
        # The fork has inherited the files that the tests before it have left open.
        inherited = num_open_files()
        while not ended.wait(0.01):
            counts = (num_children(os.getpid()), num_open_files() - inherited, threading.active_count())
            for number, count in enumerate(counts):
                most[number] = max(most[number], count)

    def train() -> None:
        from fairseq_alma.lm.train_member import main

        ended = threading.Event()
        watching = threading.Thread(target=watch, args=[ended])
        watching.start()
        try:
            main(command[3:])
        finally:
            ended.set()

    member = tmp_path / "run/stages/stage_001/member_1"
    assert in_a_fork(train, member / "log.txt") == 0
    log = (member / "log.txt").read_text()
    assert log.count("end of epoch") >= 30
    children, files, threads = most
    # Besides the workers of an epoch and the next, a library may start a process for a moment.
    assert (num_workers or 0) <= children <= 2 * (num_workers or 0) + 1
    assert 0 < files < 48
    assert threads < 12


def test_if_the_best_checkpoint_of_an_ended_training_is_lost_the_last_takes_its_place(stream, tmp_path, caplog):
    command = prepared(stream, tmp_path / "run")
    member = tmp_path / "run/stages/stage_001/member_1"
    assert train_member_in_a_fork(command, member / "log.txt") == 0
    # The last checkpoint is not the best, and the best is gone.
    last = read_checkpoint(member / LAST)
    last["extra_state"]["best"] = 0.5
    write_checkpoint(last, member / LAST)
    (member / BEST).unlink()
    learner, stage = learner_and_stage(stream, tmp_path / "run")
    learner.train(stage)
    assert "the last checkpoint takes its place" in caplog.text
    assert num_updates(read_checkpoint(member / BEST)) == 12

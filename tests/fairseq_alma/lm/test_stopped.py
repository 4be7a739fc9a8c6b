"""Runs that are asked to stop, by Ctrl-C or by a scheduler: they save, release their lease, and lose nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import num_updates, read_checkpoint
from fairseq_alma.lm.train_member import STOPPED
from launch.local import killed_with
from tests.commands import ROOT, RUN
from tests.fairseq_alma.killing import KilledRun, Reference, end_all, same_run, trainings, wait_until, wait_until_gone
from tests.fairseq_alma.ranks import member_commands

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

UPDATES = 60
SETTINGS = (
    *RUN, "learner=ens", "members=2", "mega_batches=1", f"updates={UPDATES}", "validations=1", "dropout=0.1",
    "checkpoint_minutes=1000",
)  # fmt: skip


@pytest.fixture(autouse=True)
def end_started_processes():
    yield
    end_all()


@pytest.fixture(scope="module")
def reference(stream, tmp_path_factory) -> Reference:
    return Reference.of(stream, tmp_path_factory.mktemp("reference") / "whole", SETTINGS)


def is_training(log: Path) -> bool:
    """Return True if the log shows two updates. After the first one, the training saves when it gets SIGTERM."""
    return log.exists() and log.read_bytes().count(b'"num_updates"') > 1


def to_the_group(process: subprocess.Popen, number: int) -> None:
    os.killpg(process.pid, number)


def to_the_driver(process: subprocess.Popen, number: int) -> None:
    process.send_signal(number)


def twice(process: subprocess.Popen, number: int) -> None:
    """As a Slurm job gets it: all processes by Slurm itself, and the driver also by its script, a little later."""
    os.killpg(process.pid, number)
    time.sleep(0.05)
    process.send_signal(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(to_the_group, signal.SIGINT, id="Ctrl-C in a terminal"),
        pytest.param(to_the_driver, signal.SIGUSR1, id="warning of a time limit"),
        pytest.param(twice, signal.SIGTERM, id="end of a job"),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_its_members_and_continues_as_if_uninterrupted(
    stream, tmp_path, reference, send, number
):
    run = KilledRun(stream, tmp_path / "run", SETTINGS)
    process = run.start()
    members = [run.out / "stages" / "stage_001" / f"member_{n}" for n in (1, 2)]
    wait_until(lambda: all(is_training(member / "log.txt") for member in members), process)
    assert not any(run.out.rglob("checkpoint_last.pt"))
    running = trainings(process.pid)
    assert len(running) == 2
    send(process, number)
    assert process.wait(60) == 128 + number, run.errors()
    wait_until_gone(running, 0)
    assert f"alma-lm: {number.name}: stopping; what is being trained is saved first" in run.errors()
    assert run.errors().splitlines()[-1] == "alma-lm: stopped; run the same command again to continue"
    assert "Traceback" not in run.errors()
    assert not (run.out / "lease.json").exists()
    saved = [num_updates(read_checkpoint(member / "checkpoint_last.pt")) for member in members]
    assert all(0 < updates < UPDATES for updates in saved), saved
    run.finish()
    for member, updates in zip(members, saved, strict=True):
        assert f"@ {updates} updates" in (member / "log.txt").read_text()  # of "Loaded checkpoint ... @ N updates"
    same_run(run.out, reference.out)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_that_does_not_save_in_time(stream, tmp_path):
    run = KilledRun(stream, tmp_path / "run", SETTINGS)
    process = run.start()
    log = run.out / "stages" / "stage_001" / "member_1" / "log.txt"
    wait_until(lambda: is_training(log), process)
    running = trainings(process.pid)
    for training in running:
        os.kill(training, signal.SIGSTOP)  # as if it waited for a file system
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in run.errors(), process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130, run.errors()
    wait_until_gone(running, 1)
    assert not (run.out / "lease.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks_save_one_checkpoint_after_sigterm_and_both_end(stream, tmp_path):
    folder, processes = tmp_path / "stage", []
    options = ("--max-update", 100000, "--validate-interval-updates", 1000000)
    for rank, command in enumerate(member_commands(stream, folder, tmp_path, 2, *options)):
        with open(tmp_path / f"rank_{rank}.txt", "wb") as log:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=killed_with(os.getpid()))
            )
    wait_until(lambda: is_training(tmp_path / "rank_0.txt"), processes[0])
    for process in processes:
        process.terminate()
    texts = [(tmp_path / f"rank_{rank}.txt").read_text()[-3000:] for rank in (0, 1)]
    assert [process.wait(60) for process in processes] == [STOPPED, STOPPED], texts
    updates = num_updates(read_checkpoint(folder / "checkpoint_last.pt"))
    assert updates > 0

"""Tasks whose results are kept, and the heartbeats of the workers that do them."""

import json
import os
import signal
import time

import pytest

from data_prep.running.heartbeat import Heartbeat, StallWatch
from data_prep.running.tasks import Step, key_of, run_task
from fairseq_alma.core.files import write_whole
from fairseq_alma.core.store import Store
from tests.data_prep.running.slurm_tasks import Misbehave


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_worker_hangs_only_if_its_heartbeat_stops_whatever_the_clock_of_its_machine_says(tmp_path, hours):
    path, watch = tmp_path / "000000.alive", StallWatch(0.2)

    def beat(seconds):
        write_whole(path, "{}", durable=False)
        os.utime(path, times=(time.time() + 3600 * hours + seconds,) * 2)

    for number in range(6):
        beat(number / 10)
        assert watch.idle_seconds(path) == 0.0
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    while watch.idle_seconds(path) <= watch.stall_seconds:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watch.forget(path)
    assert watch.idle_seconds(path) == 0.0


def test_a_pause_of_the_command_itself_does_not_make_its_workers_hang(tmp_path):
    """If the command was suspended (Ctrl-Z), the workers probably were too."""
    path, watch = tmp_path / "000000.alive", StallWatch(0.1, max_pause_seconds=2.0)
    path.write_text("{}")
    assert watch.idle_seconds(path) == 0.0
    time.sleep(2.1)
    assert watch.idle_seconds(path) == 0.0
    time.sleep(0.15)
    assert watch.idle_seconds(path) > watch.stall_seconds


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no idle priority")
def test_a_worker_to_which_other_processes_leave_no_core_is_not_hung(tmp_path):
    """It runs only while nothing else does, and another process uses its core all the time."""
    core = min(os.sched_getaffinity(0))
    starved, worker = os.pipe()
    children = []
    try:
        for starts in (keep_core_busy, lambda: compute_at_idle_priority(tmp_path / "000000.alive", worker)):
            if (child := os.fork()) == 0:
                try:
                    os.sched_setaffinity(0, {core})
                    starts()
                finally:
                    os._exit(1)
            children.append(child)
        os.close(worker)
        assert os.read(starved, 1) == b"!"
        watch, deadline = StallWatch(1000), time.monotonic() + 60
        changes = 0
        while changes < 3 and time.monotonic() < deadline:
            changes += watch.idle_seconds(tmp_path / "000000.alive") == 0.0
            time.sleep(0.1)
        assert changes == 3
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def keep_core_busy():
    while True:
        pass


def compute_at_idle_priority(path, pipe):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with Heartbeat(path, interval_seconds=0.2):
        os.write(pipe, b"!")
        keep_core_busy()


def test_a_task_that_raises_an_exception_leaves_the_name_of_its_input(tmp_path):
    path = tmp_path / "000000.alive"
    with pytest.raises(ValueError), Heartbeat(path) as heartbeat:
        heartbeat.beat("book_7.txt")
        raise ValueError
    assert json.loads(path.read_text())["at"] == "book_7.txt"


def test_a_stored_result_that_disappears_while_it_is_taken_is_none(tmp_path, monkeypatch):
    task = Misbehave(0, str(tmp_path / "starts"))
    done, step = Step(tmp_path / "done", [task]), Step(tmp_path / "step", [task])
    for folder in (done.folder, step.folder):
        folder.mkdir()
    run_task(str(done.folder), 0, task.description())
    store, key, take = Store(tmp_path / "store"), key_of(task.description()), Store.take
    done.put(0, store)
    with monkeypatch.context() as context:
        context.setattr(
            store, "take", lambda *arguments, **more: take(store, *arguments, **more)._replace(folder=tmp_path)
        )
        assert not step.take(0, store, key)
    assert step.mark(0) is None
    assert step.take(0, store, key)
    assert step.finished() == {0: {"number": 0}}

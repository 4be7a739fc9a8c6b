"""The list of tasks, and the heartbeats of the workers that do them."""

import json
import os
import time

import pytest

from data_prep.errors import PrepError
from data_prep.running.heartbeat import Heartbeat, StallWatch
from data_prep.running.tasks import Step, key_of, read_task, run_task, write_tasks
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


def test_a_task_that_raises_an_exception_leaves_the_name_of_its_input(tmp_path):
    path = tmp_path / "000000.alive"
    with pytest.raises(ValueError), Heartbeat(path) as heartbeat:
        heartbeat.beat("book_7.txt")
        raise ValueError
    assert json.loads(path.read_text())["at"] == "book_7.txt"


def test_a_worker_reads_its_task_without_reading_the_tasks_before_it(tmp_path):
    descriptions = [f'{{"number": {number}, "name": "größe"}}' for number in range(2000)]
    write_tasks(tmp_path, descriptions)
    assert [read_task(tmp_path, number) for number in (0, 1, 1999)] == [f"{descriptions[n]}\n" for n in (0, 1, 1999)]
    with pytest.raises(PrepError, match="lists 2000 tasks, so it has no task 2000"):
        read_task(tmp_path, 2000)
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    # Overwrite the description of every task but the last, and every row of the table but the first and the last.
    row, first = 16, int(content[:15])
    last = int(content[1999 * row : 1999 * row + 15])
    path.write_bytes(
        content[:row] + b"\n" * (1998 * row) + content[1999 * row : first] + b"\n" * (last - first) + content[last:]
    )
    assert read_task(tmp_path, 1999) == f"{descriptions[1999]}\n"


def test_a_stored_result_that_disappears_while_it_is_taken_is_none(tmp_path, monkeypatch):
    task = Misbehave(0, str(tmp_path / "starts"))
    done, step = Step(tmp_path / "done", [task]), Step(tmp_path / "step", [task])
    for folder in (done.folder, step.folder):
        folder.mkdir()
    write_tasks(done.folder, [task.description()])
    run_task(str(done.folder), 0)
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

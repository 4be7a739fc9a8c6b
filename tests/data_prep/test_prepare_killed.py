"""Runs that end badly: nothing of them looks whole, and the same command finishes the work."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from data_prep.reading.provenance import versions
from data_prep.running.heartbeat import Heartbeat, StallWatch
from data_prep.running.tasks import Step, Task, run_task
from data_prep.running.workers import Workers
from data_prep.settings import PrepSettings
from data_prep.sources import Source
from tests.leases import beating

DEADLINE_SECONDS = 30


def command(out: Path, *sources: str, num_mega_batches: int = 3) -> list[str]:
    argv = [sys.executable, "-m", "data_prep", str(out), "--mega-batches", str(num_mega_batches)]
    argv += ["--vocab-size", "1000", "--seed", "0", "--workers", "2"]
    for source in sources:
        argv += ["--source", source]
    return argv


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop_when(process: subprocess.Popen, exists: Path):
    """Halt a run at the moment when a file of its work appears, so that it cannot hurry past."""
    wait_until(exists.exists)
    process.send_signal(signal.SIGSTOP)


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def large_text(tmp_path_factory, write_corpus):
    """125 books, 150 000 words: seconds of work, so that a kill falls into the middle."""
    return write_corpus(tmp_path_factory.mktemp("large") / "books", num_files=125)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, large_text, folder_bytes):
    out = tmp_path_factory.mktemp("uninterrupted") / "stream"
    subprocess.run(command(out, f"books:{large_text}"), check=True, capture_output=True)
    return folder_bytes(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, books, alma_prep, folder_bytes):
    """The bytes of the stream of `books`, made without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "stream"
    assert alma_prep(out, f"books:{books}") == 0
    return folder_bytes(out)


MOMENTS = ["stream/mega_batch_1/train.bin"]
MORE_MOMENTS = [
    *("spool/000000.*.part", "spool/000000.done", "cut/000000.*.part", "tokenizer/000000.*.part", "encode/000000.done"),
    *("join/000000.*.part", "join/000000.done", "join/000002.done", "join/000004.done"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(moment, marks=pytest.mark.slow) for moment in MORE_MOMENTS)]
)
def test_a_killed_run_is_finished_by_the_same_command(tmp_path, large_text, uninterrupted, folder_bytes, moment):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work = out / ".alma-prep"
    wait_until(lambda: any(work.glob(moment)))
    process.send_signal(signal.SIGSTOP)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert not (out / "stream.json").exists()
    wait_until(lambda: not any(map(is_alive, workers)))  # nobody is left to hold memory or the folder
    whole = {path: path.stat().st_mtime_ns for path in work.glob("*/*.done")}
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = {}
    while process.poll() is None:  # the work folder is gone in the end
        for path in whole:
            with contextlib.suppress(OSError):
                kept[path] = path.stat().st_mtime_ns
        time.sleep(0.005)
    assert process.returncode == 0
    assert folder_bytes(out) == uninterrupted
    assert not work.exists()
    # Tasks that were done were not done again.
    assert kept == whole


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_run_killed_before_it_moves_a_shard_is_finished(
    tmp_path, books, alma_prep, folder_bytes, whole, monkeypatch, number
):
    """Before the first shard, there is the empty folder into which it would be moved."""
    out, replace, moved = tmp_path / "out", os.replace, []

    def killed(source, target):
        inside = Path(target).is_relative_to(out) and not Path(target).relative_to(out).parts[0].startswith(".")
        if inside and len(moved) == number:
            raise KeyboardInterrupt
        moved.extend([target] * inside)
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert alma_prep(out, f"books:{books}") == 130
    assert len(moved) == number and not (out / "stream.json").exists()
    assert alma_prep(out, f"books:{books}") == 0
    assert folder_bytes(out) == whole


@pytest.mark.slow
def test_a_task_whose_shards_were_altered_or_lost_is_done_again(tmp_path, large_text, uninterrupted, folder_bytes):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop_when(process, out / ".alma-prep" / "encode" / "000000.done")
    workers = children(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, workers)))  # else one of them would still read what is altered now
    spool = out / ".alma-prep" / "spool" / "000000.text"
    content = spool.read_bytes()
    spool.write_bytes(b"x" + content[1:])  # of the same length
    (out / ".alma-prep" / "encode" / "000000.tokens").unlink()
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


def test_an_unfinished_stream_refuses_other_settings_by_name(tmp_path, books):
    out = tmp_path / "out"
    argv = command(out, f"books:{books}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop_when(process, out / ".alma-prep" / "spool")
    process.kill()
    process.wait()
    other = subprocess.run([*argv, "--language", "en"], capture_output=True, text=True)
    assert other.returncode == 2
    assert "contains an unfinished stream with other settings: language was  and is now en." in other.stderr
    # Where and how fast it runs is no such setting.
    subprocess.run([*argv, "--workers", "1", "--max-bad", "0.5"], check=True, capture_output=True)


def test_a_run_killed_between_the_last_renames_is_finished(tmp_path, books, alma_prep, folder_bytes, whole):
    out = tmp_path / "out"
    # Shards beside the work folder, of a run with more mega-batches, and no stream.json yet.
    for folder in (".alma-prep/spool", ".alma-prep/stream/test", "mega_batch_1", "mega_batch_9"):
        (out / folder).mkdir(parents=True)
    for name in (
        "mega_batch_1/train.bin",
        "mega_batch_9/train.idx",
        "dict.txt",
        ".alma-prep/spool/000000.text",
    ):
        (out / name).write_text("left over")
    assert alma_prep(out, f"books:{books}") == 0
    assert folder_bytes(out) == whole


def test_the_work_folder_of_a_run_killed_at_its_very_end_is_removed(tmp_path, books, alma_prep, folder_bytes, capsys):
    out = tmp_path / "out"
    assert alma_prep(out, f"books:{books}") == 0
    finished = folder_bytes(out)
    (out / ".alma-prep" / "spool").mkdir(parents=True)
    (out / ".alma-prep" / "lock").touch()  # of an earlier release, which locked this file
    capsys.readouterr()
    assert alma_prep(out, f"books:{books}") == 0
    assert "nothing to do" in capsys.readouterr().err
    assert folder_bytes(out) == finished
    assert not (out / ".alma-prep").exists()


def worker_of(process: subprocess.Popen) -> int:
    """The youngest child is a worker; the oldest may be multiprocessing's resource tracker."""
    return max(children(process.pid))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "a worker process died"),
        pytest.param(signal.SIGSTOP, "a worker hung: process", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_or_hangs_ends_the_run_and_the_rerun_finishes(
    tmp_path, large_text, uninterrupted, folder_bytes, sent, message
):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    impatient = "import sys, data_prep.cli as c, data_prep.settings as s; s.STALL_SECONDS['local'] = 3.0; "
    impatient += "sys.exit(c.main())"
    process = subprocess.Popen([sys.executable, "-c", impatient, *argv[3:]], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any((out / ".alma-prep" / "spool").glob("[0-9]*.alive")))
    process.send_signal(signal.SIGSTOP)
    [alive, *_] = sorted((out / ".alma-prep" / "spool").glob("[0-9]*.alive"))
    os.kill(json.loads(alive.read_text())["pid"], sent)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    assert f"alma-prep: {message}" in errors
    assert "spool, task 0000" in errors  # which work, and at which file
    assert "book_" in errors or "its start" in errors
    if sent == signal.SIGKILL:
        assert "ended by SIGKILL" in errors
    assert "Traceback" not in errors
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


@pytest.mark.parametrize("tries", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_what_ended_a_worker_is_always_known(tries):
    """An exit code can be read once. If `died` read it after the pool, it got "status 255" in 5 of 150 tries."""
    for _ in range(tries):
        with Workers(2) as workers:
            with pytest.raises(BrokenProcessPool):
                list(workers.run_in_order(signal.raise_signal, [(signal.SIGKILL,)] * 3))
            assert set(workers.died().values()) == {"SIGKILL"}


def test_an_interrupted_run_can_be_continued(tmp_path, large_text, uninterrupted, folder_bytes):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(
        argv,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that a shell runs in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    stop_when(process, out / ".alma-prep" / "spool" / "000000.text")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "alma-prep: stopped; run the same command again to continue"
    assert "Traceback" not in errors
    assert not (out / "stream.json").exists()
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


@pytest.mark.slow
def test_five_kills_at_random_moments_leave_the_same_bytes(tmp_path, large_text, uninterrupted, folder_bytes):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    rng = random.Random(os.urandom(8))
    for _ in range(5):
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.2, 6))
        process.kill()
        process.wait()
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


def test_a_second_run_is_refused_while_the_first_one_works_and_names_it(tmp_path, large_text):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop_when(process, out / ".alma-prep" / "spool")
    second = subprocess.run(argv, capture_output=True, text=True)
    assert second.returncode == 2
    assert f"another alma-prep is running in {out}: process {process.pid} on {socket.gethostname()}." in second.stderr
    assert (out / ".alma-prep" / "spool").exists()  # the first one's work is untouched
    process.kill()
    process.wait()
    # Nobody holds the folder now, although the lease is still there: the next run takes it over at once.
    assert (out / ".alma-prep" / "lease.json").exists()
    began = time.monotonic()
    third = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: lease_of(out).get("pid") == third.pid)
    assert time.monotonic() - began < DEADLINE_SECONDS / 2
    third.kill()
    third.wait()


def lease_of(out: Path) -> dict:
    try:
        return json.loads((out / ".alma-prep" / "lease.json").read_text())
    except (OSError, ValueError):
        return {}


def test_a_run_on_another_machine_is_not_disturbed(tmp_path, books, alma_prep, capsys):
    out = tmp_path / "out"
    lease = {"host": "elsewhere", "pid": 7, "process_start": "1", "job_id": None, "job_restarts": "0"}
    (out / ".alma-prep").mkdir(parents=True)
    (out / ".alma-prep" / "lease.json").write_text(json.dumps(lease))
    with beating(out / ".alma-prep"):
        assert alma_prep(out, f"books:{books}") == 2
    assert f"another alma-prep is running in {out}: process 7 on elsewhere." in capsys.readouterr().err
    # Its heartbeat stopped three minutes ago: that machine is gone.
    past = time.time() - 180
    os.utime(out / ".alma-prep" / "lease.json", (past, past))
    assert alma_prep(out, f"books:{books}") == 0
    assert not (out / ".alma-prep").exists()


def test_a_work_folder_of_an_earlier_release_is_finished(tmp_path, books, alma_prep, folder_bytes, whole):
    work = tmp_path / "out" / ".alma-prep"
    (work / "spool").mkdir(parents=True)
    settings = PrepSettings(
        out=tmp_path / "out", sources=(Source("books", str(books)),), num_mega_batches=3, vocab_size=300, seed=1
    )
    (work / "settings.json").write_text(json.dumps(settings.identity() | {"versions": versions()}))
    (work / "lock").touch()
    # Done marks named a function and its arguments.
    task = ["data_prep.spool:spool_parts", 0, 1, 0, [[["books", "a.txt", "a.txt", 0, 9, []], 0]], None, True, "0"]
    (work / "spool" / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    (work / "spool" / "000000.text").write_text("old")
    (work / "spool" / "000000.done").write_text(json.dumps({"task": task, "files": {}, "result": {}}))
    assert alma_prep(tmp_path / "out", f"books:{books}") == 0
    assert folder_bytes(tmp_path / "out") == whole
    assert not work.exists()


def test_a_file_system_that_cannot_sync_a_folder(tmp_path, books, alma_prep, monkeypatch, capsys):
    fsync = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    assert alma_prep(tmp_path / "out", f"books:{books}") == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "stream.json").exists()


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(num_bytes): a folder on a disk of that size."""
    mounted = []

    def mount(num_bytes: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        try:
            subprocess.run(argv, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a full disk needs the right to mount a small tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


# 1 MB of text, 0.5 MB of tokens: the first disk is full while the one is copied, the second while the other is written.
@pytest.mark.parametrize("num_bytes", [1 << 19, pytest.param(5 << 18, marks=pytest.mark.slow)])
def test_a_full_disk_is_an_error_and_no_stream(small_disk, large_text, num_bytes):
    disk = small_disk(num_bytes)
    run = subprocess.run(command(disk / "out", f"books:{large_text}"), capture_output=True, text=True)
    assert run.returncode == 2
    assert "alma-prep: no space left on the disk of" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert not (disk / "out" / "stream.json").exists()


def test_workers_give_results_in_order_and_pass_errors_on():
    with Workers(2) as workers:
        assert list(workers.run_in_order(pow, [(base, 2) for base in range(20)])) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            list(workers.run_in_order(divmod, [(1, 0)]))


def hung(step):
    """The message about a worker of the step that hangs; None if none does."""
    watch = StallWatch(0.01)
    assert step.stalled(range(len(step.tasks)), watch) is None  # at the first look, nothing is known
    time.sleep(0.02)
    return step.stalled(range(len(step.tasks)), watch)


def test_the_heartbeat_of_a_killed_run_is_not_taken_for_a_worker_that_hangs(tmp_path):
    """Its task may wait long for its turn: the heartbeat of the process that is gone must be removed."""

    class Here:
        """An executor that runs tasks in this process."""

        def run(self, step, numbers, threads, on_done):
            assert hung(step) is None
            for number in numbers:
                run_task(str(step.folder), number, step.tasks[number].description())
                on_done(number)

    step = Step(tmp_path / "step", [WriteNumber(0), WriteNumber(1)])
    step.folder.mkdir()
    stale = step.folder / "000001.alive"
    stale.write_text(json.dumps({"pid": 1, "host": "gone", "at": "its start"}))
    os.utime(stale, (1, 1))
    assert hung(step).startswith("a worker hung: process 1 on gone")
    # A process that was killed while it wrote its heartbeat leaves a temporary file.
    temporary = step.folder / ".000001.1.tmp.alive"
    stale.rename(temporary)
    assert hung(step) is None
    temporary.rename(stale)
    assert step.run(Here()) == [{"number": 0}, {"number": 1}]


@dataclasses.dataclass(frozen=True)
class WriteNumber(Task):
    number: int

    def run(self, prefix, heartbeat):
        prefix.with_name(f"{prefix.name}.txt").write_text(str(self.number))
        return {"number": self.number}


def test_a_heartbeat_is_written_while_there_is_progress(tmp_path):
    path = tmp_path / "000000.alive"
    with Heartbeat(path) as heartbeat:
        assert json.loads(path.read_text())["at"] == "its start"
        heartbeat.beat("book_7.txt")
        assert json.loads(path.read_text()) == {"pid": os.getpid(), "host": socket.gethostname(), "at": "book_7.txt"}
        written = path.stat().st_mtime_ns
        heartbeat.beat()
        wait_until(lambda: path.stat().st_mtime_ns > written)
    assert not path.exists()


def test_ctrl_c_is_delayed_until_the_block_ends():
    # In a process of its own: a thread of the test runner that does not block SIGINT would receive it.
    code = """
import os, signal, time
from data_prep.running.progress import interrupts_delayed
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with interrupts_delayed():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        print("reached the end")
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["reached the end", "interrupted"]

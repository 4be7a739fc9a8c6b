"""Runs that end badly: nothing of them looks whole, and the same command finishes the work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.workers import Workers

DEADLINE_SECONDS = 30


def command(out: Path, *sources: str, num_mega_batches: int = 3) -> list[str]:
    argv = [sys.executable, "-m", "data_prep", str(out), "--mega-batches", str(num_mega_batches)]
    argv += ["--vocab-size", "1000", "--seed", "0", "--workers", "2"]
    for source in sources:
        argv += ["--source", source]
    return argv


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
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
    """250 books, 300 000 words: seconds of work, so that a kill falls into the middle."""
    return write_corpus(tmp_path_factory.mktemp("large") / "books", num_files=250)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, large_text, folder_bytes):
    out = tmp_path_factory.mktemp("uninterrupted") / "stream"
    subprocess.run(command(out, f"books:{large_text}"), check=True, capture_output=True)
    return folder_bytes(out)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("moment", ["spool/000000.text", "stream/mega_batch_1/train.bin"])
def test_a_killed_run_is_finished_by_the_same_command(tmp_path, large_text, uninterrupted, folder_bytes, moment):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop_when(process, out / ".alma-prep" / moment)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert not (out / "stream.json").exists()
    wait_until(lambda: not any(map(is_alive, workers)))  # nobody is left to hold memory or the folder
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


def test_a_run_killed_between_the_last_renames_is_finished(tmp_path, large_text, uninterrupted, folder_bytes):
    out = tmp_path / "out"
    # Pieces beside the work folder, of a run with more mega-batches, and no stream.json yet.
    for folder in (".alma-prep/spool", ".alma-prep/stream/test", "mega_batch_1", "mega_batch_9"):
        (out / folder).mkdir(parents=True)
    for name in (
        "mega_batch_1/train.bin",
        "mega_batch_9/train.idx",
        "dict.txt",
        ".alma-prep/spool/000000.text",
    ):
        (out / name).write_text("left over")
    subprocess.run(command(out, f"books:{large_text}"), check=True, capture_output=True)
    assert folder_bytes(out) == uninterrupted


def test_a_run_killed_in_its_last_moment_is_whole_and_tidied_up(tmp_path, large_text, uninterrupted, folder_bytes):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    subprocess.run(argv, check=True, capture_output=True)
    (out / ".alma-prep" / "spool").mkdir(parents=True)
    (out / ".alma-prep" / "lock").touch()
    assert "nothing to do" in subprocess.run(argv, check=True, capture_output=True, text=True).stderr
    assert folder_bytes(out) == uninterrupted
    assert not (out / ".alma-prep").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_ends_the_run_with_an_error(tmp_path, large_text):
    out = tmp_path / "out"
    process = subprocess.Popen(command(out, f"books:{large_text}"), stderr=subprocess.PIPE, text=True)
    stop_when(process, out / ".alma-prep" / "spool" / "000000.text")
    # The youngest child is a worker; the oldest may be multiprocessing's resource tracker.
    os.kill(max(children(process.pid)), signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    assert "alma-prep: a worker process died" in errors
    assert "Traceback" not in errors
    assert not out.exists()


def test_an_interrupted_run_leaves_nothing(tmp_path, large_text):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(out, f"books:{large_text}"),
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
    assert errors.splitlines()[-1] == "alma-prep: interrupted; the same command starts anew"
    assert "Traceback" not in errors
    assert not out.exists()


def test_two_runs_at_once_do_not_meet(tmp_path, large_text):
    out = tmp_path / "out"
    argv = command(out, f"books:{large_text}")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop_when(process, out / ".alma-prep" / "spool")
    second = subprocess.run(argv, capture_output=True, text=True)
    assert second.returncode == 2
    assert "another alma-prep is at work" in second.stderr
    assert (out / ".alma-prep" / "spool").exists()  # the first one's work is untouched
    process.kill()
    process.wait()


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


# 2 MB of text, 1 MB of tokens: the first disk is full while the one is copied, the second while the other is written.
@pytest.mark.parametrize("num_bytes", [1 << 20, 5 << 19])
def test_a_full_disk_is_an_error_and_nothing_is_left(small_disk, large_text, num_bytes):
    disk = small_disk(num_bytes)
    run = subprocess.run(command(disk / "out", f"books:{large_text}"), capture_output=True, text=True)
    assert run.returncode == 2
    assert "alma-prep: no space left on the disk of" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert not (disk / "out").exists()


def test_workers_give_results_in_order_and_pass_errors_on():
    with Workers(2) as workers:
        assert list(workers.run_in_order(pow, [(base, 2) for base in range(20)])) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            workers.run(divmod, 1, 0)

"""Processes that are stopped just before one of their writes, lose their lease, and wake up when another has finished.

The process is a fork of the test. It stops itself by an audit hook, which Python calls before it renames, removes or
opens a file. Its lease says that it runs on another machine, so that nobody can see whether it still runs.
"""

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

_WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "shutil.copyfile")


class Sleeper:
    """A process that does something, and is stopped just before one of its writes in a folder.

    Args:
        do: what it does.
        folder: the folder.
        number: the number of the write, from 0.
    """

    def __init__(self, do: Callable[[], object], folder: Path, number: int):
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                with mock.patch("fairseq_alma.core.holder._boot_id", lambda: "another-machine"):
                    _stop_before(folder, number)
                    do()
                status = 0
            except BaseException as error:
                status = 2 if type(error).__name__ == "LeaseLostError" else 1
            finally:
                os._exit(status)
        _, status = os.waitpid(self._pid, os.WUNTRACED)
        self.has_stopped = os.WIFSTOPPED(status)
        if not self.has_stopped:
            assert os.waitstatus_to_exitcode(status) == 0

    def wake(self) -> int:
        """Let it go on, and return its exit status: 2 if it says that it has lost its lease."""
        os.kill(self._pid, signal.SIGCONT)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _stop_before(folder: Path, number: int) -> None:
    numbers, start = itertools.count(), str(folder) + os.sep

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            is_write = bool(flags & (os.O_WRONLY | os.O_RDWR))
        else:
            is_write = event in _WRITES
            path = arguments[0] if is_write else None
        is_inside = is_write and not isinstance(path, int) and str(Path(os.fsdecode(path)).absolute()).startswith(start)
        if is_inside and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(hook)


def late_writers(
    do: Callable[[Path], object], folder: Path, same: Callable[[Path, Path], object], every: int, first: int = 0
) -> Iterator[int]:
    """Stop a run at each `every`-th write, finish it by another process, and then wake the first one.

    Check that the finished run is as if it had never been stopped, before and after the first process wakes up. Yield
    the exit status of the first process.

    Args:
        do: carries out the run in a folder. It is called in processes of their own.
        folder: an empty folder for the runs.
        same: asserts that the second of two runs is equal to the first.
        every: 1 for each write.
        first: number of the first write.
    """
    whole = folder / "whole"
    _in_fork(lambda: do(whole))
    for number in itertools.count(first, every):
        out = folder / f"stopped_before_{number}"
        out.mkdir()
        sleeper = Sleeper(lambda out=out: do(out), out, number)
        if not sleeper.has_stopped:
            return
        for lease in out.rglob("lease.json"):
            os.utime(lease, (time.time() - 1000,) * 2)
        try:
            _in_fork(lambda out=out: do(out))
            same(whole, out)
        finally:
            status = sleeper.wake()
        same(whole, out)
        assert not list(out.rglob("lease.json"))
        shutil.rmtree(out)
        yield status


def _in_fork(do: Callable[[], object]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            do()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        pytest.fail("the run failed")


def num_kills_before_it_ends(work: Callable[[], object], out: Path) -> int:
    """Kill a process at its first write into the parent folder of `out`, the next one at its second, until one ends.

    Assert that each killed process leaves nothing at `out`, and that nothing else is left in the end.
    """
    number = 0
    while (process := Sleeper(work, out.parent, number)).has_stopped:
        os.kill(process._pid, signal.SIGKILL)
        os.waitpid(process._pid, 0)
        assert not out.exists()
        number += 1
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]
    return number

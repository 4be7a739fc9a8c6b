"""Run alma-prep for prep.py, and measure each step."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from _common import TICKS_PER_SECOND, process_tree, tree_cpu_seconds

VOCABULARY = 50_000
MEGA_BATCHES = 4
END = "end"
"""The name of what follows the last step that alma-prep reports."""
_STEP = re.compile(r"([a-z][a-z -]*): [\d,]+ \w+ in [\d.,]+ s$")
"""The line that alma-prep prints after a step."""
_DISK_SECONDS = 5.0
"""Seconds between two measurements of the disk space."""


class MeasuredRun:
    """Runs alma-prep and measures every step. What precedes a step, such as joining results, counts as part of it.

    Args:
        command: the command that starts alma-prep.
        folders: folders whose disk space is measured. A file with several links counts once.
    """

    def __init__(self, command: list[str], folders: Sequence[Path] = ()):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.cpu: dict[str, float] = {}
        """CPU seconds by step, of all processes."""
        self.own_cpu: dict[str, float] = {}
        """CPU seconds by step of the command itself, without its workers."""
        self.wall: dict[str, float] = {}
        """Wall seconds by step."""
        self.peak: dict[str, float] = {}
        """Peak memory by step: MiB of the largest process, without memory-mapped files."""
        self.own_peak: dict[str, float] = {}
        """The same of the command itself."""
        self.disk_bytes = 0
        """Largest number of bytes that the folders took."""
        self._folders, self._now = folders, [0.0, 0.0]
        self._before, self._own_before, self._start = 0.0, 0.0, time.monotonic()
        ended, lines = threading.Event(), []
        watcher = threading.Thread(target=self._watch, args=(process.pid, ended), daemon=True)
        watcher.start()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := _STEP.match(line.rpartition("\r")[2]):
                self._end_step(match[1], tree_cpu_seconds(process.pid), _own_cpu_seconds(process.pid))
        # A zombie still has its CPU times, without those of its children.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        own_cpu = _own_cpu_seconds(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        watcher.join()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}\nended with status {process.returncode}:\n{''.join(lines[-30:])}")
        self._end_step(END, usage.ru_utime + usage.ru_stime, own_cpu)

    @property
    def total_cpu(self) -> float:
        """CPU seconds of all steps."""
        return sum(self.cpu.values())

    def _end_step(self, step: str, cpu: float, own_cpu: float) -> None:
        """Add what was spent since the last step. A step that is reported several times is added up."""
        now = time.monotonic()
        for table, spent in (
            (self.cpu, max(0.0, cpu - self._before)),
            (self.own_cpu, max(0.0, own_cpu - self._own_before)),
            (self.wall, now - self._start),
        ):
            table[step] = table.get(step, 0.0) + spent
        for table, peak in zip((self.peak, self.own_peak), self._now, strict=True):
            table[step] = max(table.get(step, 0.0), peak)
        self._before, self._own_before, self._start, self._now = cpu, own_cpu, now, [0.0, 0.0]

    def _watch(self, pid: int, ended: threading.Event) -> None:
        """Update the peaks of the current step ten times a second, until the run has ended."""
        disk_at = 0.0
        while not ended.wait(0.1):
            peaks = {member: _anonymous_mib(member) for member in process_tree(pid)}
            now = self._now
            now[:] = [max(now[0], *peaks.values()), max(now[1], peaks.get(pid, 0.0))]
            if self._folders and time.monotonic() - disk_at > _DISK_SECONDS:
                self.disk_bytes = max(self.disk_bytes, disk_bytes(self._folders))
                disk_at = time.monotonic()


def disk_bytes(folders: Sequence[Path]) -> int:
    """Return the disk space of all files in some folders, in bytes. A file with several links counts once."""
    found = {}
    for folder in folders:
        for place, _, names in os.walk(folder):  # skips folders that were removed meanwhile; Path.rglob raises an error
            for name in names:
                try:
                    status = (Path(place) / name).stat()
                except OSError:  # removed meanwhile
                    continue
                found[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def _own_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of one process, without its children."""
    return sum(process_tree(pid)[pid][:2]) / TICKS_PER_SECOND


def _anonymous_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB, without memory-mapped files, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def alma_prep(out: Path, source: str, *more: object) -> list[str]:
    """Return the command that starts alma-prep. `more` contains further arguments."""
    command = [sys.executable, "-m", "data_prep", out, "--source", source, "--mega-batches", MEGA_BATCHES]
    return list(map(str, [*command, "--vocab-size", VOCABULARY, *more]))

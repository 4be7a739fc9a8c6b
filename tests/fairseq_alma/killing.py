"""Runs of alma-lm that tests start in a process group of their own, watch, kill and compare."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from fairseq_alma import demo
from fairseq_alma.checkpoints import read_checkpoint
from launch.local import Process
from launch.warm import warm_start
from tests.commands import MODULES, ROOT

DEADLINE_SECONDS = 900
"""Limit for steps that take a minute on a free machine."""
POLL_SECONDS = 0.0002
ATTEMPTS = 8
"""Number of attempts to kill a run at a moment that lasts milliseconds."""


_started: list[subprocess.Popen] = []


DIE_IN_WRITE = """
import os, pathlib, signal, sys

def hook(event, arguments):
    if event == "os.rename" and pathlib.Path(os.fsdecode(arguments[0])).match(os.environ["DIE_IN_WRITE_OF"]):
        os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)
        os.killpg(0, signal.SIGKILL)

sys.addaudithook(hook)
"""
"""A module sitecustomize, which Python imports first. When a process is about to give a file its final name, half of
the file is removed, as if only that had been written, and all processes of the run are killed."""


def start(
    stream: Path, out: Path, settings: Sequence[str], errors: int | IO[bytes] = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen:  # fmt: skip
    """Start alma-lm in a process group of its own. Its stderr is written to `errors`."""
    program = Path(sys.executable).parent / "alma-lm"
    process = subprocess.Popen(
        [str(program), f"stream={stream}", f"out={out}", *settings],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
        # A suite that a shell runs in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    _started.append(process)
    return process


def start_fork(stream: Path, out: Path, settings: Sequence[str]) -> Process:
    """Start alma-lm as a fork, see `tests.commands.run_command`. When it is killed, its training processes end too."""
    command = [sys.executable, "-m", MODULES["alma-lm"], f"stream={stream}", f"out={out}", *settings]
    with open(os.devnull, "w") as nothing, contextlib.chdir(ROOT):
        return warm_start(demo.SLOW_IMPORTS)(command, nothing.fileno(), os.environ, nothing.fileno())


def has_ended(process: Process) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0)
        return True
    return False


def end_all() -> None:
    """End all processes that tests have started and that still run."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(condition: Callable[[], object], process: Process, seconds: float = DEADLINE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert not has_ended(process), "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)


def rows_without_seconds(run: Path) -> list[dict]:
    lines = (run / "ledger.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.endswith("_seconds")} for line in lines]


def same_values(a: dict, b: dict) -> None:
    """Assert that counts are equal and floats equal within 1e-6, as for a stage that was killed and resumed."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, float):
            assert value == pytest.approx(b[key], rel=1e-6), key
        else:
            assert value == b[key], key


def same_rows(a: Sequence[dict], b: Sequence[dict]) -> None:
    for x, y in zip(a, b, strict=True):
        same_values(x, y)


def same_ledger(a: Path, b: Path) -> None:
    same_rows(rows_without_seconds(a), rows_without_seconds(b))


def same_run(a: Path, b: Path) -> None:
    """Assert that two runs have the same ledger, summary and files, so that the kills have left nothing behind."""
    same_ledger(a, b)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    assert all(summary.pop("wall_seconds") > 0 for summary in summaries)
    same_values(*summaries)
    deployed = [json.loads((run / "predictor.json").read_text())["checkpoints"] for run in (a, b)]
    assert [c["path"] for c in deployed[0]] == [c["path"] for c in deployed[1]]  # their bytes hold folders and clocks
    assert files(a) == files(b)
    assert len(list(a.glob("evaluated/*"))) == len(list(b.glob("evaluated/*")))


def files(run: Path) -> set[str]:
    """Return the names of all files but hidden ones, which a kill may leave, and files named by digests or times."""
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name[0] != "."}
    return {path for path in found if not path.startswith(("evaluated/", "tensorboard/"))}


def cut_short(run: Path) -> list[Path]:
    """Return the truncated checkpoint files of a run."""
    # Files are written inside the fence of their process (see `core.fence`), and then moved.
    patterns = ("stages/**/checkpoint*.pt", "**/.lease.*/*.checkpoint*.tmp.pt*")
    return [path for pattern in patterns for path in sorted(run.glob(pattern)) if read_checkpoint(path) is None]


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it ended meanwhile
        return []


def trainings(pid: int) -> list[int]:
    """Return the training processes of a driver. The server that has forked them is a child of the driver."""
    return [training for server in children(pid) for training in children(server)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, "a fairseq-train outlives its driver"
        time.sleep(0.01)


@dataclass(frozen=True)
class Moment:
    """A moment at which a run can be killed on purpose."""

    name: str
    seen: Callable[[Path], object]
    """Whether the files of a run folder show this moment. It is called thousands of times a second."""
    hit: Callable[[Path], object] | None = None
    """Whether the folder of the killed run proves that it was hit; by default the same as `seen`."""


class KilledRun:
    """A run folder, and the command that is repeated after each kill."""

    def __init__(self, stream: Path, out: Path, settings: Sequence[str]):
        self.stream, self.out, self.settings = stream, out, tuple(settings)
        self.kills: list[str] = []
        """What the run was doing at each kill."""

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        self._logs = {log: log.stat().st_size for log in self._all_logs()}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (not beside the run, whose disk may be full)
        self._started = time.time()
        return start(self.stream, self.out, self.settings, self._errors, environment)

    def errors(self) -> str:
        """Return the stderr of the last process."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def finish(self) -> None:
        """Run the command to its end, without a kill."""
        assert self.start().wait(DEADLINE_SECONDS) == 0, self.errors()[-3000:]

    def kill(self, process: subprocess.Popen) -> bool:
        """Kill the whole process group by SIGKILL. Return False if the run had just ended by itself."""
        running = trainings(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0:
            return False
        assert process.returncode == -signal.SIGKILL, self.errors()[-3000:]
        wait_until_gone(running, 10)
        self.kills.append(self._where(process.pid, running))
        return True

    def kill_at(self, moment: Moment) -> None:
        """Kill the run at a moment. If the moment was missed, set the run folder back and try again."""
        before = self.out.with_name(self.out.name + ".before")
        for _ in range(ATTEMPTS):
            shutil.rmtree(before, ignore_errors=True)
            if self.out.exists():
                shutil.copytree(self.out, before)
            process = self.start()
            end = time.monotonic() + DEADLINE_SECONDS
            while not moment.seen(self.out) and process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            if process.poll() is None and self.kill(process) and (moment.hit or moment.seen)(self.out):
                self.kills[-1] = f"aimed at {moment.name}: {self.kills[-1]}"
                shutil.rmtree(before, ignore_errors=True)
                return
            assert process.returncode in (0, -signal.SIGKILL), self.errors()[-3000:]
            self.kills.append(f"aimed at {moment.name} and missed, set back")
            shutil.rmtree(self.out)
            if before.exists():
                shutil.copytree(before, self.out)
        pytest.fail(f"{moment.name} was missed {ATTEMPTS} times")

    def kill_in_write(self, name: str, pattern: str) -> None:
        """Kill the run in the write of a file that takes too short to be met from outside.

        Args:
            name: what the run does.
            pattern: pattern of the path of the unfinished file.
        """
        place = self.out.with_name(f"{self.out.name}.die")
        place.mkdir()
        (place / "sitecustomize.py").write_text(DIE_IN_WRITE)
        process = self.start({"PYTHONPATH": str(place), "DIE_IN_WRITE_OF": pattern})
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL, self.errors()[-3000:]
        assert [path for path in cut_short(self.out) if path.match(pattern)]
        self.kills.append(f"in {name}: {self._where(process.pid, [])}")

    def kill_at_random(self, kills: int, reference: "Reference", chance: random.Random) -> int:
        """Kill the run at moments drawn uniformly over its remaining time. Return how many came before its end."""
        for number in range(kills):
            # The first of the moments that are left, so that the others come after it.
            share = min(chance.uniform(0, 1) for _ in range(kills - number))
            seconds = share * reference.seconds_left(self.out)
            process = self.start()
            try:
                assert process.wait(seconds) == 0, self.errors()[-3000:]
            except subprocess.TimeoutExpired:
                if self.kill(process):
                    self.kills[-1] = f"at random, after {seconds:.1f} s: {self.kills[-1]}"
                    continue
            return number
        return kills

    def report(self) -> None:
        """Print all kills."""
        print(f"{self.out.name}: {len(self.kills)} kills", *self.kills, sep="\n  ")

    def _all_logs(self) -> list[Path]:
        return list(self.out.glob("stages/*/member_*/log.txt"))

    def _where(self, pid: int, running: Sequence[int]) -> str:
        """Return what a process was doing when it was killed, according to the files that it left."""
        cut = [path for path in cut_short(self.out) if path.stat().st_mtime >= self._started]  # not of earlier kills
        if cut:
            names = [f"{path.relative_to(self.out)} ({path.stat().st_size >> 10} KB)" for path in cut]
            return f"checkpoint write, {', '.join(names)} cut short"
        lease = self.out / "lease.json"
        if not lease.exists() or f'"pid": {pid},' not in lease.read_text():
            return "starting"
        stages = sorted((self.out / "stages").glob("stage_*"))
        ledger = self.out / "ledger.jsonl"
        rows = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
        if not rows:
            return "evaluation of the untrained learner"
        done = {mark.name.split(".")[0] for mark in stages[-1].glob("*.done.json")}
        if running:
            new = [log.read_bytes()[self._logs.get(log, 0) :] for log in self._all_logs()]
            trains = any(b"train_inner" in text for text in new)
            return f"{stages[-1].name}: {'training' if trains else 'fairseq-train starting'}"
        if rows[-1]["stage"] == len(stages) - 1:
            return f"between, after {stages[-1].name}"
        if "train" in done:
            return f"{stages[-1].name}: evaluation"
        if "grow" not in done and len(stages) > 2:
            return f"{stages[-1].name}: growth"
        closes = any(b"end of epoch" in log.read_bytes() for log in stages[-1].glob("member_*/log.txt"))
        return f"{stages[-1].name}: the driver {'closes its training' if closes else 'is about to train'}"


@dataclass(frozen=True)
class Reference:
    """A run without interruption, and when each of its steps was done."""

    out: Path
    """The run folder."""
    seconds: float
    """Time that the run took."""
    marks: Mapping[str, float]
    """Seconds from the start of the run to each done mark, by its path."""

    @classmethod
    def of(cls, stream: Path, out: Path, settings: Sequence[str]) -> "Reference":
        began = time.time()
        KilledRun(stream, out, settings).finish()
        marks = {str(mark.relative_to(out)): mark.stat().st_mtime - began for mark in out.rglob("*done.json")}
        return cls(out, time.time() - began, marks)

    def seconds_left(self, run: Path) -> float:
        """Return the seconds that this machine needs for what `run` has yet to do."""
        # A mark from before the reference was started, such as that of a stage before a fork, counts as its start.
        return self.seconds - max([0.0, *(at for mark, at in self.marks.items() if (run / mark).exists())])

"""Helper functions of all benchmarks.

They measure the CPU time of processes, run processes in turn, and write Markdown tables and a description of the
machine and the software.
"""

import os
import platform
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> dict[int, list[int]]:
    """Return the ids of a process and its descendants -> their utime, stime, cutime and cstime, in clock ticks."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # the process ended after it was listed
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = [int(field) for field in fields[11:15]]
    tree, found = set(), {pid}
    while found:
        tree |= found
        found = {child for child, parent in parents.items() if parent in found} - tree
    return {member: ticks[member] for member in tree & ticks.keys()}


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds (user and system) of a process and its descendants, also of those that have ended."""
    return sum(map(sum, process_tree(pid).values())) / TICKS_PER_SECOND


def cpu_seconds_of(command: Sequence[str], environment: dict[str, str] | None = None) -> tuple[float, str]:
    """Run a command. Return the CPU seconds of the command and its descendants, and its standard output.

    Args:
        command: the program and its arguments.
        environment: environment variables to add or change.
    """
    before = os.times()
    result = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with status {result.returncode}:\n{result.stderr[-3000:]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, result.stdout


def environment_of(name: str, packages: Sequence[str], sees_ours: bool = False) -> Path:
    """Return the Python interpreter of a virtual environment in runs/benchmarks, which is created if it is missing.

    Args:
        name: name of the environment.
        packages: what pip installs there.
        sees_ours: whether it can also import the packages of this Python.
    """
    folder = ROOT / "runs" / "benchmarks" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if sees_ours:
            own = Path(sysconfig.get_path("purelib"))
            (folder / own.relative_to(sys.prefix) / "project.pth").write_text(f"{own}\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "ready").touch()
    return python


class StepByStep:
    """A process that is stopped after each wanted line of its output, until `next` continues it.

    A benchmark continues several such processes in turn. So if other programs slow down the machine, they slow down
    all processes alike. Only CPU time is measured, so the time for which a process is stopped does not count. On a GPU
    use `timed_lines`, because a GPU finishes what a process has queued even while the process is stopped.

    Args:
        command: the program and its arguments.
        environment: environment variables to add or change.
        is_wanted: function that returns True for an output line after which the process is stopped.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], is_wanted: Callable[[str], bool]):
        self._command, self._is_wanted = command, is_wanted
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._cpu_seconds = 0.0

    def next(self) -> tuple[float, str]:
        """Continue the process until its next wanted line. Return the CPU seconds since the last one, and the line."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._is_wanted(line):
                now = tree_cpu_seconds(self._process.pid)
                self._process.send_signal(signal.SIGSTOP)
                spent, self._cpu_seconds = now - self._cpu_seconds, now
                return spent, line
        raise _ended_early(self._command, self._lines)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def timed_lines(
    command: Sequence[str], environment: Mapping[str, str], is_wanted: Callable[[str], bool]
) -> Generator[tuple[float, str], None, None]:
    """Run a command, and yield each wanted line of its output with the seconds that have passed since the last one.

    The first line comes with the seconds since the start. The process is killed when the generator is closed.

    Args:
        command: the program and its arguments.
        environment: environment variables to add or change.
        is_wanted: function that returns True for a wanted line.
    """
    before, lines = time.perf_counter(), []
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if is_wanted(line):
                now = time.perf_counter()
                yield now - before, line
                before = now
        raise _ended_early(command, lines)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _ended_early(command: Sequence[str], lines: Sequence[str]) -> RuntimeError:
    last = "".join(lines[-30:])
    return RuntimeError(f"{' '.join(command)}\nended before it printed all expected lines; its last output:\n{last}")


def interleaved(
    alternatives: Mapping[str, Callable[[], object]], repeats: int, num_steps: int = 1, on_gpu: bool = False
) -> dict[str, list[float]]:
    """Return the seconds per step of each alternative, one number per repeat. The alternatives take turns."""

    def clock() -> float:
        """Return the CPU time. On a GPU, wait until it has finished and return the wall time."""
        if on_gpu:
            import torch

            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    for step in alternatives.values():
        step()  # a warm-up
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, step in alternatives.items():
            start = clock()
            for _ in range(num_steps):
                step()
            seconds[name].append((clock() - start) / num_steps)
    return seconds


def ratio_columns(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return three numbers that compare two alternatives, which were measured in turn. All ratios are ours / theirs.

    Args:
        ours: measurements of the first alternative.
        theirs: measurements of the second alternative. Each was made shortly after or before the measurement of the
            first alternative with the same index.

    Returns:
        (ratio of the smallest measurements, median of the ratios of measurements with the same index, largest minus
        smallest of these ratios).
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return min(ours) / min(theirs), statistics.median(ratios), max(ratios) - min(ratios)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table. The first column is aligned left, the others right."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(map(str, row))} |" for row in (header, marks, *rows)]


def verdict(value: float, target: float, at_most: bool) -> str:
    """Return "PASS" if the value meets its target, else a text that says by how much it misses the target.

    Args:
        value: the measured value.
        target: the limit for the value.
        at_most: if True, the target is the largest value that passes, else the smallest.
    """
    if value <= target if at_most else value >= target:
        return "PASS"
    return f"short of target by {abs(value / target - 1):.0%}"


def write_part(introduction: str, commands: Mapping[str, str], name: str, lines: Sequence[str]) -> None:
    """Write one part of the report of this script, SCRIPT.md. The other parts stay as they are.

    Args:
        introduction: the text before the first part, with the title.
        commands: name of each part -> the command that fills it. A part that was never measured says so.
        name: name of the part to write.
        lines: the lines of this part.
    """
    report = Path(sys.argv[0]).resolve().with_suffix(".md")
    parts = {part: f"Not measured. `python {command} --write` fills this part." for part, command in commands.items()}
    if report.is_file():
        for part in report.read_text(encoding="utf-8").split("\n## ")[1:]:
            heading, _, text = part.partition("\n\n")
            parts[heading] = text.strip()
    parts[name] = "\n".join(lines)
    text = "\n\n".join([introduction, *(f"## {heading}\n\n{text}" for heading, text in parts.items())])
    report.write_text(f"{text}\n", encoding="utf-8")


def provenance(load_at_start: float) -> list[str]:
    """Return Markdown lines with the command, commit, date, machine and package versions.

    Args:
        load_at_start: load average of the machine before the benchmark.
    """
    from importlib.metadata import version

    packages = [f"{name} {version(name)}" for name in ("torch", "fairseq-fixed", "tokenizers", "numpy")]
    data, script = "ALMA_DATA=DATA " * ("ALMA_DATA" in os.environ), Path(sys.argv[0]).resolve().relative_to(ROOT)
    loads = f"load average {load_at_start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    loads += " (the benchmark itself adds 1)"
    return [
        f"- command: `{data}python {script} {' '.join('PATH' if a.startswith('/') else a for a in sys.argv[1:])}`",
        f"- commit: {_commit()}",
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- machine: {_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB{_gpu()}; {loads}",
        f"- Python {platform.python_version()}, {', '.join(packages)}",
    ]


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "fairseq_alma", "vision", "data_prep", "launch", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with uncommitted changes" if changed else "")


def _gpu() -> str:
    """Return ", " and the name of the GPU, or "" without one."""
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

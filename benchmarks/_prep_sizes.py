"""The part `sizes` of prep.py: how CPU time, memory and disk space grow, and what a terabyte would cost."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from _common import table, verdict
from _prep_run import MEGA_BATCHES, VOCABULARY, MeasuredRun, alma_prep, disk_bytes
from _random_text import RandomText

WORKERS = 2
MAX_MIB = 1024
TARGET_OF_SECOND = 0.25

# The projection
CORES = 1000
PROJECTED_BYTES = (10**12, 10**14)
TOKENIZER_WORDS = 200_000_000
"""Maximum number of words to train on, the default of --tokenizer-words."""
TRAINING = ("count words", "train byte-bpe")
"""The steps whose work does not grow with the text from TOKENIZER_WORDS words on."""
TASKS_AT_ONCE = {"train byte-bpe": 1, "join tokens": MEGA_BATCHES + 1}
"""Steps that have only a few large tasks -> their number: one for each mega-batch and for the test set."""
JOIN_BYTES = 58
"""Memory that the task that joins a split needs for each passage."""
MEMORY_LIMIT_BYTES = 64e9
"""Memory of a usual node."""
TIME_LIMIT_HOURS = 7 * 24.0
"""Time limit of a usual long job."""


class Measured(NamedTuple):
    """What was measured at one size."""

    megabytes: int
    documents: int
    words: int
    removed: int
    """Number of documents that were removed as copies."""
    run: MeasuredRun
    second: MeasuredRun
    """A second stream from the cache, with another seed and the tokenizer of the first one."""
    cache_bytes: int
    stream_bytes: int


def measure_size(random_text: RandomText, megabytes: int, scratch: Path) -> Measured:
    """Make two streams of one text. All files are deleted, also those of the first stream before the second is made.

    Args:
        random_text: makes the text.
        megabytes: size of the text in MB.
        scratch: folder for temporary files.
    """
    folder = scratch / f"size_{megabytes}"
    folder.mkdir()
    text, cache, out, tokenizer = (folder / name for name in ("text.txt", "cache", "stream", "tokenizer.json"))
    documents = random_text.write(megabytes * 10**6, text, seed=megabytes)
    source, common = f"text:{text}", ("--workers", WORKERS, "--cache", cache)
    run = MeasuredRun(alma_prep(out, source, *common), [cache, out])
    stream = json.loads((out / "stream.json").read_text())
    removed = sum(row["documents"] for row in stream["cleaning"])
    words = sum(split["words"] for split in stream["splits"].values())
    cache_bytes, stream_bytes = disk_bytes([cache]), disk_bytes([out])
    shutil.copy(out / "tokenizer.json", tokenizer)
    shutil.rmtree(out)
    second = MeasuredRun(alma_prep(out, source, *common, "--seed", 1, "--tokenizer", tokenizer))
    shutil.rmtree(folder)
    return Measured(megabytes, documents, words, removed, run, second, cache_bytes, stream_bytes)


def measure_sizes(random_text: RandomText, sizes: Sequence[int], scratch: Path) -> list[str]:
    """Run alma-prep on texts of growing size, and return the lines of the report.

    Args:
        random_text: makes the texts.
        sizes: sizes of the texts in MB.
        scratch: folder for temporary files.
    """
    found = [measure_size(random_text, size, scratch) for size in sorted(sizes)]
    descriptions = [
        f"{one.megabytes:,} MB: {one.documents:,} documents, {one.words:,} words, {one.removed} removed as copies; "
        f"{sum(one.run.wall.values()):,.0f} s of wall time, the second stream {sum(one.second.wall.values()):,.0f} s; "
        f"at most {(one.run.disk_bytes / 1e6 / one.megabytes):.2f} bytes of disk for each byte of text, of which the "
        f"cache keeps {one.cache_bytes / 1e6 / one.megabytes:.2f} and the stream "
        f"{one.stream_bytes / 1e6 / one.megabytes:.2f}"
        for one in found
    ]
    lines = [
        f"The whole command, with the search for near copies, the training of {VOCABULARY:,} symbols and --cache, "
        f"{WORKERS} workers. The second stream has another seed and the tokenizer of the first one. The peak is the "
        "memory of the largest process in that step, sampled ten times a second, without mapped files (RssAnon). What "
        "precedes a step, such as joining results, counts as part of it.",
        "",
        *(f"- {description}." for description in descriptions),
        "",
        *_table_of_steps(found),
        "",
        *_verdicts(found),
    ]
    if len(found) > 1:
        lines += ["", *projected(found[0], found[-1])]
    return lines


def _table_of_steps(found: Sequence[Measured]) -> list[str]:
    steps = list(dict.fromkeys(step for one in found for step in one.run.cpu))
    header = ["step"]
    for one in found:
        size = f"{one.megabytes:,} MB"
        header += [f"{size}, CPU s", "per 100 MB", "peak, MiB", "second stream, CPU s", "peak, MiB"]
    rows = []
    for step in [*steps, "all"]:
        cells: list[object] = [step]
        for one in found:
            cpu, peak, second, second_peak = (
                (sum(table.values()) if table is one.run.cpu or table is one.second.cpu else max(table.values()))
                if step == "all"
                else table.get(step, 0.0)
                for table in (one.run.cpu, one.run.peak, one.second.cpu, one.second.peak)
            )
            cells += [f"{cpu:,.1f}", f"{cpu / one.megabytes * 100:.2f}", f"{peak:.0f}", f"{second:,.1f}"]
            cells.append(f"{second_peak:.0f}")
        rows.append(cells)
    return table(header, rows)


def _verdicts(found: Sequence[Measured]) -> list[str]:
    first, last = found[0], found[-1]
    most = max(peak for one in found for run in (one.run, one.second) for peak in run.peak.values())
    lines = [f"- The largest peak is {most:.0f} MiB, under {MAX_MIB}: {verdict(most, MAX_MIB, at_most=True)}."]
    for one in found:
        ratio = one.second.total_cpu / one.run.total_cpu
        lines.append(
            f"- {one.megabytes:,} MB: the second stream takes {ratio:.2f} of the CPU time of the first, at most "
            f"{TARGET_OF_SECOND}: {verdict(ratio, TARGET_OF_SECOND, at_most=True)}."
        )
    if len(found) > 1:
        growth = last.run.total_cpu / last.megabytes / (first.run.total_cpu / first.megabytes)
        lines.append(
            f"- CPU time per byte at {last.megabytes:,} MB is {growth:.2f} of that at {first.megabytes:,} MB, at most "
            f"1.1: {verdict(growth, 1.1, at_most=True)}."
        )
    return lines


# What larger texts would cost


class _Projection:
    """What a text of another size would cost, worked out from measurements at two sizes.

    CPU time is that of the larger size, per byte of text (steps in TRAINING: per byte of training text). The memory of
    the command grows as from the smaller to the larger size.
    """

    def __init__(self, first: Measured, last: Measured):
        self._first, self._last = first, last
        self._measured_bytes = last.megabytes * 1e6
        self.words_per_byte = last.words / self._measured_bytes
        self.steps = list(last.run.cpu)

    def _growth(self, step: str, num_bytes: float) -> float:
        """Return how many times the measured work a step has."""
        if step in TRAINING:
            most = TOKENIZER_WORDS / self.words_per_byte
            return min(num_bytes, most) / min(self._measured_bytes, most)
        return num_bytes / self._measured_bytes

    def own_hours(self, step: str, num_bytes: float) -> float:
        """Return the hours that the command itself computes in a step."""
        return self._last.run.own_cpu[step] * self._growth(step, num_bytes) / 3600

    def task_hours(self, step: str, num_bytes: float) -> float:
        """Return the core-hours of the tasks of a step."""
        run = self._last.run
        return (run.cpu[step] - run.own_cpu[step]) * self._growth(step, num_bytes) / 3600

    def wall_hours(self, step: str, num_bytes: float) -> float:
        """Return the hours of a step on CORES cores."""
        at_once = TASKS_AT_ONCE.get(step, CORES)
        return self.own_hours(step, num_bytes) + self.task_hours(step, num_bytes) / at_once

    def memory_bytes(self, step: str, num_bytes: float) -> float:
        """Return the memory of the command in a step."""
        start, end = (2**20 * one.run.own_peak.get(step, 0.0) for one in (self._first, self._last))
        per_byte = max(0.0, end - start) / (self._measured_bytes - self._first.megabytes * 1e6)
        return end + per_byte * (num_bytes - self._measured_bytes)

    def join_bytes(self, num_bytes: float) -> float:
        """Return the memory of the task that joins the tokens of a mega-batch."""
        return JOIN_BYTES * self._last.documents * num_bytes / self._measured_bytes / (MEGA_BATCHES + 1)

    def row(self, num_bytes: float) -> list[str]:
        """Return the row of the table for a text of `num_bytes` bytes."""
        core_hours = sum(self.own_hours(step, num_bytes) + self.task_hours(step, num_bytes) for step in self.steps)
        hours = {step: self.wall_hours(step, num_bytes) for step in self.steps}
        own = sum(self.own_hours(step, num_bytes) for step in self.steps)
        slowest = max(hours, key=hours.__getitem__)
        memory = {step: self.memory_bytes(step, num_bytes) for step in self.steps}
        largest = max(memory, key=memory.__getitem__)
        last = self._last
        factors = [each / self._measured_bytes for each in (last.run.disk_bytes, last.cache_bytes, last.stream_bytes)]
        return [
            f"{num_bytes / 1e12:g} TB", f"{num_bytes * self.words_per_byte / 1e9:,.0f}", f"{core_hours:,.0f}",
            f"{sum(hours.values()):,.1f}", f"{slowest}: {hours[slowest]:,.1f}", f"{own:,.1f}",
            f"{memory[largest] / 1e9:,.1f} ({largest})",
            " / ".join(f"{factor * num_bytes / 1e12:,.1f}" for factor in factors),
        ]  # fmt: skip

    def first_limit(self) -> str:
        """Return the limit that is reached first, and at which size of the text."""
        gb = f"{MEMORY_LIMIT_BYTES / 1e9:.0f} GB"
        needs: dict[str, Callable[[float], float]] = {
            f"the memory of a job that joins a mega-batch is {gb}": lambda n: self.join_bytes(n) / MEMORY_LIMIT_BYTES
        }
        for step in self.steps:
            memory, hours = partial(self.memory_bytes, step), partial(self.wall_hours, step)
            needs[f"the memory of the command in the step `{step}` is {gb}"] = _share_of(memory, MEMORY_LIMIT_BYTES)
            needs[f"the time of the step `{step}` is {TIME_LIMIT_HOURS:.0f} hours"] = _share_of(hours, TIME_LIMIT_HOURS)
        sizes = {what: _breaks_at(need) for what, need in needs.items()}
        what = min(sizes, key=sizes.__getitem__)
        return f"The first limit that is reached: {what} at {sizes[what] / 1e12:,.2g} TB of text."


def projected(first: Measured, last: Measured) -> list[str]:
    """Return the lines about what large texts would cost, worked out from measurements at two sizes."""
    projection = _Projection(first, last)
    header = [
        "text", "billion words", "core-hours", f"hours on {CORES:,} cores", "longest step, hours",
        "hours in the command itself", "memory of the command, GB", "disk, TB: most / cache / stream",
    ]  # fmt: skip
    return [
        f"Worked out for larger texts of the same kind, with {first.documents / first.megabytes:,.0f} documents per "
        f"MB. CPU time: as at {last.megabytes:,} MB, per byte. The tasks of a step are divided among {CORES:,} cores, "
        f"but the mega-batches are joined in {MEGA_BATCHES + 1} tasks, and the tokenizer is trained in one (on at "
        f"most {TOKENIZER_WORDS:,} words). What the command itself computes runs in one process. Its memory grows "
        f"with the documents as from {first.megabytes:,} to {last.megabytes:,} MB. The bandwidth of the file system "
        "is not counted.",
        "",
        *table(header, [projection.row(num_bytes) for num_bytes in PROJECTED_BYTES]),
        "",
        projection.first_limit(),
    ]


def _share_of(amount: Callable[[float], float], limit: float) -> Callable[[float], float]:
    """Return a function from the number of bytes of text to the share of a limit that they need."""
    return lambda size: amount(size) / limit


def _breaks_at(need: Callable[[float], float]) -> float:
    """Return the number of bytes of text from which a need is above 1; infinity if it never is."""
    low, high = 0.0, 1e18
    if need(high) <= 1:
        return float("inf")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if need(middle) <= 1 else (low, middle)
    return high

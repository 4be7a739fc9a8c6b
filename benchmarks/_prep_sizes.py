"""The part `sizes` of prep.py: how CPU time, memory and disk space grow, and what a terabyte would cost."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from _common import table, verdict
from _prep_run import VOCABULARY, MeasuredRun, alma_prep, disk_bytes, write_text

WORKERS = 2
MAX_MIB = 1024
TARGET_OF_SECOND = 0.25

# The projection
CORES = 1000
PROJECTED_BYTES = (10**12, 10**14)
TOKENIZER_WORDS = 200_000_000
"""Maximum number of words to train on, the default of --tokenizer-words."""
TRAINING = ("count words", "train byte-bpe")
MEMORY_LIMIT_BYTES = 64e9
"""Memory of a usual node, for the command itself."""
SERIAL_LIMIT_HOURS = 7 * 24.0
"""Time limit of a usual long job, for the steps that one process does."""


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


def measure_size(pool: list[str], megabytes: int, scratch: Path) -> Measured:
    """Make two streams of one text. All files are deleted, also those of the first stream before the second is made.

    Args:
        pool: sentences from which the text is made.
        megabytes: size of the text in MB.
        scratch: folder for temporary files.
    """
    folder = scratch / f"size_{megabytes}"
    folder.mkdir()
    text, cache, out, tokenizer = (folder / name for name in ("text.txt", "cache", "stream", "tokenizer.json"))
    documents = write_text(pool, megabytes * 10**6, text, seed=megabytes)
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


def measure_sizes(pool: list[str], sizes: Sequence[int], scratch: Path) -> list[str]:
    """Run alma-prep on texts of growing size, and return the lines of the report.

    Args:
        pool: sentences from which the texts are made.
        sizes: sizes of the texts in MB.
        scratch: folder for temporary files.
    """
    found = [measure_size(pool, size, scratch) for size in sorted(sizes)]
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


class _Need(NamedTuple):
    """What a step needs of one process, by the number of bytes of text."""

    what: str
    limit: str
    at: Callable[[float], float]
    """How many times the limit, for a number of bytes."""


def projected(first: Measured, last: Measured) -> list[str]:
    """Return the lines about what large texts would cost, worked out from measurements at two sizes.

    CPU time is that of the larger size, per byte. Memory and the time of the command itself grow with the difference
    between the two sizes, and the training of the tokenizer stops growing at TOKENIZER_WORDS.
    """
    bytes_of_last = last.megabytes * 1e6
    spread = {step: (last.run.cpu[step] - last.run.own_cpu[step]) / bytes_of_last for step in last.run.cpu}
    own = {step: seconds / bytes_of_last for step, seconds in last.run.own_cpu.items()}
    words_per_byte = last.words / bytes_of_last
    steps = [step for step in last.run.cpu if step not in TRAINING]

    def training_bytes(num_bytes: float) -> float:
        return min(num_bytes, TOKENIZER_WORDS / words_per_byte)

    def spread_seconds(num_bytes: float) -> float:
        counting = spread.get(TRAINING[0], 0.0) * training_bytes(num_bytes)
        return sum(spread[step] for step in steps) * num_bytes + counting

    def serial_of(step: str, num_bytes: float) -> float:
        if step == TRAINING[1]:  # one task
            return (spread[step] + own[step]) * training_bytes(num_bytes)
        return own[step] * (training_bytes(num_bytes) if step in TRAINING else num_bytes)

    difference = (last.megabytes - first.megabytes) * 1e6

    def memory_of(step: str, num_bytes: float) -> float:
        start, end = first.run.own_peak.get(step, 0.0), last.run.own_peak[step]
        return 2**20 * end + max(0.0, (end - start) * 2**20 / difference) * (num_bytes - bytes_of_last)

    all_steps = list(last.run.cpu)
    rows = []
    for num_bytes in PROJECTED_BYTES:
        serial = {step: serial_of(step, num_bytes) / 3600 for step in all_steps}
        memory = {step: memory_of(step, num_bytes) for step in all_steps}
        spread_hours, serial_hours = spread_seconds(num_bytes) / 3600, sum(serial.values())
        slowest, largest = max(serial, key=serial.__getitem__), max(memory, key=memory.__getitem__)
        factors = [each / bytes_of_last for each in (last.run.disk_bytes, last.cache_bytes, last.stream_bytes)]
        disk = " / ".join(f"{factor * num_bytes / 1e12:,.1f}" for factor in factors)
        rows.append(
            [f"{num_bytes / 1e12:g} TB", f"{num_bytes * words_per_byte / 1e9:,.0f}",
             f"{spread_hours + serial_hours:,.0f}", f"{spread_hours / CORES:,.1f}",
             f"{serial_hours:,.1f} ({slowest}: {serial[slowest]:,.1f})", f"{spread_hours / CORES + serial_hours:,.1f}",
             f"{memory[largest] / 1e9:,.1f} ({largest})", disk]
        )  # fmt: skip
    header = [
        "text", "billion words", "core-hours", f"hours of the tasks on {CORES:,} cores", "hours in one process",
        "hours in all", "memory of the command, GB", "disk, TB: most / cache / stream",
    ]  # fmt: skip
    needs = [
        *(
            _Need(f"the memory of the command in the step `{step}`", f"{MEMORY_LIMIT_BYTES / 1e9:.0f} GB",
                  lambda num_bytes, step=step: memory_of(step, num_bytes) / MEMORY_LIMIT_BYTES)
            for step in all_steps
        ),
        *(
            _Need(f"the time of the step `{step}` in one process", f"{SERIAL_LIMIT_HOURS:.0f} hours",
                  lambda num_bytes, step=step: serial_of(step, num_bytes) / 3600 / SERIAL_LIMIT_HOURS)
            for step in all_steps
        ),
    ]  # fmt: skip
    sizes = {need: _breaks_at(need) for need in needs}
    breaking = min(sizes, key=sizes.__getitem__)
    return [
        f"Worked out for larger texts of the same kind, with {first.documents * 1e6 / first.megabytes / 1e6:,.0f} "
        f"documents per MB. CPU time: as at {last.megabytes:,} MB, per byte. The tasks of a step are divided among "
        f"{CORES:,} cores; what the command itself computes, and the training of the tokenizer (on at most "
        f"{TOKENIZER_WORDS:,} words), run in one process. Memory grows with the documents as from "
        f"{first.megabytes:,} to {last.megabytes:,} MB. The bandwidth of the file system is not counted.",
        "",
        *table(header, rows),
        "",
        f"What breaks first is {breaking.what}: it reaches {breaking.limit} at {sizes[breaking] / 1e12:,.2g} TB.",
    ]


def _breaks_at(need: _Need) -> float:
    """Return the number of bytes of text from which a need is above its limit; infinity if it never is."""
    low, high = 0.0, 1e18
    if need.at(high) <= 1:
        return float("inf")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if need.at(middle) <= 1 else (low, middle)
    return high

"""--dry-run: do all steps with a sample of the input files, and estimate words, time and disk space for all files.

The sample is processed in a temporary folder, in this process. Nothing is written to the stream folder.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.checks import check_block_urls, check_endings, check_filters, check_installed
from data_prep.errors import PrepError, Unworkable
from data_prep.extend import with_values_of_stream
from data_prep.inspecting.summary import removed_lines
from data_prep.pipeline import build_stream
from data_prep.reading.index import ENTRY
from data_prep.reading.read import source_name
from data_prep.running.stream_folder import read_stream
from data_prep.running.tasks import Step, run_task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Source, list_files
from data_prep.sources.sampling import sample_files
from data_prep.tokenization.losses import losses_summary

_READING = ("spool", "paragraphs")
"""Steps that read all sources."""
_TRAINING = ("count_words", "tokenizer")
"""Steps that train the tokenizer."""
_KEY_BYTES = 392
"""Number of bytes per document of the folder `dedup` of a stream."""


class _InThisProcess:
    """An executor that runs tasks one after another in this process, and measures how long each step takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds that the tasks of each step took, by the name of the step's folder."""

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step. See `tasks.Executor` for the arguments."""
        if not self.seconds:
            # The first task imports libraries and loads models. Do it once before it is measured.
            run_task(str(step.folder), numbers[0])
        for number in numbers:
            start = time.perf_counter()
            run_task(str(step.folder), number)
            name = step.folder.name
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            on_done(number)


class _Measured(NamedTuple):
    """What the sample gave."""

    stream: dict
    """What stream.json would contain."""
    seconds: dict[str, float]
    """Seconds that each step took. The key "rest" is for what is not part of a step."""
    factors: dict[str, float]
    """For each source, by name: number of bytes of all files for each byte of the sample."""
    sampled_bytes: int
    total_bytes: int


def dry_run(settings: PrepSettings, megabytes: float) -> str:
    """Process a sample of the input files. Return a text with what would be removed, and estimates for all files.

    Args:
        settings: the settings of this call of alma-prep.
        megabytes: approximate size of the sample, in megabytes of the input files.

    Raises:
        PrepError: if the sources cannot be read, or the sample is too small.
    """
    if megabytes <= 0:
        raise PrepError(f"--dry-run {megabytes:g}: give the size of the sample in megabytes, for example 20.")
    with tempfile.TemporaryDirectory(prefix="alma-prep-") as folder:
        measured = _measure(settings, megabytes * 1e6, Path(folder))
    lines = [
        f"Dry run with {measured.sampled_bytes / 1e6:,.1f} of {measured.total_bytes / 1e6:,.1f} MB of the input files. "
        "Nothing was written.",
        "",
        "In the sample:",
    ]
    for record in measured.stream["sources"]:
        lines.append(
            f"  {source_name(record)}: {record['documents']:,} documents, {record['words']:,} words in "
            f"{record['files']:,} files"
        )
    lines += losses_summary(measured.stream["splits"])
    if measured.stream["cleaning"]:
        lines += ["", *removed_lines(measured.stream["cleaning"])]
    return "\n".join([*lines, "", *_estimates(settings, measured)])


def _measure(settings: PrepSettings, wanted_bytes: float, folder: Path) -> _Measured:
    """Process a sample in an empty folder."""
    if settings.extend and (finished := read_stream(settings.out)) is not None:
        settings = with_values_of_stream(settings, finished.description)
    files = {source: list_files(source) for source in settings.sources}
    check_installed(settings, files)
    check_filters(settings)
    check_block_urls(settings)
    check_endings(settings)
    total_bytes = sum(file.num_bytes for found in files.values() for file in found)
    samples, factors, sampled_bytes = {}, {}, 0
    for number, (source, found) in enumerate(files.items()):
        of_source = sum(file.num_bytes for file in found)
        wanted = wanted_bytes * of_source / max(1, total_bytes)
        sample = sample_files(source.kind, found, wanted, folder / f"source_{number}")
        samples[Source(source.kind, source.path)] = sample.files
        factors[source.name] = of_source / max(1, sample.num_bytes)
        sampled_bytes += sample.num_bytes
    work = WorkFolder(folder / "work")
    work.spool.mkdir(parents=True)
    work.stream.mkdir()
    executor = _InThisProcess()
    start = time.perf_counter()
    try:
        stream = build_stream(_settings_of_sample(settings, samples, folder), samples, work, executor)
    except Unworkable as error:
        raise PrepError(f"the sample of {sampled_bytes / 1e6:,.1f} MB: {error} Or give --dry-run more.") from error
    seconds = dict(executor.seconds)
    seconds["rest"] = max(0.0, time.perf_counter() - start - sum(seconds.values()))
    return _Measured(stream, seconds, factors, sampled_bytes, total_bytes)


def _settings_of_sample(settings: PrepSettings, samples: dict, folder: Path) -> PrepSettings:
    """Return the settings with which the sample is processed: a small stream with equal mega-batches."""
    tokenizer = settings.tokenizer
    if settings.extend:
        stream = read_stream(settings.out)
        if stream is None:
            raise PrepError(f"there is no stream in {settings.out} to extend.")
        tokenizer = str(settings.out / stream.description["tokenizer"]["file"])
    return dataclasses.replace(
        settings, out=folder / "out", sources=tuple(samples), num_mega_batches=1, partition="equal", extend=False,
        valid_words=None, valid_source=None, passage_words=None, tokenizer=tokenizer, max_bad=1.0, executor="local",
        keep_removed=False, cache=None, cut_dates="", test_words=None, undated="error", decontaminate=None,
        decontaminate_against=(), hold_out="passages",
    )  # fmt: skip


def _estimates(settings: PrepSettings, measured: _Measured) -> list[str]:
    """Return the lines with the estimates for all files."""
    stream, seconds = measured.stream, measured.seconds
    lost: dict[str, int] = {}
    for row in stream["cleaning"]:
        lost[row["source"]] = lost.get(row["source"], 0) + row["words"]
    lines, words, text_bytes, documents, sample_words = ["Estimates for all files:"], 0.0, 0.0, 0.0, 1
    for record in stream["sources"]:
        name = source_name(record)
        kept = max(0, record["words"] - lost.get(name, 0))
        factor = measured.factors[name]
        lines.append(
            f"  {name}: {factor * record['documents']:,.0f} documents and {factor * record['words']:,.0f} words are "
            f"read, {factor * kept:,.0f} words are left ({kept / max(1, record['words']):.1%})"
        )
        words, sample_words = words + factor * kept, sample_words + kept
        text_bytes += factor * record["bytes"] * kept / max(1, record["words"])
        documents += factor * record["documents"]
    tokens = sum(split["tokens"] for split in stream["splits"].values()) * words / sample_words
    token_bytes = tokens * (2 if stream["dtype"] == "uint16" else 4)
    by_input, by_words = measured.total_bytes / max(1, measured.sampled_bytes), words / sample_words
    trained_words = min(settings.tokenizer_words, words)
    hours = {
        "read and clean": sum(seconds.get(name, 0.0) for name in _READING) * by_input / 3600,
        "train the tokenizer": sum(seconds.get(name, 0.0) for name in _TRAINING) * trained_words / sample_words / 3600,
        "encode": seconds.get("encode", 0.0) * by_words / 3600,
        "all other steps": sum(
            value for name, value in seconds.items() if name not in (*_READING, *_TRAINING, "encode")
        ) * by_words / 3600,
    }  # fmt: skip
    # The words are counted by all workers. The training on the counts is one task.
    counting = seconds.get("count_words", 0.0) * trained_words / sample_words / 3600
    in_parallel = hours["read and clean"] + hours["encode"] + counting
    wall = in_parallel / settings.workers + sum(hours.values()) - in_parallel
    working = text_bytes + 2 * token_bytes + documents * (ENTRY.itemsize + _KEY_BYTES)
    finished = token_bytes + documents * _KEY_BYTES * (settings.duplicates != "keep")
    if settings.num_mega_batches:
        lines.append(f"  a mega-batch: about {words / (settings.num_mega_batches + (not settings.extend)):,.0f} words")
    each = ", ".join(f"{name} {value:,.2f}" for name, value in hours.items())
    lines += [
        f"  tokens: {tokens:,.0f}",
        f"  core-hours: {sum(hours.values()):,.2f} ({each})",
        f"  time with {settings.workers} workers: {wall:,.2f} hours",
        f"  disk: {working / 1e9:,.3f} GB while it works, {finished / 1e9:,.3f} GB in the end",
        "The times hold for this machine, if it is as busy then as it was now.",
        "A larger corpus has a larger share of copies, so fewer words may be left. Copies of documents in another part "
        "of the files, or in a stream that is extended, are not found in a sample.",
    ]
    return lines

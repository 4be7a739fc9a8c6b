"""Read every document of all sources once, and copy the documents that pass cleaning to the spool.

The spool is a folder of plain text files (see `spool`). Skipped content and removed documents are counted for
stream.json.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.cleaning import Cleaning
from data_prep.errors import PrepError, Unworkable
from data_prep.progress import Bar
from data_prep.settings import PrepSettings
from data_prep.signatures import SignatureFiles
from data_prep.snapshots import groups_of
from data_prep.sources import Files, Part, Skipped, fingerprint, merge_skipped, split_into_parts
from data_prep.spool import SpoolTask, documents_path, signature_files
from data_prep.tasks import Executor, Step

MIN_SHARD_BYTES = 2 << 20
"""Lower limit for the number of input bytes that are copied into one spool file, a file with the text of documents."""
MAX_SHARD_BYTES = 256 << 20
"""Upper limit for the number of input bytes that are copied into one spool file, a file with the text of documents."""
USUAL_SHARDS = 500
"""Target number of spool files, the files with the text of documents. Small corpora get fewer and large corpora get
more, because of MIN_SHARD_BYTES and MAX_SHARD_BYTES."""
SHOWN = 10
"""Maximum number of skipped files, lines or pages that the error message about damaged files lists."""


class Spooled(NamedTuple):
    """All documents that passed cleaning, and counts of the documents that were skipped or removed."""

    documents: np.ndarray
    """The index entry (`index.ENTRY`) of each document, in the order in which the documents are stored in the spool."""
    signatures: list[SignatureFiles] | None
    """For each spool file (file with the text of documents), the files with the signatures of these documents; None
    unless the setting `duplicates` is "near"."""
    records: list[dict]
    """For each source, its entry in stream.json, with counts of documents, words and skipped files."""
    removed: dict[str, dict[str, list[int]]]
    """What cleaning removed: removed[reason][source name] is [number of documents, number of words]."""
    snapshots: list[str] | None
    """Names of the snapshots (see `snapshots`), if the stream has one mega-batch per snapshot; else None."""


def source_name(record: Mapping) -> str:
    """Return the name, KIND:PATH or KIND, of a source.

    Args:
        record: the entry of the source in stream.json.
    """
    return ":".join(filter(None, (record["kind"], record["path"])))


def read_sources(settings: PrepSettings, seed: int, files: Files, spool: Path, executor: Executor) -> Spooled:
    """Copy all documents that pass cleaning into the spool, a folder of plain text files.

    Args:
        settings: the settings of this call of alma-prep.
        seed: the seed of the stream. If mega-batches are added to a stream, this is the stream's seed, not
            `settings.seed`.
        files: the files of each source.
        spool: the spool folder.
        executor: runs the tasks, on this machine or on a Slurm cluster.

    Raises:
        PrepError: if more files are damaged than the setting `max_bad` allows. This error is raised only after all
            files were read.
        Unworkable: if no document of a source is left, or partition="by-date" and a path contains no date.
    """
    try:
        groups, snapshots = groups_of(settings.partition, files)
    except PrepError as error:
        raise Unworkable(str(error)) from error
    total_bytes = sum(file.num_bytes for found in files.values() for file in found)
    shard_bytes = min(max(MIN_SHARD_BYTES, total_bytes // USUAL_SHARDS), MAX_SHARD_BYTES)
    tasks: list[SpoolTask] = []
    weights: list[int] = []
    for number, (source, found) in enumerate(files.items()):
        group_of = {file.name: group for file, group in zip(found, groups[source], strict=True)}
        stamps = {file.name: (file.num_bytes, file.mtime_ns) for file in found}
        cleaning = Cleaning(settings.language, settings.applies_gopher(source.kind))
        parts = split_into_parts(source, found, shard_bytes, settings.field_options())
        for batch in _batches(parts, shard_bytes):
            stamp = hashlib.sha256(repr([stamps[part.name] for part in batch]).encode()).hexdigest()
            task = SpoolTask(
                shard=len(tasks),
                seed=seed,
                source=number,
                parts=[(part, group_of[part.name]) for part in batch],
                cleaning=cleaning if any(cleaning) else None,
                sign=settings.duplicates == "near",
                stamp=stamp,
            )
            tasks.append(task)
            weights.append(sum(part.end - part.start for part in batch))
    with Bar("read sources", total_bytes, "bytes") as bar:
        results = Step(spool, tasks).run(executor, lambda number: bar.advance(weights[number]))
    records, removed = _records(files, tasks, results)
    _check_damage(settings, records, spool.parent)
    shards = range(len(tasks))
    documents = np.concatenate([np.load(documents_path(spool, shard)) for shard in shards])
    for number, record in enumerate(records):
        if not (documents["source"] == number).any():
            raise Unworkable(_no_documents(record))
    signatures = [signature_files(spool, shard) for shard in shards] if settings.duplicates == "near" else None
    return Spooled(documents, signatures, records, removed, snapshots)


def _batches(parts: list[Part], most_bytes: int) -> Iterator[list[Part]]:
    """Yield lists of neighbouring parts of files. The parts of one list are copied into the same spool file.

    The parts in a list have up to `most_bytes` bytes in total. A part that is larger is in a list by itself.
    """
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.end - part.start > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.end - part.start
    yield batch


def _records(
    files: Files, tasks: Sequence[SpoolTask], results: Sequence[dict]
) -> tuple[list[dict], dict[str, dict[str, list[int]]]]:
    """Combine the results of all tasks.

    Return two values. First, the entry of each source in stream.json (see `Spooled.records`). Second, what cleaning
    removed (see `Spooled.removed`).

    Args:
        files: the files of each source.
        tasks: all tasks.
        results: the result of each task.
    """
    records: list[dict] = []
    removed: dict[str, dict[str, list[int]]] = {}
    for number, (source, found) in enumerate(files.items()):
        results_of_source = [result for task, result in zip(tasks, results, strict=True) if task.source == number]
        per_file: dict[str, list[int]] = {}
        for result in results_of_source:
            for name, counts in result["files"].items():
                total = per_file.setdefault(name, [0, 0, 0])
                total[:] = [before + more for before, more in zip(total, counts, strict=True)]
            for reason, (num_documents, num_words) in result["removed"].items():
                total = removed.setdefault(reason, {}).setdefault(source.name, [0, 0])
                total[:] = [total[0] + num_documents, total[1] + num_words]
        skipped = merge_skipped([Skipped(*entry) for result in results_of_source for entry in result["skipped"]])
        records.append(
            {
                "kind": source.kind,
                "path": source.path,
                "files": len(found),
                "fingerprint": fingerprint(found),
                "documents": sum(counts[0] for counts in per_file.values()),
                "words": sum(counts[1] for counts in per_file.values()),
                "bytes": sum(counts[2] for counts in per_file.values()),
                "skipped": [{"name": entry.name, "reason": entry.reason()} for entry in skipped],
                "damaged_files": round(_num_damaged(skipped, per_file), 6),
            }
        )
    return records, removed


def _num_damaged(skipped: Sequence[Skipped], per_file: Mapping[str, list[int]]) -> float:
    """Return the number of damaged files, which can be fractional.

    A file that is skipped completely, or from the damage on, counts as 1. A file in which only some lines, records,
    pages or rows are bad counts as num_bad / (num_bad + num_documents). num_bad is the number of bad lines, records,
    pages or rows of the file. num_documents is the number of documents that were read from the file.

    Args:
        skipped: what was skipped in the files of a source.
        per_file: for each file, by name, the numbers [documents, words, bytes] that were read from it.
    """
    bad: dict[str, float] = {}
    for entry in skipped:
        if entry.damaged:
            bad[entry.name] = bad.get(entry.name, 0) + (entry.num_units or float("inf"))
    return sum(
        1.0 if units == float("inf") else units / (units + per_file.get(name, [0])[0]) for name, units in bad.items()
    )


def _check_damage(settings: PrepSettings, records: list[dict], work: Path) -> None:
    """Raise PrepError if the fraction of damaged files is larger than the setting `max_bad`.

    If no document was read from any file, the settings are probably wrong, so the error is Unworkable.

    Before PrepError is raised, a list of everything that was skipped is written to damaged.txt in the folder `work`.
    """
    num_files = sum(record["files"] for record in records)
    num_damaged = sum(record["damaged_files"] for record in records)
    if num_damaged <= settings.max_bad * num_files:
        return
    lines = [
        f"{record['kind']}:{record['path']} {entry['name']}: {entry['reason']}"
        for record in records
        for entry in record["skipped"]
    ]
    shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN:,} more" if len(lines) > SHOWN else "")
    if not any(record["documents"] for record in records):
        raise Unworkable(
            f"no document could be read from {num_files:,} input files: {shown}. Check the kind and the path of each "
            f"--source, and --text-field (now {settings.text_field}), the name of the field or column with the text."
        )
    report = work / "damaged.txt"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    raise PrepError(
        f"{num_damaged:.3g} of {num_files:,} input files are damaged, more than --max-bad {settings.max_bad:g} allows: "
        f"{shown}. The complete list is in {report}. Replace these files, or run the same command with a larger "
        "--max-bad to continue this run."
    )


def _no_documents(record: dict) -> str:
    """Return the error message for a source that has no documents left. `record` is its entry in stream.json."""
    message = f"source {source_name(record)} contains no documents in {record['files']} files"
    if record["documents"]:
        message = f"none of the {record['documents']:,} documents of source {source_name(record)} passed the cleaning"
    if record["skipped"]:
        first = record["skipped"][0]
        count = len(record["skipped"])
        message += f"; skipped files or parts of files: {count:,}, the first is {first['name']}: {first['reason']}"
    return f"{message}. Check the path and the kind of the source."

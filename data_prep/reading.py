"""From sources to the spool: every document is read, cleaned and signed once, in pieces; what was set aside is told."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.cleaning import Cleaning
from data_prep.errors import PrepError, Unworkable
from data_prep.pieces import Executor, Step
from data_prep.progress import Bar
from data_prep.settings import PrepSettings
from data_prep.snapshots import groups_of
from data_prep.sources import Part, Skipped, Source, SourceFile, fingerprint, merge_skipped, split_into_parts
from data_prep.spool import documents_path, signatures_path

MIN_SHARD_BYTES = 2 << 20
MAX_SHARD_BYTES = 256 << 20
USUAL_SHARDS = 500
SHOWN = 10

Files = Mapping[Source, Sequence[SourceFile]]


class Spooled(NamedTuple):
    """All documents that passed, and the account of those that did not."""

    documents: np.ndarray
    """ENTRY of each, in the order of shards."""
    signatures: list[Path] | None
    """Of each shard; None unless near-duplicates are looked for."""
    records: list[dict]
    """What stream.json says of each source."""
    removed: dict[str, dict[str, list[int]]]
    """Reason to source to documents and words."""
    snapshots: list[str] | None
    """Names of the groups of a stream that drifts."""


def read_sources(settings: PrepSettings, files: Files, spool: Path, executor: Executor) -> Spooled:
    """Copy all documents that pass into the spool.

    Raises:
        PrepError: more files are damaged than `max_bad` allows, after all of them were read.
        Unworkable: a source holds no document.
    """
    try:
        groups, snapshots = groups_of(settings.partition, files)
    except PrepError as error:
        raise Unworkable(str(error)) from error
    total_bytes = sum(file.num_bytes for found in files.values() for file in found)
    shard_bytes = min(max(MIN_SHARD_BYTES, total_bytes // USUAL_SHARDS), MAX_SHARD_BYTES)
    tasks: list[tuple] = []
    weights: list[int] = []
    for number, (source, found) in enumerate(files.items()):
        group_of = {file.name: group for file, group in zip(found, groups[source], strict=True)}
        stamps = {file.name: (file.num_bytes, file.mtime_ns) for file in found}
        parts = split_into_parts(source, found, shard_bytes, {"text_field": settings.text_field})
        cleaning = Cleaning(settings.language, settings.cleans(source.kind))
        for batch in _batches(parts, shard_bytes):
            stamp = hashlib.sha256(repr([stamps[part.name] for part in batch]).encode()).hexdigest()
            told = [(tuple(part), group_of[part.name]) for part in batch]
            checks = tuple(cleaning) if any(cleaning) else None
            sign = settings.duplicates == "near"
            tasks.append((len(tasks), settings.seed, number, told, checks, sign, stamp))
            weights.append(sum(part.end - part.start for part in batch))
    step = Step(spool, "data_prep.spool:spool_parts", tasks)
    with Bar("read sources", total_bytes, "bytes") as bar:
        results = step.run(executor, lambda piece: bar.advance(weights[piece]))
    records, removed = _account(files, tasks, results)
    _check_bad(settings, records, spool.parent)
    shards = range(len(tasks))
    documents = np.concatenate([np.load(documents_path(spool, shard)) for shard in shards])
    for number, record in enumerate(records):
        if not (documents["source"] == number).any():
            raise Unworkable(_no_documents(record))
    signatures = [signatures_path(spool, shard) for shard in shards] if settings.duplicates == "near" else None
    return Spooled(documents, signatures, records, removed, snapshots)


def _batches(parts: list[Part], most_bytes: int) -> Iterator[list[Part]]:
    """Group neighbouring parts up to `most_bytes`, so that many small files make few spool files."""
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.end - part.start > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.end - part.start
    yield batch


def _account(
    files: Files, tasks: list[tuple], results: list[dict]
) -> tuple[list[dict], dict[str, dict[str, list[int]]]]:
    """Of each source what stream.json says; by reason what cleaning removed."""
    records: list[dict] = []
    removed: dict[str, dict[str, list[int]]] = {}
    for number, (source, found) in enumerate(files.items()):
        of_source = [result for task, result in zip(tasks, results, strict=True) if task[2] == number]
        per_file: dict[str, list[int]] = {}
        for result in of_source:
            for name, counted in result["files"].items():
                count = per_file.setdefault(name, [0, 0, 0])
                count[:] = [one + other for one, other in zip(count, counted, strict=True)]
            for reason, tally in result["removed"].items():
                count = removed.setdefault(reason, {}).setdefault(source.name, [0, 0])
                count[0], count[1] = count[0] + tally[0], count[1] + tally[1]
        skipped = merge_skipped([Skipped(*entry) for result in of_source for entry in result["skipped"]])
        records.append(
            {
                "kind": source.kind,
                "path": source.path,
                "files": len(found),
                "fingerprint": fingerprint(list(found)),
                "documents": sum(count[0] for count in per_file.values()),
                "words": sum(count[1] for count in per_file.values()),
                "bytes": sum(count[2] for count in per_file.values()),
                "skipped": [{"name": entry.name, "reason": entry.reason()} for entry in skipped],
                "damaged_files": round(_damage(skipped, per_file), 6),
            }
        )
    return records, removed


def _damage(skipped: Sequence[Skipped], per_file: dict[str, list[int]]) -> float:
    """How many files are bad: of each all of it, or the share of its lines, records or pages."""
    bad: dict[str, float] = {}
    for entry in skipped:
        if entry.damaged:
            bad[entry.name] = bad.get(entry.name, 0) + (entry.num_units or float("inf"))
    return sum(
        1.0 if units == float("inf") else units / (units + per_file.get(name, [0])[0]) for name, units in bad.items()
    )


def _check_bad(settings: PrepSettings, records: list[dict], work: Path) -> None:
    num_files = sum(record["files"] for record in records)
    bad = sum(record["damaged_files"] for record in records)
    if bad <= settings.max_bad * num_files:
        return
    lines = [
        f"{record['kind']}:{record['path']} {entry['name']}: {entry['reason']}"
        for record in records
        for entry in record["skipped"]
    ]
    report = work / "damaged.txt"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN:,} more" if len(lines) > SHOWN else "")
    raise PrepError(
        f"{bad:.3g} of {num_files:,} input files are damaged, more than --max-bad {settings.max_bad:g} allows: "
        f"{shown}. The whole list is in {report}. Replace them, or allow more: the same command with a larger "
        "--max-bad goes on where this one ended."
    )


def _no_documents(record: dict) -> str:
    source = ":".join(filter(None, (record["kind"], record["path"])))
    message = f"source {source} holds no documents in {record['files']} files"
    if record["documents"]:
        message = f"of the {record['documents']:,} documents of source {source} none passed the cleaning"
    if record["skipped"]:
        first = record["skipped"][0]
        message += f"; {len(record['skipped'])} were skipped, the first {first['name']}: {first['reason']}"
    return f"{message}. Check the path and the kind."

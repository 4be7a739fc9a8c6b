"""Read every document of all sources once, and copy the documents that pass cleaning to the spool.

The spool is a folder of plain text files (see `spool`). Skipped content and removed documents are counted for
stream.json.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError, Unworkable
from data_prep.reading.facts import dates_of, documents_path, ids_of, order_copies
from data_prep.reading.index import ENTRY, order_key
from data_prep.reading.provenance import reading_digest
from data_prep.reading.signatures import SignatureFiles
from data_prep.reading.spool import NO_DATE, UNREADABLE_DATE, SpoolTask, added, stamp_of
from data_prep.running.progress import Bar, note
from data_prep.running.tasks import Step, key_of
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import (
    NOT_READ,
    Files,
    Part,
    Skipped,
    Source,
    SourceFile,
    endings_left_out,
    fingerprint,
    merge_skipped,
    split_into_parts,
)  # fmt: skip
from data_prep.sources.dates import date_in_path, date_text, groups_of
from fairseq_alma.core.files import remove
from fairseq_alma.core.store import Store

MIN_SHARD_BYTES = 2 << 20
"""Lower limit for the number of input bytes that are copied into one spool file, a file with the text of documents."""
MAX_SHARD_BYTES = 256 << 20
"""Upper limit for the same."""
USUAL_SHARDS = 500
"""Target number of spool files. Because of the two limits, small corpora get fewer and large corpora get more."""
SHOWN = 10
"""Maximum number of skipped files, lines or pages that the error message about damaged files lists, and of documents
with a date in the future."""


class Spooled(NamedTuple):
    """All documents that passed cleaning, and counts of the documents that were skipped or removed."""

    documents: np.ndarray
    """The index entry (`index.ENTRY`) of each document, in the order in which the documents are stored in the spool."""
    signatures: list[SignatureFiles] | None
    """The files with the signatures of the documents of each spool file; None unless the setting `duplicates` is
    "near"."""
    records: list[dict]
    """For each source, its entry in stream.json, with counts of documents, words and skipped files."""
    removed: list[dict]
    """The rows of the table "cleaning" in stream.json about what cleaning removed and changed."""
    snapshots: list[str] | None
    """Names of the snapshots (see `dates`), if the stream has one mega-batch per snapshot; else None."""
    dates: np.ndarray | None = None
    """int64: the date (see `dates`) of each document, if the stream is chronological; else None."""
    source_of_shard: Sequence[int] = ()
    """Index of the source of each spool file."""

    @property
    def names(self) -> list[str]:
        """The name of each source, KIND:PATH or KIND."""
        return [source_name(record) for record in self.records]


def source_name(record: Mapping) -> str:
    """Return the name, KIND:PATH or KIND, of a source. `record` is its entry in stream.json."""
    return ":".join(filter(None, (record["kind"], record["path"])))


def read_sources(
    settings: PrepSettings, seed: int, files: Files, work: WorkFolder, chronological: bool = False
) -> Spooled:
    """Copy all documents that pass cleaning into the spool, a folder of plain text files.

    Args:
        settings: the settings of this call of alma-prep.
        seed: the seed of the stream. For an extension, it is not `settings.seed`.
        files: the files of each source.
        work: the work folder, which contains the spool folder.
        chronological: whether the stream is chronological (see `chronological`), so that documents need dates.

    Raises:
        PrepError: after all files were read, if too many are damaged.
        Unworkable: if no document of a source is left, or if dates are needed and are missing or in the future.
    """
    groups, snapshots = groups_of(settings.partition, files)
    # Order the tasks by the names of the sources, so that a call with other shares has the same tasks.
    by_name = sorted(files, key=lambda source: source.name)
    tasks_of = {source: _spool_tasks(settings, source, files[source], chronological) for source in by_name}
    tasks = [task for source in by_name for task in tasks_of[source]]
    all_results = _read_without_future_dates(settings, tasks, work)
    ends = dict(zip(by_name, itertools.accumulate(len(tasks_of[source]) for source in by_name), strict=True))
    numbers = {source: range(end - len(tasks_of[source]), end) for source, end in ends.items()}
    results = {source: [all_results[number] for number in of_source] for source, of_source in numbers.items()}
    _warn_without_fields(settings, results)
    records, removed = _records(files, results)
    _check_damage(settings, records, work.folder)
    shards = []
    for index, source in enumerate(files):
        group_of = {file.name: group for file, group in zip(files[source], groups[source], strict=True)}
        for task, number in zip(tasks_of[source], numbers[source], strict=True):
            groups_of_parts = [group_of[part.name] for part in task.parts]
            of_shard = groups_of_parts if len(set(groups_of_parts)) > 1 else groups_of_parts[:1]
            shards.append(Shard(number, index, of_shard))
    with Bar("order documents", sum(result["documents"] for result in all_results), "documents") as bar:
        documents = make_entries(seed, shards, work.spool, bar.advance)
    _check_dates(settings, removed, all_results, len(documents))
    order_copies(work.spool, documents, chronological)
    for number, record in enumerate(records):
        if not (documents["source"] == number).any():
            raise Unworkable(_no_documents(record, removed))
    signatures = [SignatureFiles(work.spool / f"{shard.number:06d}") for shard in shards]
    return Spooled(
        documents,
        signatures if settings.duplicates == "near" else None,
        records,
        removed,
        snapshots,
        dates_of(work.spool, documents) if chronological else None,
        [shard.source for shard in sorted(shards)],
    )


def _read(settings: PrepSettings, tasks: Sequence[SpoolTask], work: WorkFolder) -> list[dict]:
    """Do the reading tasks, except those whose results are stored already. Return the result of each task.

    There are two stores: the folder that the option --cache names, and one in the work folder, to which the results of
    other tasks of an earlier call are moved. So a call with changed settings continues with the text that an earlier
    call has read. A task is found by its description, which contains everything that its result depends on.
    """
    step, kept = Step(work.spool, tasks), Store(work.kept, durable=False)
    cache = Store(settings.cache, durable=False) if settings.cache else None
    if step.lists_other_tasks():
        step.put_all(kept)
        remove(step.folder)
    step.folder.mkdir(parents=True, exist_ok=True)
    for number, task in enumerate(tasks):
        if step.mark(number) is None:  # `any` ends at the first store that has the result
            any(step.take(number, store, key) for store in (kept, cache) if store for key in _keys(task))
    weights = [sum(part.end - part.start for part in task.parts) for task in tasks]
    finished = step.finished()

    def on_done(number: int) -> None:
        nonlocal cache
        # The digests of a result that was found were just compared. Do not read it again in the cache.
        if cache and not (number in finished and _is_in(cache, tasks[number])):
            try:
                step.put(number, cache)
            except OSError as error:  # for example, the cache is full or read-only
                note(f"nothing more is stored in the cache {cache.folder}: {error}")
                cache = None

    return work.finish(step, "read sources", "bytes", weights, on_done=on_done, finished=finished)


def _keys(task: SpoolTask) -> list[str]:
    """Return the keys of the stored results that serve a task: its own, and that of the same task with signatures."""
    tasks = [task] if task.sign else [task, replace(task, sign=True)]
    return [key_of(each.description()) for each in tasks]


def _is_in(store: Store, task: SpoolTask) -> bool:
    """Return True if a store has a result that serves a task, as far as the sizes of its files say."""
    return any(store.take(key, check_digests=False) for key in _keys(task))


def _spool_tasks(
    settings: PrepSettings, source: Source, found: Sequence[SourceFile], chronological: bool
) -> list[SpoolTask]:
    """Return the tasks that read the files of a source."""
    total_bytes = sum(file.num_bytes for file in found)
    shard_bytes = min(max(MIN_SHARD_BYTES, total_bytes // USUAL_SHARDS), MAX_SHARD_BYTES)
    stamps = {file.name: (file.num_bytes, file.mtime_ns) for file in found}
    parts = split_into_parts(source, found, shard_bytes, settings.field_options())
    cleaning = settings.cleaning(source.kind)  # once, because it computes digests of files
    return [
        SpoolTask(
            parts=[_for_task(part) for part in batch],
            cleaning=cleaning,
            sign=settings.duplicates == "near",
            stamp=stamp_of(stamps[part.name] for part in batch),
            versions=reading_digest(),
            needs_date=chronological,
        )
        for batch in _batches(parts, shard_bytes)
    ]


def _for_task(part: Part) -> Part:
    """Return the part of a file with the date in its path, and with the absolute path unless the file is remote.

    The date is looked for in the path that the user gave. In the absolute path, a date could be that of any folder, and
    the stream would depend on where it is made.
    """
    part = part._replace(date=date_in_path(Path(part.name).name, part.path))
    return part._replace(path=str(Path(part.path).absolute())) if Path(part.path).exists() else part


def _warn_without_fields(settings: PrepSettings, results: Mapping[Source, Sequence[dict]]) -> None:
    """Print a warning for each source without any document that has the field of --id-field or --date-field."""
    for source, of_source in results.items():
        for number, name in enumerate(("id_field", "date_field")):
            is_found = any(result["with_fields"][number] for result in of_source)
            if settings.is_given(name) and source.kind in ("text", "hf") and not is_found:
                note(
                    f"warning: no document of source {source} has the field or column {getattr(settings, name)} of "
                    f"--{name.replace('_', '-')}. Check its name."
                )


def _read_without_future_dates(settings: PrepSettings, tasks: Sequence[SpoolTask], work: WorkFolder) -> list[dict]:
    """Do the reading tasks, and leave out documents of a chronological stream whose date is later than tomorrow.

    Such a date is wrong. It would be the last date of the stream, and --extend could add nothing before it.

    The tasks do not know the time, because they must be the same tasks tomorrow. The tasks that read such documents are
    done again with a limit, which is the latest of their other dates.
    """
    results = _read(settings, tasks, work)
    tomorrow = int(f"{datetime.now(UTC) + timedelta(days=1):%Y%m%d}235959")
    late = [number for number, task in enumerate(tasks) if task.needs_date and results[number]["last_date"] > tomorrow]
    count, examples, again = 0, [], list(tasks)
    for number in late:
        dates = np.load(documents_path(work.spool, number))["date"]
        rows = np.flatnonzero(dates > tomorrow)
        ids = ids_of(work.spool, number, rows[:SHOWN]).to_pylist()
        examples += [
            f"{name or 'a document'} ({date_text(int(dates[row]))})" for name, row in zip(ids, rows, strict=False)
        ]
        count += len(rows)
        again[number] = replace(tasks[number], latest_date=int(dates[dates <= tomorrow].max(initial=0)))
    found = "1 document has" if count == 1 else f"{count:,} documents have"
    found += f" a date in the future (later than tomorrow): {', '.join(examples[:SHOWN])}"
    found += f" and {count - SHOWN:,} more" if count > SHOWN else ""
    if late and settings.undated == "error":
        raise Unworkable(f"{found}. Correct the dates, or give --undated drop to leave these documents out.")
    if late:
        note(f"{found}. They are left out")
    return _read(settings, again, work) if late else results


def _batches(parts: list[Part], most_bytes: int) -> Iterator[list[Part]]:
    """Yield lists of neighbouring parts with up to `most_bytes` bytes. A larger part is in a list by itself."""
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.end - part.start > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.end - part.start
    yield batch


def _records(files: Files, results: Mapping[Source, Sequence[dict]]) -> tuple[list[dict], list[dict]]:
    """Combine the results of all tasks. Return `Spooled.records` and `Spooled.removed`."""
    records: list[dict] = []
    removed: list[dict] = []
    for source, found in files.items():
        per_file = added(result["files"] for result in results[source])
        documents, words, num_bytes = (sum(counts[unit] for counts in per_file.values()) for unit in range(3))
        for kind in ("removed", "changed"):
            for reason, counts in added(result[kind] for result in results[source]).items():
                row: dict = {"step": reason, "source": source.name}
                row |= zip(("documents", "words", "bytes"), counts, strict=True)
                removed.append(row | ({"changes_text": True} if kind == "changed" else {}))
        all_skipped = [Skipped(*entry) for result in results[source] for entry in result["skipped"]]
        skipped = merge_skipped([entry for entry in all_skipped if not entry.by_design])
        dropped = [{f"{entry.unit}s: {entry.why}": [entry.num_units]} for entry in all_skipped if entry.by_design]
        dropped += [{f"{NOT_READ} {ending}": [count]} for ending, count in endings_left_out(source).items()]
        records.append(
            {
                "kind": source.kind,
                "path": source.path,
                "files": len(found),
                "fingerprint": fingerprint(found),
                "documents": documents,
                "words": words,
                "bytes": num_bytes,
                "dropped": {why: n for why, (n,) in sorted(added(dropped).items()) if n},
                "skipped": [{"name": entry.name, "reason": entry.reason()} for entry in skipped],
                "damaged_files": round(_num_damaged(skipped, per_file), 6),
            }
        )
    return records, sorted(removed, key=lambda row: (row["step"], row["source"]))


def _num_damaged(skipped: Sequence[Skipped], per_file: Mapping[str, list[int]]) -> float:
    """Return the number of damaged files, which can be fractional.

    A file that is skipped completely, or from the damage on, counts as 1. A file in which only some lines, records,
    pages or rows are bad counts as num_bad / (num_bad + num_documents), where num_documents is the number of documents
    that were read from the file.
    """
    bad: dict[str, float] = {}
    for entry in skipped:
        if entry.damaged:
            bad[entry.name] = bad.get(entry.name, 0) + (entry.num_units or math.inf)
    return sum(1.0 if math.isinf(n) else n / (n + per_file.get(name, [0])[0]) for name, n in bad.items())


def _check_damage(settings: PrepSettings, records: list[dict], work: Path) -> None:
    """Raise PrepError if the fraction of damaged files is larger than the setting `max_bad`.

    If no document was read from any file, the settings are probably wrong, so the error is Unworkable. Otherwise a list
    of everything that was skipped is written to damaged.txt in the folder `work`.
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


def _check_dates(settings: PrepSettings, removed: Sequence[dict], results: Sequence[dict], num_dated: int) -> None:
    """Raise Unworkable if documents of a chronological stream have no date."""
    reasons = (NO_DATE, UNREADABLE_DATE)
    num_undated = sum(row["documents"] for row in removed if row["step"] in reasons)
    if not num_undated or settings.undated == "drop":
        return
    examples = [example for result in results for example in result["undated"]][:3]
    shown = ", ".join(f"{name} (its date is '{date}')" if date else name for name, date in examples)
    message = (
        f"{num_undated:,} documents have no date that can be read, for example {shown}. A date is a year from 1000 on, "
        f"a month, a day or a time, as in ISO 8601: in the field --date-field (now {settings.date_field}) of JSON "
        "lines and Parquet, in a web archive, or else in the path of the file. "
        "Seconds since 1970 and dates such as March 5, 2020 are not read. "
    )
    if not num_dated:
        raise Unworkable(f"{message}No document has a date: check --date-field, or use another --partition.")
    raise Unworkable(f"{message}Give --undated drop to leave these documents out.")


def _no_documents(record: dict, removed: Sequence[dict]) -> str:
    """Return the error message for a source that has no documents left.

    `record` is its entry in stream.json, and `removed` are the rows of the table "cleaning".
    """
    name, advice = source_name(record), "Check the path and the kind of the source."
    message = f"source {name} contains no documents in {record['files']} files"
    if record["documents"]:
        steps = [row for row in removed if row["source"] == name and not row.get("changes_text")]
        reasons = ", ".join(f"{row['step']} ({row['documents']:,})" for row in steps)
        message = f"all {record['documents']:,} documents of source {name} were removed: {reasons}"
        advice = "Check the text, and the options that remove documents."
    if record["skipped"]:
        first = record["skipped"][0]
        count = len(record["skipped"])
        message += f"; skipped files or parts of files: {count:,}, the first is {first['name']}: {first['reason']}"
    return f"{message}. {advice}"


class Shard(NamedTuple):
    """A spool file, and what the index entries of its documents need."""

    number: int
    """Number of the spool file."""
    source: int
    """Index of the source of the documents, in the list of sources."""
    groups: list[int]
    """Index of the snapshot of each part of the task that wrote the spool file. One number: the same for all parts."""


def make_entries(
    seed: int, shards: Sequence[Shard], spool: Path, advance: Callable[[int], None] = lambda count: None
) -> np.ndarray:
    """Return the index entry (`index.ENTRY`) of each document in the spool files, in the order of `shards`.

    An index entry contains what depends on the settings of one stream: the sort key, which depends on the seed, and
    the indices of the source and of the snapshot. These are not stored in the spool, because several streams can use
    the same text. `advance` is called after each spool file with the number of its documents.
    """
    entries = [np.empty(0, ENTRY)]
    for shard in shards:
        documents = np.load(documents_path(spool, shard.number))
        found = np.zeros(len(documents), ENTRY)
        identities = np.ascontiguousarray(documents["identity"])
        keys = b"".join(order_key(seed, bytes(identity), 0) for identity in identities)
        found["key"] = np.frombuffer(keys, "V16")
        # The first half of the digest identifies the document. The second half only makes the sort key.
        found["document"] = identities.view("V16").reshape(-1, 2)[:, 0]
        for name in ("offset", "num_bytes", "num_words"):
            found[name] = documents[name]
        found["shard"], found["source"], found["group"] = shard.number, shard.source, shard.groups[0]
        if len(shard.groups) > 1:
            found["group"] = np.array(shard.groups, np.int16)[documents["part"]]
        entries.append(found)
        advance(len(found))
    return np.concatenate(entries)

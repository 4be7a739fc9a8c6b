"""Make a stream: run all steps, from reading the sources to encoding the splits."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.accounts import check_accounts, count_documents, merged_rows, removed_rows
from data_prep.copies.deduplication import record_documents, remove_copies, without_forgotten
from data_prep.dividing import layout, partition
from data_prep.dividing.chronological import (
    LATE,
    Periods,
    as_new,
    dates_for_copies,
    is_causal,
    is_chronological,
    joined_periods,
    lay_out_periods,
    without_late,
)
from data_prep.dividing.partition import CutTask
from data_prep.dividing.shares import keep_documents, keep_words, share_rows, wanted_words_of, words_by_source
from data_prep.encoding.encode import TASK_BYTES, encode
from data_prep.encoding.mmap_writer import best_dtype
from data_prep.encoding.stream_tokenizer import check_vocabulary, make_tokenizer, write_dictionary
from data_prep.errors import NothingNew, Unworkable
from data_prep.leakage.measure import HeldOutText, held_out_of, measure_leakage, without_overlaps
from data_prep.reading.facts import dates_of
from data_prep.reading.index import ENTRY, INDEX, Index, byte_ranges, is_training, sortable, write_index
from data_prep.reading.read import Spooled, read_sources
from data_prep.reading.signatures import SignatureFiles
from data_prep.running.progress import note
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Files
from data_prep.sources.dates import date_text, period_of
from data_prep.tokenization.tokenizers import TOKENIZERS, dictionary_size
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_description import FORMAT_VERSION


class BaseStream(NamedTuple):
    """The finished stream to which alma-prep --extend adds mega-batches."""

    folder: Path
    description: Mapping
    """The content of the stream's stream.json."""
    keys: np.ndarray
    """Array [n] of keys. A key is a hash of the text of a document, 16 bytes long (NumPy type V16). There is one key
    for each document of the stream, and one for each near-duplicate that was removed."""
    signatures: list[SignatureFiles]
    """The files with signatures, which are used to find near-duplicates. They contain one signature for each key in
    `keys`: first those of the stream as it was first made, then those of each call of alma-prep --extend that added
    mega-batches."""

    @property
    def num_extensions(self) -> int:
        """How many times `alma-prep --extend` has added mega-batches to the stream."""
        return len(self.description.get("extensions", []))


def build_stream(settings: PrepSettings, files: Files, work: WorkFolder, base: BaseStream | None = None) -> dict:
    """Write all shards (output files) of a new stream, or of an extension, into the work folder OUT/.alma-prep.

    Return the content of stream.json. For an extension of the stream `base`, it describes only the extension.

    Raises:
        PrepError: if too many files are damaged, or a worker died or hung.
        Unworkable: if the settings cannot work on the text of the sources.
    """
    where = HeldOutText(work, settings.out, base.description if base else {})
    # Before reading, so that stream.json records what was used, also if a file is changed after it was used.
    digests = settings.digests()
    spooled, plan, index, periods, table, num_mega_batches = _read_and_divide(settings, files, where, base)
    symbols: list[str] = []
    if base is not None:
        tokenizer_file = base.folder / base.description["tokenizer"]["file"]
        num_symbols = base.description["dictionary_size"]
    else:
        tokenizer_file = make_tokenizer(settings, index, work)
        symbols = check_vocabulary(settings, tokenizer_file)
        num_symbols = dictionary_size(len(symbols))
    splits = encode(index, tokenizer_file, num_symbols, spooled.names, spooled.source_of_shard, work, settings.cache)
    described = {"sources": spooled.records, "cleaning": table, "splits": splits}
    if periods is not None:
        described |= periods.described(splits)
    if spooled.snapshots is not None:
        described |= {"snapshots": spooled.snapshots}
    described |= {"leakage": measure_leakage(index, where)}
    if base is not None:
        return described | {"num_mega_batches": len(described["splits"]), "passage_words": plan.passage_words}
    dict_file = write_dictionary(symbols, work)
    return {
        "format_version": FORMAT_VERSION,
        "num_mega_batches": num_mega_batches,
        "seed": settings.seed,
        "vocab_size": len(symbols),
        "dictionary_size": num_symbols,
        "dtype": best_dtype(num_symbols),
        "tokenizer": {
            "kind": settings.tokenizer if settings.tokenizer in TOKENIZERS else "given",
            "file": tokenizer_file.name,
            "sha256": sha256_of(tokenizer_file),
            "dict_sha256": sha256_of(dict_file),
        },
        "settings": {
            **settings.identity(),
            **digests,
            # The values that were used, also if they were not given.
            "num_mega_batches": num_mega_batches,
            "valid_words": plan.valid_words,
            "passage_words": plan.passage_words,
        },
        "command": settings.command(),
        **described,
    }


class _Divided(NamedTuple):
    """All text that was read, divided into splits."""

    spooled: Spooled
    plan: partition.Plan
    splits: Index
    periods: Periods | None
    """The periods, if the stream is chronological."""
    table: list[dict]
    """The table "cleaning" in stream.json."""
    num_mega_batches: int


class _Part(NamedTuple):
    """A part of the text that is divided by itself: all text, or in a causal stream the text of one period."""

    plan: partition.Plan
    passages: np.ndarray
    """The index entry of each passage."""
    planned: layout.Layout
    periods: Periods | None
    table: list[dict]
    """The rows of the table "cleaning" in stream.json."""


def _read_and_divide(settings: PrepSettings, files: Files, where: HeldOutText, base: BaseStream | None) -> _Divided:
    """Read all documents, remove copies, cut long documents into passages, and divide the passages into splits.

    For the arguments and errors, see `build_stream`.
    """
    work, description = where.work, base.description if base else None
    seed, number = (base.description["seed"], base.num_extensions + 1) if base else (settings.seed, 0)
    spooled = read_sources(settings, seed, files, work, is_chronological(settings, description))
    which, forgotten = without_forgotten(spooled, description)
    known = (base.keys, base.signatures) if base else (np.empty(0, "V16"), [])
    if is_causal(settings, description):
        parts = _divide_periods(settings, spooled, which, files, where, description, seed, known)
    else:
        parts = [_divide(settings, spooled, which, files, where, description, seed, number, known)]
    # Free the memory of `spooled.documents` (60 bytes per document), the documents before copies were removed. From
    # here on, only the passages are needed.
    spooled = spooled._replace(documents=np.empty(0, ENTRY), dates=None)
    table = [*spooled.removed, *forgotten, *merged_rows([row for part in parts for row in part.table])]
    parts = [part for part in parts if part.planned.splits]
    if not parts:
        or_late = ", or late" if any(row["step"] == LATE for row in table) else ""
        raise NothingNew(f"each of the {len(which):,} new documents is a copy of a document of the stream{or_late}")
    [plan, passages, planned, periods, _] = parts[0]
    if len(parts) > 1:
        starts = np.cumsum([0, *(len(part.passages) for part in parts[:-1])]).tolist()
        passages = np.concatenate([part.passages for part in parts])
        periods = joined_periods([part.periods for part in parts if part.periods], starts)
        planned = periods.layout
    check_accounts(spooled.records, spooled.names, table, passages, planned.order)
    path = work.folder / INDEX
    write_index(path, passages, planned.order)
    unions = periods.unions if periods else {}
    index = Index(path, sha256_of(path), work.spool, planned.cuts, planned.splits, unions)
    return _Divided(spooled, plan, index, periods, table, sum(map(is_training, planned.splits)))


def _divide_periods(
    settings: PrepSettings, spooled: Spooled, which: np.ndarray, files: Files, where: HeldOutText,
    description: Mapping | None, seed: int, known: tuple[np.ndarray, list[SignatureFiles]],
) -> list[_Part]:  # fmt: skip
    """Divide the text of a causal stream period by period, so that nothing depends on the text of later periods.

    Each period is added as --extend would add it to a stream that ends with the period before. For the arguments, see
    `_divide`.
    """
    assert settings.period is not None and spooled.dates is not None
    is_known = np.isin(sortable(spooled.documents["document"]), sortable(known[0]))
    counted_as = as_new(spooled.dates, description, is_known) if description else spooled.dates
    period_of_document, parts = period_of(settings.period, counted_as)[which], []
    for period in np.unique(period_of_document):
        now = which[period_of_document == period]
        number = description["num_mega_batches"] if description else 0
        work = where.work.within(f"period_{number + 1}")
        try:
            part = _divide(settings, spooled, now, files, where._replace(work=work), description, seed, number, known)
        except Unworkable as error:
            dates = [date_text(int(date)) for date in (spooled.dates[now].min(), spooled.dates[now].max())]
            raise Unworkable(f"period {number + 1}, {dates[0]} to {dates[1]}: {error}") from error
        parts.append(part)
        if part.periods is None:
            continue
        settings_of_stream = description["settings"] if description else {"valid_source": settings.valid_source}
        description = {"settings": settings_of_stream, **part.periods.base(description)}
        if settings.decontaminate is not None:
            path = work.folder / INDEX
            write_index(path, part.passages, part.planned.order)
            index = Index(path, sha256_of(path), work.spool, part.planned.cuts, part.planned.splits)
            where = where._replace(before=[*where.before, *held_out_of(index)])
        recorded = SignatureFiles(work.stream / "dedup" / f"{number:04d}")
        known = (np.concatenate([known[0], np.fromfile(f"{recorded.prefix}.keys", "V16")]), [*known[1], recorded])
    return parts


def _divide(
    settings: PrepSettings, spooled: Spooled, which: np.ndarray, files: Files, where: HeldOutText,
    description: Mapping | None, seed: int, number: int, known: tuple[np.ndarray, list[SignatureFiles]],
) -> _Part:  # fmt: skip
    """Remove copies among some documents, cut long ones into passages, and divide the passages into splits.

    Args:
        settings, files: see `build_stream`.
        spooled: the documents that were read.
        which: indices of the documents to divide.
        where: where to find the validation and test set. Its work folder is used for the steps.
        description: the content of stream.json of the stream to which the text is added; None for a new stream.
        seed: the seed of the stream.
        number: the number of the files in the folder `dedup` of the stream that record the documents.
        known: keys and signature files of the documents of the stream, see `BaseStream`.

    Returns:
        The part. It has no splits if all documents are copies of documents of the stream.
    """
    work, chronological = where.work, spooled.dates is not None
    documents, table, record, late = spooled.documents[which], [], None, list[dict]()
    if settings.duplicates != "keep":
        order = dates_for_copies(settings, spooled.dates, description)
        documents, found, rows = remove_copies(spooled, *known, work, settings.cache, which, order)
        table += rows
    if description and chronological:
        documents, late = without_late(settings, documents, spooled.names, work.spool, description)
        table += late
    if not len(documents) and description:
        empty = layout.Layout(np.empty(0, np.int64), [0], [])
        return _Part(partition.Plan(0, 0, 0, 0), documents, empty, None, table)
    if not len(documents):
        raise Unworkable(f"no document is left: all {len(which):,} are copies of others. Add sources with other text.")
    if settings.duplicates != "keep":
        record = functools.partial(record_documents, work.stream / "dedup", number, spooled, which, found)
        if all(source.share is None for source in files) and not late:
            # Nothing will be left out. Otherwise, the documents are recorded when it is known which are left out.
            record()
            record = None
    # A mega-batch for each snapshot (text of one point in time) or period, or as many as the user wants.
    num_mega_batches = len(spooled.snapshots or ()) or settings.num_mega_batches or 1
    if settings.period is not None:
        dates = dates_of(work.spool, documents)
        dates = as_new(dates, description) if description else dates
        num_mega_batches = len(np.unique(period_of(settings.period, dates)))
    words = words_by_source(documents, len(files))
    wanted_words = wanted_words_of(files, words)
    total, valid_words = sum(wanted_words.values()), settings.valid_words
    if settings.causal and valid_words is None:
        valid_words = max(1, min(500_000, total // 20))  # one period, which stands for the whole stream
    sizes = (num_mega_batches, valid_words, settings.passage_words)
    # The first period of a causal stream is planned as a later one: its test set is smaller than a mega-batch.
    extends, test_words = description is not None or settings.causal, None if chronological else settings.test_words
    plan = partition.make_plan(total, *sizes, extends, test_words, whole_documents=chronological)
    if settings.causal and valid_words is not None:
        plan = plan._replace(valid_words=valid_words)
    passages = _cut(seed, plan, documents, work)
    del documents
    if wanted_words != words:
        if chronological:
            is_kept = keep_documents(passages, wanted_words, number, seed)
        else:
            is_kept = keep_words(passages, wanted_words, number)
        passages, dropped = passages[is_kept], passages[~is_kept]
        table += share_rows(spooled, passages, dropped)
    planned, periods = _lay_out(settings, passages, plan, files, num_mega_batches, work.spool, description)
    if settings.decontaminate is not None:
        if plan.passage_words < settings.decontaminate:
            note(
                f"warning: --decontaminate {settings.decontaminate} finds little: passages have about "
                f"{plan.passage_words} words, and n-grams do not go across their ends. Give a larger --passage-words."
            )
        planned, removed = without_overlaps(settings, passages, planned, where)
        if periods is not None:
            periods = periods._replace(layout=planned)
        step = f"{settings.decontaminate}-gram overlap with held-out text"
        table += removed_rows(step, spooled.names, removed, lambda entries: count_documents(entries["document"]))
    if record is not None:
        record(passages["document"])
    return _Part(plan, passages, planned, periods, table)


def _cut(seed: int, plan: partition.Plan, documents: np.ndarray, work: WorkFolder) -> np.ndarray:
    """Cut long documents into passages. Return the index entry of every passage, in no particular order.

    A document that is not cut becomes a single passage, which has the index entry of the document.
    """
    is_long = documents["num_words"] > plan.limit_words
    long_documents = documents[is_long]
    long_documents = long_documents[layout.by_key(long_documents)]
    path = work.folder / "long_documents.npy"
    np.save(path, long_documents)
    sha256 = sha256_of(path)
    ranges = list(byte_ranges(long_documents["num_bytes"], 0, len(long_documents), TASK_BYTES))
    tasks = [CutTask(str(work.spool), seed, plan, str(path), sha256, start, end) for start, end in ranges]
    step = work.run("cut", tasks, "cut long documents", "documents", [end - start for start, end in ranges])
    cut = [np.load(step.path(number, "passages.npy")) for number in range(len(tasks))]
    return np.concatenate([documents[~is_long], *cut]) if cut else documents[~is_long]


def _lay_out(
    settings: PrepSettings, passages: np.ndarray, plan: partition.Plan, files: Files, num_mega_batches: int,
    spool: Path, base: Mapping | None,
) -> tuple[layout.Layout, Periods | None]:  # fmt: skip
    """Return the layout of all passages, and the periods, if the stream is chronological.

    `base` is the content of stream.json of the stream to extend; None for a new stream.
    """
    valid_source = base["settings"].get("valid_source") if base else settings.valid_source
    strata, valid_strata = layout.strata_of(files, valid_source)
    if valid_source and valid_strata is None and is_chronological(settings, base):
        note(f"the validation text of the new period is of all sources: none is of the kind {valid_source}, which "
             f"--valid-source names for this stream")  # fmt: skip
    if is_chronological(settings, base):
        periods = lay_out_periods(
            settings, passages, strata, valid_strata, plan.valid_words, num_mega_batches, spool, base
        )
        return periods.layout, periods
    if base is not None:
        return layout.extension_layout(passages, strata, num_mega_batches, base["num_mega_batches"] + 1), None
    make_layout = layout.equal_layout if settings.partition == "equal" else layout.drifting_layout
    return make_layout(passages, strata, plan.valid_words, num_mega_batches, valid_strata, settings.test_words), None

"""Make a stream: run all steps, from reading the sources to encoding the splits.

The splits are the mega-batches, the validation set and the test set.

The steps: read documents, remove copies, choose the sizes of the splits, cut long documents into passages, shuffle the
passages and divide them into splits, train the tokenizer, encode the passages.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from data_prep.accounts import check_accounts
from data_prep.copies.deduplication import record_documents, remove_copies
from data_prep.dividing import layout, partition
from data_prep.dividing.chronological import Periods, is_chronological, lay_out_periods
from data_prep.dividing.hold_out import document_layout, keep_documents
from data_prep.dividing.layout import share_rows, strata_of, wanted_words_of, words_by_source
from data_prep.dividing.partition import CutTask
from data_prep.encoding.documents import write_documents
from data_prep.encoding.encode import TASK_BYTES, Encoded, encode
from data_prep.encoding.mmap_writer import best_dtype
from data_prep.encoding.stream_tokenizer import check_vocabulary, make_tokenizer, write_dictionary
from data_prep.errors import PrepError, Unworkable
from data_prep.leakage.measure import HeldOut, measure_leakage, removed_rows, without_overlaps
from data_prep.reading.index import ENTRY, INDEX, Index, byte_ranges, write_index
from data_prep.reading.read import Spooled, read_sources, source_name
from data_prep.reading.signatures import SignatureFiles
from data_prep.running.progress import Bar, note
from data_prep.running.tasks import Executor, Step
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Files
from data_prep.tokenization.dictionary import dictionary_size
from data_prep.tokenization.tokenizers import TOKENIZERS
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_description import FORMAT_VERSION

if TYPE_CHECKING:
    from data_prep.copies.near_copies import Duplicates

Result = TypeVar("Result")


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


def build_stream(
    settings: PrepSettings, files: Files, work: WorkFolder, executor: Executor, base: BaseStream | None = None
) -> dict:
    """Write all shards (output files) of a new stream, or of an extension, into the work folder OUT/.alma-prep.

    Args:
        settings: the settings of this call of alma-prep.
        files: the input files of each source.
        work: the work folder.
        executor: runs the tasks, on this machine or on a Slurm cluster.
        base: the stream to extend; None: make a new stream.

    Returns:
        The content of stream.json. For an extension: only the part of stream.json that describes the extension.

    Raises:
        PrepError: if too many files are damaged, or a worker died or hung.
        Unworkable: if the settings cannot work on the text of the sources.
    """
    where = HeldOut(base and (base.folder, base.description), work, executor)
    # Before reading, so that stream.json records what was used, also if a file is changed after it was used.
    digests = settings.digests() | settings.benchmark_digest()
    spooled, plan, index, periods, table, num_mega_batches = _read_and_divide(settings, files, where, base)
    if base is not None:
        added = _encode_extension(plan, index, periods, base, spooled, table, work, executor)
        return added | {"leakage": measure_leakage(index, where)}
    tokenizer_file = make_tokenizer(settings, index, work, executor)
    symbols = check_vocabulary(settings, tokenizer_file)
    num_symbols = dictionary_size(len(symbols))
    encoded = _encode(index, tokenizer_file, num_symbols, spooled, work, executor)
    dict_file = write_dictionary(symbols, encoded.counts, work)
    return {
        "format_version": FORMAT_VERSION,
        "num_mega_batches": num_mega_batches,
        "seed": settings.seed,
        "vocab_size": len(symbols),
        "dictionary_size": num_symbols,
        "dtype": best_dtype(num_symbols),
        "tokenizer": _described_tokenizer(settings, tokenizer_file, dict_file),
        "settings": settings.recorded(digests, num_mega_batches, plan.valid_words, plan.passage_words),
        "command": settings.command(),
        **_described(spooled, table, encoded.splits, periods),
        "leakage": measure_leakage(index, where),
    }


class _Divided(NamedTuple):
    """All text that was read, divided into splits."""

    spooled: Spooled
    plan: partition.Plan
    splits: Index
    periods: Periods | None
    """The periods, if the stream is chronological."""
    table: list[dict]
    """The table of removed documents, see `_without_copies`."""
    num_mega_batches: int


def _read_and_divide(settings: PrepSettings, files: Files, where: HeldOut, base: BaseStream | None) -> _Divided:
    """Read all documents, remove copies, cut long documents into passages, and divide the passages into splits.

    For the arguments and errors, see `build_stream`. `where` contains the work folder and the executor.
    """
    work, executor = where.work, where.executor
    seed = base.description["seed"] if base else settings.seed
    spooled = read_sources(settings, seed, files, work, executor, _is_chronological(settings, base))
    documents, found, table = _without_copies(settings, seed, spooled, work, executor, base)
    record = None
    if found is not None:
        number = base.num_extensions + 1 if base else 0
        record = functools.partial(record_documents, work.stream / "dedup", number, spooled, found)
        if all(source.share is None for source in files):
            # Nothing will be left out. Otherwise, the documents are recorded when it is known which are left out.
            record()
            record = None
    # Free the memory of `spooled.documents` (60 bytes per document), the documents before copies were removed. From
    # here on, only `documents`, the documents without copies, are needed.
    spooled = spooled._replace(documents=np.empty(0, ENTRY), dates=None)
    num_mega_batches = _num_mega_batches(settings, spooled)
    words = words_by_source(documents, len(files))
    wanted_words = wanted_words_of(files, words)
    plan = _plan(settings, sum(wanted_words.values()), num_mega_batches, base)
    passages = _cut(seed, plan, documents, work, executor)
    del documents
    if wanted_words != words:
        by_documents = settings.hold_out == "documents" or _is_chronological(settings, base)
        keep = functools.partial(keep_documents, seed=seed) if by_documents else layout.keep_words
        is_kept = keep(passages, wanted_words, base.num_extensions + 1 if base else 0)
        passages, dropped = passages[is_kept], passages[~is_kept]
        table += share_rows(spooled, passages, dropped)
    valid_source = base.description["settings"].get("valid_source") if base else settings.valid_source
    how = (plan, *strata_of(files, valid_source), num_mega_batches)
    index, periods, table = _write_index(settings, passages, *how, spooled, base, where, table)
    if record is not None:
        record(passages["document"])
    return _Divided(spooled, plan, index, periods, table, num_mega_batches)


def _is_chronological(settings: PrepSettings, base: BaseStream | None) -> bool:
    """Return True if the stream, or the stream to extend, is chronological."""
    return is_chronological(settings, base.description if base else None)


def _num_mega_batches(settings: PrepSettings, spooled: Spooled) -> int:
    """Return the number of mega-batches to write."""
    if spooled.snapshots:  # a mega-batch for each snapshot (text of one point in time, see `snapshots`)
        return len(spooled.snapshots)
    return settings.num_mega_batches or 1


def _encode(
    index: Index, tokenizer_file: Path, num_symbols: int, spooled: Spooled, work: WorkFolder, executor: Executor
) -> Encoded:
    """Encode all passages, and write which document each of them comes from. See `encode` for the arguments."""
    encoded = encode(index, tokenizer_file, num_symbols, work, executor)
    names = [source_name(record) for record in spooled.records]
    write_documents(index, names, spooled.source_of_shard, encoded.num_sequences, work, executor)
    return encoded


def _described_tokenizer(settings: PrepSettings, tokenizer_file: Path, dict_file: Path) -> dict:
    """Return the entry of stream.json about the tokenizer."""
    return {
        "kind": settings.tokenizer if settings.tokenizer in TOKENIZERS else "given",
        "file": tokenizer_file.name,
        "sha256": sha256_of(tokenizer_file),
        "dict_sha256": sha256_of(dict_file),
    }


def _encode_extension(
    plan: partition.Plan, index: Index, periods: Periods | None, base: BaseStream, spooled: Spooled, table: list[dict],
    work: WorkFolder, executor: Executor,
) -> dict:  # fmt: skip
    """Encode the mega-batches that alma-prep --extend adds, with the tokenizer of the existing stream.

    Args:
        plan: the sizes of splits and passages.
        index: the new passages in their final order, and their division into mega-batches.
        periods: the periods of the mega-batches, if the stream is chronological.
        base: the existing stream.
        spooled: the new documents that were read.
        table: the table of removed documents, see `_without_copies`.
        work: the work folder.
        executor: runs the tasks, on this machine or on a Slurm cluster.

    Returns:
        The part of stream.json that describes the added mega-batches.
    """
    tokenizer_file = base.folder / base.description["tokenizer"]["file"]
    num_symbols = base.description["dictionary_size"]
    encoded = _encode(index, tokenizer_file, num_symbols, spooled, work, executor)
    described = _described(spooled, table, encoded.splits, periods)
    return described | {"num_mega_batches": len(described["splits"]), "passage_words": plan.passage_words}


def _described(spooled: Spooled, table: list[dict], splits: dict[str, dict], periods: Periods | None) -> dict:
    """Return the entries of stream.json about sources, cleaning, splits and snapshots, of a stream or an extension.

    Args:
        spooled: the documents that were read from the sources.
        table: the table of removed documents, see `_without_copies`.
        splits: for each split, by name, its entry in stream.json.
        periods: the periods of a chronological stream or extension; None for other streams.
    """
    described = {"sources": spooled.records, "cleaning": table, "splits": splits}
    if periods is not None:
        described |= periods.described(splits)
    return described if spooled.snapshots is None else described | {"snapshots": spooled.snapshots}


def _workable(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`. If it raises PrepError, raise Unworkable instead.

    Use this function for computations that fail only if the settings cannot work on the text of the sources, for
    example because there is too little text. Unworkable makes alma-prep remove the unfinished work.
    """
    try:
        return compute()
    except Unworkable:
        raise
    except PrepError as error:
        raise Unworkable(str(error)) from error


def _without_copies(
    settings: PrepSettings, seed: int, spooled: Spooled, work: WorkFolder, executor: Executor, base: BaseStream | None
) -> tuple[np.ndarray, "Duplicates | None", list[dict]]:
    """Remove copies of documents. If the setting `duplicates` is "keep", nothing is removed.

    Returns:
        Three values. First, the index entry (`index.ENTRY`) of each remaining document. Second, which documents are
        copies; None if the setting `duplicates` is "keep". Third, a table for stream.json, which lists how many
        documents and words of each source were removed, by cleaning and as copies.
    """
    table = list(spooled.removed)
    if settings.duplicates == "keep":
        return spooled.documents, None, table
    known = (base.keys, base.signatures) if base else (np.empty(0, "V16"), [])
    kept, found, rows = remove_copies(spooled, *known, work, executor, settings.cache)
    return kept, found, table + rows


def _plan(settings: PrepSettings, total_words: int, num_mega_batches: int, base: BaseStream | None) -> partition.Plan:
    """Return the sizes of splits and passages in words. Raise Unworkable if the text is too short for the settings."""
    if base is not None:
        return _workable(lambda: partition.extension_plan(total_words, num_mega_batches, settings.passage_words))
    return _workable(
        lambda: partition.make_plan(total_words, num_mega_batches, settings.valid_words, settings.passage_words)
    )


def _cut(seed: int, plan: partition.Plan, documents: np.ndarray, work: WorkFolder, executor: Executor) -> np.ndarray:
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
    step = Step(work.folder / "cut", tasks)
    with Bar("cut long documents", len(long_documents), "documents") as bar:
        step.run(executor, lambda number: bar.advance(ranges[number][1] - ranges[number][0]))
    cut = [np.load(f"{step.prefix(number)}.passages.npy") for number in range(len(tasks))]
    return np.concatenate([documents[~is_long], *cut]) if cut else documents[~is_long]


def _write_index(
    settings: PrepSettings, passages: np.ndarray, plan: partition.Plan, strata: np.ndarray,
    valid_strata: list[int] | None, num_mega_batches: int, spooled: Spooled, base: BaseStream | None, where: HeldOut,
    table: list[dict],
) -> tuple[Index, Periods | None, list[dict]]:  # fmt: skip
    """Sort all passages into the final order, divide them into splits, and write the index file (see `index`).

    If the setting `decontaminate` is given, training passages that overlap with held-out text are left out.

    Return three values. First, an Index object, which contains the path of the index file and says which passages
    belong to which split. Second, the periods, if the stream is chronological. Third, `table`, the table "cleaning" in
    stream.json, with rows about passages that were left out here.
    """
    names = layout.split_order(num_mega_batches)
    periods = None
    if _is_chronological(settings, base):
        description, valid_words = (base.description if base else None), plan.valid_words
        periods = _workable(
            lambda: lay_out_periods(
                settings, passages, strata, valid_strata, valid_words, where.work.spool, description
            )
        )
        order, cuts, names = periods.layout.order, periods.layout.cuts, periods.layout.splits
    elif base is not None:
        first = base.description["num_mega_batches"] + 1
        names = [f"mega_batch_{t}" for t in range(first, first + num_mega_batches)]
        order, cuts = layout.extension_layout(passages, strata, num_mega_batches)
    elif settings.hold_out == "documents":
        drifts = settings.partition != "equal"
        sizes = (plan.valid_words, num_mega_batches, valid_strata)
        order, cuts = _workable(lambda: document_layout(passages, strata, *sizes, settings.seed, drifts))
    else:
        make_layout = layout.equal_layout if settings.partition == "equal" else layout.drifting_layout
        order, cuts = _workable(lambda: make_layout(passages, strata, plan.valid_words, num_mega_batches, valid_strata))
    source_names = [source_name(record) for record in spooled.records]
    if settings.decontaminate is not None:
        if plan.passage_words < settings.decontaminate:
            note(
                f"warning: --decontaminate {settings.decontaminate} finds little: passages have about "
                f"{plan.passage_words} words, and n-grams do not go across their ends. Give a larger --passage-words."
            )
        (order, cuts), removed = without_overlaps(settings, passages, layout.Layout(order, cuts), names, where)
        table = [*table, *removed_rows(settings, removed, source_names)]
    check_accounts(spooled.records, source_names, table, passages, order)
    path = where.work.folder / INDEX
    write_index(path, passages, order)
    unions = periods.unions if periods is not None else {}
    return Index(path, sha256_of(path), where.work.spool, cuts, names, unions), periods, table

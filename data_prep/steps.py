"""The way of the data: read, leave out duplicates, plan, cut, order, make the tokenizer, encode, describe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep import partition
from data_prep.dictionary import dictionary_size
from data_prep.encoding import (
    PIECE_BYTES,
    Index,
    byte_ranges,
    check_vocabulary,
    encode,
    make_tokenizer,
    write_dictionary,
)
from data_prep.errors import PrepError, Unworkable
from data_prep.mmap_writer import best_dtype
from data_prep.pieces import Executor, Step
from data_prep.progress import Bar
from data_prep.reading import Files, Spooled, read_sources
from data_prep.settings import PrepSettings
from data_prep.spool import ENTRY, INDEX
from data_prep.stream_folder import WorkFolder
from data_prep.tokenization import TOKENIZERS
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import FORMAT_VERSION


class Before(NamedTuple):
    """The stream to which mega-batches are added."""

    folder: Path
    stream: Mapping
    keys: np.ndarray
    """V16 of each document that went into it, and of each that was a copy of one."""
    signatures: list[list[Path]]
    """Of the same documents."""


def make_pieces(
    settings: PrepSettings, files: Files, work: WorkFolder, executor: Executor, before: Before | None = None
) -> dict:
    """Write every piece of the stream, or of what is added to one, into the work folder; return its description.

    Raises:
        PrepError: too many damaged files; a worker died or hung; these settings cannot work on this text (Unworkable).
    """
    spooled = read_sources(settings, files, work.spool, executor)
    documents, table = _without_duplicates(settings, spooled, work, before)
    spooled = spooled._replace(documents=documents[:0])  # a gigabyte for every 19 million
    num_mega_batches = _num_mega_batches(settings, spooled)
    words = _words_of(documents, len(files))
    for number, source in enumerate(files):
        if source.share is not None and not words[number]:
            raise Unworkable(
                f"{source.name} is to be {source.share:g} of the words, and none of it is left: all its documents were "
                "removed by cleaning or as copies of others. Leave it out, or look at --language, --quality and "
                "--duplicates."
            )
    wanted = _workable(
        lambda: partition.share_out(words, {number: source.share for number, source in enumerate(files)})
    )
    plan = _plan(settings, sum(wanted.values()), num_mega_batches, before)
    passages = _cut(settings, plan, documents, work, executor)
    del documents
    if wanted != words:
        passages = partition.keep_words(passages, wanted)
        table += _rows("share", spooled, words, _words_of(passages, len(files)))
    index = _lay_out(settings, plan, passages, num_mega_batches, spooled, work, before)
    del passages
    if before is None:
        tokenizer_file = make_tokenizer(settings, index, work, executor)
        pieces = check_vocabulary(settings, tokenizer_file)
        num_symbols = dictionary_size(len(pieces))
    else:
        tokenizer_file = before.folder / before.stream["tokenizer"]["file"]
        num_symbols = before.stream["dictionary_size"]
    encoded = encode(index, tokenizer_file, num_symbols, work, executor)
    told = {"sources": spooled.records, "cleaning": table, "splits": encoded.splits}
    if spooled.snapshots is not None:
        told["snapshots"] = spooled.snapshots
    if before is not None:
        return told | {"num_mega_batches": num_mega_batches, "passage_words": plan.passage_words}
    dict_file = write_dictionary(pieces, encoded.counts, work)
    kind = settings.tokenizer if settings.tokenizer in TOKENIZERS else "given"
    return {
        "format_version": FORMAT_VERSION,
        "num_mega_batches": num_mega_batches,
        "seed": settings.seed,
        "vocab_size": len(pieces),
        "dictionary_size": num_symbols,
        "dtype": best_dtype(num_symbols),
        "tokenizer": {
            "kind": kind,
            "file": tokenizer_file.name,
            "sha256": sha256_of(tokenizer_file),
            "dict_sha256": sha256_of(dict_file),
        },
        "settings": settings.recorded(num_mega_batches, plan.valid_words, plan.passage_words),
        "command": settings.command(),
        **told,
    }


def _workable(compute: Callable):
    """What it returns; a PrepError of it is about these settings on this text."""
    try:
        return compute()
    except Unworkable:
        raise
    except PrepError as error:
        raise Unworkable(str(error)) from error


def _words_of(entries: np.ndarray, num_sources: int) -> dict[int, int]:
    # As floats words are exact up to 2^53.
    counts = np.bincount(entries["source"], entries["num_words"].astype(np.float64), num_sources)
    return dict(enumerate(counts.astype(np.int64).tolist()))


def _num_mega_batches(settings: PrepSettings, spooled: Spooled) -> int:
    if spooled.snapshots is None:
        return settings.num_mega_batches or 1
    found = len(spooled.snapshots)
    if settings.num_mega_batches not in (None, found):
        raise Unworkable(
            f"--mega-batches {settings.num_mega_batches}, but --partition {settings.partition} finds {found} "
            f"snapshots: {', '.join(spooled.snapshots[:10])}. Leave --mega-batches out, or join or split snapshots."
        )
    return found


def _without_duplicates(
    settings: PrepSettings, spooled: Spooled, work: WorkFolder, before: Before | None
) -> tuple[np.ndarray, list[dict]]:
    """The documents that stay, and the table of what each step removed. Writes what a later extension needs."""
    table = [
        {"step": reason, "source": source, "documents": tally[0], "words": tally[1]}
        for reason, by_source in sorted(spooled.removed.items())
        for source, tally in sorted(by_source.items())
    ]
    documents = spooled.documents
    if settings.duplicates == "keep":
        return documents, table
    from data_prep.duplicates import find_duplicates

    old_keys = before.keys if before else np.empty(0, "V16")
    keys = np.concatenate([old_keys, documents["document"]])
    old = len(old_keys)
    zeros = np.zeros(old, np.int32)
    rank = np.concatenate([zeros - 1, documents["group"].astype(np.int32)])
    num_words = np.concatenate([zeros, documents["num_words"]])
    signatures = None
    if spooled.signatures is not None:
        signatures = [*(before.signatures if before else []), spooled.signatures]
    with Bar("find duplicates", len(keys), "documents") as bar:
        found = find_duplicates(keys, rank, num_words, signatures, old)
        bar.advance(len(keys))
    exact, near = found.exact[old:], found.near[old:]
    for step, mask in (("exact copy", exact), ("near copy", near)):
        copies = documents[mask]
        for number, record in enumerate(spooled.records):
            of_source = copies["num_words"][copies["source"] == number]
            if len(of_source):
                name = ":".join(filter(None, (record["kind"], record["path"])))
                words = int(of_source.sum(dtype=np.int64))
                table.append({"step": step, "source": name, "documents": len(of_source), "words": words})
    _keep_for_extensions(documents["document"], exact, spooled.signatures, work, before)
    kept = documents[~(exact | near)]
    if not len(kept):
        what = "the stream holds" if before else "the sources hold"
        raise Unworkable(f"nothing is left: each of {len(documents):,} documents is a copy of one that {what}.")
    return kept, table


def _keep_for_extensions(
    keys: np.ndarray, exact: np.ndarray, signatures: list[Path] | None, work: WorkFolder, before: Before | None
) -> None:
    """128 bytes a document: its key and its signature. Of near copies too: what is near to them is near to the text.

    Sorted by key, so that the files do not show the order in which sources were read.
    """
    from data_prep.duplicates import NUM_BANDS, load_band

    which = np.flatnonzero(~exact)
    halves = np.ascontiguousarray(keys[which]).view(">u8").reshape(-1, 2)
    which = which[np.lexsort((halves[:, 1], halves[:, 0]))]
    number = len(before.stream.get("extensions", [])) + 1 if before else 0
    folder = work.stream / "dedup"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{number:04d}.keys", "wb") as file:
        file.write(np.ascontiguousarray(keys[which]).data)
    if signatures is not None:
        with open(folder / f"{number:04d}.signatures", "wb") as file:
            for band in range(NUM_BANDS):
                file.write(np.concatenate([load_band(path, band) for path in signatures])[which].data)


def _plan(settings: PrepSettings, total_words: int, num_mega_batches: int, before: Before | None) -> partition.Plan:
    if before is not None:
        return _workable(lambda: partition.extension_plan(total_words, num_mega_batches, settings.passage_words))
    return _workable(
        lambda: partition.make_plan(total_words, num_mega_batches, settings.valid_words, settings.passage_words)
    )


def _cut(
    settings: PrepSettings, plan: partition.Plan, documents: np.ndarray, work: WorkFolder, executor: Executor
) -> np.ndarray:
    """Cut long documents into passages: ENTRY of every passage, in any order."""
    is_long = documents["num_words"] > plan.limit_words
    long_documents = documents[is_long]
    long_documents = long_documents[partition.by_key(long_documents)]
    path = work.folder / "long_documents.npy"
    np.save(path, long_documents)
    sha256 = sha256_of(path)
    ranges = list(byte_ranges(long_documents["num_bytes"], 0, len(long_documents), PIECE_BYTES))
    tasks = [(str(work.spool), settings.seed, tuple(plan), str(path), sha256, start, end) for start, end in ranges]
    step = Step(work.folder / "cut", "data_prep.spool:cut_documents", tasks)
    with Bar("cut long documents", len(long_documents), "documents") as bar:
        step.run(executor, lambda piece: bar.advance(ranges[piece][1] - ranges[piece][0]))
    cut = [np.load(f"{step.prefix(piece)}.passages.npy") for piece in range(len(tasks))]
    return np.concatenate([documents[~is_long], *cut]) if cut else documents[~is_long]


def _lay_out(
    settings: PrepSettings, plan: partition.Plan, passages: np.ndarray, num_mega_batches: int, spooled: Spooled,
    work: WorkFolder, before: Before | None,
) -> Index:  # fmt: skip
    """Write the index of all passages in their order. What comes after depends on content and seed alone."""
    names = partition.split_order(num_mega_batches)
    names_of_kinds = [record["kind"] for record in spooled.records]
    known = sorted(set(names_of_kinds))
    kinds = np.array([known.index(name) for name in names_of_kinds])
    valid_kind = known.index(settings.valid_source) if settings.valid_source is not None else None
    if before is not None:
        first = before.stream["num_mega_batches"] + 1
        names = [f"mega_batch_{t}" for t in range(first, first + num_mega_batches)]
        layout = partition.extension_layout(passages, kinds, num_mega_batches)
    else:
        lay_out = partition.equal_layout if settings.partition == "equal" else partition.drifting_layout
        layout = _workable(lambda: lay_out(passages, kinds, plan.valid_words, num_mega_batches, valid_kind))
    path = work.folder / INDEX
    _write_in_order(path, passages, layout.order)
    # Where a passage lies in the spool depends on the order of reading; what it says does not.
    return Index(path, sha256_of(path), work.spool, layout.cuts, names)


def _write_in_order(path: Path, passages: np.ndarray, order: np.ndarray) -> None:
    """Save passages in this order, part by part: a copy of all of them would double what is in memory."""
    with open(path, "wb") as file:
        described = {"descr": np.lib.format.dtype_to_descr(ENTRY), "fortran_order": False, "shape": (len(order),)}
        np.lib.format.write_array_header_1_0(file, described)
        for start in range(0, len(order), 1 << 20):
            part = passages[order[start : start + (1 << 20)]]
            part["source"] = part["group"] = 0  # they show in the mixture, which is done with now
            file.write(part.data)


def _rows(step: str, spooled: Spooled, before: dict[int, int], after: dict[int, int]) -> list[dict]:
    names = [":".join(filter(None, (record["kind"], record["path"]))) for record in spooled.records]
    return [
        {"step": step, "source": names[number], "words": before[number] - after[number]}
        for number in before
        if before[number] > after[number]
    ]

"""Find a document in a finished stream: its passages in all splits, and the passages of its near copies.

A stream contains tokens, not text; the tokens are decoded here. All passages are read: near copies can be anywhere.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data_prep.copies.near_copies import CONTAINED, Grams, are_copies
from data_prep.reading.index import byte_ranges
from data_prep.reading.ngrams import ngram_hashes, unit_hashes, unit_hashes_of
from data_prep.reading.signatures import NGRAM_UNITS
from data_prep.running.progress import Bar
from data_prep.tokenization.tokenizers import NUM_SPECIAL, Tokenizer, load_tokenizer
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.perplexity import read_documents

if TYPE_CHECKING:
    import pyarrow

BATCH_TOKENS = 1 << 20
"""Approximate number of tokens that are decoded at a time."""
MIN_COMMON = 10
"""Number of 5-grams that a passage must have in common with a document to count as a part of it."""
BATCH_CHARACTERS = 100_000
"""Number of characters of which n-grams are computed at a time (see `unit_hashes_of`)."""
ENOUGH = 0.5
"""If at least this share of the 5-grams of some passages of a document is in the searched text, the whole document is
compared with it. Passages of a near copy may be cut at other places, or be too short to be compared alone."""

COLUMNS = ("document", "id", "date", "source", "words", "bytes", "passage")
"""The columns of documents/SPLIT.parquet that are needed to find and to mask a text."""


class Rows(NamedTuple):
    """The sequences of a split, in order. A sequence is a passage, or a piece of a very long one."""

    table: "pyarrow.Table"
    """What documents/SPLIT.parquet says about them (see `data_prep.encoding.documents`)."""
    starts: np.ndarray
    """int64 [n + 1]: where each sequence starts in the split, in tokens; last, where the split ends."""
    tokens: np.ndarray
    """The tokens of the split, memory-mapped."""


def read_rows(stream: StreamFolder, split: str) -> Rows:
    """Return the sequences of a split. Raise StreamError if the stream does not say which documents they come from."""
    table, sizes = read_documents(stream, split, COLUMNS)
    tokens = np.memmap(stream.prefix(split).with_suffix(".bin"), stream.description["dtype"], "r")
    return Rows(table, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), tokens)


class Passage(NamedTuple):
    """A passage, decoded."""

    split: str
    rows: tuple[int, ...]
    """Its sequences, by their indices in the split."""
    document: str
    """Hash of the text of its document, in hexadecimal."""
    number: int
    """Index of the passage in its document."""
    text: str


Places = dict[str, set[int]]
"""For each split, the indices of some sequences in it."""


class Found(NamedTuple):
    """Where the documents to forget were found."""

    places: Places
    """All sequences to mask."""
    documents: dict[str, str]
    """Hash of each document -> "asked for", "near copy" of such a document, or "contains a copy" in a passage."""
    unknown: list[str]
    """The ids that no document has."""


def find(stream: StreamFolder, ids: Collection[str], texts: Sequence[str]) -> Found:
    """Return where some documents are in a stream, with their near copies.

    Args:
        stream: the stream.
        ids: names of documents in their sources, or hashes of their text, as `documents/*.parquet` has them.
        texts: each document that contains one of these texts is included, too. White space must be equal. A text that
            crosses the end of a passage is not found.

    Raises:
        StreamError: if the stream does not say which documents its text comes from, or a file has changed.
    """
    splits = [*stream.splits, *stream.period_splits]
    stream.verify_bytes(splits)
    rows = {split: read_rows(stream, split) for split in splits}
    wanted, known = _documents_with(rows, ids)
    tokenizer = load_tokenizer(stream.path / stream.description["tokenizer"]["file"])
    if texts:
        # A tokenizer of the user may change text, for example to lower case.
        needles = {*texts, *tokenizer.decode_all([ids.tolist() for ids in tokenizer.encode(list(texts))])}
        for passage in _passages("search the text", rows, tokenizer):
            if any(needle in passage.text for needle in needles):
                wanted.add(passage.document)
    places: Places = defaultdict(set)
    documents = dict.fromkeys(sorted(wanted), "asked for")
    _add_documents(places, rows, wanted)
    if wanted:
        _add_copies(places, documents, rows, tokenizer)
    return Found(dict(places), documents, sorted(set(ids) - known))


def _documents_with(rows: Mapping[str, Rows], ids: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the hashes of the documents with some ids, and which of these ids exist."""
    import pyarrow
    import pyarrow.compute

    wanted, known, values = set(), set(), pyarrow.array(sorted(ids), pyarrow.string())
    for found in rows.values():
        for column in ("id", "document"):
            chosen = found.table.filter(pyarrow.compute.is_in(found.table[column], values))
            wanted.update(chosen["document"].to_pylist())
            known.update(chosen[column].to_pylist())
    return wanted, known


def _add_documents(places: Places, rows: Mapping[str, Rows], documents: Collection[str]) -> None:
    """Add all sequences of some documents to `places`."""
    import pyarrow
    import pyarrow.compute

    values = pyarrow.array(sorted(documents), pyarrow.string())
    for split, found in rows.items():
        which = np.flatnonzero(pyarrow.compute.is_in(found.table["document"], values).to_numpy()).tolist()
        if which:
            places[split].update(which)


def _passages(
    title: str, rows: Mapping[str, Rows], tokenizer: Tokenizer, only: Places | None = None
) -> Iterator[Passage]:
    """Yield the passages of all splits, or those with the sequences in `only`, and show the progress."""
    chosen = {
        split: np.arange(len(found.table)) if only is None else np.array(sorted(only.get(split, ())), np.int64)
        for split, found in rows.items()
    }
    total = sum(int(np.diff(rows[split].starts)[which].sum()) for split, which in chosen.items())
    with Bar(title, total, "tokens") as bar:
        for split, which in chosen.items():
            yield from _passages_of(split, rows[split], which, tokenizer, bar)


def _passages_of(split: str, found: Rows, which: np.ndarray, tokenizer: Tokenizer, bar: Bar) -> Iterator[Passage]:
    documents = found.table["document"].combine_chunks().dictionary_encode()
    codes, numbers, words = (
        documents.indices.to_numpy(),
        *(found.table[name].to_numpy() for name in ("passage", "words")),
    )
    # Only the first piece of a very long passage has the number of words of the passage.
    continues = (words[which] == 0) & (np.diff(which, prepend=-2) == 1)
    continues &= (codes[which] == codes[which - 1]) & (numbers[which] == numbers[which - 1])
    passages = np.split(which, np.flatnonzero(~continues)[1:]) if len(which) else []
    sizes = np.array([found.starts[rows[-1] + 1] - found.starts[rows[0]] for rows in passages], np.int64)
    for start, end in byte_ranges(sizes, 0, len(sizes), BATCH_TOKENS):
        batch = passages[start:end]
        parts = [found.tokens[found.starts[rows[0]] : found.starts[rows[-1] + 1]].astype(np.int64) for rows in batch]
        # Neither the end of a passage nor masked tokens have text.
        texts = tokenizer.decode_all([(ids[ids >= NUM_SPECIAL] - NUM_SPECIAL).tolist() for ids in parts])
        bar.advance(int(sizes[start:end].sum()))
        for rows, text in zip(batch, texts, strict=True):
            document = documents.dictionary[int(codes[rows[0]])].as_py()
            yield Passage(split, tuple(rows.tolist()), document, int(numbers[rows[0]]), text)


def _texts(
    title: str, rows: Mapping[str, Rows], tokenizer: Tokenizer, documents: Collection[str]
) -> dict[str, list[str]]:
    """Return the passages of some documents that are in the stream, in order."""
    places: Places = defaultdict(set)
    _add_documents(places, rows, documents)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for passage in _passages(title, rows, tokenizer, places):
        found[passage.document][passage.number] = passage.text
    return {document: [texts[number] for number in sorted(texts)] for document, texts in found.items()}


def _add_copies(places: Places, documents: dict[str, str], rows: Mapping[str, Rows], tokenizer: Tokenizer) -> None:
    """Add the near copies of some documents to `places`, and to `documents`.

    Two texts are near copies as in `data_prep.copies.near_copies`. A passage of another document is masked if it is a
    near copy of a document or of one of its passages, if it contains the document, or if at least the share CONTAINED
    of its 5-grams are in the document. A document that is a near copy as a whole is masked as a whole.
    """
    wanted: list[tuple[Grams, ...]] = []
    for texts in _texts("read the documents", rows, tokenizer, documents).values():
        parts = [" ".join(texts), *(texts if len(texts) > 1 else [])]
        wanted.append(tuple(Grams.of(unit_hashes(text)) for text in parts))
    # All 5-grams that are searched, and the document of each.
    searched = np.concatenate([each[0].similar for each in wanted])
    owner = np.repeat(np.arange(len(wanted)), [len(each[0].similar) for each in wanted])
    order = np.argsort(searched, kind="stable")
    searched, owner = searched[order], owner[order]
    if not len(searched):  # of fewer than 5 words, only exact copies are found, which have the same hash
        return
    common: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    owners: dict[str, set[int]] = defaultdict(set)
    asked = set(documents)
    for passage in _with_any(_passages("search near copies", rows, tokenizer), searched):
        if passage.document in asked:
            continue
        grams = Grams.of(unit_hashes(passage.text))
        first, last = (np.searchsorted(searched, grams.similar, side) for side in ("left", "right"))
        is_common = last > first
        ranges = zip(first[is_common].tolist(), last[is_common].tolist(), strict=True)
        candidates = {int(owner[at]) for start, end in ranges for at in range(start, end)}
        common[passage.document][0] += int(is_common.sum())
        common[passage.document][1] += len(grams.similar)
        owners[passage.document] |= candidates
        if any(_is_part(grams, wanted[which]) for which in candidates):
            places[passage.split].update(passage.rows)
            documents[passage.document] = "contains a copy"
    close = {one for one, (equal, total) in common.items() if equal >= ENOUGH * total}
    for document, texts in (_texts("compare documents", rows, tokenizer, close) if close else {}).items():
        grams = Grams.of(unit_hashes(" ".join(texts)))
        if any(are_copies(wanted[which][0], grams) for which in owners[document]):
            documents[document] = "near copy"
            _add_documents(places, rows, [document])


def _is_part(passage: Grams, document: Sequence[Grams]) -> bool:
    """Return True if a passage is a near copy of a document or of one of its passages, contains it, or is a part of it.

    Args:
        passage: the n-grams of the passage.
        document: the n-grams of the document, and then of its passages if it has several.
    """
    whole = document[0]
    if are_copies(passage, whole) or any(are_copies(one, passage) for one in document):
        return True
    common = len(np.intersect1d(passage.similar, whole.similar, assume_unique=True))
    return common >= max(MIN_COMMON, CONTAINED * len(passage.similar))


def _with_any(passages: Iterable[Passage], searched: np.ndarray) -> Iterator[Passage]:
    """Yield the passages that may have one of the 5-grams `searched`, sorted hashes. Most have none."""

    def of_batch() -> Iterator[Passage]:
        hashes, counts = unit_hashes_of([passage.text for passage in batch])
        ends = np.cumsum(counts)
        # Some of these n-grams cross the end of a passage, which does no harm.
        found = ngram_hashes(hashes, NGRAM_UNITS)
        places = np.minimum(np.searchsorted(searched, found), len(searched) - 1)
        at = np.flatnonzero(searched[places] == found)
        for number in np.unique(np.searchsorted(ends, at, "right")).tolist():
            yield batch[number]

    batch: list[Passage] = []
    length = 0
    for passage in passages:
        batch.append(passage)
        length += len(passage.text)
        if length >= BATCH_CHARACTERS:
            yield from of_batch()
            batch, length = [], 0
    if batch:
        yield from of_batch()

"""Hold out whole documents (--hold-out documents): no passage of a held-out document is in any mega-batch.

The validation set and the test set then consist of complete documents. Without this option, passages are held out, and
a long document, such as a book, has passages in all splits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_prep.dividing.layout import Layout, by_key, checked_splits, equal_cuts, mixed, mixed_bits, share_purpose
from data_prep.errors import Unworkable

_ROUNDS = 100
"""Maximum number of times that `choose` goes through the documents."""

# What `mixed` needs to know about a document. The words of a document are counted in 64 bits.
_DOCUMENT = np.dtype([("key", "V16"), ("num_words", np.int64), ("source", np.int16)])


class Documents(NamedTuple):
    """The documents that passages are cut from, in an order that depends only on their texts."""

    of_passage: np.ndarray
    """int [number of passages]: the index of the document of each passage."""
    entries: np.ndarray
    """What `mixed` needs about each document (_DOCUMENT). The field "source" contains the index of the stratum."""
    group: np.ndarray
    """Index of the snapshot of each document."""


def documents_of(passages: np.ndarray, strata: np.ndarray, seed: int) -> Documents:
    """Return the documents that passages are cut from.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage. Copies of documents must have been removed.
        strata: int [number of sources], index of the stratum of each source (see `layout.mixed`).
        seed: the seed of the stream. It determines the shuffled order of the documents.
    """
    hashes = np.ascontiguousarray(passages["document"]).view("S16")
    _, first, of_passage = np.unique(hashes, return_index=True, return_inverse=True)
    entries = np.empty(len(first), _DOCUMENT)
    entries["num_words"] = np.bincount(of_passage, passages["num_words"].astype(np.float64)).astype(np.int64)
    entries["source"] = strata[passages["source"][first]]
    # The sort key of a passage cannot be used: a document with many passages would have a small one more often.
    halves = np.ascontiguousarray(passages["document"][first]).view(">u8").reshape(-1, 2).astype(np.uint64)
    entries["key"] = np.ascontiguousarray(mixed_bits(halves, seed).astype(">u8")).view("V16").reshape(-1)
    return Documents(of_passage, entries, passages["group"][first])


def choose(num_words: np.ndarray, target: int) -> np.ndarray:
    """Return the sorted positions of documents that together have about `target` words.

    As many of the first documents are chosen as fit, and then the one with which the sum is nearest to the target, if
    it is nearer than without. Only if this sum is not within 2% of the target, later documents that fit are chosen
    first. If what is missing were always filled like this, short documents would be chosen far more often than long
    ones.

    Args:
        num_words: int [n], the number of words of each document.
        target: number of words.
    """
    is_chosen, start, missing = np.zeros(len(num_words), bool), 0, target
    best = None
    for _ in range(_ROUNDS):
        fits = start + np.flatnonzero(num_words[start:] <= missing)
        sums = np.cumsum(num_words[fits], dtype=np.int64)
        count = int(np.searchsorted(sums, missing, side="right"))
        if count:
            is_chosen[fits[:count]] = True
            start, missing = int(fits[count - 1]) + 1, missing - int(sums[count - 1])
        distances = np.where(is_chosen, missing, np.abs(num_words - missing))
        best = int(np.argmin(distances)) if len(distances) and distances.min() < missing else None
        distance = missing if best is None else int(distances[best])
        if not count or 50 * distance <= target:
            break
    if best is not None:
        is_chosen[best] = True
    return np.flatnonzero(is_chosen)


def keep_documents(passages: np.ndarray, wanted: dict[int, int], number: int, seed: int) -> np.ndarray:
    """Return a bool mask of the passages to keep, so that each source has about the wanted number of words.

    Unlike `layout.keep_words`, this function keeps all passages of a document, or none.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        wanted: number of words to keep, by source index.
        number: 0 for a new stream, else the number of the extension, from 1.
        seed: the seed of the stream.
    """
    # Give each source a stratum of its own, so that the field "source" contains the index of the source.
    documents = documents_of(passages, np.arange(max(wanted) + 1), seed)
    is_kept = np.zeros(len(documents.entries), bool)
    for source, num_words in wanted.items():
        order = by_key(documents.entries, np.flatnonzero(documents.entries["source"] == source), share_purpose(number))
        is_kept[order[choose(documents.entries["num_words"][order], num_words)]] = True
    return is_kept[documents.of_passage]


def document_layout(
    passages: np.ndarray,
    strata: np.ndarray,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
    seed: int,
    drifts: bool,
) -> Layout:
    """Return the layout of a stream in which whole documents are held out.

    The validation set is chosen first, then the test set, as near to their sizes as whole documents allow. The other
    documents make the mega-batches, as in `layout.equal_layout` and `layout.drifting_layout`.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        strata: int [number of sources], index of the stratum of each source (see `layout.mixed`).
        valid_words: wanted number of words of the validation set.
        num_mega_batches: number of mega-batches, B.
        valid_strata: the strata from which the validation set is taken; None: all strata.
        seed: the seed of the stream.
        drifts: True if each mega-batch contains the text of one snapshot; False if all have equal sizes.

    Raises:
        Unworkable: if there are too few documents, or they are too long.
    """
    documents = documents_of(passages, strata, seed)
    groups = range(num_mega_batches) if drifts else [None]
    is_valid, is_test = _held_out(documents, valid_words, num_mega_batches, valid_strata, list(groups))
    in_valid, in_test = is_valid[documents.of_passage], is_test[documents.of_passage]
    valid = mixed(passages, strata, np.flatnonzero(in_valid))
    test = mixed(passages, strata, np.flatnonzero(in_test))
    in_training = ~(in_valid | in_test)
    if drifts:
        batches = [
            mixed(passages, strata, np.flatnonzero(in_training & (passages["group"] == group))) for group in groups
        ]
    else:
        training = mixed(passages, strata, np.flatnonzero(in_training))
        # Pass one mega-batch less, because `equal_cuts` makes an additional split, the test set of other streams.
        cuts = equal_cuts(passages["num_words"][training], num_mega_batches - 1)
        batches = np.split(training, cuts[1:-1])
    splits = [valid, *batches, test]
    words = [int(passages["num_words"][split].sum(dtype=np.int64)) for split in splits]
    _check_sizes(words, int(documents.entries["num_words"].max()), len(documents.entries))
    return checked_splits(passages["num_words"], splits)


def _held_out(
    documents: Documents,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
    groups: list[int | None],
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the documents of the validation set and of the test set. Return a bool mask over the documents for each.

    Each snapshot provides words in proportion to its size. What a snapshot provides too much or too little, because
    documents stay whole, is made up for by the next.

    Args:
        groups: the indices of the snapshots; [None] if the stream has no snapshots.
    """
    words, stratum_of = documents.entries["num_words"], documents.entries["source"]
    is_candidate = np.ones(len(words), bool) if valid_strata is None else np.isin(stratum_of, valid_strata)
    num_candidate_words = int(words[is_candidate].sum())
    if num_candidate_words < valid_words:
        raise Unworkable(
            f"the sources of the kind given by --valid-source have only {num_candidate_words:,} words, but the "
            f"validation set needs {valid_words:,}: lower --valid-words, or add sources of this kind."
        )
    strata = np.arange(int(stratum_of.max()) + 1)
    is_valid, is_test = np.zeros(len(words), bool), np.zeros(len(words), bool)

    def add(to: np.ndarray, which: np.ndarray, fraction: float, missing: float) -> float:
        order = mixed(documents.entries, strata, np.flatnonzero(which), random_starts=True)
        missing += fraction * int(words[order].sum())
        chosen = order[choose(words[order], max(0, round(missing)))]
        to[chosen] = True
        return missing - int(words[chosen].sum())

    in_group = [documents.group == group if group is not None else np.ones(len(words), bool) for group in groups]
    missing = 0.0
    for which in in_group:
        missing = add(is_valid, which & is_candidate, valid_words / num_candidate_words, missing)
    if not is_valid.any():
        # Every document is more than twice as long as the validation set should be. Take the shortest.
        candidates = mixed(documents.entries, strata, np.flatnonzero(is_candidate))
        is_valid[candidates[np.argmin(words[candidates])]] = True
    missing = 0.0
    for which in in_group:
        missing = add(is_test, which & ~is_valid, 1 / (num_mega_batches + 1), missing)
    return is_valid, is_test


def _check_sizes(words: list[int], longest: int, num_documents: int) -> None:
    """Raise Unworkable if the documents are too few or too long for sets of whole documents.

    Args:
        words: number of words of the validation set, of each mega-batch, and of the test set.
        longest: number of words of the longest document.
        num_documents: number of documents.
    """
    valid, *batches, test = words
    mean = sum(batches) / len(batches)
    if mean / 2 <= test <= mean * 2 and valid <= mean:
        return
    raise Unworkable(
        f"--hold-out documents: the documents are too few or too long. With whole documents, the validation set would "
        f"have {valid:,} words, the test set {test:,}, and a mega-batch {mean:,.0f} on average. The test set should be "
        f"about as large as a mega-batch, and the validation set not larger. There are {num_documents:,} documents; "
        f"the longest has {longest:,} words. Add documents, lower --mega-batches, or use --hold-out passages."
    )

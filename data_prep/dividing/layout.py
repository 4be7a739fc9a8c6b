"""Compute the layout of a stream: the shuffled order of passages, the mix of sources, and the split boundaries.

The functions read and write no files. They compute only with index entries (`index.ENTRY`). The entry of a document or
passage contains its number of words and its key. A key is a pseudo-random number that depends on the text and the seed.
Sorting by key therefore shuffles passages, and gives the same order each time.

Each decision needs pseudo-random numbers of its own. If a share kept the passages with the smallest keys, and the kept
passages were then sorted by the same keys, a source of which a share keeps little would all be at the beginning of the
stream. So the stored key is used for the order, and other decisions derive their own key from it (see `by_key`).
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_prep.dividing.partition import MIN_MEGA_BATCH_WORDS
from data_prep.errors import Unworkable
from data_prep.reading.index import halves
from data_prep.reading.ngrams import splitmix
from data_prep.sources import Files


def by_key(entries: np.ndarray, which: np.ndarray | None = None, purpose: str | None = None) -> np.ndarray:
    """Return the indices that sort entries by key, which shuffles them reproducibly.

    The order of entries with equal keys does not matter, because they have equal text.

    Args:
        entries: the index entries (`index.ENTRY`) of documents or passages.
        which: indices into `entries` of the entries to sort; None: all entries.
        purpose: what the order decides. Orders for different purposes are independent of each other. None: the order
            of the stream, which is that of the stored keys.
    """
    keys = key_halves(entries["key"] if which is None else entries["key"][which], purpose)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    return order if which is None else which[order]


def key_halves(keys: np.ndarray, purpose: str | None) -> np.ndarray:
    """Return 16-byte keys as two integers each, [n, 2], or numbers for another purpose that are derived from them.

    See `by_key` for `purpose`.
    """
    if purpose is None:
        return halves(keys)
    seed = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return mixed_bits(halves(keys).astype(np.uint64), seed)


def mixed_bits(values: np.ndarray, seed: int) -> np.ndarray:
    """Return pseudo-random numbers that depend on the values (uint64) and the seed."""
    with np.errstate(over="ignore"):  # integers modulo 2^64
        return splitmix(values + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64))


def mixed(
    passages: np.ndarray, strata: np.ndarray, which: np.ndarray | None = None, random_starts: bool = False,
    purpose: str | None = None,
) -> np.ndarray:  # fmt: skip
    """Return a shuffled order of passages in which each stratum is spread evenly from the beginning to the end.

    A stratum is a source that has a share, or all sources of one kind without a share, for example all books. Because
    of this order, all mega-batches can have nearly the same mix of strata. The order is computed in three steps:

    1. The passages of each stratum are shuffled: they are sorted by key, a pseudo-random number in the index entry.
    2. For each stratum, the interval from 0 to 1 is divided into one subinterval per passage, in the shuffled order.
       The length of a subinterval is proportional to the number of words of the passage.
    3. The passages of all strata are sorted by a point in their subintervals: the midpoint.

    If there is only one stratum, the result is the order by key.

    If the order is cut at a fraction f, the words of a stratum before the cut are f of its words, rounded to a whole
    passage. With midpoints, a stratum always rounds in the same direction. If many orders are cut, one for each
    snapshot, a small stratum could be rounded to nothing in each of them. With `random_starts`, the point is at a
    random fraction of the subintervals of a stratum. Then the expected number of words is exactly f of its words.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        strata: int [number of sources], index of the stratum of each source (see `strata_of`).
        which: indices into `passages` of the passages to order; None: all passages.
        random_starts: if True, use a random point of the subintervals and not the midpoint.
        purpose: what the shuffled order decides (see `by_key`).

    Returns:
        Indices into `passages`. The index entries are not copied, to save memory: the index entries and all temporary
        arrays together take at most 128 bytes per passage.
    """
    order = by_key(passages, which, purpose)
    stratum_of = strata.astype(np.int16)[passages["source"][order]]
    words, point = passages["num_words"][order], np.empty(len(order))
    for stratum in np.unique(stratum_of):
        is_in = stratum_of == stratum
        stratum_words = words[is_in].astype(np.float64)
        before = 0.5
        if random_starts:
            # Take the number from a key, so that it does not depend on the names and the order of the sources.
            first = passages["key"][order[np.argmax(is_in)]]
            before = key_halves(np.array([first]), "start of a stratum")[0, 0] / 2.0**64
        point[is_in] = (np.cumsum(stratum_words) - stratum_words * before) / max(1.0, stratum_words.sum())
    # Use a stable sort, so that passages with equal points stay sorted by key.
    return order[np.argsort(point, kind="stable")]


def strata_of(files: Files, valid_source: str | None) -> tuple[np.ndarray, list[int] | None]:
    """Return the stratum of each source, and the strata from which the validation set is taken.

    A stratum is spread evenly over the stream (see `mixed`). A source with a share is a stratum of its own, so
    that it has this share in each part of the stream. Sources of one kind without a share are one stratum, so that the
    stream does not depend on how their files are divided into sources.

    Args:
        files: the files of each source.
        valid_source: the setting `valid_source`, the kind of which the validation set is made; None: all kinds.

    Returns:
        The index of the stratum of each source, int [number of sources], and the indices of the strata of the kind
        `valid_source`; None if there is no source of this kind, or all kinds are used.
    """
    names = [(source.kind, None if source.share is None else number) for number, source in enumerate(files)]
    known = list(dict.fromkeys(names))
    valid = [number for number, (kind, _) in enumerate(known) if kind == valid_source]
    return np.array([known.index(name) for name in names]), valid or None


class Layout(NamedTuple):
    """The order in which passages are written to the stream, and the boundaries of the splits."""

    order: np.ndarray
    """Indices into the array of passages, in the order in which passages are written."""
    cuts: list[int]
    """Split boundaries, as positions in `order`, in the order of `splits`."""
    splits: list[str]
    """Names: valid, the mega-batches, then test; only mega-batches if they are added to a stream. In a chronological
    stream, the validation text of each period, then the mega-batches, then the test text of each period."""


def equal_layout(
    passages: np.ndarray,
    strata: np.ndarray,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
    test_words: int | None = None,
) -> Layout:
    """Return the layout of a stream whose mega-batches have the same number of words and the same mix of strata.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        strata: int [number of sources], index of the stratum of each source (see `mixed`).
        valid_words: number of words of the validation set, which comes first.
        num_mega_batches: number of mega-batches, B.
        valid_strata: the strata from which the validation set is taken; None: all strata.
        test_words: number of words of the test set, which comes last; None: as many as in a mega-batch.

    Raises:
        Unworkable: if the sources of `valid_strata` have fewer words than the validation set needs.
    """
    words, which = passages["num_words"], None
    if valid_strata is not None:
        is_candidate = np.isin(strata[passages["source"]], valid_strata)
        which = np.flatnonzero(is_candidate)
    candidates = mixed(passages, strata, which)
    found = int(words[candidates].sum(dtype=np.int64))
    if found < valid_words:
        raise Unworkable(
            f"the sources of the kind given by --valid-source have only {found:,} words, but the validation set needs "
            f"{valid_words:,}: lower --valid-words, or add sources of this kind."
        )
    end = max(1, nearest_cut(words[candidates], valid_words))
    rest = candidates[end:]
    if which is not None:
        rest = mixed(passages, strata, np.concatenate([rest, np.flatnonzero(~is_candidate)]))
    cuts = [0, *(end + cut for cut in mega_batch_cuts(words[rest], num_mega_batches, test_words))]
    return Layout(np.concatenate([candidates[:end], rest]), cuts, split_order(num_mega_batches))


def extension_layout(passages: np.ndarray, strata: np.ndarray, num_mega_batches: int, first: int) -> Layout:
    """Return the layout of mega-batches, from number `first` on, that are added to a stream. See also `equal_layout`.

    All new mega-batches have the same number of words and the same mix of strata, which may differ from those of the
    existing mega-batches.
    """
    order = mixed(passages, strata)
    splits = [f"mega_batch_{t}" for t in range(first, first + num_mega_batches)]
    return Layout(order, equal_cuts(passages["num_words"][order], num_mega_batches), splits)


def drifting_layout(
    passages: np.ndarray,
    strata: np.ndarray,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
    test_words: int | None = None,
) -> Layout:
    """Return the layout of a stream that drifts: its text changes from one mega-batch to the next.

    Each mega-batch contains text of one snapshot (point in time, see `dates`), so mega-batches can have different
    sizes. The validation set takes the same fraction of the words of every snapshot. If `valid_strata` is given, only
    words from sources of these strata are counted and taken. The test set takes the same fraction of the remaining
    words of every snapshot: 1 / (B + 1), where B is the number of mega-batches, or what `test_words` is of all. See
    `equal_layout` for the arguments.

    Raises:
        Unworkable: if a split would be too small.
    """
    words = passages["num_words"]
    is_candidate = np.ones(len(passages), bool)
    if valid_strata is not None:
        is_candidate = np.isin(strata[passages["source"]], valid_strata)
    valid_fraction = valid_words / max(1, int(words[is_candidate].sum(dtype=np.int64)))
    if valid_fraction > 1:
        raise Unworkable(
            f"the sources of the kind given by --valid-source have fewer than the {valid_words:,} words that the "
            "validation set needs: lower --valid-words, or add sources of this kind."
        )
    remaining_words = int(words.sum(dtype=np.int64)) - valid_words
    valid, batches, test = [], [], []
    for group in range(num_mega_batches):
        in_group = passages["group"] == group
        candidates = mixed(passages, strata, np.flatnonzero(in_group & is_candidate), random_starts=True)
        total = int(words[candidates].sum(dtype=np.int64))
        end = nearest_cut(words[candidates], round(valid_fraction * total))
        valid.append(candidates[:end])
        others = np.concatenate([candidates[end:], np.flatnonzero(in_group & ~is_candidate)])
        rest = mixed(passages, strata, others, random_starts=True)
        total = int(words[rest].sum(dtype=np.int64))
        in_batch = total * num_mega_batches // (num_mega_batches + 1)
        if test_words is not None:
            in_batch = round(total * (1 - test_words / remaining_words))
        cut = nearest_cut(words[rest], in_batch)
        batches.append(rest[:cut])
        test.append(rest[cut:])
    splits, names = [np.concatenate(valid), *batches, np.concatenate(test)], split_order(num_mega_batches)
    for name, split in zip(names, splits, strict=True):
        found = int(words[split].sum(dtype=np.int64))
        has_size = name == "valid" or (name == "test" and test_words is not None)
        if found < (1 if has_size else MIN_MEGA_BATCH_WORDS):
            raise Unworkable(
                f"{name} would have {found:,} words, but a mega-batch or test set needs at "
                f"least {MIN_MEGA_BATCH_WORDS:,}, and a validation set at least 1. Add files, or combine small "
                "snapshots: with --partition by-date, give their files the same date; with as-given, put them into one "
                "--source."
            )
    return Layout(np.concatenate(splits), [0, *np.cumsum([len(split) for split in splits]).tolist()], names)


def split_order(num_mega_batches: int) -> list[str]:
    """Return the names of all splits of a new stream, in the order of `Layout.cuts`."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def mega_batch_cuts(words: np.ndarray, num_mega_batches: int, test_words: int | None) -> list[int]:
    """Return the boundaries [0, .., n] that divide n passages into mega-batches and a test set.

    The boundaries are at the ends of passages, so the size of a mega-batch differs from the exact size by at most the
    length of the longest passage. `test_words` is None if the test set has as many words as a mega-batch.
    """
    if test_words is None:
        return equal_cuts(words, num_mega_batches + 1)
    left = int(words.sum(dtype=np.int64)) - test_words
    ends = [left * part // num_mega_batches for part in range(1, num_mega_batches + 1)]
    cuts = nearest_cuts(words, ends)
    return [0, *cuts[:-1], min(cuts[-1], len(words) - 1), len(words)]  # at least one passage is tested


def equal_cuts(words: np.ndarray, num_parts: int) -> list[int]:
    """Return the boundaries [0, .., n] that divide n passages into parts with nearly equal numbers of words."""
    total = int(words.sum(dtype=np.int64))
    return [0, *nearest_cuts(words, [total * part // num_parts for part in range(1, num_parts)]), len(words)]


def nearest_cuts(words: np.ndarray, targets: Sequence[int]) -> list[int]:
    """Return for each target the number k for which the number of words in the first k passages is nearest to it.

    If two values of k are equally good, the smaller one is returned. `words` is the number of words of each passage.
    """
    sums = np.zeros(len(words) + 1, np.int64)
    np.cumsum(words, dtype=np.int64, out=sums[1:])
    wanted = np.array(targets, np.int64)
    after = np.minimum(np.searchsorted(sums, wanted), len(words))
    before = np.maximum(after - 1, 0)
    return np.where(wanted - sums[before] <= sums[after] - wanted, before, after).tolist()


def nearest_cut(words: np.ndarray, target: int) -> int:
    """Return the result of `nearest_cuts` for one target."""
    return nearest_cuts(words, [target])[0]

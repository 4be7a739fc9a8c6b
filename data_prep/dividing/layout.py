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

from data_prep.accounts import count_documents, row_of_entries
from data_prep.dividing.partition import MIN_MEGA_BATCH_WORDS
from data_prep.errors import Unworkable
from data_prep.reading.read import Spooled, source_name
from data_prep.sources import Files

_ROUNDS = 100
"""Maximum number of times that `choose` goes through the documents."""


def by_key(entries: np.ndarray, which: np.ndarray | None = None, purpose: str | None = None) -> np.ndarray:
    """Return the indices that sort entries by key.

    Keys are pseudo-random and depend on the seed. Sorting by key therefore shuffles the entries reproducibly.

    Args:
        entries: the index entries (`index.ENTRY`) of documents or passages.
        which: indices into `entries` of the entries to sort; None: all entries.
        purpose: what the order decides. Orders for different purposes are independent of each other. None: the order
            of the stream, which is that of the stored keys.

    Returns:
        Indices into `entries`. The order of entries with equal keys does not matter, because they have equal text.
    """
    # Sort the keys by the first integer, and keys with equal first integers by the second. For stored keys, this gives
    # the same order as comparing the keys byte by byte.
    halves = key_halves(entries["key"] if which is None else entries["key"][which], purpose)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    return order if which is None else which[order]


def key_halves(keys: np.ndarray, purpose: str | None) -> np.ndarray:
    """Return 16-byte keys as two integers each, [n, 2], or numbers for another purpose that are derived from them.

    See `by_key` for `purpose`.
    """
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    if purpose is None:
        return halves
    return mixed_bits(halves.astype(np.uint64), int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big"))


def mixed_bits(values: np.ndarray, seed: int) -> np.ndarray:
    """Return pseudo-random numbers that depend on the values (uint64) and the seed, by the function splitmix64."""
    with np.errstate(over="ignore"):  # splitmix64 computes modulo 2^64, so overflow is intended
        state = values + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def mixed(
    passages: np.ndarray,
    strata: np.ndarray,
    which: np.ndarray | None = None,
    random_starts: bool = False,
    purpose: str | None = None,
) -> np.ndarray:
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
        purpose: what the shuffled order decides (see `by_key`). None: the stored keys are used.

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


def check_shares(shares: Sequence[float | None]) -> None:
    """Raise Unworkable if the shares of the sources are impossible.

    They are impossible if their sum is more than 1; if it is less than 1 and every source has a share; or if it is 1
    and a source has no share.

    Args:
        shares: the share of each source; None for a source without a share.
    """
    given = [share for share in shares if share is not None]
    total = sum(given)
    if total > 1 + 1e-9 or (given and len(given) == len(shares) and total < 1 - 1e-9):
        raise Unworkable(
            f"the source shares sum to {total:g}, but must sum to 1 if every source has a share, and to less than 1 "
            "otherwise. Change the shares, which are the numbers after the @ in --source."
        )
    if len(given) < len(shares) and total > 1 - 1e-9:
        raise Unworkable(
            "the given shares already sum to 1, so nothing is left for the sources without a share: lower the shares, "
            "or remove the sources without a share."
        )


def share_out(words: dict[int, int], shares: dict[int, float | None]) -> dict[int, int]:
    """Return how many words of each source to use. The total is as large as the given shares allow.

    The share of a source is the fraction of the stream's words that the source should provide. The sources without a
    share provide the remaining fraction, in proportion to their numbers of words.

    Args:
        words: number of words of each source, by source index.
        shares: the share of each source, by source index; None for a source without a share.

    Raises:
        Unworkable: if the shares are impossible, see `check_shares`.
    """
    check_shares(list(shares.values()))
    given = {source: share for source, share in shares.items() if share is not None}
    if not given:
        return dict(words)
    rest, total = sum(words[source] for source in shares if source not in given), sum(given.values())
    wanted = {
        source: given[source] if source in given else (1 - total) * words[source] / max(1, rest) for source in shares
    }
    # `most` is the largest possible total number of words. With a larger total, at least one source would have fewer
    # words than its share requires.
    most = min(words[source] / wanted[source] for source in shares if wanted[source] > 0)
    return {source: min(words[source], round(wanted[source] * most)) for source in shares}


def keep_words(passages: np.ndarray, wanted: dict[int, int], number: int) -> np.ndarray:
    """Return a bool mask of the passages to keep, so that each source has about the wanted number of words.

    Of each source, passages are kept at random. This choice is independent of the order of the stream.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        wanted: number of words to keep, by source index.
        number: 0 for a new stream, else the number of the extension, from 1.
    """
    kept = np.ones(len(passages), bool)
    for source, num_words in wanted.items():
        which = by_key(passages, np.flatnonzero(passages["source"] == source), share_purpose(number))
        kept[which[_nearest(_cumulative(passages["num_words"][which]), num_words) :]] = False
    return kept


def keep_documents(passages: np.ndarray, wanted: dict[int, int], number: int, seed: int) -> np.ndarray:
    """Return a bool mask of the passages to keep, so that each source has about the wanted number of words.

    Unlike `keep_words`, this function keeps all passages of a document, or none.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        wanted: number of words to keep, by source index.
        number: 0 for a new stream, else the number of the extension, from 1.
        seed: the seed of the stream.
    """
    hashes = np.ascontiguousarray(passages["document"]).view("S16")
    _, first, of_passage = np.unique(hashes, return_index=True, return_inverse=True)
    num_words = np.bincount(of_passage, passages["num_words"].astype(np.float64)).astype(np.int64)
    # The sort key of a passage cannot be used: a document with many passages would have a small one more often.
    halves = np.ascontiguousarray(passages["document"][first]).view(">u8").reshape(-1, 2).astype(np.uint64)
    entries = np.empty(len(first), [("key", "V16")])
    entries["key"] = np.ascontiguousarray(mixed_bits(halves, seed).astype(">u8")).view("V16").reshape(-1)
    is_kept = np.zeros(len(first), bool)
    for source, wanted_words in wanted.items():
        which = np.flatnonzero(passages["source"][first] == source)
        order = by_key(entries, which, share_purpose(number))
        is_kept[order[choose(num_words[order], wanted_words)]] = True
    return is_kept[of_passage]


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


def share_purpose(number: int) -> str:
    """Return the purpose (see `by_key`) of the choice of what a share keeps.

    Text that a share left out can be read again for an extension, and then another share can choose among it and new
    text. With the same random numbers, it would be left out again, and new text be used.

    Args:
        number: 0 for a new stream, else the number of the extension, from 1.
    """
    return f"share {number}"


class Layout(NamedTuple):
    """The order in which passages are written to the stream, and the boundaries of the splits."""

    order: np.ndarray
    """Indices into the array of passages, in the order in which passages are written."""
    cuts: list[int]
    """Split boundaries, as positions in `order`: [0, end of valid, end of mega-batch 1, .., end of test].

    If mega-batches are added to an existing stream, there are no boundaries of a validation set and of a test set (see
    `extension_layout`).
    """


def equal_layout(
    passages: np.ndarray,
    strata: np.ndarray,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
) -> Layout:
    """Return the layout of a stream whose mega-batches have the same number of words and the same mix of strata.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        strata: int [number of sources], index of the stratum of each source (see `mixed`).
        valid_words: number of words of the validation set, which comes first.
        num_mega_batches: number of mega-batches, B.
        valid_strata: the strata from which the validation set is taken; None: all strata.

    Raises:
        Unworkable: if the sources of `valid_strata` have fewer words than the validation set needs.
    """
    words = passages["num_words"]
    if valid_strata is None:
        order = mixed(passages, strata)
        return Layout(order, cut_points(words[order], valid_words, num_mega_batches))
    is_candidate = np.isin(strata[passages["source"]], valid_strata)
    candidates = mixed(passages, strata, np.flatnonzero(is_candidate))
    found = int(words[candidates].sum(dtype=np.int64))
    if found < valid_words:
        raise Unworkable(
            f"the sources of the kind given by --valid-source have only {found:,} words, but the validation set needs "
            f"{valid_words:,}: lower --valid-words, or add sources of this kind."
        )
    end = max(1, _nearest(_cumulative(words[candidates]), valid_words))
    rest = mixed(passages, strata, np.concatenate([candidates[end:], np.flatnonzero(~is_candidate)]))
    cuts = [0, *(end + cut for cut in equal_cuts(words[rest], num_mega_batches))]
    return Layout(np.concatenate([candidates[:end], rest]), cuts)


def extension_layout(passages: np.ndarray, strata: np.ndarray, num_mega_batches: int) -> Layout:
    """Return the layout of mega-batches that are added to an existing stream (an extension).

    All new mega-batches have the same number of words and the same mix of strata. This number and this mix may
    differ from those of the existing mega-batches.

    An extension has no validation set and no test set. So `cuts` contains only the boundaries of the new mega-batches:
    [0, end of the first new mega-batch, end of the second new mega-batch, .., end of the last one]. See `equal_layout`
    for the arguments.
    """
    order = mixed(passages, strata)
    # Pass one mega-batch less, because `equal_cuts` makes an additional split, the test set of a new stream. An
    # extension has no test set, so the additional split is its last mega-batch.
    cuts = equal_cuts(passages["num_words"][order], num_mega_batches - 1)
    return Layout(order, cuts)


def drifting_layout(
    passages: np.ndarray,
    strata: np.ndarray,
    valid_words: int,
    num_mega_batches: int,
    valid_strata: Sequence[int] | None,
) -> Layout:
    """Return the layout of a stream that drifts: its text changes from one mega-batch to the next.

    Each mega-batch contains text of one snapshot (point in time, see `dates`), so mega-batches can have different
    sizes. The validation set takes the same fraction of the words of every snapshot. If `valid_strata` is given, only
    words from sources of these strata are counted and taken. The test set takes 1 / (B + 1) of the remaining words of
    every snapshot, where B is the number of mega-batches. See `equal_layout` for the arguments.

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
    valid, batches, test = [], [], []
    for group in range(num_mega_batches):
        in_group = passages["group"] == group
        candidates = mixed(passages, strata, np.flatnonzero(in_group & is_candidate), random_starts=True)
        cumulative = _cumulative(words[candidates])
        end = _nearest(cumulative, round(valid_fraction * int(cumulative[-1])))
        valid.append(candidates[:end])
        others = np.concatenate([candidates[end:], np.flatnonzero(in_group & ~is_candidate)])
        rest = mixed(passages, strata, others, random_starts=True)
        cumulative = _cumulative(words[rest])
        cut = _nearest(cumulative, int(cumulative[-1]) * num_mega_batches // (num_mega_batches + 1))
        batches.append(rest[:cut])
        test.append(rest[cut:])
    return checked_splits(words, [np.concatenate(valid), *batches, np.concatenate(test)])


def checked_splits(words: np.ndarray, splits: list[np.ndarray]) -> Layout:
    """Return the layout of a stream from the passages of each split. Raise Unworkable if a split is too small.

    Args:
        words: int [n], the number of words of each passage.
        splits: the indices of the passages of the validation set, of each mega-batch, and of the test set.
    """
    for name, split in zip(split_order(len(splits) - 2), splits, strict=True):
        found = int(words[split].sum(dtype=np.int64))
        if found < (1 if name == "valid" else MIN_MEGA_BATCH_WORDS):
            raise Unworkable(
                f"{name} would have {found:,} words, but a mega-batch or test set needs at least "
                f"{MIN_MEGA_BATCH_WORDS:,}, and a validation set at least 1. Add files, or combine small snapshots: "
                "with --partition by-date, give their files the same date; with as-given, put them into one --source."
            )
    return Layout(np.concatenate(splits), [0, *np.cumsum([len(split) for split in splits]).tolist()])


def split_order(num_mega_batches: int) -> list[str]:
    """Return the names of all splits of a new stream, in the order of `Layout.cuts`."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def cut_points(words: np.ndarray, valid_words: int, num_mega_batches: int) -> list[int]:
    """Return the split boundaries, as passage indices: [0, end of valid, end of mega-batch 1, .., end of test].

    All mega-batches and the test set should have the same number of words. But a boundary must be at the end of a
    passage, so the end nearest to the exact position is used. The size of a mega-batch therefore differs from the exact
    size by at most the length of the longest passage.

    Args:
        words: int [n], the number of words of each passage, in order.
        valid_words: number of words of the validation set, which comes first.
        num_mega_batches: number of mega-batches, B.
    """
    # Put at least one passage into the validation set, so that it is not empty.
    valid_end = max(1, _nearest(_cumulative(words), valid_words))
    return [0, *(valid_end + cut for cut in equal_cuts(words[valid_end:], num_mega_batches))]


def equal_cuts(words: np.ndarray, num_mega_batches: int) -> list[int]:
    """Return boundaries that divide passages into B mega-batches and a test set with nearly equal numbers of words.

    Args:
        words: int [n], the number of words of each passage, in order.
        num_mega_batches: number of mega-batches, B.

    Returns:
        Passage indices [0, end of mega-batch 1, .., end of test].
    """
    cumulative = _cumulative(words)
    shares, total = num_mega_batches + 1, int(cumulative[-1])
    return [0, *(_nearest(cumulative, total * share // shares) for share in range(1, shares)), len(words)]


def _cumulative(words: np.ndarray) -> np.ndarray:
    """Return the number of words before each of n passages, and the total as last element: int64 [n + 1]."""
    found = np.zeros(len(words) + 1, np.int64)
    np.cumsum(words, dtype=np.int64, out=found[1:])
    return found


def _nearest(cumulative: np.ndarray, target: int) -> int:
    """Return the number k for which the number of words in the first k passages is nearest to `target`.

    If two values of k are equally good, the smaller one is returned.
    """
    after = min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1)
    if after > 0 and target - cumulative[after - 1] <= cumulative[after] - target:
        return after - 1
    return after


def words_by_source(entries: np.ndarray, num_sources: int) -> dict[int, int]:
    """Return the number of words of each source, by source index.

    Args:
        entries: the index entry (`index.ENTRY`) of each document or passage.
        num_sources: number of sources.
    """
    # Convert to float64, because `bincount` needs float64 weights. Float64 sums are exact up to 2^53 words.
    counts = np.bincount(entries["source"], entries["num_words"].astype(np.float64), num_sources)
    return dict(enumerate(counts.astype(np.int64).tolist()))


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


def wanted_words_of(files: Files, words: dict[int, int]) -> dict[int, int]:
    """Return how many words of each source to use so that every source provides its share.

    The share of a source is the fraction of the stream's words that the source should provide (--source ...@SHARE).

    Args:
        files: the files of each source.
        words: number of words of each source, by source index.

    Raises:
        Unworkable: if the shares are invalid, or if a source with a share has no text left.
    """
    shares = {number: source.share for number, source in enumerate(files)}
    for number, source in enumerate(files):
        if source.share is not None and not words[number]:
            raise Unworkable(
                f"{source.name} should provide {source.share:g} of the words, but none of its text is left: cleaning "
                "removed all of its documents, or they are copies of other documents. Remove the source, or change "
                "--language, --gopher or --duplicates."
            )
    return share_out(words, shares)


def share_rows(spooled: Spooled, kept: np.ndarray, dropped: np.ndarray) -> list[dict]:
    """Return rows for the table "cleaning" in stream.json. A row says how much text of one source is left out.

    Text is left out so that every source provides its share, which is the fraction of the stream's words that the
    source should provide. A source of which nothing is left out has no row.

    Args:
        spooled: the documents that were read, with the records of the sources.
        kept, dropped: the index entries (`index.ENTRY`) of the passages that are used, and of those that are left out.
    """
    rows = []
    for number, record in enumerate(spooled.records):
        of_source = dropped[dropped["source"] == number]
        if len(of_source):
            documents = kept["document"][kept["source"] == number]
            # The documents of which no passage is used.
            left_out = count_documents(np.concatenate([documents, of_source["document"]])) - count_documents(documents)
            rows.append(row_of_entries("share", source_name(record), left_out, of_source))
    return rows

"""The layout of a stream: the seeded order of passages, the mix of sources, and the cuts between splits.

Everything here is arithmetic on words. Nothing reads or writes a file.
"""

from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError
from data_prep.partition import MIN_MEGA_BATCH_WORDS


def by_key(entries: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
    """Return the places of entries (or of `which` of them) in the order of keys. Equal keys mean equal text."""
    keys = entries["key"] if which is None else entries["key"][which]
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    return order if which is None else which[order]


def mixed(passages: np.ndarray, kinds: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
    """Return the order of the stream: each kind of source in the order of keys, and all kinds mixed in proportion.

    The position of a passage is the position of its middle among the words of its kind, as a fraction. With one kind
    this is the order of keys.

    Args:
        passages: ENTRY of each passage.
        kinds: int [number of sources], the kind of each source. The order does not change if text is moved from one
            source to another of the same kind.
        which: places in `passages`; None: all.

    Returns:
        Places in `passages`. Only numbers are copied: with its entry a passage takes at most 128 bytes of memory.
    """
    order = by_key(passages, which)
    kind_of = kinds.astype(np.int8)[passages["source"][order]]
    words, middle = passages["num_words"][order], np.empty(len(order))
    for kind in np.unique(kind_of):
        is_kind = kind_of == kind
        kind_words = words[is_kind].astype(np.float64)
        middle[is_kind] = (np.cumsum(kind_words) - kind_words / 2) / max(1.0, kind_words.sum())
    return order[np.argsort(middle, kind="stable")]  # stable: equal positions keep the order of keys


def share_out(words: dict[int, int], shares: dict[int, float | None]) -> dict[int, int]:
    """Return how many words of each source are used: as many as possible, in the wanted shares.

    Sources without a share divide the rest in proportion to their size.

    Args:
        words: words of each source.
        shares: the wanted fraction of the words of the stream, by source; None: no wish.

    Raises:
        PrepError: the sum of the shares is more than 1, or less although every source has a share.
    """
    given = {source: share for source, share in shares.items() if share is not None}
    if not given:
        return dict(words)
    rest, total = sum(words[source] for source in shares if source not in given), sum(given.values())
    if total > 1 + 1e-9 or (len(given) == len(shares) and total < 1 - 1e-9):
        raise PrepError(
            f"the shares of the sources come to {total:g}, and must come to 1 (or less, so that the other sources take "
            "the rest). Give other shares after the @."
        )
    if len(given) < len(shares) and total > 1 - 1e-9:
        raise PrepError("the shares of some sources come to 1, and leave nothing for the others: leave those out.")
    wanted = {
        source: given[source] if source in given else (1 - total) * words[source] / max(1, rest) for source in shares
    }
    most = min(words[source] / wanted[source] for source in shares if wanted[source] > 0)
    return {source: min(words[source], round(wanted[source] * most)) for source in shares}


def keep_words(passages: np.ndarray, wanted: dict[int, int]) -> np.ndarray:
    """Return the first passages of each source, in the order of keys, up to the wanted number of words."""
    kept = np.ones(len(passages), bool)
    for source, num_words in wanted.items():
        which = by_key(passages, np.flatnonzero(passages["source"] == source))
        kept[which[_nearest(_cumulative(passages["num_words"][which]), num_words) :]] = False
    return passages[kept]


class Layout(NamedTuple):
    """The order in which passages are written, and where the splits begin and end among them."""

    order: np.ndarray
    """Places in the array of passages."""
    cuts: list[int]
    """[0, end of valid, end of mega-batch 1, .., end of test]."""


def equal_layout(
    passages: np.ndarray, kinds: np.ndarray, valid_words: int, num_mega_batches: int, valid_kind: int | None
) -> Layout:
    """Return the layout of a stream whose mega-batches have equal words and the same mix of sources.

    Args:
        passages: ENTRY of each passage.
        kinds: int [number of sources], the kind of each source.
        valid_words: words of the validation set, which comes first.
        num_mega_batches: B.
        valid_kind: the kind of source from which the validation set is taken; None: all kinds.

    Raises:
        PrepError: the sources of `valid_kind` have fewer words than the validation set needs.
    """
    words = passages["num_words"]
    if valid_kind is None:
        order = mixed(passages, kinds)
        return Layout(order, cut_points(words[order], valid_words, num_mega_batches))
    is_valid_kind = kinds[passages["source"]] == valid_kind
    candidates = mixed(passages, kinds, np.flatnonzero(is_valid_kind))
    found = int(words[candidates].sum(dtype=np.int64))
    if found < valid_words:
        raise PrepError(
            f"the kind of --valid-source has {found:,} words, and the validation set needs {valid_words:,}: give fewer "
            "--valid-words, or more of that kind."
        )
    end = max(1, _nearest(_cumulative(words[candidates]), valid_words))
    rest = mixed(passages, kinds, np.concatenate([candidates[end:], np.flatnonzero(~is_valid_kind)]))
    cuts = [0, *(end + cut for cut in equal_cuts(words[rest], num_mega_batches))]
    return Layout(np.concatenate([candidates[:end], rest]), cuts)


def extension_layout(passages: np.ndarray, kinds: np.ndarray, num_mega_batches: int) -> Layout:
    """Return the layout of an extension: only mega-batches, of equal words and with the same mix of sources."""
    order = mixed(passages, kinds)
    # The last share is the test set of a new stream. Here it is a mega-batch.
    cuts = equal_cuts(passages["num_words"][order], num_mega_batches - 1)
    return Layout(order, cuts)


def drifting_layout(
    passages: np.ndarray, kinds: np.ndarray, valid_words: int, num_mega_batches: int, valid_kind: int | None
) -> Layout:
    """Return the layout of a stream that drifts: one mega-batch per group, in the order of groups, of any size.

    The test set takes 1 / (B + 1) of the words of every group. The validation set takes the same fraction of each.
    See `equal_layout` for the arguments.

    Raises:
        PrepError: a split would be too small.
    """
    words = passages["num_words"]
    is_valid_kind = np.ones(len(passages), bool)
    if valid_kind is not None:
        is_valid_kind = kinds[passages["source"]] == valid_kind
    valid_fraction = valid_words / max(1, int(words[is_valid_kind].sum(dtype=np.int64)))
    if valid_fraction > 1:
        raise PrepError(f"--valid-source has fewer words than the {valid_words:,} of the validation set.")
    valid, batches, test = [], [], []
    for group in range(num_mega_batches):
        in_group = passages["group"] == group
        candidates = mixed(passages, kinds, np.flatnonzero(in_group & is_valid_kind))
        cumulative = _cumulative(words[candidates])
        end = _nearest(cumulative, round(valid_fraction * int(cumulative[-1])))
        valid.append(candidates[:end])
        rest = mixed(passages, kinds, np.concatenate([candidates[end:], np.flatnonzero(in_group & ~is_valid_kind)]))
        cumulative = _cumulative(words[rest])
        cut = _nearest(cumulative, int(cumulative[-1]) * num_mega_batches // (num_mega_batches + 1))
        batches.append(rest[:cut])
        test.append(rest[cut:])
    splits = [np.concatenate(valid), *batches, np.concatenate(test)]
    for name, split in zip(split_order(num_mega_batches), splits, strict=True):
        found = int(words[split].sum(dtype=np.int64))
        if found < (1 if name == "valid" else MIN_MEGA_BATCH_WORDS):
            raise PrepError(
                f"{name} would have {found:,} words, but needs at least {MIN_MEGA_BATCH_WORDS:,}. "
                "Join snapshots, or add files to this one."
            )
    return Layout(np.concatenate(splits), [0, *np.cumsum([len(split) for split in splits]).tolist()])


def split_order(num_mega_batches: int) -> list[str]:
    """Return the names of the splits, in the order of `Layout.cuts`."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def cut_points(words: np.ndarray, valid_words: int, num_mega_batches: int) -> list[int]:
    """Return where the splits end: [0, end of valid, end of mega-batch 1, .., end of test].

    Each cut is at the passage end nearest to its share. The size of a mega-batch therefore differs from an equal share
    by at most the longest passage.

    Args:
        words: int [n], the words of each passage, in order.
        valid_words: words of the validation set, which comes first.
        num_mega_batches: B.
    """
    valid_end = max(1, _nearest(_cumulative(words), valid_words))  # never an empty validation set
    return [0, *(valid_end + cut for cut in equal_cuts(words[valid_end:], num_mega_batches))]


def equal_cuts(words: np.ndarray, num_mega_batches: int) -> list[int]:
    """Return [0, end of mega-batch 1, .., end of test]. Each cut is at the passage end nearest to its share."""
    cumulative = _cumulative(words)
    shares, total = num_mega_batches + 1, int(cumulative[-1])
    return [0, *(_nearest(cumulative, total * share // shares) for share in range(1, shares)), len(words)]


def _cumulative(words: np.ndarray) -> np.ndarray:
    """Return the words before each passage, and at the end the words of all passages."""
    found = np.zeros(len(words) + 1, np.int64)
    np.cumsum(words, dtype=np.int64, out=found[1:])
    return found


def _nearest(cumulative: np.ndarray, target: int) -> int:
    """Return the number of passages whose words together are nearest to `target`."""
    after = min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1)
    if after > 0 and target - cumulative[after - 1] <= cumulative[after] - target:
        return after - 1
    return after

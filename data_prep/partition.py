"""The partition (docs/design.md): cut documents into passages, order them by seed, divide them into mega-batches.

Everything here is arithmetic on words. Nothing reads or writes a file.
"""

import hashlib
import itertools
import re
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError

MIN_MEGA_BATCH_WORDS = 1000
"""In smaller mega-batches, the 1% by which they may differ would be less than ten words."""

# Each match ends where the next paragraph, line or word begins, so that the parts, joined, are the text.
PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+")
LINE_END = re.compile(r"\n")
WORD_END = re.compile(r"(?<=\S)\s+")


class Plan(NamedTuple):
    """The sizes of splits and passages, in words."""

    valid_words: int
    """Words of the validation set."""
    mega_batch_words: int
    """Words of each mega-batch and of the test set."""
    passage_words: int
    """Approximate length of the passages of a long document."""
    limit_words: int
    """1% of a mega-batch: longer documents are cut."""


def default_valid_words(total_words: int) -> int:
    """Return the default size of the validation set."""
    return max(1, min(500_000, total_words // 100))


def default_passage_words(mega_batch_words: int) -> int:
    """Return the default length of a passage."""
    return min(2000, mega_batch_words // 500)


def make_plan(total_words: int, num_mega_batches: int, valid_words: int | None, passage_words: int | None) -> Plan:
    """Return the sizes of the splits of a new stream.

    Args:
        total_words: words of all documents.
        num_mega_batches: B.
        valid_words: words of the validation set; None: the default.
        passage_words: words of a passage; None: the default.

    Raises:
        PrepError: there is too little text, or `passage_words` is too large.
    """
    if valid_words is None:
        valid_words = default_valid_words(total_words)
    shares = num_mega_batches + 1  # the last one is the test set
    needed_words = valid_words + shares * MIN_MEGA_BATCH_WORDS
    if total_words < needed_words:
        raise PrepError(
            f"too little text: found {total_words:,} words, but {num_mega_batches} mega-batches and a test set "
            f"(at least {MIN_MEGA_BATCH_WORDS:,} words each) with {valid_words:,} validation words need at least "
            f"{needed_words:,}. Add sources, or lower --mega-batches or --valid-words."
        )
    mega_batch_words = (total_words - valid_words) // shares
    limit_words = mega_batch_words // 100
    if passage_words is None:
        passage_words = default_passage_words(mega_batch_words)
    if passage_words > limit_words:
        raise PrepError(
            f"passage_words={passage_words} is more than 1% of a mega-batch ({mega_batch_words:,} words), so "
            f"mega-batches could not come out equal. Give --passage-words at most {limit_words}."
        )
    return Plan(valid_words, mega_batch_words, passage_words, limit_words)


def extension_plan(total_words: int, num_mega_batches: int, passage_words: int | None) -> Plan:
    """Return the sizes of mega-batches that extend a stream. They get no validation set and no test set.

    See `make_plan` for the arguments.

    Raises:
        PrepError: there is too little text, or `passage_words` is too large.
    """
    needed_words = num_mega_batches * MIN_MEGA_BATCH_WORDS
    if total_words < needed_words:
        raise PrepError(
            f"too little text: {total_words:,} new words are left, but {num_mega_batches} mega-batches need at least "
            f"{needed_words:,}. Wait for more, or add sources."
        )
    mega_batch_words = total_words // num_mega_batches
    limit_words = mega_batch_words // 100
    if passage_words is not None and passage_words > limit_words:
        raise PrepError(f"passage_words={passage_words} is more than 1% of a mega-batch: give at most {limit_words}.")
    return Plan(0, mega_batch_words, passage_words or default_passage_words(mega_batch_words), limit_words)


def cut_document(text: str, passage_words: int, limit_words: int) -> list[str]:
    """Cut a document longer than `limit_words` into passages. Joined, they are the document, character by character.

    The document is cut at paragraph ends. Only a paragraph that is itself longer than the limit is cut at line ends,
    and only a line longer than the limit is cut between words. Neighbouring parts are joined up to `passage_words`.
    """
    if _num_words(text) <= limit_words:
        return [text]
    parts = []
    for paragraph in _split_after(PARAGRAPH_END, text):
        if _num_words(paragraph) <= limit_words:
            parts.append(paragraph)
            continue
        for line in _split_after(LINE_END, paragraph):
            parts += [line] if _num_words(line) <= limit_words else _split_after(WORD_END, line)
    return _join_up_to(passage_words, parts)


def _num_words(text: str) -> int:
    return len(text.split())


def _split_after(pattern: re.Pattern, text: str) -> list[str]:
    """Split a text at the end of each match."""
    ends = [match.end() for match in pattern.finditer(text)]
    bounds = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _join_up_to(passage_words: int, parts: list[str]) -> list[str]:
    """Join neighbours while they have at most `passage_words` words. A part without words never stays alone."""
    passages: list[str] = []
    current: list[str] = []
    current_words = 0
    for part in parts:
        num_words = _num_words(part)
        if current_words and num_words and current_words + num_words > passage_words:
            passages.append("".join(current))
            current, current_words = [], 0
        current.append(part)
        current_words += num_words
    return [*passages, "".join(current)]


def order_key(seed: int, identity: bytes, passage_number: int) -> bytes:
    """Return hash(seed, identity, passage number), 16 bytes. Passages are written in the order of their keys."""
    digest = hashlib.sha256(f"{seed} {passage_number} ".encode() + identity)
    return digest.digest()[:16]


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

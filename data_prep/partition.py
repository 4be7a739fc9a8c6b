"""The partition of DESIGN section 4: passages out of documents, their seeded order, the cuts between mega-batches.

Everything here is arithmetic on words; nothing reads or writes a file.
"""

import hashlib
import itertools
import re
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError

MIN_MEGA_BATCH_WORDS = 1000
"""Below this, the 1% by which mega-batches may differ would be less than ten words."""

# Each match ends where the next paragraph, line or word begins, so that the pieces joined are the text.
PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+")
LINE_END = re.compile(r"\n")
WORD_END = re.compile(r"(?<=\S)\s+")


class Plan(NamedTuple):
    """How much text goes where. All counts are in words."""

    valid_words: int
    mega_batch_words: int
    """The equal share of each mega-batch and of the test set."""
    passage_words: int
    """How long the passages of a long document become, about."""
    limit_words: int
    """1% of a mega-batch: a longer document is cut."""


def default_valid_words(total_words: int) -> int:
    return max(1, min(500_000, total_words // 100))


def default_passage_words(mega_batch_words: int) -> int:
    return min(2000, mega_batch_words // 500)


def make_plan(total_words: int, num_mega_batches: int, valid_words: int | None, passage_words: int | None) -> Plan:
    """Resolve the defaults. Raises PrepError if there is too little text, or passages are set too long."""
    if valid_words is None:
        valid_words = default_valid_words(total_words)
    shares = num_mega_batches + 1  # the last one is the test set
    wanted_words = valid_words + shares * MIN_MEGA_BATCH_WORDS
    if total_words < wanted_words:
        raise PrepError(
            f"too little text: found {total_words:,} words, but {num_mega_batches} mega-batches and a test set "
            f"(at least {MIN_MEGA_BATCH_WORDS:,} words each) with {valid_words:,} validation words want at least "
            f"{wanted_words:,}. Add sources, or lower --mega-batches or --valid-words."
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
    """As `make_plan`, of mega-batches that are added to a stream: no validation set, no test set."""
    wanted_words = num_mega_batches * MIN_MEGA_BATCH_WORDS
    if total_words < wanted_words:
        raise PrepError(
            f"too little text: {total_words:,} new words are left, but {num_mega_batches} mega-batches want at least "
            f"{wanted_words:,}. Wait for more, or add sources."
        )
    mega_batch_words = total_words // num_mega_batches
    limit_words = mega_batch_words // 100
    if passage_words is not None and passage_words > limit_words:
        raise PrepError(f"passage_words={passage_words} is more than 1% of a mega-batch: give at most {limit_words}.")
    return Plan(0, mega_batch_words, passage_words or default_passage_words(mega_batch_words), limit_words)


def cut_document(text: str, passage_words: int, limit_words: int) -> list[str]:
    """Cut a document longer than `limit_words` into passages; joined they are the document, character by character.

    It is cut at paragraph ends. Only a paragraph that is itself longer than the limit is cut at line ends, and
    only a line longer than the limit between words. Neighbouring pieces are joined up to `passage_words`.
    """
    if _num_words(text) <= limit_words:
        return [text]
    pieces = []
    for paragraph in _split_after(PARAGRAPH_END, text):
        if _num_words(paragraph) <= limit_words:
            pieces.append(paragraph)
            continue
        for line in _split_after(LINE_END, paragraph):
            pieces += [line] if _num_words(line) <= limit_words else _split_after(WORD_END, line)
    return _join_up_to(passage_words, pieces)


def _num_words(text: str) -> int:
    return len(text.split())


def _split_after(pattern: re.Pattern, text: str) -> list[str]:
    ends = [match.end() for match in pattern.finditer(text)]
    bounds = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _join_up_to(passage_words: int, pieces: list[str]) -> list[str]:
    """Join neighbours as long as they stay within `passage_words`. Pieces without a word never stand alone."""
    passages: list[str] = []
    current: list[str] = []
    current_words = 0
    for piece in pieces:
        num_words = _num_words(piece)
        if current_words and num_words and current_words + num_words > passage_words:
            passages.append("".join(current))
            current, current_words = [], 0
        current.append(piece)
        current_words += num_words
    return [*passages, "".join(current)]


def order_key(seed: int, identity: bytes, passage_number: int) -> bytes:
    """hash(seed, identity, passage number), 16 bytes: passages are laid out in the order of their keys."""
    digest = hashlib.sha256(f"{seed} {passage_number} ".encode() + identity)
    return digest.digest()[:16]


def by_key(entries: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
    """Places of entries (of `which` of them) in the order of keys. Equal keys mean equal text: no order can show."""
    keys = entries["key"] if which is None else entries["key"][which]
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    return order if which is None else which[order]


def mixed(passages: np.ndarray, kinds: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
    """The order of the stream: of each kind of source the order of keys, and in any stretch the kinds in proportion.

    A passage stands where its middle lies among the words of its kind, as a fraction. With one kind that is the
    order of keys.

    Args:
        passages: ENTRY of each.
        kinds: the kind of each source, so that text may lie in one folder or in several.
        which: places in `passages`; None: all.

    Returns:
        Places in `passages`: nothing is copied but numbers, at most 128 bytes a passage with its entry.
    """
    order = by_key(passages, which)
    kind_of = kinds.astype(np.int8)[passages["source"][order]]
    words, middle = passages["num_words"][order], np.empty(len(order))
    for kind in np.unique(kind_of):
        of_kind = kind_of == kind
        mine = words[of_kind].astype(np.float64)
        middle[of_kind] = (np.cumsum(mine) - mine / 2) / max(1.0, mine.sum())
    return order[np.argsort(middle, kind="stable")]  # stable: equal places in the order of keys


def share_out(words: dict[int, int], shares: dict[int, float | None]) -> dict[int, int]:
    """How many words to take of each source, so that their shares are as wanted and as much as possible is used.

    Sources without a share divide what is left in proportion to what they have.

    Raises:
        PrepError: the shares come to more than 1, or to less although each source has one.
    """
    given = {source: share for source, share in shares.items() if share is not None}
    if not given:
        return dict(words)
    rest, total = sum(words[source] for source in shares if source not in given), sum(given.values())
    if total > 1 + 1e-9 or (len(given) == len(shares) and total < 1 - 1e-9):
        raise PrepError(
            f"the shares of the sources come to {total:g}, and must come to 1 (or less, for the other sources to take "
            "what is left). Give other shares after the @."
        )
    if len(given) < len(shares) and total > 1 - 1e-9:
        raise PrepError("the shares of some sources come to 1, and leave nothing for the others: leave those out.")
    wanted = {
        source: given[source] if source in given else (1 - total) * words[source] / max(1, rest) for source in shares
    }
    most = min(words[source] / wanted[source] for source in shares if wanted[source] > 0)
    return {source: min(words[source], round(wanted[source] * most)) for source in shares}


def keep_words(passages: np.ndarray, wanted: dict[int, int]) -> np.ndarray:
    """The first passages of each source, in the order of keys, up to so many words."""
    kept = np.ones(len(passages), bool)
    for source, num_words in wanted.items():
        which = by_key(passages, np.flatnonzero(passages["source"] == source))
        kept[which[_nearest(_cumulative(passages["num_words"][which]), num_words) :]] = False
    return passages[kept]


class Layout(NamedTuple):
    """In which order passages are written, and where the splits begin and end among them."""

    order: np.ndarray
    """Places in the array of passages."""
    cuts: list[int]
    """[0, end of valid, end of mega-batch 1, .., end of test]."""


def equal_layout(
    passages: np.ndarray, kinds: np.ndarray, valid_words: int, num_mega_batches: int, valid_kind: int | None
) -> Layout:
    """Mega-batches of equal words, sources in proportion; the validation set before them, of one kind where asked."""
    words = passages["num_words"]
    if valid_kind is None:
        order = mixed(passages, kinds)
        return Layout(order, cut_points(words[order], valid_words, num_mega_batches))
    may = kinds[passages["source"]] == valid_kind
    candidates = mixed(passages, kinds, np.flatnonzero(may))
    found = int(words[candidates].sum(dtype=np.int64))
    if found < valid_words:
        raise PrepError(
            f"the kind of --valid-source has {found:,} words, and the validation set wants {valid_words:,}: give fewer "
            "--valid-words, or more of that kind."
        )
    end = max(1, _nearest(_cumulative(words[candidates]), valid_words))
    rest = mixed(passages, kinds, np.concatenate([candidates[end:], np.flatnonzero(~may)]))
    cuts = [0, *(end + cut for cut in equal_cuts(words[rest], num_mega_batches))]
    return Layout(np.concatenate([candidates[:end], rest]), cuts)


def extension_layout(passages: np.ndarray, kinds: np.ndarray, num_mega_batches: int) -> Layout:
    """Mega-batches of equal words, sources in proportion, and no other split."""
    order = mixed(passages, kinds)
    cuts = equal_cuts(passages["num_words"][order], num_mega_batches - 1)  # its last share is a mega-batch here
    return Layout(order, cuts)


def drifting_layout(
    passages: np.ndarray, kinds: np.ndarray, valid_words: int, num_mega_batches: int, valid_kind: int | None
) -> Layout:
    """One mega-batch a group, in their order, whatever their sizes.

    The test set takes 1 / (B + 1) of the words of every group, the validation set its share of the words of each.
    """
    words = passages["num_words"]
    may = np.ones(len(passages), bool)
    if valid_kind is not None:
        may = kinds[passages["source"]] == valid_kind
    valid_fraction = valid_words / max(1, int(words[may].sum(dtype=np.int64)))
    if valid_fraction > 1:
        raise PrepError(f"--valid-source has fewer words than the {valid_words:,} of the validation set.")
    valid, batches, test = [], [], []
    for group in range(num_mega_batches):
        of_group = passages["group"] == group
        candidates = mixed(passages, kinds, np.flatnonzero(of_group & may))
        cumulative = _cumulative(words[candidates])
        end = _nearest(cumulative, round(valid_fraction * int(cumulative[-1])))
        valid.append(candidates[:end])
        rest = mixed(passages, kinds, np.concatenate([candidates[end:], np.flatnonzero(of_group & ~may)]))
        cumulative = _cumulative(words[rest])
        cut = _nearest(cumulative, int(cumulative[-1]) * num_mega_batches // (num_mega_batches + 1))
        batches.append(rest[:cut])
        test.append(rest[cut:])
    splits = [np.concatenate(valid), *batches, np.concatenate(test)]
    for name, split in zip(split_order(num_mega_batches), splits, strict=True):
        found = int(words[split].sum(dtype=np.int64))
        if found < (1 if name == "valid" else MIN_MEGA_BATCH_WORDS):
            raise PrepError(
                f"{name} would have {found:,} words, and {MIN_MEGA_BATCH_WORDS:,} are wanted. "
                "Join snapshots, or add files to this one."
            )
    return Layout(np.concatenate(splits), [0, *np.cumsum([len(split) for split in splits]).tolist()])


def split_order(num_mega_batches: int) -> list[str]:
    """The splits in the order in which `cut_points` cuts them off."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def cut_points(words: np.ndarray, valid_words: int, num_mega_batches: int) -> list[int]:
    """Where splits begin in passages of so many `words`: [0, end of valid, end of mega-batch 1, .., end of test].

    The validation set comes first. Each cut falls at the passage end nearest to its share, so that a mega-batch
    is at most the longest passage away from an equal share.
    """
    valid_end = max(1, _nearest(_cumulative(words), valid_words))  # never an empty validation set
    return [0, *(valid_end + cut for cut in equal_cuts(words[valid_end:], num_mega_batches))]


def equal_cuts(words: np.ndarray, num_mega_batches: int) -> list[int]:
    """[0, end of mega-batch 1, .., end of test]: each cut at the passage end nearest to its share."""
    cumulative = _cumulative(words)
    shares, total = num_mega_batches + 1, int(cumulative[-1])
    return [0, *(_nearest(cumulative, total * share // shares) for share in range(1, shares)), len(words)]


def _cumulative(words: np.ndarray) -> np.ndarray:
    """Words before each passage, and in the end all."""
    found = np.zeros(len(words) + 1, np.int64)
    np.cumsum(words, dtype=np.int64, out=found[1:])
    return found


def _nearest(cumulative: np.ndarray, target: int) -> int:
    after = min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1)
    if after > 0 and target - cumulative[after - 1] <= cumulative[after] - target:
        return after - 1
    return after

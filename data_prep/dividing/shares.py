"""Choose which text a stream uses, so that each source provides its share of the words (--source ...@SHARE).

The functions compute with index entries (`index.ENTRY`) only, and choose passages or documents by their keys (see
`layout`).
"""

from collections.abc import Sequence

import numpy as np

from data_prep.accounts import count_documents, removed_rows
from data_prep.dividing.layout import by_key, mixed_bits, nearest_cut
from data_prep.errors import Unworkable
from data_prep.reading.index import halves, sortable
from data_prep.reading.read import Spooled
from data_prep.sources import Files

_ROUNDS = 100
"""Maximum number of times that `choose` goes through the documents."""


def check_shares(shares: Sequence[float | None]) -> None:
    """Raise Unworkable if the shares of the sources are impossible. The share is None for a source without one.

    They are impossible if their sum is more than 1; if it is less than 1 and every source has a share; or if it is 1
    and a source has no share.
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


def words_by_source(entries: np.ndarray, num_sources: int) -> dict[int, int]:
    """Return the number of words of each source, by source index. `entries` are of documents or passages."""
    # Float64 sums, which `bincount` computes, are exact up to 2^53 words.
    counts = np.bincount(entries["source"], entries["num_words"].astype(np.float64), num_sources)
    return dict(enumerate(counts.astype(np.int64).tolist()))


def wanted_words_of(files: Files, words: dict[int, int]) -> dict[int, int]:
    """Return how many words of each source to use so that every source provides its share.

    Args:
        files: the files of each source.
        words: number of words of each source, by source index.

    Raises:
        Unworkable: if the shares are impossible, or if a source with a share has no text left.
    """
    for number, source in enumerate(files):
        if source.share is not None and not words[number]:
            raise Unworkable(
                f"{source.name} should provide {source.share:g} of the words, but none of its text is left: cleaning "
                "removed all of its documents, or they are copies of other documents. Remove the source, or change "
                "--language, --gopher or --duplicates."
            )
    return share_out(words, {number: source.share for number, source in enumerate(files)})


def share_out(words: dict[int, int], shares: dict[int, float | None]) -> dict[int, int]:
    """Return how many words of each source to use. The total is as large as the given shares allow.

    The sources without a share provide what the shares leave, in proportion to their numbers of words.

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
        which = by_key(passages, np.flatnonzero(passages["source"] == source), _purpose(number))
        kept[which[nearest_cut(passages["num_words"][which], num_words) :]] = False
    return kept


def keep_documents(passages: np.ndarray, wanted: dict[int, int], number: int, seed: int) -> np.ndarray:
    """Do the same as `keep_words`, but keep all passages of a document, or none. `seed` is the seed of the stream."""
    _, first, of_passage = np.unique(sortable(passages["document"]), return_index=True, return_inverse=True)
    num_words = np.bincount(of_passage, passages["num_words"].astype(np.float64)).astype(np.int64)
    # The sort key of a passage cannot be used: a document with many passages would have a small one more often.
    keys = mixed_bits(halves(passages["document"][first]).astype(np.uint64), seed)
    entries = np.empty(len(first), [("key", "V16")])
    entries["key"] = np.ascontiguousarray(keys.astype(">u8")).view("V16").reshape(-1)
    is_kept = np.zeros(len(first), bool)
    for source, wanted_words in wanted.items():
        order = by_key(entries, np.flatnonzero(passages["source"][first] == source), _purpose(number))
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


def _purpose(number: int) -> str:
    """Return the purpose (see `layout.by_key`) of the choice of what a share keeps in extension `number`.

    Text that a share left out can be read again for an extension, and then another share can choose among it and new
    text. With the same random numbers, it would be left out again, and new text be used.
    """
    return f"share {number}"


def share_rows(spooled: Spooled, kept: np.ndarray, dropped: np.ndarray) -> list[dict]:
    """Return the rows of the table "cleaning" in stream.json about the text that the shares leave out.

    Args:
        spooled: the documents that were read.
        kept, dropped: the index entries (`index.ENTRY`) of the passages that are used, and of those that are left out.
    """

    def num_left_out(of_source: np.ndarray) -> int:
        """Return the number of documents of a source of which no passage is used."""
        used = kept["document"][kept["source"] == of_source["source"][0]]
        return count_documents(np.concatenate([used, of_source["document"]])) - count_documents(used)

    return removed_rows("share", spooled.names, dropped, num_left_out)

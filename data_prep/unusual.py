"""Compare the mega-batches that an extension has added with earlier ones, to notice text that is wrong.

The quantities are cheap: numbers in stream.json, and a sample of the tokens of each mega-batch. Only pairs of
neighbouring tokens (bigrams) distinguish text from words in random order.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dividing.chronological import LATE
from fairseq_alma.core.stream_folder import split_prefix

RECENT = 4
"""Number of preceding mega-batches with which a new one is compared."""
SAMPLE_TOKENS = 250_000
"""Number of tokens at the beginning of a mega-batch that are sampled. Its passages are in random order."""
NEW_PAIRS = "new pairs of neighbouring tokens"
FACTORS = {"words": 3.0, "tokens per word": 1.3, NEW_PAIRS: 1.4}
"""Factor by which a quantity may lie outside the range of the earlier mega-batches."""
LEAST_NEW_PAIRS = 0.1
"""A share of new pairs below this value times the factor is never unusual."""
REMOVED_SHARE = 0.2
"""By how much the share of the words that a call removed may be larger than the median of earlier calls."""
_NOT_CLEANING = ("share", LATE)
"""Steps of the table "cleaning" that say what the user left out on purpose."""


def unusual(out: Path, stream: Mapping[str, Any]) -> list[str]:
    """Return what is unusual in the mega-batches of the last extension, as messages; [] if nothing is.

    Args:
        out: the stream folder.
        stream: the content of its stream.json. It must have an extension.
    """
    first, last = stream["extensions"][-1]["mega_batches"]
    numbers = range(max(1, first - RECENT), first)
    before = [_quantities(stream, t) for t in numbers]
    pairs = [_pairs(out, stream, t) for t in numbers]
    if len(pairs) == 1:
        pairs = np.array_split(pairs[0], 2)
    # Each earlier mega-batch is compared with all others, and a new one with the same number.
    shares = [_new_pairs(one, pairs[:number] + pairs[number + 1 :]) for number, one in enumerate(pairs)]
    found = []
    for t in range(first, last + 1):
        now = _quantities(stream, t)
        for name in now:
            found += _difference(t, name, now[name], [one[name] for one in before])
        found += _difference(t, NEW_PAIRS, _new_pairs(_pairs(out, stream, t), pairs[1:]), shares)
    *calls, new = [_removed_share(call) for call in (stream, *stream["extensions"])]
    usual = float(np.median(calls[-RECENT:]))
    if new > usual + REMOVED_SHARE:
        found.append(f"{new:.0%} of the words were removed as copies or by the cleaning (before: {usual:.0%})")
    return found


def _quantities(stream: Mapping[str, Any], t: int) -> dict[str, float]:
    """Return the quantities of mega-batch t that stream.json contains."""
    split = stream["splits"][f"mega_batch_{t}"]
    return {"words": float(split["words"]), "tokens per word": split["tokens"] / max(1, split["words"])}


def _difference(t: int, name: str, now: float, before: Sequence[float]) -> list[str]:
    """Return a message with a quantity of mega-batch t and its earlier median if it is unusual; otherwise []."""
    # Few new pairs mean that the text repeats earlier text, which is no reason for a warning.
    low, high = (0, max(max(before), LEAST_NEW_PAIRS)) if name == NEW_PAIRS else (min(before), max(before))
    if low / FACTORS[name] <= now <= high * FACTORS[name]:
        return []
    texts = [f"{value:.1%}" if name == NEW_PAIRS else f"{value:,.4g}" for value in (now, float(np.median(before)))]
    return [f"mega-batch {t}: {texts[0]} {name} (before: {texts[1]})"]


def _pairs(out: Path, stream: Mapping[str, Any], t: int) -> np.ndarray:
    """Return a number for each pair of neighbouring tokens in the sample of mega-batch t, int64 [n]."""
    path = split_prefix(out, f"mega_batch_{t}").with_suffix(".bin")
    tokens = np.array(np.memmap(path, stream["dtype"], "r")[:SAMPLE_TOKENS], np.int64)
    return tokens[:-1] * stream["dictionary_size"] + tokens[1:]


def _new_pairs(pairs: np.ndarray, known: Sequence[np.ndarray]) -> float:
    """Return the share of pairs of tokens that are not among the known ones."""
    return 1 - float(np.isin(pairs, np.unique(np.concatenate(known))).mean())


def _removed_share(call: Mapping[str, Any]) -> float:
    """Return the share of the words that a call of alma-prep has read and not used."""
    removed = sum(row["words"] for row in call["cleaning"] if row["step"] not in _NOT_CLEANING)
    return removed / max(1, sum(source["words"] for source in call["sources"]))

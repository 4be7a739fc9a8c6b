"""Each part of a stream has the mix of sources that was asked for, within sampling error, in many random cases.

The bounds follow from the number of cases: a correct implementation exceeds one of them with probability below 1e-6,
whatever the random numbers are.
"""

import math

import numpy as np
import pytest

from data_prep.dividing.chronological import HeldOut, chronological_layout
from data_prep.dividing.layout import (
    by_key,
    drifting_layout,
    equal_layout,
    extension_layout,
    mixed,
    strata_of,
)
from data_prep.dividing.shares import choose, keep_documents, keep_words, wanted_words_of, words_by_source
from data_prep.reading.index import ENTRY
from data_prep.sources import Source

LAYOUTS = ("equal", "drifting", "extension", "chronological")
NUM_CASES = 100


def chi_square_bound(count: int, log_probability: float = math.log(1e-6)) -> float:
    """Return what a sum of `count` squares of standard normal numbers exceeds with at most this probability.

    The bound is that of Laurent and Massart (2000). It also holds if each square is a mean of dependent squares.
    """
    return count + 2 * math.sqrt(-count * log_probability) - 2 * log_probability


def random_bytes(rng, count):
    """Return random keys or hashes, 16 bytes each."""
    return np.frombuffer(rng.bytes(16 * count), "V16")


def random_corpus(rng, num_passages_of_document):
    """Return 2 to 5 sources of two kinds, most with shares, and their passages. Their documents differ in length."""
    num_sources = int(rng.integers(2, 6))
    parts = rng.dirichlet(np.full(num_sources, 3))
    shares = [f"{part:.6f}" if rng.random() < 0.7 else None for part in parts]
    if None not in shares:
        shares[-1] = None
    names = [(str(rng.choice(["text", "books"])), f"folder_{number}") for number in range(num_sources)]
    files = {Source(*name, share and float(share)): [] for name, share in zip(names, shares, strict=True)}
    entries = []
    for source in range(num_sources):
        count = int(rng.integers(150, 1500))
        found = np.zeros(count, ENTRY)
        found["document"] = random_bytes(rng, count)
        found["group"], found["source"] = rng.integers(0, 3, count), source
        found = np.repeat(found, rng.integers(1, num_passages_of_document + 1, count))
        found["num_words"] = 1 + rng.gamma(2, rng.uniform(5, 100), len(found))
        found["num_bytes"] = found["num_words"] * rng.uniform(3, 12)
        found["key"] = random_bytes(rng, len(found))
        first = np.flatnonzero(found["document"][1:] != found["document"][:-1]) + 1
        found["passage"] = np.arange(len(found)) - np.repeat([0, *first], np.diff([0, *first, len(found)]))
        entries.append(found)
    return files, np.concatenate(entries)


def laid_out(layout, files, passages, seed):
    """Return the passages that shares keep, and the passages of each split."""
    by_documents = layout == "chronological"
    wanted = wanted_words_of(files, words_by_source(passages, len(files)))
    keep = (lambda *given: keep_documents(*given, seed)) if by_documents else keep_words
    passages = passages[keep(passages, wanted, 0)]
    strata, _ = strata_of(files, None)
    valid_words = int(passages["num_words"].sum()) // 20
    if layout == "chronological":
        dates = passages["group"].astype(np.int64)
        found, _ = chronological_layout(passages, dates, strata, HeldOut(0.05, 0.1), 3)
    elif layout == "extension":
        found = extension_layout(passages, strata, 3, 1)
    else:
        make_layout = equal_layout if layout == "equal" else drifting_layout
        found = make_layout(passages, strata, valid_words, 3, None)
    return wanted, passages, np.split(found.order, found.cuts[1:-1])


def squared_deviations(sizes, source, unit, splits):
    """Return the squared deviations of the sources' parts of each split from their parts of the stream.

    They are in units of the variance that choosing `unit`s, passages or documents, at random would have, plus that of
    rounding to a whole unit.
    """
    deviations = []
    size_of_unit = np.bincount(unit, sizes)
    for number in np.unique(source):
        part = sizes[source == number].sum() / sizes.sum()
        excess = sizes * ((source == number) - part)
        variance = (np.bincount(unit, excess) ** 2).sum()
        for split in splits:
            fraction = sizes[split].sum() / sizes.sum()
            deviations.append(excess[split].sum() ** 2 / (fraction * variance + size_of_unit.max() ** 2))
    return deviations


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_split_has_the_mix_that_was_asked_for(layout):
    rng = np.random.default_rng(LAYOUTS.index(layout))
    total = {"num_words": 0.0, "num_bytes": 0.0}
    for case in range(NUM_CASES):
        files, passages = random_corpus(rng, num_passages_of_document=3 if layout not in ("equal", "drifting") else 1)
        wanted, kept, splits = laid_out(layout, files, passages, case)
        by_documents = layout == "chronological"
        _, of_document = np.unique(kept["document"].view("S16"), return_inverse=True)
        unit = of_document if by_documents else np.arange(len(kept))
        found = np.bincount(kept["source"], kept["num_words"])
        longest = np.bincount(unit, kept["num_words"]).max()
        assert all(abs(found[source] - wanted[source]) <= longest for source in wanted)
        for measure in total:
            sizes = kept[measure].astype(float)
            total[measure] += np.mean(squared_deviations(sizes, kept["source"], unit, splits))
    assert max(total.values()) < chi_square_bound(NUM_CASES), total


def test_sources_of_one_kind_with_shares_keep_them_in_each_split():
    """The first 500 of 2000 passages by one key, and then sorted by this key, would all be at the beginning."""
    rng = np.random.default_rng(0)
    passages = np.zeros(2500, ENTRY)
    passages["num_words"], passages["source"] = 10, [0] * 2000 + [1] * 500
    passages["key"] = passages["document"] = random_bytes(rng, len(passages))
    files = {Source("text", "a", 0.5): [], Source("text", "b", 0.5): []}
    _, kept, splits = laid_out("equal", files, passages, 0)
    # 50 passages for validation, and a quarter of the other 950 for each mega-batch and the test.
    counts = np.array([np.bincount(kept["source"][split]) for split in splits])
    assert np.abs(counts - [[25, 25], *[[118.75, 118.75]] * 4]).max() < 2


def test_a_small_source_is_in_the_held_out_text_of_small_snapshots_as_often_as_asked():
    """20 snapshots, each with 4 passages of the small source: 4% of them is 0.16, which always rounds to none."""
    found = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        passages = np.zeros(20 * 104, ENTRY)
        passages["num_words"], passages["group"] = 100, np.repeat(np.arange(20), 104)
        passages["source"] = np.tile([0] * 100 + [1] * 4, 20)
        passages["key"] = passages["document"] = random_bytes(rng, len(passages))
        given = (passages, np.arange(2), 8320, 20, None)
        layout = drifting_layout(*given)
        found.append(np.count_nonzero(passages["source"][layout.order[: layout.cuts[1]]]))
    # A snapshot gives 0 or 1 with a variance of 0.16 x 0.84. 4.9 standard deviations: probability 1e-6.
    assert abs(np.mean(found) - 20 * 0.16) < 4.9 * math.sqrt(20 * 0.16 * 0.84 / 100)


def test_text_that_a_share_left_out_is_as_likely_in_an_extension_as_new_text():
    rng = np.random.default_rng(0)
    passages = np.zeros(20_000, ENTRY)
    passages["num_words"] = 10
    passages["key"] = passages["document"] = random_bytes(rng, len(passages))
    old, new = passages[:10_000], passages[10_000:]
    left_out = old[~keep_words(old, {0: 50_000}, 0)]
    both = np.concatenate([left_out, new])
    is_old = np.arange(len(both)) < len(left_out)
    num_words = 10 * len(both) // 2
    for kept in (keep_words(both, {0: num_words}, 1), keep_documents(both, {0: num_words}, 1, 0)):
        assert kept.sum() == len(both) // 2
        # 2500 of the 5000 are expected, with a variance of 5000 / 4 x 2 / 3. 4.9 standard deviations: probability 1e-6.
        assert abs(int((kept & is_old).sum()) - 2500) < 4.9 * math.sqrt(5000 / 4 * 2 / 3)
    # And they are not later than new text in the order of the stream.
    places = np.empty(len(both))
    places[mixed(both, np.array([0]))] = np.arange(len(both)) / len(both)
    assert abs(places[is_old].mean() - 1 / 2) < 4.9 * math.sqrt(2 / 3 / 12 / 5000)


def test_the_beginnings_of_documents_are_everywhere_in_the_splits_of_a_period():
    """Held-out documents are chosen by the key of their first passage: those held out would have the smallest keys."""
    rng = np.random.default_rng(0)
    passages = np.zeros(20_000, ENTRY)
    passages["num_words"], passages["passage"] = 50, np.tile(np.arange(10), 2000)
    passages["key"] = random_bytes(rng, len(passages))
    passages["document"] = np.repeat(random_bytes(rng, 2000), 10)
    layout, _ = chronological_layout(passages, np.zeros(20_000, np.int64), np.array([0]), HeldOut(0.1, 0.2), 1)
    for split in np.split(layout.order, layout.cuts[1:-1]):
        is_first = passages["passage"][split] == 0
        expected = len(split) / 100  # of the beginnings, a tenth of the passages, in a tenth of the split
        counts = [part.sum() for part in np.array_split(is_first, 10)]
        assert sum((count - expected) ** 2 / expected for count in counts) < chi_square_bound(9)


def test_orders_for_different_purposes_are_independent():
    rng = np.random.default_rng(0)
    entries = np.zeros(10_000, ENTRY)
    entries["key"] = random_bytes(rng, len(entries))
    orders = [by_key(entries, None, purpose) for purpose in (None, "share 0", "share 1")]
    assert orders[0].tolist() == sorted(range(10_000), key=lambda n: entries["key"][n].tobytes())
    tenths = np.empty((3, 10_000), int)
    for tenth_of, order in zip(tenths, orders, strict=True):
        tenth_of[order] = np.arange(10_000) // 1000
    for one, other in ((0, 1), (0, 2), (1, 2)):
        counts = np.bincount(10 * tenths[one] + tenths[other], minlength=100)
        assert ((counts - 100) ** 2 / 100).sum() < chi_square_bound(81)


def test_documents_are_held_out_whatever_their_length_except_one():
    """About 15 of 300 documents are chosen. Filling what is missing with short ones would choose 3 short ones more."""
    rng = np.random.default_rng(0)
    excess = []
    for _ in range(400):
        words = rng.lognormal(5, 1, 300).astype(int) + 1
        target = int(words.sum()) // 20
        chosen = choose(words, target)
        assert abs(int(words[chosen].sum()) - target) <= target / 20
        excess.append(np.count_nonzero(words[chosen] < np.quantile(words, 0.25)) - 75 / 20)
    # One document may be chosen for its length. 4.9 standard deviations: probability 1e-6.
    assert abs(np.mean(excess)) < 1 + 4.9 * np.std(excess) / math.sqrt(400)

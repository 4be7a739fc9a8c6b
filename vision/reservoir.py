"""Choose the examples of earlier mega-batches that a limited memory keeps for replay.

Each example gets a random number when it arrives, and the memory keeps those with the smallest numbers. So at any time
it contains a random sample of all examples that have arrived, as reservoir sampling does (Vitter 1985). An example that
was dropped does not come back, with one exception: the memory is divided between training and validation examples in
proportion to their numbers, and if rounding changes this division by one, one example can come back. The sample follows
from the seeds and the mega-batches, so a run that continues after an interruption has the same one.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch

from fairseq_alma.core.stream import MegaBatch
from vision.datasets import Selection
from vision.seeds import generator
from vision.stream import Arrival


def num_kept_examples(past: Sequence[MegaBatch], limit: int | None) -> int:
    """Return the number of examples of earlier mega-batches that are kept, per seed.

    Args:
        past: the earlier mega-batches.
        limit: the setting `replay_memory`. None: all examples are kept.
    """
    count = sum(sum(one.counts.values()) for one in past)
    return count if limit is None else min(count, limit)


def kept_examples(past: Sequence[MegaBatch], num_kept: int, seeds: Sequence[int]) -> tuple[MegaBatch, ...]:
    """Return the examples of earlier mega-batches that are kept, as one mega-batch.

    Training and validation examples count together, and have the same shares of the memory as of the mega-batches. If
    all examples fit, `past` is returned.

    Args:
        past: the earlier mega-batches, in order of arrival. `data` is a list with one `Arrival` per seed.
        num_kept: largest number of examples, per seed.
        seeds: seed of the random numbers, for each seed of the run.
    """
    num_training, num_validation = (
        sum(len(getattr(one.data[0], part)) for one in past) for part in ("training", "validation")
    )
    if num_training + num_validation <= num_kept:
        return tuple(past)
    kept_validation = max(1, round(num_kept * num_validation / (num_training + num_validation)))
    counts = {"training": max(1, num_kept - kept_validation), "validation": kept_validation}
    of_seeds = []
    for number, seed in enumerate(seeds):
        arrivals = [(one.t, one.data[number]) for one in past]
        of_seeds.append(Arrival(*(_smallest(arrivals, part, counts[part], seed) for part in counts)))
    digest = sha256("".join([*(one.digest for one in past), str(num_kept)]).encode()).hexdigest()
    return (MegaBatch(past[-1].t, digest, data=of_seeds, counts=counts),)


def _smallest(arrivals: Sequence[tuple[int, Arrival]], part: str, count: int, seed: int) -> Selection:
    """Return the `count` examples with the smallest random numbers, in order of arrival.

    Args:
        arrivals: number t of each mega-batch, and its examples.
        part: "training" or "validation".
        count: number of examples to return.
        seed: seed of the random numbers.
    """
    selections = [getattr(arrival, part) for _, arrival in arrivals]
    joined = Selection.join(selections)
    assert joined is not None, "the examples of all mega-batches of a stream are selections from the same dataset"
    numbers = torch.cat(
        [
            torch.rand(len(selection), generator=generator(seed, "replay memory", part, t), dtype=torch.float64)
            for (t, _), selection in zip(arrivals, selections, strict=True)
        ]
    )
    return joined.only(numbers.argsort()[:count].sort().values)

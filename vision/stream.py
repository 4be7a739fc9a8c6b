"""A dataset cut into mega-batches: who gets which example, the same for every learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream
from vision.datasets import Examples


@dataclass(frozen=True)
class Arrival:
    """One mega-batch of one seed: examples to train on and to validate on, drawn apart once."""

    training: Examples
    validation: Examples

    @property
    def digest(self) -> str:
        """Names the content."""
        digest = sha256()
        for part in (self.training, self.validation):
            digest.update(f"{len(part)}/".encode())
            digest.update(part.images.numpy().tobytes())
            digest.update(part.labels.numpy().tobytes())
        return digest.hexdigest()


def partition(examples: Examples, num_mega_batches: int, validation_share: float, seed: int) -> list[Arrival]:
    """The examples in random order, cut into B parts that differ by one example at most.

    The order is numpy's RandomState(seed).permutation and the cut its array_split, as in the original code: its
    numbers are promised never to change, and a mega-batch's last examples are those it is validated on.

    Args:
        examples: the training set.
        num_mega_batches: B.
        validation_share: of each mega-batch, rounded down, but one example at least.
        seed: of the order.

    Raises:
        SettingError: some mega-batch would hold fewer than two examples.
    """
    if len(examples) < 2 * num_mega_batches:
        raise SettingError(
            f"mega_batches={num_mega_batches} is too many for {len(examples)} training examples: each mega-batch "
            f"needs two, one to train and one to validate on; give at most {len(examples) // 2}"
        )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(examples)))
    ordered = examples[order]
    arrivals, start = [], 0
    for part in np.array_split(order.numpy(), num_mega_batches):
        end = start + len(part)
        middle = end - max(1, int(len(part) * validation_share))
        # Copies: nothing of one mega-batch can be reached through another.
        arrivals.append(Arrival(*(Examples(ordered.images[a:b].clone(), ordered.labels[a:b].clone())
                                  for a, b in ((start, middle), (middle, end)))))  # fmt: skip
        start = end
    return arrivals


def stacked_stream(streams: Sequence[Sequence[Arrival]]) -> MegaBatchStream:
    """One stream of what arrives for S seeds at a time: mega-batch t holds a list of S arrivals.

    Args:
        streams: the partition of each seed.
    """
    mega_batches = []
    for t, arrivals in enumerate(zip(*streams, strict=True), start=1):
        digest = sha256("".join(arrival.digest for arrival in arrivals).encode()).hexdigest()
        counts = {"training": len(arrivals[0].training), "validation": len(arrivals[0].validation)}
        mega_batches.append(MegaBatch(t, digest, data=list(arrivals), counts=counts))
    return MegaBatchStream(mega_batches)

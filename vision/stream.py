"""Cut a dataset into mega-batches. The partition depends on the data seed only, and is the same for every learner."""

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
    """One mega-batch of one seed. Each of its examples is either for training or for validation, in every stage."""

    training: Examples
    """The examples to train on."""
    validation: Examples
    """The examples to validate on."""

    @property
    def digest(self) -> str:
        """The SHA-256 digest of all images and labels, in hexadecimal."""
        digest = sha256()
        for part in (self.training, self.validation):
            digest.update(f"{len(part)}/".encode())
            digest.update(part.images.numpy().tobytes())
            digest.update(part.labels.numpy().tobytes())
        return digest.hexdigest()


def partition(examples: Examples, num_mega_batches: int, validation_share: float, seed: int) -> list[Arrival]:
    """Return the examples in random order, cut into B parts whose sizes differ by at most one example.

    As in the original code, the order is that of numpy's RandomState(seed).permutation, whose numbers numpy guarantees
    never to change. The parts are those of numpy's array_split. The last examples of a part are its validation data.

    Args:
        examples: the training set.
        num_mega_batches: B.
        validation_share: the share of each mega-batch that is validation data, rounded down to whole examples, but at
            least one example.
        seed: seed of the order.

    Raises:
        SettingError: a mega-batch would contain fewer than two examples.
    """
    if len(examples) < 2 * num_mega_batches:
        raise SettingError(
            f"mega_batches={num_mega_batches} is too many for {len(examples)} training examples: each mega-batch "
            f"needs two, one for training and one for validation; give at most {len(examples) // 2}"
        )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(examples)))
    ordered = examples[order]
    arrivals, start = [], 0
    for part in np.array_split(order.numpy(), num_mega_batches):
        end = start + len(part)
        middle = end - max(1, int(len(part) * validation_share))
        # Copies, so that no tensor of one mega-batch gives access to another.
        arrivals.append(Arrival(*(Examples(ordered.images[a:b].clone(), ordered.labels[a:b].clone())
                                  for a, b in ((start, middle), (middle, end)))))  # fmt: skip
        start = end
    return arrivals


def stacked_stream(streams: Sequence[Sequence[Arrival]]) -> MegaBatchStream:
    """Return one stream for S seeds: the data of mega-batch t is the list of the arrivals of all seeds.

    Args:
        streams: the partition of each seed.
    """
    mega_batches = []
    for t, arrivals in enumerate(zip(*streams, strict=True), start=1):
        digest = sha256("".join(arrival.digest for arrival in arrivals).encode()).hexdigest()
        counts = {"training": len(arrivals[0].training), "validation": len(arrivals[0].validation)}
        mega_batches.append(MegaBatch(t, digest, data=list(arrivals), counts=counts))
    return MegaBatchStream(mega_batches)

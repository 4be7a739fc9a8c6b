"""Cut a dataset into mega-batches.

The setting `data_seed` (by default equal to `seed`) is the only seed that affects how the dataset is cut. The choice of
the learner has no effect, so all learners can be compared on the same mega-batches.
"""

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
    """The examples of one mega-batch, for one seed. Each example is used either for training or for validation."""

    training: Examples
    """The examples for training."""
    validation: Examples
    """The examples for validation."""

    @property
    def digest(self) -> str:
        """SHA-256 digest of all images and labels of this mega-batch, in hexadecimal."""
        digest = sha256()
        for part in (self.training, self.validation):
            digest.update(f"{len(part)}/".encode())
            digest.update(part.images.numpy().tobytes())
            digest.update(part.labels.numpy().tobytes())
        return digest.hexdigest()


def partition(examples: Examples, num_mega_batches: int, validation_share: float, seed: int) -> list[Arrival]:
    """Shuffle the examples and return them as B mega-batches, whose sizes differ by at most one example.

    The last examples of each mega-batch are its validation data.

    As in the authors' code, the examples are shuffled by numpy's RandomState(seed).permutation and cut by numpy's
    array_split. numpy guarantees that RandomState returns the same numbers in all releases.

    Args:
        examples: the training set of the dataset.
        num_mega_batches: number of mega-batches, B.
        validation_share: fraction of each mega-batch that becomes validation data. The number of validation examples
            is rounded down, but is at least one.
        seed: random seed for shuffling.

    Raises:
        SettingError: if a mega-batch would contain fewer than two examples.
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
        # Copy the examples, because a view shares memory with all other mega-batches. With views, a learner could read
        # mega-batches that have not arrived yet.
        arrivals.append(Arrival(*(Examples(ordered.images[a:b].clone(), ordered.labels[a:b].clone())
                                  for a, b in ((start, middle), (middle, end)))))  # fmt: skip
        start = end
    return arrivals


def stacked_stream(streams: Sequence[Sequence[Arrival]]) -> MegaBatchStream:
    """Join the streams of S seeds into one stream, so that the seeds can be trained together.

    The attribute `data` of each mega-batch in the returned stream is a list with the examples of each seed, as one
    `Arrival` per seed.

    Args:
        streams: for each seed, the list of mega-batches that `partition` returned.
    """
    mega_batches = []
    for t, arrivals in enumerate(zip(*streams, strict=True), start=1):
        digest = sha256("".join(arrival.digest for arrival in arrivals).encode()).hexdigest()
        counts = {"training": len(arrivals[0].training), "validation": len(arrivals[0].validation)}
        mega_batches.append(MegaBatch(t, digest, data=list(arrivals), counts=counts))
    return MegaBatchStream(mega_batches)

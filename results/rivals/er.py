"""Experience replay with a small memory for images (Chaudhry et al. 2019, arXiv 1902.10486).

alma-vision plugin=results.rivals.er learner=er memory=500 replay=0.5 select_by=last ...

The memory is a uniform sample of the training examples so far (reservoir sampling). Half of each batch comes from it,
as in the paper, which trains on each new example once; here a stage has several epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.settings import Count
from fairseq_alma.core.stream import MegaBatch
from vision.datasets import Selection
from vision.learners import LearnerSettings, SingleModel, register_learner
from vision.seeds import generator
from vision.stream import Arrival


@dataclass(frozen=True)
class MemorySettings(LearnerSettings):
    """Settings of a learner with a memory of bounded size."""

    memory: Count = 500
    """Number of training examples in the memory. The validation data of all mega-batches are kept as well. With
    `select_by=last` they are only measured on."""


def reservoir(draws_n: Tensor, size: int) -> Tensor:
    """Return the indices of the examples in a reservoir of `size` places after n examples, int64 [min(n, size)].

    The first `size` examples fill the places. Example i, counted from 0, then draws one of i + 1 places. If the
    reservoir has this place, the example replaces the one in it. `draws_n` are uniform numbers in [0, 1), float64.
    """
    example_n = np.arange(len(draws_n))
    place_n = (draws_n.numpy() * (example_n + 1)).astype(np.int64)
    place_n[:size] = example_n[:size]
    stays_n = place_n < size
    places = np.zeros(min(len(draws_n), size), np.int64)
    places[place_n[stays_n]] = example_n[stays_n]  # numpy: of several examples for one place, the last one stays
    return torch.from_numpy(places)


def remembered(mega_batches: Sequence[MegaBatch], indices_S: Sequence[Tensor]) -> MegaBatch:
    """Return a memory as one mega-batch, with the validation data of all `mega_batches`.

    `indices_S` are, for each seed, the examples in the memory, counted over the training data of `mega_batches`.
    """
    data = []
    for seed, indices in enumerate(indices_S):
        training, validation = (
            Selection.join([getattr(one.data[seed], part) for one in mega_batches])
            for part in ("training", "validation")
        )
        assert training is not None and validation is not None
        data.append(Arrival(training[indices], validation))
    last = mega_batches[-1]
    return MegaBatch(last.t, f"memory after {last.digest}", data, {"training": len(indices_S[0].unique())})


@register_learner("er", label="ER", settings=MemorySettings)
class ExperienceReplay(SingleModel):
    """One network that trains on new examples and on a memory of earlier ones."""

    learner_settings: MemorySettings
    copies = 1
    """How often the memory occurs in the examples that a stage reads."""

    def places(self, mega_batches):
        """Return the reservoir of each seed after these mega-batches, as indices over their training data, [S, m].

        It follows from the seed and from the sizes of the mega-batches, so it need not be saved.
        """
        count = sum(len(one.data[0].training) for one in mega_batches)
        draws_S = [torch.rand(count, dtype=torch.float64, generator=generator(s, "reservoir")) for s in self.seeds]
        return torch.stack([reservoir(draws_n, self.learner_settings.memory) for draws_n in draws_S])

    def train(self, stage):
        if stage.past:
            memory = remembered(stage.past, self.places(stage.past).repeat(1, self.copies))
            # `uniform` is a share that follows from the number of mega-batches, so it is computed before they are one.
            stage = replace(stage, past=(memory,), replay=stage.past_share or stage.replay)
        return super().train(stage)

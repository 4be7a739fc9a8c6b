"""GDumb for images: greedy sampler and dumb learner (Prabhu et al. 2020, ECCV, section 3).

alma-vision plugin=results.rivals.gdumb learner=gdumb memory=500 replay=all select_by=last schedule=cosine ...

The memory has about as many examples of each class as of any other. Each stage trains a new network on the memory only,
because a predictor is wanted after each stage; with a longer `wait`, fewer networks are trained. The paper also has a
cosine schedule. It augments by CutMix, which alma-vision does not have.
"""

import random
from dataclasses import replace

import torch

from results.rivals.er import MemorySettings, remembered
from vision.learners import SingleModel, register_learner


def greedy_sample(labels, size, rng):
    """Return the indices of the examples in a class-balanced memory of at most `size`, in order (algorithm 1).

    An example is stored if its class is new, or has fewer than size / number of classes examples in the memory. If the
    memory is full, a random example of the largest class makes room.
    """
    stored_by_class = {}
    for index, label in enumerate(labels):
        stored = stored_by_class.setdefault(label, [])
        if len(stored) * len(stored_by_class) < size:
            if sum(map(len, stored_by_class.values())) == size:
                largest = max(stored_by_class.values(), key=len)
                largest.pop(rng.randrange(len(largest)))
            stored.append(index)
    return sorted(index for stored in stored_by_class.values() for index in stored)


@register_learner("gdumb", label="GDumb", settings=MemorySettings)
class GreedySamplerDumbLearner(SingleModel):
    """A new network for each stage, trained on a class-balanced memory only."""

    learner_settings: MemorySettings
    stacks_seeds = False  # in a random stream, the memories of several seeds have different sizes until they are full

    def train(self, stage):
        mega_batches = [*stage.past, *stage.new]
        labels = torch.cat([one.data[0].training.labels for one in mega_batches]).tolist()
        indices = greedy_sample(labels, self.learner_settings.memory, random.Random(self.seeds[0]))
        if stage.index > 1:
            self.stack = self.new_stack(stage.index)
        return super().train(replace(stage, new=(remembered(mega_batches, [torch.tensor(indices)]),), past=()))

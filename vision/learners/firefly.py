"""The learner FF: one network that grows with the Firefly method, in width and optionally in depth."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from fairseq_alma.core.learner_settings import FireflySettings
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from vision.batches import Batches
from vision.firefly.chain import Chain, chain_from_stack, stack_from_chain
from vision.firefly.width import CountRule, count_by_num_params, count_by_width_ratio, grow_width
from vision.learners.base import VisionLearner, register_learner
from vision.training import smoothed


@register_learner("ff")
class Firefly(VisionLearner):
    """FF: one network that grows between stages (Firefly, Wu et al. 2020).

    The networks of different seeds grow to different shapes, so they cannot be computed together as one stack.
    Therefore the seeds are trained one after another.
    """

    stacks_seeds = False
    learner_settings: FireflySettings

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        chain_from_stack(self.stack)  # an error now saves the training of the first stage

    def grow(self, stage: Stage) -> list[Spent]:
        """Every `grow_every` stages, grow the network where this lowers the loss fastest. Return the cost.

        As in the authors' code, the loss is computed on the training data of the stage that follows the growth, without
        augmentation. The validation data of one mega-batch would contain too few examples.
        """
        own = self.learner_settings
        if (stage.index - 1) % own.grow_every:
            return super().grow(stage)
        began, stack = time.perf_counter(), self.stack
        data = self.stage_data(stage)
        order = self.generators("order of growth", stage.index)
        examples = Batches(data, order, self.settings.batch_size, stage.past_share)
        batches = partial(_chain_batches, examples, self.settings.label_smoothing)
        (noise,) = self.generators("growth", stage.index)
        chain = chain_from_stack(stack)
        wider = grow_width(chain, batches, self._count_rule(chain, stage.index), noise, own.candidates)
        self.stack = stack_from_chain(wider.chain, stack)
        return [Spent(train_flops=wider.flops, train_seconds=time.perf_counter() - began)]

    def _count_rule(self, chain: Chain, stage_index: int) -> CountRule:
        """Return the rule that decides how many candidates are added to the network."""
        if self.learner_settings.grow_by == "width":
            # As in the authors' code: if the network grows before every stage, its width is about c (1 + g (t - 1)) in
            # stage t, and about c (1 + g t) in stage t + 1. Here c is the width in the first stage, and g is
            # grow_ratio. So the growth between these stages must increase the width by the fraction
            # (1 + g t) / (1 + g (t - 1)) - 1.
            t, g = stage_index - 1, self.learner_settings.grow_ratio
            return count_by_width_ratio(chain, (g * t + 1) / (g * (t - 1) + 1) - 1)
        # Count the growths so far, this one included. Each adds the same number of parameters.
        first = chain_from_stack(self.new_stack(1)).num_params()
        growths = (stage_index - 1) // self.learner_settings.grow_every
        return count_by_num_params(chain, first + round(self.learner_settings.grow_ratio * first) * growths)


def _chain_batches(batches: Batches, label_smoothing: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch as pairs (examples, labels). The examples are not augmented."""
    for (x,), (one_hot,) in batches.epoch(augmented=False):
        labels = smoothed(one_hot, label_smoothing) if label_smoothing else one_hot.argmax(-1)
        yield x.movedim(-1, 1) if x.dim() == 4 else x, labels

"""Compute the summed outputs of a learner's networks for fixed examples. Outputs that cannot change are cached.

A stack is several networks that are computed together. A learner may predict with several stacks (see
`VisionLearner.members`).

Shapes: S seeds, n examples. Examples that are the same for all seeds have S = 1.
"""

import torch
from torch import Tensor

from vision.inputs import Inputs
from vision.learners import VisionLearner
from vision.networks import Stack
from vision.voting import MemberOutputs


class CachedOutputs:
    """Computes the outputs of learners for fixed examples, summed over the networks of each seed.

    The outputs of stacks that will not change any more are computed once. Their sum is cached.

    Args:
        stored_Sn: the examples in the format that `Inputs.to_storage` returns, [S, n, ...].
        inputs: converts stored examples to network inputs.
    """

    def __init__(self, stored_Sn: Tensor, inputs: Inputs):
        self._stored_Sn, self._inputs = stored_Sn, inputs
        self._kept: tuple[list[str | None], MemberOutputs] = ([], MemberOutputs.empty())
        """Cache: names of the stacks that will not change any more, and the sum of their outputs."""

    def of_predictor(self, learner: VisionLearner) -> MemberOutputs:
        """Return the outputs of all networks with which the learner predicts now."""
        others = [stack for name, stack in learner.members if name is None]
        return sum((self._outputs_of(learner, stack) for stack in others), self.of_unchanging(learner))

    def of_unchanging(self, learner: VisionLearner) -> MemberOutputs:
        """Return the summed outputs of the stacks that will not change any more. It is empty if there are none."""
        stacks = [(name, stack) for name, stack in learner.members if name is not None]
        names, (known, total) = [name for name, _ in stacks], self._kept
        if names[: len(known)] != known:
            known, total = [], MemberOutputs.empty()
        for _, stack in stacks[len(known) :]:
            total = total + self._outputs_of(learner, stack)
        self._kept = (list(names), total)
        return total

    def _outputs_of(self, learner: VisionLearner, stack: Stack) -> MemberOutputs:
        return outputs_of(learner, stack, self._stored_Sn, self._inputs)


def outputs_of(learner: VisionLearner, stack: Stack, stored_Sn: Tensor, inputs: Inputs) -> MemberOutputs:
    """Return the outputs of one stack. Split the examples into parts, to limit memory use.

    Args:
        learner: the learner, whose method `member_outputs` computes the outputs.
        stack: one of the stacks in `learner.members`.
        stored_Sn: the examples in the format that `Inputs.to_storage` returns, [S, n, ...].
        inputs: converts stored examples to network inputs.
    """
    parts = [
        learner.member_outputs(inputs.to_input(part), stack) for part in stored_Sn.split(stack.examples_at_once, dim=1)
    ]
    if len(parts) == 1:
        return parts[0]
    summed = torch.cat([part.summed_SbC for part in parts], dim=1)
    votes = [part.votes_SbC for part in parts if part.votes_SbC is not None]
    return MemberOutputs(parts[0].combine, summed, torch.cat(votes, dim=1) if votes else None, parts[0].num_members)

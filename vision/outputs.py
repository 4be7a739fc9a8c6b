"""Compute the summed outputs of a learner's networks for fixed examples. Outputs that cannot change are cached.

A stack is several networks that are computed together. A learner may predict with several stacks (see
`VisionLearner.members`).

Shapes: S seeds, n examples.
"""

import torch

from vision.learners import VisionLearner
from vision.networks import Stack
from vision.rows import Rows
from vision.voting import MemberOutputs


class CachedOutputs:
    """Computes the outputs of learners for fixed examples, summed over the networks of each seed.

    The outputs of stacks that will not change any more are computed once. Their sum is cached.

    Args:
        rows: a table that contains the examples. It has the examples of S seeds, or examples that all seeds share.
        first: index of the first example.
        end: index after the last example, as in a Python slice. By default, the number of examples in the table.
    """

    def __init__(self, rows: Rows, first: int = 0, end: int | None = None):
        self._rows, self._first, self._end = rows, first, rows.num_examples if end is None else end
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
        return outputs_of(learner, stack, self._rows, self._first, self._end)


def outputs_of(learner: VisionLearner, stack: Stack, rows: Rows, first: int, end: int) -> MemberOutputs:
    """Return the outputs of one stack. Split the examples into parts, to limit memory use.

    Args:
        learner: the learner, whose method `member_outputs` computes the outputs.
        stack: one of the stacks in `learner.members`.
        rows: a table that contains the examples.
        first: index of the first example.
        end: index after the last example, as in a Python slice.
    """
    parts = [learner.member_outputs(part, stack) for part in rows.parts(stack.examples_at_once, first, end)]
    return joined(parts)


def joined(parts: list[MemberOutputs]) -> MemberOutputs:
    """Return the outputs of one predictor for several parts of the examples as one object."""
    if len(parts) == 1:
        return parts[0]
    summed = torch.cat([part.summed_SbC for part in parts], dim=1)
    votes = [part.votes_SbC for part in parts if part.votes_SbC is not None]
    return MemberOutputs(parts[0].combine, summed, torch.cat(votes, dim=1) if votes else None, parts[0].num_members)

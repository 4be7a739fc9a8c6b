"""Score learners on the validation data of each mega-batch, also of mega-batches that the learner has not seen yet.

Shapes: S seeds, T mega-batches, n examples of all mega-batches, C classes.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from fairseq_alma.core.ledger import Prequential
from fairseq_alma.core.stream import MegaBatch
from vision.inputs import Inputs
from vision.learners import VisionLearner
from vision.networks import Stack
from vision.rows import Rows, rows_of_seeds
from vision.stream import Arrival
from vision.voting import MemberOutputs

EXAMPLES_PER_BLOCK = 2000
"""Approximate number of examples for which the outputs of unchanging networks are computed at once."""


class HeldOutEvaluator:
    """Scores learners on the validation data of each mega-batch that arrives in the run.

    `streams` has, for each seed, the mega-batches in order of arrival.
    """

    def __init__(self, streams: Sequence[Sequence[Arrival]], num_classes: int, inputs: Inputs, device: torch.device):
        pieces = [[arrival.validation for arrival in stream] for stream in streams]
        self._rows = rows_of_seeds(pieces, num_classes, inputs, device)
        self._y_Sn = self._rows.labels
        self._ends = [0, *accumulate(len(piece) for piece in pieces[0])]
        """The examples of mega-batch t are those from ends[t - 1] to ends[t]."""
        self._all = CachedOutputs(self._rows)
        self._blocks: list[tuple[int, CachedOutputs]] = []
        """For each mega-batch, the first example of the block that contains it, and the outputs for the block."""
        for _, block in groupby(range(len(pieces[0])), lambda number: self._ends[number] // EXAMPLES_PER_BLOCK):
            numbers = list(block)
            first, end = self._ends[numbers[0]], self._ends[numbers[-1] + 1]
            self._blocks += [(first, CachedOutputs(self._rows, first, end))] * len(numbers)

    def prequential(self, learner: VisionLearner, mega_batch: MegaBatch) -> list[Prequential]:
        """Return the scores of the learner's predictor on the validation data of a mega-batch, for each seed."""
        start, end = self._ends[mega_batch.t - 1 : mega_batch.t + 1]
        total = self._unchanging(learner, mega_batch.t)
        for name, stack in learner.members:
            if name is None:
                total = total + outputs_of(learner, stack, self._rows, start, end)
        y_Sb = self._y_Sn[:, start:end]
        return list(map(Prequential, total.error_rate(y_Sb), total.loss(y_Sb)))

    def after_stage(self, learner: VisionLearner) -> list[tuple[float, float]]:
        """Return loss and error rate of the predictor on the validation data that the last stage used, for each seed.

        Call this only if no network of the learner will change any more, as in a growing ensemble after a stage. The
        outputs of the earlier networks are cached since the prequential scores, so only the newest are computed.
        """
        first, last = learner.validated_on
        total = joined([self._unchanging(learner, t) for t in range(first, last + 1)])
        y_Sb = self._y_Sn[:, self._ends[first - 1] : self._ends[last]]
        return list(zip(total.loss(y_Sb), total.error_rate(y_Sb), strict=True))

    def error_by_mega_batch(self, learner: VisionLearner) -> list[list[float]]:
        """Return the error rate of the learner's predictor on each mega-batch, as one list of length T per seed."""
        is_wrong_Sn = self._all.of_predictor(learner).predicted_classes() != self._y_Sn
        parts = [is_wrong_Sn[:, start:end] for start, end in pairwise(self._ends)]
        rates = ([count / part.shape[1] for count in part.sum(1).tolist()] for part in parts)
        return [list(of_seed) for of_seed in zip(*rates, strict=True)]

    def _unchanging(self, learner: VisionLearner, t: int) -> MemberOutputs:
        """Return the outputs for mega-batch t of the stacks that will not change any more."""
        if all(name is None for name, _ in learner.members):
            return MemberOutputs.empty()
        first, outputs = self._blocks[t - 1]
        known, part = outputs.of_unchanging(learner), slice(self._ends[t - 1] - first, self._ends[t] - first)
        votes = None if known.votes_SbC is None else known.votes_SbC[:, part]
        return MemberOutputs(known.combine, known.summed_SbC[:, part], votes, known.num_members)


def error_by_class(outputs: MemberOutputs, y_Sn: Tensor, num_classes: int) -> list[list[float | None]]:
    """Return the error rate on the examples of each class, for each seed; None for a class without examples.

    The true classes are [S, n], or [1, n] if they are the same for all seeds.
    """
    is_wrong_Sn = outputs.predicted_classes() != y_Sn
    rates: list[list[float | None]] = []
    for wrong, y in zip(is_wrong_Sn.cpu(), y_Sn.cpu().expand(len(is_wrong_Sn), -1), strict=True):
        counts = torch.bincount(y, minlength=num_classes).tolist()
        wrongs = torch.bincount(y[wrong], minlength=num_classes).tolist()
        rates.append([w / count if count else None for w, count in zip(wrongs, counts, strict=True)])
    return rates


class CachedOutputs:
    """Computes the outputs of learners for the examples from `first` to `end` of a table, summed over networks.

    The outputs of stacks that will not change any more are computed once. The table has the examples of S seeds, or
    examples that all seeds share.
    """

    def __init__(self, rows: Rows, first: int = 0, end: int | None = None):
        self._rows, self._first, self._end = rows, first, rows.num_examples if end is None else end
        self._kept: tuple[list[str | None], MemberOutputs] = ([], MemberOutputs.empty())
        """Cache: names of the stacks that will not change any more, and the sum of their outputs."""

    def of_predictor(self, learner: VisionLearner) -> MemberOutputs:
        """Return the outputs of all networks with which the learner predicts now."""
        others = (stack for name, stack in learner.members if name is None)
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
    """Return the outputs of one of the stacks in `learner.members` for the examples `first` to `end` - 1 of a table."""
    return joined([learner.member_outputs(part, stack) for part in rows.parts(stack.examples_at_once, first, end)])


def joined(parts: list[MemberOutputs]) -> MemberOutputs:
    """Return the outputs of one predictor for several parts of the examples as one object."""
    if len(parts) == 1:
        return parts[0]
    summed = torch.cat([part.summed_SbC for part in parts], dim=1)
    votes = [part.votes_SbC for part in parts if part.votes_SbC is not None]
    return MemberOutputs(parts[0].combine, summed, torch.cat(votes, dim=1) if votes else None, parts[0].num_members)

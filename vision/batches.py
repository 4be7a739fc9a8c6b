"""The data of a stage as tensors on the device, and the batches that are sampled from these data.

An order is a random sequence in which a network reads the examples of a stage. Each network has a separate order, which
is drawn again for every epoch. Exception: networks that are trained as one model (UMix) share one order.

Shapes: S seeds, R orders, n examples, b examples per batch, i inputs, C classes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.stream import MegaBatch
from vision.inputs import Inputs
from vision.rows import Pieces, Rows, large_rows, stored


@dataclass(frozen=True)
class StageData:
    """Training and validation data of one stage."""

    training: Rows
    """Training examples. With replay, the examples of earlier mega-batches come first, then the new examples."""
    num_past: int
    """Number of training examples of earlier mega-batches, per seed, if a fixed share of each batch comes from them
    (`Stage.past_share`); otherwise 0. Each epoch reads some of them instead of some of the new examples."""
    validation: Rows
    """Validation examples."""

    @property
    def num_new(self) -> int:
        """Number of examples that an epoch reads, per seed: with replay=all, all examples in `training`, otherwise as
        many as there are new examples."""
        return self.training.num_examples - self.num_past


class Memory:
    """Stores the training and validation examples of the current stage, as tensors on the device.

    With replay, the examples of earlier stages stay in memory, and each stage appends its new examples. Without replay,
    the examples of a stage replace the examples of the previous stage.

    Exception: if the training or the validation examples of a stage need more than LARGE_BYTES, they stay in the
    dataset, which may be a file, and are copied to the device batch by batch (see `LargeRows`).
    """

    def __init__(self, inputs: Inputs, num_classes: int, num_seeds: int, device: torch.device):
        how = (inputs, num_classes, num_seeds, device)
        self._training, self._validation = _Table("training", *how), _Table("validation", *how)

    def stage_data(self, new: Sequence[MegaBatch], past: Sequence[MegaBatch], replay: Replay) -> StageData:
        """Return the training and validation data of one stage.

        Without replay, the data are the examples of the new mega-batches. With replay, the training examples and the
        validation examples of earlier mega-batches are included.

        Args:
            new: the mega-batches that have arrived since the previous stage. `past` are all earlier ones.
            replay: the setting `replay` (see `StreamSettings.replay`).
        """
        wanted = [*past, *new] if replay else new
        num_past = sum(len(one.data[0].training) for one in past) if replay and replay != "all" else 0
        return StageData(self._training.rows(wanted), num_past, self._validation.rows(wanted))

    def previous_stage_data(self, stage: Stage, num_mega_batches: int) -> StageData:
        """Return the data of the stage before `stage`, in which `num_mega_batches` mega-batches were new."""
        return self.stage_data(stage.past[-num_mega_batches:], stage.past[:-num_mega_batches], stage.replay)


class _Table:
    """The training or the validation examples of all seeds, to which those of more mega-batches can be appended.

    If there are too few free rows, `_append` allocates new tensors with at least twice as many rows as there are
    examples, and copies these. So most calls copy only the new examples.

    Args:
        part: "training" or "validation". For the other arguments, see `Memory`.
    """

    def __init__(self, part: str, inputs: Inputs, num_classes: int, num_seeds: int, device: torch.device):
        self._part, self._inputs, self._num_classes, self._num_seeds = part, inputs, num_classes, num_seeds
        self._device = device
        self._clear()

    def _clear(self) -> None:
        self._digests: list[str] = []
        """Digests of the mega-batches whose examples are stored, in order of arrival."""
        self._num_examples = 0
        self._x = self._y = self._one_hot = torch.empty(0, 0)

    def _pieces(self, mega_batches: Sequence[MegaBatch]) -> Pieces:
        seeds = range(self._num_seeds)
        return [[getattr(mega_batch.data[seed], self._part) for mega_batch in mega_batches] for seed in seeds]

    def rows(self, mega_batches: Sequence[MegaBatch]) -> Rows:
        """Return the examples of these mega-batches. Only those that are not stored yet are appended."""
        pieces = self._pieces(mega_batches)
        if large := large_rows(pieces, self._num_classes, self._inputs, self._device):
            self._clear()
            return large
        digests = [mega_batch.digest for mega_batch in mega_batches]
        if self._digests != digests[: len(self._digests)]:
            self._clear()
        if arrived := mega_batches[len(self._digests) :]:
            self._append(*stored(self._pieces(arrived), self._inputs, self._device))
            self._digests = digests
        tables = (self._x.flatten(0, 1), self._y.flatten(), self._one_hot.flatten(0, 1))
        return Rows(*tables, len(self._y), self._num_examples, self._inputs)

    def _append(self, x_Sni: Tensor, y_Sn: Tensor) -> None:
        start, end = self._num_examples, self._num_examples + y_Sn.shape[1]
        if end > self._y.shape[1]:
            num_rows = max(end, 2 * start)
            x, y = x_Sni.new_empty(len(x_Sni), num_rows, *x_Sni.shape[2:]), y_Sn.new_zeros(len(y_Sn), num_rows)
            one_hot = torch.zeros(*y.shape, self._num_classes, device=y.device)
            for old, new in ((self._x, x), (self._y, y), (self._one_hot, one_hot)):
                if start:
                    new[:, :start] = old[:, :start]
            self._x, self._y, self._one_hot = x, y, one_hot
        self._x[:, start:end], self._y[:, start:end] = x_Sni, y_Sn
        self._one_hot[:, start:end] = torch.nn.functional.one_hot(y_Sn, self._num_classes)
        self._num_examples = end


class Batches:
    """The batches of a stage, sampled anew for every epoch.

    Args:
        generators: one random generator for each order. The generators of the first seed come first, then those of the
            second seed, and so on.
        batch_size: number of examples per batch. The last batch of an epoch may be smaller. A last batch of one example
            is joined to the batch before, because batch normalisation needs at least two examples.
        past_share: fraction of the new examples that each epoch replaces by examples of earlier mega-batches
            (`Stage.past_share`). The next epoch first reads the new examples that were left out: none is read again
            before all have been read, and the same holds for the earlier examples. The order is random.
        bagging: if True, each order has a separate bootstrap sample: from the n examples of an epoch, n are drawn with
            replacement. The sample is drawn once per stage, and every epoch reads it instead of the n examples.
    """

    def __init__(
        self,
        data: StageData,
        generators: Sequence[torch.Generator],
        batch_size: int,
        past_share: float = 0.0,
        bagging: bool = False,
    ):
        self._data, self._generators, self._batch_size = data, list(generators), batch_size
        # A fraction, because with rounding errors, 0.29 x 100, for example, would be less than 29.
        self._share = Fraction(past_share).limit_denominator(10**6) if data.num_past else Fraction(0)
        self._num_read = 0
        rows, num_orders = data.training, len(self._generators)
        self._first_row_R1 = torch.arange(num_orders)[:, None] // (num_orders // rows.num_seeds) * rows.rows_per_seed
        self._starts = [*range(0, data.num_new, batch_size), data.num_new]
        """Position of the first example of each batch, and the number of examples."""
        if len(self._starts) > 2 and self._starts[-1] - self._starts[-2] == 1:
            del self._starts[-2]
        self._new_R = [_RandomPositions(data.num_new, generator) for generator in self._generators]
        self._past_R = [_RandomPositions(data.num_past, generator) for generator in self._generators]
        self._sample_Rn = None
        if bagging:
            self._sample_Rn = torch.stack(
                [torch.randint(data.num_new, (data.num_new,), generator=g) for g in generators]
            )

    @property
    def updates_per_epoch(self) -> int:
        """Number of batches per epoch."""
        return len(self._starts) - 1

    def epoch(self, augmented: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch: the examples as inputs, [R, b, ...], and one-hot vectors, [R, b, C].

        If `augmented` is True, images are cropped and flipped at random.
        """
        rows, num_orders = self._data.training, len(self._generators)
        # The device of `y` is that on which rows are looked up: the main processor if the examples stay in the dataset.
        indices_Rn = (self._indices() + self._first_row_R1).to(rows.y.device, non_blocking=True)
        augmentation_Rn = self._augmentation(indices_Rn.shape[1]) if augmented else None
        for batch in itertools.starmap(slice, pairwise(self._starts)):
            index = indices_Rn[:, batch].reshape(-1)
            x, one_hot = rows.batch(index)
            x = rows.inputs.augment(x, None if augmentation_Rn is None else augmentation_Rn[:, batch].flatten(0, 1))
            yield x.view(num_orders, -1, *x.shape[1:]), one_hot.view(num_orders, -1, one_hot.shape[1])

    def _augmentation(self, num_examples: int) -> Tensor | None:
        """Draw the random crop and flip of each example for one epoch, [R, n, ...]; None if none is augmented."""
        inputs = self._data.training.inputs
        drawn = [inputs.draw_augmentation(num_examples, generator) for generator in self._generators]
        augmentation = [values for values in drawn if values is not None]
        return torch.stack(augmentation).to(self._data.training.device, non_blocking=True) if augmentation else None

    def _indices(self) -> Tensor:
        """Draw the random orders in which the networks read the examples of a seed in one epoch, [R, n]."""
        num_past, num_new = self._data.num_past, self._data.num_new
        # Spread the examples of earlier mega-batches evenly over the epoch, so that their fraction is about the same in
        # all batches. Count over all epochs: otherwise, epochs of few examples would have too few earlier ones.
        num_read = torch.arange(self._num_read, self._num_read + num_new + 1)
        is_past_n = (num_read * self._share.numerator // self._share.denominator).diff() > 0
        self._num_read += num_new
        num_drawn = int(is_past_n.sum())
        new_Rk = torch.stack([positions.take(num_new - num_drawn) for positions in self._new_R])
        if self._sample_Rn is not None:
            new_Rk = self._sample_Rn.gather(1, new_Rk)
        order_Rn = torch.empty(len(new_Rk), num_new, dtype=torch.int64)
        order_Rn[:, ~is_past_n] = num_past + new_Rk
        if num_drawn:
            order_Rn[:, is_past_n] = torch.stack([positions.take(num_drawn) for positions in self._past_R])
        return order_Rn


class _RandomPositions:
    """The integers from 0 to `size` - 1 in random order, and then again in another order, without end.

    So none is taken again before all have been taken, also over several epochs.
    """

    def __init__(self, size: int, generator: torch.Generator):
        self._size, self._generator = size, generator
        self._rest = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Tensor:
        """Return the next `count` integers."""
        while len(self._rest) < count:
            self._rest = torch.cat([self._rest, torch.randperm(self._size, generator=self._generator)])
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

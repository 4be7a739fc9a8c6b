"""What a stage trains on, as tensors on the device, and the batches drawn from it.

Shapes: S seeds, R orders (one a network, or one a seed where networks are trained as one), n examples, b of a batch,
i inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_alma.core.protocol import Replay, Stage
from fairseq_alma.core.stream import MegaBatch
from vision.inputs import Inputs


@dataclass(frozen=True)
class Rows:
    """Examples of S seeds in one table, seed after seed; between two seeds there may be rows without a meaning."""

    x: Tensor
    """[rows, ...], as they are kept."""
    y: Tensor
    """[rows]."""
    one_hot: Tensor
    """[rows, C] of float: y again."""
    num_seeds: int
    num_examples: int
    """n, of each seed."""
    inputs: Inputs = field(default_factory=Inputs)
    """What is to be made of what is kept."""

    @property
    def rows_apart(self) -> int:
        """From an example to the same one of the next seed."""
        return len(self.y) // self.num_seeds

    @property
    def examples(self) -> Tensor:
        """[S, n, ...] as networks read them, without the rows between."""
        return self.inputs.read(self.x.view(self.num_seeds, -1, *self.x.shape[1:])[:, : self.num_examples])

    @property
    def labels(self) -> Tensor:
        """[S, n]."""
        return self.y.view(self.num_seeds, -1)[:, : self.num_examples]


@dataclass(frozen=True)
class StageData:
    """Training and validation data of one stage."""

    training: Rows
    """The past first, if there is any, then what is new."""
    num_past: int
    """How many of them are of the past, to be drawn from by share; 0 where all are trained on alike."""
    validation: Rows

    @property
    def num_new(self) -> int:
        """Examples in an epoch, of each seed."""
        return self.training.num_examples - self.num_past


class Memory:
    """Examples on the device, appended as they arrive: with replay a stage adds what is new and copies no past.

    Args:
        inputs: how an image becomes what networks read.
        num_classes: C.
        num_seeds: S.
        device: where they live.
    """

    def __init__(self, inputs: Inputs, num_classes: int, num_seeds: int, device: torch.device):
        self._inputs, self._num_classes, self._num_seeds, self._device = inputs, num_classes, num_seeds, device
        self._times: list[int] = []
        self._training, self._validation = _Table(num_classes), _Table(num_classes)

    def stage_data(self, new: Sequence[MegaBatch], past: Sequence[MegaBatch], replay: Replay) -> StageData:
        """What a stage on `new` after `past` trains and validates on, as `replay` says.

        With replay validation data are joined as the training data are.
        """
        wanted = [*past, *new] if replay else list(new)
        if self._times != [mega_batch.t for mega_batch in wanted[: len(self._times)]]:
            self._forget()
        if arrived := wanted[len(self._times) :]:
            self._training.append(*self._tensors(arrived, "training"))
            self._validation.append(*self._tensors(arrived, "validation"))
            self._times = [mega_batch.t for mega_batch in wanted]
        num_past = 0
        if replay and replay != "all":
            num_past = sum(len(mega_batch.data[0].training) for mega_batch in past)
        return StageData(self._training.rows(self._inputs), num_past, self._validation.rows(self._inputs))

    def before(self, stage: Stage, length: int) -> StageData:
        """What the stage before `stage`, of `length` mega-batches, was trained and validated on."""
        return self.stage_data(stage.past[-length:], stage.past[:-length], stage.replay)

    def _forget(self) -> None:
        self._times = []
        self._training, self._validation = _Table(self._num_classes), _Table(self._num_classes)

    def _tensors(self, mega_batches: Sequence[MegaBatch], part: str) -> tuple[Tensor, Tensor]:
        seeds = range(self._num_seeds)
        parts = [[getattr(mega_batch.data[seed], part) for mega_batch in mega_batches] for seed in seeds]
        images = torch.stack([torch.cat([examples.images for examples in one]) for one in parts])
        labels = torch.stack([torch.cat([examples.labels for examples in one]) for one in parts])
        return self._inputs.keep(images.to(self._device)), labels.to(self._device)


class _Table:
    """Rows of S seeds that grow at their end, in place while there is room."""

    def __init__(self, num_classes: int):
        self._num_examples, self._num_classes = 0, num_classes
        self._x = self._y = self._one_hot = torch.empty(0, 0)

    def append(self, x_Sni: Tensor, y_Sn: Tensor) -> None:
        start, end = self._num_examples, self._num_examples + y_Sn.shape[1]
        if end > self._y.shape[1]:
            room = max(end, 2 * start)
            x, y = x_Sni.new_empty(len(x_Sni), room, *x_Sni.shape[2:]), y_Sn.new_zeros(len(y_Sn), room)
            one_hot = torch.zeros(*y.shape, self._num_classes, device=y.device)
            for old, new in ((self._x, x), (self._y, y), (self._one_hot, one_hot)):
                if start:
                    new[:, :start] = old[:, :start]
            self._x, self._y, self._one_hot = x, y, one_hot
        self._x[:, start:end], self._y[:, start:end] = x_Sni, y_Sn
        self._one_hot[:, start:end] = torch.nn.functional.one_hot(y_Sn, self._num_classes)
        self._num_examples = end

    def rows(self, inputs: Inputs) -> Rows:
        tables = (self._x.flatten(0, 1), self._y.flatten(), self._one_hot.flatten(0, 1))
        return Rows(*tables, len(self._y), self._num_examples, inputs)


class Batches:
    """The batches of a stage, epoch after epoch, in a new order each time.

    Args:
        data: of the stage.
        generators: one an order, seed after seed.
        batch_size: the last batch of an epoch may be smaller.
        replay: as of the stage. By share: that part of the examples of an epoch comes from the past, drawn anew
            with equal chances each time; as many new ones as that are left out, another lot in every epoch.
        bagging: each order is over a bootstrap sample of its own (as many draws, with putting back), made once.
    """

    def __init__(
        self,
        data: StageData,
        generators: Sequence[torch.Generator],
        batch_size: int,
        replay: Replay = False,
        bagging: bool = False,
    ):
        self._data, self._generators, self._batch_size = data, list(generators), batch_size
        self._share = replay if data.num_past and replay != "all" else 0.0
        rows, num_orders = data.training, len(self._generators)
        self._first_row_R1 = torch.arange(num_orders)[:, None] // (num_orders // rows.num_seeds) * rows.rows_apart
        self._sample_Rn = None
        if bagging:
            self._sample_Rn = torch.stack(
                [torch.randint(data.num_new, (data.num_new,), generator=g) for g in generators]
            )

    @property
    def updates_per_epoch(self) -> int:
        return -(-self._data.num_new // self._batch_size)

    def epoch(self, changed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """x [R, b, ...] and one-hot y [R, b, C] of every batch of one epoch.

        Args:
            changed: whether images are cropped and flipped.
        """
        rows, num_orders = self._data.training, len(self._generators)
        indices_Rn = (self._indices() + self._first_row_R1).to(rows.y.device, non_blocking=True)
        changes_Rn = self._changes(indices_Rn.shape[1]) if changed else None
        for start in range(0, indices_Rn.shape[1], self._batch_size):
            batch = slice(start, start + self._batch_size)
            index = indices_Rn[:, batch].reshape(-1)
            x, one_hot = rows.x.index_select(0, index), rows.one_hot.index_select(0, index)
            x = rows.inputs.change(x, None if changes_Rn is None else changes_Rn[:, batch].flatten(0, 1))
            yield x.view(num_orders, -1, *x.shape[1:]), one_hot.view(num_orders, -1, one_hot.shape[1])

    def _changes(self, num_examples: int) -> Tensor | None:
        """How each example of each order is to be changed in this epoch, [R, n, ...]; None where none is."""
        drawn = [self._data.training.inputs.draw_changes(num_examples, generator) for generator in self._generators]
        changes = [one for one in drawn if one is not None]
        return torch.stack(changes).to(self._data.training.y.device, non_blocking=True) if changes else None

    def _indices(self) -> Tensor:
        """Places among a seed's examples, [R, n], in the order of the epoch."""
        num_past, num_new = self._data.num_past, self._data.num_new
        order_Rn = torch.stack([torch.randperm(num_new, generator=generator) for generator in self._generators])
        if self._sample_Rn is not None:
            order_Rn = self._sample_Rn.gather(1, order_Rn)
        order_Rn += num_past
        if self._share:
            # Which places of the epoch are the past's: spread evenly, so that every batch has its share. The addend,
            # because 0.29 x 100 is 28.999... to a computer.
            due = (torch.arange(num_new + 1, dtype=torch.float64) * self._share + 1e-9).floor()
            is_past_n = due.diff() > 0
            num_drawn = int(is_past_n.sum())
            order_Rn[:, is_past_n] = torch.stack(
                [torch.randint(num_past, (num_drawn,), generator=generator) for generator in self._generators]
            )
        return order_Rn

"""The data of a stage as tensors on the device, and the batches that are drawn from them.

An order is a sequence in which the examples of a seed are read: every network has its own, or every seed if its
networks are trained as one.

Shapes: S seeds, R orders, n examples, b examples of a batch, i inputs, C classes.
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
    """Examples of S seeds in one table, seed after seed. Rows at the end of each seed's part may be unused."""

    x: Tensor
    """The examples as they are stored (see `Inputs.to_storage`), [rows, ...]."""
    y: Tensor
    """The class of each row, [rows]."""
    one_hot: Tensor
    """The class of each row, one-hot, [rows, C] of float."""
    num_seeds: int
    """S, the number of seeds."""
    num_examples: int
    """n, the number of examples of each seed."""
    inputs: Inputs = field(default_factory=Inputs)
    """How stored examples are turned into network inputs."""

    @property
    def rows_per_seed(self) -> int:
        """The number of rows of each seed, used and unused."""
        return len(self.y) // self.num_seeds

    @property
    def examples(self) -> Tensor:
        """The examples as network inputs for evaluation, [S, n, ...]."""
        return self.inputs.to_input(self.x.view(self.num_seeds, -1, *self.x.shape[1:])[:, : self.num_examples])

    @property
    def labels(self) -> Tensor:
        """The class of each example, [S, n]."""
        return self.y.view(self.num_seeds, -1)[:, : self.num_examples]


@dataclass(frozen=True)
class StageData:
    """Training and validation data of one stage."""

    training: Rows
    """Training data: those of earlier mega-batches first, if the stage replays them, then the new ones."""
    num_past: int
    """Number of examples, per seed, from which replay by share draws; 0 if every example is read once per epoch."""
    validation: Rows
    """Validation data."""

    @property
    def num_new(self) -> int:
        """The number of examples in an epoch, per seed."""
        return self.training.num_examples - self.num_past


class Memory:
    """The examples of a run on the device. With replay a stage appends the new examples and does not copy earlier ones.

    Args:
        inputs: how images are stored and turned into network inputs.
        num_classes: C.
        num_seeds: S.
        device: where the examples are stored.
    """

    def __init__(self, inputs: Inputs, num_classes: int, num_seeds: int, device: torch.device):
        self._inputs, self._num_classes, self._num_seeds, self._device = inputs, num_classes, num_seeds, device
        self._times: list[int] = []
        self._training, self._validation = _Table(num_classes), _Table(num_classes)

    def stage_data(self, new: Sequence[MegaBatch], past: Sequence[MegaBatch], replay: Replay) -> StageData:
        """Return the training and validation data of a stage on `new` that follows stages on `past`.

        With replay the validation data of earlier mega-batches are included too.

        Args:
            new: the mega-batches gathered for this stage.
            past: all earlier mega-batches.
            replay: False, "all" or a share, see `StreamSettings.replay`.
        """
        wanted = [*past, *new] if replay else list(new)
        if self._times != [mega_batch.t for mega_batch in wanted[: len(self._times)]]:
            self._clear()
        if arrived := wanted[len(self._times) :]:
            self._training.append(*self._tensors(arrived, "training"))
            self._validation.append(*self._tensors(arrived, "validation"))
            self._times = [mega_batch.t for mega_batch in wanted]
        num_past = 0
        if replay and replay != "all":
            num_past = sum(len(mega_batch.data[0].training) for mega_batch in past)
        return StageData(self._training.rows(self._inputs), num_past, self._validation.rows(self._inputs))

    def previous_stage_data(self, stage: Stage, num_mega_batches: int) -> StageData:
        """Return the data of the stage before `stage`.

        Args:
            stage: the coming stage.
            num_mega_batches: how many mega-batches the stage before it gathered.
        """
        return self.stage_data(stage.past[-num_mega_batches:], stage.past[:-num_mega_batches], stage.replay)

    def _clear(self) -> None:
        self._times = []
        self._training, self._validation = _Table(self._num_classes), _Table(self._num_classes)

    def _tensors(self, mega_batches: Sequence[MegaBatch], part: str) -> tuple[Tensor, Tensor]:
        """Return the stored examples, [S, n, ...], and labels, [S, n], of one part of some mega-batches.

        Args:
            mega_batches: in order.
            part: "training" or "validation".
        """
        seeds = range(self._num_seeds)
        by_seed = [[getattr(mega_batch.data[seed], part) for mega_batch in mega_batches] for seed in seeds]
        images = torch.stack([torch.cat([examples.images for examples in parts]) for parts in by_seed])
        labels = torch.stack([torch.cat([examples.labels for examples in parts]) for parts in by_seed])
        return self._inputs.to_storage(images.to(self._device)), labels.to(self._device)


class _Table:
    """Rows of S seeds, to which rows are appended: in place, as long as there are unused rows."""

    def __init__(self, num_classes: int):
        self._num_examples, self._num_classes = 0, num_classes
        self._x = self._y = self._one_hot = torch.empty(0, 0)

    def append(self, x_Sni: Tensor, y_Sn: Tensor) -> None:
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

    def rows(self, inputs: Inputs) -> Rows:
        tables = (self._x.flatten(0, 1), self._y.flatten(), self._one_hot.flatten(0, 1))
        return Rows(*tables, len(self._y), self._num_examples, inputs)


class Batches:
    """The batches of a stage. Every epoch reads the examples in a new random order.

    Args:
        data: data of the stage.
        generators: one per order, seed after seed.
        batch_size: number of examples of a batch; the last batch of an epoch may be smaller.
        replay: as in the stage. A share replaces that part of the examples of every epoch by examples of earlier
            mega-batches, which are drawn uniformly with replacement. Which new examples are left out differs from
            epoch to epoch.
        bagging: if True, each order reads a bootstrap sample of its own (n draws with replacement), drawn once.
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
        self._first_row_R1 = torch.arange(num_orders)[:, None] // (num_orders // rows.num_seeds) * rows.rows_per_seed
        self._sample_Rn = None
        if bagging:
            self._sample_Rn = torch.stack(
                [torch.randint(data.num_new, (data.num_new,), generator=g) for g in generators]
            )

    @property
    def updates_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return -(-self._data.num_new // self._batch_size)

    def epoch(self, augmented: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch: x [R, b, ...] and y, one-hot, [R, b, C].

        Args:
            augmented: if True, images are cropped and flipped at random.
        """
        rows, num_orders = self._data.training, len(self._generators)
        indices_Rn = (self._indices() + self._first_row_R1).to(rows.y.device, non_blocking=True)
        augmentation_Rn = self._augmentation(indices_Rn.shape[1]) if augmented else None
        for start in range(0, indices_Rn.shape[1], self._batch_size):
            batch = slice(start, start + self._batch_size)
            index = indices_Rn[:, batch].reshape(-1)
            x, one_hot = rows.x.index_select(0, index), rows.one_hot.index_select(0, index)
            x = rows.inputs.augment(x, None if augmentation_Rn is None else augmentation_Rn[:, batch].flatten(0, 1))
            yield x.view(num_orders, -1, *x.shape[1:]), one_hot.view(num_orders, -1, one_hot.shape[1])

    def _augmentation(self, num_examples: int) -> Tensor | None:
        """Return the augmentation of each example of one epoch, [R, n, ...], or None if there is none."""
        inputs = self._data.training.inputs
        drawn = [inputs.draw_augmentation(num_examples, generator) for generator in self._generators]
        augmentation = [values for values in drawn if values is not None]
        return torch.stack(augmentation).to(self._data.training.y.device, non_blocking=True) if augmentation else None

    def _indices(self) -> Tensor:
        """Return the indices of examples among those of their seed, [R, n], in the order of one epoch."""
        num_past, num_new = self._data.num_past, self._data.num_new
        order_Rn = torch.stack([torch.randperm(num_new, generator=generator) for generator in self._generators])
        if self._sample_Rn is not None:
            order_Rn = self._sample_Rn.gather(1, order_Rn)
        order_Rn += num_past
        if self._share:
            # Replayed examples are spread evenly over the epoch, so that every batch has its share of them. 1e-9 is
            # added because, for example, 0.29 x 100 is 28.999... in floating point.
            num_due = (torch.arange(num_new + 1, dtype=torch.float64) * self._share + 1e-9).floor()
            is_past_n = num_due.diff() > 0
            num_drawn = int(is_past_n.sum())
            order_Rn[:, is_past_n] = torch.stack(
                [torch.randint(num_past, (num_drawn,), generator=generator) for generator in self._generators]
            )
        return order_Rn

"""Tables of examples, with one row per example: small ones on the device, large ones that stay in the dataset.

Shapes: S seeds, n examples, b examples per batch, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vision.datasets import Examples, Selection
from vision.inputs import Inputs

Pieces = Sequence[Sequence[Examples | Selection]]
"""For each seed, its examples in one or more pieces."""
LARGE_BYTES = 2 * 2**30
"""If the stored examples of a table would need more bytes than this, they are copied batch by batch (`LargeRows`)."""


@dataclass(frozen=True)
class Rows:
    """A table of training or validation examples, with one row per example.

    If several seeds are trained together, the table contains the examples of all S seeds. The rows of the first seed
    come first, then the rows of the second seed, and so on. Each seed has the same number of rows. The last rows of
    each seed may be unused, because memory is allocated in advance.
    """

    x: Tensor
    """The examples in the format in which they are stored on the device (see `Inputs.to_storage`), [rows, ...]. Empty
    in `LargeRows`: use `batch` or `parts`, which work for both."""
    y: Tensor
    """The class index of the example in each row, [rows]."""
    one_hot: Tensor
    """The class of the example in each row, as a one-hot vector, float [rows, C]. Empty in `LargeRows`."""
    num_seeds: int
    """Number of seeds, S."""
    num_examples: int
    """Number of examples of each seed, n. Rows that are allocated but still unused are not counted."""
    inputs: Inputs = field(default_factory=Inputs)
    """The object that turns stored examples into network inputs."""

    @property
    def rows_per_seed(self) -> int:
        """Number of rows of each seed, including rows that are allocated but still unused."""
        return len(self.y) // self.num_seeds

    @property
    def is_large(self) -> bool:
        """Whether the table is too large for the property `examples`, which is one tensor. If True, use `parts`."""
        return False

    @property
    def device(self) -> torch.device:
        """The device on which network inputs are computed."""
        return self.y.device

    @property
    def labels(self) -> Tensor:
        """The class index of each example, [S, n]."""
        return self.y.view(self.num_seeds, -1)[:, : self.num_examples].to(self.device)

    @property
    def examples(self) -> Tensor:
        """The examples as network inputs for evaluation, [S, n, ...], as one tensor. For large tables, use `parts`."""
        return self.between(0, self.num_examples)

    def parts(self, at_once: int, first: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """Yield the examples as network inputs for evaluation, in parts [S, at_once, ...]; the last may be smaller.

        Args:
            at_once: number of examples of each seed in a part, at least 1.
            first: index of the first example of each seed.
            end: index after the last example of each seed, as in a Python slice. By default, `num_examples`.
        """
        end = self.num_examples if end is None else end
        for start in range(first, end, at_once):
            yield self.between(start, min(start + at_once, end))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples in some rows as they are stored, [b, ...], and their classes as one-hot vectors, [b, C].

        `rows` are the numbers of the rows, int64 [b], on the device of `y`.
        """
        return self.x.index_select(0, rows), self.one_hot.index_select(0, rows)

    def between(self, start: int, end: int) -> Tensor:
        """Return the examples from `start` to `end` of each seed as network inputs, [S, end - start, ...]."""
        return self.inputs.to_input(self.x.view(self.num_seeds, -1, *self.x.shape[1:])[:, start:end])


@dataclass(frozen=True)
class LargeRows(Rows):
    """A table whose examples stay in the dataset, and are copied to the device when they are needed.

    The dataset may be a file that is larger than memory. The batches are the same as those of `Rows`, but it takes
    longer to make them. `y` is not on the device, but in main memory.
    """

    selection: Selection = field(kw_only=True)
    """The examples of all seeds, [S * n], in the order of the rows."""
    target: torch.device = field(kw_only=True)
    """The device on which network inputs are computed."""

    @property
    def is_large(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self.target

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        examples = self.selection[rows]
        x = self.inputs.to_storage(examples.images.to(self.target))
        labels = examples.labels.to(self.target)
        return x, torch.nn.functional.one_hot(labels, self.one_hot.shape[1]).float()

    def between(self, start: int, end: int) -> Tensor:
        first_rows = torch.arange(self.num_seeds)[:, None] * self.num_examples
        rows = (first_rows + torch.arange(start, end)).flatten()
        x = self.inputs.to_storage(self.selection[rows].images.to(self.target))
        return self.inputs.to_input(x.view(self.num_seeds, end - start, *x.shape[1:]))


def rows_of(examples: Examples, num_classes: int, inputs: Inputs, device: torch.device) -> Rows:
    """Return a table of examples that all seeds share, such as a test set. For the arguments, see `large_rows`."""
    whole = Selection(examples, torch.arange(len(examples)))
    return rows_of_seeds([[whole]], num_classes, inputs, device)


def rows_of_seeds(of_seeds: Pieces, num_classes: int, inputs: Inputs, device: torch.device) -> Rows:
    """Return a table of the examples of several seeds. For the arguments, see `large_rows`."""
    if large := large_rows(of_seeds, num_classes, inputs, device):
        return large
    x, y = stored(of_seeds, inputs, device)
    one_hot = torch.nn.functional.one_hot(y, num_classes).float()
    return Rows(x.flatten(0, 1), y.flatten(), one_hot.flatten(0, 1), len(y), y.shape[1], inputs)


def large_rows(of_seeds: Pieces, num_classes: int, inputs: Inputs, device: torch.device) -> LargeRows | None:
    """Return a table of the examples of several seeds that stay in the dataset; None if they are few.

    They are few if they need at most LARGE_BYTES when they are stored, or if they are not selections of one dataset.

    Args:
        of_seeds: for each seed, the examples in one or more pieces. Each seed has the same number of examples.
    """
    pieces = [piece for pieces in of_seeds for piece in pieces]
    bytes_of_one = inputs.to_storage(pieces[0][torch.arange(1)].images).nbytes + 4 * num_classes  # one-hot, float32
    if bytes_of_one * sum(map(len, pieces)) <= LARGE_BYTES or not (selection := Selection.join(pieces)):
        return None
    empty, num_seeds = torch.empty(0, num_classes), len(of_seeds)
    sizes = (num_seeds, len(selection) // num_seeds)
    return LargeRows(empty, selection.labels, empty, *sizes, inputs, selection=selection, target=device)


def stored(of_seeds: Pieces, inputs: Inputs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the examples of several seeds, [S, n, ...] as `Inputs.to_storage` returns them, and the labels, [S, n]."""
    images = torch.stack([torch.cat([piece.images for piece in pieces]) for pieces in of_seeds])
    labels = torch.stack([torch.cat([piece.labels for piece in pieces]) for pieces in of_seeds])
    return inputs.to_storage(images.to(device)), labels.to(device)

"""Cut a dataset into mega-batches, and say what they are.

The settings `seed` and `order` determine how the dataset is cut. The choice of the learner has no effect, so all
learners can be compared on the same mega-batches.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream
from vision.dataset_names import check_dates, is_number, natural_key
from vision.datasets import Dataset, Examples, ImageFiles, Selection
from vision.datasets.examples import examples_at_once


@dataclass(frozen=True)
class Arrival:
    """The examples of one mega-batch, for one seed. Each example is used either for training or for validation.

    In a stream, the examples are a `Selection`: their images are copied when they are asked for, and not before.
    """

    training: Examples | Selection
    """The examples for training."""
    validation: Examples | Selection
    """The examples for validation."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of all images and labels of this mega-batch, in hexadecimal."""
        return digest_of(self.training, self.validation)


def digest_of(*parts: Examples | Selection) -> str:
    """Return the SHA-256 digest of images and labels, in hexadecimal. Images are read in parts."""
    digest = sha256()
    for part in parts:
        digest.update(f"{len(part)}/".encode())
        positions = torch.arange(len(part))
        for which in positions.split(examples_at_once(part[positions[:1]].images)):
            digest.update(part[which].images.numpy().tobytes())
        digest.update(part.labels.numpy().tobytes())
    return digest.hexdigest()


def partition(
    dataset: Dataset, num_mega_batches: int, validation_share: float, seed: int, order: str = "random"
) -> list[Arrival]:
    """Cut the training set into B mega-batches, and return them in the order in which they arrive.

    `positions_of_mega_batches` decides which examples arrive together. Within a mega-batch, examples are
    in random order; the last ones are its validation data.

    As in the authors' code, the examples are shuffled by numpy's RandomState(seed).permutation and cut by numpy's
    array_split. numpy guarantees that RandomState returns the same numbers in all releases.

    Args:
        validation_share: fraction of each mega-batch that becomes validation data. The number of validation examples
            is rounded down, but is at least one.

    Raises:
        SettingError: if a mega-batch would contain fewer than two examples, or if the dataset does not have what
            `order` needs.
    """
    training = dataset.training
    if len(training) < 2 * num_mega_batches and order != "folders":
        raise SettingError(
            f"mega_batches={num_mega_batches} is too many for {len(training)} training examples: each mega-batch "
            f"needs two, one for training and one for validation; give at most {len(training) // 2}"
        )
    arrivals = []
    for t, part in enumerate(positions_of_mega_batches(dataset, num_mega_batches, seed, order), 1):
        if len(part) < 2:
            advice = f"give a smaller mega_batches= (now {num_mega_batches}), or add examples"
            raise SettingError(
                f"order={order}: mega-batch {t} has {len(part)} training examples, but needs two, one for training and "
                f"one for validation: {'add images to its folder' if order == 'folders' else advice}"
            )
        middle = len(part) - max(1, int(len(part) * validation_share))
        # A selection gives access to its own examples only. With views of all examples, a learner could read
        # mega-batches that have not arrived yet.
        positions = torch.from_numpy(part)
        arrivals.append(Arrival(Selection(training, positions[:middle]), Selection(training, positions[middle:])))
    return arrivals


def positions_of_mega_batches(dataset: Dataset, num_mega_batches: int, seed: int, order: str) -> list[np.ndarray]:
    """Return, for each mega-batch, the positions of its examples in the training set, int64 [n], in random order.

    random       the examples are shuffled and cut into B parts of equal size
    classes      if there are at least B classes, they are cut into B groups of about equal numbers of classes, in the
                 order of the classes, and a mega-batch contains all examples of its group; otherwise the examples are
                 sorted by class and cut into B parts of equal size
    column:NAME  the examples are sorted by a column of the dataset and cut into B parts of equal size
    folders      the mega-batches are the folders of the dataset

    Sizes that are called equal differ by at most one example. Examples with equal classes or values are in random order
    before they are cut. The sizes do not depend on the seed, so several seeds can be trained together.

    Raises:
        SettingError: if the dataset does not have the column, or if its number of mega-batch folders is not B.
    """
    num_examples = len(dataset.training)
    shuffled = np.random.RandomState(seed).permutation(num_examples)
    if order == "random":
        return np.array_split(shuffled, num_mega_batches)
    keys, sizes = _keys_and_sizes(dataset, num_mega_batches, order)
    if order == "folders":
        # The order must not depend on the number of all examples, so that a run can be continued with more folders.
        shuffled = np.arange(num_examples)
    ordered = shuffled[np.argsort(keys[shuffled], kind="stable")]
    parts = np.split(ordered, np.cumsum(sizes)[:-1])
    return [part[np.random.RandomState([seed, t]).permutation(len(part))] for t, part in enumerate(parts, start=1)]


def _keys_and_sizes(dataset: Dataset, num_mega_batches: int, order: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values by which the training examples are sorted, [n], and the sizes of the mega-batches, [B]."""
    if order == "folders":
        return _folders(dataset, num_mega_batches)
    equal = np.array([len(part) for part in np.array_split(np.arange(len(dataset.training)), num_mega_batches)])
    if order != "classes":
        return _column(dataset, order.removeprefix("column:")), equal
    labels = dataset.training.labels.numpy()
    if num_mega_batches > dataset.num_classes:
        return labels, equal
    group_sizes = [len(group) for group in np.array_split(np.arange(dataset.num_classes), num_mega_batches)]
    groups = np.repeat(np.arange(num_mega_batches), group_sizes)[labels]
    return groups, np.bincount(groups, minlength=num_mega_batches)


def _folders(dataset: Dataset, num_mega_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the folder of each training example, and the number of examples in each folder."""
    folders = dataset.folder_of_example
    if folders is None:
        raise SettingError(
            f"order=folders needs a folder of images with train/MEGA_BATCH/CLASS/IMAGE, but dataset={dataset.name} "
            f"has no such folders: give another order="
        )
    sizes = np.bincount(folders)
    if len(sizes) != num_mega_batches:
        raise SettingError(
            f"order=folders: {dataset.name}/train contains {len(sizes)} folders, but mega_batches={num_mega_batches}: "
            f"leave out mega_batches=. If folders were added just now, give the same command again"
        )
    return folders, sizes


def _column(dataset: Dataset, name: str) -> np.ndarray:
    """Return the values of a column of the dataset; the rank in natural order if the values are texts."""
    if name not in dataset.columns:
        raise SettingError(
            f"order=column:{name}: dataset={dataset.name} has no column {name!r}; its columns are "
            f"{', '.join(dataset.columns) or 'none'}. Columns come from other arrays in a .npz file, from columns.csv "
            f"in a folder of images, from Hugging Face, or from Dataset.columns"
        )
    values = np.asarray(dataset.columns[name])
    if values.ndim != 1:
        raise SettingError(f"order=column:{name}: found values of shape {values.shape}, expected one for each example")
    texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in values.tolist()]
    are_texts = bool(texts) and all(isinstance(one, str) for one in texts)
    is_gap = np.array([one is None or one != one or (isinstance(one, str) and not one.strip()) for one in texts])
    if is_gap.any():
        raise SettingError(
            f"order=column:{name}: the value of training example {int(is_gap.argmax())} is {values[is_gap][0]!s:.20}, "
            f"which cannot be sorted: give each example a value"
        )
    are_numbers = [not isinstance(one, str) or is_number(one) for one in texts]
    if (any(are_numbers) and not all(are_numbers)) or any(isinstance(one, str) for one in texts) != are_texts:
        raise SettingError(f"order=column:{name} has numbers and texts: give numbers only, or texts only")
    if not are_texts:
        return values
    check_dates(texts, f"order=column:{name}")
    if all(are_numbers):
        return np.array([float(one) for one in texts])
    rank = {text: number for number, text in enumerate(sorted(set(texts), key=natural_key))}
    return np.array([rank[text] for text in texts])


def stacked_stream(streams: Sequence[Sequence[Arrival]]) -> MegaBatchStream:
    """Join the streams of S seeds into one stream, so that the seeds can be trained together.

    The attribute `data` of each of its mega-batches is a list with one `Arrival` per seed.
    """
    mega_batches = []
    for t, arrivals in enumerate(zip(*streams, strict=True), start=1):
        digest = sha256("".join(arrival.digest for arrival in arrivals).encode()).hexdigest()
        counts = {"training": len(arrivals[0].training), "validation": len(arrivals[0].validation)}
        mega_batches.append(MegaBatch(t, digest, data=list(arrivals), counts=counts))
    return MegaBatchStream(mega_batches)


def what_was_read(dataset: Dataset, arrivals: Sequence[Arrival], order: str) -> dict[str, Any]:
    """Return what a run reads, for inputs.json: numbers of images by class and by mega-batch, order, ignored files.

    Args:
        arrivals: the mega-batches of one seed. Those of other seeds have the same sizes.
    """
    names = [str(one) for one in (range(dataset.num_classes) if dataset.class_names is None else dataset.class_names)]
    files = dataset.files or ImageFiles()

    def by_class(examples: Examples) -> dict[str, int]:
        counts = examples.labels.bincount(minlength=dataset.num_classes).tolist()
        return dict(zip(names, counts, strict=True))

    return {
        "training": by_class(dataset.training),
        "test": by_class(dataset.test),
        "mega_batches": [len(one.training) + len(one.validation) for one in arrivals],
        "order": order,
        "folders": list(files.mega_batches),
        "ignored": dict(files.ignored),
    }


def line_of(read: Mapping[str, Any], dataset: Dataset) -> str:
    """Return one line that says what a run reads, for the result of `what_was_read`."""
    channels, height, width = dataset.image_shape
    orders = {
        "random": "in random order",
        "classes": f"class after class ({_few(list(read['training']))})",
        "folders": f"in the order of the folders {_few(read['folders'])}",
    }
    order = orders.get(read["order"], f"in the order of the column {read['order'].partition(':')[2]}")
    ignored = _few([f"{count} {kind}" for kind, count in read["ignored"].items()])
    line = (
        f"dataset={dataset.name}: {len(dataset.training)} training images ({_counts(read['training'])}) and "
        f"{len(dataset.test)} test images ({_counts(read['test'])}), {width} x {height} pixels, {channels} channel(s); "
        f"{len(read['mega_batches'])} mega-batches of {_range(read['mega_batches'])}, {order}"
        f"{f'; ignored: {ignored}' if ignored else ''}"
    )
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)  # file names may control a terminal


def _few(names: Sequence[str], at_most: int = 12) -> str:
    shown = names if len(names) <= at_most else [*names[: at_most - 3], "...", *names[-2:]]
    return ", ".join(shown)


def _range(counts: Collection[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _counts(by_class: Mapping[str, int]) -> str:
    if len(by_class) > 6:
        return f"{len(by_class)} classes of {_range(by_class.values())}"
    return ", ".join(f"{name} {count}" for name, count in by_class.items())

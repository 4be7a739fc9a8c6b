"""Assign training examples to mega-batches by the setting `order`: at random, by class, by a column, or by folder.

The orders in `vision.batches` are something else: the random sequence in which a network reads the examples of a stage.
"""

import re

import numpy as np

from fairseq_alma.core.errors import SettingError
from vision.dataset_names import natural_key
from vision.datasets import Dataset


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
            f"leave out mega_batches="
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
    texts = values.tolist()
    are_texts = bool(texts) and all(isinstance(one, str) for one in texts)
    is_gap = np.array([not one.strip() for one in texts]) if are_texts else values != values
    if is_gap.any():
        raise SettingError(
            f"order=column:{name}: the value of training example {int(is_gap.argmax())} is {values[is_gap][0]!s:.20}, "
            f"which cannot be sorted: give each example a value"
        )
    if not are_texts:
        return values
    if dates := [one for one in texts if re.fullmatch(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}\b.*", one)]:
        raise SettingError(
            f"order=column:{name}: the date {dates[0]} does not begin with the year, so it cannot be sorted as a text: "
            f"write dates as 2026-11-23"
        )
    rank = {text: number for number, text in enumerate(sorted(set(texts), key=natural_key))}
    return np.array([rank[text] for text in texts])

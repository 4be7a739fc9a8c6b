"""What the setting `dataset` can name, and how many mega-batches its stream has by default.

This module imports neither torch nor numpy, so that settings and `--help` are fast. `vision.datasets` loads the data.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fairseq_alma.core.datasets import dataset_names, entry_of
from fairseq_alma.core.errors import SettingError

Kind = Literal["named", "npz", "folder", "hugging face", "function", "torchvision", "given"]
"""Kind of the value of `dataset`: a name in the catalogue, the path of a .npz file, the path of a folder of images,
hf:NAME, MODULE:FUNCTION, a class of torchvision, or the name of a Dataset that was given to `vision.run`."""

GIVEN = "given:"
"""Prefix of the name of a Dataset that was given to `vision.run`. It is added if `kind_of` does not recognise the
name."""

ORDERS = ("random", "classes", "column:NAME", "folders")
"""Values of the setting `order`."""


def kind_of(dataset: str) -> Kind:
    """Return what the value of the setting `dataset` names. Files and classes need not exist.

    Raises:
        SettingError: if the value cannot name a dataset.
    """
    if entry_of(dataset) is not None:
        return "named"
    if dataset.startswith(GIVEN) and len(dataset) > len(GIVEN):
        return "given"
    if dataset.startswith("hf:") and len(dataset) > 3:
        return "hugging face"
    if dataset.endswith(".npz"):
        return "npz"
    if "/" in dataset or dataset.startswith(("~", ".")) or (dataset and Path(dataset).is_dir()):
        return "folder"
    if is_function(dataset):
        return "function"
    if re.fullmatch(r"[A-Z]\w*", dataset):
        return "torchvision"
    raise SettingError(
        f"dataset={dataset!r} is not one of {', '.join(dataset_names())}. Or give the path of a folder of images or of "
        f"a .npz file, a class of torchvision such as FashionMNIST, hf:NAME, or MODULE:FUNCTION. For a dataset of a "
        f"plugin, also give plugin=MODULE"
    )


def is_function(text: str) -> bool:
    """Return True if the text has the form MODULE:FUNCTION, which names a Python function."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", text) is not None


def check_order(order: str, drift_overlap: float) -> None:
    """Check the settings `order` and `drift_overlap`.

    Raises:
        SettingError: if `order` is not one of ORDERS, or if `drift_overlap` is negative or has no effect.
    """
    is_column = order.startswith("column:") and len(order) > len("column:")
    if order not in ORDERS[:2] + ORDERS[3:] and not is_column:
        raise SettingError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    if not 0 <= drift_overlap < float("inf"):
        raise SettingError(f"drift_overlap={drift_overlap} must be a number of mega-batches, at least 0")
    if drift_overlap and order == "random":
        raise SettingError(
            f"drift_overlap={drift_overlap} has no effect with order=random: leave it out, or give another order= "
            f"({', '.join(ORDERS[1:])})"
        )


def default_mega_batches(dataset: str, order: str) -> int:
    """Return the number of mega-batches of a dataset's stream if `mega_batches` is not given.

    With order=folders, this is the number of folders in train/.

    Raises:
        SettingError: if the dataset has no default.
    """
    if order == "folders":
        if kind_of(dataset) != "folder":
            raise SettingError(f"order=folders needs a folder of images, but dataset={dataset!r} is not a folder")
        if num_folders := len(mega_batch_folders(Path(dataset).expanduser())):
            return num_folders
        raise SettingError(
            f"order=folders: there are no folders in {Path(dataset).expanduser() / 'train'}: put the images in "
            f"train/MEGA_BATCH/CLASS/IMAGE"
        )
    entry = entry_of(dataset)
    if entry is None or entry.mega_batches is None:
        raise SettingError(
            f"mega_batches= is missing: dataset={dataset} has no default. Give the number of mega-batches, for example "
            f"mega_batches=10"
        )
    return entry.mega_batches


def default_backbone(dataset: str) -> str:
    """Return the network for a dataset if `backbone` is not given.

    Raises:
        SettingError: if the dataset has no default.
    """
    entry = entry_of(dataset)
    if entry is None or entry.backbone is None:
        raise SettingError(
            f"backbone= is missing: dataset={dataset} has no default network. Give backbone=resnet20 or vgg (networks "
            f"for images), mlp (a perceptron), or package.module:function, a function of yours that returns a torch "
            f"module, for example torchvision.models:resnet18"
        )
    return entry.backbone


def mega_batch_folders(root: Path) -> Sequence[Path]:
    """Return the folders in ROOT/train, sorted by name: with order=folders, each is a mega-batch."""
    return visible_folders(root / "train")


def visible_folders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name, without hidden ones; [] if `folder` is not a folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")

"""What the setting `dataset` can name, and how many mega-batches its stream has by default.

This module imports neither torch nor numpy, so that settings and `--help` are fast. `vision.datasets` loads the data.
"""

import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

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
    """Return what the value of the setting `dataset` names. Raise SettingError if it cannot name a dataset.

    Files and classes need not exist.
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


def check_order(order: str) -> None:
    """Raise SettingError if the setting `order` is not one of ORDERS."""
    is_column = order.startswith("column:") and len(order) > len("column:")
    if order not in ORDERS[:2] + ORDERS[3:] and not is_column:
        raise SettingError(f"order={order!r} is not one of {', '.join(ORDERS)}")


def default_mega_batches(dataset: str, order: str) -> int:
    """Return the number of mega-batches of a dataset's stream if `mega_batches` is not given.

    With order=folders, this is the number of folders in train/. Raise SettingError if the dataset has no default.
    """
    if order == "folders":
        if kind_of(dataset) != "folder":
            raise SettingError(
                f"order=folders: dataset={dataset!r} is not a folder of images. If it is a Dataset with "
                f"folder_of_example, give mega_batches=, the number of its folders"
            )
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
    """Return the network for a dataset if `backbone` is not given. Raise SettingError if it has no default."""
    entry = entry_of(dataset)
    if entry is None or entry.backbone is None:
        raise SettingError(
            f"backbone= is missing: dataset={dataset} has no default network. Give backbone=resnet20 or vgg (networks "
            f"for images), mlp (a perceptron), or package.module:function, a function of yours that returns a torch "
            f"module, for example torchvision.models:resnet18"
        )
    return entry.backbone


def mega_batch_folders(root: Path) -> Sequence[Path]:
    """Return the folders in ROOT/train, in natural order: with order=folders, each is a mega-batch.

    Raise SettingError if the names are decimals such as 2019.2 and 2019.12, which are numbers or dates, or dates in
    another form than 2019-12.
    """
    folders = visible_folders(root / "train")
    decimals = [one.name for one in folders if re.fullmatch(r"[0-9]+\.[0-9]+", one.name)]
    if decimals != sorted(decimals, key=Decimal):
        raise SettingError(
            f"order=folders: the folders {', '.join(decimals[:12])} in {root / 'train'} have one order as decimal "
            f"numbers, and another one as dates or versions: give the numbers after the point as many digits everywhere"
        )
    check_dates([one.name for one in folders], f"order=folders: {root / 'train'}")
    return folders


_MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?)"
)
_NUMERIC_DATE = re.compile(r"\s*\d{1,2}(?:[./-]\d{1,2}[./-]\d{2,4}\b|[/-](?:19|20)\d\d\b|/\d\d\s*$)")
"""A date that does not begin with the year, such as 23/11/2026, 11/2026 and 11/26."""
_NAMED_MONTH = re.compile(
    rf"\b{_MONTH}[ .,/-]{{1,3}}(?:\d{{1,2}}[ .,/-]{{1,3}})?(?:19|20)\d\d\b|\b(?:19|20)\d\d[ .,/-]{{1,3}}{_MONTH}\b|"
    rf"^\s*(?:\d{{1,2}}[ ./-])?{_MONTH}[ ./-]\d\d\s*$",
    re.IGNORECASE,
)
"""A date with the name of its month, such as 5-Mar-2020, March 5, 2020, 2020 Mar and 5-Mar-20."""
_MONTH_ALONE, _MONTH_AND_YEAR = re.compile(_MONTH, re.IGNORECASE), re.compile(r"(?:0?[1-9]|1[0-2])\.(?:19|20)\d\d")
"""What is a date if all texts are of this form: March; and 11.2026, which is a number, too."""
_YEAR_AND_MONTH = re.compile(r"(?:19|20)\d\d\.(?:[1-9]|1[0-2])")


def check_dates(texts: Sequence[str], where: str) -> None:
    """Raise SettingError if texts are dates whose order is neither that of the texts nor that of their numbers.

    Args:
        texts: the texts that are sorted.
        where: where they are from, for the message.
    """
    numbers = all(map(is_number, texts))
    found = [] if numbers else [one for one in texts if _NUMERIC_DATE.match(one) or _NAMED_MONTH.search(one)]
    if any(all(form.fullmatch(one.strip()) for one in texts) for form in (_MONTH_ALONE, _MONTH_AND_YEAR)):
        found = [*texts]
    if all(_YEAR_AND_MONTH.fullmatch(one.strip()) for one in texts) and len({len(one.strip()) for one in texts}) > 1:
        found = [*texts]  # 2026.2 comes before 2026.10
    if found:
        raise SettingError(
            f"{where}: the date {found[0]} does not begin with the year, or its month is a word or has one digit, so "
            f"it cannot be sorted: write dates as 2026-11-23"
        )


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python would read the date 2026_11 as 202611


def visible_folders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder in natural order, without hidden ones; [] if `folder` is not a folder."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in entries_of(folder) if entry.name[0] != "." and entry.is_dir()]
    return [folder / name for name in sorted(names, key=natural_key)]


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return all files, folders and links in a folder, in any order.

    Raise SettingError if the folder cannot be read, or if it contains a link to something that does not exist.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise SettingError(f"the folder {folder} cannot be read ({error.strerror}): change its permissions") from error
    for entry in entries:
        if entry.is_symlink() and entry.name[0] != "." and not Path(entry).exists():
            raise SettingError(
                f"{entry.path} is a link to {Path(entry).readlink()}, which does not exist: restore it, or remove "
                f"the link"
            )
    return entries


def natural_key(name: str) -> tuple[Any, ...]:
    """Return the key that sorts names in natural order: 2 comes before 10, and week_2 before week_10.

    Negative integers come first. Where names are not digits, they are compared character by character.
    """
    if re.fullmatch("-[0-9]{1,255}", name):
        return 0, int(name), name
    # The parts are text and digits in turn. Digits without leading zeros are compared by their number first.
    parts = [part.lstrip("0") if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))]
    return 1, [(len(part), part) if number % 2 else part for number, part in enumerate(parts)], name

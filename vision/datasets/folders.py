"""Folders of images, with one folder per class, as torchvision's ImageFolder reads them."""

import csv
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.dataset_names import (
    check_dates,
    entries_of,
    is_number,
    mega_batch_folders,
    natural_key,
    visible_folders,
)
from vision.datasets.arrays import split_off_test_set
from vision.datasets.checks import check_all_classes_are_trained, check_dataset, check_held_out
from vision.datasets.decoding import image_endings
from vision.datasets.examples import Dataset, Examples, ImageFiles, measured_pixels
from vision.datasets.image_cache import decoded_images

TEST_NAMES = ("test", "val", "valid", "validation")
"""Names of the folder with the test images. The first that exists is used."""
PART_NAMES = ("train", "training", *TEST_NAMES, "testing", "dev")
"""Names that folders with training or test images often have, in lower case. They are not classes."""
MAX_COLUMN_CHARACTERS = 1000
"""Maximum length of a text in columns.csv, in characters."""
LAYOUT = "The folder must contain train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE"
HIDDEN = "hidden"
"""Kind of the files and folders whose names begin with a dot."""
STREAM_LAYOUT = "With order=folders, the folder must contain train/MEGA_BATCH/CLASS/IMAGE and test/CLASS/IMAGE"


class _File(NamedTuple):
    """An image file."""

    path: Path
    class_name: str
    group: int
    """Index of the mega-batch folder; 0 if there are no such folders."""


def read_folder(root: Path, name: str, data_root: Path, image_size: int | None, order: str = "random") -> Dataset:
    """Return the dataset in a folder of images.

    The folder contains train/ and test/ (or val/), each with one folder per class. Or it contains the class folders
    directly; then a fixed random fifth of the images is the test set. With order=folders, train/ contains one folder
    for each mega-batch, and each of these contains class folders; the normalisation is measured on the first of them.

    Mega-batches and classes are in natural order (see `natural_key`); the classes are numbered from 0. Images are the
    files with an ending of a format that Pillow decodes, also in subfolders and behind links. Hidden files and folders
    are ignored. A file columns.csv in the folder gives further values of each image (see `Dataset.columns`): its first
    line is file,NAME,... and the files are paths below the folder.

    Args:
        data_root: the data folder. Decoded images are stored in its subfolder image_cache.
        image_size: height and width to which images are resized (see `resized_dataset`); None if all have one size.
        order: the setting `order`. Only order=folders and order=column:NAME make a difference here.

    Raises:
        SettingError: if the folder is missing, or if its classes or images are invalid.
    """
    where = f"dataset={name}"
    if not root.is_dir():
        raise SettingError(f"{where}: the folder {root.absolute()} does not exist: give the path of an existing folder")
    has_parts = (root / "train").is_dir()
    ignored: Counter[str] = Counter()
    folders = mega_batch_folders(root) if order == "folders" else []
    if order != "folders":
        training = _files(root / "train" if has_parts else root, ignored, where)
    elif folders:
        training = [file for t, one in enumerate(folders) for file in _files(one, ignored, where, t, STREAM_LAYOUT)]
    else:
        raise SettingError(
            f"{where}: order=folders needs one folder for each mega-batch in {root / 'train'}, but there is none: put "
            f"the images in train/MEGA_BATCH/CLASS/IMAGE"
        )
    if has_parts:
        test_folder = _test_folder(root, where)
        test = _files(test_folder, ignored, where)
        others = [one.name for one in visible_folders(root) if one.name not in ("train", test_folder.name)]
        ignored.update(f"folder named {name}" for name in others)
        _check_classes(root, training, test, where)
    else:
        _check_classes(root, training, None, where)
        # Separate the files before they are decoded, so that both parts are slices of the decoded images, which need
        # not fit into memory.
        positions = split_off_test_set(len(training))
        check_held_out([file.class_name for file in training], positions[0], where, "train/CLASS and test/CLASS")
        training, test = ([training[one] for one in part.tolist()] for part in positions)
    files = ImageFiles(dict(ignored.most_common()), [one.name for one in folders])
    return _dataset(root, name, training, test, data_root / "image_cache", image_size, order, files)


def _classes(files: list[_File]) -> list[str]:
    return sorted({file.class_name for file in files}, key=natural_key)


def _check_classes(root: Path, training: list[_File], test: list[_File] | None, where: str) -> None:
    """Raise SettingError if there is only one class, or if the training set and the test set have different classes."""
    classes = _classes(training)
    if test is None and {name.lower() for name in classes} <= set(PART_NAMES):
        raise SettingError(f"{where}: {root} contains the folders {', '.join(classes)}, which are no classes. {LAYOUT}")
    if len(classes) < 2:
        raise SettingError(
            f"{where}: {root} contains one class only ({classes[0]}), but at least two are needed. {LAYOUT}"
        )
    if test is not None and (of_test := _classes(test)) != classes:
        only = [", ".join(sorted(set(a) - set(b))) or "-" for a, b in ((classes, of_test), (of_test, classes))]
        raise SettingError(
            f"{where}: the training images and the test images have different classes. Only in training: {only[0]}. "
            f"Only in test: {only[1]}. Both need a folder for each class (or order=folders, if train/ contains a "
            f"folder for each mega-batch)"
        )


def _dataset(
    root: Path, name: str, training: list[_File], test: list[_File], cache: Path, image_size: int | None, order: str,
    files: ImageFiles,
) -> Dataset:  # fmt: skip
    """Decode the images, and return the dataset. For the arguments, see `read_folder`."""
    where, classes, cut = f"dataset={name}", _classes(training), len(training)
    number = {one: index for index, one in enumerate(classes)}
    labels = torch.tensor([number[file.class_name] for file in (*training, *test)])
    paths = [file.path for file in (*training, *test)]
    images, shape, num_animated = decoded_images(paths, root, cache, image_size, where)
    if num_animated:
        files = replace(files, ignored={**files.ignored, "files after their first frame": num_animated})
    parts = Examples(images[:cut], labels[:cut]), Examples(images[cut:], labels[cut:])
    columns = _columns(root, paths[:cut], where, order.partition("column:")[2])
    groups = np.array([file.group for file in training]) if order == "folders" else None
    # With order=folders, measure the first mega-batch only. Then a run can be continued after a folder was added.
    num_measured = cut if groups is None else int((groups == 0).sum())
    pixels = measured_pixels(images[:num_measured], shape[0])
    dataset = Dataset(name, shape, len(classes), pixels, *parts, columns, groups, classes, files)
    return check_all_classes_are_trained(check_dataset(dataset, where), where, classes)


def _test_folder(root: Path, where: str) -> Path:
    for name in TEST_NAMES:
        if (root / name).is_dir():
            return root / name
    raise SettingError(f"{where}: {root} contains train/, but neither test/ nor val/. {LAYOUT}")


def _files(folder: Path, all_ignored: Counter[str], where: str, group: int = 0, layout: str = LAYOUT) -> list[_File]:
    """Return the image files in the class folders of `folder`, sorted by class and path.

    What is not read is counted in `all_ignored` (see `ImageFiles.ignored`).
    """
    files: list[_File] = []
    endings = image_endings()
    beside = Counter(_kind(entry.name) for entry in entries_of(folder) if not entry.is_dir())
    all_ignored.update({f"{kind} outside class folders": count for kind, count in beside.items() if kind in endings})
    for class_folder in visible_folders(folder):
        ignored: Counter[str] = Counter()
        paths = sorted(_images_below(class_folder, endings, ignored, where))
        if not paths:
            found = ", ".join(f"{count} {kind}" for kind, count in ignored.most_common()) or "nothing"
            raise SettingError(
                f"{where}: the class folder {class_folder} contains no image (found: {found}): add images in a format "
                f"that Pillow decodes, or remove the folder. {layout}"
            )
        all_ignored.update(ignored)
        # File systems and archives write accented letters in two ways, which look the same.
        class_name = unicodedata.normalize("NFC", class_folder.name)
        files += [_File(path, class_name, group) for path in paths]
    if not files:
        raise SettingError(f"{where}: {folder} contains no class folders. {layout}")
    return files


def _images_below(
    folder: Path, endings: set[str], ignored: Counter[str], where: str, above: tuple[Path, ...] = ()
) -> Iterator[Path]:
    """Yield the image files in a folder and its subfolders, also behind links, as torchvision does."""
    real = folder.resolve()
    if real in above:
        raise SettingError(f"{where}: {folder} is a link to a folder that contains it: remove the link")
    for entry in entries_of(folder):
        kind = _kind(entry.name)
        if kind not in endings and (kind == HIDDEN or not entry.is_dir()):
            ignored[kind] += 1
        elif entry.is_dir():
            yield from _images_below(folder / entry.name, endings, ignored, where, (*above, real))
        elif entry.is_file():
            yield folder / entry.name
        else:
            raise SettingError(f"{where}: {entry.path} is a pipe, a socket or a device, but no file: remove it")


def _kind(name: str) -> str:
    """Return the ending of the name of a file in lower case, or what to call files without one."""
    return HIDDEN if name[0] == "." else Path(name).suffix.lower() or "without an ending"


def _columns(root: Path, paths: list[Path], where: str, used: str) -> dict[str, np.ndarray]:
    """Return the columns of the file columns.csv in a folder of images: one value for each of the files, by name."""
    path = root / "columns.csv"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            lines = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise SettingError(f"{where}: {path} is no valid CSV file in UTF-8 ({error})") from error
    names = [name for name in reader.fieldnames or [] if name != "file"]
    if len(names) + 1 != len(reader.fieldnames or []) or any(None in line.values() or None in line for line in lines):
        raise SettingError(
            f"{where}: the first line of {path} is {','.join(reader.fieldnames or [])!r}, but must be file,NAME,..., "
            f"and each line must have as many values"
        )
    by_file: dict[str, dict[str, str]] = {}
    for line in lines:
        file = _same_path(line.pop("file"))
        if by_file.setdefault(file, line) != line:
            raise SettingError(f"{where}: {path} has two lines for {file} with different values: remove one of them")
    files = [_same_path(one.relative_to(root).as_posix()) for one in paths]
    if missing := [file for file in files if file not in by_file]:
        raise SettingError(
            f"{where}: {path} has no line for {len(missing)} training images, the first of which is {missing[0]}: add "
            f"a line for each training image, with its path below {root}"
        )
    columns = {name: [by_file[file][name].strip() for file in files] for name in names}
    if used in columns:
        _check_sortable(dict(zip(files, columns[used], strict=True)), f"{where}: the column {used} of {path}")
    return {name: _numbers_or_texts(values) for name, values in columns.items()}


def _same_path(file: str) -> str:
    """Return a path below the folder in the form in which it can be compared."""
    return unicodedata.normalize("NFC", file.strip().replace("\\", "/").removeprefix("./"))


def _check_sortable(values: dict[str, str], where: str) -> None:
    """Raise SettingError if a column has gaps, numbers among texts, or dates in a form that has another order.

    `values` are those of each file.
    """
    if gaps := [file for file, value in values.items() if value.lower() in ("", "nan")]:
        raise SettingError(
            f"{where} has no value for {len(gaps)} images, the first of which is {gaps[0]}: fill them in"
        )
    texts = {file: value for file, value in values.items() if not is_number(value)}
    if texts and len(texts) < len(values):
        file, text = next(iter(texts.items()))
        raise SettingError(
            f"{where} has {len(values) - len(texts)} numbers and {len(texts)} texts, the first of which is {text!r} "
            f"for {file}: give numbers only, or texts only"
        )
    check_dates([*values.values()], where)


def _numbers_or_texts(values: list[str]) -> np.ndarray:
    if not all(is_number(value) for value in values):
        longest = max(map(len, values))
        if longest > MAX_COLUMN_CHARACTERS:
            raise SettingError(
                f"columns.csv contains a text of {longest:,} characters, but at most {MAX_COLUMN_CHARACTERS:,} are "
                f"possible, because each text of a column takes the memory of the longest one: shorten it"
            )
        return np.array(values)
    try:
        return np.array([int(value) for value in values], np.int64)  # exact, also for long numbers such as times
    except (ValueError, OverflowError):
        return np.array([float(value) for value in values])

"""Folders of images, with one folder per class, as torchvision's ImageFolder reads them."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.dataset_names import mega_batch_folders, visible_folders
from vision.datasets.arrays import split_off_test_set
from vision.datasets.checks import check_all_classes_are_trained, check_dataset
from vision.datasets.examples import Dataset, Examples, measured_pixels
from vision.datasets.image_cache import decoded_images

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of the names of image files, as in torchvision. Other files are ignored."""
TEST_NAMES = ("test", "val")
"""Names of the folder with the test images. The first that exists is used."""
LAYOUT = "The folder must contain train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE"
STREAM_LAYOUT = "With order=folders, the folder must contain train/MEGA_BATCH/CLASS/IMAGE and test/CLASS/IMAGE"


@dataclass(frozen=True)
class _Part:
    """The image files of the training set or of the test set."""

    paths: list[Path]
    class_names: list[str]
    """Name of the class of each file."""
    groups: list[int]
    """Index of the mega-batch folder of each file; 0 if there are no such folders."""

    @property
    def classes(self) -> list[str]:
        return sorted(set(self.class_names))


def read_folder(root: Path, name: str, data_root: Path, image_size: int | None, order: str = "random") -> Dataset:
    """Return the dataset in a folder of images.

    The folder contains train/ and test/ (or val/), each with one folder per class. Or it contains the class folders
    directly; then a fixed random fifth of the images is the test set. With order=folders, train/ contains one folder
    for each mega-batch, and each of these contains class folders; the normalisation is measured on the first of them.

    The classes are numbered from 0 in the order of their names. A file columns.csv in the folder gives further values
    of each image (see `Dataset.columns`): its first line is file,NAME,... and the files are paths below the folder.

    Args:
        root: the folder.
        name: name of the dataset.
        data_root: the data folder. Decoded images are stored in its subfolder image_cache.
        image_size: height and width to which images are resized (see `resized_dataset`); None if all have one size.
        order: the setting `order`. Only order=folders makes a difference here.

    Raises:
        SettingError: if the folder is missing, or if its classes or images are invalid.
    """
    where = f"dataset={name}"
    if not root.is_dir():
        raise SettingError(f"{where}: the folder {root.absolute()} does not exist: give the path of an existing folder")
    has_parts = (root / "train").is_dir()
    if order == "folders":
        if not mega_batch_folders(root):
            raise SettingError(
                f"{where}: order=folders needs one folder for each mega-batch in {root / 'train'}, but there is none: "
                f"put the images in train/MEGA_BATCH/CLASS/IMAGE"
            )
        training = _joined([_files(one, where, t, STREAM_LAYOUT) for t, one in enumerate(mega_batch_folders(root))])
    else:
        training = _files(root / "train" if has_parts else root, where)
    test = _files(_test_folder(root, where), where) if has_parts else None
    classes = training.classes
    if len(classes) < 2:
        raise SettingError(
            f"{where}: {root} contains one class only ({classes[0]}), but at least two are needed. {LAYOUT}"
        )
    if test is not None and test.classes != classes:
        only = [
            ", ".join(sorted(set(a) - set(b))) or "-" for a, b in ((classes, test.classes), (test.classes, classes))
        ]
        raise SettingError(
            f"{where}: the training images and the test images have different classes. Only in training: {only[0]}. "
            f"Only in test: {only[1]}. Both need a folder for each class (or order=folders, if train/ contains a "
            f"folder for each mega-batch)"
        )
    return _dataset(root, name, training, test, data_root / "image_cache", image_size, order == "folders")


def _dataset(
    root: Path, name: str, training: _Part, test: _Part | None, cache: Path, image_size: int | None, has_groups: bool
) -> Dataset:
    """Decode the images, and return the dataset. For the arguments, see `read_folder`."""
    where, classes = f"dataset={name}", training.classes
    if test is None:
        # Separate the files before they are decoded, so that both parts are slices of the decoded images, which need
        # not fit into memory.
        training, test = (
            _picked(training, positions.tolist()) for positions in split_off_test_set(len(training.paths))
        )
    number = {one: index for index, one in enumerate(classes)}
    labels = torch.tensor([number[one] for one in (*training.class_names, *test.class_names)])
    images, shape = decoded_images([*training.paths, *test.paths], root, cache, image_size, where)
    cut = len(training.paths)
    parts = Examples(images[:cut], labels[:cut]), Examples(images[cut:], labels[cut:])
    columns = _columns(root, training.paths, where)
    groups = np.array(training.groups) if has_groups else None
    # With order=folders, measure the first mega-batch only. Then a run can be continued after a folder was added.
    num_measured = training.groups.count(0) if has_groups else cut
    pixels = measured_pixels(images[:num_measured], shape[0])
    dataset = Dataset(name, shape, len(classes), pixels, *parts, columns, groups, classes)
    return check_all_classes_are_trained(check_dataset(dataset, where), where, classes)


def _picked(part: _Part, positions: list[int]) -> _Part:
    """Return the files at some positions."""
    return _Part(
        [part.paths[one] for one in positions],
        [part.class_names[one] for one in positions],
        [part.groups[one] for one in positions],
    )


def _test_folder(root: Path, where: str) -> Path:
    for name in TEST_NAMES:
        if (root / name).is_dir():
            return root / name
    raise SettingError(f"{where}: {root} contains train/, but neither test/ nor val/. {LAYOUT}")


def _files(folder: Path, where: str, group: int = 0, layout: str = LAYOUT) -> _Part:
    """Return the image files in the class folders of `folder`, sorted by class and path.

    Raises:
        SettingError: if there is no class folder, or if a class folder contains no image.
    """
    part = _Part([], [], [])
    for class_folder in visible_folders(folder):
        paths = sorted(p for p in class_folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not paths:
            raise SettingError(
                f"{where}: the class folder {class_folder} contains no image ({', '.join(SUFFIXES)}): add images, or "
                f"remove the folder. {layout}"
            )
        part.paths.extend(paths)
        part.class_names.extend([class_folder.name] * len(paths))
        part.groups.extend([group] * len(paths))
    if not part.paths:
        raise SettingError(f"{where}: {folder} contains no class folders. {layout}")
    return part


def _joined(parts: list[_Part]) -> _Part:
    """Return the files of several mega-batches as one part."""
    joined = _Part([], [], [])
    for part in parts:
        joined.paths.extend(part.paths)
        joined.class_names.extend(part.class_names)
        joined.groups.extend(part.groups)
    return joined


def _columns(root: Path, paths: list[Path], where: str) -> dict[str, np.ndarray]:
    """Return the columns of the file columns.csv in a folder of images: one value for each of the files, by name.

    A column of numbers is returned as floats, any other column as texts. Without columns.csv, return {}.

    Raises:
        SettingError: if the file has no column `file`, or no line for one of the images.
    """
    path = root / "columns.csv"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as stream:
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
    by_file = {line["file"].removeprefix("./"): line for line in lines}
    files = [one.relative_to(root).as_posix() for one in paths]
    if missing := [file for file in files if file not in by_file]:
        raise SettingError(
            f"{where}: {path} has no line for {len(missing)} training images, the first of which is {missing[0]}: add "
            f"a line for each training image, with its path below {root}"
        )
    return {name: _numbers_or_texts([by_file[file][name] for file in files]) for name in names}


def _numbers_or_texts(values: list[str]) -> np.ndarray:
    try:
        return np.array([float(value) for value in values])
    except ValueError:
        return np.array(values)

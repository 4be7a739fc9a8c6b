"""Datasets from .npz files, torchvision, Hugging Face, and functions of the user; and the checks of such datasets."""

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from fairseq_alma.core.datasets import _ENTRIES, entry_of
from fairseq_alma.core.errors import RunError, SettingError
from tests.vision.pictures import noise
from tests.vision.test_datasets import no_network, write_part  # noqa: F401 (a fixture)
from tests.vision.tiny_runs import small_run
from vision.dataset_names import kind_of
from vision.datasets import Dataset, Examples, Pixels, dataset_from_arrays, load_dataset, register_dataset

LABELS = np.array([0, 1, 2, 0, 1, 2])


def refusal(load: Callable) -> str:
    with pytest.raises(SettingError) as error:
        load()
    return str(error.value)


def save(path: Path, **arrays) -> str:
    """Write a .npz file and return its path as text."""
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        ("digits", "named"),
        ("a/b", "folder"),
        ("./birds", "folder"),
        ("~/birds", "folder"),
        ("birds", "folder"),
        ("a/b.npz", "npz"),
        ("hf:someone/birds", "hugging face"),
        ("a.b:load", "function"),
        ("a/b:c", "folder"),
        ("FashionMNIST", "torchvision"),
        ("bird", None),
        ("hf:", None),
        ("a:1", None),
        ("", None),
    ],
)
def test_the_form_of_the_value_says_what_it_names(tmp_path, monkeypatch, dataset, kind):
    monkeypatch.chdir(tmp_path)
    for name in ("birds", "digits"):  # a name in the catalogue comes before a folder
        (tmp_path / name).mkdir()
    if kind is None:
        assert f"dataset={dataset!r} is not one of digits, mnist" in refusal(lambda: kind_of(dataset))
    else:
        assert kind_of(dataset) == kind


# ---- Files of arrays.


def test_an_npz_of_colour_images_is_read_channel_by_channel(tmp_path):
    x, y = noise(6, 5, 4, 3), noise(3, 5, 4, 3, seed=1)
    name = save(tmp_path / "mine.npz", x_train=x, y_train=LABELS, x_test=y, y_test=LABELS[:3].astype(np.uint8))
    dataset = load_dataset(name, tmp_path)
    assert (dataset.name, dataset.image_shape, dataset.num_classes) == (name, (3, 5, 4), 3)
    assert torch.equal(dataset.training.images, torch.from_numpy(x.transpose(0, 3, 1, 2).reshape(6, -1)))
    assert torch.equal(dataset.test.images, torch.from_numpy(y.transpose(0, 3, 1, 2).reshape(3, -1)))
    assert dataset.test.labels.tolist() == [0, 1, 2]
    normalised = dataset.pixels.normalise(dataset.training.images).view(6, 3, -1)
    assert normalised.mean((0, 2)).tolist() == pytest.approx([0] * 3, abs=1e-5)
    assert normalised.std((0, 2), correction=0).tolist() == pytest.approx([1] * 3, abs=1e-5)


def test_channels_may_come_first_or_last(tmp_path):
    first = noise(80, 3, 8, 8)
    labels = np.arange(80) % 2
    for x in (first, first.transpose(0, 2, 3, 1)):
        dataset = load_dataset(
            save(tmp_path / "mine.npz", x_train=x, y_train=labels, x_test=x, y_test=labels), tmp_path
        )
        assert (len(dataset.training), dataset.image_shape) == (80, (3, 8, 8))
        assert torch.equal(dataset.training.images, torch.from_numpy(first).flatten(1))
    unclear = noise(6, 3, 4, 3)
    shapes = [dataset_from_arrays("mine", unclear, LABELS, channels=one).image_shape for one in ("first", "last")]
    assert shapes == [(3, 4, 3), (3, 3, 4)]


def test_a_class_whose_only_example_is_held_out_is_named(tmp_path):
    labels = np.zeros(10, int)
    labels[np.random.RandomState(0).permutation(10)[0]] = 1
    name = save(tmp_path / "mine.npz", x=noise(10, 4, 4), y=labels)
    message = refusal(lambda: load_dataset(name, tmp_path))
    assert "the class 1 has 1 example(s), and the random fifth of all examples that becomes the test set" in message
    assert message.endswith("give the test set yourself (x_train, y_train, x_test and y_test)")


def test_float_images_stay_floats_and_normalising_does_not_change_them(tmp_path):
    x = np.random.default_rng(0).normal(3, 2, (6, 2, 2))
    name = save(tmp_path / "mine.npz", x_train=x, y_train=LABELS, x_test=x, y_test=LABELS)
    dataset = load_dataset(name, tmp_path)
    assert (dataset.training.images.dtype, dataset.pixels.largest) == (torch.float32, 1.0)
    before = dataset.training.images.clone()
    assert dataset.pixels.normalise(dataset.training.images).mean().item() == pytest.approx(0, abs=1e-5)
    assert torch.equal(dataset.training.images, before)


def test_of_x_and_y_alone_a_fixed_fifth_is_held_out_and_columns_follow(tmp_path):
    y = np.arange(10) % 2
    name = save(tmp_path / "mine.npz", x=np.arange(10, dtype=np.uint8)[:, None, None], y=y, year=np.arange(10) + 2000)
    dataset = load_dataset(name, tmp_path)
    order = np.random.RandomState(0).permutation(10)
    assert dataset.test.images[:, 0].tolist() == order[:2].tolist()
    assert dataset.training.images[:, 0].tolist() == order[2:].tolist()
    assert dataset.columns["year"].tolist() == (order[2:] + 2000).tolist()


def test_at_most_10000_images_are_measured_and_a_constant_channel_is_not_divided_by_zero():
    images = np.zeros((12_000, 1, 1, 2), np.uint8)
    images[::2, ..., 0] = 255
    labels = np.arange(12_000) % 2
    pixels = dataset_from_arrays("mine", images, labels, images[:2], labels[:2], channels="last").pixels
    # Of 10,000 of the 12,000 images, about a half are white: within five standard errors, which are 0.2%, and not
    # exactly the half that all images have.
    assert 0 < abs(pixels.mean[0] - 0.5) < 0.011
    assert pixels.mean[0] * 10_000 == pytest.approx(round(pixels.mean[0] * 10_000), abs=1e-3)
    assert pixels.mean[1] == 0.0
    assert pixels.deviation == (pytest.approx(0.5, abs=0.001), 1.0)


def test_image_size_resizes_arrays(tmp_path):
    x = np.repeat(np.array([10, 20, 30, 40], np.uint8), 2)[None, None].repeat(4, 1).repeat(6, 0)  # as in test_folders
    name = save(tmp_path / "mine.npz", x_train=x, y_train=LABELS, x_test=x / 255, y_test=LABELS)
    assert "must be equal" in refusal(lambda: load_dataset(name, tmp_path))
    name = save(tmp_path / "mine.npz", x_train=x, y_train=LABELS, x_test=x, y_test=LABELS)
    dataset = load_dataset(name, tmp_path, image_size=4)
    assert dataset.image_shape == (1, 4, 4)
    assert dataset.test.images[0].tolist() == [20, 20, 30, 30] * 4
    assert load_dataset("digits", tmp_path, image_size=12).training.images.shape == (1438, 144)


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"y_train": None}, "y_train is missing: it must contain x_train, y_train, x_test, y_test, or x and y"),
        ({"x_train": noise(6, 4, 4).astype(int)}, "x_train has the type int64, but images must be uint8 (0 to 255)"),
        ({"x_train": noise(6, 16)}, "x_train has the shape [6, 16], but images must have the shape [n, height, width]"),
        ({"x_train": noise(6, 32, 32, 32)}, "so 32 channels; at most 16 are possible. Images must have the shape"),
        ({"x_train": noise(6, 3, 8, 3)}, "may be the axis of length 3 or the last one of length 3: call dataset_from"),
        (
            {"x_train": noise(6, 8, 8, 16)},
            "may be the axis of length 8 or the last one of length 16: call dataset_from",
        ),
        ({"x_train": noise(5, 4, 4)}, "x_train has 5 images, but y_train has 6 labels"),
        ({"x_test": noise(3, 4, 5)}, "shape (1, 4, 4) (channels, height, width) and type uint8, but the test images"),
        ({"y_train": LABELS + 1}, "the training set has no example of class 0. Labels must be 0, 1, ... 3 without"),
        ({"y_train": LABELS * 2}, "the training set has no example of class 1, 3."),
        ({"y_train": LABELS - 1}, "y_train has the label -1, but labels must be 0, 1, 2, ..."),
        ({"y_train": LABELS / 2}, "y_train has the type float64 and the shape [6], but labels must be integers"),
        ({"y_train": LABELS * 0, "y_test": LABELS[:3] * 0}, "there must be at least two classes, but num_classes=1"),
        ({"y_test": np.array([0, 1, 3])}, "the test set has examples of class 3, but the training set has only"),
        ({"x_train": np.full((6, 4, 4), np.nan), "x_test": np.zeros((3, 4, 4))}, "NaN or infinite, first in image 0"),
    ],
)
def test_arrays_that_are_not_images_with_labels_are_refused(tmp_path, changes, message_part):
    arrays = {"x_train": noise(6, 4, 4), "y_train": LABELS, "x_test": noise(3, 4, 4), "y_test": LABELS[:3], **changes}
    name = save(tmp_path / "mine.npz", **{key: value for key, value in arrays.items() if value is not None})
    message = refusal(lambda: load_dataset(name, tmp_path))
    assert name in message
    assert message_part in message


def test_one_infinite_pixel_of_the_test_set_is_found():
    x = np.zeros((6, 4, 4))
    bad = x.copy()
    bad[4, 1, 2] = -np.inf
    message = refusal(lambda: dataset_from_arrays("mine", x, LABELS, bad, LABELS))
    assert "x_test has pixels that are NaN or infinite, first in image 4" in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a zip", b"text"])
def test_a_missing_or_damaged_npz_is_refused(tmp_path, content):
    path = tmp_path / "mine.npz"
    assert f"the file {path} does not exist" in refusal(lambda: load_dataset(str(path), tmp_path))
    path.write_bytes(content)
    assert f"{path} cannot be read as a .npz file" in refusal(lambda: load_dataset(str(path), tmp_path))


def test_an_npz_that_is_damaged_inside_or_holds_one_array_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, x=np.random.RandomState(0).randint(0, 255, (50, 8, 8)).astype(np.uint8), y=np.arange(50))
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
        with suppress(SettingError):  # a flipped byte may also do no harm
            assert len(load_dataset(str(path), tmp_path).training) == 40
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    assert f"{path} cannot be read as a .npz file" in refusal(lambda: load_dataset(str(path), tmp_path))


class Executes:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_an_npz_with_a_pickle_is_refused_and_its_code_not_executed(tmp_path):
    name = save(tmp_path / "mine.npz", x_train=np.array([Executes(tmp_path / "executed")], dtype=object))
    assert "cannot be read as a .npz file of numbers" in refusal(lambda: load_dataset(name, tmp_path))
    assert not (tmp_path / "executed").exists()


# ---- torchvision.


def test_a_class_of_torchvision_with_train_is_read_by_its_name(tmp_path, no_network):  # noqa: F811
    raw = tmp_path / "FashionMNIST/raw"
    parts = [
        write_part(raw, f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte", classes)
        for part, classes in (("train", [3, 0, 1, 2]), ("t10k", [2, 1]))
    ]
    dataset = load_dataset("FashionMNIST", tmp_path)
    assert (dataset.name, dataset.image_shape, dataset.num_classes) == ("FashionMNIST", (1, 28, 28), 4)
    assert dataset.training.images.tolist() == parts[0].reshape(4, -1).tolist()
    assert dataset.test.images.tolist() == parts[1].reshape(2, -1).tolist()
    assert dataset.training.labels.tolist() == [3, 0, 1, 2]


class OfSplits:
    """A dataset as SVHN: with split= instead of train=. Its first image is grey, and the second has colours."""

    def __init__(self, root, split="train", transform=None, download=False):
        if split not in ("train", "val"):
            raise ValueError(f"no split {split}")
        self.images = [Image.new("L", (4, 2), 7), Image.new("RGB", (4, 2), (1, 2, 3))]

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.images[index], index


def test_a_class_of_torchvision_with_split_is_read_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "OfSplits", OfSplits, raising=False)
    dataset = load_dataset("OfSplits", tmp_path)
    assert dataset.image_shape == (3, 2, 4)
    assert dataset.training.images.tolist() == [[7] * 24, [1] * 8 + [2] * 8 + [3] * 8]
    assert len(dataset.test) == 2


def test_images_of_libraries_are_decoded_as_those_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "OfSplits", OfSplits, raising=False)
    black_on_nothing, deep = Image.new("LA", (1, 1), (0, 255)), Image.new("I;16", (4, 2), 900)
    monkeypatch.setattr(OfSplits, "images", [black_on_nothing, Image.new("LA", (1, 1), (0, 0))], raising=False)
    monkeypatch.setattr(OfSplits, "__init__", lambda self, root, split="train", download=False: None)
    dataset = load_dataset("OfSplits", tmp_path)
    assert dataset.training.images.tolist() == [[0], [255]]
    assert dataset.files is not None
    monkeypatch.setattr(OfSplits, "images", [deep, deep])
    assert "dataset=OfSplits: example 0 has pixels with more than 8 bits" in refusal(
        lambda: load_dataset("OfSplits", tmp_path)
    )


def test_a_class_of_torchvision_that_cannot_be_used_is_refused(tmp_path, no_network):  # noqa: F811
    assert "torchvision.datasets has no class Fashion" in refusal(lambda: load_dataset("Fashion", tmp_path))
    assert "neither train= nor split=" in refusal(lambda: load_dataset("FakeData", tmp_path))
    message = refusal(lambda: load_dataset("KMNIST", tmp_path))
    assert f"torchvision could not read it from {tmp_path} or download it (" in message


# ---- Hugging Face.


class ClassLabel: ...


class Table:
    """A split of a dataset of Hugging Face: what our code uses of the library's class."""

    def __init__(self, columns: dict, features: dict):
        self.columns, self.features, self.column_names = columns, features, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: one[key] for name, one in self.columns.items()}


def test_without_the_library_of_hugging_face_its_datasets_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal(lambda: load_dataset("hf:beans", tmp_path))
    assert "dataset=hf:beans needs the library `datasets` of Hugging Face" in message
    assert "pip install datasets" in message


def test_a_dataset_of_hugging_face_is_read_by_the_types_of_its_columns(tmp_path, monkeypatch):
    images = [Image.new("L", (2, 2), value) for value in range(10)]
    days = [datetime(2026, 1, 1 + value) for value in range(10)]
    columns = {"photo": images, "kind": [0, 1] * 5, "n": list(range(10)), "day": days, "box": [[1]] * 9 + [[1, 2]]}
    columns |= {"gap": [None, *"abcdefghi"], "facts": [{"a": 1}] * 10}
    features = {"photo": type("Image", (), {})(), "kind": ClassLabel(), "n": 1, "day": 2, "box": 3}
    library = ModuleType("datasets")
    asked = []

    def load(name, cache_dir):
        asked.append((name, cache_dir))
        return {"train": Table(columns, features)}

    library.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", library)
    dataset = load_dataset("hf:someone/leaves", tmp_path)
    assert asked == [("someone/leaves", str(tmp_path / "hugging_face"))]
    order = np.random.RandomState(0).permutation(10)[2:].tolist()
    assert dataset.training.images[:, 0].tolist() == order
    assert dataset.training.labels.tolist() == [value % 2 for value in order]
    assert sorted(dataset.columns) == ["day", "gap", "n"]
    assert dataset.columns["n"].tolist() == order
    assert dataset.columns["day"].tolist() == [f"2026-01-{1 + value:02d}T00:00:00" for value in order]
    features["kind"] = 3
    message = refusal(lambda: load_dataset("hf:someone/leaves", tmp_path))
    assert (
        "has the columns photo, kind, n, day, box, gap, facts, and it is not clear which contains the labels" in message
    )


# ---- Functions of the user.


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Return a function that writes the module own_data.py into the current folder."""
    monkeypatch.chdir(tmp_path)
    head = "import numpy as np\nfrom vision.datasets import *\nx = np.arange(32, dtype=np.uint8).reshape(8, 2, 2)\n"

    def write(body: str) -> None:
        sys.modules.pop("own_data", None)
        (tmp_path / "own_data.py").write_text(head + body)

    yield write
    sys.modules.pop("own_data", None)


ARRAYS = "dataset_from_arrays('any', x, np.arange(8) % 2, x, np.arange(8) % 2)"


@pytest.mark.parametrize("parameters", ["", "data_root"])
def test_a_function_returns_the_dataset(own_module, tmp_path, parameters):
    own_module(f"def load({parameters}):\n    return {ARRAYS}\n")
    dataset = load_dataset("own_data:load", tmp_path)
    assert (dataset.name, len(dataset.training)) == ("own_data:load", 8)
    assert load_dataset("own_data:load", tmp_path, image_size=3).image_shape == (1, 3, 3)


@pytest.mark.parametrize(
    ("body", "message_part"),
    [
        (
            "def load():\n    return x",
            "found ndarray, expected a vision.datasets.Dataset: the function must return one",
        ),
        ("", "the module own_data has no function load"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
    ],
)
def test_a_function_that_returns_no_dataset_is_refused(own_module, tmp_path, body, message_part):
    own_module(body)
    assert message_part in refusal(lambda: load_dataset("own_data:load", tmp_path))


def of_tensors(**changes) -> Dataset:
    """Return a small dataset, in which some fields are changed. It is not checked."""
    examples = Examples(torch.zeros(4, 6, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    values = {
        "name": "mine", "image_shape": (1, 2, 3), "num_classes": 2, "pixels": Pixels(255.0, 0.5, 0.5),
        "training": examples, "test": examples,
    }  # fmt: skip
    return Dataset(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"image_shape": (2, 3)}, "image_shape=(2, 3) must be three integers above 0"),
        ({"image_shape": (1, 3, 3)}, "images of shape [4, 6], but the image shape (channels, height, width) = (1, 3"),
        ({"num_classes": 3}, "the training set has no example of class 2"),
        ({"num_classes": 1}, "at least two classes"),
        ({"pixels": Pixels(255.0, (0.5, 0.5), (1.0, 1.0))}, "the normalisation has 2 channels (mean=(0.5, 0.5)), but"),
        ({"pixels": Pixels(255.0, 0.5, 0.0)}, "deviation=0.0 of the normalisation must be above 0"),
        ({"training": None}, "the training set is NoneType, but must be vision.datasets.Examples"),
        ({"test": Examples(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([0]))}, "images of type torch.int64"),
        ({"test": Examples(torch.zeros(1, 6), torch.tensor([0.0]))}, "labels of type torch.float32 [1]"),
        ({"test": Examples(torch.zeros(1, 6), torch.tensor([0, 1]))}, "the test set has 1 images and 2 labels"),
        (
            {"test": Examples(torch.zeros(1, 6), torch.tensor([2]))},
            "test set has labels in 2..2, but they must be in 0",
        ),
        ({"columns": {"day": np.arange(3)}}, "the column 'day' has 3 values, but there are 4 training examples"),
        ({"folder_of_example": np.arange(3)}, "folder_of_example must be an array of 4 integers from 0 on"),
        ({"folder_of_example": np.zeros(4)}, "folder_of_example must be an array of 4 integers from 0 on"),
    ],
)
def test_a_registered_function_that_returns_wrong_shapes_is_refused(tmp_path, monkeypatch, changes, message_part):
    monkeypatch.setitem(_ENTRIES, "mine", None)
    del _ENTRIES["mine"]
    register_dataset("mine", mega_batches=2)(lambda data_root: of_tensors(**changes))
    message = refusal(lambda: load_dataset("mine", tmp_path))
    assert message.startswith("dataset=mine: ")
    assert message_part in message


def test_a_registered_dataset_has_its_defaults(tmp_path, monkeypatch):
    monkeypatch.setitem(_ENTRIES, "mine", None)
    del _ENTRIES["mine"]
    seen = []

    @register_dataset("mine", mega_batches=2, backbone="mlp")
    def load(data_root):
        seen.append(data_root)
        return of_tensors(name="another")

    assert load_dataset("mine", "here").name == "mine"
    assert seen == [Path("here")]
    assert (entry_of("mine").mega_batches, entry_of("mine").backbone) == (2, "mlp")
    (rows,) = small_run(tmp_path, dataset="mine", mega_batches=None, epochs=1)
    assert len(rows) == 3
    for arguments, message_part in (
        ({"name": "digits"}, "belongs to another dataset"),
        ({"name": "b", "mega_batches": 0}, "mega_batches=0 must be an integer above 0"),
    ):
        assert message_part in refusal(lambda given=arguments: register_dataset(**given)(lambda: None))


# ---- Runs.


def test_a_run_is_refused_when_the_source_of_its_dataset_has_changed(own_module, tmp_path):
    how = {"dataset": "own_data:load", "backbone": "mlp", "mega_batches": 2, "epochs": 1}
    own_module(f"def load():\n    return {ARRAYS}\n")
    (rows,) = small_run(tmp_path / "run", **how)
    assert small_run(tmp_path / "run", **how) == [rows]
    own_module(f"def load():\n    # changed\n    return {ARRAYS}\n")
    with pytest.raises(RunError, match="dataset_digest"):
        small_run(tmp_path / "run", **how)


def test_a_dataset_in_python_must_have_the_name_in_the_settings(tmp_path):
    digits = load_dataset("digits")
    with pytest.raises(SettingError, match="has the name 'digits', but the settings have dataset='mnist'"):
        small_run(tmp_path, digits, dataset="mnist")
    with pytest.raises(SettingError, match="found Examples, expected a vision"):
        small_run(tmp_path, digits.training)

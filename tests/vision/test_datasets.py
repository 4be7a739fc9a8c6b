"""Datasets: digits from scikit-learn, and small MNIST and EMNIST files that the tests write."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fairseq_alma.core.errors import SettingError
from vision.datasets import Dataset, Examples, Pixels, load_dataset, measured_pixels
from vision.stream import partition


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write a file in the MNIST format: two zeros, 8 for bytes, the number of dimensions, their sizes, the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_part(raw: Path, images: str, labels: str, classes: list[int]) -> np.ndarray:
    """Write one image of 28 x 28 pixels for each class in the list, and the labels. Return the images."""
    pixels = (np.arange(len(classes) * 28 * 28).reshape(-1, 28, 28) + len(classes)) % 251
    write_idx(raw / images, pixels)
    write_idx(raw / labels, np.array(classes))
    return pixels


def write_mnist(root: Path, train=(3, 1, 4, 1, 5, 9), test=(2, 7, 1)) -> list[np.ndarray]:
    raw = root / "MNIST/raw"
    return [
        write_part(raw, f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte", list(classes))
        for name, classes in (("train", train), ("t10k", test))
    ]


def write_emnist(root: Path, split: str, train, test) -> list[np.ndarray]:
    raw = root / "EMNIST/raw"
    return [
        write_part(raw, f"emnist-{split}-{name}-images-idx3-ubyte", f"emnist-{split}-{name}-labels-idx1-ubyte", classes)
        for name, classes in (("train", train), ("test", test))
    ]


@pytest.fixture
def no_network(monkeypatch):
    """Make every download fail at once."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_digits_has_a_fixed_fifth_of_its_1797_images_as_test_set(tmp_path):
    dataset = load_dataset("digits", tmp_path)
    assert (len(dataset.training), len(dataset.test)) == (1438, 359)
    assert (dataset.image_shape, dataset.num_classes) == ((1, 8, 8), 10)
    order = np.random.RandomState(0).permutation(1797)
    images, labels = load_digits(return_X_y=True)
    assert torch.equal(dataset.test.images, torch.from_numpy(images[order[:359]]).to(torch.uint8))
    assert dataset.test.labels.tolist() == labels[order[:359]].tolist()
    assert dataset.training.labels.tolist() == labels[order[359:]].tolist()
    assert dataset.test.labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]  # the same on every machine


def test_digits_pixels_have_mean_0_and_deviation_1_in_training():
    dataset = load_dataset("digits", ".")
    x = dataset.pixels.normalise(dataset.training.images)
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    assert x.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("order", ["random", "classes"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_images_that_are_measured_are_independent_of_the_mega_batches(order, seed):
    """10,000 of 20,000 images are measured: half of the first mega-batch, and half of its validation data."""
    numbers = torch.arange(20_000)
    examples = Examples(numbers.float()[:, None], numbers % 2)
    dataset = Dataset("numbers", (1, 1, 1), 2, Pixels(1.0, 0.0, 1.0), examples, examples)
    arrivals = partition(dataset, 2, 0.1, seed, order)
    # 4.9 standard deviations of a mean of 10,000 draws without replacement: probability 1e-6.
    for chosen, part in ((arrivals[0].training, 0.45), (arrivals[0].validation, 0.05), (arrivals[1].validation, 0.05)):
        is_in = torch.zeros(20_000, 1)
        is_in[chosen[torch.arange(len(chosen))].images.flatten().long()] = 1
        bound = 4.9 * (part * (1 - part) / 10_000 / 2) ** 0.5
        assert abs(measured_pixels(is_in, 1).mean[0] - part) < bound


def test_a_pixel_becomes_a_number():
    pixels = Pixels(largest=255, mean=0.5, deviation=0.25)
    images = torch.tensor([[0, 255, 51]], dtype=torch.uint8)
    assert pixels.normalise(images).tolist() == [pytest.approx([-2.0, 2.0, -1.2])]
    assert images.tolist() == [[0, 255, 51]]  # the images did not change


def test_mnist_is_read_from_its_four_files(tmp_path, no_network):
    train, test = write_mnist(tmp_path)
    dataset = load_dataset("mnist", str(tmp_path))
    assert (dataset.image_shape, dataset.num_classes) == ((1, 28, 28), 10)
    assert dataset.training.labels.tolist() == [3, 1, 4, 1, 5, 9]
    assert dataset.test.labels.tolist() == [2, 7, 1]
    assert dataset.training.images.dtype == torch.uint8
    assert dataset.training.images.tolist() == train.reshape(6, -1).tolist()
    assert dataset.test.images.tolist() == test.reshape(3, -1).tolist()


def test_emnist_letters_are_numbered_from_1_and_become_classes_from_0(tmp_path, no_network):
    train, test = write_emnist(tmp_path, "letters", train=[1, 26, 2, 3], test=[3, 1])
    dataset = load_dataset("emnist_letters", tmp_path)
    assert dataset.training.labels.tolist() == [0, 25, 1, 2]
    assert dataset.test.labels.tolist() == [2, 0]
    assert dataset.num_classes == 26
    assert dataset.training.images.tolist() == train.reshape(4, -1).tolist()
    assert dataset.test.images.tolist() == test.reshape(2, -1).tolist()


def test_other_splits_of_emnist_are_numbered_from_0(tmp_path, no_network):
    write_emnist(tmp_path, "balanced", train=[0, 46, 5], test=[7])
    write_emnist(tmp_path, "digits", train=[9, 0], test=[0])
    balanced, digits = (load_dataset(name, tmp_path) for name in ("emnist", "emnist_digits"))
    assert balanced.training.labels.tolist() == [0, 46, 5]
    assert (balanced.num_classes, digits.num_classes) == (47, 10)


def test_an_unknown_dataset_or_split_is_refused_with_a_list_of_the_known_ones(tmp_path):
    with pytest.raises(SettingError, match="dataset='svhn' is not one of digits, mnist, emnist, emnist_letters"):
        load_dataset("svhn", tmp_path)
    with pytest.raises(SettingError, match="dataset='emnist_capitals' is not one of digits, mnist, emnist"):
        load_dataset("emnist_capitals", tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("emnist", "EMNIST")])
def test_missing_files_are_reported_if_there_is_no_network(tmp_path, no_network, name, folder):
    with pytest.raises(SettingError) as error:
        load_dataset(name, tmp_path)
    for part in (f"dataset={name}", f"not in {tmp_path}/{folder}/raw and could not be downloaded", "Set data_root="):
        assert part in str(error.value)


@pytest.mark.parametrize("length", [0, 3, 10, 16, 500, -1])
def test_a_file_that_was_cut_off_is_reported(tmp_path, no_network, length):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(SettingError, match=r"train-images-idx3-ubyte is damaged: .* remove it, and the next run"):
        load_dataset("mnist", tmp_path)


def test_images_without_labels_are_reported(tmp_path, no_network):
    write_mnist(tmp_path)
    write_idx(tmp_path / "MNIST/raw/train-labels-idx1-ubyte", np.array([3, 1, 4]))
    with pytest.raises(SettingError, match=r"6 images, but .*train-labels-idx1-ubyte contains 3 labels: remove"):
        load_dataset("mnist", tmp_path)


def test_a_file_of_another_format_is_reported(tmp_path, no_network):
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST/raw"
    (raw / "t10k-images-idx3-ubyte").write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(SettingError, match="t10k-images-idx3-ubyte is damaged: its header does not describe a 3-dim"):
        load_dataset("mnist", tmp_path)


def test_a_label_out_of_range_is_reported(tmp_path, no_network):
    write_mnist(tmp_path, test=(2, 7, 77))
    with pytest.raises(
        SettingError, match=r"t10k-labels-idx1-ubyte is damaged: its labels are in 2..77, but must be in 0..9"
    ):
        load_dataset("mnist", tmp_path)
    write_emnist(tmp_path, "letters", train=[1, 0], test=[3])
    with pytest.raises(SettingError, match=r"labels are in 0..1, but must be in 1..26"):
        load_dataset("emnist_letters", tmp_path)


def test_the_real_mnist(alma_data):
    if not (alma_data / "MNIST/raw").is_dir():
        pytest.skip("no MNIST/raw in ALMA_DATA")
    dataset = load_dataset("mnist", alma_data)
    assert (len(dataset.training), len(dataset.test)) == (60_000, 10_000)
    assert dataset.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    x = dataset.pixels.normalise(dataset.training.images)
    assert (x.mean().item(), x.std().item()) == (pytest.approx(0, abs=1e-3), pytest.approx(1, abs=1e-3))

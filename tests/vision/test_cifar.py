"""CIFAR-10 and CIFAR-100: the real files, small files that the tests write as Python 2 did, and damaged files."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_alma.core.errors import SettingError
from vision.datasets import Pixels, load_dataset

BATCHES = [f"data_batch_{number}" for number in (1, 2, 3, 4, 5)]
DOWNLOADED_AGAIN = "remove it, and the next run with an internet connection downloads it again"


class Python2Pickler(pickle._Pickler):
    """A pickler that writes text and bytes in the same way, as Python 2 did."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_bytes(self, values: bytes) -> None:
        kind, width = (pickle.SHORT_BINSTRING, 1) if len(values) < 256 else (pickle.BINSTRING, 4)
        self.write(kind + len(values).to_bytes(width, "little") + values)
        self.memoize(values)

    dispatch[bytes] = save_bytes
    dispatch[str] = lambda self, text: self.save_bytes(text.encode("latin1"))


def write_pickle(path: Path, content: object, numpy_core: bytes = b"numpy.core") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = io.BytesIO()
    Python2Pickler(written, protocol=2).dump(content)
    path.write_bytes(written.getvalue().replace(b"numpy._core", numpy_core))


def images(num: int, first: int = 0) -> np.ndarray:
    """Return images [num, 3072] whose neighbouring pixels differ."""
    return ((np.arange(num * 3072) + first) % 251).astype(np.uint8).reshape(num, 3072)


def batch(labels: list[int], first: int = 0) -> dict[bytes, object]:
    names = [f"cat_{number}.png" for number in range(len(labels))]
    return {b"batch_label": "one of 5", b"labels": labels, b"data": images(len(labels), first), b"filenames": names}


def write_cifar10(root: Path, training=((0, 9), (1,), (2,), (3,), (4, 5, 6)), test=(8, 7)) -> Path:
    folder = root / "cifar-10-batches-py"
    for number, (name, labels) in enumerate(zip([*BATCHES, "test_batch"], [*training, test], strict=True)):
        write_pickle(folder / name, batch(list(labels), number))
    return folder


def write_cifar100(root: Path) -> Path:
    folder = root / "cifar-100-python"
    for name, fine in (("train", [99, 0, 42]), ("test", [7, 70])):
        content = batch(fine)
        content[b"fine_labels"] = content.pop(b"labels")
        content[b"coarse_labels"] = [label // 5 for label in fine]
        write_pickle(folder / name, content)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    """Make every download fail at once."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def real(alma_data):
    """Return the data folder, or skip the test if it does not contain CIFAR-10."""
    if not (alma_data / "cifar-10-batches-py").is_dir():
        pytest.skip("no cifar-10-batches-py in ALMA_DATA")
    return alma_data


@pytest.fixture(scope="module")
def real_dataset(real):
    return load_dataset("cifar10", real)


def refusal(name: str, root: Path) -> str:
    with pytest.raises(SettingError) as error:
        load_dataset(name, root)
    return str(error.value)


def test_the_real_cifar10_equals_what_torchvision_reads(real, real_dataset):
    torchvision = pytest.importorskip("torchvision")
    assert (real_dataset.name, real_dataset.image_shape, real_dataset.num_classes) == ("cifar10", (3, 32, 32), 10)
    for examples, train, num_examples in ((real_dataset.training, True, 50_000), (real_dataset.test, False, 10_000)):
        theirs = torchvision.datasets.CIFAR10(real, train=train)
        assert examples.images.shape == (num_examples, 3072)
        assert (examples.images.dtype, examples.labels.dtype) == (torch.uint8, torch.int64)
        assert examples.labels.tolist() == theirs.targets
        sample = torch.arange(0, num_examples, 997)
        expected = torch.from_numpy(theirs.data[sample]).permute(
            0, 3, 1, 2
        )  # torchvision's order is row, column, channel
        assert torch.equal(examples.images[sample].view(-1, 3, 32, 32), expected)


def test_each_channel_of_the_real_cifar10_has_mean_0_and_deviation_1(real_dataset):
    x = real_dataset.pixels.normalise(real_dataset.training.images[::5])
    assert x.shape == (10_000, 3072)
    channels = x.view(-1, 3, 1024)
    assert channels.mean(dim=(0, 2)).tolist() == pytest.approx([0, 0, 0], abs=0.01)
    assert channels.std(dim=(0, 2)).tolist() == pytest.approx([1, 1, 1], abs=0.01)


def test_one_flipped_bit_of_a_real_pixel_is_reported(tmp_path, real):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*BATCHES, "test_batch"):
        (folder / name).symlink_to(real / folder.name / name)
    content = bytearray((folder / "data_batch_3").read_bytes())
    content[15_000_000] ^= 1
    (folder / "data_batch_3").unlink()
    (folder / "data_batch_3").write_bytes(content)
    message = refusal("cifar10", tmp_path)
    assert f"{folder / 'data_batch_3'} is damaged: its MD5 sum is " in message
    assert "the published file of 10000 images has 54ebc095f3ab1f0389bbae665268c751" in message
    assert message.endswith(DOWNLOADED_AGAIN)


def test_a_real_file_under_the_name_of_another_is_reported(tmp_path, real):
    folder = write_cifar10(tmp_path)
    (folder / "test_batch").unlink()
    (folder / "test_batch").symlink_to(real / folder.name / "data_batch_1")
    assert f"{folder / 'test_batch'} is damaged: its MD5 sum is c99cafc152244af753f735de768cd75f" in refusal(
        "cifar10", tmp_path
    )


def test_cifar10_is_read_from_its_six_files_in_their_order(tmp_path, no_network):
    write_cifar10(tmp_path)
    dataset = load_dataset("cifar10", str(tmp_path))
    assert dataset.training.labels.tolist() == [0, 9, 1, 2, 3, 4, 5, 6]
    assert dataset.test.labels.tolist() == [8, 7]
    expected = [images(2, 0), images(1, 1), images(1, 2), images(1, 3), images(3, 4)]
    assert dataset.training.images.tolist() == np.concatenate(expected).tolist()
    assert dataset.test.images.tolist() == images(2, 5).tolist()


def test_cifar100_has_the_fine_labels(tmp_path, no_network):
    write_cifar100(tmp_path)
    dataset = load_dataset("cifar100", tmp_path)
    assert (dataset.name, dataset.image_shape, dataset.num_classes) == ("cifar100", (3, 32, 32), 100)
    assert dataset.training.labels.tolist() == [99, 0, 42]  # coarse: 19, 0, 8
    assert dataset.test.labels.tolist() == [7, 70]
    assert dataset.training.images.tolist() == images(3).tolist()
    assert (dataset.test.images.shape, dataset.test.images.dtype) == ((2, 3072), torch.uint8)


@pytest.mark.parametrize(
    "content",
    [batch([4, 5]), {**batch([4, 5]), b"data": np.asfortranarray(images(2))}],
    ids=["row by row", "column by column"],
)
@pytest.mark.parametrize("numpy_core", [b"numpy.core", b"numpy._core"])
def test_arrays_are_read_as_numpy_of_any_age_writes_them(tmp_path, no_network, content, numpy_core):
    write_pickle(write_cifar10(tmp_path) / "test_batch", content, numpy_core)
    test = load_dataset("cifar10", tmp_path).test
    assert (test.images.tolist(), test.labels.tolist()) == (images(2).tolist(), [4, 5])
    assert test.images.is_contiguous()


def test_each_channel_has_a_mean_and_a_deviation_of_its_own():
    pixels = Pixels(largest=10, mean=(0.0, 0.5, 1.0), deviation=(1.0, 0.5, 0.25))
    images = torch.tensor([[0, 10, 0, 10, 0, 10], [5, 5, 5, 5, 5, 5]], dtype=torch.uint8)  # 3 channels of 1 x 2
    expected = [[0.0, 1.0, -1.0, 1.0, -4.0, 0.0], [0.5, 0.5, 0.0, 0.0, -2.0, -2.0]]
    assert pixels.normalise(images).tolist() == expected
    assert pixels.normalise(images[None]).tolist() == [expected]  # any number of axes before the pixels
    assert images[0].tolist() == [0, 10, 0, 10, 0, 10]  # the images did not change
    with pytest.raises(SettingError, match="must have the same number of channels"):
        Pixels(largest=10, mean=(0.0, 0.5, 1.0), deviation=1.0)


@pytest.mark.parametrize("length", [0, 1, 30, 500, -100, -1])
def test_a_file_that_was_cut_off_is_reported(tmp_path, no_network, length):
    path = write_cifar10(tmp_path) / "data_batch_2"
    path.write_bytes(path.read_bytes()[:length])
    message = refusal("cifar10", tmp_path)
    assert f"{path} is damaged: it cannot be read as a pickle of images (" in message
    assert message.endswith(DOWNLOADED_AGAIN)


def test_a_file_of_another_format_is_reported(tmp_path, no_network):
    path = write_cifar10(tmp_path) / "test_batch"
    for content in (b"<html>404: not found</html>", bytes(range(256)) * 50, b"\x1f\x8b\x08"):
        path.write_bytes(content)
        assert f"{path} is damaged: it cannot be read as a pickle of images (" in refusal("cifar10", tmp_path)


class Executes:
    """An object whose pickle calls os.system when it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_file_that_contains_code_is_refused_and_its_code_not_executed(tmp_path, no_network):
    folder, mark = write_cifar10(tmp_path), tmp_path / "executed"
    content = batch([1, 2])
    content[b"data"] = Executes(f"touch {mark}")
    write_pickle(folder / "data_batch_4", content)
    message = refusal("cifar10", tmp_path)
    assert not mark.exists()
    assert f"{folder / 'data_batch_4'} is damaged: " in message
    assert f"would call {os.system.__module__}.system, which a file of images does not need" in message
    with (folder / "data_batch_4").open("rb") as stream:
        pickle.load(stream)
    assert mark.exists()  # an ordinary unpickler executes the code


@pytest.mark.parametrize(
    "function", ["builtins eval", "numpy load", "numpy.core.multiarray scalar", "numpy._core.multiarray fromfile"]
)
def test_only_arrays_may_be_unpickled(tmp_path, no_network, function):
    path = write_cifar10(tmp_path) / "test_batch"
    path.write_bytes(f"c{function.replace(' ', chr(10))}\n(S'1'\ntR.".encode())
    assert f"{path} is damaged: " in (message := refusal("cifar10", tmp_path))
    assert f"would call {function.replace(' ', '.')}, which a file of images does not need" in message


@pytest.mark.parametrize(
    ("change", "message_part"),
    [
        ({b"data": None}, "it lacks the key 'data', which all files of cifar-10-batches-py contain"),
        ({b"labels": None}, "it lacks the key 'labels', which all files of cifar-10-batches-py contain"),
        ({b"labels": [1, 2, 3]}, "it contains 2 images, but 3 labels"),
        ({b"labels": [1]}, "it contains 2 images, but 1 labels"),
        ({b"labels": [3, 10]}, "its labels are in 3..10, but must be in 0..9"),
        ({b"labels": [-1, 3]}, "its labels are in -1..3, but must be in 0..9"),
        ({b"labels": [1.5, 2]}, "its labels are not a list of whole numbers"),
        ({b"labels": 7}, "its labels are not a list of whole numbers"),
        (
            {b"labels": [], b"data": images(0)},
            "its data are not an array of bytes with shape [n, 3072] and at least one image",
        ),
        (
            {b"data": images(2)[:, :1024]},
            "its data have type uint8 and shape [2, 1024], but must have type uint8 and shape [n, 3072]",
        ),
        (
            {b"data": images(2).astype(np.int16)},
            "its data have type int16 and shape [2, 3072], but must have type uint8",
        ),
        ({b"data": images(2).reshape(2, 3, 32, 32)}, "its data are not an array of bytes with shape [n, 3072]"),
        ({b"data": images(2).ravel()}, "its data are not an array of bytes with shape [n, 3072]"),
        ({b"data": images(2).tolist()}, "its data are not an array of bytes with shape [n, 3072]"),
        ({b"data": b"\0" * 6144}, "its data are not an array of bytes with shape [n, 3072]"),
        (
            {b"data": np.array([[None] * 3072] * 2)},
            "its data have type object and shape [2, 3072], but must have type uint8",
        ),
    ],
)
def test_content_that_is_not_images_with_labels_is_reported(tmp_path, no_network, change, message_part):
    path = write_cifar10(tmp_path) / "data_batch_5"
    content = {key: value for key, value in {**batch([1, 2]), **change}.items() if value is not None}
    write_pickle(path, content)
    message = refusal("cifar10", tmp_path)
    assert f"{path} is damaged: " in message
    assert message_part in message
    assert message.endswith(DOWNLOADED_AGAIN)


def test_an_array_with_a_wrong_shape_is_reported(tmp_path, no_network):
    path = write_cifar10(tmp_path) / "data_batch_5"
    content = path.read_bytes()
    shape = pickle.BININT1 + bytes([3]) + pickle.BININT2 + (3072).to_bytes(2, "little")
    assert content.count(shape) == 1
    for num in (2, 4, 200):
        path.write_bytes(content.replace(shape, shape.replace(bytes([3]), bytes([num]), 1)))
        assert f"{path} is damaged: it cannot be read as a pickle of images (" in refusal("cifar10", tmp_path)


def test_cifar100_without_fine_labels_is_reported(tmp_path, no_network):
    path = write_cifar100(tmp_path) / "test"
    write_pickle(path, {b"data": images(1), b"coarse_labels": [3]})
    assert f"{path} is damaged: it lacks the key 'fine_labels', which all files of cifar-100" in refusal(
        "cifar100", tmp_path
    )


def test_a_fine_label_out_of_range_is_reported(tmp_path, no_network):
    path = write_cifar100(tmp_path) / "train"
    write_pickle(path, {b"data": images(2), b"fine_labels": [100, 3], b"coarse_labels": [0, 0]})
    assert f"{path} is damaged: its fine_labels are in 3..100, but must be in 0..99" in refusal("cifar100", tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_missing_files_are_reported_if_there_is_no_network(tmp_path, no_network, name, folder):
    message = refusal(name, tmp_path)
    assert f"dataset={name}: its files are not in {tmp_path}/{folder} and could not be downloaded" in message
    assert (
        f"Set data_root= to the folder that contains {folder}/, or run the command once on a machine with an internet"
        in message
    )


def test_a_single_missing_file_is_downloaded_too(tmp_path, no_network):
    (write_cifar10(tmp_path) / "data_batch_3").unlink()
    assert f"its files are not in {tmp_path}/cifar-10-batches-py and could not be" in refusal("cifar10", tmp_path)

"""New images for the networks of a run: a picture has the same pixels in each form, and unclear forms are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

import vision
from fairseq_alma.core.errors import SettingError
from tests.vision.pictures import noise
from tests.vision.tiny_runs import small_run
from vision.datasets import Dataset, load_dataset
from vision.image_format import ImageFormat

LABELS = np.array([0, 1, 0, 1])


def from_files(folder: Path, images: np.ndarray, image_size: int | None = None) -> Dataset:
    """Write images to files, and read them as a folder."""
    for part in ("train", "test"):
        for number, image in enumerate(images):
            path = folder / f"mine/{part}/{LABELS[number]}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return load_dataset(f"{folder}/mine", folder, image_size=image_size)


def from_array(folder: Path, images: np.ndarray, image_size: int | None = None) -> Dataset:
    """Write images to a .npz file, and read it."""
    np.savez(folder / "mine.npz", x_train=images, y_train=LABELS, x_test=images, y_test=LABELS)
    return load_dataset(f"{folder}/mine.npz", folder, image_size=image_size)


def forms_of(images: np.ndarray) -> dict[str, object]:
    """Return images, uint8 [n, h, w] or [n, h, w, 3], in the forms in which other programs give them."""
    first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    last = images[..., None] if images.ndim == 3 else images
    tensors = [to_tensor(image) for image in last]
    return {
        "channels last": last,
        "channels first": first,
        "tensor": torch.from_numpy(first.copy()),
        "int64": last.astype(np.int64),
        "big endian": last.astype(">i4"),
        "float32 as of ToTensor": torch.stack(tensors),
        "float64": last / 255,
        "bfloat16": torch.from_numpy(first.copy()).to(torch.float32).div(255),
        "not contiguous": last[::-1, :, ::-1][::-1, :, ::-1],
        "list of arrays": list(images),
        "list of tensors": tensors,
        "list of pictures": [Image.fromarray(image) for image in images],
        "tuple of lists": last.tolist(),
        "pictures with alpha": [
            Image.fromarray(image).convert("RGBA" if image.ndim == 3 else "LA") for image in images
        ],
    }


@pytest.mark.parametrize("read", [from_files, from_array])
@pytest.mark.parametrize("shape", [(6, 7), (6, 7, 3), (28, 28)])
def test_the_same_picture_in_each_form_has_the_same_pixels(tmp_path, read, shape):
    images = noise(4, *shape)
    dataset = read(tmp_path, images)
    order = [0, 2, 1, 3] if read is from_files else [0, 1, 2, 3]  # files are sorted by class
    form = ImageFormat.of(dataset, None)
    assert torch.equal(form.to_tensor(dataset.training.images), dataset.training.images)
    for name, same in forms_of(images[order]).items():
        assert torch.equal(form.to_tensor(same), dataset.training.images), name


def test_pictures_of_three_by_three_pixels_are_clear_and_arrays_are_not(tmp_path):
    images = noise(4, 3, 3, 3)[[0, 2, 1, 3]]
    dataset = from_files(tmp_path, noise(4, 3, 3, 3))
    form = ImageFormat.of(dataset, None)
    assert torch.equal(form.to_tensor([Image.fromarray(image) for image in images]), dataset.training.images)
    with pytest.raises(SettingError, match=r"have the shape \[4, 3, 3, 3\], whose axes may be nhwc or nchw"):
        form.to_tensor(images)
    with pytest.raises(SettingError, match=r"have the shape \[3, 3, 3\], whose axes may be hwc or chw"):
        form.to_tensor(list(images))


@pytest.mark.parametrize("read", [from_files, from_array])
@pytest.mark.parametrize("shape", [(20, 31), (20, 31, 3)])
def test_images_of_other_sizes_are_resized_as_those_in_training(tmp_path, read, shape):
    images = noise(4, *shape)
    dataset = read(tmp_path, images, 8)
    order = [0, 2, 1, 3] if read is from_files else [0, 1, 2, 3]
    form = ImageFormat.of(dataset, 8)
    for name, same in forms_of(images[order]).items():
        assert torch.equal(form.to_tensor(same), dataset.training.images), name
    channels = 1 if len(shape) == 2 else 3
    again = dataset.training.images.unflatten(1, (channels, 8, 8))
    assert torch.equal(form.to_tensor(again), dataset.training.images)  # these have the size already


def test_grey_and_colour_are_converted_as_pillow_does_for_files_only(tmp_path):
    grey, colour = noise(4, 6, 7), noise(4, 6, 7, 3)
    in_colour = ImageFormat.of(from_files(tmp_path / "c", colour), None)
    in_grey = ImageFormat.of(from_files(tmp_path / "g", grey), None)
    copies = torch.from_numpy(grey[:, None].repeat(3, 1)).flatten(1)
    luma = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in colour])
    for name, same in forms_of(grey).items():
        assert torch.equal(in_colour.to_tensor(same), copies), name
    assert torch.equal(in_colour.to_tensor(grey), copies)
    assert torch.equal(in_colour.to_tensor(grey[0]), copies[:1])
    for name, same in forms_of(colour).items():
        assert torch.equal(in_grey.to_tensor(same), torch.from_numpy(luma).flatten(1)), name
    (tmp_path / "a").mkdir()
    for images, other in ((grey, colour), (colour, grey)):
        form = ImageFormat.of(from_array(tmp_path / "a", images), None)
        for same in forms_of(other).values():
            with pytest.raises(
                SettingError, match=r"but the network needs \[n, h, w, c\], \[n, c, h, w\] or one such image"
            ):
                form.to_tensor(same)


def test_one_image_needs_no_axis_for_the_number(tmp_path):
    images = noise(4, 28, 28, 3)
    form = ImageFormat.of(from_files(tmp_path, images), None)
    expected = torch.from_numpy(images[:1].transpose(0, 3, 1, 2).copy()).flatten(1)
    picture = Image.fromarray(images[0])
    for one in (
        images[0],
        images[0].transpose(2, 0, 1),
        to_tensor(picture),
        picture,
        [picture],
        expected[0],
        images[:1],
    ):
        assert torch.equal(form.to_tensor(one), expected)
    assert form.to_tensor(images[:0]).shape == (0, 28 * 28 * 3)


@pytest.mark.parametrize(
    ("shape", "channels", "message"),
    [
        # With image_size, all sizes are possible.
        ((20, 20, 3), 1, "may be hwc or nhw"),
        ((3, 20, 20), 1, "may be chw or nhw"),
        ((2, 3, 20, 3), 3, "may be nhwc or nchw"),
        ((3, 20, 3), 3, "may be hwc or chw"),
        ((64, 64), 1, "may be hw or nf"),
        ((5, 20, 20, 4), 3, "but the network needs"),
        ((5, 2, 20, 20), 3, "but the network needs"),
        ((2, 2, 2, 2, 3), 3, "but the network needs"),
        ((), 3, "but the network needs"),
    ],
)
def test_an_unclear_shape_is_refused(tmp_path, shape, channels, message):
    images = noise(4, 20, 20) if channels == 1 else noise(4, 20, 20, 3)
    form = ImageFormat.of(from_files(tmp_path, images, 8), 8)
    with pytest.raises(SettingError) as error:
        form.to_tensor(np.zeros(shape, np.uint8))
    assert message in str(error.value)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize(
    ("shape", "channels", "num"),
    [((5, 20, 20), 1, 5), ((1, 20, 20), 1, 1), ((20, 20), 1, 1), ((20, 20, 1), 1, 1), ((3, 8, 8), 1, 3),
     ((3, 20, 20), 3, 1), ((20, 20, 3), 3, 1), ((20, 20), 3, 1), ((5, 20, 20), 3, 5), ((5, 1, 20, 20), 3, 5),
     ((5, 3, 8, 8), 3, 5)],
)  # fmt: skip
def test_a_clear_shape_is_understood(tmp_path, shape, channels, num):
    images = noise(4, 20, 20) if channels == 1 else noise(4, 20, 20, 3)
    form = ImageFormat.of(from_files(tmp_path, images, 8), 8)
    assert form.to_tensor(noise(*shape)).shape == (num, channels * 64)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            np.full((1, 6, 7), -0.5),
            "images are floats from -0.5 to -0.5, but must be from 0 to 1, as ToTensor gives them",
        ),
        (np.full((1, 6, 7), 200.0), "images are floats from 200 to 200, but must be from 0 to 1"),
        (np.full((1, 6, 7), np.nan), "images are floats from nan to nan"),
        (np.full((1, 6, 7), np.inf), "images are floats from inf to inf"),
        (np.full((1, 6, 7), 256), "images have pixels from 256 to 256, but must have pixels from 0 to 255"),
        (np.full((1, 6, 7), -1), "images have pixels from -1 to -1"),
        (
            np.ones((1, 6, 7), bool),
            "images have the type bool, but the images in training were bytes (uint8, 0 to 255)",
        ),
        (np.full((1, 6, 7), "a"), "images have the type <U1"),
        (np.full((1, 6, 7), None), "images have the type object"),
        ([[1, 2], [3]], "images are no array"),
        ("photo.png", "images have the shape []"),
        (Image.fromarray(np.full((6, 7), 900, np.uint16)), "the image has pixels with more than 8 bits"),
    ],
)
def test_pixels_out_of_range_are_refused(tmp_path, images, message):
    form = ImageFormat.of(from_files(tmp_path, noise(4, 6, 7)), None)
    with pytest.raises(SettingError) as error:
        form.to_tensor(images)
    assert message in str(error.value)


@pytest.mark.parametrize("image_size", [None, 8])
def test_a_run_on_files_predicts_the_same_for_each_form(tmp_path, image_size):
    images = noise(4, 20, 20, 3)
    dataset = from_files(tmp_path, images, image_size)
    how = {"dataset": f"{tmp_path}/mine", "data_root": str(tmp_path), "backbone": "mlp", "mega_batches": 2, "epochs": 1}
    small_run(tmp_path / "run", **how, image_size=image_size)
    predictor = vision.load(tmp_path / "run")
    expected = predictor(ImageFormat.of(dataset, image_size).to_tensor(images).unflatten(1, dataset.image_shape))
    for name, same in forms_of(images).items():
        np.testing.assert_array_equal(predictor(same), expected, name)
    files = [Image.open(path) for path in sorted((tmp_path / "mine/train").rglob("*.png"))]
    np.testing.assert_array_equal(predictor(files), expected[[0, 2, 1, 3]])

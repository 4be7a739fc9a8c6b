"""Network inputs: normalised by channel, cropped from a padded image, flipped."""

import pytest
import torch
from torchvision.transforms import v2

from fairseq_alma.core.errors import SettingError
from vision.datasets import Pixels
from vision.inputs import Images, Transformed, Vectors
from vision.seeds import generator

PIXELS = Pixels(255.0, (0.5, 0.25, 0.75), (0.5, 0.25, 2.0))


def some_images(count=4, side=6):
    return torch.randint(0, 256, (count, 3 * side * side), generator=generator("images"), dtype=torch.uint8)


def test_vectors_are_normalised_when_they_arrive():
    inputs, images = Vectors(PIXELS), some_images()
    assert torch.equal(inputs.to_storage(images), PIXELS.normalise(images))
    assert inputs.draw_augmentation(4, generator(0)) is None
    assert torch.equal(inputs.augment(inputs.to_storage(images), None), PIXELS.normalise(images))


def test_images_are_stored_as_bytes_and_read_channels_last():
    inputs, images = Images(PIXELS, (3, 6, 6)), some_images()
    stored = inputs.to_storage(images)
    assert (stored.dtype, stored.shape) == (torch.uint8, (4, 6, 6, 3))
    expected = PIXELS.normalise(images).view(4, 3, 6, 6).movedim(1, -1)
    torch.testing.assert_close(inputs.to_input(stored), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(inputs.to_input(stored[None])[0], expected, rtol=0, atol=1e-6)  # with an axis of seeds


@pytest.mark.parametrize("border", [None, -1.9])
def test_each_example_is_cropped_and_flipped_by_its_parameters(border):
    """Compared with a loop over examples and pixels."""
    inputs, images, padding = Images(PIXELS, (3, 6, 6), padding=2, border=border), some_images(), 2
    stored = inputs.to_storage(images)
    augmentation = torch.tensor([[0, 0, 0], [2, 2, 0], [4, 1, 1], [3, 4, 1]])
    found = inputs.augment(stored, augmentation)
    black = inputs.to_input(torch.zeros(1, 1, 1, 3, dtype=torch.uint8)).view(3)
    read = inputs.to_input(stored)
    for example, (top, left, is_flipped) in enumerate(augmentation.tolist()):
        for row in range(6):
            for column in range(6):
                r, c = row + top - padding, (5 - column if is_flipped else column) + left - padding
                inside = 0 <= r < 6 and 0 <= c < 6
                expected = read[example, r, c] if inside else black if border is None else torch.full((3,), border)
                torch.testing.assert_close(found[example, row, column], expected, rtol=0, atol=1e-6)
    assert torch.equal(found[1], read[1])  # the crop from the middle is the image itself


def test_augmentation_is_drawn_uniformly_for_each_example_of_each_epoch():
    inputs, order = Images(PIXELS, (3, 32, 32)), generator(0, "order")
    first, second = inputs.draw_augmentation(9000, order), inputs.draw_augmentation(9000, order)
    assert not torch.equal(first, second)
    assert torch.equal(first, inputs.draw_augmentation(9000, generator(0, "order")))
    for column, size in ((0, 9), (1, 9), (2, 2)):
        counts = first[:, column].bincount()
        assert len(counts) == size
        assert (counts - 9000 / size).abs().max() < 5 * (9000 / size) ** 0.5
    assert Images(PIXELS, (3, 32, 32), padding=0).draw_augmentation(5, order) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("border", [None, -1.9])
def test_images_of_any_shape_are_cropped_to_their_own_shape(border, dtype):
    """Compared with torchvision's crop of the padded image. Images have 2 channels and 3 x 7 pixels."""
    pixels = Pixels(255.0, (0.5, 0.25), (0.5, 2.0))
    inputs = Images(pixels, (2, 3, 7), padding=2, border=border)
    images = torch.randint(0, 256, (4, 42), generator=generator("images")).to(dtype)
    stored = inputs.to_storage(images)
    assert (stored.dtype, stored.shape) == (dtype, (4, 3, 7, 2))
    augmentation = torch.tensor([[0, 0, 0], [4, 4, 0], [1, 3, 1], [2, 2, 1]])
    found = inputs.augment(stored, augmentation)
    fill = 0 if border is None else border
    # Without a given border, the border is black before the images are normalised.
    source = images.float().view(4, 2, 3, 7) if border is None else inputs.to_input(stored).movedim(-1, 1)
    for example, (top, left, is_flipped) in enumerate(augmentation.tolist()):
        crop = v2.functional.crop(v2.functional.pad(source[example], [2], fill=fill), top, left, 3, 7)
        crop = crop.flip(-1) if is_flipped else crop
        expected = pixels.normalise(crop.flatten()[None]).view(2, 3, 7) if border is None else crop
        torch.testing.assert_close(found[example].movedim(-1, 0), expected, rtol=0, atol=1e-5)


# ---- A transform of the user.


def transformed(transform, images, seed=0, inner=None):
    """Return the network inputs of some images of 6 x 6 pixels after a transform."""
    inputs = Transformed(inner or Images(PIXELS, (3, 6, 6)), (3, 6, 6), transform)
    drawn = inputs.draw_augmentation(len(images), generator(seed))
    return inputs.augment(inputs.to_storage(images), drawn)


@pytest.mark.parametrize("inner", [Images(PIXELS, (3, 6, 6)), Vectors(PIXELS)], ids=["images", "vectors"])
@pytest.mark.parametrize("transform", [v2.Identity(), v2.ToDtype(torch.float32, scale=True)], ids=["bytes", "floats"])
def test_bytes_and_floats_that_a_transform_returns_are_normalised_alike(inner, transform):
    images = some_images()
    expected = inner.to_input(inner.to_storage(images))
    torch.testing.assert_close(transformed(transform, images, inner=inner), expected, rtol=0, atol=1e-5)
    inputs = Transformed(inner, (3, 6, 6), transform)
    assert torch.equal(inputs.augment(inputs.to_storage(images), None), expected)  # to evaluate, nothing is transformed


def test_each_image_gets_random_numbers_of_its_own_and_the_same_ones_again():
    images = some_images(1).expand(64, -1)
    flip = v2.RandomHorizontalFlip()
    first, again, other = (transformed(flip, images, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    plain = Images(PIXELS, (3, 6, 6)).to_input(images.view(-1, 3, 6, 6).movedim(1, -1))
    is_flipped = (first != plain).flatten(1).any(1)
    assert torch.equal(first[is_flipped], plain.flip(2)[is_flipped])
    assert 15 < is_flipped.sum() < 49  # of 64, with probability above 0.9999
    # An image does not depend on the others in its batch, so several seeds can be trained together.
    inputs = Transformed(Images(PIXELS, (3, 6, 6)), (3, 6, 6), flip)
    drawn = inputs.draw_augmentation(64, generator(0))
    assert torch.equal(inputs.augment(images[40:], drawn[40:]), first[40:])


def test_the_random_numbers_of_the_process_do_not_change():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    transformed(v2.RandomHorizontalFlip(), some_images())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("transform", "found"),
    [
        (v2.Resize(8), r"torch.uint8 \[3, 8, 8\]"),
        (v2.ToDtype(torch.float64), r"torch.float64 \[3, 6, 6\]"),
        (lambda image: None, "NoneType"),
    ],
)
def test_a_transform_that_returns_something_else_is_refused(transform, found):
    with pytest.raises(
        SettingError, match=f"transform= returned {found}, but must return a tensor of uint8 or float32"
    ):
        transformed(transform, some_images())

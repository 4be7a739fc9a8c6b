"""Network inputs: normalised by channel, cropped from a padded image, flipped."""

import pytest
import torch

from vision.datasets import Pixels
from vision.inputs import Images, Vectors
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

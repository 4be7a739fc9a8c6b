"""How an image becomes what a network reads: what is kept of it on the device, and what a batch makes of that.

Shapes: n images, s their side, i inputs of a perceptron.
"""

import torch
from torch import Tensor

from vision.datasets import Pixels


class Inputs:
    """What is kept is what is read: as it stands for examples that are numbers already."""

    def keep(self, images: Tensor) -> Tensor:
        """What a memory holds of images [..., channels * height * width] of uint8."""
        return images.float()

    def read(self, kept: Tensor) -> Tensor:
        """What a network reads, to be tested on."""
        return kept

    def draw_changes(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """How each example of an epoch is to be changed, [n, ...], on the CPU; None where none is."""
        return None

    def change(self, kept: Tensor, changes: Tensor | None) -> Tensor:
        """What a network reads, to be trained on: `kept` changed as was drawn, [n, ...]."""
        return self.read(kept)


class Vectors(Inputs):
    """For perceptrons: normalised once, when they arrive. [..., i] of float.

    Args:
        pixels: how a pixel becomes a number.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def keep(self, images: Tensor) -> Tensor:
        return self._pixels.normalised(images)


class Images(Inputs):
    """For convolutions: kept as bytes, [..., s, s, channels], read as floats, channels last.

    In training each image is cropped at random out of itself with a border of `padding` pixels, and flipped with
    probability one half: drawn anew for each example of each epoch, done on the device.

    Args:
        pixels: how a pixel becomes a number.
        num_channels: of a pixel.
        side: s.
        padding: pixels of the border; 0 neither crops nor flips.
        border: what the border holds, as a normalised number (the original code: -1.9); None is black, pixels of 0.
    """

    def __init__(self, pixels: Pixels, num_channels: int, side: int, padding: int = 4, border: float | None = None):
        self._num_channels, self._side, self._padding, self._border = num_channels, side, padding, border
        # Normalisation is linear: what it makes of 0 and of 1, for each channel.
        ends = pixels.normalised(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, num_channels))
        self._shift, self._scale = ends[0], ends[1] - ends[0]

    def keep(self, images: Tensor) -> Tensor:
        image = images.unflatten(-1, (self._num_channels, self._side, self._side))
        return image.movedim(-3, -1).contiguous()

    def read(self, kept: Tensor) -> Tensor:
        # In long rows: a loop over three channels would be slow.
        shift, scale = (value.to(kept.device).repeat(kept.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, kept.flatten(-2).float(), scale).view(kept.shape)

    def draw_changes(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """[n, 3]: first row, first column, whether flipped."""
        if not self._padding:
            return None
        places = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([places, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def change(self, kept: Tensor, changes: Tensor | None) -> Tensor:
        """[n, s, s, channels] of float.

        Args:
            kept: [n, s, s, channels] of uint8.
            changes: [n, 3].
        """
        if changes is None:
            return self.read(kept)
        side, padding, channels = self._side, self._padding, self._num_channels
        wide = side + 2 * padding
        source = kept if self._border is None else self.read(kept)
        padded = torch.nn.functional.pad(
            source, (0, 0, padding, padding, padding, padding), value=0 if self._border is None else self._border
        )
        places = torch.arange(side, device=kept.device)
        rows_ns = places + changes[:, :1]
        columns_ns = torch.where(changes[:, 2:].bool(), side - 1 - places, places) + changes[:, 1:2]
        first_n11 = torch.arange(len(kept), device=kept.device).mul_(wide * wide)[:, None, None]
        index = first_n11 + rows_ns[:, :, None] * wide + columns_ns[:, None, :]
        drawn = padded.view(-1, channels).index_select(0, index.view(-1)).view(kept.shape)
        return self.read(drawn) if self._border is None else drawn

"""Tiny data for tests of stages: tables of examples, and mega-batches whose pixel values identify the example."""

import torch
from torch.nn import functional as F

from fairseq_alma.core.stream import MegaBatch
from vision.batches import Rows, StageData
from vision.datasets import Examples, Pixels
from vision.inputs import Vectors
from vision.stream import Arrival

UNCHANGED = Vectors(Pixels(1.0, 0.0, 1.0))
"""Network inputs that are pixels converted to float without scaling; pixel value 7 becomes 7.0."""


def rows_of(x_Sni, y_Sn, num_classes):
    """Return the examples of S seeds as `Rows` without unused rows."""
    one_hot = F.one_hot(y_Sn, num_classes).float()
    return Rows(x_Sni.flatten(0, 1), y_Sn.flatten(), one_hot.flatten(0, 1), *y_Sn.shape)


def numbered(num_seeds, num_examples, num_past=0):
    """Return the data of a stage. Example j of seed s has a single pixel with value 1000 s + j, and class j mod 3."""
    y = (torch.arange(num_examples) % 3).repeat(num_seeds, 1)
    x = torch.arange(num_examples) + 1000 * torch.arange(num_seeds)[:, None]
    rows = rows_of(x.float()[..., None], y, num_classes=3)
    return StageData(rows, num_past, validation=rows)


def numbered_mega_batch(t, num_seeds=1, num_training=3, num_validation=1):
    """Return mega-batch t. Example j of seed s has a single pixel with value 50 s + 10 t + j, and class t mod 3.

    The last `num_validation` examples of each seed are its validation data.
    """
    data = []
    for seed in range(num_seeds):
        images = (50 * seed + 10 * t + torch.arange(num_training + num_validation)).to(torch.uint8)[:, None]
        labels = torch.full((len(images),), t % 3)
        parts = [Examples(images[:num_training], labels[:num_training])]
        parts.append(Examples(images[num_training:], labels[num_training:]))
        data.append(Arrival(*parts))
    return MegaBatch(t, f"digest of {t}", data)

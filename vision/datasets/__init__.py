"""Load datasets of labelled images, and normalise the pixels of images."""

from vision.datasets.arrays import dataset_from_arrays
from vision.datasets.checks import check_dataset
from vision.datasets.examples import Dataset, Examples, ImageFiles, Pixels, Selection, measured_pixels
from vision.datasets.loading import load_dataset, register_dataset

__all__ = [
    "Dataset",
    "Examples",
    "ImageFiles",
    "Pixels",
    "Selection",
    "check_dataset",
    "dataset_from_arrays",
    "load_dataset",
    "measured_pixels",
    "register_dataset",
]

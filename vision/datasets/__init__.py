"""Load datasets of labelled images, and normalise the pixels of images.

loading.py      loads what `dataset=` names; `register_dataset` adds datasets of the user's own
examples.py     labelled images, the normalisation of pixels, datasets, another size of images
checks.py       checks of datasets, with messages that say what is wrong
arrays.py       datasets from arrays, and .npz files
folders.py      folders of images with one folder per class
decoding.py     decodes images to the pixels that a viewer shows
image_cache.py  decodes image files once, into a file that is read like memory
known.py        digits, MNIST and EMNIST; downloads missing files
cifar.py        CIFAR-10 and CIFAR-100
libraries.py    classes of torchvision, datasets of the Hugging Face hub
"""

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

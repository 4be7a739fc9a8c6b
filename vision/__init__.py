"""Anytime learning on image datasets, with the protocol of fairseq_alma.core.

This package never imports fairseq.

Terms:

mega-batch  a part of a dataset; the mega-batches of a stream arrive one after another
stage       one training round, on the mega-batches that have arrived since the previous stage
learner     a method that trains networks in stages and predicts with them
run         the folder with the results of one combination of settings and one random seed
ledger      a table of the run's scores and costs, with one row for the untrained learner and one per mega-batch
stack       several networks of one shape that are computed together

Files:

cli.py          the command alma-vision
api.py          `vision.run`, for Python programs and notebooks
predictor.py    `vision.load`, which predicts with the networks of a run
runs.py         trains a learner on a stream of mega-batches, and writes the run folder
presets.py      reads the presets, which are YAML files of settings
settings.py     the settings of a run; their values are checked when the settings object is created
learners/       the learners: SM, Ens, UMix, gEns, gMoE, FF, and three from the first version of the paper
backbones.py    chooses the network architecture for each dataset
evaluator.py    computes the scores of a learner on the test set; no other module uses the test set
held_out.py     computes the scores of a learner on the validation data of each mega-batch, from cached outputs
dataset_names.py  what the setting `dataset` can name
datasets/       loads datasets: known ones, folders of images, .npz files, torchvision, Hugging Face, the user's own
stream.py       cuts a dataset into mega-batches, which form a stream
inputs.py       turns images into network inputs
rows.py         tables of examples: small ones on the device, large ones that stay in the dataset
batches.py      the data of a stage, and the batches sampled from these data
training.py     trains networks for one stage and restores the parameters of the best epoch
optimizers.py   optimizers for one flat tensor that contains all parameters, and the cosine schedule
voting.py       combines the outputs of ensemble members
networks/       stacks: perceptrons with hand-written gradients, any torch module by autograd
firefly/        the Firefly method: adds units and layers to a network where they lower the loss fastest
flops.py        counts the FLOPs of a network
checkpoints.py  writes networks to files and reads them
seeds.py        creates random generators, separate ones for initial parameters, order of examples, and so on
compiled.py     compiles C code for this machine and caches the compiled library
display.py      shows the progress of a run
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision.api import Run, run
    from vision.datasets import Dataset, dataset_from_arrays, load_dataset, register_dataset
    from vision.learners import register_learner
    from vision.networks import register_backbone
    from vision.predictor import Predictor, load
    from vision.settings import VisionSettings

_MODULES = {
    "Run": "vision.api",
    "run": "vision.api",
    "Dataset": "vision.datasets",
    "dataset_from_arrays": "vision.datasets",
    "load_dataset": "vision.datasets",
    "register_dataset": "vision.datasets",
    "register_learner": "vision.learners",
    "register_backbone": "vision.networks",
    "Predictor": "vision.predictor",
    "load": "vision.predictor",
    "VisionSettings": "vision.settings",
}
"""The module of each name of this package. It is imported when the name is first used, because torch is slow to
import."""

__all__ = [
    "Dataset",
    "Predictor",
    "Run",
    "VisionSettings",
    "dataset_from_arrays",
    "load",
    "load_dataset",
    "register_backbone",
    "register_dataset",
    "register_learner",
    "run",
]


if not TYPE_CHECKING:  # a type checker must not believe that the package has any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'vision' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

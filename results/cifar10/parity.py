"""Compare with the original code (facebookresearch/alma) on CIFAR-10: SM, c = 4, wait 10.

This software (with `preset=original_code`) and the original code train the first stages of CIFAR-10 (B = 100) in the
same way: the VGG, SGD with lr 0.01, momentum 0.9 and weight decay 1e-4, random flips and crops. The epoch with the best
validation accuracy is kept. results/_parity.py says how to run this script.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _parity import Case, Parity, Silent, our_errors

NUM_MEGA_BATCHES = 100
CASES = [Case("sm", 4, 10, num_stages=4, epochs=10)]


def ours(case: Case, seeds: range, data_root: str, out: Path) -> list[list[float]]:
    """Return the test errors [seed][stage] of this software after each of the first stages."""
    return our_errors("cifar10", case, seeds, data_root, out, crop_border=-1.9)


def original(case: Case, seed: int, data_root: str) -> list[float]:
    """Return the test errors [stage] of the original code, which this process imports."""
    import torch
    from crlapi.sl.clmodels.finetune import Finetune
    from crlapi.sl.streams import cifar10
    from omegaconf import OmegaConf

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = OmegaConf.create(
        {
            "init_from_scratch": False, "training_batch_size": 128, "training_num_workers": 0,
            "validation_proportion": 0.1, "validation_batch_size": 128, "validation_num_workers": 0,
            "train_replay_proportion": 0.0, "validation_replay_proportion": 0.0,
            "max_epochs": case.epochs, "device": "cpu", "patience": 100, "patience_delta": 0,
            "optim": {"class_name": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
            "model": {"class_name": "crlapi.sl.architectures.vgg.VGG", "n_channels": case.width},
            "kornia_augs": [
                {"name": "RandomCrop", "size": [32, 32], "padding": 4, "fill": -1.9},
                {"name": "RandomHorizontalFlip", "p": 0.5},
            ],
        }
    )  # fmt: skip
    train = cifar10.CIFAR10TrainAnytimeStream(NUM_MEGA_BATCHES // case.wait, seed, data_root)
    test = cifar10.CIFAR10EvaluationAnytimeStream(1, seed, data_root)[0]
    learner = Finetune(train, config)
    errors = []
    for stage in range(case.num_stages):
        learner = learner.update(train[stage], Silent())
        result = learner.evaluate(test, Silent(), {"batch_size": 500, "num_workers": 0, "device": "cpu"})
        errors.append(1 - result["accuracy"])
    return errors


if __name__ == "__main__":
    links = {"cifar-10-batches-py": "cifar-10-batches-py"}
    settings = "B = 100, the first stages."
    Parity(Path(__file__), "Parity with the original code on CIFAR-10", settings, CASES, ours, original, links).main()

"""Compare with the original code (facebookresearch/alma) on MNIST: SM, Ens, UMix, gEns, gMoE, two widths, two waits.

This software (with `preset=original_code`) and the original code train the first of B / w stages of MNIST (B = 500) in
the same way: AdaDelta and batches of 128. The epoch with the best validation accuracy is kept. results/_parity.py says
how to run this script.
"""

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _parity import Case, Parity, Silent, our_errors

NUM_MEGA_BATCHES = 500
PLANS = {2: (5, 100), 10: (4, 20)}
"""wait -> (number of stages, epochs per stage). Wait 1 is missing, because an epoch then consists of one batch, and Ens
and UMix of the original code divide by zero."""
CASES = [
    Case(learner, width, wait, *PLANS[wait])
    for learner, width, wait in product(("sm", "ens", "umix", "gens", "gmoe"), (4, 32), PLANS)
]


def ours(case: Case, seeds: range, data_root: str, out: Path) -> list[list[float]]:
    """Return the test errors [seed][stage] of this software after each of the first stages."""
    return our_errors(
        "mnist", case, seeds, data_root, out, new_members_from="copy", experts=2,
        split_by="gate_mass",
    )  # fmt: skip


def original(case: Case, seed: int, data_root: str) -> list[float]:
    """Return the test errors [stage] of the original code, which this process imports."""
    from importlib import import_module

    import torch
    from omegaconf import OmegaConf

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    name = {
        "sm": "finetune.Finetune",
        "ens": "k_ensemble.KEnsemble",
        "umix": "agg_ensemble.AggEnsemble",
        "gens": "ensemble.Ensemble",
        "gmoe": "finetune_grow.Finetune_Grow",
    }[case.learner]
    model = {"class_name": "crlapi.sl.architectures.mlp.MLP", "size_layers": case.width, "n_layers": 2}
    if case.learner == "gmoe":
        model |= {"class_name": "crlapi.sl.architectures.mlp.MoE_MLP_UsageGrow", "n_experts": 2, "is_hard": False}
        model["n_experts_to_split"] = 2
    config = OmegaConf.create(
        {
            "k": 5, "vote": False, "init_from_scratch": False, "grow_every": 1,
            "training_batch_size": 128, "training_num_workers": 0,
            "validation_proportion": 0.1, "validation_batch_size": 512, "validation_num_workers": 0,
            "train_replay_proportion": 0.0, "validation_replay_proportion": 0.0,
            "max_epochs": case.epochs, "device": "cpu", "patience": 100, "patience_delta": 0,
            "optim": {"class_name": "torch.optim.Adadelta", "lr": 1.0}, "model": model, "kornia_augs": None,
        }
    )  # fmt: skip
    streams = import_module("crlapi.sl.streams.mnist")
    train = streams.MNISTTrainAnytimeStream(NUM_MEGA_BATCHES // case.wait, seed, data_root)
    test = streams.MNISTEvaluationAnytimeStream(1, seed, data_root)[0]
    module, class_name = name.split(".")
    learner = getattr(import_module(f"crlapi.sl.clmodels.{module}"), class_name)(train, config)
    errors = []
    for stage in range(case.num_stages):
        learner = learner.update(train[stage], Silent())
        result = learner.evaluate(test, Silent(), {"batch_size": 512, "num_workers": 0, "device": "cpu"})
        errors.append(1 - result["accuracy"])
    return errors


if __name__ == "__main__":
    # Let the folder MNIST also be found as CachedMNIST: torchvision names the data folder after the class of the
    # dataset, and the class in the original code is CachedMNIST.
    links = {"CachedMNIST": "MNIST"}
    settings = "B = 500, the first stages."
    Parity(Path(__file__), "Parity with the original code on MNIST", settings, CASES, ours, original, links).main()

"""Digests of the experts in a checkpoint, which show whether experts that were spread over ranks are complete."""

from collections.abc import Mapping
from pathlib import Path

import torch

from fairseq_alma.core.errors import StageError
from fairseq_alma.modules.expert_parallel import digests_of_experts


def digests_of_collected_experts(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the entry EXPERT_DIGESTS of a checkpoint. It is empty if the experts are not spread over ranks.

    The optimizer must have collected the experts on this rank.
    """
    collected = {name: parameter.__dict__.get("collected") for name, parameter in model.named_parameters()}
    return {name: values.digests for name, values in collected.items() if values is not None}


def check_experts(model: torch.nn.Module, digests: Mapping[str, list[str]], path: str | Path, advice: str) -> None:
    """Check that the experts that `model` has loaded from the checkpoint `path` are those that were saved.

    Args:
        model: the model, with all experts or with those of this rank.
        digests: the entry EXPERT_DIGESTS of the checkpoint.
        path: the checkpoint, for the error message.
        advice: the end of the error message.

    Raises:
        StageError: if an expert differs.
    """
    for name, parameter in model.named_parameters():
        own = parameter.expert.own if hasattr(parameter, "expert") else slice(None)
        if name in digests and digests_of_experts(parameter) != digests[name][own]:
            raise StageError(f"{path} is damaged: the experts in {name} are not those that were saved. {advice}")

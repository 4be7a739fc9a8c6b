"""Drop-upcycling: re-initialize a share of the hidden units of each expert of a mixture."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Dimensions: E experts, D model width, F hidden width of an expert, n units that are re-initialized.


def reinitialize_units(mixture: Mapping[str, Tensor], share: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return the weights of the experts of a mixture after a share of the hidden units was re-initialized.

    This is drop-upcycling (Nakamura et al., 2025, arXiv 2502.19261, section 3). Copies of a dense feed-forward network
    learn alike, so they stay similar for long. Each expert therefore gets other random units: n = share * F units are
    drawn for each expert, the same units for both layers. Their weights are replaced by numbers from a normal
    distribution. Its mean and standard deviation are those of the replaced weights, for each tensor separately. The
    paper has no biases. Here, the biases of the units are replaced in the same way.

    Output and loss change: the units that are replaced no longer compute what they have learned. The bias of the second
    layer does not belong to a unit, so it is kept.

    Args:
        mixture: tensors with the names in SwitchFeedForward: fc1_weight [E, F, D], fc1_bias [E, F] and fc2_weight
            [E, D, F] are used. They are not changed.
        share: share of the units that is replaced, from 0 (none) to 1 (all).
        random: random number generator on the CPU.
    """
    # In all three tensors, the first dimension is E. Move the dimension of the units to the second place.
    units_EF = {
        "fc1_weight": mixture["fc1_weight"].clone(),
        "fc1_bias": mixture["fc1_bias"].clone(),
        "fc2_weight": mixture["fc2_weight"].clone().transpose(1, 2),
    }
    num_experts, num_units = mixture["fc1_bias"].shape
    for expert in range(num_experts):
        chosen = torch.randperm(num_units, generator=random)[: round(share * num_units)]
        for weight_EF in units_EF.values():
            replaced = weight_EF[expert, chosen].float()
            fresh = torch.randn(replaced.shape, generator=random)
            if len(chosen):
                weight_EF[expert, chosen] = (replaced.mean() + replaced.std(correction=0) * fresh).to(weight_EF.dtype)
    return {**units_EF, "fc2_weight": units_EF["fc2_weight"].transpose(1, 2).contiguous()}

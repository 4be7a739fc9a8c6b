"""Growth of a mixture by copying the experts with the largest loss (gMoE, sections 3.2 and 4.2 of the paper)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError

# Dimensions: E experts before growth, K new experts, D model width.

RouterGrowth = Literal["copy", "tree"]
"""How to set the router weights of a new expert (see grow_experts)."""
EXPERT_WEIGHTS = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
"""Names of the tensors in SwitchFeedForward that contain the weights of the experts."""


def experts_with_largest_loss(valid_loss_E: Tensor, num_new: int) -> list[int]:
    """Return the indices of the `num_new` experts with the largest validation loss, largest first.

    Experts with equal losses are sorted by index.

    Args:
        valid_loss_E: validation loss of each expert, in nats, summed over the tokens that the expert processed.
        num_new: number of experts to return, K.

    Raises:
        SettingError: if K is larger than the number of experts, E, or if no validation has recorded a loss.
    """
    if num_new > len(valid_loss_E):
        raise SettingError(
            f"cannot copy {num_new} of {len(valid_loss_E)} experts, because each expert is copied at most once: "
            f"give at most {len(valid_loss_E)}"
        )
    if not bool(valid_loss_E.gt(0).any()):
        raise SettingError(
            "no validation has recorded a loss for the experts of this model, so they cannot be ranked: "
            "use a checkpoint that was saved after a validation"
        )
    return torch.sort(valid_loss_E, descending=True, stable=True).indices[:num_new].tolist()


def grow_experts(
    state: Mapping[str, Tensor], num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> dict[str, Tensor]:
    """Return the state dict of a model with `num_new` more experts in every mixture. `state` is not changed.

    In each mixture, the experts with the largest validation loss (`valid_loss_E` in the state dict) are copied. The
    copied expert is called the parent. A copy has the weights of its parent. The copies are appended after the existing
    experts, largest loss first. The router row of an expert is the row of weights with which the router scores the
    expert. If a copy had the router row of its parent, the two experts would always have the same score, and the copy
    would never get a token. So the copy gets another router row, in one of two ways:

    - "copy" (the paper): the router row of the parent plus noise. A token that went to the parent now goes to the copy
      if the copy has the larger logit. Output and loss change, because each gate probability p falls to about
      p / (1 + q), where q is the sum of the gate probabilities of all parents before the growth.
    - "tree" (the gates of the paper's appendix A): only noise. The copy has no logit in the softmax. Instead, its row
      decides which tokens of the parent move to the copy (see `Router`). Output and loss do not change. The noise is
      orthogonal to the mean input of the parent's tokens in the last validation. The inputs of a router share a large
      mean, so without this, most rows would send all tokens of the parent the same way.

    The optimizer state has no entries for the new experts, so the optimizer must start from scratch.

    Args:
        state: state dict of a model with SwitchFeedForward mixtures.
        num_new: number of experts to add to every mixture, K. 0 changes nothing.
        router: how to set the router rows of new experts, "copy" or "tree".
        noise: standard deviation of the noise, relative to the root mean square of the mixture's router rows.
        seed: seed of the noise. The noise is made on the CPU, mixture by mixture, so it is the same on every machine.

    Raises:
        SettingError: if K is negative or larger than E, a mixture has no validation loss, `noise` is not positive, the
            state dict has no mixture, or `router` is "copy" but experts were added with "tree" before.
    """
    _check_options(num_new, router, noise)
    prefixes = mixture_prefixes(state)
    if not prefixes:
        raise SettingError("cannot add experts, because this model has no mixture: use a model with mixtures")
    grown = dict(state)
    if num_new == 0:
        return grown
    random = torch.Generator().manual_seed(seed)
    for prefix in prefixes:
        parents = experts_with_largest_loss(state[prefix + "valid_loss_E"], num_new)
        rows_ED, split_E = state[prefix + "router.weight"], state[prefix + "router.split_E"]
        if router == "copy" and bool(split_E.ge(0).any()):
            # Refuse "copy" if an expert was added with "tree" before. That expert has no logit in the router's softmax.
            # With "copy", a copy of that expert would get a logit, and so could get tokens from all other experts.
            raise SettingError("experts of this model were added with router=tree before: use router=tree again")
        for name in EXPERT_WEIGHTS:
            weight = state[prefix + name]
            grown[prefix + name] = torch.cat([weight, weight[parents]])
        input_ED = state.get(prefix + "valid_input_ED", torch.zeros_like(rows_ED))
        grown[prefix + "router.weight"] = _grow_rows(rows_ED, input_ED[parents], parents, router, noise, random)
        grown[prefix + "valid_input_ED"] = torch.zeros(len(split_E) + num_new, rows_ED.shape[1])
        new_split = parents if router == "tree" else [-1] * num_new
        grown[prefix + "router.split_E"] = torch.cat([split_E, torch.tensor(new_split).to(split_E)])
        # Set the validation losses and token counts to 0, because the grown model has not been validated yet.
        for name in ("valid_loss_E", "valid_tokens_E"):
            grown[prefix + name] = torch.zeros(len(split_E) + num_new, dtype=state[prefix + name].dtype)
    return grown


def _check_options(num_new: int, router: str, noise: float) -> None:
    """Raise SettingError if an argument of `grow_experts` is invalid."""
    if num_new < 0:
        raise SettingError(f"cannot add {num_new} experts: give 0 or more, because growth never removes experts")
    if not noise > 0:
        raise SettingError(f"noise={noise} must be above 0: without noise, a new expert never gets a token")
    if router not in ("copy", "tree"):
        raise SettingError(f"router={router!r} is not one of copy, tree")


def mixture_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return the key prefixes of the mixtures in a state dict, such as "decoder.layers.1.mixture.", in layer order."""
    end = "router.weight"
    return [key.removesuffix(end) for key in state if key.endswith("mixture." + end)]


def num_params_of_expert(model_dim: int, ffn_dim: int) -> int:
    """Return the number of parameters that one more expert adds to a mixture.

    They are the weights and biases of two linear layers, and one row of router weights.

    Args:
        model_dim: model width.
        ffn_dim: hidden width of the expert.
    """
    return (ffn_dim * model_dim + ffn_dim) + (model_dim * ffn_dim + model_dim) + model_dim


def _grow_rows(
    rows_ED: Tensor,
    input_KD: Tensor,
    parents: list[int],
    router: RouterGrowth,
    noise: float,
    random: torch.Generator,
) -> Tensor:
    """Return the router rows [E + K, D] of a mixture after growth.

    The router row of an expert is the row of weights with which the router scores the expert.

    Args:
        rows_ED: router rows before the growth.
        input_KD: sum of the inputs of the tokens of each parent in the last validation; 0 if it is not known.
        parents: indices of the K experts that are copied.
        router, noise: see grow_experts.
        random: random number generator for the noise.
    """
    parent_KD = rows_ED[parents].float()
    # Compute the scale of the noise from the router rows of all experts, and not only from `parent_KD`. A parent may
    # itself have been added by an earlier growth with router="tree". Its router row then contains only small noise, so
    # a scale that is computed from this row would be too small.
    scale = rows_ED.float().square().mean().sqrt()
    noise_KD = torch.randn(parent_KD.shape, generator=random)
    if router == "tree":
        noise_KD = _orthogonal(noise_KD, input_KD.float())
    noise_KD *= noise * scale
    return torch.cat([rows_ED, (noise_KD + (parent_KD if router == "copy" else 0)).to(rows_ED.dtype)])


def _orthogonal(noise_KD: Tensor, input_KD: Tensor) -> Tensor:
    """Return noise without its component along the inputs, row by row. A row does not change if its input is 0.

    Args:
        noise_KD: the noise, [K, D].
        input_KD: inputs of any length, [K, D].
    """
    direction_KD = torch.nn.functional.normalize(input_KD, dim=1)
    return noise_KD - (noise_KD * direction_KD).sum(1, keepdim=True) * direction_KD

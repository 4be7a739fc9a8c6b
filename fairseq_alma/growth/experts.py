"""Growth of a mixture: the experts with the largest loss are copied (gMoE, sections 3.2 and 4.2 of the paper)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError

# E experts before growth, K new ones, D model width.

RouterGrowth = Literal["copy", "tree"]
EXPERT_WEIGHTS = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def experts_with_largest_loss(valid_loss_E: Tensor, num_new: int) -> list[int]:
    """Return the indices of the `num_new` experts with the largest validation loss, largest first.

    Of experts with equal losses, the one with the smaller index comes first.

    Args:
        valid_loss_E: validation loss of each expert, summed over its tokens, in nats.
        num_new: K.

    Raises:
        SettingError: K is larger than E, or no validation has recorded a loss.
    """
    if num_new > len(valid_loss_E):
        raise SettingError(
            f"cannot copy {num_new} of {len(valid_loss_E)} experts: one growth can at most double their number"
        )
    if not bool(valid_loss_E.gt(0).any()):
        raise SettingError(
            "no validation has recorded a loss for the experts of this model, so they cannot be ranked: "
            "take a checkpoint that was saved after a validation"
        )
    return torch.sort(valid_loss_E, descending=True, stable=True).indices[:num_new].tolist()


def grow_experts(
    state: Mapping[str, Tensor], num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> dict[str, Tensor]:
    """Return the state dict of a model with `num_new` more experts in every mixture. `state` is not changed.

    In each mixture, the experts with the largest summed validation loss (`valid_loss_E`, which validation leaves in
    the state dict) get a copy with the same weights. The copies are appended in the order of the losses. A copy with
    the same router row would never get a token, so its row differs:

    - "copy" (the paper): the parent's row plus noise. Tokens stay with the pair that they were sent to, up to the
      noise. A token goes to the copy if the noise raises its logit there. These may be few tokens at first; training
      evens it out. But the softmax has more terms: each gate probability p falls to p / (1 + q), where q is the
      probability of all copied experts together. So output and loss change.
    - "tree" (the gates of the paper's appendix A): the row is noise only, and decides only between parent and copy,
      below the gate of the parent (see `Router`). Output, loss and the routing to the pair do not change.

    The optimizer's state has no entries for new experts, so the optimizer must start anew.

    Args:
        state: state dict of a model with SwitchFeedForward mixtures.
        num_new: K, the number of experts to add to every mixture. 0 changes nothing.
        router: how the router row of a new expert is made.
        noise: standard deviation of the noise, relative to the root mean square of the mixture's router rows.
        seed: seed of the noise. It is drawn on the CPU, mixture by mixture, and so is the same on every machine.

    Raises:
        SettingError: K is negative or larger than E; a mixture has no validation loss; `noise` is not positive; the
            state dict has no mixture; `router` is "copy", but experts were split by "tree" before.
    """
    if num_new < 0:
        raise SettingError(f"{num_new} experts: growth adds experts, it never removes any")
    if not noise > 0:
        raise SettingError(f"noise={noise} must be above 0: a copy with the same router row never gets a token")
    if router not in ("copy", "tree"):
        raise SettingError(f"router={router!r} is not one of copy, tree")
    prefixes = mixture_prefixes(state)
    if not prefixes:
        raise SettingError("this model has no mixture, so it cannot grow")
    grown = dict(state)
    if num_new == 0:
        return grown
    random = torch.Generator().manual_seed(seed)
    for prefix in prefixes:
        parents = experts_with_largest_loss(state[prefix + "valid_loss_E"], num_new)
        rows_ED, split_E = state[prefix + "router.weight"], state[prefix + "router.split_E"]
        if router == "copy" and bool(split_E.ge(0).any()):
            # The copied row would be a logit of the softmax, and would get tokens that belong below the tree's nodes.
            raise SettingError("experts of this model were split by router=tree before: use router=tree again")
        for name in EXPERT_WEIGHTS:
            weight = state[prefix + name]
            grown[prefix + name] = torch.cat([weight, weight[parents]])
        grown[prefix + "router.weight"] = _grow_rows(rows_ED, parents, router, noise, random)
        new_split = parents if router == "tree" else [-1] * num_new
        grown[prefix + "router.split_E"] = torch.cat([split_E, torch.tensor(new_split).to(split_E)])
        for name in ("valid_loss_E", "valid_tokens_E"):  # measured before growth; the next validation fills them
            grown[prefix + name] = torch.zeros(len(split_E) + num_new, dtype=state[prefix + name].dtype)
    return grown


def mixture_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return the key prefixes of the mixtures in a state dict, such as "decoder.layers.1.mixture.", in layer order."""
    end = "router.weight"
    return [key.removesuffix(end) for key in state if key.endswith("mixture." + end)]


def num_params_of_expert(model_dim: int, ffn_dim: int) -> int:
    """Return the number of parameters that one more expert adds to a mixture.

    An expert has two linear maps with biases, and a row in the router.
    """
    return (ffn_dim * model_dim + ffn_dim) + (model_dim * ffn_dim + model_dim) + model_dim


def _grow_rows(
    rows_ED: Tensor, parents: list[int], router: RouterGrowth, noise: float, random: torch.Generator
) -> Tensor:
    """Return the router rows [E + K, D] of the grown mixture."""
    parent_KD = rows_ED[parents].float()
    # The scale comes from all rows of the mixture: in a tree, the row of an expert that was split off may itself be
    # small noise.
    scale = rows_ED.float().square().mean().sqrt()
    noise_KD = noise * scale * torch.randn(parent_KD.shape, generator=random)
    return torch.cat([rows_ED, (noise_KD + (parent_KD if router == "copy" else 0)).to(rows_ED.dtype)])

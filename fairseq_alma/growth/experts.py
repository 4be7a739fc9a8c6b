"""Growing a mixture: the experts that lose most are copied (gMoE, sections 3.2 and 4.2 of the paper)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError

# E experts before growth, K new ones, D model width.

RouterGrowth = Literal["copy", "tree"]
EXPERT_WEIGHTS = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def losing_experts(valid_loss_E: Tensor, num_new: int) -> list[int]:
    """The `num_new` experts with the largest summed validation loss, largest first; of equals the first.

    Raises:
        SettingError: more are asked for than there are, or no validation has charged any loss.
    """
    if num_new > len(valid_loss_E):
        raise SettingError(
            f"{num_new} experts are to be copied, there are {len(valid_loss_E)}: one growth can at most double them"
        )
    if not bool(valid_loss_E.gt(0).any()):
        raise SettingError(
            "no validation loss has been charged to the experts of this model, so that none can be ranked: "
            "take a checkpoint that was saved after a validation"
        )
    return torch.sort(valid_loss_E, descending=True, stable=True).indices[:num_new].tolist()


def grow_experts(
    state: Mapping[str, Tensor], num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> dict[str, Tensor]:
    """The state dict of a model with `num_new` more experts in every mixture; `state` is not changed.

    In each mixture the experts with the largest summed validation loss (`valid_loss_E`, which validation leaves in
    the state dict) get a twin with the same weights, appended in that order. A twin with the same router row would
    never get a token; its row decides between the two:

    - "copy", the paper's: the parent's row plus noise. Tokens stay with the pair they went to (up to the noise); a
      token goes to the twin where the noise points its way, which may be few tokens at first: training evens it out.
      But the softmax has more terms, so that every gate probability p falls to
      p / (1 + q), q being that of all copied experts together: output and loss change.
    - "tree", as the gates of appendix A: the row is noise alone, and decides only between the twins, below the
      gate that stood there (`Router`). Output, loss and routing to the pair are what they were.

    The optimizer's state has no place for new experts: it starts anew.

    Args:
        state: of a model with SwitchFeedForward mixtures.
        num_new: K, in every mixture; 0 changes nothing.
        noise: standard deviation, relative to the root mean square of the mixture's router rows.
        seed: of the noise. Drawn on the CPU, mixture by mixture: the same wherever it is done.

    Raises:
        SettingError: K is negative or larger than E; a mixture has no validation loss; noise is not positive;
            the state dict has no mixture.
    """
    if num_new < 0:
        raise SettingError(f"{num_new} experts: growth adds experts, it never takes any away")
    if not noise > 0:
        raise SettingError(f"noise={noise} must be above 0: a twin with the same router row never gets a token")
    if router not in ("copy", "tree"):
        raise SettingError(f"router={router!r} is not one of copy, tree")
    prefixes = mixture_prefixes(state)
    if not prefixes:
        raise SettingError("there is no mixture in this model: nothing to grow")
    grown = dict(state)
    if num_new == 0:
        return grown
    random = torch.Generator().manual_seed(seed)
    for prefix in prefixes:
        parents = losing_experts(state[prefix + "valid_loss_E"], num_new)
        rows_ED = state[prefix + "router.weight"]
        split_E = state.get(prefix + "router.split_E", torch.full((len(rows_ED),), -1.0))  # older: flat
        if router == "copy" and bool(split_E.ge(0).any()):
            # A copied row would compete above a node that its parent's tokens still pass.
            raise SettingError("a tree has split experts of this model before: grow it with router=tree again")
        for name in EXPERT_WEIGHTS:
            weight = state[prefix + name]
            grown[prefix + name] = torch.cat([weight, weight[parents]])
        grown[prefix + "router.weight"] = _grow_rows(rows_ED, parents, router, noise, random)
        new_split = parents if router == "tree" else [-1] * num_new
        grown[prefix + "router.split_E"] = torch.cat([split_E, torch.tensor(new_split).to(split_E)])
        for name in ("valid_loss_E", "valid_tokens_E"):  # of other experts: the next validation fills them
            grown[prefix + name] = torch.zeros(len(split_E) + num_new, dtype=state[prefix + name].dtype)
    return grown


def mixture_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Where the mixtures of a state dict lie, e.g. "decoder.layers.1.mixture.", from the first layer to the last."""
    end = "router.weight"
    return [key.removesuffix(end) for key in state if key.endswith("mixture." + end)]


def num_params_of_expert(model_dim: int, ffn_dim: int) -> int:
    """Parameters that one more expert adds to one mixture: two linear maps with biases, and a router row."""
    return (ffn_dim * model_dim + ffn_dim) + (model_dim * ffn_dim + model_dim) + model_dim


def _grow_rows(rows_ED: Tensor, parents: list[int], router: RouterGrowth, noise: float, random) -> Tensor:
    parent_KD = rows_ED[parents].float()
    # A row of the tree may be tiny itself, when the expert it belongs to was split before: all rows of the mixture
    # give the scale.
    scale = rows_ED.float().square().mean().sqrt()
    noise_KD = noise * scale * torch.randn(parent_KD.shape, generator=random)
    return torch.cat([rows_ED, (noise_KD + (parent_KD if router == "copy" else 0)).to(rows_ED.dtype)])

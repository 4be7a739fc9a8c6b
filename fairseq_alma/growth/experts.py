"""Growth of a mixture by copying experts, by default those with the largest loss (gMoE, sections 3.2 and 4.2)."""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import ExpertChoice
from fairseq_alma.modules.switch_feed_forward import EXPERT_WEIGHTS

# Dimensions: E experts before growth, K new experts, D model width, F hidden width of an expert.

RouterGrowth = Literal["copy", "tree"]
"""How to set the router row of a new expert.

If a copy had the router row of its parent, the two experts would always have the same score, and the copy would never
get a token. So the copy gets another router row, in one of two ways:

- "copy" (the paper): the router row of the parent plus noise. A token that went to the parent now goes to the copy if
  the copy has the larger logit. Output and loss change, because each gate probability p falls to about p / (1 + q),
  where q is the sum of the gate probabilities of all parents before the growth.
- "tree" (the gates of the paper's appendix A): only noise. The copy has no logit in the softmax. Instead, its row
  decides which tokens of the parent move to the copy (see `Router`). Output and loss do not change. The noise is
  orthogonal to the mean input of the parent's tokens in the last validation. The inputs of a router share a large mean,
  so without this, most rows would send all tokens of the parent the same way."""


def experts_with_largest_loss(valid_loss_E: Tensor, num_new: int) -> list[int]:
    """Return the indices of the `num_new` experts with the largest validation loss, largest first, then by index.

    Args:
        valid_loss_E: validation loss of each expert, in nats, summed over the tokens that the expert processed.
        num_new: number of experts to return, K.

    Raises:
        SettingError: if K is larger than the number of experts, E, or if no validation has recorded a loss.
    """
    if not bool(valid_loss_E.gt(0).any()):
        raise SettingError(
            "no validation has recorded a loss for the experts of this model, so they cannot be ranked: use a "
            "checkpoint that was saved after a validation"
        )
    return _largest(valid_loss_E, num_new)


def _largest(score_E: Tensor, num_new: int) -> list[int]:
    """Return the indices of the `num_new` largest scores, largest first. Equal scores are sorted by index."""
    if num_new > len(score_E):
        raise SettingError(
            f"cannot copy {num_new} of {len(score_E)} experts, because each expert is copied at most once: "
            f"give at most {len(score_E)}"
        )
    return torch.sort(score_E, descending=True, stable=True).indices[:num_new].tolist()


def grow_experts(
    state: Mapping[str, Tensor],
    num_new: int,
    router: RouterGrowth = "copy",
    noise: float = 0.01,
    seed: int = 0,
    copy_experts_by: ExpertChoice = "validation_loss",
    utilities: Mapping[str, Tensor] | None = None,
    drop: float = 0.0,
) -> dict[str, Tensor]:
    """Return the state dict of a model with `num_new` more experts in every mixture. `state` is not changed.

    A copied expert is called a parent. A copy has the weights of its parent, and a router row (the row of weights with
    which the router scores it) of its own. The copies are appended after the existing experts.

    A model with one expert in each mixture is a dense model. It can grow by any number of experts (sparse upcycling,
    arXiv 2212.05055), in rounds that double the number of experts. With `drop`, hidden units of all experts are
    re-initialized after that (drop-upcycling, see `reinitialize_units`), which changes output and loss.

    Args:
        state: state dict of a model with SwitchFeedForward mixtures.
        num_new: number of experts to add to every mixture, K. 0 changes nothing.
        router: how to set the router rows of new experts, see RouterGrowth.
        noise: standard deviation of the noise, relative to the root mean square of the mixture's router rows.
        seed: seed of the random numbers. They are made on the CPU, mixture by mixture, so they are the same on every
            machine.
        copy_experts_by: which experts are copied: those with the largest validation loss (`valid_loss_E` in the state
            dict), largest first; those with the largest utility (Expert Upcycling, arXiv 2604.19835); or random ones.
        utilities: for copy_experts_by="gradient", the utility of each expert, [E], by the key prefix of the mixture:
            the squared norm of the gradient of the validation loss with respect to its weights (see measure_utilities).
        drop: share of the hidden units that is re-initialized in each expert, if the model is dense.

    Raises:
        SettingError: if K is negative, or larger than E although the model is not dense, a mixture has no validation
            loss, `noise` is not positive, `drop` is not a share or the model is not dense, the state dict has no
            mixture, or `router` is "copy" but experts were added with "tree" before, or K > 1 and the model is dense.
    """
    _check_options(num_new, router, noise, copy_experts_by, drop)
    prefixes = mixture_prefixes(state)
    if not prefixes:
        raise SettingError("cannot add experts, because this model has no mixture: use a model with mixtures")
    grown = dict(state)
    if num_new == 0:
        return grown
    random = torch.Generator().manual_seed(seed)
    for prefix in prefixes:
        mixture = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        num_experts = len(mixture["valid_loss_E"])
        parents = _choose(mixture, num_new, copy_experts_by, (utilities or {}).get(prefix), random)
        _check_mixture(mixture, num_experts, num_new, router, drop)
        for round_parents in parents:
            mixture |= _copy(mixture, round_parents, router, noise, random)
        if drop > 0:
            mixture |= reinitialize_units(mixture, drop, random)
        # Set the validation results to 0, because the grown model has not been validated yet.
        for name in ("valid_loss_E", "valid_tokens_E", "valid_input_ED"):
            mixture[name] = torch.zeros_like(mixture[name])
        grown |= {prefix + name: value for name, value in mixture.items()}
    return grown


def _choose(
    mixture: Mapping[str, Tensor],
    num_new: int,
    copy_experts_by: ExpertChoice,
    utility_E: Tensor | None,
    random: torch.Generator,
) -> list[list[int]]:
    """Return the indices of the experts that are copied, one list for each round of copies.

    There is one round, except for a dense model. There, each round copies all experts, until there are enough.
    """
    loss_E = mixture["valid_loss_E"]
    if len(loss_E) == 1:
        experts_with_largest_loss(loss_E, 1)  # raises an error without a validation
        rounds, missing, num_experts = [], num_new, 1
        while missing:
            rounds.append(list(range(min(missing, num_experts))))
            missing, num_experts = missing - len(rounds[-1]), num_experts + len(rounds[-1])
        return rounds
    by_loss = experts_with_largest_loss(loss_E, num_new)
    if copy_experts_by == "validation_loss":
        return [by_loss]
    if copy_experts_by == "random":
        return [torch.randperm(len(loss_E), generator=random)[:num_new].tolist()]
    if utility_E is None or utility_E.shape != loss_E.shape or not bool(utility_E.isfinite().all()):
        found = "none" if utility_E is None else utility_E.tolist()
        raise SettingError(
            f"the choice by gradient needs the utility of each of the {len(loss_E)} experts, as finite numbers, but "
            f"found {found}: measure the utilities with this checkpoint (alma-grow --stream), or choose by loss"
        )
    return [_largest(utility_E, num_new)]


def _copy(
    mixture: Mapping[str, Tensor], parents: list[int], router: RouterGrowth, noise: float, random: torch.Generator
) -> dict[str, Tensor]:
    """Return the tensors of a mixture, by their names, that change if the experts `parents` are copied.

    The copies keep the validation results of their parents.
    """
    split_E, rows_ED = mixture["router.split_E"], mixture["router.weight"]
    input_ED = mixture.get("valid_input_ED", torch.zeros_like(rows_ED))
    results = {name: mixture[name] for name in ("valid_loss_E", "valid_tokens_E")} | {"valid_input_ED": input_ED}
    weights = {name: mixture[name] for name in EXPERT_WEIGHTS}
    new_split = parents if router == "tree" else [-1] * len(parents)
    return {
        **{name: torch.cat([value, value[parents]]) for name, value in (weights | results).items()},
        "router.weight": _grow_rows(rows_ED, input_ED[parents], parents, router, noise, random),
        "router.split_E": torch.cat([split_E, torch.tensor(new_split).to(split_E)]),
    }


def _check_options(num_new: int, router: str, noise: float, copy_experts_by: str, drop: float) -> None:
    """Raise SettingError if an argument of `grow_experts` is invalid."""
    if num_new < 0:
        raise SettingError(f"cannot add {num_new} experts: give 0 or more, because growth never removes experts")
    if not 0 < noise < math.inf:
        raise SettingError(f"noise={noise} must be finite and above 0: without noise, a new expert never gets a token")
    if router not in ("copy", "tree"):
        raise SettingError(f"router={router!r} is not one of copy, tree")
    if copy_experts_by not in get_args(ExpertChoice):
        raise SettingError(f"{copy_experts_by!r} is not one of {', '.join(get_args(ExpertChoice))}")
    if not 0 <= drop <= 1:
        raise SettingError(f"drop={drop} must be a share between 0 and 1")


def _check_mixture(mixture: Mapping[str, Tensor], num_experts: int, num_new: int, router: str, drop: float) -> None:
    """Raise SettingError if a mixture of `num_experts` experts cannot grow with these arguments of `grow_experts`."""
    if router == "copy" and bool(mixture["router.split_E"].ge(0).any()):
        # Refuse "copy" if an expert was added with "tree" before. That expert has no logit in the router's softmax.
        # With "copy", a copy of that expert would get a logit, and so could get tokens from all other experts.
        raise SettingError("experts of this model were added with router=tree before: use router=tree again")
    if num_experts == 1 and num_new > 0 and router == "copy":
        raise SettingError(
            f"router=copy would divide the output of the only expert by about {num_new + 1}: use router=tree, which "
            f"does not change the output"
        )
    if num_experts > 1 and drop > 0:
        raise SettingError(
            f"drop={drop} is for a dense model, which has one expert in each mixture, but this model has "
            f"{num_experts}: leave it out"
        )


def mixture_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return the key prefixes of the mixtures in a state dict, such as "decoder.layers.1.mixture.", in layer order."""
    end = "router.weight"
    return [key.removesuffix(end) for key in state if key.endswith("mixture." + end)]


def _grow_rows(
    rows_ED: Tensor,
    input_KD: Tensor,
    parents: list[int],
    router: RouterGrowth,
    noise: float,
    random: torch.Generator,
) -> Tensor:
    """Return the router rows [E + K, D] of a mixture after growth.

    Args:
        rows_ED: router rows before the growth: the weights with which the router scores each expert.
        input_KD: sum of the inputs of the tokens of each parent in the last validation; 0 if it is not known.
        parents: indices of the K experts that are copied.
        router, noise, random: see grow_experts.
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
    """Return noise [K, D] without its component along the inputs [K, D]. A row does not change if its input is 0."""
    direction_KD = torch.nn.functional.normalize(input_KD, dim=1)
    return noise_KD - (noise_KD * direction_KD).sum(1, keepdim=True) * direction_KD


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

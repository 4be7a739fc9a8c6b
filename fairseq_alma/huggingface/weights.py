"""Translate the weights of switch_lm to those of modeling_alma.py and of OPT, and those of OPT back.

A model with one expert in each mixture is an OPT model, because the gate probability of the only expert is 1. Three
things differ. OPT does not multiply embeddings by sqrt(D), for the model width D: the embedding of the OPT model
contains this factor, and the final layer norm, whose output is multiplied with the same embedding, is divided by it.
And OPT has two unused positions before the first one.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

OPT_OFFSET = 2
"""Number of positions of OPT's embedding before that of the first token."""
_DENSE = {"fc1_weight": "fc1.weight", "fc1_bias": "fc1.bias", "fc2_weight": "fc2.weight", "fc2_bias": "fc2.bias"}
_EXPERTS = {
    "router.weight": "mixture.router.weight",
    "fc1_weight": "mixture.experts.up_proj", "fc1_bias": "mixture.experts.up_proj_bias",
    "fc2_weight": "mixture.experts.down_proj", "fc2_bias": "mixture.experts.down_proj_bias",
}  # fmt: skip


def alma_weights(state: Mapping[str, Tensor], num_positions: int) -> dict[str, Tensor]:
    """Return the state dict of AlmaForCausalLM, without the output layer, for that of a switch_lm model.

    Only the first `num_positions` positions are kept.
    """
    return _renamed(state, "model.", _EXPERTS, num_positions)


def router_splits(state: Mapping[str, Tensor]) -> list[list[int]] | None:
    """Return `router_splits` of an AlmaConfig for the state dict of a switch_lm model."""
    found = [tensor.round().int().tolist() for name, tensor in state.items() if name.endswith(".router.split_E")]
    return found if any(parent >= 0 for one in found for parent in one) else None


def opt_weights(state: Mapping[str, Tensor], num_positions: int) -> dict[str, Tensor]:
    """Return the state dict of OPTForCausalLM, without the output layer, for that of a switch_lm model of one expert.

    Only the first `num_positions` positions are kept.
    """
    weights = _renamed(state, "model.decoder.", _DENSE, num_positions)
    embedding = weights["model.decoder.embed_tokens.weight"]
    scale = embedding.size(1) ** 0.5
    weights["model.decoder.embed_tokens.weight"] = embedding * scale
    for name in ("weight", "bias"):
        weights[f"model.decoder.final_layer_norm.{name}"] = weights[f"model.decoder.final_layer_norm.{name}"] / scale
    positions = weights["model.decoder.embed_positions.weight"]
    unused = positions.new_zeros(OPT_OFFSET, positions.size(1))
    weights["model.decoder.embed_positions.weight"] = torch.cat([unused, positions])
    return weights


def _renamed(
    state: Mapping[str, Tensor], prefix: str, in_mixture: Mapping[str, str], num_positions: int
) -> dict[str, Tensor]:
    """Return the weights under the names of transformers, which begin with `prefix`.

    `in_mixture` maps the names of the weights in a mixture. If it has no router, the only expert is taken.
    """
    found = {}
    for name, tensor in state.items():
        own = name.removeprefix("decoder.")
        layer, _, of_mixture = own.partition(".mixture.")
        if of_mixture in in_mixture:
            only = tensor if "router.weight" in in_mixture else tensor.squeeze(0)
            found[f"{prefix}{layer}.{in_mixture[of_mixture]}"] = only
        elif "qkv_proj" in own:
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                found[prefix + own.replace("qkv_proj", f"{part}_proj")] = values.contiguous()
        elif own.startswith("layer_norm."):
            found[f"{prefix}final_{own}"] = tensor
        elif not of_mixture and own != "version":
            found[prefix + own] = tensor
    positions = f"{prefix}embed_positions.weight"
    found[positions] = found[positions][:num_positions].contiguous()
    return found


def opt_shapes(vocabulary: int, positions: int, layers: int, dim: int, ffn_dim: int) -> dict[str, list[int]]:
    """Return the name and the shape of each tensor of an OPT model, without the output layer and the first prefix.

    Args:
        vocabulary: number of words in the vocabulary.
        positions: number of positions.
        layers: number of layers.
        dim: model width.
        ffn_dim: hidden width of a feed-forward network.
    """
    shapes = {
        "decoder.embed_tokens.weight": [vocabulary, dim],
        "decoder.embed_positions.weight": [positions + OPT_OFFSET, dim],
        "decoder.final_layer_norm.weight": [dim],
        "decoder.final_layer_norm.bias": [dim],
    }
    for number in range(layers):
        of_layer = {f"self_attn.{part}_proj": [dim, dim] for part in ("q", "k", "v", "out")}
        of_layer |= {"self_attn_layer_norm": [dim], "final_layer_norm": [dim]}
        of_layer |= {"fc1": [ffn_dim, dim], "fc2": [dim, ffn_dim]}
        for name, shape in of_layer.items():
            shapes[f"decoder.layers.{number}.{name}.weight"] = shape
            shapes[f"decoder.layers.{number}.{name}.bias"] = shape[:1]
    return shapes


def switch_weights(opt: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a switch_lm model of one expert for those of an OPT model, named as in `opt_shapes`.

    `opt_weights` turns the result into the same values again, if it has returned these. For others, the embedding
    and the final layer norm can differ by the last bit.
    """
    scale = opt["decoder.embed_tokens.weight"].size(1) ** 0.5
    embedding, positions = opt["decoder.embed_tokens.weight"], opt["decoder.embed_positions.weight"]
    state = {
        "decoder.embed_tokens.weight": _argument(lambda x: x * scale, embedding, embedding / scale),
        "decoder.embed_positions.weight": positions[OPT_OFFSET:].clone(),
    }
    for part in ("weight", "bias"):
        values = opt[f"decoder.final_layer_norm.{part}"]
        state[f"decoder.layer_norm.{part}"] = _argument(lambda x: x / scale, values, values * scale)
    layers = {int(name.split(".")[2]) for name in opt if name.startswith("decoder.layers.")}
    for layer in sorted(layers):
        prefix = f"decoder.layers.{layer}."
        for part in ("weight", "bias"):
            qkv = [opt[f"{prefix}self_attn.{one}_proj.{part}"] for one in "qkv"]
            state[f"{prefix}self_attn.qkv_proj.{part}"] = torch.cat(qkv)
            for name in ("self_attn.out_proj", "self_attn_layer_norm", "final_layer_norm"):
                state[f"{prefix}{name}.{part}"] = opt[f"{prefix}{name}.{part}"]
        for ours, theirs in _DENSE.items():
            if layer % 2:
                state[f"{prefix}mixture.{ours}"] = opt[prefix + theirs].unsqueeze(0)
            else:
                state[prefix + theirs] = opt[prefix + theirs]
    return state


def _argument(function: Callable[[Tensor], Tensor], values: Tensor, near: Tensor) -> Tensor:
    """Return float32 numbers x with function(x) = values where there are such numbers beside `near`; there, `near`."""
    found = near
    for direction in (-torch.inf, torch.inf):
        other = torch.nextafter(near, torch.tensor(direction))
        found = torch.where((function(found) != values) & (function(other) == values), other, found)
    return found

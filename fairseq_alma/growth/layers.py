"""Growth in depth: copy layers of a language model, so that its output does not change (stacking)."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
"""Key of a tensor of a layer in the state dict of a switch_lm model: number of the layer, and name in the layer."""
OUTPUTS = (
    "self_attn.out_proj.weight",
    "self_attn.out_proj.bias",
    "fc2.weight",
    "fc2.bias",
    "mixture.fc2_weight",
    "mixture.fc2_bias",
)
"""Names of the tensors that compute the output of a sublayer, which is added to the residual connection."""
VALIDATION = ("mixture.valid_loss_E", "mixture.valid_tokens_E", "mixture.valid_input_ED")
"""Names of the tensors with the results of the last validation."""


def grow_layers(state: Mapping[str, Tensor], num_new: int) -> dict[str, Tensor]:
    """Return the state dict of a model with `num_new` more layers. `state` is not changed.

    Every second layer of the model has a mixture of experts, so layers are added in pairs: a layer with a feed-forward
    network and the layer with a mixture that follows it. A pair is copied and inserted after its original. The copied
    pairs are spread evenly over the depth, and the last pair is always among them.

    In the copies, the output projections of attention, feed-forward network and experts are 0. So a copy adds 0 to the
    residual connection, and the output of the model does not change. The other weights of a copy are those of its
    original, so the output projections get gradients different from 0. This is the block expansion of LLaMA Pro (Wu et
    al., 2024, arXiv 2401.02415). Copies without zeros (G_stack, Du et al., 2024, arXiv 2405.15319) change the output.

    The optimizer state has no entries for the new layers, so the optimizer must start from scratch.

    Args:
        state: state dict of a switch_lm model.
        num_new: number of layers to add, an even number. 0 changes nothing.

    Raises:
        SettingError: if `num_new` is negative or odd, or the model has fewer than `num_new` layers in pairs.
    """
    layers = {int(match[1]) for name in state if (match := LAYER.fullmatch(name))}
    num_pairs = len(layers) // 2
    if num_new < 0 or num_new % 2:
        raise SettingError(
            f"cannot add {num_new} layers: give an even number of 0 or more, because layers with a feed-forward "
            f"network and layers with a mixture alternate"
        )
    if num_new > 2 * num_pairs:
        raise SettingError(
            f"cannot add {num_new} layers to {len(layers)}, because each pair of layers is copied at most once: give "
            f"at most {2 * num_pairs}"
        )
    new_pairs = num_new // 2
    copied = {-(-number * num_pairs // new_pairs) - 1 for number in range(1, new_pairs + 1)}
    grown: dict[str, Tensor] = {}
    for name, value in state.items():
        match = LAYER.fullmatch(name)
        if match is None:
            grown[name] = value
            continue
        layer, rest = int(match[1]), match[2]
        # Number of pairs that are inserted before the pair of this layer.
        before = sum(pair < layer // 2 for pair in copied)
        grown[f"decoder.layers.{layer + 2 * before}.{rest}"] = value
        if layer // 2 in copied and layer // 2 < num_pairs:
            is_zero = rest in OUTPUTS or rest in VALIDATION
            grown[f"decoder.layers.{layer + 2 * before + 2}.{rest}"] = torch.zeros_like(value) if is_zero else value
    return grown

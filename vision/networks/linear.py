"""Products of M networks at once.

Shapes: M networks in G groups of N = M / G that see the same examples, b examples, i inputs, o outputs.
"""

import torch
from torch import Tensor


def linear(x: Tensor, weight_Moi: Tensor, bias_Mo: Tensor) -> Tensor:
    """x W^T + bias for every network: [M, b, o].

    Args:
        x: [M, b, i], or [G, b, i] where the networks of a group see the same examples.
        weight_Moi: weights.
        bias_Mo: biases.
    """
    num_groups, num_networks, num_outputs = len(x), len(weight_Moi), weight_Moi.shape[1]
    if num_groups == num_networks:
        if num_networks == 1:  # a plain product is faster than a batch of one
            return torch.addmm(bias_Mo[0], x[0], weight_Moi[0].t())[None]
        return torch.baddbmm(bias_Mo[:, None], x, weight_Moi.transpose(1, 2))
    # The networks of a group are one wide layer to their examples.
    wide = linear(x, weight_Moi.reshape(num_groups, -1, weight_Moi.shape[2]), bias_Mo.reshape(num_groups, -1))
    each = wide.view(num_groups, x.shape[1], -1, num_outputs).transpose(1, 2)
    return each.reshape(num_networks, x.shape[1], num_outputs)


def linear_gradient(x: Tensor, dy_Mbo: Tensor, into_weight_Moi: Tensor, into_bias_Mo: Tensor) -> None:
    """The gradient of `linear` with respect to weights and biases, written into two tensors.

    Args:
        x: as it was given to `linear`.
        dy_Mbo: the gradient with respect to what it returned.
        into_weight_Moi: takes the weights' gradient.
        into_bias_Mo: takes the biases'.
    """
    torch.sum(dy_Mbo, dim=1, out=into_bias_Mo)
    num_groups, num_networks = len(x), len(dy_Mbo)
    if num_groups == num_networks:
        if num_networks == 1:
            torch.mm(dy_Mbo[0].t(), x[0], out=into_weight_Moi[0])
        else:
            torch.bmm(dy_Mbo.transpose(1, 2), x, out=into_weight_Moi)
        return
    num_examples, num_outputs = dy_Mbo.shape[1:]
    each = dy_Mbo.view(num_groups, -1, num_examples, num_outputs).transpose(1, 2)
    wide = each.reshape(num_groups, num_examples, -1)
    into = into_weight_Moi.view(num_groups, wide.shape[2], -1)
    if num_groups == 1:
        torch.mm(wide[0].t(), x[0], out=into[0])
    else:
        torch.bmm(wide.transpose(1, 2), x, out=into)


def input_gradient(dy_Mbo: Tensor, weight_Moi: Tensor) -> Tensor:
    """The gradient of `linear` with respect to x [M, b, i]."""
    if len(dy_Mbo) == 1:
        return torch.mm(dy_Mbo[0], weight_Moi[0])[None]
    return torch.bmm(dy_Mbo, weight_Moi)


def through_relu(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of max(0, x), from its value y."""
    return torch.ops.aten.threshold_backward(dy, y, 0)

"""Linear layers of M networks at once, and their gradients.

Shapes: M networks in G groups of N = M / G that see the same examples, b examples, i inputs, o outputs.
"""

import torch
from torch import Tensor

from vision.networks.parameters import Parameters


class LinearLayers:
    """x W^T + bias for every network. All views are made once: at these sizes making them costs as much as using them.

    Args:
        weight_Moi: weights.
        bias_Mo: biases.
        d_weight_Moi: takes the gradient of the weights.
        d_bias_Mo: takes the gradient of the biases.
    """

    def __init__(self, weight_Moi: Tensor, bias_Mo: Tensor, d_weight_Moi: Tensor, d_bias_Mo: Tensor):
        self._num_networks, self._num_outputs, self._num_inputs = weight_Moi.shape
        self._weight_Moi, self._bias_Mo, self._d_weight_Moi, self._d_bias_Mo = (
            weight_Moi,
            bias_Mo,
            d_weight_Moi,
            d_bias_Mo,
        )
        self._weight_Mio, self._bias_M1o = weight_Moi.transpose(1, 2), bias_Mo[:, None]
        # Of a single network a plain product is faster than a batch of one.
        self._weight_oi, self._d_weight_oi = weight_Moi[0], d_weight_Moi[0]
        self._weight_io, self._bias_o, self._d_bias_o = self._weight_oi.t(), bias_Mo[0], d_bias_Mo[0]
        self._last_ones: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[M, b, o]; of a single network [b, o].

        Args:
            x: [M, b, i], or [G, b, i] where the networks of a group see the same examples; of a single network [b, i].
        """
        num_networks = self._num_networks
        if num_networks == 1:
            return torch.addmm(self._bias_o, x, self._weight_io)
        num_groups = x.shape[0]
        if num_networks == num_groups:
            return torch.baddbmm(self._bias_M1o, x, self._weight_Mio)
        # The networks of a group are one wide layer to their examples.
        if num_groups == 1:
            wide = torch.addmm(self._bias_Mo.view(-1), x[0], self._weight_Moi.view(-1, self._num_inputs).t())
        else:
            weights = self._weight_Moi.view(num_groups, -1, self._num_inputs)
            wide = torch.baddbmm(self._bias_Mo.view(num_groups, 1, -1), x, weights.transpose(1, 2))
        each = wide.view(num_groups, x.shape[1], -1, self._num_outputs).transpose(1, 2)
        return each.reshape(num_networks, x.shape[1], self._num_outputs)

    def backward(self, x: Tensor, dy: Tensor) -> None:
        """Write the gradient of weights and biases.

        Args:
            x: as it was given to `forward`.
            dy: the gradient of what it returned.
        """
        num_networks = self._num_networks
        if num_networks == 1:
            dy_ob = dy.t()
            # A product with ones is a sum, and faster.
            torch.mv(dy_ob, self._ones(len(dy)), out=self._d_bias_o)
            torch.mm(dy_ob, x, out=self._d_weight_oi)
            return
        torch.sum(dy, 1, out=self._d_bias_Mo)
        num_groups = x.shape[0]
        if num_networks == num_groups:
            torch.bmm(dy.transpose(1, 2), x, out=self._d_weight_Moi)
            return
        num_examples = x.shape[1]
        each = dy.view(num_groups, -1, num_examples, self._num_outputs).transpose(1, 2)
        wide = each.reshape(num_groups, num_examples, -1)
        into = self._d_weight_Moi.view(num_groups, wide.shape[2], -1)
        if num_groups == 1:
            torch.mm(wide[0].t(), x[0], out=into[0])
        else:
            torch.bmm(wide.transpose(1, 2), x, out=into)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """The gradient of x, [M, b, i]; of a single network [b, i]."""
        if self._num_networks == 1:
            return torch.mm(dy, self._weight_oi)
        return torch.bmm(dy, self._weight_Moi)

    def _ones(self, length: int) -> Tensor:
        if self._last_ones is None or len(self._last_ones) != length:
            self._last_ones = torch.ones(length, device=self._bias_o.device)
        return self._last_ones


def through_relu(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of max(0, x), from its value y."""
    return torch.ops.aten.threshold_backward(dy, y, 0)


def layers_of(parameters: Parameters, gradient: Parameters) -> list[LinearLayers]:
    """weight_1 and bias_1, weight_2 and bias_2 ..., with the gradients that they fill."""
    return [
        LinearLayers(*(tensors[f"{name}_{layer}"] for tensors in (parameters, gradient) for name in ("weight", "bias")))
        for layer in range(1, len(parameters.shapes) // 2 + 1)
    ]

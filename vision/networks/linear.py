"""Compute a linear layer of M networks at once, and its gradients.

Shapes: M networks in G groups, b examples, i inputs, o outputs. The M / G networks of a group read the same examples.
"""

import torch
from torch import Tensor

from vision.networks.parameters import Parameters


class LinearLayers:
    """One linear layer, x W^T + bias, in each of M networks. `backward` writes gradients to d_weight_Moi and d_bias_Mo.

    The constructor creates all views of the tensors once, because for small layers creating a view takes as long as
    computing with the view.
    """

    def __init__(self, weight_Moi: Tensor, bias_Mo: Tensor, d_weight_Moi: Tensor, d_bias_Mo: Tensor):
        self._num_networks, self._num_outputs, self._num_inputs = weight_Moi.shape
        self._weight_Moi, self._bias_Mo = weight_Moi, bias_Mo
        self._d_weight_Moi, self._d_bias_Mo = d_weight_Moi, d_bias_Mo
        self._weight_Mio, self._bias_M1o = weight_Moi.transpose(1, 2), bias_Mo[:, None]
        # Create views without the network axis for a stack of one network, because a plain matrix product is faster
        # than a batched product with batch size 1.
        self._weight_oi, self._d_weight_oi = weight_Moi[0], d_weight_Moi[0]
        self._weight_io, self._bias_o, self._d_bias_o = self._weight_oi.t(), bias_Mo[0], d_bias_Mo[0]
        self._last_ones: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [M, b, o], or [b, o] for a single network.

        The inputs are [M, b, i], or [G, b, i] if the networks of a group read the same; [b, i] for a single network.
        """
        num_networks = self._num_networks
        if num_networks == 1:
            return torch.addmm(self._bias_o, x, self._weight_io)
        num_groups = x.shape[0]
        if num_networks == num_groups:
            return torch.baddbmm(self._bias_M1o, x, self._weight_Mio)
        # The networks of a group read the same inputs. So compute their layers as one wide layer.
        if num_groups == 1:
            wide = torch.addmm(self._bias_Mo.view(-1), x[0], self._weight_Moi.view(-1, self._num_inputs).t())
        else:
            weights = self._weight_Moi.view(num_groups, -1, self._num_inputs)
            wide = torch.baddbmm(self._bias_Mo.view(num_groups, 1, -1), x, weights.transpose(1, 2))
        by_network = wide.view(num_groups, x.shape[1], -1, self._num_outputs).transpose(1, 2)
        return by_network.reshape(num_networks, x.shape[1], self._num_outputs)

    def backward(self, x: Tensor, dy: Tensor) -> None:
        """Write the gradients of weights and biases, from the input of `forward` and the gradient of its output."""
        num_networks = self._num_networks
        if num_networks == 1:
            dy_ob = dy.t()
            # Sum over the examples by a product with ones, which is faster than torch.sum.
            torch.mv(dy_ob, self._ones(len(dy)), out=self._d_bias_o)
            torch.mm(dy_ob, x, out=self._d_weight_oi)
            return
        torch.sum(dy, 1, out=self._d_bias_Mo)
        num_groups = x.shape[0]
        if num_networks == num_groups:
            torch.bmm(dy.transpose(1, 2), x, out=self._d_weight_Moi)
            return
        num_examples = x.shape[1]
        by_example = dy.view(num_groups, -1, num_examples, self._num_outputs).transpose(1, 2)
        wide = by_example.reshape(num_groups, num_examples, -1)
        out = self._d_weight_Moi.view(num_groups, wide.shape[2], -1)
        if num_groups == 1:
            torch.mm(wide[0].t(), x[0], out=out[0])
        else:
            torch.bmm(wide.transpose(1, 2), x, out=out)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient with respect to the input, [M, b, i], or [b, i] for a single network."""
        if self._num_networks == 1:
            return torch.mm(dy, self._weight_oi)
        return torch.bmm(dy, self._weight_Moi)

    def _ones(self, length: int) -> Tensor:
        """Return a vector of ones. The vector is stored, because the next call often needs the same length."""
        if self._last_ones is None or len(self._last_ones) != length:
            self._last_ones = torch.ones(length, device=self._bias_o.device)
        return self._last_ones


def relu_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient with respect to the input of a ReLU, from that of its output y."""
    return torch.ops.aten.threshold_backward(dy, y, 0)


def linear_layers(parameters: Parameters, gradient: Parameters) -> list[LinearLayers]:
    """Return the linear layers with the parameters weight_1 and bias_1, weight_2 and bias_2, and so on."""
    return [
        LinearLayers(*(tensors[f"{name}_{layer}"] for tensors in (parameters, gradient) for name in ("weight", "bias")))
        for layer in range(1, len(parameters.shapes) // 2 + 1)
    ]

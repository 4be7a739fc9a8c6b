"""Stacks: M networks of one shape, computed together, with their gradients written out.

These networks are tiny: what they cost is overhead, not arithmetic. A stack does for M networks what a loop would do
for one, in as many operations.

parameters.py  the parameters of M networks as one flat tensor
linear.py      the products that all of them are made of
mlp.py         the perceptron
gates.py       who weighs the experts: a tree of gates, or one flat softmax
mixture.py     the perceptron whose hidden layers are mixtures of experts, and its growth
plain.py       one network of each kind as a plain torch.nn.Module: what stacks must follow, and what a run deploys
"""

from vision.networks.mixture import MixtureStack
from vision.networks.mlp import MLPStack
from vision.networks.stack import Stack

__all__ = ["MLPStack", "MixtureStack", "Stack"]

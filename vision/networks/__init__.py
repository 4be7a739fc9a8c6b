"""Stacks: M networks of one shape, computed together, with their gradients written out.

These networks are tiny: what they cost is overhead, not arithmetic. A stack does for M networks what a loop would do
for one, in as many operations.

parameters.py  the parameters of M networks as one flat tensor
linear.py      the products that all of them are made of
mlp.py         the perceptron
conv.py        a convolution with its norm and ReLU, and pooling
vgg.py         the reduced VGG19
gates.py       who weighs the experts: a tree of gates, or one flat softmax
gated.py       what mixtures have in common
mixture.py     the perceptron whose hidden layers are mixtures of experts, and its growth
vgg_mixture.py the VGG whose blocks are mixtures, and its growth
plain.py       one network of each kind as a plain torch.nn.Module: what stacks must follow, and what a run deploys
"""

from vision.networks.gated import GatedStack
from vision.networks.mixture import MixtureStack
from vision.networks.mlp import MLPStack
from vision.networks.stack import Stack
from vision.networks.vgg import VGGStack
from vision.networks.vgg_mixture import VGGMixtureStack

__all__ = ["GatedStack", "MLPStack", "MixtureStack", "Stack", "VGGMixtureStack", "VGGStack"]

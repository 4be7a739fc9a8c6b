"""Stacks of networks. A stack is a set of M networks of one shape that are computed together.

The networks in the paper are small: most time is spent on starting torch operations, not on arithmetic. A stack of
multilayer perceptrons (MLPs) starts about as many torch operations for M networks as for one network. The gradients are
computed by hand-written code, not by torch's autograd.

stack.py        the interface of all stacks
parameters.py   the parameters of M networks as one flat tensor
linear.py       linear layers of M networks
mlp.py          the MLP
conv.py         a convolution with batch normalisation and ReLU, and max pooling
narrow.py       convolutions and pooling for few channels on a CPU, computed by the C code in narrow.c
compiled.py     compiles C code for this machine and caches the compiled library
block.py        a block of the VGG, computed by narrow.py if this is faster, else by conv.py
vgg.py          the reduced VGG19
gates.py        the gates that weigh experts: a tree of gates, or one flat softmax
gated.py        the interface of stacks with mixtures of experts
mixture.py      the MLP whose hidden layers are mixtures of experts, which can grow
vgg_mixture.py  the VGG whose blocks are mixtures of experts, which can grow
modules.py      one network with mixtures as a torch.nn.Module, for tests, FLOP counts and deployment
"""

from vision.networks.gated import GatedStack
from vision.networks.mixture import MixtureStack
from vision.networks.mlp import MLPStack
from vision.networks.stack import Stack
from vision.networks.vgg import VGGStack
from vision.networks.vgg_mixture import VGGMixtureStack

__all__ = ["GatedStack", "MLPStack", "MixtureStack", "Stack", "VGGMixtureStack", "VGGStack"]

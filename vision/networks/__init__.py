"""Stacks: M networks of one shape that are computed together, with hand-written gradients.

The time of networks as small as the paper's goes to overhead, not to arithmetic. A stack computes M networks with as
many torch operations as a loop would need for one.

stack.py        the interface of all stacks
parameters.py   the parameters of M networks as one flat tensor
linear.py       linear layers of M networks
mlp.py          the perceptron
conv.py         a convolution with its norm and ReLU, and pooling
narrow.py       the same for few channels on a CPU, by the C code in narrow.c
compiled.py     compiles C code for this machine and caches the library
block.py        a block of the VGG: narrow.py where it is faster, else conv.py
vgg.py          the reduced VGG19
gates.py        the gates that weigh experts: a tree of gates, or one flat softmax
gated.py        the interface of stacks with mixtures of experts
mixture.py      the perceptron whose hidden layers are mixtures of experts, and its growth
vgg_mixture.py  the VGG whose blocks are mixtures of experts, and its growth
modules.py      one network with mixtures as a torch.nn.Module, for tests, FLOP counts and deployment
"""

from vision.networks.gated import GatedStack
from vision.networks.mixture import MixtureStack
from vision.networks.mlp import MLPStack
from vision.networks.stack import Stack
from vision.networks.vgg import VGGStack
from vision.networks.vgg_mixture import VGGMixtureStack

__all__ = ["GatedStack", "MLPStack", "MixtureStack", "Stack", "VGGMixtureStack", "VGGStack"]

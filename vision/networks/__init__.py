"""Stacks of networks. A stack is a set of M networks of one shape that are computed together.

The multilayer perceptrons (MLPs) in the paper are small: most time is spent on starting torch operations, not on
arithmetic. A stack of MLPs starts about as many torch operations for M networks as for one network, and its gradients
are computed by hand-written code. All other networks are torch modules with torch's autograd.

stack.py               the interface of all stacks
parameters.py          the parameters of M networks as one flat tensor
linear.py              linear layers of M networks
mlp.py                 stacks of MLPs
gates.py               the gates that weigh experts: a tree of gates, or one flat softmax
gated.py               the interface of stacks with mixtures of experts
mixture.py             stacks of MLPs whose hidden layers are mixtures of experts, which can grow
modules.py             one network with mixtures as a torch.nn.Module
architectures.py       network architectures by name: functions that return a torch module
vgg.py                 the reduced VGG19, whose blocks are computed by narrow.c if this is faster, else by torch
resnet.py              ResNet-20
narrow.py              convolutions and pooling for few channels on a CPU, computed by the C code in narrow.c
module_stack.py        stacks of any torch modules
gated_module_stack.py  stacks of torch modules whose blocks are mixtures of experts, which can grow

To add a layer type, write a torch module and use it in an architecture. No other file changes.
"""

from vision.networks.architectures import Structure, register_backbone
from vision.networks.gated import GatedStack
from vision.networks.gated_module_stack import GatedModuleStack
from vision.networks.mixture import MixtureStack
from vision.networks.mlp import MLPStack
from vision.networks.module_stack import ModuleStack
from vision.networks.resnet import resnet20
from vision.networks.stack import Stack
from vision.networks.vgg import conv_network, vgg

__all__ = [
    "GatedModuleStack",
    "GatedStack",
    "MLPStack",
    "MixtureStack",
    "ModuleStack",
    "Stack",
    "Structure",
    "conv_network",
    "register_backbone",
    "resnet20",
    "vgg",
]

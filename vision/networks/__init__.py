"""Stacks of networks. A stack is a set of M networks of one shape that are computed together.

The multilayer perceptrons (MLPs) in the paper are small: most time is spent on starting torch operations, not on
arithmetic. A stack of MLPs starts about as many torch operations for M networks as for one network, and its gradients
are computed by hand-written code. All other networks are torch modules with torch's autograd.

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

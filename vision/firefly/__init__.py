"""Firefly (Wu et al., "Firefly neural architecture descent", NeurIPS 2020): growth of one network by gradient scores.

In width, every unit can be split in two and every layer can get new units. One ranking orders splits and new units by
how fast they lower the loss, and the best ones are added. This follows the authors' code, with these differences:

- The bias of the head does not change.
- The head reads new units with the weights that they were ranked with. In the authors' code it does not read them.
- A growth by n units adds n units. The authors' code adds n + 1.
- The layer before a flattening head can be widened.
- The noise of a split is a convolution. The authors' code multiplies unfolded images, which needs more memory.

In depth, a layer that does almost nothing can be added after any layer. The same gradient ranks these layers. The
ALMA paper names growth in depth; neither the ALMA code nor the Firefly code contains it.

chain.py    the network that growth works on: a chain of layers, as tensors
convert.py  from stacks of networks to chains and back
ranking.py  the two passes over the data that score candidates
width.py    candidates and growth in width
depth.py    candidates and growth in depth
"""

from vision.firefly.chain import Chain, Layer, Norm
from vision.firefly.convert import chain_from_stack, stack_from_chain
from vision.firefly.depth import DepthCandidates, grow_depth
from vision.firefly.ranking import BatchSource, Growth, rank
from vision.firefly.width import (
    NUM_CANDIDATES,
    CountRule,
    WidthCandidates,
    count_by_num_params,
    count_by_width_ratio,
    grow_width,
)

__all__ = [
    "NUM_CANDIDATES",
    "BatchSource",
    "Chain",
    "CountRule",
    "DepthCandidates",
    "Growth",
    "Layer",
    "Norm",
    "WidthCandidates",
    "chain_from_stack",
    "count_by_num_params",
    "count_by_width_ratio",
    "grow_depth",
    "grow_width",
    "rank",
    "stack_from_chain",
]

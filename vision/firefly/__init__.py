"""Firefly (Wu et al., "Firefly neural architecture descent", NeurIPS 2020): grow one network by gradient scores.

A unit is an output channel of a convolution or a hidden unit of a multilayer perceptron. Growth in width splits units
in two and adds new units to layers. A possible split or new unit is called a candidate. All candidates are ranked
together by how fast they lower the loss, and the best candidates are added. This follows the code of the Firefly
authors, with these differences:

- The bias of the head, which is the last linear layer, does not change.
- The head reads the new units with the weights used in the ranking. In the authors' code the head ignores the new
  units.
- Growth by n units adds n units. The authors' code adds n + 1.
- The last layer before the head can always be widened. The authors' code cannot widen it if the head flattens its
  output.
- A split replaces a unit by two copies of it. Small weights, the noise, are added to the weights of the first copy and
  subtracted from the weights of the second. The effect of the noise is computed by a convolution. The authors' code
  multiplies unfolded images, which needs more memory.

The ALMA paper mentions growth in depth, too, but neither the ALMA code nor the Firefly code contains it.

chain.py    the form of the network that growth works on: a chain of layers; converts stacks to chains and back
width.py    the candidates, the two passes over the data that score them, and the growth
"""

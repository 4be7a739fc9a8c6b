"""Plain networks trained beside a stack, the way anyone would write it: autograd, F.cross_entropy, torch.optim."""

import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

TOLERANCE = 1e-5
"""Between parameters of size 1 after 50 updates: some hundred roundings of float32."""


class Followed:
    """The networks of a stack, one by one.

    Args:
        stack: M networks, as they are now.
        optimizer: of torch.optim, from parameters.
        together: how many neighbours have one loss, of their logits' mean (or sum).
        mean: else the sum.
    """

    def __init__(self, stack, optimizer, together=1, mean=True):
        self.plain = [stack.to_module(number) for number in range(len(stack))]
        self.units = [self.plain[first : first + together] for first in range(0, len(stack), together)]
        self.mean = mean
        self.optimizers = [optimizer([p for network in unit for p in network.parameters()]) for unit in self.units]
        self.places = places(stack)

    def step(self, x, y, uniforms=None):
        """One update.

        Args:
            x: examples of each unit, [U, b, i].
            y: their classes, [U, b].
            uniforms: what hard gates draw from, layer by layer [M, b, n].
        """
        number = 0
        for unit, optimizer, x_bi, y_b in zip(self.units, self.optimizers, x, y, strict=True):
            logits = []
            for network in unit:
                more = {} if uniforms is None else {"uniforms": [of_layer[number] for of_layer in uniforms]}
                logits.append(network(x_bi, **more))
                number += 1
            total = torch.stack(logits).sum(0)
            optimizer.zero_grad()
            F.cross_entropy(total / len(unit) if self.mean else total, y_b).backward()
            optimizer.step()

    def compare(self, stack, tolerance=TOLERANCE):
        """All parameters of all networks."""
        theirs = parameters_to_vector(p for network in self.plain for p in network.parameters())
        torch.testing.assert_close(stack.parameters.flat[self.places], theirs.detach(), rtol=0, atol=tolerance)


def places(stack):
    """Where in a stack's flat tensor the parameters of its plain networks lie, one network after the other."""
    parameters = stack.parameters.flat.clone()
    stack.parameters.flat.copy_(torch.arange(len(parameters)))  # so that plain networks hold places
    found = parameters_to_vector(p for number in range(len(stack)) for p in stack.to_module(number).parameters())
    stack.parameters.flat.copy_(parameters)
    assert sorted(found.tolist()) == list(range(len(parameters)))  # each once
    return found.long()


class Noise:
    """Uniform numbers for hard gates, remembered until the plain networks have had them too."""

    def __init__(self, num_networks):
        self.num_networks, self.given = num_networks, []
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, shape):
        self.given.append(torch.rand(self.num_networks, *shape, generator=self.generator))
        return self.given[-1]


def some_batches(num_batches, num_orders, batch_size, sizes, seed=0):
    """Examples and classes that can be learned from, the last batch smaller: (x [R, b, i], y [R, b])."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(sizes[0], sizes[-1], generator=generator)
    for number in range(num_batches):
        b = batch_size - 3 if number == num_batches - 1 else batch_size
        x = torch.randn(num_orders, b, sizes[0], generator=generator)
        yield x, (x @ rule).argmax(-1)


def follow(stack, loss, optimizer, of_torch, together=1, mean=True, num_updates=50, noise=None):
    """Train a stack and its plain networks on the same batches, and compare them after every update.

    Args:
        stack: trained in place.
        loss: of vision.training.
        optimizer: of vision.optimizers, of the stack's parameters.
        of_torch: the same of torch.optim, from parameters.
        together: networks that have one loss; they see the same examples.
        mean: as for Followed.
        num_updates: all batches hold 8 examples, but the last 5.
        noise: for hard gates.
    """
    followed = Followed(stack, of_torch, together, mean)
    began = stack.parameters.flat.clone()
    if noise:
        stack.set_gate_noise(noise)
    for x, y in some_batches(num_updates, len(stack) // together, 8, stack.sizes):
        one_hot = F.one_hot(y, stack.sizes[-1]).float()
        stack.backward(loss.gradient(stack.logits(x, training=True), one_hot))
        optimizer.step(stack.gradient.flat)
        followed.step(x, y, noise.given if noise else None)
        if noise:
            noise.given = []
        followed.compare(stack)
    moved = (stack.parameters.flat - began).abs().max()
    assert moved > 1000 * TOLERANCE  # a comparison of things that went somewhere


def compare_gradients(stack, groups, draws=False):
    """`backward` against autograd, for any gradient of the logits.

    Args:
        stack: M networks.
        groups: G: every M / G networks see the same 7 examples.
        draws: its gates are hard, and draw.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(groups, 7, stack.sizes[0], generator=generator)
    d_logits = torch.randn(len(stack), 7, stack.sizes[-1], generator=generator)
    noise = Noise(len(stack))
    if draws:
        stack.set_gate_noise(noise)
    logits = stack.logits(x, training=True)
    stack.backward(d_logits)
    networks = [stack.to_module(number) for number in range(len(stack))]
    stack.parameters.flat.copy_(stack.gradient.flat)  # so that each plain network now holds its gradient
    for number, network in enumerate(networks):
        more = {"uniforms": [of_layer[number] for of_layer in noise.given]} if draws else {}
        expected = network(x[number // (len(stack) // groups)], **more)
        torch.testing.assert_close(logits[number], expected.detach(), rtol=1e-5, atol=1e-6)
        expected.backward(d_logits[number])
        for gradient, p in zip(stack.to_module(number).parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(gradient.detach(), p.grad, rtol=1e-5, atol=1e-5)

"""Train the networks of a stack as torch modules too: with autograd, F.cross_entropy and torch.optim."""

import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

TOLERANCE = 1e-5
"""Allowed difference of parameters around 1 after 50 updates: some hundred roundings of float32."""


class Followed:
    """Copies of the networks of a stack as torch modules, each trained on its own.

    Args:
        stack: M networks.
        optimizer: makes an optimizer of torch.optim from parameters.
        together: number of neighbouring networks that are trained as one.
        mean: if True, their logits are averaged, else summed.
    """

    def __init__(self, stack, optimizer, together=1, mean=True):
        self.modules = [stack.to_module(number) for number in range(len(stack))]
        self.units = [self.modules[first : first + together] for first in range(0, len(stack), together)]
        self.mean = mean
        self.optimizers = [optimizer([p for network in unit for p in network.parameters()]) for unit in self.units]
        self.places = places(stack)

    def step(self, x, y, uniforms=None):
        """Update all networks once.

        Args:
            x: examples of each unit, [U, b, i].
            y: classes, [U, b].
            uniforms: per layer, the numbers with which hard gates draw, [M, b, n].
        """
        number = 0
        for unit, optimizer, x_bi, y_b in zip(self.units, self.optimizers, x, y, strict=True):
            logits = []
            for network in unit:
                more = {} if uniforms is None else {"uniforms": [uniform[number] for uniform in uniforms]}
                logits.append(network(x_bi, **more))
                number += 1
            total = torch.stack(logits).sum(0)
            optimizer.zero_grad()
            F.cross_entropy(total / len(unit) if self.mean else total, y_b).backward()
            optimizer.step()

    def compare(self, stack, tolerance=TOLERANCE):
        """Check that all parameters of all networks agree with those of the stack."""
        theirs = parameters_to_vector(p for network in self.modules for p in network.parameters())
        torch.testing.assert_close(stack.parameters.flat[self.places], theirs.detach(), rtol=0, atol=tolerance)


def places(stack):
    """Return the index in the stack's flat tensor of each parameter of its modules, one network after the other."""
    parameters = stack.parameters.flat.clone()
    stack.parameters.flat.copy_(torch.arange(len(parameters)))  # so that the parameters of modules are indices
    found = parameters_to_vector(p for number in range(len(stack)) for p in stack.to_module(number).parameters())
    stack.parameters.flat.copy_(parameters)
    assert sorted(found.tolist()) == list(range(len(parameters)))  # each index occurs once
    return found.long()


class Noise:
    """Uniform numbers for hard gates, recorded in `given` for the modules."""

    def __init__(self, num_networks):
        self.num_networks, self.given = num_networks, []
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, shape):
        self.given.append(torch.rand(self.num_networks, *shape, generator=self.generator))
        return self.given[-1]


def some_batches(num_batches, num_orders, batch_size, sizes, seed=0):
    """Yield batches of examples [R, b, i] and classes [R, b] that follow a rule. The last batch is smaller."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(sizes[0], sizes[-1], generator=generator)
    for number in range(num_batches):
        b = batch_size - 3 if number == num_batches - 1 else batch_size
        x = torch.randn(num_orders, b, sizes[0], generator=generator)
        yield x, (x @ rule).argmax(-1)


def follow(stack, loss, optimizer, of_torch, together=1, mean=True, num_updates=50, noise=None):
    """Train a stack and its modules on the same batches, and compare them after every update.

    Args:
        stack: trained in place.
        loss: a loss of vision.training.
        optimizer: an optimizer of vision.optimizers for the stack's parameters.
        of_torch: makes the corresponding optimizer of torch.optim from parameters.
        together: number of networks that are trained as one. They read the same examples.
        mean: as for `Followed`.
        num_updates: number of batches. A batch has 8 examples, the last one 5.
        noise: for hard gates.
    """
    followed = Followed(stack, of_torch, together, mean)
    start = stack.parameters.flat.clone()
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
    moved = (stack.parameters.flat - start).abs().max()
    assert moved > 1000 * TOLERANCE  # the updates changed the parameters much more than the tolerance


def compare_gradients(stack, groups, draws=False):
    """Check `backward` against autograd, for a random gradient of the logits.

    Args:
        stack: M networks. Its parameters are overwritten.
        groups: G; each group of M / G networks reads the same 7 examples.
        draws: True if the stack has hard gates.
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
    stack.parameters.flat.copy_(stack.gradient.flat)  # so that the modules made below contain the gradients
    for number, network in enumerate(networks):
        more = {"uniforms": [uniform[number] for uniform in noise.given]} if draws else {}
        expected = network(x[number // (len(stack) // groups)], **more)
        torch.testing.assert_close(logits[number], expected.detach(), rtol=1e-5, atol=1e-6)
        expected.backward(d_logits[number])
        for gradient, p in zip(stack.to_module(number).parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(gradient.detach(), p.grad, rtol=1e-5, atol=1e-5)

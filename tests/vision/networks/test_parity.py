"""The networks after 50 updates are those that hand-written gradients computed.

The expected numbers were computed by stacks (commit 98a5619) that had gradients of their own for every layer; that of
Firefly later, by autograd. In double precision, so that only a real difference is larger than 1e-10.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.vision.networks.vggs import generators, mixture, vgg
from vision.firefly.chain import chain_from_stack, stack_from_chain
from vision.firefly.width import count_by_num_params, grow_width
from vision.networks import narrow
from vision.optimizers import SGD
from vision.seeds import generator
from vision.training import OwnLoss

EXPECTED = {
    "vgg": [0.02302739931224256, 0.18936244657300613],
    "two experts": [0.12928296748278129, 0.06189523395432739],
    "split": [0.03969022277444725, 0.061828442664454156],
    "split flat": [0.03969022277444725, 0.061828442664454156],
    "hard": [0.0936344737519247, 0.0755490312519084],
    "grown by Firefly": [0.04885579053601232],
}
"""Per network, the mean of the squared logits for a batch that it was not trained on."""


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


def images(number):
    drawn_by = torch.Generator().manual_seed(number)
    return torch.randn(2, 16, 32, 32, 3, generator=drawn_by), torch.randint(10, (2, 16), generator=drawn_by)


def train(stack, first, last):
    num_networks = len(stack)
    loss, optimizer = OwnLoss(num_networks, 1), SGD(stack.parameters.flat, 0.01, 0.9, 1e-4)
    for number in range(first, last):
        x, y = (values[:num_networks] for values in images(number))
        stack.backward(loss.gradient(stack.logits(x, training=True), F.one_hot(y, 10).double()))
        optimizer.step(stack.gradient.flat)
    return stack


def draw(stack, seed):
    drawn_by = torch.Generator().manual_seed(seed)
    stack.set_gate_noise(lambda shape: torch.rand(len(stack), *shape, generator=drawn_by))
    return stack


def trained_hard():
    stack = train(draw(mixture(2, 2, hard=True), 1), 0, 25)
    return train(draw(stack.split([[0, 1]] * 4, generators(2, "g")), 2), 25, 50)


def grown_by_firefly():
    def batches():
        for number in range(100, 103):
            x, y = images(number)
            yield x[0].movedim(-1, 1), y[0]

    stack = train(vgg(1), 0, 25)
    chain = chain_from_stack(stack)
    count = count_by_num_params(chain, round(chain.num_params() * 1.3))
    chain = grow_width(chain, batches, count, generator("w"), 5).chain
    return train(stack_from_chain(chain, stack), 25, 50)


TRAINED = {
    "vgg": lambda: train(vgg(2), 0, 50),
    "two experts": lambda: train(mixture(2, 2), 0, 50),
    "split": lambda: train(train(mixture(2), 0, 25).split([[0, 0]] * 4, generators(2, "g")), 25, 50),
    "split flat": lambda: train(train(mixture(2), 0, 25).split([[0, 0]] * 4, generators(2, "g"), flat=True), 25, 50),
    "hard": trained_hard,
    "grown by Firefly": grown_by_firefly,
}


ALWAYS = [*((kind, "narrow") for kind in EXPECTED), ("vgg", "torch")]
OTHERS = [(kind, "torch") for kind in EXPECTED if kind != "vgg"]


@pytest.mark.parametrize(
    ("kind", "backend"), [*ALWAYS, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_50_updates_are_those_of_the_hand_written_gradients(kind, backend, monkeypatch):
    """Growth does not depend on the backend, so only the slow tests grow networks whose blocks torch computes."""
    monkeypatch.setattr(narrow, "MAX_CHANNELS", 16 if backend == "narrow" else 0)
    stack = TRAINED[kind]()
    x, _ = images(999)
    found = stack.logits(x[: len(stack)]).square().mean((1, 2))
    torch.testing.assert_close(found, torch.tensor(EXPECTED[kind]), rtol=1e-10, atol=0)

"""Optimizers of one flat tensor, compared with those of torch.optim."""

import pytest
import torch

from vision.optimizers import SGD, AdaDelta


def gradients(num_steps, size=200):
    """Yield gradients of all scales from 1e-8 to 10, some of them zero, as those of networks are."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-8, 1, size)
    for step in range(num_steps):
        gradient = scale * torch.randn(size, generator=generator)
        gradient[step % 7 :: 7] = 0
        yield gradient


def compare(ours, of_torch, num_steps=200, tolerance=1e-5, **settings):
    """Check that two optimizers agree along the same gradients, up to 200 roundings of numbers around 1."""
    parameters = torch.linspace(-1, 1, 200)
    start, reference = parameters.clone(), parameters.clone().requires_grad_()
    ours, of_torch = ours(parameters, **settings), of_torch([reference], **settings)
    for gradient in gradients(num_steps):
        unchanged = gradient.clone()
        ours.step(gradient)
        assert torch.equal(gradient, unchanged)
        reference.grad = gradient
        of_torch.step()
        torch.testing.assert_close(parameters, reference.detach(), rtol=tolerance, atol=tolerance)
    assert (parameters - start).abs().max() > 0.01


@pytest.mark.parametrize("settings", [{}, {"lr": 1.0}, {"lr": 0.3, "rho": 0.95, "eps": 1e-5}])
def test_adadelta_equals_that_of_torch(settings):
    compare(AdaDelta, torch.optim.Adadelta, **{"lr": 1.0, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.01}, {"momentum": 0.5, "weight_decay": 0.1}]
)
def test_sgd_equals_that_of_torch(settings):
    compare(SGD, torch.optim.SGD, lr=0.1, **settings)


def test_two_steps_of_sgd_by_hand():
    parameters = torch.tensor([1.0])
    sgd = SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.5)
    sgd.step(torch.tensor([1.5]))  # 1.5 + 0.5 x 1 = 2, the first velocity: 1 - 0.5 x 2 = 0
    assert parameters.item() == 0
    sgd.step(torch.tensor([2.0]))  # 2 + 0.5 x 0 = 2; 0.5 x 2 + 2 = 3: 0 - 0.5 x 3
    assert parameters.item() == -1.5


def test_a_first_step_of_adadelta_by_hand():
    parameters = torch.zeros(1)
    AdaDelta(parameters, lr=2.0, rho=0.75, eps=1.0).step(torch.tensor([4.0]))
    # The mean of squared gradients is 0.25 x 16 = 4, that of squared changes 0. The step is lr = 2 times
    # sqrt(0 + 1) / sqrt(4 + 1) x 4.
    assert parameters.item() == pytest.approx(-8 / 5**0.5)


@pytest.mark.parametrize("optimizer", [AdaDelta, SGD])
def test_a_zero_gradient_changes_nothing(optimizer):
    parameters = torch.ones(3)
    optimizer(parameters, lr=1.0).step(torch.zeros(3))
    assert parameters.tolist() == [1, 1, 1]

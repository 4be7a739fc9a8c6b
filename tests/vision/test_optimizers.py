"""Optimizers of one flat tensor, compared with those of torch.optim."""

import pytest
import torch

from vision.optimizers import SGD, AdaDelta, cosine_rates, new_optimizer
from vision.settings import VisionSettings


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


def settings_of(**values):
    return VisionSettings(out="x", backbone="resnet20", **values)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_other_optimizers_are_those_of_torch(name):
    """Each updates every parameter separately. So one flat tensor is updated as several tensors would be."""
    flat = torch.linspace(-1, 1, 200)
    parts = [part.clone().requires_grad_() for part in flat.split([50, 150])]
    ours = new_optimizer(flat, settings_of(optimizer=name.lower(), lr=0.02, weight_decay=0.1))
    of_torch = getattr(torch.optim, name)(parts, lr=0.02, weight_decay=0.1)
    for gradient in gradients(50):
        ours.step(gradient)
        for part, own in zip(parts, gradient.split([50, 150]), strict=True):
            part.grad = own.clone()
        of_torch.step()
        torch.testing.assert_close(flat, torch.cat(parts).detach(), rtol=1e-5, atol=1e-5)


def test_nesterov_momentum_is_that_of_torch():
    compare(SGD, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    assert settings_of(optimizer="nesterov").lr == 0.01


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_defaults_that_are_not_given_are_those_of_torch(name):
    default = getattr(torch.optim, name)([torch.zeros(1, requires_grad=True)]).defaults
    settings = settings_of(optimizer=name.lower())
    assert (settings.lr, settings.weight_decay) == (default["lr"], default["weight_decay"])


def test_a_cosine_schedule_by_hand():
    assert cosine_rates(2.0, 4) == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    assert cosine_rates(2.0, 1) == [2.0]  # a stage of one update


def test_the_learning_rate_of_all_optimizers_can_change():
    for name in ("adadelta", "sgd", "nesterov", "adam", "adamw"):
        flat = torch.ones(3)
        optimizer = new_optimizer(flat, settings_of(optimizer=name))
        optimizer.lr = 0.0
        optimizer.step(torch.ones(3))
        assert flat.tolist() == [1, 1, 1], name

"""Stacks of any torch modules: trained as torch trains them, stored and read back, and what is refused."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError, StageError
from tests.vision.networks.following import Noise
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.networks import GatedModuleStack, ModuleStack, Structure, register_backbone
from vision.networks.architectures import find_architecture, untrained_module
from vision.optimizers import SGD
from vision.seeds import generator
from vision.training import JointLoss, OwnLoss

CPU = torch.device("cpu")
SHAPE = (2, 9, 7)
"""Images that are neither square nor grey nor of three colours."""


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@register_backbone("tests: many kinds of layers")
def many_kinds(image_shape, num_classes, width):
    """A network with layers, parameters and buffers of many kinds."""
    network = nn.Sequential(
        nn.Conv2d(image_shape[0], width, 3),
        nn.BatchNorm2d(width, momentum=None),  # a cumulative mean, which depends on the number of batches
        nn.GELU(),
        nn.Conv2d(width, width, 3, groups=width),
        nn.GroupNorm(2, width),
        nn.Flatten(),
        nn.LazyLinear(width),
        nn.LayerNorm(width),
        nn.Linear(width, num_classes),
    )
    network[8].bias.requires_grad_(False)
    return network


@register_backbone("tests: blocks")
def blocks(image_shape, num_classes, width):
    def conv(num_in):
        return nn.Sequential(nn.Conv2d(num_in, width, 3, padding=1), nn.Tanh())

    flat = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5), nn.Tanh())
    return nn.Sequential(conv(image_shape[0]), conv(width), flat, nn.Linear(5, 5), nn.Linear(5, num_classes))


def generators(count):
    return [generator(number, "initialisation") for number in range(count)]


def structure(name="tests: many kinds of layers", shape=SHAPE):
    return Structure(name, shape, 4, 6)


def stack_of(name="tests: many kinds of layers", count=2, shape=SHAPE):
    return ModuleStack.initialised(structure(name, shape), generators(count), CPU)


def images(num_groups, num_examples, seed=0, shape=SHAPE):
    """Return images for stacks, [G, b, height, width, C], and classes, [G, b]."""
    drawn_by = torch.Generator().manual_seed(seed)
    x = torch.randn(num_groups, num_examples, *shape[1:], shape[0], generator=drawn_by)
    return x, torch.randint(4, (num_groups, num_examples), generator=drawn_by)


def followed(stack, num_updates=50, **recipe):
    """Train the networks of a stack, and copies of them as torch trains them, and compare them after each update."""
    modules = [stack.to_module(number).train() for number in range(len(stack))]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], **recipe) for m in modules]
    loss, optimizer = OwnLoss(len(stack), 1), SGD(stack.parameters.flat, **recipe)
    for update in range(num_updates):
        x, y = images(len(stack), 8, seed=update, shape=stack.structure.image_shape)
        logits = stack.logits(x, training=True)
        stack.backward(loss.gradient(logits, F.one_hot(y, 4).to(logits.dtype)))
        optimizer.step(stack.gradient.flat)
        for number, (module, of_torch) in enumerate(zip(modules, optimizers, strict=True)):
            of_torch.zero_grad()
            F.cross_entropy(
                module(x[number].permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)), y[number]
            ).backward()
            of_torch.step()
    for number, module in enumerate(modules):
        ours = stack.to_module(number).state_dict()
        for name, theirs in module.state_dict().items():
            torch.testing.assert_close(ours[name], theirs, rtol=0, atol=1e-10)
    return modules


@pytest.mark.parametrize(
    ("name", "shape"), [("tests: many kinds of layers", SHAPE), ("resnet20", (3, 16, 12)), ("vgg", (1, 40, 32))]
)
def test_50_updates_are_those_of_torch(name, shape, double):
    stack = stack_of(name, shape=shape)
    began = stack.parameters.flat.clone()
    modules = followed(stack, 50 if name.startswith("tests") else 5, lr=0.01, momentum=0.9, weight_decay=1e-3)
    assert (stack.parameters.flat - began).abs().max() > 0.01
    x, _ = images(1, 5, seed=99, shape=shape)
    for logits, module in zip(stack.logits(x), modules, strict=True):
        expected = module.eval()(x[0].permute(0, 3, 1, 2)).detach()
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_frozen_parameters_are_counted_and_not_trained(double):
    stack = stack_of()
    frozen = stack.to_module(1).state_dict()["8.bias"]
    followed(stack, 3, lr=0.1, momentum=0.0, weight_decay=0.5)
    assert torch.equal(stack.to_module(1).state_dict()["8.bias"], frozen)
    assert stack.num_params == sum(p.numel() for p in stack.to_module(0).parameters())
    assert stack.parameters.size == stack.num_params - 4


def test_a_network_does_not_depend_on_its_neighbours_nor_on_torchs_random_state():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    together = stack_of()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    alone = ModuleStack.initialised(structure(), [generator(1, "initialisation")], CPU)
    for name in alone.parameters.shapes:
        assert torch.equal(alone.parameters[name][0], together.parameters[name][1])
    assert not torch.equal(together.parameters["0.weight"][0], together.parameters["0.weight"][1])
    x, y = images(2, 8)
    together.backward(OwnLoss(2, 1).gradient(together.logits(x, training=True), F.one_hot(y, 4).float()))
    together.reset_parameters(generators(2))
    again = stack_of()
    assert all(torch.equal(a.flat, b.flat) for a, b in zip(together.tensors, again.tensors, strict=True))


@pytest.mark.parametrize("kind", ["network", "mixture"])
def test_a_checkpoint_restores_parameters_and_buffers(kind, tmp_path):
    stack = stack_of() if kind == "network" else mixture()
    x, y = images(2, 8)
    stack.backward(OwnLoss(2, 1).gradient(stack.logits(x, training=True), F.one_hot(y, 4).float()))
    if kind == "mixture":
        stack = stack.split([[0, 1]] * 3, generators(2))
    write_checkpoint(stack, tmp_path / "networks.pt")
    again = read_checkpoint(tmp_path / "networks.pt", CPU)
    assert torch.equal(again.logits(x), stack.logits(x))
    assert all(torch.equal(a.flat, b.flat) for a, b in zip(again.tensors, stack.tensors, strict=True))


def test_a_checkpoint_of_a_network_whose_code_has_changed_is_refused(tmp_path, monkeypatch):
    write_checkpoint(stack_of(), tmp_path / "networks.pt")
    register_backbone("tests: many kinds of layers")(lambda num_classes: nn.Sequential(
        nn.Flatten(), nn.Linear(2 * 9 * 7, num_classes)))  # fmt: skip
    try:
        with pytest.raises(StageError, match="the code of the network has changed"):
            read_checkpoint(tmp_path / "networks.pt", CPU)
    finally:
        register_backbone("tests: many kinds of layers")(many_kinds)


def test_full_memory_is_not_a_damaged_file(tmp_path, monkeypatch):
    def fill_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    stack = ModuleStack.initialised(Structure("tests: blocks", SHAPE, 4, 6), generators(1), CPU)
    write_checkpoint(stack, tmp_path / "networks.pt")
    monkeypatch.setattr(ModuleStack, "from_state", fill_memory)
    with pytest.raises(torch.OutOfMemoryError):
        read_checkpoint(tmp_path / "networks.pt", CPU)


# ---- Mixtures.


def mixture(num_experts=2, hard=False, count=2):
    return GatedModuleStack.of_experts(structure("tests: blocks"), num_experts, hard, generators(count), CPU)


@pytest.mark.parametrize("hard", [False, True])
def test_mixtures_of_own_blocks_have_the_gradients_of_their_module(hard):
    """Images, then vectors: three blocks between the first and the last are mixtures."""
    stack, noise = mixture(hard=hard).split([[0, 1]] * 3, generators(2)), Noise(2)
    stack.set_gate_noise(noise)
    x, _ = images(2, 6)
    d_logits = torch.randn(2, 6, 4)
    modules = [stack.to_module(number).train() for number in range(2)]
    logits = stack.logits(x, training=True)
    stack.backward(d_logits)
    assert [len(weights[0, 0]) for weights in stack.expert_weights] == [3, 3, 3]
    for number, module in enumerate(modules):
        more = {"uniforms": [uniform[number] for uniform in noise.given]} if hard else {}
        expected = module(x[number].permute(0, 3, 1, 2), **more)
        torch.testing.assert_close(logits[number], expected.detach())
        expected.backward(d_logits[number])
        for name, p in module.named_parameters():
            ours = stack.gradient[name][number]
            ours = ours.permute(0, 3, 1, 2) if ours.dim() == 4 else ours
            torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-6)


def test_a_split_of_own_blocks_keeps_the_logits():
    stack = mixture(num_experts=1)
    x, _ = images(1, 20)
    split = stack.split([[0, 0]] * 3, generators(2))
    torch.testing.assert_close(split.logits(x), stack.logits(x), rtol=0, atol=1e-6)
    assert (split.num_experts, stack.num_experts) == (2, 1)
    assert split.num_params > stack.num_params


def test_a_mixture_needs_blocks():
    with pytest.raises(SettingError, match=r"backbone=tests: two blocks is a Sequential of 2.*learner=ens"):
        register_backbone("tests: two blocks")(
            lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(126, num_classes))
        )
        GatedModuleStack.of_experts(structure("tests: two blocks"), 2, False, generators(1), CPU)


# ---- What is refused.


class Fixed(nn.Module):
    """A module that returns the same logits for all images."""

    def __init__(self, logits=None, parameter=None):
        super().__init__()
        self.logits, self.parameter = logits, parameter

    def forward(self, x):
        return self.logits


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: "text", "returned a str, but must return a torch.nn.Module"),
        (lambda: Fixed(torch.zeros(2, 4)), "has no parameters that can be trained"),
        (lambda: Fixed(torch.zeros(2, 5), nn.Parameter(torch.zeros(1))), r"returned \(2, 5\) for a batch of 2 images"),
        (lambda: Fixed(None, nn.Parameter(torch.zeros(1))), r"must return logits of the shape \(2, 4\)"),
        (lambda: nn.Conv2d(3, 4, 3), r"cannot compute images of the shape .* = \(2, 9, 7\): RuntimeError"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(module, message):
    register_backbone("tests: wrong")(module)
    with pytest.raises(SettingError, match=message):
        untrained_module(structure("tests: wrong"), generator(0))


def test_a_network_that_replaces_one_of_the_same_name_is_checked_and_counted_anew():
    """As in a notebook, where a cell is edited and run again."""
    for units in (5, 3):
        register_backbone("tests: replaced")(
            lambda num_classes, units=units: nn.Sequential(
                nn.Flatten(), nn.LazyLinear(units), nn.Linear(units, num_classes)
            )
        )
        assert stack_of("tests: replaced").flops.forward == 2 * (126 * units + units * 4)
    register_backbone("tests: replaced")(lambda: Fixed(torch.zeros(2, 4)))
    with pytest.raises(SettingError, match="has no parameters that can be trained"):
        untrained_module(structure("tests: replaced"), generator(0))


def test_small_images_are_refused_by_the_vgg():
    with pytest.raises(SettingError, match=r"at least 32 x 32 pixels.* these have 28 x 28"):
        untrained_module(structure("vgg", (1, 28, 28)), generator(0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vgg19", "'vgg19' is not one of mlp, .*resnet20"),
        ("no_such_module:net", "No module named 'no_such_module'"),
        ("torch.nn:NoSuchNet", "the module torch.nn has no function NoSuchNet"),
        ("sys:version", "the module sys has no function version"),
    ],
)
def test_an_unknown_architecture_is_refused(name, message):
    with pytest.raises(SettingError, match=message):
        find_architecture(name)


def test_a_function_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\ndef net(num_classes): return nn.LazyLinear(num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_architecture("my_net:net").function.__name__ == "net"


def test_a_network_of_torchvision():
    pytest.importorskip("torchvision")
    stack = stack_of("torchvision.models:resnet18", 1, (3, 32, 32))
    assert stack.num_params == 11_178_564  # with four classes instead of 1000
    assert stack.logits(torch.zeros(1, 2, 32, 32, 3)).shape == (1, 2, 4)
    with pytest.raises(SettingError, match="cannot compute images of the shape"):
        stack_of("torchvision.models:resnet18", 1, (1, 28, 28))  # grey images


@pytest.mark.parametrize("loss", [OwnLoss(1, 4), JointLoss(2, 2, mean=True)], ids=["own", "joint"])
@pytest.mark.parametrize("kind", ["network", "hard mixture"])
def test_units_one_after_another_have_the_gradients_of_all_at_once(kind, loss):
    """Two seeds with two networks that are one model each, or four networks of one seed."""
    stack = stack_of(count=4) if kind == "network" else mixture(hard=True, count=4)
    noise = Noise(4)
    if kind == "hard mixture":
        stack.set_gate_noise(noise)
    x, y = images(loss.num_orders, 6)
    one_hot = F.one_hot(y, 4).float()
    torch.manual_seed(0)  # for modules that draw random numbers
    stack.backward(loss.gradient(stack.logits(x, training=True), one_hot))
    expected = stack.gradient.flat.clone()
    stack.gradient.flat.zero_()
    if kind == "hard mixture":
        given = iter(noise.given)
        stack.set_gate_noise(lambda shape: next(given))
    torch.manual_seed(0)
    stack.compute_gradient(x, one_hot, loss.gradient, loss.networks_per_unit)
    torch.testing.assert_close(stack.gradient.flat, expected, rtol=1e-6, atol=1e-8)
    assert expected.abs().max() > 1e-3


# ---- Modules that users write


class Counting(nn.Module):
    """A network with buffers of many kinds, some of which it replaces by new tensors."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(24, num_classes)
        self.register_buffer("order", torch.randperm(24))
        self.register_buffer("mask", torch.rand(24) > 0.3)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("center", torch.zeros(24))

    def forward(self, x):
        x = (x.flatten(1) * self.mask)[:, self.order]
        if self.training:
            self.steps = self.steps + 1
            self.center = 0.5 * self.center + 0.5 * x.detach().mean(0)
        return self.head(x - self.center)


@register_backbone("tests: counting")
def counting(num_classes):
    return Counting(num_classes)


def trained(stack, num_updates=3):
    """Train a stack for a few updates, and return it."""
    loss, optimizer = OwnLoss(len(stack), 1), SGD(stack.parameters.flat, lr=0.1, momentum=0.0, weight_decay=0.0)
    for update in range(num_updates):
        x, y = images(len(stack), 8, seed=update, shape=stack.structure.image_shape)
        stack.compute_gradient(x, F.one_hot(y, 4).float(), loss.gradient, 1)
        optimizer.step(stack.gradient.flat)
    return stack


def test_buffers_of_any_kind_are_stored(tmp_path):
    stack = trained(stack_of("tests: counting", shape=(1, 4, 6)))
    x, _ = images(1, 20, seed=50, shape=(1, 4, 6))
    expected = stack.logits(x)
    write_checkpoint(stack, tmp_path / "networks.pt")
    again = read_checkpoint(tmp_path / "networks.pt", CPU)
    assert torch.equal(again.logits(x), expected)
    assert [int(again.to_module(number).steps) for number in (0, 1)] == [3, 3]
    for number, module in enumerate((again.to_module(0), again.to_module(1))):
        assert torch.equal(module.eval()(x[0].permute(0, 3, 1, 2)), expected[number])
    # A buffer that was replaced is among the statistics, so the best epoch restores it.
    kept = [one.copy() for one in stack.tensors]
    trained(stack)
    for mine, old in zip(stack.tensors, kept, strict=True):
        mine.flat.copy_(old.flat)
    torch.testing.assert_close(stack.logits(x), expected)


@register_backbone("tests: frozen norm")
class FrozenNorm(nn.Module):
    """A network with a norm whose statistics are frozen, as when a network is fine-tuned, and one that is trained."""

    def __init__(self, image_shape, num_classes, width):
        super().__init__()
        self.norm, self.other = nn.BatchNorm2d(image_shape[0]), nn.BatchNorm2d(image_shape[0])
        self.norm.running_var.fill_(0.25)
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.head(self.other(self.norm(x)))


def test_statistics_that_are_frozen_are_not_measured_again():
    stack = trained(stack_of("tests: frozen norm"))
    x, _ = images(2, 20, seed=50)
    stack.logits(x)  # in evaluation mode
    assert stack.recompute_statistics([x]) == 20
    for number in (0, 1):
        module = stack.to_module(number)
        assert torch.equal(module.norm.running_var, torch.full((2,), 0.25))
        torch.testing.assert_close(module.other.running_mean, 2 * x[number].flatten(0, 2).mean(0), atol=1e-4, rtol=0)


def test_new_parameters_come_with_new_buffers():
    stack, new = trained(stack_of("tests: counting", shape=(1, 4, 6))), stack_of("tests: counting", shape=(1, 4, 6))
    stack.reset_parameters(generators(2))
    x, _ = images(1, 5, shape=(1, 4, 6))
    assert torch.equal(stack.logits(x), new.logits(x))


class Lenet(nn.Module):
    """A network whose code works for contiguous tensors only."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.conv, self.head = nn.Conv2d(image_shape[0], 5, 3, padding=1), nn.Linear(5 * 16 * 12, num_classes)

    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.view(x.size(0), -1))


register_backbone("tests: lenet")(Lenet)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_network_that_views_the_output_of_a_convolution(double, num_channels):
    stack = stack_of("tests: lenet", shape=(num_channels, 16, 12))
    followed(stack, 5, lr=0.01, momentum=0.9, weight_decay=1e-3)


class Viewing(nn.Module):
    """A block whose code works for contiguous tensors only."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x).view(len(x), -1).relu().view(x.shape)


@register_backbone("tests: viewing blocks")
def viewing_blocks(image_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 4, 3, padding=1), Viewing(), nn.Sequential(nn.Flatten(), nn.Linear(768, num_classes))
    )


@pytest.mark.parametrize("num_channels", [1, 3])
def test_mixtures_of_blocks_that_view_the_output_of_a_convolution(num_channels, tmp_path):
    of_blocks = structure("tests: viewing blocks", (num_channels, 16, 12))
    stack = GatedModuleStack.of_experts(of_blocks, 1, False, generators(2), CPU)
    x, y = images(2, 6, shape=(num_channels, 16, 12))
    grown = stack.split([[0, 0]], generators(2))
    torch.testing.assert_close(grown.logits(x), stack.logits(x))
    grown.compute_gradient(x, F.one_hot(y, 4).float(), OwnLoss(2, 1).gradient, 1)
    write_checkpoint(grown, tmp_path / "networks.pt")
    assert torch.equal(read_checkpoint(tmp_path / "networks.pt", CPU).logits(x), grown.logits(x))


class Auxiliary(nn.Module):
    """A network that returns a second head in training mode."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(24, num_classes)

    def forward(self, x):
        y = self.head(x.flatten(1))
        return (y, y) if self.training else y


@register_backbone("tests: auxiliary")
def auxiliary(num_classes):
    return Auxiliary(num_classes)


def test_a_network_that_returns_a_tuple_in_training_is_refused():
    with pytest.raises(SettingError, match=r"returned tuple for a batch of 2 images .* in training mode"):
        stack_of("tests: auxiliary", shape=(1, 4, 6))


@register_backbone("tests: own layers")
def own_layers(image_shape, num_classes, layers=(7,)):
    return nn.Sequential(nn.Flatten(), nn.Linear(24, layers[0]), nn.Linear(layers[0], num_classes))


def test_an_argument_called_layers_belongs_to_the_user():
    assert stack_of("tests: own layers", shape=(1, 4, 6)).parameters["1.weight"].shape == (2, 7, 24)


@register_backbone("tests: blocks without parameters")
def blocks_without_parameters(image_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2),
        nn.Flatten(2), nn.Linear(48, 5), nn.Flatten(), nn.Linear(20, num_classes),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_leave_blocks_without_parameters_as_they_are(dtype):
    """The fourth mixture reads vectors of several channels, [b, 4, 48]."""
    shape = (3, 16, 12)
    of_blocks = structure("tests: blocks without parameters", shape)
    stack = GatedModuleStack.of_experts(of_blocks, 1, False, generators(2), CPU)
    stack.set_compute_dtype(dtype)
    assert len(stack.gates) == 2  # the second convolution and the linear layer between two blocks
    x, y = images(2, 6, shape=shape)
    logits = stack.logits(x)
    assert [weights.dtype for weights in stack.expert_weights] == [torch.float32] * 2
    grown = stack.split([[0, 0]] * 2, generators(2))
    grown.set_compute_dtype(dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(grown.logits(x), logits, rtol=0, atol=tolerance)
    grown.compute_gradient(x, F.one_hot(y, 4).float(), OwnLoss(2, 1).gradient, 1)
    assert bool(grown.gradient.flat.isfinite().all()) and float(grown.gradient.flat.abs().max()) > 0

"""CUDA graphs and side-by-side streams: what is refused on every machine, and, on a GPU, equality with plain steps."""

import pytest
import torch
from torch import nn

from fairseq_alma.core.errors import SettingError
from vision.cuda_graphs import MIN_UPDATES, RECORDABLE, GraphedGradient, are_used
from vision.networks import GatedModuleStack, MLPStack, ModuleStack, Structure, register_backbone
from vision.networks.module_stack import SideStreams
from vision.optimizers import SGD
from vision.runs import _process_settings
from vision.seeds import generator
from vision.training import OwnLoss

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"),
]


@register_backbone("tests: dropout")
def with_dropout(image_shape, num_classes, width):
    first = nn.Sequential(nn.Conv2d(image_shape[0], width, 3), nn.BatchNorm2d(width), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.1))
    return nn.Sequential(first, second, nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes)))


@register_backbone("tests: no random numbers")
def no_random_numbers(image_shape, num_classes, width):
    first = nn.Sequential(nn.Conv2d(image_shape[0], width, 3), nn.BatchNorm2d(width), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width))
    return nn.Sequential(first, second, nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes)))


class ReplacesBuffer(nn.Module):
    """Counts its calls in a new tensor each time, instead of changing the tensor in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


@register_backbone("tests: replaces a buffer")
def replaces_buffer(image_shape, num_classes, width):
    return nn.Sequential(ReplacesBuffer(), nn.Flatten(), nn.LazyLinear(num_classes))


@register_backbone("tests: reads the GPU")
def reads_the_gpu(image_shape, num_classes, width):
    # Without momentum, the running mean is cumulative, for which torch reads the number of batches.
    return nn.Sequential(nn.BatchNorm2d(image_shape[0], momentum=None), nn.Flatten(), nn.LazyLinear(num_classes))


def stack_of(name: str, count: int, device: str) -> ModuleStack:
    generators = [generator(number, "initialisation") for number in range(count)]
    return ModuleStack.initialised(Structure(name, (3, 8, 8), 4, 6), generators, torch.device(device))


def batch(count: int, examples: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(examples)
    x = torch.randn(count, examples, 8, 8, 3, generator=drawn)
    classes = torch.randint(4, (count, examples), generator=drawn)
    return x.to(device), nn.functional.one_hot(classes, 4).float().to(device)


def test_streams_change_nothing_on_a_cpu():
    streams, done = SideStreams(torch.device("cpu"), 5), []
    with streams.forked():
        for number in range(5):
            with streams.of_part(number):
                done.append(number)
    assert done == [0, 1, 2, 3, 4]


def test_hard_gates_cannot_be_recorded():
    generators = [generator(0, "initialisation")]
    structure = Structure("tests: dropout", (3, 8, 8), 4, 6)
    hard, soft = (
        GatedModuleStack.of_experts(structure, 2, is_hard, generators, torch.device("cpu")) for is_hard in (True, False)
    )
    GraphedGradient(soft)
    with pytest.raises(SettingError, match="cuda_graphs=true cannot be used with hard gates"):
        GraphedGradient(hard)


def test_auto_records_known_networks_in_long_stages_on_a_gpu():
    generators = [generator(0, "initialisation")]
    structures = {name: Structure(name, (3, 32, 32), 4, 2) for name in ("vgg", "resnet20", "tests: dropout")}
    stacks = {name: ModuleStack.initialised(one, generators, torch.device("cpu")) for name, one in structures.items()}
    for is_hard in (True, False):
        mixture = GatedModuleStack.of_experts(structures["vgg"], 2, is_hard, generators, torch.device("cpu"))
        stacks["hard" if is_hard else "soft"] = mixture
    mlp = MLPStack.initialised([4, 3, 2], generators, torch.device("cpu"))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    used = [name for name, stack in stacks.items() if are_used("auto", stack, MIN_UPDATES, gpu)]
    assert used == ["vgg", "resnet20", "soft"]
    assert not are_used("auto", mlp, MIN_UPDATES, gpu)
    assert not are_used("auto", stacks["vgg"], MIN_UPDATES - 1, gpu)
    assert not are_used("auto", stacks["vgg"], MIN_UPDATES, cpu)
    assert not are_used(False, stacks["vgg"], MIN_UPDATES, gpu)
    assert are_used(True, stacks["tests: dropout"], 1, gpu)


def test_a_replaced_buffer_is_found():
    stack = stack_of("tests: replaces a buffer", 2, "cpu")
    assert not stack.has_replaced_buffers
    before = stack.tensors[1].flat.clone()
    stack.compute_gradient(*batch(2, 5, "cpu"), OwnLoss(1, 2).gradient, 1)
    assert stack.has_replaced_buffers
    assert torch.equal(stack.tensors[1].flat, before + 1)
    assert not stack.has_replaced_buffers  # `tensors` has copied the values


class TestOnAGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize(
        ("name", "count"),
        # With dropout in several networks, the numbers differ, because each stream draws others.
        [("tests: no random numbers", 1), ("tests: no random numbers", 6), ("tests: dropout", 1)],
    )
    def test_graphs_train_as_plain_steps(self, name, count):
        """20 updates with batches of two sizes: same weights and running statistics."""
        flat = []
        for is_graphed in (False, True):
            torch.manual_seed(1)
            stack = stack_of(name, count, "cuda")
            optimizer, loss = SGD(stack.parameters.flat, 0.05, 0.9), OwnLoss(1, count)
            compute = GraphedGradient(stack) if is_graphed else stack.compute_gradient
            with _process_settings(tf32=False):
                for number in range(20):
                    compute(*batch(count, 16 if number % 4 else 7, "cuda"), loss.gradient, 1)
                    optimizer.step(stack.gradient.flat)
            flat.append([tensors.flat.cpu() for tensors in stack.tensors])
        for plain, graphed in zip(*flat, strict=True):
            assert torch.allclose(plain, graphed, atol=1e-4)

    @pytest.mark.parametrize("name", ["tests: no random numbers", *RECORDABLE])
    @pytest.mark.parametrize("is_mixture", [False, True])
    def test_a_graph_computes_the_gradients_of_plain_steps(self, name, is_mixture):
        """With batches of three sizes, also in a mixture with soft gates."""
        size = 32 if name in RECORDABLE else 8
        found = []
        for is_graphed in (False, True):
            structure, generators = Structure(name, (3, size, size), 4, 6), [generator(0, "initialisation")]
            if is_mixture:
                stack = GatedModuleStack.of_experts(structure, 2, False, generators, torch.device("cuda"))
            else:
                stack = ModuleStack.initialised(structure, generators, torch.device("cuda"))
            loss, drawn = OwnLoss(1, 1), torch.Generator().manual_seed(0)
            compute = GraphedGradient(stack) if is_graphed else stack.compute_gradient
            with _process_settings(tf32=False):
                for number in range(3):
                    x = torch.randn(1, 16 + number, size, size, 3, generator=drawn).cuda()
                    compute(x, batch(1, 16 + number, "cuda")[1], loss.gradient, 1)
            found.append([tensors.flat.cpu() for tensors in (stack.gradient, *stack.tensors)])
        for plain, graphed in zip(*found, strict=True):
            assert (plain - graphed).abs().max() <= 1e-4 * plain.abs().max()

    def test_streams_compute_the_gradients_of_a_cpu(self):
        gradients = []
        for device in ("cpu", "cuda"):
            generators = [generator(number, "initialisation") for number in range(6)]
            stack = ModuleStack.initialised(Structure("vgg", (3, 32, 32), 4, 5), generators, torch.device(device))
            x = torch.randn(6, 8, 32, 32, 3, generator=torch.Generator().manual_seed(0)).to(device)
            with _process_settings(tf32=False):
                stack.compute_gradient(x, batch(6, 8, device)[1], OwnLoss(1, 6).gradient, 1)
            gradients.append(stack.gradient.state())
        for name, on_cpu in gradients[0].items():
            assert (gradients[1][name] - on_cpu).abs().max() <= 1e-3 * on_cpu.abs().max(), name

    @pytest.mark.parametrize("name", ["tests: replaces a buffer", "tests: reads the GPU"])
    def test_what_cannot_be_recorded_is_refused(self, name):
        stack = stack_of(name, 1, "cuda")
        with pytest.raises(SettingError, match="cannot be recorded as a CUDA graph"):
            GraphedGradient(stack)(*batch(1, 5, "cuda"), OwnLoss(1, 1).gradient, 1)

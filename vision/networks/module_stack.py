"""Stacks of any torch modules. Their gradients are computed by torch's autograd.

The modules are computed one after another. On a CPU this is as fast as computing them as one network, because each of
them is large enough (`benchmarks/vision_cifar.md` compares it with torch.func's vmap). Their parameters are views of
one flat tensor. So an optimizer updates all networks in a few operations, and the best epoch is kept with one copy.

Shapes: M networks in G groups, b examples, s x s pixels of an image, C channels or classes. The M / G networks of a
group read the same examples.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property, lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.architectures import CHANNELS_LAST, Structure, num_stored, once_per_structure, untrained_module
from vision.networks.parameters import Parameters
from vision.networks.stack import LossGradient, Stack
from vision.networks.vgg import ConvBlock

NUM_STREAMS = 4
"""Number of networks that a GPU computes at the same time. Their activations are in memory at the same time."""


class SideStreams:
    """Lets a GPU compute independent parts of a step at the same time. On a CPU, it changes nothing.

    Args:
        num_parts: number of parts. A single part is computed in the current stream.
    """

    def __init__(self, device: torch.device, num_parts: int):
        is_used = device.type == "cuda" and num_parts > 1
        self._streams = _streams(device)[:num_parts] if is_used else []

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Let the streams wait for the operations before this context; let later operations wait for the streams."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        yield
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def of_part(self, number: int) -> AbstractContextManager[object]:
        """Return a context in which the operations of one part are started, inside of `forked`."""
        return torch.cuda.stream(self._streams[number % len(self._streams)]) if self._streams else nullcontext()


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the same streams in each call, because each new stream would reserve memory of its own."""
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]


PIXELS_AT_ONCE = 40_000 * 1024
"""Largest number of pixels times channels in one forward pass of `logits_of_many`. It limits the memory of the pass."""
ALIGNMENT = {"cuda": 64}
"""Type of device -> the number of values at a multiple of which each parameter begins; 1 on other devices.

Kernels of a GPU read several values at once. With a parameter at another place, as in a network whose number of
channels is odd, some of them end with "misaligned address"."""
_FLOPS: dict[str, Flops] = {}


class ModuleStack(Stack):
    """M networks of one structure. Each is a torch module that maps images [b, C, s, s] to logits [b, classes].

    A parameter that the module's author froze (`requires_grad=False`) is stored in `statistics`, so no optimizer
    changes it. A running mean of a batch normalisation is stored there, too. Buffers of integers or truth values stay
    in the modules: checkpoints contain their last values, and not those of the best epoch.

    Args:
        modules: the networks. The stack takes them over: it replaces their tensors by views of its own tensors.
    """

    kind = "module"
    """Name of this class in checkpoints."""

    def __init__(self, modules: Sequence[nn.Module], structure: Structure, device: torch.device):
        self.structure = structure
        self._networks = [module.to(device) for module in modules]
        first = self._networks[0]
        self._is_channels_last = getattr(first, CHANNELS_LAST, True)
        trained = {name: self._stored_shape(value) for name, value in _trained(first)}
        others = {name: self._stored_shape(value) for name, value in _others(first)}
        rest = (len(self._networks), device, torch.get_default_dtype(), ALIGNMENT.get(device.type, 1))
        self.parameters = Parameters(trained, *rest)
        self.statistics = Parameters(others, *rest) if others else None
        self.gradient = self.parameters.zeros_like()
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        """Each buffer that is stored in `statistics`: the network, the name of the buffer, and the view."""
        for number, module in enumerate(self._networks):
            self._take_over(module, number)
        self._leaves = [value for module in self._networks for _, value in _trained(module)]
        names = self.parameters.shapes
        self._gradients = [self._module_view(self.gradient[name][n]) for n in range(len(self)) for name in names]
        channels, height, width = structure.image_shape
        self.examples_at_once = max(16, min(2000, PIXELS_AT_ONCE // (height * width * max(structure.width, channels))))
        self._compute_dtype = torch.float32
        self._is_training: bool | None = None
        self._outputs: list[Tensor] = []
        """The logits of each network in the last forward pass in training mode, with their graph."""

    @classmethod
    def initialised(cls, structure: Structure, generators: Sequence[torch.Generator], device: torch.device) -> Self:
        """Return untrained networks, one for each random generator."""
        modules = [cls._untrained(structure, number, one) for number, one in enumerate(generators)]
        return cls(modules, structure, device)

    @staticmethod
    def _untrained(structure: Structure, number: int, generator: torch.Generator) -> nn.Module:
        """Return the untrained network with the index `number`."""
        return untrained_module(structure, generator)

    def module(self, network: int) -> nn.Module:
        """Return one network. Its parameters are views of the parameters of the stack."""
        return self._networks[network]

    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        new = type(self).initialised(self.structure, generators, self.parameters.device)
        for mine, theirs in zip(self.tensors, new.tensors, strict=True):
            mine.flat.copy_(theirs.flat)
        for module, other in zip(self._networks, new._networks, strict=True):
            for name, value in _fixed(other):
                _set_buffer(module, name, value)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        self._compute_dtype = dtype

    @property
    def num_params(self) -> int:
        """Number of parameters of one network, including those that are not trained."""
        return sum(value.numel() for value in self._networks[0].parameters())

    @cached_property
    def flops(self) -> Flops:
        return once_per_structure(_FLOPS, self.structure, self._count_flops, self.parameters.device.type)

    def _count_flops(self) -> Flops:
        return count_flops(self.to_module(0), self.module_input_shape)

    @property
    def module_input_shape(self) -> tuple[int, ...]:
        return self.structure.image_shape

    def recompute_statistics(self, batches: Iterable[Tensor]) -> int:
        parts = (part for module in self._networks for part in module.train().modules())
        # Normalisations that stay in evaluation mode are frozen, and keep their statistics.
        norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training]
        self._is_training = None  # an evaluation must change the mode, also if there is nothing to compute
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a mean over all batches, see torch.nn.BatchNorm2d
        num_examples = 0
        for x in batches if norms else ():
            self._begin_pass(x.shape[1], training=True)
            self._outputs_of(range(len(self)), x, training=True, with_graph=False)  # changes the running statistics
            num_examples += x.shape[1]
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        return num_examples

    def _begin_pass(self, num_examples: int, training: bool) -> None:
        """Called before a forward pass of all networks. Subclasses draw random numbers here."""

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        self._begin_pass(x.shape[1], training)
        outputs = self._outputs_of(range(len(self)), x, training)
        if training:
            self._outputs = outputs
        return self._logits_in(outputs)

    def backward(self, d_logits_MbC: Tensor) -> None:
        outputs, self._outputs = self._outputs, []
        self._write_gradients(range(len(self)), outputs, d_logits_MbC)

    def compute_gradient(self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int) -> None:
        self._begin_pass(x.shape[1], training=True)
        # Compute one unit after another. So the activations of one unit only are in memory at any time.
        # (On a GPU, of the units in side-by-side streams.)
        streams = SideStreams(self.parameters.device, len(one_hot_UbC))
        with streams.forked():
            for number, one_hot_bC in enumerate(one_hot_UbC):
                networks = range(number * unit, (number + 1) * unit)
                with streams.of_part(number):
                    outputs = self._outputs_of(networks, x, training=True)
                    self._write_gradients(networks, outputs, loss(self._logits_in(outputs), one_hot_bC[None]))

    @property
    def has_replaced_buffers(self) -> bool:
        """Whether a network has put a new tensor in the place of one of the stack's tensors."""
        return any(module.get_buffer(name) is not view for module, name, view in self._buffers)

    def _outputs_of(self, networks: range, x: Tensor, training: bool, with_graph: bool = True) -> list[Tensor]:
        """Return the logits of some networks, each [b, classes]; in training mode with their graph. See `logits`."""
        if training is not self._is_training:
            self._is_training = training
            for module in self._networks:
                module.train(training)
        networks_per_group, device = len(self) // len(x), self.parameters.device.type
        # Weights change after every step, so rounded copies of them are not worth keeping. A graph must not read them.
        is_half = self._compute_dtype is not torch.float32
        dtype = self._compute_dtype if is_half else None
        autocast = torch.autocast(device, dtype, enabled=is_half, cache_enabled=False)
        with torch.set_grad_enabled(training and with_graph), autocast:
            inputs = (self._module_view(x[number // networks_per_group], is_image=True) for number in networks)
            return [self._output_of(number, of_network) for number, of_network in zip(networks, inputs, strict=True)]

    def _logits_in(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the logits of several networks as one tensor without a graph."""
        return torch.stack([output.detach() for output in outputs]).to(self.parameters.flat.dtype)

    def _output_of(self, number: int, x_bCss: Tensor) -> Tensor:
        """Return the logits of one network, [b, classes]."""
        return self._networks[number](x_bCss)

    def _write_gradients(self, networks: range, outputs: Sequence[Tensor], d_logits: Tensor) -> None:
        """Write the gradients of networks that are neighbours. `outputs` are their logits, with their graph."""
        per_network = len(self._leaves) // len(self)
        which = slice(networks.start * per_network, networks.stop * per_network)
        leaves = self._leaves[which]
        d_outputs = [d.to(output.dtype) for d, output in zip(d_logits, outputs, strict=True)]
        found = torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True)
        # A parameter that the network does not use has no gradient.
        pairs = zip(found, leaves, strict=True)
        computed = [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs]
        torch._foreach_copy_(self._gradients[which], computed)

    @property
    def tensors(self) -> list[Parameters]:
        # A module may have replaced a buffer by a new tensor, instead of changing it in place.
        for module, name, view in self._buffers:
            if (found := module.get_buffer(name)) is not view:
                view.copy_(found)
                _set_buffer(module, name, view)
        return super().tensors

    def state(self) -> dict[str, Any]:
        parameters, *statistics = (tensors.state() for tensors in self.tensors)
        return {
            "kind": self.kind,
            "structure": self.structure.to_json(),
            "parameters": parameters,
            "statistics": statistics[0] if statistics else None,
            "buffers": [{name: value.cpu().clone() for name, value in _fixed(one)} for one in self._networks],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Self:
        structure = Structure.from_json(state["structure"])
        count = num_stored(structure, state["parameters"])
        stack = cls.initialised(structure, [torch.Generator() for _ in range(count)], device)
        for tensors, kind in zip(stack.tensors, ("parameters", "statistics"), strict=False):
            if state[kind].keys() != tensors.shapes.keys():
                raise ValueError(
                    f"the file has the tensors {sorted(state[kind])}, but backbone={structure.backbone} has "
                    f"{sorted(tensors.shapes)}: the code of the network has changed"
                )
            for name, value in state[kind].items():
                tensors[name].copy_(value)
        for module, buffers in zip(stack._networks, state.get("buffers", []), strict=False):
            for name, value in buffers.items():
                _set_buffer(module, name, value.to(device))
        return stack

    def to_module(self, network: int) -> nn.Module:
        module = deepcopy(self._networks[network])
        for name, buffer in list(module.named_buffers()):
            # Copy the buffer, because deepcopy copies the complete tensor of which it is a view.
            is_count = name.endswith("num_batches_tracked")
            _set_buffer(module, name, buffer.long() if is_count else buffer.clone())
        for part in module.modules():
            if isinstance(part, ConvBlock):
                part.only_torch = True
        return module

    def _take_over(self, module: nn.Module, number: int) -> None:
        """Copy the tensors of one network to the tensors of the stack, and let the network use these."""
        with torch.no_grad():
            for tensors, named in ((self.parameters, _trained(module)), (self.statistics, _others(module))):
                for name, value in list(named):
                    assert tensors is not None
                    view = self._module_view(tensors[name][number])
                    view.copy_(value)
                    if isinstance(value, nn.Parameter):
                        value.data = view
                    else:
                        # autograd saves the running statistics and refuses a backward pass if they have changed. `view`
                        # would count as changed whenever any other view of the same tensor changes; `view.data` does
                        # not.
                        _set_buffer(module, name, view.data)
                        self._buffers.append((module, name, module.get_buffer(name)))

    def _stored_shape(self, value: Tensor) -> tuple[int, ...]:
        """Return the shape in which a tensor is stored. Weights of convolutions, [D, C, k, k], become [D, k, k, C]."""
        shape = tuple(value.shape)
        return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 and self._is_channels_last else shape

    def _module_view(self, stored: Tensor, is_image: bool = False) -> Tensor:
        """Return a stored tensor, or images with channels last, with the dimensions that the module expects."""
        if stored.dim() != 4 or not (is_image or self._is_channels_last):
            return stored
        view = stored.permute(0, 3, 1, 2)
        # `contiguous` would keep the strides of images with one channel, which are those of both layouts.
        return view if self._is_channels_last else view.clone(memory_format=torch.contiguous_format)


def _trained(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are trained, as (name, parameter)."""
    return ((name, value) for name, value in module.named_parameters() if value.requires_grad)


def _others(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the frozen parameters and the running statistics of a module, as (name, tensor)."""
    yield from ((name, value) for name, value in module.named_parameters() if not value.requires_grad)
    for name, value in module.named_buffers():
        if value.is_floating_point() or name.endswith("num_batches_tracked"):
            yield name, value


def _fixed(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that are not in `_others`, except those that a module keeps out of its state."""
    others = {name for name, _ in _others(module)}
    persistent = module.state_dict().keys() - others
    return [(name, value) for name, value in module.named_buffers() if name in persistent]


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a buffer of a module or of one of its parts."""
    owner, _, own_name = name.rpartition(".")
    module.get_submodule(owner)._buffers[own_name] = value

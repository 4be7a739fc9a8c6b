"""Network architectures by name: functions that return an untrained torch module.

An architecture is registered by `register_backbone`, or is a function of the user's that is named as
`package.module:function`, for example `torchvision.models:resnet18`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fairseq_alma.app.plugins import call_own_function, load_function
from fairseq_alma.core.errors import SettingError
from vision.seeds import seed_torch

ImageShape = tuple[int, int, int]
"""Channels, height and width of an image."""
Value = TypeVar("Value")
Draw = Callable[[nn.Module, torch.Generator], None]
"""A function that draws the initial parameters of a module."""
CHANNELS_LAST = "_alma_is_channels_last"
"""Name of the attribute of a module that is False if the module cannot compute images with channels last."""
LARGEST_IMAGE = 1 << 26
"""Largest number of values of an image. A network is tried with images of zeros when it is created."""
GROWN = "grown by Firefly"
"""Name of the architecture of networks that Firefly has grown. It takes the argument `layers`."""


@dataclass(frozen=True)
class Structure:
    """Description of a network. A file with a trained network contains it, so that the network can be built again."""

    backbone: str
    """Name of the architecture."""
    image_shape: ImageShape
    """Channels, height and width of an image."""
    num_classes: int
    """Number of classes."""
    width: int
    """The setting `width`."""
    layers: tuple[tuple[int, bool], ...] | None = None
    """For a network that Firefly has grown: number of units of each layer, and whether pooling follows the layer."""
    mixture: Mapping[str, Any] | None = None
    """For a network with mixtures of experts: "hard", whether the gates are hard, and "gates", a list with the "root"
    and the "splits" of each mixture (see `gates.expert_paths`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the structure as a dictionary of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Structure":
        """Return the structure that `to_json` returned as a dictionary.

        Raises:
            ValueError: if a size is not a positive integer, because the file is damaged or hostile.
        """
        values = {one.name: value[one.name] for one in fields(cls)}
        try:
            values["image_shape"] = tuple(values["image_shape"])
            if values["layers"] is not None:
                values["layers"] = tuple((units, bool(pooled)) for units, pooled in values["layers"])
        except (TypeError, ValueError) as error:
            found = f"image_shape={values['image_shape']!r}, layers={values['layers']!r}"
            raise ValueError(f"{found} are not the sizes of a network") from error
        structure = cls(**values)
        for name, sizes in structure._sizes.items():
            if not all(type(size) is int and size >= 1 for size in sizes):
                raise ValueError(f"{name}={value[name]!r} must be positive integers")
        if len(structure.image_shape) != 3 or prod(structure.image_shape) > LARGEST_IMAGE:
            raise ValueError(f"image_shape={value['image_shape']!r} is not that of an image")
        return structure

    @property
    def _sizes(self) -> dict[str, Sequence[int]]:
        """Name of each field with sizes -> its sizes."""
        units = [units for units, _ in self.layers or ()]
        sizes = {"image_shape": self.image_shape, "num_classes": (self.num_classes,), "width": (self.width,)}
        return {**sizes, "layers": units}


@dataclass(frozen=True)
class Architecture:
    """A function that returns untrained modules of one kind."""

    function: Callable[..., nn.Module]
    """Returns a module. Its arguments can be image_shape, num_classes and width. It gets those in its signature."""
    draw: Draw | None = None
    """Initialises the parameters. If None, the module keeps the parameters that `function` gave it."""


_ARCHITECTURES: dict[str, Architecture] = {}


def register_backbone(name: str, draw: Draw | None = None) -> Callable[[Callable[..., nn.Module]], Any]:
    """Return a decorator that makes a function available as `backbone=NAME`.

    The function returns a torch module that maps images, float [b, channels, height, width], to logits [b, classes].
    Its arguments can be `image_shape` (channels, height, width), `num_classes` and `width` (the setting). It is called
    with the arguments that are in its signature.

    Args:
        name: the value of `backbone=`.
        draw: function that initialises the parameters with a random generator. By default, the module keeps its own
            initial parameters, and torch's random state is seeded before the function is called.

    Raises:
        ValueError: if there is a built-in architecture with this name.
    """

    def register(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        before = _ARCHITECTURES[name].function if name in _ARCHITECTURES else function
        if name == "mlp" or (before is not function and before.__module__.startswith("vision.")):
            # A run of the built-in network would continue with this one.
            raise ValueError(f"there is a built-in backbone {name!r}: give your function another name")
        _ARCHITECTURES[name] = Architecture(function, draw)
        return function

    return register


def backbone_names() -> list[str]:
    """Return the names of the perceptron and of all registered architectures."""
    return ["mlp", *(name for name in _ARCHITECTURES if name != GROWN)]


def find_architecture(name: str) -> Architecture:
    """Return the architecture with this name, which is registered or has the form `package.module:function`.

    Raises:
        SettingError: if there is no such architecture.
    """
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if ":" not in name:
        raise SettingError(
            f"backbone={name!r} is not one of {', '.join(backbone_names())}. For a network of your own, give "
            f"backbone=package.module:function, or register it in a module that plugin= imports"
        )
    return Architecture(load_function("backbone", name))


def architecture_of(structure: Structure) -> Architecture:
    """Return the architecture of a structure. Networks that Firefly has grown have one of their own."""
    return find_architecture(structure.backbone if structure.layers is None else GROWN)


def is_ours(code: Callable[..., Any]) -> bool:
    """Return True if a function or class belongs to this package, and not to the user."""
    return code.__module__.partition(".")[0] == __name__.partition(".")[0]


def once_per_structure(
    known: dict[str, Value], structure: Structure, compute: Callable[[], Value], kind: str = ""
) -> Value:
    """Return a value that depends only on the structure of a network. For our architectures, it is computed only once.

    A run builds many networks of the same structure, for example one for each seed, member and expert. The values of a
    network of the user's are computed each time, because its code may change, for example in a notebook.

    Args:
        known: the values that were computed before. A new value is added.
        compute: computes the value.
        kind: what else the value depends on.
    """
    function = architecture_of(structure).function
    if not is_ours(function):
        return compute()
    key = json.dumps([kind, function.__qualname__, structure.to_json()], sort_keys=True)
    if key not in known:
        known[key] = compute()
    return known[key]


_CAN_BE_CHANNELS_LAST: dict[str, bool] = {}


def num_stored(structure: Structure, parameters: Mapping[str, Tensor]) -> int:
    """Return the number of networks in a file, before they are created.

    Args:
        structure: what the file says that the networks consist of.
        parameters: the tensors in the file, [M, ...] each.

    Raises:
        ValueError: if the networks need more values than the file has. Only our architectures are checked, because the
            code of a network of the user's may fail on torch's device "meta", which stores no values.
    """
    num_values = sum(value[0].numel() for value in parameters.values())
    function = architecture_of(structure).function
    if is_ours(function):
        for name, sizes in structure._sizes.items():
            if max(sizes, default=0) > num_values:
                raise ValueError(f"{name}={getattr(structure, name)} is larger than the networks in the file")
        with torch.device("meta"):
            module = function(**_accepted(function, structure))
        if sum(parameter.numel() for parameter in module.parameters()) > num_values:
            raise ValueError(f"width={structure.width} and the other sizes are not those of the networks in the file")
    return len(next(iter(parameters.values())))


def untrained_module(structure: Structure, generator: torch.Generator) -> nn.Module:
    """Return an untrained network, whose parameters are drawn with the generator.

    torch's own random state does not change.

    Raises:
        SettingError: if the function does not return a module that maps images to logits.
    """
    architecture = architecture_of(structure)
    with torch.random.fork_rng(devices=[]):
        if architecture.draw is None:
            seed_torch(int(torch.randint(2**63 - 1, (), generator=generator)), torch.device("cpu"))
        function = architecture.function
        module = call_own_function(f"backbone={structure.backbone}", function, **_accepted(function, structure))
        _check_in_evaluation(module, structure)
        if not once_per_structure(_CAN_BE_CHANNELS_LAST, structure, lambda: _can_be_channels_last(module, structure)):
            setattr(module, CHANNELS_LAST, False)
    if architecture.draw is not None:
        architecture.draw(module, generator)
    return module


def _accepted(function: Callable[..., nn.Module], structure: Structure) -> dict[str, Any]:
    """Return those arguments for the network of a structure that the function has."""
    given: dict[str, Any] = {name: getattr(structure, name) for name in ("image_shape", "num_classes", "width")}
    if structure.layers is not None:
        given["layers"] = structure.layers
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in given.items() if name in parameters or (takes_any and name == "num_classes")}


def _check_in_evaluation(module: Any, structure: Structure) -> None:
    """Raise SettingError if an object is not a module, or does not map images to logits.

    This also creates the parameters of lazy modules, such as LazyLinear.
    """
    if not isinstance(module, nn.Module):
        found = type(module).__name__
        raise SettingError(f"backbone={structure.backbone} returned a {found}, but must return a torch.nn.Module")
    is_training = module.training
    _check_output(module.eval(), torch.zeros(2, *structure.image_shape), structure, "")
    module.train(is_training)


def _can_be_channels_last(module: nn.Module, structure: Structure) -> bool:
    """Check a module in training mode, and return whether it can compute images with channels last.

    Raises:
        SettingError: if the module cannot compute the images in training mode, or has no parameters to train.
    """
    where, x = f"backbone={structure.backbone}", torch.zeros(2, *structure.image_shape)
    copy = call_own_function(f"{where}: copying the network", deepcopy, module)
    is_channels_last = True
    try:
        # Channels last are faster, but some modules need another layout, for example those that call Tensor.view.
        fast = deepcopy(copy).train().to(memory_format=torch.channels_last)
        _check_output(fast, x.to(memory_format=torch.channels_last), structure, " in training mode")
    except (SettingError, RuntimeError):
        _check_output(copy.train(), x, structure, " in training mode")
        is_channels_last = False
    if not any(value.requires_grad for value in module.parameters()):
        raise SettingError(f"{where} has no parameters that can be trained")
    expected = torch.get_default_dtype()
    if other := {value.dtype for value in module.parameters()} - {expected}:
        raise SettingError(f"{where} has parameters of {', '.join(map(str, other))}, but they must be {expected}")
    return is_channels_last


def _check_output(module: nn.Module, x: Tensor, structure: Structure, when: str) -> None:
    """Raise SettingError if a module does not return logits for 2 images."""
    where, shape = f"backbone={structure.backbone}", structure.image_shape
    try:
        with torch.no_grad():
            logits = module(x)
    except Exception as error:
        # Catch every error, because the code of the module may raise any.
        raise SettingError(
            f"{where} cannot compute images of the shape (channels, height, width) = {shape}{when}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    expected = (2, structure.num_classes)
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != expected:
        raise SettingError(
            f"{where} returned {found} for a batch of 2 images of shape {shape}{when}, but must return logits of the "
            f"shape {expected}, one for each of the {structure.num_classes} classes"
        )

"""Check what a checkpoint says about its model, before a model is made from it.

A checkpoint may come from somebody else. fairseq makes the classes that the configuration in a checkpoint names,
imports the folder that it names as `user_dir`, and passes some options to Python's eval(). So our commands do not give
this configuration to fairseq. They read only the options of switch_lm from it, and only values that pass these checks.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.models.switch_lm import SwitchLanguageModelConfig

LARGEST_FACTOR = 10**6
"""Largest value of an option that is not an integer. They are probabilities and capacity factors."""


def stored_model(checkpoint: Any, path: Path, options: type = SwitchLanguageModelConfig) -> Any:
    """Return the options of the model in a checkpoint, as an object of the class `options`.

    Options that the class does not have are ignored. Those that the checkpoint lacks have their default values.

    Args:
        checkpoint: the content of the file.
        path: the file, for error messages.
        options: dataclass with the options of the model.

    Raises:
        SettingError: if it is not a checkpoint of a switch_lm model, if an option has the wrong type or is out of
            range, or if a size is not that of the weights.
    """
    stored, weights = stored_entry(checkpoint, path, "cfg", "model"), stored_entry(checkpoint, path, "model")
    if "num_experts" not in stored:
        raise SettingError(
            f"{path} is not a checkpoint of a switch_lm model, because its configuration has no num_experts: give a "
            f"checkpoint of a switch_lm model. To grow from a dense model, train switch_lm with --num-experts 1"
        )
    known = [field for field in fields(options) if field.name in stored and field.name != "_name"]
    found = options(**{field.name: stored[field.name] for field in known})
    found.tokens_per_sample = stored_entry(checkpoint, path, "cfg", "task").get("tokens_per_sample")
    for field in fields(options):
        if field.name != "_name":
            _check(field, getattr(found, field.name), path)
    for name, size in _sizes(weights, path).items():
        if getattr(found, name, size) != size:
            raise SettingError(
                f"{path} has {name}={shortened(getattr(found, name))} in its configuration, but its weights have the "
                f"size {size}: give a checkpoint that fairseq-train or alma-lm wrote"
            )
    return found


def stored_options(checkpoint: Any, path: Path, options: type) -> Any:
    """Return the options of a model other than switch_lm in a checkpoint, whose architecture the user has named.

    fairseq passes some texts among them to Python's eval(), and opens files that others name. So a text may contain
    only letters, digits and the characters ".,-".

    Args:
        checkpoint: the content of the file.
        path: the file, for error messages.
        options: dataclass with the options of the model.

    Raises:
        SettingError: if an option has another type, or is such a text.
    """
    stored = stored_entry(checkpoint, path, "cfg", "model")
    defaults = {field.name: field.default for field in fields(options)}
    given = {name: stored[name] for name in defaults if name in stored and stored[name] != defaults[name]}
    for name, value in given.items():
        is_plain = value is None or type(value) in (bool, int, float)
        if not (is_plain or (type(value) is str and all(one.isalnum() or one in "._,-" for one in value))):
            raise SettingError(
                f"{path} has {name}={shortened(value)} in its configuration, expected a number or a word: use "
                f"fairseq-eval-lm if you trust the file"
            )
    found = options(**given)
    found.tokens_per_sample = stored_entry(checkpoint, path, "cfg", "task").get("tokens_per_sample")
    return found


def stored_entry(checkpoint: Any, path: Path, *names: str) -> dict[str, Any]:
    """Return a dictionary in a checkpoint, found by its names, the outermost first. Raise SettingError without it."""
    entry = checkpoint
    for name in names:
        entry = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(entry, dict):
        raise SettingError(
            f"{path} is not a checkpoint of a switch_lm model, because it has no {'.'.join(names)}: give a checkpoint "
            f"that fairseq-train or alma-lm wrote"
        )
    return entry


def _check(field: Field, value: Any, path: Path) -> None:
    """Raise SettingError if the value of an option has the wrong type or is out of range."""
    kind = int if field.name == "tokens_per_sample" else type(field.default)
    if isinstance(field.type, type) and issubclass(field.type, Enum):
        names = [str(one.value) for one in field.type]
        is_valid, expected = type(value) is str and value in names, f"one of {', '.join(names)}"
    elif kind is int:
        least = 0 if field.default == 0 else 1
        is_valid, expected = type(value) is int and value >= least, f"an integer, {least} or more"
    elif kind is float:
        is_number = type(value) in (int, float)
        is_valid, expected = is_number and 0 <= value <= LARGEST_FACTOR, f"a number from 0 to {LARGEST_FACTOR}"
    else:
        is_valid, expected = type(value) is kind, f"a value of the type {kind.__name__}"
    if not is_valid:
        raise SettingError(
            f"{path} has {field.name}={shortened(value)} in its configuration, expected {expected}: give a checkpoint "
            f"that fairseq-train or alma-lm wrote"
        )


def _sizes(weights: Mapping[Any, Any], path: Path) -> dict[str, int]:
    """Return the sizes of a switch_lm model, by option, from its weights.

    So a file cannot let us make a model that is larger than the file. Raise SettingError if an entry is not a tensor of
    numbers whose values are all in the file, or if a tensor is missing.
    """
    for name, value in weights.items():
        if not (isinstance(name, str) and _is_stored(value)):
            raise SettingError(f"{path} has no weights in the entry {shortened(name)}: give a whole checkpoint")
    try:
        experts = [value.shape[0] for name, value in weights.items() if name.endswith("mixture.fc1_weight")]
        return {
            "decoder_layers": len({name.split(".")[2] for name in weights if name.startswith("decoder.layers.")}),
            "decoder_embed_dim": weights["decoder.embed_tokens.weight"].shape[1],
            "decoder_ffn_embed_dim": weights["decoder.layers.0.fc1.weight"].shape[0],
            "learned_positions": weights["decoder.embed_positions.weight"].shape[0],
            **({"num_experts": experts[0]} if experts else {}),
        }
    except (KeyError, IndexError) as error:
        raise SettingError(
            f"{path} is not a checkpoint of a switch_lm model, because it has no weights of that model ({error})"
        ) from error


def _is_stored(value: Any) -> bool:
    """Return True for a tensor of numbers whose values are all in the file.

    A file can also contain a tensor that repeats a few values, and needs much more memory once it is copied.
    """
    if not (isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
        return False
    return value.is_floating_point() and 0 < value.nbytes <= value.untyped_storage().nbytes()

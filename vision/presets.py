"""The presets of alma-vision: YAML files of settings in `vision/configs/preset`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app.command import composed, setting_values, store_settings
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.errors import SettingError
from vision.settings import VisionSettings

CONFIGS = Path(__file__).parent / "configs"
"""Folder with the YAML files."""


def by_backbone(perceptron: Any, vgg: Any, *, _root_: DictConfig) -> Any:
    """Return `perceptron` if the network of the run is a multilayer perceptron, otherwise `vgg`.

    In a YAML file, ${by_backbone:A,B} calls this function with the values A and B. OmegaConf, the library that reads
    the file, gives all settings of the run as `_root_`.
    """
    # If the dataset has no default network, the settings raise an error later.
    entry = entry_of(_root_.dataset)
    return perceptron if (_root_.backbone or (entry and entry.backbone)) == "mlp" else vgg


def by_learner(values: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Return the value for the learner of the run, or None (the default). YAML files call it as ${by_learner:{...}}."""
    return values.get(_root_.learner)


OmegaConf.register_new_resolver("by_backbone", by_backbone, replace=True)
OmegaConf.register_new_resolver("by_learner", by_learner, replace=True)
store_settings(VisionSettings)


def settings_of(values: Mapping[str, Any], given: Collection[str] | None = None) -> VisionSettings:
    """Return a settings object with the given values.

    If the values name a plugin, import the plugin first, because it may register the learner that the values name.

    Args:
        values: setting name -> value.
        given: names of the settings that the user typed (see `RunSettings.from_mapping`).

    Raises:
        SettingError: if the plugin does not exist, a name is unknown, or a value is invalid.
    """
    if plugin := values.get("plugin"):
        load_plugin(str(plugin))
    return VisionSettings.from_mapping(values, given)


def settings_from(given: Mapping[str, Any]) -> VisionSettings:
    """Return the settings that `alma-vision` has if the given values are typed on its command line.

    Settings that are not given have the values of the preset. For the errors, see `settings_of`.
    """
    # An empty `out` gets an error message of its own.
    return settings_of({"out": "", **_preset_values(given), **given}, given)


def _preset_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset that is given, by default those of `paper`."""
    name = given.get("preset", "paper")
    known = sorted(path.stem for path in (CONFIGS / "preset").glob("*.yaml"))
    if name not in known:
        raise SettingError(f"preset={name!r} is not one of {', '.join(known)}")
    keys = ("dataset", "backbone", "learner")  # some values of a preset depend on them
    config = composed(CONFIGS, "alma_vision", [f"preset={name}"], {key: given[key] for key in keys if key in given})
    return setting_values(config)

"""The presets of alma-vision: YAML files of settings in `vision/configs/preset`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_alma.app.command import setting_values, store_settings
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.errors import SettingError
from vision.settings import VisionSettings

CONFIGS = Path(__file__).parent / "configs"
"""Folder with the YAML files."""


def by_backbone(perceptron: Any, vgg: Any, *, _root_: DictConfig) -> Any:
    """Return `perceptron` if the network of the run is a perceptron, otherwise `vgg`.

    In a YAML file, ${by_backbone:A,B} calls this function with the values A and B.

    Args:
        perceptron: value of a setting for runs with multilayer perceptrons.
        vgg: value of the same setting for runs with the reduced VGG19 or another network for images.
        _root_: all settings of the run. OmegaConf, the library that reads the preset, passes this argument.
    """
    # Only the preset paper_v1 calls this function. If the dataset has no default network, the settings raise an error
    # later.
    entry = entry_of(_root_.dataset)
    return perceptron if (_root_.backbone or (entry and entry.backbone)) == "mlp" else vgg


def by_learner(values: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """Return the value for the learner of the run, or None, which stands for the default of the learner.

    In a YAML file, ${by_learner:{NAME:VALUE,...}} calls this function.
    """
    return values.get(_root_.learner)


OmegaConf.register_new_resolver("by_backbone", by_backbone, replace=True)
OmegaConf.register_new_resolver("by_learner", by_learner, replace=True)
store_settings(VisionSettings)


def settings_from(given: Mapping[str, Any]) -> VisionSettings:
    """Return the settings that `alma-vision` has if the given values are typed on its command line.

    Settings that are not given have the values of the preset. If the values name a plugin, it is imported first.

    Args:
        given: setting name -> value. The value of `preset` is the name of a preset of this project, or is missing.

    Raises:
        SettingError: if a name or a value is invalid.
    """
    if plugin := given.get("plugin"):
        load_plugin(str(plugin))
    # An empty `out` gets an error message of its own.
    return VisionSettings.from_mapping({"out": "", **_preset_values(given), **given}, given)


def _preset_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset that is given, by default those of `paper`."""
    name = given.get("preset", "paper")
    known = sorted(path.stem for path in (CONFIGS / "preset").glob("*.yaml"))
    if name not in known:
        raise SettingError(f"preset={name!r} is not one of {', '.join(known)}")
    # The program may itself be an application of Hydra, whose state must not change.
    hydra_of_program, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.1"):
            config = compose("alma_vision", overrides=[f"preset={name}"])
    finally:
        GlobalHydra.instance().hydra = hydra_of_program
    with open_dict(config):
        # Some values of a preset depend on these settings.
        config.update({key: given[key] for key in ("dataset", "backbone", "learner") if key in given})
        del config["out"]
    return setting_values(config)

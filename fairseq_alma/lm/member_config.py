"""The configuration of a member's training, in the file config.yaml of its folder."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fairseq_alma.core.errors import RunError

CONFIG = "config.yaml"
"""File in the folder of a member: fairseq's configuration of the training, written before the training starts."""


def read_config(folder: Path) -> DictConfig:
    """Return fairseq's configuration with which a member is trained.

    Args:
        folder: the folder of the member.

    Raises:
        RunError: if the file is missing or damaged.
    """
    path = folder / CONFIG
    try:
        config = OmegaConf.load(path)
        assert isinstance(config, DictConfig)
        if not isinstance(config.optimization.max_update, int):
            raise ValueError(f"max_update is {config.optimization.max_update!r}")
        return config
    except (OSError, ValueError, AssertionError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise RunError(f"{path} cannot be read: {error}. Run the same command again, which writes it again") from error

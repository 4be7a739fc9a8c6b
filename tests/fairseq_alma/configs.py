"""fairseq's configuration for the arguments of fairseq-train."""

from collections.abc import Sequence

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig

import fairseq_alma


def config_of(arguments: Sequence[str]) -> DictConfig:
    """Return the configuration that fairseq-train makes of its arguments (without the program name)."""
    fairseq_alma.register()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), list(arguments)))

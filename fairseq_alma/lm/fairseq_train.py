"""fairseq inside the process of alma-lm: options checked, the untrained model written, a trained model built.

This is the only file of `fairseq_alma.lm` that imports fairseq. Training itself runs in `fairseq-train` processes
(member.py).
"""

import contextlib
import io
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from torch import nn

import fairseq_alma
from fairseq_alma.core.errors import SettingError

USER_DIR = str(Path(__file__).parents[1].absolute())
"""The value of fairseq's `--user-dir`: the package `fairseq_alma`, which registers task, models and criterion."""


def parse_train_arguments(train_arguments: Sequence[str]) -> Namespace:
    """Return the namespace that `fairseq-train` makes of these arguments, which do not include the program's name.

    Raises:
        SettingError: fairseq does not know an option, or refuses its value.
    """
    fairseq_alma.register()
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):  # argparse prints pages of usage before the line with the error
            return options.parse_args_and_arch(options.get_training_parser(), list(train_arguments))
    except SystemExit as error:
        reason = (output.getvalue().strip().splitlines() or ["they ask for help, not for training"])[-1]
        raise SettingError(f"fairseq-train refuses these options: {reason}") from error


def write_untrained_checkpoint(train_arguments: Sequence[str], path: Path) -> None:
    """Write the checkpoint from which `fairseq-train` with these arguments starts, before its first update.

    Args:
        train_arguments: the command line without the program's name.
        path: the checkpoint. Its folder is created if it is missing.

    Raises:
        SettingError: see parse_train_arguments.
    """
    arguments = parse_train_arguments(train_arguments)
    # On the CPU of this process, on any machine: fairseq-train would start one rank for each GPU that it finds.
    arguments.distributed_world_size, arguments.cpu = 1, True
    cfg = convert_namespace_to_omegaconf(arguments)
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.consolidate_optimizer()  # fairseq calls it before each save; without it state_dict() fails
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1}, "val_loss": None, **task.get_checkpoint_dict()})


def build_model(checkpoint: Path) -> nn.Module:
    """Return the model of a checkpoint, with its weights, on the CPU."""
    fairseq_alma.register()
    (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], {"user_dir": USER_DIR})
    return model

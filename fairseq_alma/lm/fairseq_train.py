"""Functions that call fairseq in the alma-lm process: check options, write an untrained model, load a trained model.

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
"""Value of fairseq's option `--user-dir`: the folder of the package `fairseq_alma`.

fairseq imports this package, which registers its task, models and criterion (training loss) with fairseq."""


def parse_train_arguments(train_arguments: Sequence[str]) -> Namespace:
    """Return the namespace that `fairseq-train` parses from its command-line arguments (without the program name).

    Raises:
        SettingError: if fairseq does not know an option or refuses its value.
    """
    fairseq_alma.register()
    output = io.StringIO()
    try:
        # Capture the error output of argparse, because argparse prints pages of usage before the error. Report only the
        # last line, which contains the error.
        with contextlib.redirect_stderr(output):
            return options.parse_args_and_arch(options.get_training_parser(), list(train_arguments))
    except SystemExit as error:
        reason = (output.getvalue().strip().splitlines() or ["one of them only prints a help text"])[-1]
        raise SettingError(f"fairseq-train refuses these options: {reason}") from error


def write_untrained_checkpoint(train_arguments: Sequence[str], path: Path) -> None:
    """Write the checkpoint of an untrained model, with the initial weights that `fairseq-train` would use.

    Args:
        train_arguments: command-line arguments of `fairseq-train`, without the program name.
        path: the checkpoint to write. Its folder is created if it is missing.

    Raises:
        SettingError: if fairseq refuses an argument (see parse_train_arguments).
    """
    arguments = parse_train_arguments(train_arguments)
    # Use a single process, on the CPU. By default, fairseq would use one process for each GPU.
    arguments.distributed_world_size, arguments.cpu = 1, True
    cfg = convert_namespace_to_omegaconf(arguments)
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.consolidate_optimizer()  # fairseq's save_checkpoint fails without this call
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1}, "val_loss": None, **task.get_checkpoint_dict()})


def build_model(checkpoint: Path) -> nn.Module:
    """Return the model in a checkpoint file, with its trained weights, on the CPU."""
    fairseq_alma.register()
    (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], {"user_dir": USER_DIR})
    return model

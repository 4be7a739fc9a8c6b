"""Functions that call fairseq in the alma-lm process. They make configurations and write checkpoints.

Training itself runs in other processes, which execute train_member.py. In `fairseq_alma.lm`, only train_member.py and
this file import fairseq.
"""

import contextlib
import copy
import io
import shlex
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.configs import CheckpointConfig, DistributedTrainingConfig, EMAConfig, FairseqBMUFConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from omegaconf import DictConfig, OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints import write_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.tasks.alma_lm import AlmaLanguageModelingConfig

USER_DIR = str(Path(__file__).parents[1].absolute())
"""Value of fairseq's option `--user-dir`: the folder of the package `fairseq_alma`.

fairseq imports this package, which registers its task, models, criterion and optimizer with fairseq."""

PATHS = {
    "data": "task",
    "user_dir": "common",
    "save_dir": "checkpoint",
    "finetune_from_model": "checkpoint",
}
"""For each option whose value is a path, the group of fairseq's configuration that contains the option."""

VARYING = {
    "log_interval", "lr", "max_update", "mega_batches", "num_experts", "replay_mega_batches", "save_interval_updates",
    "seed", "validate_interval_updates", "warmup_updates",
}  # fmt: skip
"""Options whose values differ between the stages and members of a run. See `member_config`."""

ALLOWED = {
    "adam_betas", "adam_eps", "clip_norm", "num_workers", "ddp_backend", "ddp_comm_hook", "bucket_cap_mb",
    "fix_batches_to_gpus",
    "find_unused_parameters", "gradient_as_bucket_view", "fast_stat_sync", "heartbeat_timeout", "broadcast_buffers",
    "zero_sharding",
}  # fmt: skip
"""Options that alma-lm accepts in the setting `fairseq`, even if they are also in REFUSED or alma-lm sets them itself.

All other options that are in REFUSED or that alma-lm sets cause an error. The options in ALLOWED are accepted, because
they do not change which data a run reads, which checkpoints it writes or how many sequences an update has."""

REFUSED = {
    **dict.fromkeys(
        ("arch", "task", "criterion", "optimizer", "user_dir"), "alma-lm selects the components of fairseq itself"
    ),
    "lr_scheduler": "alma-lm sets the learning rates itself (see schedule=)",
    **dict.fromkeys(
        (field.name for field in fields(EMAConfig)),
        "its average of the weights would not predict (average= does)",
    ),
    **dict.fromkeys(
        (
            # Algorithm 1 of the paper and the settings of alma-lm determine what is read, and how often.
            *(field.name for field in fields(AlmaLanguageModelingConfig)),
            "train_subset", "valid_subset", "combine_valid_subsets", "ignore_unused_valid_subsets", "max_valid_steps",
            "max_tokens", "max_tokens_valid", "batch_by_size", "skip_invalid_size_inputs_valid_test", "curriculum",
            "num_shards", "shard_id", "grouped_shuffling", "update_epoch_batch_itr", "update_ordered_indices_seed",
            "skip_remainder_batch", "disable_validation", "validate_after_updates", "max_epoch", "stop_time_hours",
            "stop_min_lr", "update_freq", "sentence_avg", "use_bmuf", "force_anneal",
            *(field.name for field in fields(FairseqBMUFConfig)),
            *(field.name for field in fields(CheckpointConfig)),
            # The number of sequences in an update depends on the number of processes.
            "cpu", "model_parallel_size", *(field.name for field in fields(DistributedTrainingConfig)),
        ),
        "it would change which data the run reads, which checkpoints it keeps or how many sequences an update has",
    ),
}  # fmt: skip
"""For each option that alma-lm refuses in the setting `fairseq`, in addition to those that it sets itself: the reason.

If alma-lm accepted these options, a run could differ from Algorithm 1 of the paper or from the settings of alma-lm
without any warning. For example, with `--max-valid-steps 1`, the best checkpoint would be chosen by the perplexity
on only one validation batch."""

OTHER_PRECISIONS = {"fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16", "tpu"}
"""fairseq's own options for 16-bit precision, and the option for TPUs. alma-lm refuses them.

With some of these options, a resumed training would differ from an uninterrupted one. For example, with fp16, fairseq
saves only weights that are rounded to 16 bits. With alma-lm's setting `precision`, the saved weights are float32."""


def member_config(values: Mapping[str, Any], fairseq: str = "") -> DictConfig:
    """Return the configuration of a training, typed and checked by fairseq.

    Args:
        values: name of an option of fairseq-train -> value. The names have underscores, for example `max_update`. The
            options `arch` and `data` must be included.
        fairseq: more options, as on the command line of fairseq-train (the setting `fairseq`).

    Raises:
        SettingError: if fairseq does not know an option or refuses its value, or if `fairseq` contains an option that
            alma-lm sets from its own settings or that is in REFUSED.
    """
    fairseq_alma.register()
    if ARCH_MODEL_NAME_REGISTRY.get(str(values["arch"])) != "switch_lm":
        known = [name for name in ARCH_MODEL_INV_REGISTRY["switch_lm"] if name != "switch_lm"]
        raise SettingError(
            f"arch={values['arch']} is not one of {', '.join(known)}: alma-lm trains only these. For another "
            f"architecture, call fairseq-train yourself"
        )
    base = [
        "STREAM", "--user-dir", USER_DIR, "--task", "alma_lm", "--arch", str(values["arch"]),
        "--criterion", "switch_lm", "--optimizer", "fused_adam",
        "--lr-scheduler", "polynomial_decay",
    ]  # fmt: skip
    try:
        more = shlex.split(fairseq)
    except ValueError as error:
        raise SettingError(
            f"fairseq={fairseq!r} cannot be split into options ({error}): check its quotation marks"
        ) from error
    namespace = _parse([*base, *more])
    given: set[str] = set()
    if more:
        before, after = vars(_parse(base, only_given=True)), vars(_parse([*base, *more], only_given=True))
        given = {name for name, value in after.items() if name not in before or value != before[name]}
        _refuse(given, set(values), fairseq)
    # `values` has a `ddp_backend` only on CPUs, where no other works.
    chosen = given & ALLOWED - {"ddp_backend"}
    for name in values.keys() - PATHS.keys() - VARYING - chosen:
        setattr(namespace, name, values[name])
    config = copy.deepcopy(_convert(_Options(**vars(namespace))))
    # Set the values that vary here and not in `namespace`, so that the configurations of all stages and members of a
    # run come from one conversion, which takes most of a second.
    for name in sorted(values.keys() & VARYING):
        _set_in_all_groups(config, name, values[name])
    # Set the paths here, too. convert_namespace_to_omegaconf passes all values in `namespace` through Hydra's parser,
    # which fails on some paths.
    for name, group in PATHS.items():
        if name in values:
            config[group][name] = None if values[name] is None else str(values[name])
    config.common.user_dir = USER_DIR
    return config


def _set_in_all_groups(config: DictConfig, name: str, value: Any) -> None:
    """Set an option in all groups of fairseq's configuration that have it, as convert_namespace_to_omegaconf does."""
    for group in config.values():
        if isinstance(group, DictConfig) and name in group:
            group[name] = value


class _Options(Namespace):
    """Options of fairseq-train, as the key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


@lru_cache(maxsize=16)
def _convert(given: _Options) -> DictConfig:
    """Return fairseq's typed configuration, which the caller must not change. Raise SettingError if a type is wrong."""
    try:
        return convert_namespace_to_omegaconf(given)
    except Exception as error:
        # Catch all exceptions, because Hydra and OmegaConf raise many different ones for a value of a wrong type.
        reason = str(error).strip().splitlines()
        raise SettingError(f"fairseq refuses a setting: {reason[0] if reason else type(error).__name__}") from error


def identity_of_config(config: DictConfig) -> dict[str, Any]:
    """Return the options in `config` that influence the result of a training, as values that JSON can represent.

    Paths, checkpoints and the number of workers are left out. So are the devices and the mega-batches to read: the
    caller adds the devices and the digests of the mega-batches.
    """
    plain = OmegaConf.to_container(config, enum_to_str=True)
    assert isinstance(plain, dict)
    identity: dict[str, Any] = {str(group): values for group, values in plain.items()}
    del identity["checkpoint"]
    # The options that a user may give, such as ddp_comm_hook=fp16, can change the result.
    group = identity["distributed_training"]
    identity["distributed_training"] = {name: value for name, value in group.items() if name in ALLOWED}
    left_out = [("common", "user_dir"), ("dataset", "num_workers"), ("dataset", "data_buffer_size")]
    left_out += [("task", name) for name in ("data", "mega_batches", "replay_mega_batches")]
    for group, name in left_out:
        identity[group] = {key: value for key, value in identity[group].items() if key != name}
    return identity


def write_untrained_checkpoint(config: DictConfig, path: Path) -> None:
    """Write the checkpoint of an untrained model. Its weights are the initial weights of a training from scratch.

    Args:
        config: the return value of member_config. It is changed, so that fairseq uses one process and the CPU.
        path: the checkpoint to write. Its folder is created if it is missing.
    """
    # Set one process and the CPU, because fairseq would otherwise use one process for each GPU.
    config.distributed_training.distributed_world_size, config.common.cpu = 1, True
    config.model.expert_parallel = 1
    np.random.seed(config.common.seed)
    utils.set_torch_seed(config.common.seed)
    task = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    # Write the keys that fairseq's Trainer writes, but no state of the optimizer. Do not use the Trainer, because it
    # creates an optimizer. To create an optimizer, torch imports its compiler, which takes more than a second.
    checkpoint = {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "criterion": None,
        # Without the following keys, fairseq assumes that an early version of fairseq wrote the checkpoint, and fails.
        "optimizer_history": [{"optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": task.state_dict(),
        "extra_state": {
            "train_iterator": {"epoch": 1},
            "val_loss": None,
            "previous_training_time": 0.0,
            **task.get_checkpoint_dict(),
        },
    }
    write_checkpoint(checkpoint, path)


def shapes_of_model(config: DictConfig) -> dict[str, torch.Size]:
    """Return the name and the shape of each tensor in the state of the model that `config` describes.

    `config` is changed, so that the model is not spread over devices.
    """
    config.model.expert_parallel = 1
    task = tasks.setup_task(config.task)
    with torch.device("meta"):  # takes no memory
        model = task.build_model(config.model)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _parse(words: list[str], only_given: bool = False) -> Namespace:
    """Return the namespace that fairseq-train parses from `words`; if `only_given`, without default values.

    Raise SettingError if fairseq refuses one of the options.
    """
    output = io.StringIO()
    try:
        # Capture the output of argparse, because it prints pages of usage before the error. Only the last line, which
        # contains the error, is reported.
        with contextlib.redirect_stderr(output):
            return options.parse_args_and_arch(options.get_training_parser(), words, suppress_defaults=only_given)
    except SystemExit as error:
        reason = (output.getvalue().strip().splitlines() or ["with them, it prints its help and exits"])[-1]
        raise SettingError(f"fairseq-train refuses the options from fairseq=: {reason}") from error
    except (ValueError, RuntimeError) as error:
        # fairseq raises ValueError or RuntimeError, for example, for --tpu together with --fp16. Convert them to
        # SettingError, because alma-lm prints a SettingError without a traceback.
        raise SettingError(f"fairseq-train refuses the options from fairseq=: {error}") from error


def _refuse(given: set[str], given_by_alma: set[str], fairseq: str) -> None:
    """Raise SettingError if the setting `fairseq` contains an option that users must not change.

    Args:
        given: names of the options in the setting.
        given_by_alma: names of the options that alma-lm sets from its own settings.
        fairseq: the setting, which the error message quotes.
    """

    def words(names: set[str]) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))

    if precision := given & OTHER_PRECISIONS:
        raise SettingError(
            f"fairseq={fairseq!r}: {words(precision)} is not supported, because a resumed training would differ from "
            f"an uninterrupted one: give precision=bfloat16"
        )
    if owned := given & given_by_alma - ALLOWED:
        raise SettingError(
            f"fairseq={fairseq!r}: {words(owned)} is set by alma-lm: leave it out, and use the settings of alma-lm"
        )
    if refused := given & REFUSED.keys() - ALLOWED:
        reason = REFUSED[min(refused)]
        same = {name for name in refused if REFUSED[name] == reason}
        raise SettingError(f"fairseq={fairseq!r}: {words(same)} is refused, because {reason}: leave it out")

"""The members (networks) of a learner, fairseq's configuration of their training, and their untrained checkpoints.

These functions call fairseq in the alma-lm process. Training itself runs in other processes, which execute
train_member.py. In `fairseq_alma.lm`, only train_member.py and this file import fairseq.
"""

import contextlib
import copy
import io
import math
import shlex
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.configs import CheckpointConfig, DistributedTrainingConfig, EMAConfig, FairseqBMUFConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import (
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqLanguageModel,
)
from omegaconf import DictConfig, OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints import GROWN, write_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.replay import auto_share
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.lm.batches import sequences_per_pass
from fairseq_alma.lm.compilation import pays
from fairseq_alma.lm.init_from import initial_sizes
from fairseq_alma.lm.settings import CLIP_NORM, LanguageModelSettings
from fairseq_alma.models.switch_lm import SwitchLanguageModel
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
    "seed", "total_num_update", "validate_interval_updates", "warmup_updates",
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
    **dict.fromkeys(("arch", "task", "user_dir"), "alma-lm has settings for it (arch=, plugin=)"),
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


def member_config(values: Mapping[str, Any], fairseq: str = "", own: Mapping[str, Any] | None = None) -> DictConfig:
    """Return the configuration of a training, typed and checked by fairseq.

    Args:
        values: name of an option of fairseq-train -> value. The names have underscores, for example `max_update`. The
            options `arch` and `data` must be included.
        fairseq: more options, as on the command line of fairseq-train (the setting `fairseq`).
        own: options that replace the others, by the same names.

    Raises:
        SettingError: if fairseq does not know an option or refuses its value, or if `fairseq` contains an option that
            alma-lm sets from its own settings or that is in REFUSED.
    """
    fairseq_alma.register()
    if str(values["arch"]) not in architectures():
        raise SettingError(
            f"arch={values['arch']} is not a language model that fairseq or plugin= has registered. They are "
            f"{', '.join(architectures())}"
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
    chosen = given & ALLOWED - {"ddp_backend", *(own or {})}
    values = {**values, **(own or {})}
    namespace.total_num_update = 1  # fairseq refuses its default
    for name in values.keys() - PATHS.keys() - VARYING - chosen:
        setattr(namespace, name, values[name])
    config = copy.deepcopy(_convert(_Options(**vars(namespace))))
    for group in ("criterion", "optimizer", "lr_scheduler"):
        if not isinstance(config[group], DictConfig):
            raise SettingError(
                f"fairseq={fairseq!r}: the chosen {group} has no dataclass of options, so a checkpoint that is "
                f"read without running code cannot contain them: choose another one"
            )
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


def architectures() -> list[str]:
    """Return the names of all architectures of language models, ours first, and then fairseq's and the user's."""
    fairseq_alma.register()
    ours = [name for name in ARCH_MODEL_INV_REGISTRY["switch_lm"] if name != "switch_lm"]
    # Older models of fairseq, which have no dataclass, cannot be configured through Hydra.
    with_options = {name for name, options in MODEL_DATACLASS_REGISTRY.items() if options is not None}
    others = {
        name for name, cls in ARCH_MODEL_REGISTRY.items()
        if issubclass(cls, FairseqLanguageModel) and ARCH_MODEL_NAME_REGISTRY[name] in with_options
    }  # fmt: skip
    return [*ours, *sorted(others - {*ours, "switch_lm"})]


def is_switch_lm(architecture: str) -> bool:
    """Return whether an architecture is one of switch_lm, or of a model that the user has derived from it."""
    return issubclass(ARCH_MODEL_REGISTRY[architecture], SwitchLanguageModel)


def _set_in_all_groups(config: DictConfig, name: str, value: Any) -> None:
    """Set an option in all groups of fairseq's configuration that have it, as convert_namespace_to_omegaconf does."""
    for group in config.values():
        if isinstance(group, DictConfig) and name in group:
            group[name] = float(value) if isinstance(group[name], float) and isinstance(value, int) else value


class _Options(Namespace):
    """Options of fairseq-train, as the key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


@lru_cache(maxsize=16)
def _convert(given: _Options) -> DictConfig:
    """Return fairseq's typed configuration, which the caller must not change. Raise SettingError if a type is wrong."""
    try:
        # fairseq uses Hydra in ways that its later versions warn of, in lines that help nobody.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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


def write_untrained_checkpoint(
    config: DictConfig, path: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the checkpoint of an untrained model. Its weights are the initial weights of a training from scratch.

    Args:
        config: the return value of member_config. It is changed, so that fairseq uses one process and the CPU.
        path: the checkpoint to write. Its folder is created if it is missing.
        weights: other weights to write, of a model of the same sizes.
    """
    # Set one process and the CPU, because fairseq would otherwise use one process for each GPU.
    config.distributed_training.distributed_world_size, config.common.cpu = 1, True
    _set_in_all_groups(config, "expert_parallel", 1)
    np.random.seed(config.common.seed)
    utils.set_torch_seed(config.common.seed)
    task = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    if weights is not None:
        model.load_state_dict(weights)
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
    _set_in_all_groups(config, "expert_parallel", 1)
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


MEMBER_SEED_STRIDE = 10_000_000
"""Difference between the seeds of consecutive members.

For update number u of a member, fairseq uses the seed (seed of the member) + u. Two updates with the same seed would
have the same dropout masks. To avoid this, the difference is larger than any number of updates. It is also larger than
any seed of a run (see MAX_SEED), so that two runs with different seeds have no member seed in common."""

NUM_MEMBER_SEEDS = 4_283_820_000
"""The seeds of members are below this number, because NumPy takes no seed above 2**32 - 1. Those from member 430 on lie
between the seeds of the first ones, more than two million away from them up to member 1,200."""


@dataclass(frozen=True)
class Member:
    """One network of a learner in one stage."""

    number: int
    """Member number, counted from 1."""
    seed: int
    """Seed of the member's initial weights and of the order in which it reads the data."""
    num_experts: int
    """Number of experts in each mixture of this network."""
    added_layers: int = 0
    """Number of layers of this network beyond those of the model of the first stage."""

    @classmethod
    def of_run(cls, number: int, run_seed: int, num_experts: int, added_layers: int = 0) -> "Member":
        """Return member `number` of a run. Member 1, the only member of SM, has the same seed as the run."""
        seed = (run_seed + (number - 1) * MEMBER_SEED_STRIDE) % NUM_MEMBER_SEEDS
        return cls(number, seed, num_experts, added_layers)


OwnOptions = Callable[[Stage, int], dict[str, Any]]
"""A function from a stage and its number of updates to options of fairseq-train, which replace those of alma-lm."""


@dataclass(frozen=True)
class TrainingConfigs:
    """Makes the configurations with which the members of a run are trained."""

    settings: LanguageModelSettings
    """Settings of the run."""
    stream: TrainingView
    """Training and validation data."""
    memory: int | None
    """Memory of the smallest GPU in bytes; None if the devices are CPUs."""
    num_nodes: int = 1
    """Number of machines that train a member."""
    own_options: OwnOptions | None = None
    """What a learner of the user changes in a stage (see `LanguageModelLearner.training_options`)."""

    def of(
        self,
        member: Member,
        num_devices: int = 1,
        stage: Stage | None = None,
        folder: Path = Path(),
        start: Path | None = None,
    ) -> DictConfig:
        """Return fairseq's configuration for the training of a member.

        Args:
            member: the member.
            num_devices: number of devices that train the member, on all machines together.
            stage: the stage to train. None: the configuration is only used to check options or build the model.
            folder: the member's folder.
            start: the checkpoint with the weights from which the training starts.

        Raises:
            SettingError: if fairseq refuses an option (see member_config), or if options cannot be combined.
        """
        s = self.settings
        updates = updates_of_stage(s, stage) if stage else 2
        interval = max(1, -(-updates // s.validations))
        values = {
            "data": self.stream.path,
            **(data_of_stage(s, stage) if stage else {}),
            "tokens_per_sample": s.tokens_per_sample,
            "arch": s.arch,
            "num_experts": member.num_experts,
            "expert_parallel": s.expert_parallel,
            "dropout": s.dropout,
            "weight_decay": s.weight_decay,
            "precision": s.precision,
            "clip_norm": CLIP_NORM,
            **self._learning_rates(stage, updates, start),
            "max_update": updates,
            "seed": member.seed,
            "save_dir": folder,
            "finetune_from_model": start,
            "save_interval_updates": interval,
            # Larger than any number of epochs, so that only the intervals in updates have an effect.
            "save_interval": 10**6,
            "validate_interval": 10**6,
            # Otherwise, fairseq would not validate a checkpoint that it saves after the last update of an epoch.
            "validate_interval_updates": interval,
            "best_checkpoint_metric": "ppl",
            # A thread reads the data ahead (fairseq's data_buffer_size). A scheduler would end a worker process by
            # SIGTERM, before the training has saved its checkpoint.
            "num_workers": 0,
            "log_format": "json",
            "log_interval": max(1, min(100, updates // 50)),
            # By default, the first process sends the checkpoint to the others, in a format that torch.load refuses.
            "load_checkpoint_on_all_dp_ranks": True,
            **self._distributed(num_devices),
        }
        own = self.own_options(stage, updates) if stage and self.own_options else {}
        if s.schedule == "constant" and "lr" in own:
            own = {"end_learning_rate": own["lr"][0], **own}
        config = member_config(values, s.fairseq, own)
        if s.schedule != "per_stage" and config.lr_scheduler._name != "polynomial_decay":
            raise SettingError(
                f"schedule={s.schedule} is for our learning rates, but fairseq={s.fairseq!r} chooses others: leave one "
                f"of them out"
            )
        if not is_switch_lm(s.arch):
            self._check_other_network()
            self._divide_update(config, num_devices)
            return config
        if s.init_from:
            config.model.update(initial_sizes(s, self.stream))
        config.model.decoder_layers += member.added_layers
        _check_expert_parallel(config)
        self._divide_update(config, num_devices)
        num_tokens = updates * s.sequences_per_update * s.tokens_per_sample
        if s.compile is True or (
            s.compile == "auto"
            and pays(config.model, self.stream.dictionary_size, num_tokens, num_devices, self.memory is not None)
        ):
            config.model.compile_batch = config.dataset.batch_size
        return config

    def check_fork(self, member: Member) -> None:
        """Raise SettingError if the run is forked with another `fairseq=` that changes the shape of its model."""
        out = Path(self.settings.out)
        before = read_settings(out).get("fairseq", "") if RunFolder(out).settings.exists() else ""
        # After a rollback to stage 0, no step is finished, but its untrained checkpoint has a shape.
        has_model = any(RunFolder(out).marks()) or any(RunFolder(out).stage(0).rglob("*.pt"))
        if not self.settings.fork or not has_model or before == self.settings.fairseq:
            return
        own, other = (
            shapes_of_model(replace(self, settings=replace(self.settings, fairseq=options)).of(member))
            for options in (before, self.settings.fairseq)
        )
        if differing := [name for name in sorted(own.keys() | other.keys()) if own.get(name) != other.get(name)]:
            raise SettingError(
                f"fairseq={self.settings.fairseq!r} changes the model ({differing[0]} differs), but the run in {out} "
                f"has a model with fairseq={before!r}: leave out what changes it, or choose another out="
            )

    def _learning_rates(self, stage: Stage | None, updates: int, start: Path | None) -> dict[str, Any]:
        """Return the options of fairseq for the learning rates of a stage with `updates` updates. See `of`."""
        s, is_constant = self.settings, self.settings.schedule == "constant"
        grows = stage is not None and s.learner_settings is not None and s.learner_settings.grows_before(stage.index)
        grows = grows or (start is not None and start.name == GROWN)
        # With a constant rate, the training continues from a model whose rate has not fallen to 0. So there is no
        # warm-up if the optimizer continues with its state. After a growth it cannot.
        has_warmup = not (is_constant and s.keeps_optimizer and stage is not None and stage.index > 1 and not grows)
        return {
            "lr": [s.lr], "warmup_updates": s.warmup_of_stage(updates) if has_warmup else 0,
            "end_learning_rate": s.lr if is_constant else 0.0, "total_num_update": updates,
        }  # fmt: skip

    def _distributed(self, num_devices: int) -> dict[str, Any]:
        """Return the options of fairseq for the processes that train a member on `num_devices` devices."""
        values = {"distributed_world_size": num_devices, "nprocs_per_node": num_devices // self.num_nodes}
        if self.memory is None and num_devices > 1:
            # On CPUs, fairseq starts no processes itself, and only legacy_ddp works.
            return {
                **values, "distributed_no_spawn": True, "distributed_backend": "gloo", "ddp_backend": "legacy_ddp",
            }  # fmt: skip
        return values

    def _check_other_network(self) -> None:
        """Raise SettingError if a setting needs a switch_lm model, and `arch` is another one."""
        s = self.settings
        needs_switch = {
            f"learner={s.learner}": s.learner == "gmoe",
            f"expert_parallel={s.expert_parallel}": s.expert_parallel > 1,
            "precision=bfloat16": s.precision == "bfloat16",
            "compile=true": s.compile is True,
            f"init_from={s.init_from}": s.init_from is not None,
        }
        if given := [text for text, is_given in needs_switch.items() if is_given]:
            how = ". A learner of a plugin can grow it (see docs/extending.md)" if s.learner == "gmoe" else ""
            raise SettingError(f"{given[0]} needs a switch_lm model, but arch={s.arch}: leave one of them out{how}")
        if self.memory is not None and s.batch_size is None:
            raise SettingError(f"arch={s.arch} needs batch_size= on a GPU, because its memory is not known: give it")

    def _divide_update(self, config: DictConfig, num_devices: int) -> None:
        """Set the numbers of sequences in a forward pass and of forward passes in an update."""
        if self.settings.keeps_continuation and str(config.distributed_training.ddp_backend) == "fully_sharded":
            raise SettingError(
                f"{self.settings.continuation_settings} cannot be combined with --ddp-backend fully_sharded, where no "
                f"process has all weights: leave one of them out"
            )
        vocabulary, sequences = self.stream.dictionary_size, self.settings.sequences_per_update
        batch_size = sequences_per_pass(self.settings, config.model, vocabulary, num_devices, self.memory)
        config.dataset.batch_size = config.dataset.batch_size_valid = config.task.batch_size = batch_size
        config.optimization.update_freq = [sequences // (batch_size * num_devices)]


def _check_expert_parallel(config: DictConfig) -> None:
    """Raise SettingError if an option cannot be combined with experts on several devices (`expert_parallel`)."""
    size, distributed = config.model.expert_parallel, config.distributed_training
    if size == 1:
        return
    if distributed.zero_sharding != "none":
        raise SettingError(f"expert_parallel={size} cannot be combined with --zero-sharding: leave one of them out")
    # The other wrappers would mix the weights of different experts.
    if str(distributed.ddp_backend) not in ("pytorch_ddp", "c10d", "legacy_ddp", "no_c10d"):
        raise SettingError(
            f"expert_parallel={size} cannot be combined with --ddp-backend {distributed.ddp_backend}: leave one of "
            f"them out"
        )


def updates_of_stage(settings: LanguageModelSettings, stage: Stage) -> int:
    """Return the number of updates of each member in a stage. Replayed mega-batches count only with replay=all."""
    replayed = len(stage.past) if stage.replay == "all" else 0
    return settings.updates_of_stage(len(stage.new) + replayed)


def data_of_stage(settings: LanguageModelSettings, stage: Stage) -> dict[str, Any]:
    """Return the options of the fairseq task that select the mega-batches on which a stage trains."""
    new, past = [m.t for m in stage.new], [m.t for m in stage.past]
    if not stage.replay or not past:
        return {"mega_batches": format_mega_batches(new)}
    if stage.replay == "all":
        return {"mega_batches": format_mega_batches(past + new)}
    return {
        "mega_batches": format_mega_batches(new),
        "replay_mega_batches": format_mega_batches(past),
        "replay_share": auto_share(_passes(settings, stage)) if stage.replay == "auto" else stage.past_share,
    }


def _passes(settings: LanguageModelSettings, stage: Stage) -> float:
    """Return how often the updates of a stage would read its new text if they read no other.

    The last update of an epoch has fewer sequences than the others.
    """
    sequences = sum(math.ceil(mega_batch.counts["tokens"] / settings.tokens_per_sample) for mega_batch in stage.new)
    return updates_of_stage(settings, stage) / math.ceil(sequences / settings.sequences_per_update)

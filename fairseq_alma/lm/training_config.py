"""The members (networks) of a learner, and fairseq's configuration of their training."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.lm.batches import sequences_per_pass
from fairseq_alma.lm.fairseq_config import member_config, shapes_of_model
from fairseq_alma.lm.settings import CLIP_NORM, LanguageModelSettings

MEMBER_SEED_STRIDE = 10_000_000
"""Difference between the seeds of consecutive members.

For update number u of a member, fairseq uses the seed (seed of the member) + u. Two updates with the same seed would
have the same dropout masks. To avoid this, the difference is larger than any number of updates. It is also larger than
any seed of a run (see MAX_SEED), so that two runs with different seeds have no member seed in common."""


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
        return cls(number, run_seed + (number - 1) * MEMBER_SEED_STRIDE, num_experts, added_layers)


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
            **(data_of_stage(stage) if stage else {}),
            "tokens_per_sample": s.tokens_per_sample,
            "arch": s.arch,
            "num_experts": member.num_experts,
            "expert_parallel": s.expert_parallel,
            "dropout": s.dropout,
            "weight_decay": s.weight_decay,
            "precision": s.precision,
            "clip_norm": CLIP_NORM,
            **self._rates(stage, updates),
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
        config = member_config(values, s.fairseq)
        config.model.decoder_layers += member.added_layers
        return self._divide_update(config, num_devices)

    def check_fork(self, member: Member) -> None:
        """Raise SettingError if the run is forked with another `fairseq=` that changes the shape of its model."""
        out = Path(self.settings.out)
        before = read_settings(out).get("fairseq", "") if RunFolder(out).settings.exists() else ""
        is_trained = any(RunFolder(out).marks())
        if not self.settings.fork or not is_trained or before == self.settings.fairseq:
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

    def _rates(self, stage: Stage | None, updates: int) -> dict[str, Any]:
        """Return the options of fairseq for the learning rates of a stage with `updates` updates."""
        s, is_constant = self.settings, self.settings.schedule == "constant"
        grows = stage is not None and s.learner_settings is not None and s.learner_settings.grows_before(stage.index)
        # With a constant rate, the training continues from a model whose rate has not fallen to 0. So there is no
        # warm-up if the optimizer continues with its state. After a growth it cannot.
        has_warmup = not (is_constant and s.keeps_optimizer and stage is not None and stage.past and not grows)
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

    def _divide_update(self, config: DictConfig, num_devices: int) -> DictConfig:
        """Set the numbers of sequences in a forward pass and of forward passes in an update, and return `config`."""
        _check_expert_parallel(config)
        if self.settings.keeps_continuation and str(config.distributed_training.ddp_backend) == "fully_sharded":
            raise SettingError(
                f"{self.settings.continuation_settings} cannot be combined with --ddp-backend fully_sharded, where no "
                f"process has all weights: leave one of them out"
            )
        vocabulary, sequences = self.stream.dictionary_size, self.settings.sequences_per_update
        batch_size = sequences_per_pass(self.settings, config.model, vocabulary, num_devices, self.memory)
        config.dataset.batch_size = config.dataset.batch_size_valid = config.task.batch_size = batch_size
        config.optimization.update_freq = [sequences // (batch_size * num_devices)]
        return config


def _check_expert_parallel(config: DictConfig) -> None:
    """Raise SettingError if the experts are to be spread over devices, but other options do not allow it."""
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


def data_of_stage(stage: Stage) -> dict[str, Any]:
    """Return the options of the fairseq task that select the mega-batches on which a stage trains."""
    new, past = [m.t for m in stage.new], [m.t for m in stage.past]
    if not stage.replay or not past:
        return {"mega_batches": format_mega_batches(new)}
    if stage.replay == "all":
        return {"mega_batches": format_mega_batches(past + new)}
    return {
        "mega_batches": format_mega_batches(new),
        "replay_mega_batches": format_mega_batches(past),
        "replay_share": stage.past_share,
    }

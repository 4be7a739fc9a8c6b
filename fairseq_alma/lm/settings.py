"""Settings of alma-lm that all learners have.

The settings that only one learner has are in `fairseq_alma.core.learner_settings`.
"""

import shlex
from dataclasses import dataclass, field
from typing import ClassVar

from fairseq_alma.core.catalogue import Half, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative

OWNED_BY_DRIVER = (
    "--task", "--arch", "--criterion", "--user-dir", "--save-dir", "--seed", "--mega-batches", "--max-update",
    "--max-epoch", "--replay-mega-batches", "--replay-share", "--num-experts", "--finetune-from-model",
    "--restore-file", "--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler",
    "--update-freq", "--batch-size", "--max-sentences", "--max-tokens", "--tokens-per-sample", "--lr",
    "--log-format", "--log-interval", "--best-checkpoint-metric", "--no-save", "--train-subset",
    "--valid-subset", "--warmup-updates", "--total-num-update", "--clip-norm", "--dropout",
    "--save-interval-updates", "--keep-interval-updates", "--no-last-checkpoints", "--save-interval",
    "--validate-interval", "--validate-interval-updates", "--validate-after-updates", "--disable-validation",
    "--patience", "--stop-time-hours", "--stop-min-lr", "--checkpoint-suffix", "--no-save-optimizer-state",
    "--maximize-best-checkpoint-metric", "--load-checkpoint-on-all-dp-ranks", "--optimizer", "--lr-scheduler",
    "--sample-break-mode", "--cpu", "--device-id", "--distributed-world-size", "--distributed-num-procs",
    "--distributed-rank", "--distributed-port", "--distributed-init-method", "--distributed-backend",
    "--distributed-no-spawn",
)  # fmt: skip
"""Options of fairseq-train that alma-lm sets itself and refuses in the setting `fairseq`.

If users could change these options, a run might not follow Algorithm 1 of the paper. If they could change the options
for devices, an update might have another number of sequences than the setting sequences_per_update says."""

TAKEN_FOR_TPU = ("--bf16", "--memory-efficient-bf16", "--tpu")
"""Options that fairseq-train takes as a request for a TPU. It then fails if the TPU libraries are not installed."""


@dataclass(frozen=True)
class LanguageModelSettings(RunSettings):
    """All settings of `alma-lm`. For several seeds, `alma-lm` makes several runs, each with one seed."""

    half: ClassVar[Half] = "language model"

    stream: str
    """The stream folder that alma-prep wrote."""
    out: str
    """The run folder."""
    learner: str = "sm"
    """Name of the learner."""
    wait: Count = 1
    """Number of mega-batches that are gathered before each stage, w."""
    replay: Replay = False
    """Replay of earlier mega-batches: `false` (none), `all` (a stage also trains on all earlier mega-batches), or a
    number between 0 and 1 (the share of each batch that comes from earlier mega-batches; the number of updates does
    not change)."""
    mega_batches: Count | None = None
    """Number of mega-batches that arrive, B. By default all mega-batches of the stream."""
    experts: Count = 4
    """Number of experts in each mixture. For gmoe, the number before the first growth."""
    parallel: Count | None = None
    """Number of members that train at the same time. By default the number of GPUs, or of cores if there is no GPU."""
    share: str | None = None
    """Folder that runs use to share trained members. A member that another run has already trained in the same way is
    copied from this folder instead of trained again. The folder also keeps the scores of all checkpoints of these runs
    (4 bytes for each token of the validation and test set), so that no checkpoint is scored twice."""
    untrained_tokens: Count | None = 100_000
    """Number of tokens of the validation set and of the test set on which the untrained learner is scored; null for
    all. The first tokens are taken. If `wait` is above 1, all tokens are scored, because the average perplexity then
    includes the perplexity of the untrained learner."""
    updates: Count | None = None
    """Number of optimizer updates of each member in each stage. It does not depend on `wait`. Cannot be combined with
    updates_per_mega_batch."""
    updates_per_mega_batch: Count | None = None
    """Number of optimizer updates for each mega-batch of a stage. With replay=all, replayed mega-batches count too.
    Cannot be combined with updates."""
    arch: str = "switch_lm_base"
    """Model size: switch_lm_tiny, switch_lm_base or switch_lm_large. It also sets defaults for tokens_per_sample,
    sequences_per_update, batch_size and lr."""
    tokens_per_sample: Count = 512
    """Number of tokens in a sequence."""
    sequences_per_update: Count = 192
    """Number of sequences in an optimizer update."""
    batch_size: Count = 8
    """Number of sequences in one forward pass on one device. An update accumulates gradients over several passes if
    necessary."""
    lr: float = 5e-4
    """Maximum learning rate. In each stage, the learning rate rises linearly from 0 to this value (warm-up) and then
    falls linearly to 0."""
    warmup_updates: NonNegative | None = None
    """Number of warm-up updates in each stage. By default 5% of the updates of the stage, but at most 4000."""
    dropout: float = 0.1
    """Dropout probability."""
    clip_norm: float = 1.0
    """Maximum gradient norm. Larger gradients are scaled down. 0 turns clipping off."""
    validations: Count = 10
    """Number of validations in each stage, at equal intervals. A checkpoint is written after each validation, and only
    the best one is kept."""
    seed: NonNegative = 0
    """Seed of the initialisation and of the order of the data. The division of the data into mega-batches depends on a
    separate seed, which was chosen when the stream was made."""
    fairseq: str = ""
    """Further options for fairseq-train, written as on its command line."""
    preset: str = "paper"
    """Name of the preset: a YAML file of settings."""
    seeds: Count = 1
    """Number of runs, with the seeds `seed`, `seed` + 1, ..."""
    tensorboard: bool = True
    """Whether to write TensorBoard logs to RUN/tensorboard during the run."""
    own: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
    """Settings that only the chosen learner has."""

    def __post_init__(self) -> None:
        if not self.stream:
            raise SettingError("stream= is missing: the folder that alma-prep wrote, e.g. stream=streams/books")
        if not isinstance(self.fairseq, str):
            raise SettingError(f"fairseq={self.fairseq!r} must be options of fairseq-train, e.g. '--weight-decay 0.01'")
        super().__post_init__()
        if (self.updates is None) == (self.updates_per_mega_batch is None):
            raise SettingError(
                "give exactly one of updates= (updates per stage) and updates_per_mega_batch= (updates for each "
                f"mega-batch of a stage): now updates={self.updates}, updates_per_mega_batch="
                f"{self.updates_per_mega_batch}. To remove the value of a preset, set it to null"
            )
        if self.seed >= MAX_SEED:
            raise SettingError(f"seed={self.seed} must be below {MAX_SEED}")
        if not self.lr > 0:
            raise SettingError(f"lr={self.lr} must be above 0")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.clip_norm < 0:
            raise SettingError(f"clip_norm={self.clip_norm} must not be negative")
        self._check_fairseq_options()
        self._complete_and_check_own()

    def _check_fairseq_options(self) -> None:
        try:
            options = shlex.split(self.fairseq)
        except ValueError as error:
            raise SettingError(f"fairseq={self.fairseq!r} cannot be split into options: {error}") from error
        names = {option.split("=")[0] for option in options}
        if owned := sorted(names & set(OWNED_BY_DRIVER)):
            raise SettingError(f"fairseq={self.fairseq!r}: {', '.join(owned)} is set by alma-lm's own settings")
        if names & set(TAKEN_FOR_TPU):
            raise SettingError(
                f"fairseq={self.fairseq!r}: with bf16, fairseq-train expects a TPU and fails; on a GPU give --fp16"
            )

    def stream_settings(self, num_mega_batches: int) -> StreamSettings:
        """Return the stream settings (wait and replay) for a stream with `num_mega_batches` mega-batches."""
        return StreamSettings(num_mega_batches, self.wait, self.replay)

    def updates_of_stage(self, num_mega_batches: int) -> int:
        """Return the number of updates in a stage that trains on `num_mega_batches` mega-batches."""
        if self.updates is not None:
            return self.updates
        assert self.updates_per_mega_batch is not None  # __post_init__ has checked that one of the two is given
        return self.updates_per_mega_batch * num_mega_batches

    def warmup_of_stage(self, updates: int) -> int:
        """Return the number of warm-up updates in a stage with `updates` updates."""
        return min(4000, updates // 20) if self.warmup_updates is None else self.warmup_updates

    def update_freq(self, num_devices: int) -> int:
        """Return the number of forward passes on each device for one update.

        Raises:
            SettingError: if the sequences of an update cannot be divided evenly into batches and devices.
        """
        passes, remainder = divmod(self.sequences_per_update, self.batch_size * num_devices)
        if remainder or passes == 0:
            raise SettingError(
                f"sequences_per_update={self.sequences_per_update} must be a multiple of batch_size="
                f"{self.batch_size} times {num_devices} device(s): change batch_size="
            )
        return passes

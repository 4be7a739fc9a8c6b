"""Settings of alma-lm that all learners have.

The settings that only one learner has are in `fairseq_alma.core.learner_settings`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from fairseq_alma.core.averaging import AverageSettings
from fairseq_alma.core.catalogue import Half, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import LastGroup, Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative, SettingErrors
from fairseq_alma.core.waiting import Wait, check_wait
from fairseq_alma.lm.schedules import DEFAULT_COOLDOWN_SHARE, Schedule

Precision = Literal["auto", "float32", "bfloat16"]
"""Value of the setting `precision`."""


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
    wait: Wait = 1
    """Number of mega-batches that are gathered before each stage, w; `geometric` (a stage waits for `wait_ratio` times
    as many mega-batches as all earlier stages have trained on); or `auto` (the same, with a ratio that follows from
    the validation perplexities of the run so far)."""
    wait_ratio: float | None = None
    """wait=geometric: the ratio. By default 0.5, so that stages are trained at arrivals 1, 2, 3, 5, 8, 12, 18, ..."""
    replay: Replay = False
    """Replay of earlier mega-batches: `false` (none), `all` (a stage also trains on all earlier mega-batches),
    `uniform`, or a number between 0 and 1 (the share of each batch that comes from earlier mega-batches). With
    `uniform`, the share grows, so that all mega-batches that have arrived have equal parts in each batch if they have
    equal sizes. With `uniform` and a number, the number of updates is the same as without replay."""
    replay_memory: Count | None = None
    """replay=uniform or a share: largest number of tokens of earlier mega-batches that are kept for training. They are
    a random sample of blocks. By default, all are kept."""
    last_group: LastGroup | None = None
    """What happens to the last mega-batches if they are fewer than `wait`: `train` (a stage trains on them) or `wait`
    (they wait for the mega-batches that will arrive later). By default `train`, but `wait` if the stream was
    extended or fewer mega-batches arrive than the stream has, because more will follow."""
    mega_batches: Count | None = None
    """Number of mega-batches that arrive, B. By default all mega-batches of the stream."""
    experts: Count = 4
    """Number of experts in each mixture. For gmoe, the number before the first growth."""
    parallel: Count | None = None
    """Number of members that train at the same time. By default the number of GPUs, or of cores if there is no GPU."""
    expert_parallel: Count = 1
    """Number of devices over which the experts of each mixture are spread, so that each device stores and trains only
    some of the experts. The number of devices that train a member must be a multiple of it. It does not change the
    checkpoints, and may change when a run is continued. With a given `batch_size`, it does not change the result
    either, apart from rounding."""
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
    extra_updates: NonNegative = 0
    """Further updates of early stages: the stage at arrival t has `extra_updates` / t more updates, rounded. A model
    that has been trained little needs more updates."""
    arch: str = "switch_lm_base"
    """Model size: switch_lm_tiny, switch_lm_base or switch_lm_large. It also sets defaults for tokens_per_sample,
    sequences_per_update and lr."""
    tokens_per_sample: Count = 512
    """Number of tokens in a sequence."""
    sequences_per_update: Count = 192
    """Number of sequences in an optimizer update."""
    batch_size: Count | None = None
    """Number of sequences in one forward pass on one device. An update accumulates gradients over several passes if
    necessary. By default, on a GPU the largest number that fits into the memory, and on a CPU at most 4096 tokens."""
    lr: float = 5e-4
    """Maximum learning rate. By default, the learning rate rises linearly from 0 to this value in each stage (warm-up)
    and then falls linearly to 0."""
    schedule: Schedule = "per_stage"
    """Learning rate over the stream: `per_stage` (warm-up, then decay to 0 in each stage; the paper), `autoregressive`
    (the same, with a lower peak in later stages: lr / sqrt(1 + number of earlier mega-batches)), `constant` (warm-up,
    then constant), `rsqrt` (lr / sqrt(number of mega-batches seen)), or `wsd` (warm-up, stable, decay: constant, and at
    the end of each stage a cooldown, in which the rate falls to 0). With `wsd`, the model at the end of the cooldown
    predicts, and the next stage continues from the model before the cooldown."""
    cooldown_share: float | None = None
    """schedule=wsd: the cooldown's share of the updates of a stage. By default 0.2."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """Whether each stage begins with a new state of the optimizer (`reset`; the paper) or continues that of the
    previous stage (`keep`). With `keep`, a stage starts from the last weights of the previous stage, not from its best
    checkpoint, and with schedule=constant, rsqrt or wsd there is no warm-up, except in the first stage and after a
    growth."""
    from_scratch: bool = False
    """Whether each stage starts from newly initialised weights."""
    average: AverageSettings = field(default_factory=AverageSettings)
    warmup_updates: NonNegative | None = None
    """Number of warm-up updates in each stage. By default 5% of the updates of the stage, but at most 4000. With
    optimizer_state=keep and schedule=constant, rsqrt or wsd, only the first stage, and a stage after a growth, has a
    warm-up."""
    dropout: float = 0.1
    """Dropout probability."""
    weight_decay: float = 0.0
    """Weight decay of AdamW: before each update, all parameters are multiplied by 1 - learning rate * weight_decay.
    On nine books that were read five times, 0.3 was better than 0 with lr=0.005, and 1 was worse."""
    clip_norm: float = 1.0
    """Maximum gradient norm. Larger gradients are scaled down. 0 turns clipping off."""
    precision: Precision = "auto"
    """Precision of matrix products and attention: `float32`, `bfloat16`, or `auto`. Weights, gradients, optimizer state
    and the log-probabilities of perplexities are always float32. On a GPU, `auto` means bfloat16 if the GPU supports
    it. On a CPU, a short measurement decides: `auto` means bfloat16 if it is clearly faster than float32. A run that is
    continued keeps the precision with which it was started."""
    validations: Count = 10
    """Number of validations in each stage, at equal intervals. A checkpoint is written after each validation. Only the
    last checkpoint and the one with the best validation perplexity are kept."""
    checkpoint_minutes: float = 10.0
    """Longest time between two checkpoints, in minutes. A killed run loses at most the work of this time."""
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
    fork: bool = False
    """Whether to continue the run in `out` with other values of the settings that control how a stage is trained (lr,
    warmup_updates, clip_norm, dropout, weight_decay, batch_size, sequences_per_update, updates,
    updates_per_mega_batch, extra_updates, cooldown_share, validations, precision, fairseq). They are used from the
    first unfinished stage on, which is started again. Finished stages are kept. The ledger row of that stage, and
    settings.json, record the change."""
    own: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
    """Settings that only the chosen learner has."""

    if_missing: ClassVar[Mapping[str, str]] = {
        "stream": "stream= is missing: give the folder that alma-prep wrote, e.g. stream=streams/books",
        "out": "out= is missing: give the run folder, e.g. out=runs/sm_w1",
    }

    def __post_init__(self) -> None:
        errors = SettingErrors(self.type_errors())
        for check in (
            self._check_updates,
            self._check_optimisation,
            self._check_values,
            self._check_trainee,
            self._check_cooldown,
            self._check_from_scratch,
            self._complete_and_check_own,
        ):
            errors.collect(check)
        errors.raise_all()

    def _check_updates(self) -> None:
        if (self.updates is None) == (self.updates_per_mega_batch is None):
            raise SettingError(
                "give exactly one of updates= (updates per stage) and updates_per_mega_batch= (updates for each "
                f"mega-batch of a stage): now updates={self.updates}, updates_per_mega_batch="
                f"{self.updates_per_mega_batch}. If a preset sets the wrong one, set that one to null"
            )

    def _check_optimisation(self) -> None:
        if not 0 < self.lr < math.inf:
            raise SettingError(f"lr={self.lr} must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"dropout={self.dropout} must be at least 0 and below 1")
        for name in ("clip_norm", "weight_decay"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise SettingError(f"{name}={value} must be a finite number, and not negative")
        if self.lr * self.weight_decay >= 1:
            raise SettingError(
                f"weight_decay={self.weight_decay} must be below 1 / lr = {1 / self.lr:g}: an update multiplies the "
                "parameters by 1 - lr * weight_decay"
            )

    def _check_values(self) -> None:
        for name, mark in (("stream", ":"), ("stream", "${"), ("out", "${")):
            if mark in str(getattr(self, name)):
                raise SettingError(
                    f"{name}={getattr(self, name)}: fairseq cannot use a path that contains {mark} (rename the folder, "
                    f"or give a link to it)"
                )
        check_wait(self.wait, self.wait_ratio)
        if self.replay_memory is not None and self.replay_memory < self.tokens_per_sample:
            raise SettingError(
                f"replay_memory={self.replay_memory} must be at least tokens_per_sample="
                f"{self.tokens_per_sample}, the size of a block"
            )
        if self.share and Path(self.share).absolute() == Path(self.out).absolute():
            raise SettingError(f"share={self.share} is the folder of the run (out=): choose another folder for share=")
        if self.seed >= MAX_SEED:
            raise SettingError(f"seed={self.seed} must be below {MAX_SEED}")
        if self.expert_parallel > self.experts:
            raise SettingError(
                f"expert_parallel={self.expert_parallel} needs at least {self.expert_parallel} experts, but experts="
                f"{self.experts}: lower expert_parallel= or raise experts="
            )
        if not 0 < self.checkpoint_minutes < math.inf:
            raise SettingError(f"checkpoint_minutes={self.checkpoint_minutes} must be a finite number above 0")

    @property
    def keeps_optimizer(self) -> bool:
        """Whether a stage continues the state of the optimizer of the previous stage."""
        return self.optimizer_state == "keep"

    @property
    def keeps_trainee(self) -> bool:
        """Whether a stage continues from another checkpoint than the one that predicts (see `lm/trainee.py`)."""
        return self.average.averages or self.keeps_optimizer or self.schedule == "wsd"

    def _check_trainee(self) -> None:
        """Raise SettingError if the other settings do not allow that training continues from another checkpoint."""
        if not self.keeps_trainee:
            return
        values = {
            "predict_with=average": self.average.averages,
            "optimizer_state=keep": self.keeps_optimizer,
            "schedule=wsd": self.schedule == "wsd",
        }
        given = " ".join(value for value, is_given in values.items() if is_given)
        if self.average.average_window is not None:
            raise SettingError(
                f"average_window={self.average.average_window} is for alma-vision: give average_decay= instead"
            )
        if self.expert_parallel > 1:
            raise SettingError(
                f"{given} cannot be combined with expert_parallel={self.expert_parallel}: leave one of them out"
            )
        if self.learner == "gens":
            raise SettingError(
                f"{given} cannot be used with learner={self.learner}, whose stages train new members and keep the "
                f"others: leave it out"
            )

    def _check_cooldown(self) -> None:
        """Raise SettingError if the settings of the cooldown are invalid."""
        if self.schedule != "wsd":
            if self.cooldown_share is not None:
                raise SettingError(
                    f"cooldown_share={self.cooldown_share} needs schedule=wsd, but schedule={self.schedule}"
                )
            return
        if not 0 < (DEFAULT_COOLDOWN_SHARE if self.cooldown_share is None else self.cooldown_share) < 1:
            raise SettingError(f"cooldown_share={self.cooldown_share} must be above 0 and below 1")
        if (self.updates or self.updates_per_mega_batch) == 1:
            raise SettingError("schedule=wsd needs stages of at least 2 updates: one before the cooldown and one in it")
        if self.average.averages and self.average.average_every == "stage":
            raise SettingError(
                "predict_with=average averages the models after stages, but with schedule=wsd a stage ends with a "
                "cooldown from which the training does not continue: give average_every=update, or leave out "
                "predict_with=average"
            )

    def _check_from_scratch(self) -> None:
        """Raise SettingError if the other settings do not allow stages that start from new weights."""
        if not self.from_scratch:
            return
        if self.keeps_optimizer:
            raise SettingError(
                "from_scratch=true starts each stage from new weights, for which the state of the optimizer in "
                "optimizer_state=keep is of no use: leave one of them out"
            )
        if self.average.averages and self.average.average_every == "stage":
            raise SettingError(
                "predict_with=average averages the models after stages, but with from_scratch=true each stage has a "
                "new model: give average_every=update, or leave one of them out"
            )

    def stream_settings(self, num_mega_batches: int, more_will_follow: bool = False) -> StreamSettings:
        """Return the stream settings: wait, replay, and what happens to the last mega-batches.

        Args:
            num_mega_batches: number of mega-batches that arrive.
            more_will_follow: whether a later run will add more mega-batches.
        """
        last_group = self.last_group or ("wait" if more_will_follow else "train")
        return StreamSettings(num_mega_batches, self.wait, self.replay, last_group, self.wait_ratio, self.replay_memory)

    def updates_of_stage(self, num_mega_batches: int, t: int) -> int:
        """Return the number of updates in a stage.

        Args:
            num_mega_batches: number of mega-batches on which the stage trains.
            t: the arrival at which the stage is trained, counted from 1.
        """
        return self._regular_updates(num_mega_batches) + round(self.extra_updates / t)

    def _regular_updates(self, num_mega_batches: int) -> int:
        if self.updates is not None:
            return self.updates
        # `updates_per_mega_batch` is not None here, because __post_init__ requires that it or `updates` is set.
        assert self.updates_per_mega_batch is not None
        return self.updates_per_mega_batch * num_mega_batches

    def updates_before_cooldown(self, updates: int) -> int | None:
        """Return how many of the `updates` updates of a stage come before the cooldown; None if there is no cooldown.

        At least one update comes before the cooldown, and at least one is in it.
        """
        if self.schedule != "wsd":
            return None
        share = DEFAULT_COOLDOWN_SHARE if self.cooldown_share is None else self.cooldown_share
        return max(1, min(updates - 1, updates - round(share * updates)))

    def warmup_of_stage(self, updates: int) -> int:
        """Return the number of warm-up updates in a stage with `updates` updates."""
        return min(4000, updates // 20) if self.warmup_updates is None else self.warmup_updates

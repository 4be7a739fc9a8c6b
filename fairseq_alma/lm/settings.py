"""Settings of alma-lm that all learners have.

The settings that only one learner has are in `fairseq_alma.core.learner_settings`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fairseq_alma.app.plugins import plugin_digest
from fairseq_alma.core.catalogue import Program, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import LastGroup, StreamSettings
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative, SettingErrors, setting
from fairseq_alma.core.waiting import Wait, check_wait

Precision = Literal["auto", "float32", "bfloat16"]
"""Value of the setting `precision`."""
CLIP_NORM = 1.0
"""Maximum gradient norm. Larger gradients are scaled down. The paper does not state it."""


@dataclass(frozen=True)
class LanguageModelSettings(RunSettings):
    """All settings of `alma-lm`. For several seeds, `alma-lm` makes several runs, each with one seed."""

    program: ClassVar[Program] = "language model"

    stream: str = setting(free=True)
    """The stream folder that alma-prep wrote."""
    out: str = setting(free=True)
    """The run folder."""
    learner: str = "sm"
    """Name of the learner."""
    wait: Wait = setting(1, with_wait=True)
    """Number of mega-batches that are gathered before each stage, w; `geometric:R` (a stage waits for R times as many
    mega-batches as all earlier stages have trained on; `geometric` means R = 0.5, so that stages are trained at
    arrivals 1, 2, 3, 5, 8, 12, 18, ...); `auto` (the same, with a ratio that follows from the validation perplexities
    of the run so far); or a list of the arrivals at which stages are trained, such as `[1,3,4]`."""
    replay: Replay = False
    """Replay of earlier mega-batches: `false` (none), `all` (a stage also trains on all earlier mega-batches),
    `uniform`, `auto`, or a number between 0 and 1 (the share of each batch that comes from earlier mega-batches). With
    `uniform`, the share grows, so that all mega-batches that have arrived have equal parts in each batch if they have
    equal sizes. With `auto`, it is 0.5, but more if a stage would still read its new text more than 2.5 times: then
    as much as is needed for 2.5 times. With `uniform`, `auto` and a number, the number of updates is the same as
    without replay."""
    last_group: LastGroup | None = setting(None, free=True, off="train")
    """What happens to the last mega-batches if they are fewer than `wait`: `train` (a stage trains on them) or `wait`
    (they wait for the mega-batches that will arrive later). By default `train`, but `wait` if the stream was
    extended or made with --causal, or fewer mega-batches arrive than the stream has, because more will follow."""
    mega_batches: Count | None = setting(None, free=True)
    """Number of mega-batches that arrive, B. By default all mega-batches of the stream."""
    arch: str = setting("switch_lm_base", size=True)
    """Architecture: switch_lm_tiny, switch_lm_base or switch_lm_large, which also set defaults for tokens_per_sample,
    sequences_per_update and lr; or another language model of fairseq, for example transformer_lm_gpt, or of your
    plugin, which is computed in float32."""
    experts: Count = setting(4, size=True)
    """Number of experts in each mixture. For gmoe, the number before the first growth. Only for switch_lm models."""
    parallel: Count | None = setting(None, free=True)
    """Number of members that train at the same time. By default the number of GPUs, or of cores if there is no GPU."""
    expert_parallel: Count = setting(1, free=True)
    """Number of devices over which the experts of each mixture are spread, so that each device stores and trains only
    some of the experts. The number of devices that train a member must be a multiple of it. It does not change the
    checkpoints, and may change when a run is continued. With a given `batch_size`, it does not change the result
    either, apart from rounding."""
    reuse_from: str | None = setting(None, free=True)
    """Folder that runs use to share trained members. A member that another run has already trained in the same way is
    copied from this folder instead of trained again. The folder also keeps the scores of all checkpoints of these runs
    (4 bytes for each token of the validation and test set), so that no checkpoint is scored twice."""
    average: str | None = setting(None, off=None)
    """Predict with an average of the weights after all updates since the model last changed its shape. With `power:P`,
    those after update u have a weight proportional to about u to the power P, so the average is over about the last
    1 / (P + 1) of the updates, however many there are. With `decay:D`, the weight of older weights falls by the factor
    D with each update. By default, the checkpoint with the best validation perplexity predicts."""
    updates: Count | None = setting(None, forkable=True, with_wait=True)
    """Number of optimizer updates of each member in each stage. It does not depend on `wait`. Cannot be combined with
    updates_per_mega_batch."""
    updates_per_mega_batch: Count | None = setting(None, forkable=True, with_wait=True)
    """Number of optimizer updates for each mega-batch of a stage. With replay=all, replayed mega-batches count too.
    Cannot be combined with updates."""
    tokens_per_sample: Count = 512
    """Number of tokens in a sequence."""
    sequences_per_update: Count = setting(192, forkable=True)
    """Number of sequences in an optimizer update."""
    batch_size: Count | None = setting(None, forkable=True)
    """Number of sequences in one forward pass on one device. An update accumulates gradients over several passes if
    necessary. By default, on a GPU the largest number that fits into the memory, and on a CPU at most 4096 tokens."""
    lr: float = setting(5e-4, forkable=True)
    """Maximum learning rate. By default, the learning rate rises linearly from 0 to this value in each stage (warm-up)
    and then falls linearly to 0."""
    optimizer_state: Literal["reset", "keep"] = setting("reset", off="reset")
    """Whether each stage begins with a new state of the optimizer (`reset`; the paper) or continues that of the
    previous stage (`keep`). With `keep`, a stage starts from the last weights of the previous stage, not from its best
    checkpoint, and with schedule=constant there is no warm-up, except in the first stage and after a growth."""
    schedule: Literal["per_stage", "constant"] = setting("per_stage", off="per_stage")
    """Learning rate over the stream: `per_stage` (warm-up, then decay to 0 in each stage; the paper) or `constant`
    (warm-up, then constant)."""
    init_from: str | None = setting(None, off=None)
    """Checkpoint with the weights from which the first stage starts, instead of random ones: a run, whose current model
    counts, a checkpoint of one, or one that alma-import or alma-grow wrote. Its sizes take the place of those of
    `arch`. All members of an ensemble start from it. If the vocabulary of the stream has been grown (`alma-prep
    grow-vocab`), its new symbols get the mean embedding of the old ones that they replace."""
    known_mega_batches: NonNegative = setting(0, off=0)
    """With `init_from`: number of mega-batches at the start of the stream on which its model was trained. They count as
    mega-batches of earlier stages: no stage trains on them as new data, but `replay` reads them."""
    from_scratch: bool = False
    """Whether each stage starts from newly initialised weights."""
    warmup_updates: NonNegative | None = setting(None, forkable=True)
    """Number of warm-up updates in each stage. By default 5% of the updates of the stage, but at most 4000. With
    optimizer_state=keep and schedule=constant, only the first stage, and a stage after a growth, has a warm-up."""
    dropout: float = setting(0.1, forkable=True)
    """Dropout probability."""
    weight_decay: float = setting(0.0, forkable=True, off=0.0)
    """Weight decay of AdamW: before each update, all parameters are multiplied by 1 - learning rate * weight_decay.
    On nine books that were read five times, 0.3 was better than 0 with lr=0.005, and 1 was worse."""
    precision: Precision = setting("auto", forkable=True)
    """Precision of matrix products and attention: `float32`, `bfloat16`, or `auto`. Weights, gradients, optimizer state
    and the log-probabilities of perplexities are always float32. `auto` means bfloat16 on a GPU with
    compute capability 8.0 (A100) or newer and on a CPU with the instructions AMX or AVX512-BF16, and float32 on others.
    A run that is continued keeps the precision with which it was started."""
    compile: Literal["auto"] | bool = setting("auto", forkable=True)
    """Whether to compile the layers of the model with `torch.compile`, which needs a minute at the first time. `auto`
    means yes on a GPU, for stages that are long enough. Compiled layers round, and draw the dropout, in another way."""
    validations: Count = setting(10, forkable=True)
    """Number of validations in each stage, at equal intervals. A checkpoint is written after each validation. Only the
    last checkpoint and the one with the best validation perplexity are kept."""
    checkpoint_minutes: float = setting(10.0, free=True)
    """Longest time between two checkpoints, in minutes. A killed run loses at most the work of this time."""
    keep_states: Count = setting(2, free=True)
    """With `average` and optimizer_state=keep: for how many of the newest stages the checkpoints from which a next
    stage continues are kept. `alma-lm rollback` can take the run back to these stages; without these two settings, to
    all stages."""
    skip_mega_batches: list[Count] | None = setting(None, free=True)
    """Mega-batches that no stage trains on, such as [7]. Those that a stage has used already must be taken back first
    (`alma-lm rollback`). The ledger records what was skipped, so the next commands need not repeat it."""
    gate: float | None = setting(None, free=True)
    """A new predictor replaces the deployed one (predictor.json) only if its perplexity is higher by at most this share
    (0.02 is 2%) on the validation text of earlier periods, or on the validation set if the stream has no periods, and
    on `gate_text`; and not higher on the validation text of the newest periods. Otherwise the command says why and
    exits with status 3. By default, each new predictor is deployed."""
    gate_text: str | None = setting(None, free=True)
    """With `gate`: text file (UTF-8) of yours: one document, or JSON lines. It is read as by `alma-eval --text`."""
    gate_command: str | None = setting(None, free=True)
    """With `gate`: shell command that is run when a predictor is refused. It gets the line of JSON that alma-lm prints
    on its standard input."""
    wandb: str | None = setting(None, free=True)
    """Project of Weights & Biases to which the numbers of the run are sent while it trains."""
    seed: NonNegative = setting(0, seed=True)
    """Seed of the initialisation and of the order of the data. The division of the data into mega-batches depends on a
    separate seed, which was chosen when the stream was made."""
    fairseq: str = setting("", forkable=True)
    """Further options for fairseq-train, written as on its command line. `--criterion`, `--optimizer` and
    `--lr-scheduler` replace ours by another of fairseq or of your plugin."""
    preset: str = setting("paper", free=True)
    """Name of the preset: a YAML file of settings."""
    seeds: Count = setting(1, free=True)
    """Number of runs, with the seeds `seed`, `seed` + 1, ..."""
    plugin: str | None = None
    """Name of a Python module of yours that is imported first, for example one that registers a learner or, with
    fairseq, a model, a criterion, an optimizer or a learning-rate scheduler."""
    fork: bool = setting(False, free=True)
    """Whether to continue the run in `out` with other values of those settings that may change at a fork, as it says
    beside them: they control how a stage is trained. They are used from the first unfinished stage on, which is started
    again. Finished stages are kept. The ledger row of that stage, and settings.json, record the change."""
    learner_settings: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
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
            self._check_warmup,
            self._check_continuation,
            self._complete_and_check_learner_settings,
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
        if not 0 <= self.weight_decay < math.inf:
            raise SettingError(f"weight_decay={self.weight_decay} must be a finite number, and not negative")
        if self.lr * self.weight_decay >= 1:
            raise SettingError(
                f"weight_decay={self.weight_decay} must be below 1 / lr = {1 / self.lr:g}: an update multiplies the "
                "parameters by 1 - lr * weight_decay"
            )

    def _check_warmup(self) -> None:
        """Raise SettingError if a stage of the usual length would end before its warm-up."""
        if self.fork:
            return  # the stages that are left may have no warm-up
        if "--lr-scheduler" in self.fairseq:
            return  # it may warm up over several stages
        updates = self.updates
        if self.updates_per_mega_batch and isinstance(self.wait, int) and self.replay != "all":
            updates = self.updates_per_mega_batch * self.wait  # otherwise the stages differ in length
        if updates and updates < (self.warmup_updates or 0):
            raise SettingError(
                f"warmup_updates={self.warmup_updates} is more than the {updates} updates of a stage, which would end "
                f"before the learning rate reaches lr={self.lr}: lower warmup_updates= or train for more updates"
            )

    def _check_values(self) -> None:
        for name, mark in (("stream", ":"), ("stream", "${"), ("out", "${")):
            if mark in str(getattr(self, name)):
                raise SettingError(
                    f"{name}={getattr(self, name)}: fairseq cannot use a path that contains {mark} (rename the folder, "
                    f"or give a link to it)"
                )
        check_wait(self.wait)
        if self.reuse_from and Path(self.reuse_from).absolute() == Path(self.out).absolute():
            raise SettingError(f"reuse_from={self.reuse_from} is the folder of the run (out=): choose another folder")
        if self.init_from and (self.from_scratch or self.learner == "gens"):
            raise SettingError(
                f"init_from={self.init_from} cannot be combined with "
                f"{'from_scratch=true' if self.from_scratch else 'learner=gens'}, whose stages start from new weights: "
                f"leave one of them out"
            )
        if self.known_mega_batches and not self.init_from:
            raise SettingError(
                f"known_mega_batches={self.known_mega_batches} needs init_from=, the model that was trained on them"
            )
        if self.seed >= MAX_SEED:
            raise SettingError(f"seed={self.seed} must be below {MAX_SEED}")
        if self.expert_parallel > self.experts:
            raise SettingError(
                f"expert_parallel={self.expert_parallel} needs at least {self.expert_parallel} experts, but experts="
                f"{self.experts}: lower expert_parallel= or raise experts="
            )
        if not 0 < self.checkpoint_minutes < math.inf:
            raise SettingError(f"checkpoint_minutes={self.checkpoint_minutes} must be a finite number above 0")

        if self.gate is not None and not 0 <= self.gate < math.inf:
            raise SettingError(
                f"gate={self.gate} must be a finite number, and not negative: 0.02 tolerates a rise of 2%"
            )
        for name in ("gate_text", "gate_command"):
            if self.gate is None and getattr(self, name) is not None:
                raise SettingError(f"{name}= needs gate=: add it, for example gate=0.02, or leave {name}= out")
        if self.gate_text and not Path(self.gate_text).is_file():
            raise SettingError(f"gate_text={self.gate_text} does not exist: give a text file")

    @property
    def keeps_optimizer(self) -> bool:
        """Whether a stage continues the state of the optimizer of the previous stage."""
        return self.optimizer_state == "keep"

    @property
    def keeps_continuation(self) -> bool:
        """Whether a stage continues from another checkpoint than the one that predicts (see `lm/average.py`)."""
        return self.average is not None or self.keeps_optimizer

    @property
    def continuation_settings(self) -> str:
        """The settings because of which `keeps_continuation` is true, for error messages."""
        given = {f"average={self.average}": self.average is not None, "optimizer_state=keep": self.keeps_optimizer}
        return " ".join(text for text, is_given in given.items() if is_given)

    def _check_continuation(self) -> None:
        """Raise SettingError if the other settings do not allow that training continues from another checkpoint."""
        if not self.keeps_continuation:
            return
        _ = self.average_weights  # raises an error if `average` is invalid
        given = self.continuation_settings
        if self.learner == "gens":
            raise SettingError(
                f"{given} cannot be used with learner={self.learner}, whose stages train new members and keep the "
                f"others: leave it out"
            )
        if self.from_scratch and self.keeps_optimizer:
            raise SettingError(
                "from_scratch=true starts each stage from new weights, for which the state of the optimizer in "
                "optimizer_state=keep is of no use: leave one of them out"
            )

    def recorded(self) -> dict[str, Any]:
        """Return what settings.json has of the settings: their values, and the digest of the loaded plugin."""
        paths = {name: getattr(self, name) for name in ("stream", "init_from", "reuse_from", "gate_text")}
        return {
            **self.to_json(),
            **({"plugin_digest": plugin_digest(self.plugin)} if self.plugin else {}),
            # Absolute, for commands that read them and may be called in another folder.
            **{name: str(Path(value).absolute()) for name, value in paths.items() if value},
        }

    def stream_settings(self, num_mega_batches: int, more_will_follow: bool = False) -> StreamSettings:
        """Return the stream settings: wait, replay, and what happens to the last of `num_mega_batches` mega-batches.

        `more_will_follow` says whether a later run will add mega-batches. Raise SettingError if none will follow and
        the wait is longer than the stream.
        """
        if self.last_group is None and not more_will_follow:  # otherwise, what a stage needs may still arrive
            check_wait(self.wait, num_mega_batches)
        last_group = self.last_group or ("wait" if more_will_follow else "train")
        skip = tuple(self.skip_mega_batches or ())
        return StreamSettings(num_mega_batches, self.wait, self.replay, last_group, skip, self.known_mega_batches)

    def updates_of_stage(self, num_mega_batches: int) -> int:
        """Return the number of updates in a stage that trains on `num_mega_batches` mega-batches."""
        if self.updates is not None:
            return self.updates
        # `updates_per_mega_batch` is not None here, because __post_init__ requires that it or `updates` is set.
        assert self.updates_per_mega_batch is not None
        return self.updates_per_mega_batch * num_mega_batches

    def warmup_of_stage(self, updates: int) -> int:
        """Return the number of warm-up updates in a stage with `updates` updates."""
        return min(4000, updates // 20) if self.warmup_updates is None else self.warmup_updates

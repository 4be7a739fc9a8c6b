"""Every setting of a language-model run, checked when it is made."""

import shlex
from dataclasses import MISSING, dataclass, fields

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Settings

FREE_SETTINGS = ("stream", "out", "mega_batches", "preset", "seeds", "parallel", "share", "tensorboard")
"""May differ when a run is continued: where things lie, how far to go, where it runs."""

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
"""fairseq options that a stage sets itself: given through `fairseq=` they would break the protocol, or the count of
devices that the size of an update is computed from."""

TAKEN_FOR_TPU = ("--bf16", "--memory-efficient-bf16", "--tpu")
"""fairseq-train takes bf16 on its command line for a TPU, and fails to import what that needs."""

LEARNER_NAMES = ("sm", "ens", "gens", "gmoe")


@dataclass(frozen=True)
class LanguageModelSettings(Settings):
    """What `alma-lm` runs. One seed: several seeds are several of these."""

    stream: str
    """The stream folder."""
    out: str
    """The run folder."""
    learner: str = "sm"
    wait: int = 1
    """w, in mega-batches."""
    replay: Replay = False
    mega_batches: int | None = None
    """B: how many arrive; all that the stream holds by default."""
    experts: int = 4
    """In each mixture; for gmoe: before the first growth."""
    members: int | None = None
    """ens: how many members."""
    grow_experts: int | list[int] | None = None
    """gmoe: how many experts each growth adds to every mixture. A list says it growth by growth, the first before
    stage 2; its last number holds for all further ones."""
    grow_router: str = "copy"
    """gmoe: "copy" (the paper's) or "tree" (keeps output and loss); see growth.grow_experts."""
    grow_noise: float = 0.01
    """gmoe: of new router rows, relative to the old."""
    parallel: int | None = None
    """Members that train side by side; by default as many as there are GPUs, or cores without any."""
    share: str | None = None
    """A folder in which runs share the stages that they would compute alike (shared_stages.py)."""
    updates: int | None = None
    """Optimizer updates per member in each stage, whatever w."""
    updates_per_mega_batch: int | None = None
    """Times the mega-batches a stage trains on: those gathered, and with replay=all those replayed."""
    arch: str = "switch_lm_base"
    tokens_per_sample: int = 512
    sequences_per_update: int = 192
    batch_size: int = 8
    """Sequences in one forward pass on one device; an update gathers as many passes as it needs."""
    lr: float = 5e-4
    """Highest learning rate of a stage: linear warm-up to it, then linear decay to 0."""
    warmup_updates: int | None = None
    """min(4000, 5% of the stage) by default."""
    dropout: float = 0.1
    clip_norm: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    validations: int = 10
    """Per stage, evenly spread, each with a checkpoint: the best one by validation perplexity is kept."""
    seed: int = 0
    """Of initialisation and order. The partition of the data has its own, in the stream."""
    fairseq: str = ""
    """Further options of fairseq-train, as on its command line."""
    preset: str = "paper"
    seeds: int = 1
    """How many seeds, from `seed` on."""
    tensorboard: bool = True
    """Whether RUN/tensorboard is written while the run goes on."""

    def __post_init__(self):
        if not self.stream:
            raise SettingError("stream= is missing: the folder that alma-prep wrote, e.g. stream=streams/books")
        if (self.updates is None) == (self.updates_per_mega_batch is None):
            raise SettingError(
                "give exactly one of updates= (per stage) and updates_per_mega_batch= (times the mega-batches of "
                f"the stage): now updates={self.updates}, updates_per_mega_batch={self.updates_per_mega_batch}; "
                f"null takes back what a preset gives"
            )
        at_least_one = ("wait", "experts", "updates", "updates_per_mega_batch", "tokens_per_sample", "validations",
                        "seeds", "sequences_per_update", "batch_size", "mega_batches", "members",
                        "parallel")  # fmt: skip
        self.check_whole(*at_least_one, least=1)
        self.check_whole("seed", "warmup_updates", least=0)
        self.check_number("lr", "dropout", "clip_norm", "grow_noise")
        if self.seed >= MAX_SEED:
            raise SettingError(f"seed={self.seed} must lie below {MAX_SEED}")
        self._check_learner()
        if not self.lr > 0:
            raise SettingError(f"lr={self.lr} must be above 0")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"dropout={self.dropout} must lie in [0, 1)")
        if self.clip_norm < 0:
            raise SettingError(f"clip_norm={self.clip_norm} must not be negative")
        if not isinstance(self.tensorboard, bool):
            raise SettingError(f"tensorboard={self.tensorboard!r} must be true or false")
        if not isinstance(self.fairseq, str):
            raise SettingError(f"fairseq={self.fairseq!r} must be options of fairseq-train, e.g. '--weight-decay 0.01'")
        try:
            options = shlex.split(self.fairseq)
        except ValueError as error:
            raise SettingError(f"fairseq={self.fairseq!r} cannot be split into words: {error}") from error
        names = {option.split("=")[0] for option in options}
        if owned := sorted(names & set(OWNED_BY_DRIVER)):
            raise SettingError(f"fairseq={self.fairseq!r}: {', '.join(owned)} is set by alma-lm's own settings")
        if names & set(TAKEN_FOR_TPU):
            raise SettingError(
                f"fairseq={self.fairseq!r}: fairseq-train takes bf16 for a TPU and fails; on a GPU give --fp16"
            )

    def _check_learner(self) -> None:
        if self.learner not in LEARNER_NAMES:
            raise SettingError(f"learner={self.learner!r} is not one of {', '.join(LEARNER_NAMES)}")
        for name, learner in {"members": "ens", "grow_experts": "gmoe"}.items():
            value = getattr(self, name)
            if self.learner == learner and value is None:
                raise SettingError(f"learner={learner} needs {name}=, e.g. {name}=2")
            if self.learner != learner and value is not None:
                raise SettingError(f"{name}={value} is for learner={learner}, not for learner={self.learner}")
        if self.grow_router not in ("copy", "tree"):
            raise SettingError(f"grow_router={self.grow_router!r} is not one of copy, tree")
        if not self.grow_noise > 0:
            raise SettingError(f"grow_noise={self.grow_noise} must be above 0: equal router rows never part")
        if self.grow_experts is None:
            return
        growths = self.grow_experts if isinstance(self.grow_experts, list) else [self.grow_experts]
        if not growths or not all(isinstance(k, int) and not isinstance(k, bool) for k in growths):
            raise SettingError(f"grow_experts={self.grow_experts!r} must be a whole number or a list of them")
        experts = self.experts
        for number, added in enumerate(growths, start=1):
            if added < 0:
                raise SettingError(f"grow_experts={self.grow_experts}: growth adds experts, it never takes any away")
            if added > experts:
                raise SettingError(
                    f"grow_experts={self.grow_experts}: growth {number} is to copy {added} of {experts} experts, "
                    f"and one growth can at most double them"
                )
            experts += added

    def grown_experts(self, stage_index: int) -> int:
        """How many experts growth before stage k >= 2 adds to every mixture."""
        growths = self.grow_experts if isinstance(self.grow_experts, list) else [self.grow_experts]
        return growths[min(stage_index - 2, len(growths) - 1)]

    def stream_settings(self, num_mega_batches: int) -> StreamSettings:
        return StreamSettings(num_mega_batches, self.wait, self.replay)

    def updates_of_stage(self, num_mega_batches: int) -> int:
        """Optimizer updates of a stage that trains on so many mega-batches."""
        return self.updates or self.updates_per_mega_batch * num_mega_batches

    def warmup_of_stage(self, updates: int) -> int:
        return min(4000, updates // 20) if self.warmup_updates is None else self.warmup_updates

    def update_freq(self, num_devices: int) -> int:
        """Forward passes per update on each device.

        Raises:
            SettingError: sequences_per_update cannot be cut evenly.
        """
        passes, remainder = divmod(self.sequences_per_update, self.batch_size * num_devices)
        if remainder or passes == 0:
            raise SettingError(
                f"sequences_per_update={self.sequences_per_update} must be a multiple of batch_size="
                f"{self.batch_size} times {num_devices} device(s): change batch_size="
            )
        return passes


DEFAULTS = {f.name: f.default for f in fields(LanguageModelSettings) if f.default is not MISSING}

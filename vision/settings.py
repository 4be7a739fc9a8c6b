"""Every setting of a vision run, checked when it is made."""

from dataclasses import MISSING, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Settings
from vision.training import SelectBy
from vision.voting import Combine

SplitBy = Literal["validation_loss", "gate_mass"]

FREE_SETTINGS = ("data_root", "out", "preset", "device", "threads", "routing_examples", "keep_stages",
                 "arrivals", "tensorboard")  # fmt: skip
"""May differ when a run is continued: where things lie and where it runs, not what is computed."""

MEGA_BATCHES = {"digits": 20, "mnist": 500, "emnist": 500, "cifar10": 100, "cifar100": 100}
"""B of each dataset, where none is given."""

CONVOLUTIONAL = ("cifar10", "cifar100")
"""Whose learners are made of the VGG; the others of perceptrons."""

CHOICES = {
    "optimizer": ("adadelta", "sgd"),
    "select_by": get_args(SelectBy),
    "combine": get_args(Combine),
    "gens_combine": get_args(Combine),
    "umix": ("mean", "sum"),
    "new_members_from": ("random", "copy"),
    "split_by": get_args(SplitBy),
    "precision": ("float32", "bfloat16"),
    "grow_by": ("parameters", "width"),
}


@dataclass(frozen=True)
class VisionSettings(Settings):
    """What `alma-vision` runs."""

    out: str
    """The run folder."""
    dataset: str = "digits"
    data_root: str = "data"
    """Where the files of a dataset lie, or are put."""
    split: str = "balanced"
    """emnist: which of its splits."""
    learner: str = "sm"
    wait: int = 1
    """w, in mega-batches."""
    replay: Replay = False
    mega_batches: int | None = None
    """B; by default 20 for digits, 500 for mnist and emnist, 100 for cifar."""
    arrivals: int | None = None
    """How many of the B arrive in this run; all by default. The same command with more of them goes on."""
    width: int = 32
    """h, of both hidden layers (of each expert in a mixture); cifar: c, channels of every convolution."""
    epochs: int = 100
    """Of each stage."""
    batch_size: int = 128
    optimizer: str | None = None
    """A new one at each stage; by default adadelta, for cifar sgd."""
    lr: float | None = None
    """By default 1 with adadelta, 0.01 with sgd."""
    momentum: float | None = None
    """sgd's, by default 0.9."""
    nesterov: bool = False
    """sgd's (the original code: gmoe and ff on cifar)."""
    weight_decay: float | None = None
    """sgd's, by default 1e-4."""
    crop_padding: int = 4
    """cifar: training images are cropped at random out of a border of so many pixels, and flipped; 0 does neither."""
    crop_border: float | str = "black"
    """cifar: what the border holds: black, or a number after normalisation (the original code: -1.9)."""
    validation_share: float = 0.1
    """Of each mega-batch, drawn once."""
    select_by: SelectBy = "validation_loss"
    """What makes an epoch the one that is kept."""
    from_scratch: bool = False
    """Whether each stage begins with parameters drawn anew."""
    members: int = 5
    """ens, umix: N."""
    combine: Combine = "probability"
    """ens: what is averaged over members; `vote` is the majority."""
    bagging: bool = False
    """ens: whether each member trains on a bootstrap sample of its own."""
    umix: str = "mean"
    """umix: the mean of the members' logits, or their sum."""
    new_members: int = 1
    """gens, ens_moe: k, at each stage."""
    new_members_from: str = "random"
    """gens, ens_moe: drawn at random, or a copy of the last."""
    gens_combine: Combine = "probability"
    """gens, ens_moe: as `combine`."""
    experts: int = 1
    """Mixtures: in each of them; for those that grow: before the first growth."""
    grow_every: int = 1
    """gmoe, gmoe_flat, ff: stages from one growth to the next."""
    split_by: SplitBy = "validation_loss"
    """gmoe, gmoe_flat: what an expert is charged, the most charged one is split."""
    hard_gates: bool = False
    """Mixtures: one branch at each node alone, drawn in training and the likelier one in testing."""
    grow_ratio: float = 0.25
    """ff: by what share of the first network's parameters each growth adds (grow_by=width: g of the original code)."""
    grow_by: str = "parameters"
    """ff: what grow_ratio counts: parameters (the paper), or width (the original code: c (1 + g t) with growth at
    every stage; with a larger grow_every it grows by the same steps, fewer of them)."""
    grow_depth: int = 0
    """ff: layers that each growth adds before it widens; with grow_by=parameters at most as many as it has room for."""
    candidates: int = 70
    """ff: new units that each layer is offered."""
    cer_from: int = 1
    """The first arrival that CER charges; 0 charges the untrained learner (v1 of the paper)."""
    seed: int = 0
    """The first seed: of data, initialisation and order, unless they are given apart."""
    data_seed: int | None = None
    initialisation_seed: int | None = None
    order_seed: int | None = None
    seeds: int = 1
    """How many seeds, from `seed` on, computed together (ff: one after the other)."""
    device: str = "auto"
    precision: str = "float32"
    """cifar: what convolutions are computed in: float32, or bfloat16, for hardware that has it."""
    threads: int = 1
    """Of the CPU: these networks are too small to share out."""
    tensorboard: bool = True
    """Whether RUN/tensorboard is written while the run goes on."""
    keep_stages: bool = False
    """Whether the networks of every stage stay on disk."""
    routing_examples: int = 2000
    """Mixtures: of how many test examples routing.npz tells the experts; 0 writes none."""
    preset: str = "paper"

    def __post_init__(self):
        from vision.learners import LEARNERS

        if not self.out or not isinstance(self.out, str):
            raise SettingError("out= is missing: the folder of the run, e.g. out=runs/mnist/sm")
        for name in ("dataset", "data_root", "split", "learner", "device"):
            if not isinstance(getattr(self, name), str):
                raise SettingError(f"{name}={getattr(self, name)!r} must be text")
        self._fill_in()
        if self.dataset not in MEGA_BATCHES:
            raise SettingError(f"dataset={self.dataset!r} is not one of {', '.join(MEGA_BATCHES)}")
        if self.learner not in LEARNERS:
            raise SettingError(f"learner={self.learner!r} is not one of {', '.join(LEARNERS)}")
        self.check_whole("mega_batches", "arrivals", "wait", "width", "epochs", "batch_size", "members", "new_members",
                         "experts", "grow_every", "candidates", "seeds", "threads", least=1)  # fmt: skip
        seeds = ("seed", "data_seed", "initialisation_seed", "order_seed")
        self.check_whole(*seeds, "cer_from", "routing_examples", "crop_padding", "grow_depth", least=0)
        if self.grow_depth > (layers := 16 if self.dataset in CONVOLUTIONAL else 2):
            raise SettingError(
                f"grow_depth={self.grow_depth} is more than one new layer after each of the {layers} layers that a "
                f"network on {self.dataset} begins with: give at most {layers}"
            )
        self.check_number("lr", "momentum", "weight_decay", "validation_share", "grow_ratio")
        for name in seeds:
            if (value := getattr(self, name)) is not None and value + self.seeds > MAX_SEED:
                raise SettingError(f"{name}={value} and {self.seeds} seeds from there on must lie below {MAX_SEED}")
        for name in ("bagging", "hard_gates", "from_scratch", "keep_stages", "nesterov", "tensorboard"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"{name}={getattr(self, name)!r} must be true or false")
        if not self.lr > 0:
            raise SettingError(f"lr={self.lr} must be above 0")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise SettingError(
                f"momentum={self.momentum} must lie in [0, 1), weight_decay={self.weight_decay} not below 0"
            )
        if self.optimizer == "adadelta" and (self.momentum or self.weight_decay or self.nesterov):
            raise SettingError("momentum, nesterov and weight_decay are for optimizer=sgd")
        if self.nesterov and not self.momentum:
            raise SettingError("nesterov=true needs momentum=, above 0")
        is_number = isinstance(self.crop_border, int | float) and not isinstance(self.crop_border, bool)
        if self.crop_border != "black" and not (is_number and isfinite(self.crop_border)):
            raise SettingError(f"crop_border={self.crop_border!r} must be black, or a number after normalisation")
        if not self.grow_ratio > 0:
            raise SettingError(f"grow_ratio={self.grow_ratio} must be above 0")
        if not 0 < self.validation_share < 1:
            raise SettingError(f"validation_share={self.validation_share} must lie between 0 and 1")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.cer_from > 1:
            raise SettingError(f"cer_from={self.cer_from} must be 0 or 1")
        if self.routing_examples > 5000:
            raise SettingError(f"routing_examples={self.routing_examples} must be at most 5000")
        if self.learner in ("moe", "ens_moe") and self.experts < 2:
            raise SettingError(f"learner={self.learner} needs experts=, at least 2")
        if self.precision == "bfloat16" and self.dataset not in CONVOLUTIONAL:
            raise SettingError(f"precision=bfloat16 is for {' and '.join(CONVOLUTIONAL)}: perceptrons are in float32")
        if self.from_scratch and self.new_members_from == "copy" and self.learner in ("gens", "ens_moe"):
            raise SettingError("from_scratch=true draws every network anew, new_members_from=copy copies it: give one")
        if self.bagging and self.learner != "ens":
            raise SettingError(f"bagging is for learner=ens, not for learner={self.learner}")
        if self.num_arrivals > self.num_mega_batches:
            raise SettingError(f"arrivals={self.arrivals} must be at most mega_batches={self.num_mega_batches}")
        self.stream_settings()

    def _fill_in(self) -> None:
        """The recipe of the dataset and of the optimizer, where nothing else is said."""
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "sgd" if self.dataset in CONVOLUTIONAL else "adadelta")
        lr, momentum, weight_decay = (1.0, 0.0, 0.0) if self.optimizer == "adadelta" else (0.01, 0.9, 1e-4)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def num_mega_batches(self) -> int:
        """B."""
        return self.mega_batches or MEGA_BATCHES[self.dataset]

    @property
    def num_arrivals(self) -> int:
        """How many of them arrive."""
        return self.arrivals or self.num_mega_batches

    def stream_settings(self) -> StreamSettings:
        """Raises SettingError: wait is larger than B, or a bad replay."""
        return StreamSettings(self.num_arrivals, self.wait, self.replay)

    def of_one_seed(self, number: int) -> "VisionSettings":
        """A run of its own, in a folder of its own, for the seed of that number, from 0."""
        names = ("seed", "data_seed", "initialisation_seed", "order_seed")
        own = {name: value + number for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **own, seeds=1, out=str(Path(self.out) / f"seed_{self.seed + number}"))

    def seed_of(self, purpose: str) -> int:
        """The first seed of "data", "initialisation" or "order" (growth and gates draw as initialisation and order)."""
        name = {"growth": "initialisation", "gates": "order", "order of growth": "order"}.get(purpose, purpose)
        own = getattr(self, f"{name}_seed")
        return self.seed if own is None else own


DEFAULTS = {f.name: f.default for f in fields(VisionSettings) if f.default is not MISSING}

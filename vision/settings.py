"""Settings of a vision run: those of every run. The settings of each learner are in `fairseq_alma.core.catalogue`."""

from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import ClassVar, Literal

from fairseq_alma.core.catalogue import DEFAULT_MEGA_BATCHES, Half, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative, Settings

SelectBy = Literal["validation_loss", "validation_accuracy"]
"""What decides which epoch of a stage is kept."""

CONVOLUTIONAL = ("cifar10", "cifar100")
"""Datasets whose learners use the reduced VGG19. The learners of all others use perceptrons."""


@dataclass(frozen=True)
class RecipeSettings(Settings):
    """How a stage trains."""

    epochs: Count = 100
    """Number of epochs in each stage."""
    batch_size: Count = 128
    """Number of examples in a batch."""
    optimizer: Literal["adadelta", "sgd"] | None = None
    """Optimizer, created anew at each stage. By default `adadelta`, and `sgd` for CIFAR."""
    lr: float | None = None
    """Learning rate. By default 1 for adadelta and 0.01 for sgd."""
    momentum: float | None = None
    """Momentum of sgd. By default 0.9."""
    nesterov: bool = False
    """Whether sgd uses Nesterov momentum (the authors' code: for gMoE and Firefly on CIFAR)."""
    weight_decay: float | None = None
    """Weight decay of sgd. By default 1e-4."""
    crop_padding: NonNegative = 4
    """CIFAR: training images are flipped at random and cropped from an image with a border of this many pixels. 0 turns
    both off."""
    crop_border: float | str = "black"
    """CIFAR: value of the border, `black` or a number after normalisation (the authors' code: -1.9)."""
    select_by: SelectBy = "validation_loss"
    """Which epoch of a stage is kept: that with the lowest `validation_loss` or the highest `validation_accuracy`."""
    from_scratch: bool = False
    """Whether each stage starts from newly initialised parameters."""

    def for_dataset(self, dataset: str) -> "RecipeSettings":
        """Return this recipe with the defaults of a dataset and its optimizer filled in, after checking it.

        Raises:
            SettingError: a value is out of range, or settings of sgd are given for another optimizer.
        """
        optimizer = self.optimizer or ("sgd" if dataset in CONVOLUTIONAL else "adadelta")
        lr, momentum, weight_decay = (1.0, 0.0, 0.0) if optimizer == "adadelta" else (0.01, 0.9, 1e-4)
        recipe = replace(
            self,
            optimizer=optimizer,
            lr=lr if self.lr is None else self.lr,
            momentum=momentum if self.momentum is None else self.momentum,
            weight_decay=weight_decay if self.weight_decay is None else self.weight_decay,
        )
        recipe._check()
        return recipe

    def _check(self) -> None:
        assert self.lr is not None and self.momentum is not None and self.weight_decay is not None
        if not self.lr > 0:
            raise SettingError(f"lr={self.lr} must be above 0")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise SettingError(
                f"momentum={self.momentum} must be at least 0 and below 1, weight_decay={self.weight_decay} not below 0"
            )
        if self.optimizer == "adadelta" and (self.momentum or self.weight_decay or self.nesterov):
            raise SettingError("momentum, nesterov and weight_decay are for optimizer=sgd")
        if self.nesterov and not self.momentum:
            raise SettingError("nesterov=true needs momentum=, above 0")
        is_number = isinstance(self.crop_border, int | float) and not isinstance(self.crop_border, bool)
        if self.crop_border != "black" and not (is_number and isfinite(self.crop_border)):  # type: ignore[arg-type]
            raise SettingError(f"crop_border={self.crop_border!r} must be black, or a number after normalisation")


@dataclass(frozen=True)
class SeedSettings(Settings):
    """Which seeds a run uses."""

    seed: NonNegative = 0
    """First seed: of the partition of the data, the initialisation and the order of examples."""
    data_seed: NonNegative | None = None
    """Seed of the partition of the data. By default `seed`."""
    initialisation_seed: NonNegative | None = None
    """Seed of the initial parameters. By default `seed`."""
    order_seed: NonNegative | None = None
    """Seed of the order of training examples. By default `seed`."""
    seeds: Count = 1
    """Number of seeds, counted from `seed`. They are computed together (ff: one after another)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self._first_seeds().items():
            if value + self.seeds > MAX_SEED:
                raise SettingError(f"{name}={value} and {self.seeds} seeds from there on must be below {MAX_SEED}")

    def _first_seeds(self) -> dict[str, int]:
        names = ("seed", "data_seed", "initialisation_seed", "order_seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def one_seed(self, number: int) -> "SeedSettings":
        """Return the settings of a run of one seed, the one with this number (counted from 0)."""
        return replace(self, **{name: value + number for name, value in self._first_seeds().items()}, seeds=1)

    def first(self, purpose: str) -> int:
        """Return the first seed for "data", "initialisation" or "order".

        Growth uses the seed of the initialisation; gates and the order of growth use the seed of the order.
        """
        name = {"growth": "initialisation", "gates": "order", "order of growth": "order"}.get(purpose, purpose)
        own = getattr(self, f"{name}_seed")
        return self.seed if own is None else own


@dataclass(frozen=True)
class VisionSettings(RunSettings):
    """All settings of `alma-vision`."""

    half: ClassVar[Half] = "vision"

    out: str
    """The run folder."""
    dataset: str = "digits"
    """Name of the dataset: digits, mnist, emnist, cifar10 or cifar100."""
    data_root: str = "data"
    """Folder that contains the dataset's files, or to which they are downloaded."""
    split: str = "balanced"
    """EMNIST: name of the split."""
    learner: str = "sm"
    """Name of the learner."""
    wait: Count = 1
    """Number of mega-batches that are gathered before each stage, w."""
    replay: Replay = False
    """What a stage uses of earlier mega-batches: `false` (nothing), `all` (everything), or a number between 0 and 1:
    the share of each batch."""
    mega_batches: Count | None = None
    """Number of mega-batches in the stream, B. By default 20 for digits, 500 for MNIST and EMNIST, 100 for CIFAR."""
    arrivals: Count | None = None
    """Number of mega-batches that arrive in this run. By default all B. With a larger number the run continues."""
    width: Count = 32
    """Units of each hidden layer, h (in a mixture: of each expert). CIFAR: channels of each convolution, c."""
    recipe: RecipeSettings = RecipeSettings()
    validation_share: float = 0.1
    """Share of each mega-batch that is held out for validation, drawn once."""
    cer_from: Literal[0, 1] = 1
    """First arrival that counts for CER: 1, or 0 to count the untrained learner (version 1 of the paper)."""
    seeding: SeedSettings = SeedSettings()
    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu or cuda."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """CIFAR: data type in which convolutions are computed. bfloat16 is fast only on hardware that supports it."""
    threads: Count = 1
    """Number of CPU threads. These networks are too small to gain from more than one."""
    tensorboard: bool = True
    """Whether to write RUN/tensorboard while the run progresses."""
    keep_stages: bool = False
    """Whether to keep the networks of every stage on disk."""
    routing_examples: NonNegative = 2000
    """Mixtures: number of test images in routing.npz, which stores the expert of each image. 0 writes no file."""
    preset: str = "paper"
    """Name of the preset: a YAML file of settings."""
    plugin: str | None = None
    """Python module of your own that is imported first, for example one that registers a learner."""
    own: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
    """Settings that belong to the learner."""

    def __post_init__(self) -> None:
        if not self.out or not isinstance(self.out, str):
            raise SettingError("out= is missing: the folder of the run, e.g. out=runs/mnist/sm")
        super().__post_init__()
        if self.dataset not in DEFAULT_MEGA_BATCHES:
            raise SettingError(f"dataset={self.dataset!r} is not one of {', '.join(DEFAULT_MEGA_BATCHES)}")
        object.__setattr__(self, "recipe", self.recipe.for_dataset(self.dataset))
        if not 0 < self.validation_share < 1:
            raise SettingError(f"validation_share={self.validation_share} must be between 0 and 1")
        if self.routing_examples > 5000:
            raise SettingError(f"routing_examples={self.routing_examples} must be at most 5000")
        if self.precision == "bfloat16" and self.dataset not in CONVOLUTIONAL:
            raise SettingError(f"precision=bfloat16 is for {' and '.join(CONVOLUTIONAL)}: perceptrons use float32")
        if self.num_arrivals > self.num_mega_batches:
            raise SettingError(f"arrivals={self.arrivals} must be at most mega_batches={self.num_mega_batches}")
        self.stream_settings()
        self._complete_and_check_own()

    @property
    def num_mega_batches(self) -> int:
        """Number of mega-batches in the stream, B."""
        return self.mega_batches or DEFAULT_MEGA_BATCHES[self.dataset]

    @property
    def num_arrivals(self) -> int:
        """Number of mega-batches that arrive in this run."""
        return self.arrivals or self.num_mega_batches

    @property
    def num_layers(self) -> int:
        """Number of hidden layers of the first network."""
        return 16 if self.dataset in CONVOLUTIONAL else 2

    def stream_settings(self) -> StreamSettings:
        """Return how the learner meets the stream.

        Raises:
            SettingError: wait is larger than the number of arrivals, or replay has no meaning.
        """
        return StreamSettings(self.num_arrivals, self.wait, self.replay)

    def of_one_seed(self, number: int) -> "VisionSettings":
        """Return the settings of a run of one seed, in its own folder. Seeds are numbered from 0."""
        seeding = self.seeding.one_seed(number)
        return replace(self, seeding=seeding, out=str(Path(self.out) / f"seed_{seeding.seed}"))

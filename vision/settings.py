"""Settings that all runs of alma-vision have. `fairseq_alma.core.learner_settings` has the settings of each learner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from fairseq_alma.core.averaging import AverageSettings
from fairseq_alma.core.catalogue import Half, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import LastGroup, Replay, StreamSettings
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative, SettingErrors, Settings
from fairseq_alma.core.waiting import Wait
from vision.dataset_names import check_order, default_backbone, default_mega_batches, is_function, kind_of
from vision.recipe import RecipeSettings


@dataclass(frozen=True)
class SeedSettings(Settings):
    """Random seeds of a run."""

    seed: NonNegative = 0
    """Random seed. It determines how data are cut into mega-batches, the initial parameters and the order of training
    examples. If `seeds` is above 1, this is the first of the seeds."""
    data_seed: NonNegative | None = None
    """Random seed for cutting the data into mega-batches. By default equal to `seed`. If `seeds` is above 1, this is
    the first of several seeds."""
    initialisation_seed: NonNegative | None = None
    """Random seed of the initial parameters. By default equal to `seed`. If `seeds` is above 1, this is the first of
    several seeds."""
    order_seed: NonNegative | None = None
    """Random seed of the order of training examples. By default equal to `seed`. If `seeds` is above 1, this is the
    first of several seeds."""
    seeds: Count = 1
    """Number of seeds. The run uses the seeds `seed`, `seed` + 1, and so on. All seeds are trained at once. Exception:
    with learner=ff, they are trained one after another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self._first_seeds().items():
            if value + self.seeds > MAX_SEED:
                raise SettingError(f"{name}={value} with seeds={self.seeds}: all seeds must be below {MAX_SEED}")

    def _first_seeds(self) -> dict[str, int]:
        """Return the seed settings that are not None, as name -> value."""
        names = ("seed", "data_seed", "initialisation_seed", "order_seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def one_seed(self, number: int) -> "SeedSettings":
        """Return a copy of these settings for a run of only one of the seeds.

        Args:
            number: index of the seed, counted from 0: the copy has the seed `seed` + `number`.
        """
        return replace(self, **{name: value + number for name, value in self._first_seeds().items()}, seeds=1)

    def first(self, purpose: str) -> int:
        """Return the random seed of the first run for a purpose, for example for the initial parameters.

        There is one run per seed, so `seeds` runs. Run number i, counted from 0, uses the returned value plus i.

        The table shows, for each purpose, the setting that determines the random seed. If this setting is None, the
        setting `seed` is used instead.

        purpose                               setting
        "data"                                data_seed
        "initialisation", "growth"            initialisation_seed
        "order", "gates", "order of growth",  order_seed
        "modules"
        """
        same_as = {"growth": "initialisation"} | dict.fromkeys(("gates", "order of growth", "modules"), "order")
        name = same_as.get(purpose, purpose)
        own = getattr(self, f"{name}_seed")
        return self.seed if own is None else own


@dataclass(frozen=True)
class VisionSettings(RunSettings):
    """All settings of `alma-vision`."""

    half: ClassVar[Half] = "vision"

    out: str
    """The run folder."""
    dataset: str = "digits"
    """The dataset: digits, mnist, emnist, cifar10 or cifar100; the path of a folder of images (train/CLASS/IMAGE and
    test/CLASS/IMAGE, or CLASS/IMAGE) or of a .npz file; a class of torchvision, such as FashionMNIST; hf:NAME for a
    dataset of Hugging Face; or MODULE:FUNCTION, a function of yours that returns a Dataset."""
    data_root: str = "data"
    """Folder that contains the dataset's files. Missing files are downloaded to it. The decoded images of a folder of
    images are stored in its subfolder image_cache."""
    image_size: Count | None = None
    """Height and width in pixels to which all images are resized: each image is scaled until its shorter side has this
    size, and the square in its middle is cut out. By default, images keep their size, which must be equal for all."""
    transform: str | None = None
    """MODULE:FUNCTION, a function of yours from the shape (channels, height, width) to a transform of training images,
    such as one of torchvision.transforms.v2. It replaces the crop and flip. By default, there is no transform."""
    split: str = "balanced"
    """EMNIST: variant of the dataset, called split by EMNIST: balanced, letters, digits, mnist, byclass or bymerge."""
    learner: str = "sm"
    """Name of the learner."""
    wait: Wait = 1
    """Wait, w: the number of mega-batches that are gathered before a stage is trained; `geometric` (a stage waits for
    `wait_ratio` times as many mega-batches as all earlier stages have trained on); or `auto` (the same, with a ratio
    that follows from the prequential error rates of the run so far)."""
    wait_ratio: float | None = None
    """wait=geometric: the ratio. By default 0.5, so that stages are trained at arrivals 1, 2, 3, 5, 8, 12, 18, ..."""
    replay: Replay = False
    """Whether a stage also trains on earlier mega-batches: `false` (no), `all` (on all of them), `uniform`, or a number
    between 0 and 1, which is the share of each batch that comes from earlier mega-batches. With `uniform`, the share
    grows, so that all mega-batches that have arrived have equal parts in each batch if they have equal sizes. With
    `uniform` and a number, the number of updates is the same as without replay."""
    replay_memory: Count | None = None
    """replay=uniform or a share: largest number of examples of earlier mega-batches that are kept, for training and
    validation together. They are a random sample. By default, all are kept."""
    last_group: LastGroup | None = None
    """What happens to the last mega-batches if they are fewer than `wait`: `train` (a stage trains on them) or `wait`
    (they wait for the mega-batches that will arrive later). By default `train`, but `wait` if fewer
    mega-batches arrive than the stream has (`arrivals` below `mega_batches`), because more will follow."""
    mega_batches: Count | None = None
    """Number of mega-batches in the stream, B. By default 20 for digits, 500 for MNIST and EMNIST, 100 for CIFAR, and
    the number of folders with order=folders. Other datasets have no default."""
    order: str = "random"
    """Order in which examples arrive: `random`; `classes` (class after class, so each mega-batch has few classes);
    `column:NAME` (by a value of each example, such as a date); or `folders` (each folder in train/ is a mega-batch).
    Within a mega-batch, the order is random."""
    drift_overlap: float = 0.0
    """How far mega-batches mix with their neighbours, in mega-batches: the position of each example in the stream is
    moved at random by at most this much. Sizes do not change. Only for an order other than `random`."""
    arrivals: Count | None = None
    """Number of mega-batches that arrive in this run. By default, all B mega-batches of the stream arrive. A
    finished run can be continued with a larger number."""
    backbone: str | None = None
    """Network: `mlp` (a perceptron with two hidden layers), `vgg` (the reduced VGG19), `resnet20`, a network that a
    plugin registers, or a function of yours as `package.module:function`, for example `torchvision.models:resnet18`. By
    default `vgg` for CIFAR and `mlp` for digits, MNIST and EMNIST, as in the paper."""
    width: Count = 32
    """Width of the network. For mlp, the number of units in each hidden layer, h; in a mixture, this is the number of
    hidden units of each expert. For vgg, the number of channels of each convolution, c. For resnet20, the number of
    channels of the first convolution. A function of yours gets it if it has an argument `width`."""
    recipe: RecipeSettings = field(default_factory=RecipeSettings)
    average: AverageSettings = field(default_factory=AverageSettings)
    validation_share: float = 0.1
    """Share of each mega-batch that is held out for validation. These examples are never used for training."""
    cer_from: Literal[0, 1] = 1
    """First arrival that counts for CER, the cumulative error rate. 0 includes the untrained learner (version 1 of the
    paper)."""
    seeding: SeedSettings = SeedSettings()
    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu or cuda."""
    precision: Literal["float32", "bfloat16", "tf32"] = "float32"
    """Networks other than mlp: data type of their computation (torch.autocast). bfloat16 is fast only on hardware that
    supports it. tf32 is float32 with the reduced precision of a GPU's tensor cores."""
    cuda_graphs: bool = False
    """Networks other than mlp, on a GPU: whether to record each training step as a CUDA graph, which a GPU starts as
    one operation. It saves time if the network is small."""
    threads: Count = 1
    """Number of CPU threads. More than one thread does not make the training faster, because the networks are small."""
    tensorboard: bool = True
    """Whether to write TensorBoard logs to RUN/tensorboard during the run."""
    keep_stages: bool = False
    """Whether to keep the networks of every stage on disk. Otherwise, only those that are still needed are kept."""
    routing_examples: NonNegative = 2000
    """Mixtures: number of test images in routing.npz, a file that says which experts each image uses. With
    0, this file is not written."""
    error_matrix: bool | None = None
    """Whether to write RUN/errors.jsonl, the error rate on the validation data of each mega-batch and on the test
    images of each class, after each stage. Forgetting and transfer are computed from it. It costs a pass over the
    validation data of all mega-batches after each stage. By default true if the stream drifts, otherwise false."""
    preset: str = "paper"
    """Name of the preset: a YAML file of settings."""
    plugin: str | None = None
    """Name of a Python module of yours that is imported first, for example one that registers a learner."""
    own: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
    """Settings that only the chosen learner has. If `own` is None, these settings get their default values."""

    if_missing: ClassVar[Mapping[str, str]] = {"out": "out= is missing: give the run folder, e.g. out=runs/mnist/sm"}

    def __post_init__(self) -> None:
        errors = SettingErrors(self.type_errors())
        for check in (
            lambda: kind_of(self.dataset),
            lambda: check_order(self.order, self.drift_overlap),
            lambda: object.__setattr__(self, "recipe", self.recipe.for_network(self.network)),
            self._check_values,
            self.stream_settings,
            self._complete_and_check_own,
        ):
            errors.collect(check)
        errors.raise_all()

    def _check_values(self) -> None:
        if self.transform is not None and not is_function(self.transform):
            raise SettingError(
                f"transform={self.transform!r} must have the form MODULE:FUNCTION, for example transform=mine:transform"
            )
        if not 0 < self.validation_share < 1:
            raise SettingError(f"validation_share={self.validation_share} must be above 0 and below 1")
        if self.routing_examples > 5000:
            raise SettingError(f"routing_examples={self.routing_examples} must be at most 5000")
        if self.precision != "float32" and self.network == "mlp":
            raise SettingError(
                f"precision={self.precision} cannot be used with backbone=mlp, whose gradients are computed in float32 "
                f"only: give precision=float32, or another backbone"
            )
        if self.cuda_graphs and self.network == "mlp":
            raise SettingError("cuda_graphs=true cannot be used with backbone=mlp: give cuda_graphs=false")
        if self.num_arrivals > self.num_mega_batches:
            raise SettingError(f"arrivals={self.arrivals} must be at most mega_batches={self.num_mega_batches}")
        if self.replay_memory is not None and self.replay_memory < 2:
            raise SettingError(
                f"replay_memory={self.replay_memory} must be at least 2: one for training, one for validation"
            )
        if self.average.averages and self.average.average_every == "update" and self.recipe.patience is not None:
            raise SettingError("average_every=update cannot be combined with patience=: leave one of them out")
        if self.average.averages and self.average.average_every == "stage" and self.recipe.from_scratch:
            raise SettingError(
                "predict_with=average averages the parameters of stages, but with from_scratch=true each stage has a "
                "new network: leave one of them out, or give average_every=update"
            )

    @property
    def num_mega_batches(self) -> int:
        """Number of mega-batches in the stream, B."""
        return self.mega_batches or default_mega_batches(self.dataset, self.order)

    @property
    def num_arrivals(self) -> int:
        """Number of mega-batches that arrive in this run. It is at most B."""
        return self.arrivals or self.num_mega_batches

    @property
    def network(self) -> str:
        """Name of the network: the setting `backbone`, or the dataset's default network."""
        return self.backbone or default_backbone(self.dataset)

    @property
    def num_layers(self) -> int | None:
        """Number of hidden layers of a network before any growth. None for a network that is not one of the paper's."""
        return {"mlp": 2, "vgg": 16}.get(self.network)

    @property
    def has_error_matrix(self) -> bool:
        """Whether the run writes errors.jsonl."""
        if self.error_matrix is None:
            return self.order != "random"
        return self.error_matrix

    def stream_settings(self) -> StreamSettings:
        """Return the stream settings: number of mega-batches that arrive, wait and replay.

        Raises:
            SettingError: if wait is larger than the number of mega-batches that arrive, or if replay is invalid.
        """
        last_group = self.last_group or ("wait" if self.num_arrivals < self.num_mega_batches else "train")
        return StreamSettings(
            self.num_arrivals, self.wait, self.replay, last_group, self.wait_ratio, self.replay_memory
        )

    def of_one_seed(self, number: int) -> "VisionSettings":
        """Return a copy of these settings for a run of only one of the seeds, in the subfolder seed_SEED of `out`.

        Args:
            number: index of the seed, counted from 0.
        """
        seeding = self.seeding.one_seed(number)
        return replace(self, seeding=seeding, out=str(Path(self.out) / f"seed_{seeding.seed}"))

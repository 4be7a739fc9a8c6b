"""Settings that all runs of alma-vision have. `fairseq_alma.core.learner_settings` has the settings of each learner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import ClassVar, Literal

from fairseq_alma.core.catalogue import Program, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.protocol import LastGroup, StreamSettings
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import MAX_SEED, Count, NonNegative, SettingErrors, setting
from fairseq_alma.core.waiting import Wait, check_wait
from vision.dataset_names import check_order, default_backbone, default_mega_batches, is_function, kind_of

VALIDATION_SHARE = 0.1
"""Share of each mega-batch that is held out for validation (the paper). These examples are never used for training."""

SelectBy = Literal["validation_loss", "validation_accuracy", "last"]
"""The measure that selects the best epoch of a stage, or "last" for the last epoch."""

OptimizerName = Literal["adadelta", "sgd", "nesterov", "adam", "adamw"]
"""Names of optimizers. Each computes every parameter separately, so it can update all networks as one tensor."""

_OPTIMIZER_DEFAULTS = {
    "adadelta": (1.0, 0.0), "sgd": (0.01, 1e-4), "nesterov": (0.01, 1e-4), "adam": (1e-3, 0.0), "adamw": (1e-3, 0.01)
}  # fmt: skip
"""Default learning rate and weight decay of each optimizer: of the paper, for Adam and AdamW of torch."""


@dataclass(frozen=True)
class VisionSettings(RunSettings):
    """All settings of `alma-vision`."""

    program: ClassVar[Program] = "vision"

    out: str = setting(free=True)
    """The run folder."""
    dataset: str = "digits"
    """The dataset: digits, mnist, emnist (also emnist_letters, emnist_digits, emnist_mnist, emnist_byclass and
    emnist_bymerge), cifar10 or cifar100; the path of a folder of images (train/CLASS/IMAGE and test/CLASS/IMAGE, or
    CLASS/IMAGE) or of a .npz file; a class of torchvision, such as FashionMNIST; hf:NAME for a dataset of Hugging Face;
    or MODULE:FUNCTION, a function of yours that returns a Dataset."""
    data_root: str = setting("data", free=True)
    """Folder that contains the dataset's files. Missing files are downloaded to it. The decoded images of a folder of
    images are stored in its subfolder image_cache."""
    image_size: Count | None = None
    """Height and width in pixels to which all images are resized: each image is scaled until its shorter side has this
    size, and the square in its middle is cut out. By default, images keep their size, which must be equal for all."""
    transform: str | None = None
    """MODULE:FUNCTION, a function of yours from the shape (channels, height, width) to a transform of training images,
    such as one of torchvision.transforms.v2. It replaces the crop and flip. By default, there is no transform."""
    learner: str = "sm"
    """Name of the learner."""
    wait: Wait = setting(1, with_wait=True)
    """Wait, w: the number of mega-batches that are gathered before a stage is trained; `geometric:R` (a stage waits for
    R times as many mega-batches as all earlier stages have trained on; `geometric` means R = 0.5, so that stages are
    trained at arrivals 1, 2, 3, 5, 8, 12, 18, ...); `auto` (the same, with a ratio that follows from the prequential
    error rates of the run so far); or a list of the arrivals at which stages are trained, such as `[1,3,4]`."""
    replay: Replay = False
    """Whether a stage also trains on earlier mega-batches: `false` (no), `all` (on all of them), `uniform`, or a number
    between 0 and 1, which is the share of each batch that comes from earlier mega-batches. With `uniform`, the share
    grows, so that all mega-batches that have arrived have equal parts in each batch if they have equal sizes. With
    `uniform` and a number, the number of updates is the same as without replay."""
    last_group: LastGroup | None = setting(None, free=True, off="train")
    """What happens to the last mega-batches if they are fewer than `wait`: `train` (a stage trains on them) or `wait`
    (they wait for the mega-batches that will arrive later). By default `train`, but `wait` if fewer
    mega-batches arrive than the stream has (`arrivals` below `mega_batches`), because more will follow."""
    mega_batches: Count | None = None
    """Number of mega-batches in the stream, B. By default 20 for digits, 500 for MNIST and EMNIST, 100 for CIFAR, and
    the number of folders with order=folders. Other datasets have no default."""
    order: str = "random"
    """Order in which examples arrive: `random`; `classes` (class after class, so each mega-batch has few classes);
    `column:NAME` (by a value of each example, such as a date); or `folders` (each folder in train/ is a mega-batch).
    Within a mega-batch, the order is random. With each order but `random`, the run also writes RUN/errors.jsonl, the
    error rate on each mega-batch and each class after each stage, from which forgetting and transfer are computed."""
    arrivals: Count | None = setting(None, free=True)
    """Number of mega-batches that arrive in this run. By default, all B mega-batches of the stream arrive. A
    finished run can be continued with a larger number."""
    backbone: str | None = None
    """Network: `mlp` (a perceptron with two hidden layers), `vgg` (the reduced VGG19), `resnet20`, a network that a
    plugin registers, or a function of yours as `package.module:function`, for example `torchvision.models:resnet18`. By
    default `vgg` for CIFAR and `mlp` for digits, MNIST and EMNIST, as in the paper."""
    width: Count = setting(32, size=True)
    """Width of the network. For mlp, the number of units in each hidden layer, h; in a mixture, this is the number of
    hidden units of each expert. For vgg, the number of channels of each convolution, c. For resnet20, the number of
    channels of the first convolution. A function of yours gets it if it has an argument `width`."""
    average: str | None = setting(None, off=None)
    """Predict with an average of the parameters after all stages since the network last changed its shape. With
    `power:P`, those after stage k have a weight proportional to about k to the power P, so the average is over about
    the last 1 / (P + 1) of the stages, however many there are. With `decay:D`, the weight of older parameters falls by
    the factor D with each stage. By default, the last parameters predict."""
    select_by: SelectBy = setting("validation_loss", off="validation_loss")
    """Measure that selects the best epoch of a stage: lowest `validation_loss` or highest `validation_accuracy`. The
    stage ends with the parameters of the best epoch. With `last`, it ends with those of the last epoch, and the epochs
    before are not validated."""
    epochs: Count = 100
    """Number of epochs in each stage."""
    extra_epochs: NonNegative = setting(0, off=0)
    """Further epochs of early stages: the stage at arrival t has `epochs` + `extra_epochs` / t epochs, rounded. A
    network that has seen little data needs more passes over them."""
    batch_size: Count = 128
    """Number of examples in a batch."""
    optimizer: OptimizerName | None = None
    """Optimizer: `adadelta`, `sgd` (with momentum 0.9), `nesterov` (the same with Nesterov momentum, which the authors'
    code uses for gMoE and Firefly on CIFAR), `adam` or `adamw`. By default `adadelta` for backbone=mlp and `sgd` for
    all other networks, as in the paper. Each stage starts with a new optimizer state."""
    lr: float | None = None
    """Learning rate. By default 1 for adadelta, 0.01 for sgd and nesterov, and 0.001 for adam and adamw."""
    weight_decay: float | None = None
    """Weight decay. By default 1e-4 for sgd and nesterov, 0 for adam, and 0.01 for adamw. adadelta has none."""
    label_smoothing: float = setting(0.0, off=0.0)
    """Label smoothing: share of the probability of each training label that is spread evenly over all classes (Szegedy
    et al. 2016), as `label_smoothing` of torch.nn.CrossEntropyLoss. Validation losses are computed without it."""
    schedule: Literal["constant", "cosine"] = setting("constant", off="constant")
    """How the learning rate changes within a stage: not at all, or by `cosine` decay to 0."""
    patience: Count | None = None
    """Early stopping: a network's training ends after this number of epochs without an improvement of its validation
    score. By default, all epochs are trained. The authors' code has this setting, too."""
    crop_padding: NonNegative = 4
    """Networks for images: width in pixels of the border that is added to training images before they are cropped at
    random. Images are also flipped at random. With 0, images are neither cropped nor flipped."""
    crop_border: float | str = "black"
    """Networks for images: value of the border pixels, either `black` or a number (a pixel value after normalisation).
    The authors' code uses -1.9."""
    from_scratch: bool = False
    """Whether each stage starts from newly initialised parameters."""
    cer_from: Literal[0, 1] = 1
    """First arrival that counts for CER, the cumulative error rate. 0 includes the untrained learner (version 1 of the
    paper)."""
    seed: NonNegative = setting(0, seed=True)
    """Random seed. It determines how data are cut into mega-batches, the initial parameters and the order of training
    examples. If `seeds` is above 1, this is the first of the seeds."""
    seeds: Count = 1
    """Number of seeds. The run uses the seeds `seed`, `seed` + 1, and so on. All seeds are trained at once. Exception:
    with learner=ff, they are trained one after another."""
    device: str = setting("auto", free=True)
    """Device: auto (a GPU if there is one), cpu or cuda."""
    wandb: str | None = setting(None, free=True)
    """Project of Weights & Biases to which the numbers of the run are sent while it trains."""
    precision: Literal["float32", "bfloat16", "tf32"] = "float32"
    """Networks other than mlp: data type of their computation (torch.autocast). bfloat16 is fast only on hardware that
    supports it. tf32 is float32 with the reduced precision of a GPU's tensor cores."""
    cuda_graphs: Literal["auto"] | bool = setting("auto", free=True)
    """Networks other than mlp, on a GPU: whether to record each training step as a CUDA graph, which a GPU starts as
    one operation. It saves time if the network is small. `auto` records the steps of `vgg` and `resnet20` in stages of
    at least 100 updates, except with hard gates."""
    keep_stages: bool = setting(False, free=True)
    """Whether to keep the networks of every stage on disk. Otherwise, only those that are still needed are kept."""
    preset: str = setting("paper", free=True)
    """Name of the preset: a YAML file of settings."""
    plugin: str | None = None
    """Name of a Python module of yours that is imported first, for example one that registers a learner."""
    learner_settings: LearnerSettings | None = field(default=None, metadata={"is_setting": False})
    """Settings that only the chosen learner has. If this is None, they get their default values."""

    if_missing: ClassVar[Mapping[str, str]] = {"out": "out= is missing: give the run folder, e.g. out=runs/mnist/sm"}

    def __post_init__(self) -> None:
        errors = SettingErrors(self.type_errors())
        for check in (
            lambda: kind_of(self.dataset),
            lambda: check_order(self.order),
            self._complete_and_check_optimizer,
            self._check_recipe,
            self._check_values,
            self.stream_settings,
            self._complete_and_check_learner_settings,
        ):
            errors.collect(check)
        errors.raise_all()

    def _complete_and_check_optimizer(self) -> None:
        """Check the settings of the optimizer. Replace those that are None by the defaults for the network."""
        optimizer = self.optimizer or ("adadelta" if self.network == "mlp" else "sgd")
        lr, weight_decay = _OPTIMIZER_DEFAULTS.get(optimizer, (None, None))
        for name, default in (("optimizer", optimizer), ("lr", lr), ("weight_decay", weight_decay)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        assert self.lr is not None and self.weight_decay is not None
        if not (self.lr > 0 and isfinite(self.lr)):
            raise SettingError(f"lr={self.lr} must be a finite number above 0")
        if not (self.weight_decay >= 0 and isfinite(self.weight_decay)):
            raise SettingError(f"weight_decay={self.weight_decay} must be a finite number, and not negative")
        if self.optimizer == "adadelta" and self.weight_decay:
            raise SettingError(
                "weight_decay cannot be used with optimizer=adadelta: remove it, or give another optimizer"
            )

    def _check_recipe(self) -> None:
        """Raise SettingError if the settings of the training of a stage do not fit together."""
        if not 0 <= self.label_smoothing < 1:
            raise SettingError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.select_by == "last" and self.patience is not None:
            raise SettingError(
                f"patience={self.patience} needs the validation score of each epoch, but select_by=last does not "
                f"measure it: leave one of them out"
            )
        is_number = isinstance(self.crop_border, int | float) and not isinstance(self.crop_border, bool)
        if self.crop_border != "black" and not (is_number and isfinite(self.crop_border)):  # type: ignore[arg-type]
            raise SettingError(
                f"crop_border={self.crop_border!r} must be 'black' or a finite number (the value of a pixel after "
                "normalisation)"
            )
        if self.average_weights and self.from_scratch:
            raise SettingError(
                f"average={self.average} averages the parameters of stages, but with from_scratch=true each stage has "
                f"a new network: leave one of them out"
            )

    def _check_values(self) -> None:
        if self.transform is not None and not is_function(self.transform):
            raise SettingError(
                f"transform={self.transform!r} must have the form MODULE:FUNCTION, for example transform=mine:transform"
            )
        if self.precision != "float32" and self.network == "mlp":
            raise SettingError(
                f"precision={self.precision} cannot be used with backbone=mlp, whose gradients are computed in float32 "
                f"only: give precision=float32, or another backbone"
            )
        if self.cuda_graphs is True and self.network == "mlp":
            raise SettingError("cuda_graphs=true cannot be used with backbone=mlp: give cuda_graphs=false")
        if self.num_arrivals > self.num_mega_batches:
            raise SettingError(f"arrivals={self.arrivals} must be at most mega_batches={self.num_mega_batches}")
        if self.seed + self.seeds > MAX_SEED:
            raise SettingError(f"seed={self.seed} with seeds={self.seeds}: all seeds must be below {MAX_SEED}")

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

    def epochs_at(self, t: int) -> int:
        """Return the number of epochs of the stage that is trained at arrival t, counted from 1."""
        return self.epochs + round(self.extra_epochs / t)

    def stream_settings(self) -> StreamSettings:
        """Return the stream settings: number of mega-batches that arrive, wait and replay.

        Raises:
            SettingError: if wait is larger than the number of mega-batches that arrive, or if replay is invalid.
        """
        if self.replay == "auto":
            raise SettingError("replay=auto is for text only: give false, all, uniform, or a share between 0 and 1")
        if self.last_group is None:  # otherwise, the mega-batches that a stage needs may still arrive
            check_wait(self.wait, self.num_arrivals)
        last_group = self.last_group or ("wait" if self.num_arrivals < self.num_mega_batches else "train")
        return StreamSettings(self.num_arrivals, self.wait, self.replay, last_group)

    @property
    def seed_folders(self) -> list[Path]:
        """The run folder of each seed: `out`, or with several seeds its subfolders seed_SEED."""
        return RunFolder(Path(self.out)).of_each_seed(self.seed, self.seeds)

    def of_one_seed(self, number: int) -> "VisionSettings":
        """Return a copy of these settings for a run of only the seed with this index, in its own run folder."""
        return replace(self, seed=self.seed + number, seeds=1, out=str(self.seed_folders[number]))

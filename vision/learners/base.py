"""Base class of all vision learners.

A learner has a stack of networks. It trains the stack in stages, saves it to files, and predicts with it.

The runs of all S seeds are trained together. The stack contains N networks for each seed, so S x N networks in total.
The networks of the first seed come first. Exception: Firefly trains the run of each seed separately, because its
networks grow to different shapes.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fairseq_alma.core import catalogue
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import read_json, sealed, sha256_once, write_json
from fairseq_alma.core.learner_settings import Combine
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.predictors import checked_file
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder
from vision import cuda_graphs
from vision.backbones import Backbone
from vision.batches import Batches, Memory, StageData
from vision.learners import files as saved
from vision.learners.average import AveragedPredictor
from vision.learners.files import AVERAGED, NETWORKS, STATE, SavedFiles, StackFile, State
from vision.networks import GatedStack, Stack
from vision.optimizers import cosine_rates, new_optimizer
from vision.seeds import generator, random_state
from vision.settings import VisionSettings
from vision.training import OwnLoss, TrainingCounts, Watcher, train_stage
from vision.voting import MemberOutputs, sum_members

logger = logging.getLogger(__name__)
# Shapes: S seeds, N networks per seed, M = S x N networks, b examples, C classes.


class VisionLearner:
    """Base class of all vision learners.

    The base class itself behaves as the learner SM: it has one network per seed, and every stage continues to train it.

    Args:
        backbone: creates the learner's networks.
        memory: stores the mega-batches as tensors.
        watcher: object whose methods are called during the training, for example to show the progress.
    """

    stacks_seeds: ClassVar[bool] = True
    """Whether the runs of all seeds are trained together. If False, they are trained one after another."""
    needs_networks_of_all_stages: ClassVar[bool] = False
    """Whether later stages or the predictor need the networks of each stage."""

    def __init__(
        self,
        settings: VisionSettings,
        backbone: Backbone,
        memory: Memory,
        device: torch.device,
        watcher: Watcher | None = None,
    ):
        self.settings, self.backbone, self.memory, self.device = settings, backbone, memory, device
        self.learner_settings: Any = settings.learner_settings
        """The settings that only this learner has (see `fairseq_alma.core.catalogue`)."""
        self.watcher = watcher or Watcher()
        self.seeds = list(range(settings.seed, settings.seed + settings.seeds))
        self.stage_index = self.stage_length = 0
        """Index of the last trained stage, and number of new mega-batches in this stage. Both are 0 before stage 1."""
        self.validation: list[tuple[float, float] | None] = [None] * len(self.seeds)
        """For each seed, loss and error rate on the validation data of the most recent stage; None before stage 1, or
        if the evaluator computes these scores, as for growing ensembles."""
        self.validated_on = (0, 0)
        """First and last mega-batch, counted from 1, whose validation data the most recent stage used."""
        self.num_stored: int | None = None if not settings.replay else 0
        """With replay: number of examples per seed that are kept for replay, for training and validation together."""
        self.expert_load: list[list[list[float]]] | None = None
        """Mean weight of each expert over the validation examples, indexed by seed, mixture and expert; None for
        learners without mixtures."""
        self._file = StackFile(settings.network)
        out, folders = Path(settings.out), settings.seed_folders
        # If the run had keep_stages=true before, what it stored then is not deleted.
        names = (STATE,) if settings.keep_stages else (NETWORKS, AVERAGED, STATE)
        self._saved_files = SavedFiles(RunFolder(out), names, kept=saved.files_of_predictors(folders[0]))
        self._average: AveragedPredictor | None = None
        """The networks of the predictor, if their parameters are an average."""
        if weights := settings.average_weights:
            self._average = AveragedPredictor(weights, out, settings.network, device, self._prepared)
        self._stack: Stack | None = self._prepared(self.new_stack(stage_index=1))

    # ---- Subclasses may override the following methods and properties.

    @property
    def networks_per_seed(self) -> int:
        """Number of networks per seed that a stage trains, N."""
        return 1

    @property
    def combine(self) -> Combine:
        """How the outputs of several networks become one prediction (see `MemberOutputs.combine`)."""
        return "probability"

    @property
    def predictor_combine(self) -> str:
        """The value of `combine` in predictor.json, or "logit_sum" (see `vision.predictor.Predictor`)."""
        return self.combine

    @property
    def members(self) -> list[tuple[str | None, Stack]]:
        """The stacks of networks that predict together, each as (name, stack). Most learners have only one stack.

        Stacks that will not change any more come first. Each of them has a unique name, under which the evaluator can
        cache the outputs of the stack. A stack that may still change comes last and has the name None.
        """
        return [(None, self.predictor)]

    def new_network(self, generators: Sequence[torch.Generator]) -> Stack:
        """Return untrained networks, one for each random generator."""
        return self.backbone.network(generators, self.device)

    def stage_data(self, stage: Stage) -> StageData:
        """Return the examples that a stage reads. `loss` gets their rows of the table `one_hot`, of any width."""
        return self.memory.stage_data(stage.new, stage.past, stage.replay)

    def loss(self) -> OwnLoss:
        """Return the training loss. It also defines which networks are trained together as one model."""
        return OwnLoss(len(self.seeds), self.networks_per_seed, self.settings.label_smoothing)

    def grow(self, stage: Stage) -> list[Spent]:
        """Add capacity to the networks before `stage`, which is not the first, and return the cost for each seed."""
        return [Spent() for _ in self.seeds]

    @property
    def can_grow(self) -> bool:
        """Whether the subclass has a method `grow` of its own. If it has none, no growth step is recorded."""
        return type(self).grow is not VisionLearner.grow

    def extra_state(self) -> dict[str, Any]:
        """Return additional values that `save` writes to learner.json, as a dictionary of JSON values."""
        return {}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the values that `extra_state` returned, from `state`, the content of learner.json."""

    def predictor_files(self) -> list[Path]:
        """Return the files that contain the networks in `members`, ordered by stage."""
        file = self._average.file if self._average else self._file.current
        return [file] if file else []

    # ---- Most subclasses do not override the following methods and properties.

    @property
    def stack(self) -> Stack:
        """The networks that stages train. After `load`, the first access to this property reads them from a file."""
        if self._stack is None:
            self._stack = self._prepared(self._file.read(self.device))
        return self._stack

    @stack.setter
    def stack(self, stack: Stack) -> None:
        self._stack, self._file.current = self._prepared(stack), None

    @property
    def predictor(self) -> Stack:
        """The networks that predict: `stack`, or with `average`, networks with averaged parameters."""
        return (self._average and self._average.stack) or self.stack

    def new_stack(self, stage_index: int) -> Stack:
        """Return untrained networks, N for each of the S seeds, for a learner that trains them first in a stage."""
        return self.new_network(self.generators("initialisation", stage_index))

    def generators(self, purpose: str, stage_index: int, networks_per_seed: int | None = None) -> list[torch.Generator]:
        """Return a random generator for each network, for each purpose and stage another one.

        Args:
            purpose: what the random numbers are used for, for example "initialisation".
            stage_index: index of the stage that uses the random numbers.
            networks_per_seed: number of generators per seed. By default one for each network.
        """
        count = networks_per_seed or self.networks_per_seed
        return [generator(seed, purpose, member, stage_index) for seed in self.seeds for member in range(count)]

    def train(self, stage: Stage) -> list[Spent]:
        """Train the stack for one stage (see `train_stage`) with a new optimizer, and return the cost for each seed."""
        settings, began = self.settings, time.perf_counter()
        epochs = settings.epochs_at(stage.new[-1].t)
        self.watcher.begin_stage(stage.index, stage.new[-1].t, epochs)
        if settings.from_scratch and stage.index > 1:
            self.stack.reset_parameters(self.generators("initialisation", stage.index))
        data = self.stage_data(stage)
        loss, stack = self.loss(), self.stack
        orders = self.generators("order", stage.index, loss.num_orders // len(self.seeds))
        batches = Batches(data, orders, settings.batch_size, stage.past_share, self.bagging)
        if isinstance(stack, GatedStack) and stack.gates[0].hard:
            stack.set_gate_noise(partial(_uniform, self.generators("gates", stage.index)))
        self.stack = stack  # the setter records that no file contains the networks, which will change in place
        optimizer = new_optimizer(stack.parameters.flat, settings)
        is_constant = settings.schedule == "constant"
        num_updates = epochs * batches.updates_per_epoch
        rates = None if is_constant else cosine_rates(optimizer.lr, num_updates)
        graphs = cuda_graphs.are_used(settings.cuda_graphs, stack, num_updates, self.device)
        with random_state(self.generators("modules", stage.index)[0].initial_seed(), self.device):
            if self._average is not None:
                self._average.begin_stage(stack)
            trained = train_stage(
                stack, batches, data.validation, loss, optimizer, epochs, settings.select_by, self.watcher,
                settings.patience, rates, graphs,
            )  # fmt: skip
            if self._average is not None:
                self._average.end_stage(stack, batches.epoch())
        if trained.num_diverged:
            logger.warning(
                "stage %d did not change %d of %d networks (or groups of networks that are trained as one model), "
                "because their validation loss was infinite or not a number after each epoch: try a smaller lr=",
                stage.index, trained.num_diverged, len(trained.epochs_U),
            )  # fmt: skip
        self.stage_index, self.stage_length = stage.index, len(stage.new)
        self.validated_on = (1 if stage.replay else stage.new[0].t, stage.new[-1].t)
        self.validation = list(self._validate(data))
        if stage.replay:
            self.num_stored = sum(sum(one.counts.values()) for one in (*stage.past, *stage.new))
        seconds = (time.perf_counter() - began) / len(self.seeds)
        # Other networks are only written when the learner is saved (see `fairseq_alma.core.run_record`).
        if settings.keep_stages or self.needs_networks_of_all_stages:
            self._write_networks(stage.folder / "train")
        if settings.keep_stages:
            self._write_predictor(stage.index)
        return [self._spent(stack, trained, number, seconds) for number in range(len(self.seeds))]

    def _spent(self, stack: Stack, trained: TrainingCounts, number: int, seconds: float) -> Spent:
        """Return the cost of a stage for one seed."""
        # A unit is a network, or all networks of a seed if they are trained as one model.
        units_per_seed = len(trained.epochs_U) // len(self.seeds)
        num_epochs = sum(trained.epochs_U[number * units_per_seed :][:units_per_seed])
        of_networks = num_epochs * self.networks_per_seed // units_per_seed
        validations = self.networks_per_seed if trained.only_last_is_validated else of_networks
        # The pass for the statistics of the averaged networks is training, too.
        num_averaged = self._average.num_examples * self.networks_per_seed if self._average else 0
        return Spent(
            train_flops=stack.flops.training * trained.examples_per_epoch * of_networks
            + stack.flops.forward * num_averaged,
            num_updates=trained.updates_per_epoch * num_epochs,
            train_seconds=seconds,
            validation_flops=stack.flops.forward * trained.validated_per_epoch * validations,
        )

    @property
    def bagging(self) -> bool:
        """Whether each network is trained on a separate bootstrap sample of the examples."""
        return False

    def member_outputs(self, x: Tensor, stack: Stack) -> MemberOutputs:
        """Return the outputs of a stack of networks, summed over the networks of each seed.

        Args:
            x: examples, [S, b, ...], or [1, b, ...] if they are the same for all seeds.
            stack: one of the stacks in `members`.
        """
        return self._combined(stack.logits_of_many(x))

    def _combined(self, logits_MnC: Tensor) -> MemberOutputs:
        """Return the outputs of networks with the given logits, summed over the networks of each seed."""
        return sum_members(self.loss().unit_logits(logits_MnC), len(self.seeds), self.combine)

    @property
    def num_members(self) -> int | None:
        """Number of networks per seed that predict together, or None if there is only one."""
        count = sum(len(stack) for _, stack in self.members) // len(self.seeds)
        return count if count > 1 else None

    def save(self, folder: Path) -> None:
        """Write the state of the learner to `folder`; after the training of a stage, also write predictor.json."""
        written = self._write_networks(folder)
        files = [path for path in self._needed_files(folder) if path.name != STATE and path.is_file()]
        out = self.settings.out
        state = {
            **written,
            "files": [{"path": os.path.relpath(path, out), "sha256": sha256_once(path)} for path in files],
            "stage": self.stage_index,
            "stage_length": self.stage_length,
            "validation": self.validation,
            "validated_on": self.validated_on,
            "num_stored": self.num_stored,
            **self.extra_state(),
        }
        if folder.name == "train":
            self._write_predictor(None)
        write_json(folder / STATE, sealed(state), durable=False)
        self._saved_files.saved(self._needed_files(folder))

    def _write_networks(self, folder: Path) -> dict[str, Any]:
        """Write the networks to `folder` if no file contains them yet, and return what learner.json says about them."""
        path = self._file.write(self.stack, folder / NETWORKS)
        averaged = self._average.save(folder) if self._average else {}
        self._saved_files.wrote(folder / NETWORKS, folder / AVERAGED)
        return {"networks": os.path.relpath(path, self.settings.out), **averaged}

    def _write_predictor(self, stage_index: int | None) -> None:
        """Write predictor.json, or the file that describes the predictor after a stage."""
        settings, files, num_members = self.settings, self.predictor_files(), len(self.members)
        if len(files) != num_members:
            raise StageError(
                f"learner={settings.learner} predicts with {num_members} stacks of networks (members), but "
                f"predictor_files names {len(files)} files: override predictor_files too, so that what is deployed is "
                f"what was evaluated"
            )
        description = {"combine": self.predictor_combine, "dataset": settings.dataset}
        saved.write_predictor(settings.seed_folders, stage_index, files, self.networks_per_seed, description)

    def delete_old(self) -> None:
        """Delete the files of earlier calls of `save` that are not needed. With keep_stages=true, keep all networks."""
        self._saved_files.delete_old(self.stage_index)

    def _needed_files(self, folder: Path) -> list[Path]:
        """Return the files that `load` and the predictor need, if the learner has been saved to `folder`."""
        assert self._file.current is not None
        return [self._file.current, folder / STATE, *self.predictor_files()]

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote to `folder`. The networks are read from a file when they are first used.

        Raise RunError if learner.json is damaged, or if a file with networks has changed.
        """
        state: dict[str, Any] = dict(read_json(folder / STATE, State, advice="restore the file from a backup"))
        for file in state["files"]:
            checked_file(Path(self.settings.out), file)
        self._stack = None
        self._file.current = saved.file_of_run(Path(self.settings.out), state["networks"])
        self.stage_index, self.stage_length = state["stage"], state["stage_length"]
        self.validation = [None if scores is None else tuple(scores) for scores in state["validation"]]
        self.validated_on = tuple(state["validated_on"])
        self.num_stored = state["num_stored"]
        if self._average is not None:
            self._average.load(state)
        self.set_extra_state(state)
        self._saved_files.saved(self._needed_files(folder))

    def _prepared(self, stack: Stack) -> Stack:
        """Make a stack compute in the data type of the setting `precision`, and return the stack."""
        stack.set_compute_dtype(torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32)
        return stack

    def _validate(self, data: StageData) -> Sequence[tuple[float, float] | None]:
        """Return, for each seed, the loss and the error rate of the predictor on the validation data of a stage."""
        rows = data.validation
        outputs = (
            self._combined(stack.logits_of_parts(rows.parts(stack.examples_at_once))) for _, stack in self.members
        )
        total = sum(outputs, MemberOutputs.empty())
        return list(zip(total.loss(rows.labels), total.error_rate(rows.labels), strict=True))


def _uniform(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Return uniform random numbers between 0 and 1, [number of generators, *shape], one row per generator."""
    return torch.stack([torch.rand(shape, generator=generator) for generator in generators])


LEARNERS: dict[str, type[VisionLearner]] = {}
"""The class of each vision learner, by name of the learner. `register_learner` adds entries."""


def register_learner(name: str, **options: Any) -> Callable[[type[VisionLearner]], type[VisionLearner]]:
    """Return a class decorator that makes a learner available as `learner=NAME`.

    For the options and the errors, see `fairseq_alma.core.catalogue.register_learner`.
    """
    return catalogue.register_learner("vision", LEARNERS, name, **options)

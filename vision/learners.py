"""The learners: which networks a stage trains, from where, and which of them predict.

sm         one network, trained on from stage to stage
ens        N networks of their own seeds on the same data, their probabilities averaged
umix       N networks trained as one, their logits averaged
gens       k new networks at each stage, trained on that stage alone; the others stay as they are
gmoe       mixtures in which an expert is split at growth, under a tree of gates
gmoe_flat  the same under one softmax
ff         one network that grows in width, and in depth if that is wanted (Firefly)
moe        a mixture that does not grow
ens_moe    a new mixture at each stage, as gens

A learner (but ff) computes all seeds of a run at once: a stack of S x N networks, seed after seed.
"""

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_alma.core.files import read_json, sha256_of, write_json
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from vision.backbones import Backbone
from vision.batches import Batches, Memory, StageData
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.firefly import (
    Chain,
    CountRule,
    chain_from_stack,
    count_by_num_params,
    count_by_width_ratio,
    grow_depth,
    grow_width,
    stack_from_chain,
)
from vision.networks import GatedStack, Stack
from vision.optimizers import SGD, AdaDelta
from vision.seeds import generator
from vision.settings import SplitBy, VisionSettings
from vision.training import JointLoss, OwnLoss, Watcher, train_stage
from vision.voting import Combine, MemberOutputs, sum_members

# S seeds, N networks of a seed, M = S N networks, E experts, b examples, C classes.


class VisionLearner:
    """What all of them share; as it stands, SM. A new learner overrides what it does otherwise.

    Args:
        settings: of the run.
        backbone: what its networks are.
        memory: which turns mega-batches into tensors.
        device: where networks live.
        watcher: is told how training goes on.
    """

    def __init__(
        self,
        settings: VisionSettings,
        backbone: Backbone,
        memory: Memory,
        device: torch.device,
        watcher: Watcher | None = None,
    ):
        self.settings, self.backbone, self.memory, self.device = settings, backbone, memory, device
        self.watcher = watcher or Watcher()
        self.seeds = list(range(settings.seed, settings.seed + settings.seeds))
        self.stage_index = self.stage_length = 0
        """The last stage that was trained, and of how many mega-batches."""
        self.validation: list[tuple[float, float] | None] = [None] * len(self.seeds)
        """Loss and error rate of what predicts, on the validation data of the last stage, for each seed."""
        self._stack: Stack | None = self._ready(self.new_stack(stage_index=1))
        self._stack_file: Path | None = None
        """Where the stack lies as it is, if it does."""
        self._saved: list[Path] = []
        """The last files that were saved or loaded."""
        self._digests: list[str] = []
        self.expert_load: list[list[list[float]]] | None = None
        """Mixtures: share of the validation examples that each expert gets, seed by seed and layer by layer."""

    stacks_seeds = True
    """Whether all seeds are computed at once; else one after the other, each as a run of its own."""

    # ---- What a new learner may say otherwise.

    @property
    def networks_per_seed(self) -> int:
        """N: how many are trained in a stage."""
        return 1

    @property
    def combine(self) -> Combine:
        """How the members' outputs become a prediction."""
        return "probability"

    @property
    def members(self) -> list[tuple[str | None, Stack]]:
        """What predicts, together. Those that will predict unchanged from now on come first, each under a name of
        its own: their outputs are worth keeping."""
        return [(None, self.stack)]

    def new_network(self, generators: Sequence[torch.Generator]) -> Stack:
        """Untrained networks, one a generator."""
        return self.backbone.network(generators, self.device)

    def loss(self) -> OwnLoss:
        """Which networks are trained and selected together."""
        return OwnLoss(len(self.seeds), self.networks_per_seed)

    def grow(self, stage: Stage) -> list[Spent]:
        """Nothing: most learners do not grow."""
        return [Spent() for _ in self.seeds]

    # ---- What every learner does.

    @property
    def stack(self) -> Stack:
        """What trains."""
        if self._stack is None:
            assert self._stack_file is not None  # one of the two always says what it is
            self._stack = self._ready(read_checkpoint(self._stack_file, self.device))
        return self._stack

    @stack.setter
    def stack(self, stack: Stack) -> None:
        self._stack, self._stack_file = self._ready(stack), None

    def _ready(self, stack: Stack) -> Stack:
        """As this run computes."""
        stack.set_compute_dtype(torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32)
        return stack

    def new_stack(self, stage_index: int) -> Stack:
        """Untrained networks for all seeds, S x N of them, each drawn from its own seed."""
        return self.new_network(self.generators("initialisation", stage_index))

    def generators(self, purpose: str, stage_index: int, networks_per_seed: int | None = None) -> list[torch.Generator]:
        """One for each network of the stack, named by its seed, its number and the stage."""
        first = self.settings.seed_of(purpose)
        count = networks_per_seed or self.networks_per_seed
        return [
            generator(first + number, purpose, member, stage_index)
            for number in range(len(self.seeds))
            for member in range(count)
        ]

    def train(self, stage: Stage) -> list[Spent]:
        """Train the stack on the stage with a new optimizer; keep each network's best epoch."""
        s, began = self.settings, time.perf_counter()
        self.watcher.begin_stage(stage.index)
        if s.from_scratch and stage.index > 1:
            self.stack.reset_parameters(self.generators("initialisation", stage.index))
        data = self.memory.stage_data(stage.new, stage.past, stage.replay)
        loss, stack = self.loss(), self.stack
        orders = self.generators("order", stage.index, loss.num_orders // len(self.seeds))
        batches = Batches(data, orders, s.batch_size, stage.replay, s.bagging)
        if isinstance(stack, GatedStack) and s.hard_gates:
            stack.set_gate_noise(partial(_uniform, self.generators("gates", stage.index)))
        self.stack = stack  # no longer what lies in its file
        trained = train_stage(
            stack, batches, data.validation, loss, self._optimizer(stack), s.epochs, s.select_by, self.watcher
        )
        self.stage_index, self.stage_length = stage.index, len(stage.new)
        self.validation = list(self._validate(data))
        flops = stack.flops
        spent = Spent(
            train_flops=flops.training * trained.num_examples * self.networks_per_seed,
            num_updates=trained.num_updates * loss.num_orders // len(self.seeds),
            train_seconds=(time.perf_counter() - began) / len(self.seeds),
            validation_flops=flops.forward * trained.num_validated * self.networks_per_seed,
        )
        return [spent for _ in self.seeds]

    def member_outputs(self, x: Tensor, stack: Stack) -> MemberOutputs:
        """What the members of one stack say of examples, to be added up: for each seed.

        Args:
            x: [1, b, ...], the same for all networks, or [S, b, ...].
            stack: one of `members`.
        """
        return sum_members(self.loss().unit_logits(stack.logits_of_many(x)), len(self.seeds), self.combine)

    @property
    def num_members(self) -> int | None:
        """Networks of one seed that predict; None for a single one."""
        count = sum(len(stack) for _, stack in self.members) // len(self.seeds)
        return count if count > 1 else None

    def save(self, folder: Path) -> None:
        """Leave in `folder` what `load` needs, and name in predictor.json what the run would deploy now.

        Networks that nothing goes on from any more are removed, unless `keep_stages`: until the mark of this step is
        set, the next process goes on from the step before, so the last two stay.
        """
        if self._stack_file is None:
            self._stack_file = folder / "networks.pt"
            write_checkpoint(self.stack, self._stack_file)
        state = {
            "networks": os.path.relpath(self._stack_file, self.settings.out),
            "stage": self.stage_index,
            "stage_length": self.stage_length,
            "validation": self.validation,
            **self._more_state(),
        }
        write_json(folder / "learner.json", state, durable=False)
        self._remember(self._stack_file)
        if folder.name == "train":
            self._name_predictor()
        while len(self._saved) > 2:
            path = self._saved.pop(0)
            if not self.settings.keep_stages and path not in self._predictor_files():
                path.unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Go on from what `save` left in `folder`. The networks are read when they are wanted.

        Raises:
            RunError: it is damaged.
        """
        state = read_json(folder / "learner.json")
        self._stack, self._stack_file = None, Path(self.settings.out) / state["networks"]
        self.stage_index, self.stage_length = state["stage"], state.get("stage_length", self.settings.wait)
        self.validation = [None if one is None else tuple(one) for one in state["validation"]]
        self._take_more_state(state)
        self._remember(self._stack_file)

    def _remember(self, path: Path) -> None:
        if path not in self._saved:
            self._saved.append(path)

    def _more_state(self) -> dict[str, Any]:
        return {}

    def _take_more_state(self, state: dict[str, Any]) -> None:
        pass

    def _predictor_files(self) -> list[Path]:
        """What `members` lie in."""
        return [self._stack_file] if self._stack_file else []

    def _name_predictor(self) -> None:
        """RUN/predictor.json, or one for each seed: which networks of which files predict."""
        out, count = Path(self.settings.out), len(self.seeds)
        paths = self._predictor_files()
        for path in paths[len(self._digests) :]:
            self._digests.append(sha256_of(path))
        self._digests[-1] = sha256_of(paths[-1])
        for number, seed in enumerate(self.seeds):
            folder = out if count == 1 else out / f"seed_{seed}"
            networks = list(range(number * self.networks_per_seed, (number + 1) * self.networks_per_seed))
            checkpoints = [
                {"path": os.path.relpath(path, folder), "sha256": digest, "networks": networks}
                for path, digest in zip(paths, self._digests, strict=True)
            ]
            deployed = {"combine": self.combine, "dataset": self.settings.dataset, "checkpoints": checkpoints}
            write_json(folder / "predictor.json", deployed, durable=False)

    def _optimizer(self, stack: Stack) -> AdaDelta | SGD:
        s = self.settings
        assert s.lr is not None and s.momentum is not None and s.weight_decay is not None  # filled in
        if s.optimizer == "adadelta":
            return AdaDelta(stack.parameters.flat, s.lr)
        return SGD(stack.parameters.flat, s.lr, s.momentum, s.weight_decay, s.nesterov)

    def _validate(self, data: StageData) -> list[tuple[float, float]]:
        x_Sni, y_Sn = data.validation.examples, data.validation.labels
        total = sum((self.member_outputs(x_Sni, stack) for _, stack in self.members), MemberOutputs.empty())
        return list(zip(total.loss(y_Sn), total.error_rate(y_Sn), strict=True))


class SingleModel(VisionLearner):
    """SM: one network, trained on from stage to stage."""


class Ensemble(VisionLearner):
    """Ens: N networks, each with its own seed and its own best epoch; bagging and majority vote as options."""

    @property
    def networks_per_seed(self) -> int:
        return self.settings.members

    @property
    def combine(self) -> Combine:
        return self.settings.combine


class UnionMix(VisionLearner):
    """UMix: N networks trained as one, by the mean of their logits (the original code: their sum)."""

    @property
    def networks_per_seed(self) -> int:
        return self.settings.members

    @property
    def combine(self) -> Combine:
        return "logit"

    def loss(self) -> OwnLoss:
        return JointLoss(len(self.seeds), self.networks_per_seed, mean=self.settings.umix == "mean")


class GrowingEnsemble(VisionLearner):
    """gEns: k new members at each stage, trained on that stage alone; the others are frozen."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._frozen: list[tuple[str, Stack]] = []
        self._num_frozen = 0
        """How many stages' members are frozen: those of stages 1, 2, ..."""

    @property
    def networks_per_seed(self) -> int:
        return self.settings.new_members

    @property
    def combine(self) -> Combine:
        return self.settings.gens_combine

    @property
    def members(self) -> list[tuple[str | None, Stack]]:
        is_trained = self.stage_index > self._num_frozen
        return [*self.frozen, (f"stage {self.stage_index}" if is_trained else None, self.stack)]

    @property
    def frozen(self) -> list[tuple[str, Stack]]:
        """The members of earlier stages."""
        del self._frozen[self._num_frozen :]
        for index in range(len(self._frozen) + 1, self._num_frozen + 1):
            self._frozen.append((f"stage {index}", self._ready(read_checkpoint(self._file_of(index), self.device))))
        return self._frozen

    def grow(self, stage: Stage) -> list[Spent]:
        """Freeze what the last stage trained; draw new members, or copy the last (as the original code does)."""
        last, frozen = self.stack, self.frozen
        frozen.append((f"stage {self.stage_index}", last))
        self._num_frozen = len(frozen)
        self.stack = self.new_stack(stage.index)
        if self.settings.new_members_from == "copy":
            for new, old in zip(self.stack.tensors, last.tensors, strict=True):
                new.flat.copy_(old.flat)
        return super().grow(stage)

    def _more_state(self) -> dict[str, Any]:
        return {"num_frozen": self._num_frozen}

    def _take_more_state(self, state: dict[str, Any]) -> None:
        self._num_frozen = state["num_frozen"]

    def _predictor_files(self) -> list[Path]:
        return [self._file_of(index) for index in range(1, self.stage_index + 1)]

    def _file_of(self, index: int) -> Path:
        return Path(self.settings.out) / "stages" / f"stage_{index:03d}" / "train" / "networks.pt"


class Mixture(VisionLearner):
    """MoE: mixtures of E experts, in both hidden layers or in the VGG's blocks 2 to 5, which do not grow."""

    stack: GatedStack

    def new_network(self, generators: Sequence[torch.Generator]) -> Stack:
        s = self.settings
        return self.backbone.mixture(s.experts, s.hard_gates, generators, self.device)

    def _validate(self, data: StageData) -> list[tuple[float, float]]:
        scores = super()._validate(data)
        # Share of the validation examples that each expert gets, mixture by mixture: the last pass was theirs.
        loads = [weights_MbE.mean(1) for weights_MbE in self.stack.expert_weights]
        self.expert_load = [[load_ME[number].tolist() for load_ME in loads] for number in range(len(self.seeds))]
        return scores

    def _more_state(self) -> dict[str, Any]:
        return {"expert_load": self.expert_load}

    def _take_more_state(self, state: dict[str, Any]) -> None:
        self.expert_load = state["expert_load"]


class GrowingMixture(Mixture):
    """gMoE: before a stage, in every mixture, the expert that loses most is split in two under a new gate."""

    flat = False
    """Whether the gate is one softmax, not a tree."""

    def grow(self, stage: Stage) -> list[Spent]:
        """Split one expert a layer, ranked on the validation data of the stage before, every `grow_every` stages."""
        if (stage.index - 1) % self.settings.grow_every:
            return super().grow(stage)
        stack, data = self.stack, self.memory.previous_stage_data(stage, self.stage_length).validation
        worst = charged_experts(stack, data.examples, data.labels, self.settings.split_by)
        split = stack.split_flat if self.flat else stack.split
        self.stack = split(worst, self.generators("growth", stage.index))
        return [Spent(validation_flops=stack.flops.forward * data.num_examples) for _ in self.seeds]


class GrowingFlatMixture(GrowingMixture):
    """gMoE under one softmax over all experts (v1's ablation): what it computes jumps at growth."""

    flat = True


class EnsembleOfMixtures(GrowingEnsemble):
    """v1's ablation: a new mixture at each stage, the others frozen."""

    def new_network(self, generators: Sequence[torch.Generator]) -> Stack:
        s = self.settings
        return self.backbone.mixture(s.experts, s.hard_gates, generators, self.device)


class Firefly(VisionLearner):
    """ff: one network that grows before a stage where it lowers the loss fastest (Firefly). Seeds grow differently,
    so each is computed by itself.
    """

    stacks_seeds = False

    def grow(self, stage: Stage) -> list[Spent]:
        """Every `grow_every` stages, ranked on what the coming stage trains on, as the original code does (a
        mega-batch's validation data are too few for it), without augmentation. Its passes are charged.
        """
        s = self.settings
        if (stage.index - 1) % s.grow_every:
            return super().grow(stage)
        began, stack = time.perf_counter(), self.stack
        data = self.memory.stage_data(stage.new, stage.past, stage.replay)
        order = self.generators("order of growth", stage.index)
        batches = partial(_chain_batches, Batches(data, order, s.batch_size, stage.replay))
        (noise,) = self.generators("growth", stage.index)
        chain, flops = chain_from_stack(stack), 0
        if s.grow_depth:
            most = self._target(stage.index) if s.grow_by == "parameters" else None
            grown = grow_depth(chain, batches, s.grow_depth, noise, most)
            chain, flops = grown.chain, grown.flops
        how_many = self._how_many(chain, stage.index)
        grown = grow_width(chain, batches, how_many, noise, s.candidates)
        self.stack = stack_from_chain(grown.chain, stack)
        return [Spent(train_flops=flops + grown.flops, train_seconds=time.perf_counter() - began)]

    def _how_many(self, chain: Chain, stage_index: int) -> CountRule:
        s = self.settings
        if s.grow_by == "width":
            # The original code's rule: so that the width is about c (1 + g t) at stage t + 1.
            t = stage_index - 1
            return count_by_width_ratio(chain, (s.grow_ratio * t + 1) / (s.grow_ratio * (t - 1) + 1) - 1)
        return count_by_num_params(chain, self._target(stage_index))

    def _target(self, stage_index: int) -> int:
        """How many parameters the network should have after the growth before this stage."""
        s, first = self.settings, chain_from_stack(self.new_stack(1)).num_params()
        return first + round(s.grow_ratio * first) * ((stage_index - 1) // s.grow_every)


def _chain_batches(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch as chains read it: images [b, channels, s, s] as they are, and classes."""
    for (x,), (one_hot,) in batches.epoch(augmented=False):
        yield x.movedim(-1, 1) if x.dim() == 4 else x, one_hot.argmax(-1)


def charged_experts(stack: GatedStack, x: Tensor, y_Sn: Tensor, split_by: SplitBy) -> list[list[int]]:
    """The expert to split of each layer and network: the one that is charged most.

    Args:
        stack: M = S networks.
        x: examples, [S, n, ...].
        y_Sn: their classes.
        split_by: "validation_loss" charges the loss of each example to experts by their weight for it (with hard
            gates: to the one that is used); "gate_mass" their weight alone (the original code).
    """
    charges: list[Tensor] = []
    at_once = stack.examples_at_once
    for x_part, y_part in zip(x.split(at_once, dim=1), y_Sn.split(at_once, dim=1), strict=True):
        logits_MnC = stack.logits(x_part)
        amount_Mn = torch.ones_like(y_part, dtype=torch.float)
        if split_by == "validation_loss":
            amount_Mn = -logits_MnC.log_softmax(-1).gather(-1, y_part.unsqueeze(-1)).squeeze(-1)
        part = [torch.einsum("mn,mne->me", amount_Mn, weights_MnE).double() for weights_MnE in stack.expert_weights]
        charges = [a + b for a, b in zip(charges, part, strict=True)] if charges else part
    return [charge_ME.argmax(-1).tolist() for charge_ME in charges]


def _uniform(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.rand(shape, generator=generator) for generator in generators])


LEARNERS: dict[str, type[VisionLearner]] = {
    "sm": SingleModel,
    "ens": Ensemble,
    "umix": UnionMix,
    "gens": GrowingEnsemble,
    "gmoe": GrowingMixture,
    "gmoe_flat": GrowingFlatMixture,
    "moe": Mixture,
    "ens_moe": EnsembleOfMixtures,
    "ff": Firefly,
}
"""A new learner is a class above and a line here."""

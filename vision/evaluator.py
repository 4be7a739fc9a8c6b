"""The environment's side: it alone holds the test set, and writes down how mixtures route it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.ledger import Scores
from vision.datasets import Dataset
from vision.inputs import Inputs
from vision.learners import VisionLearner
from vision.networks import GatedStack, Stack
from vision.voting import MemberOutputs


class ErrorRateEvaluator:
    """Scores every test example once, for all seeds of a learner.

    Members that stay as they are are asked once: what they say is kept, and added to.

    Args:
        dataset: the test set of it.
        inputs: how its images are read.
        device: where it lives.
        stages: RUN/stages of each seed, for routing.npz.
        num_stages: of the whole run; the last one's routing is always written.
        routing_examples: how many test examples routing.npz holds.
    """

    def __init__(
        self,
        dataset: Dataset,
        inputs: Inputs,
        device: torch.device,
        stages: list[Path],
        num_stages: int,
        routing_examples: int,
    ):
        self._images, self._image_shape = dataset.test.images, dataset.image_shape
        self._x_1n = inputs.to_input(inputs.to_storage(dataset.test.images.to(device)))[None]
        self._y_1n = dataset.test.labels.to(device)[None]
        self._stages, self._num_stages, self._routing_examples = stages, num_stages, routing_examples
        self._kept: tuple[list[str | None], MemberOutputs] = ([], MemberOutputs.empty())
        self._num_experts_written: int | None = None

    def __call__(self, learner: VisionLearner) -> list[Scores]:
        members = learner.members
        num_seeds = len(learner.seeds)
        total = self._summed_outputs(learner, members)
        costs = [(len(stack) // num_seeds, stack.num_params, stack.flops.prediction) for _, stack in members]
        if isinstance(newest := members[-1][1], GatedStack):
            self._write_routing(newest, learner.stage_index, len(newest) // num_seeds)
        scores = []
        for number, error_rate in enumerate(total.error_rate(self._y_1n)):
            validation_loss, validation_error_rate = learner.validation[number] or (None, None)
            scores.append(
                Scores(
                    num_params=sum(count * params for count, params, _ in costs),
                    forward_flops=sum(count * flops for count, _, flops in costs),
                    error_rate=error_rate,
                    validation_loss=validation_loss,
                    validation_error_rate=validation_error_rate,
                    num_experts=members[-1][1].num_experts,
                    num_members=learner.num_members,
                    expert_load=None if learner.expert_load is None else learner.expert_load[number],
                )
            )
        return scores

    def _summed_outputs(self, learner: VisionLearner, members: list[tuple[str | None, Stack]]) -> MemberOutputs:
        names, (known, total) = [name for name, _ in members], self._kept
        if names[: len(known)] != known:
            known, total = [], MemberOutputs.empty()
        for number in range(len(known), len(members)):
            total = total + self._outputs_of(learner, members[number][1])
            if None not in names[: number + 1]:
                self._kept = (names[: number + 1], total)
        return total

    def _outputs_of(self, learner: VisionLearner, stack: Stack) -> MemberOutputs:
        parts = [learner.member_outputs(x, stack) for x in self._x_1n.split(stack.examples_at_once, dim=1)]
        summed = torch.cat([part.summed_SbC for part in parts], dim=1)
        votes = [part.votes_SbC for part in parts if part.votes_SbC is not None]
        return MemberOutputs(parts[0].combine, summed, torch.cat(votes, dim=1) if votes else None, parts[0].num_members)

    def _write_routing(self, stack: GatedStack, k: int, networks_per_seed: int) -> None:
        """stages/stage_k/routing.npz: after a growth, and at the end; of a seed's first network.

        images [n, height, width] of uint8 (in colour [n, height, width, 3]), label [n], expert [n] (of the first
        mixture, the one that weighs most), weights [n, E]; the tree as root (branches of its root, 0 is none) and
        splits (which expert each split halved).
        """
        count = self._routing_examples
        if not count or not k:
            return
        if self._num_experts_written is None:
            self._num_experts_written = _num_experts_before(self._stages[0], k)
        if stack.num_experts <= self._num_experts_written and k != self._num_stages:
            return
        self._num_experts_written = stack.num_experts
        routings = stack.routing(self._x_1n[:, :count])[::networks_per_seed]
        for folder, routing in zip(self._stages, routings, strict=True):
            path = folder / f"stage_{k:03d}" / "routing.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(".routing.tmp.npz")
            np.savez_compressed(
                temporary,
                images=_pictures(self._images[:count], self._image_shape),
                label=self._y_1n[0, :count].cpu().numpy(),
                expert=routing["weights"].argmax(-1),
                weights=routing["weights"].astype(np.float16),
                root=routing["root"],
                splits=np.array(routing["splits"], dtype=np.int64),
            )
            temporary.replace(path)


def _pictures(images: Tensor, shape: tuple[int, int, int]) -> np.ndarray:
    """[n, height, width], or [n, height, width, channels] where there are several."""
    pictures = images.view(-1, *shape).movedim(1, -1).numpy()
    return pictures[..., 0] if shape[0] == 1 else pictures


def _num_experts_before(stages: Path, k: int) -> int:
    """Of what the routing written last before stage k shows: a continued run writes what the whole one would."""
    written = [path for index in range(k) if (path := stages / f"stage_{index:03d}" / "routing.npz").exists()]
    if not written:
        return 0
    with np.load(written[-1]) as routing:
        return routing["weights"].shape[1]

"""Compute the scores of a learner on the test set. No other module uses the test set.

If the networks of the learner contain mixtures of experts, also write routing.npz. This file says which experts the
first mixture of a network chooses for test images. If the run has an error matrix, also write errors.jsonl.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.error_matrix import ErrorFile
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import written_aside
from fairseq_alma.core.ledger import Scores
from fairseq_alma.core.run_folder import RunFolder
from vision.datasets import Dataset
from vision.held_out import CachedOutputs, HeldOutEvaluator, error_by_class
from vision.inputs import Inputs
from vision.learners import VisionLearner
from vision.networks import GatedStack
from vision.rows import rows_of

ROUTING_EXAMPLES = 2000
"""Number of test images in each routing.npz."""


class ErrorRateEvaluator:
    """Computes the scores of a learner on the test set, for all seeds. For learners with gates, it writes routing.npz.

    Args:
        runs: the run folder of each seed. The routing.npz of a stage is written to it.
        last_arrival: arrival of the last stage of the complete run. A routing.npz is written after this stage, even if
            the number of experts is the same as in the file before.
        held_out: scores learners on the validation data of the mega-batches: for the error matrix, and for learners
            that do not compute their validation scores.
        has_matrix: whether to write the error matrix.
    """

    def __init__(
        self,
        dataset: Dataset,
        inputs: Inputs,
        device: torch.device,
        runs: list[RunFolder],
        last_arrival: int,
        held_out: HeldOutEvaluator | None = None,
        has_matrix: bool = False,
    ):
        self._images, self._image_shape = dataset.test.images, dataset.image_shape
        rows = rows_of(dataset.test, dataset.num_classes, inputs, device)
        self._outputs = CachedOutputs(rows)
        self._routed_1n = rows.between(0, min(ROUTING_EXAMPLES, rows.num_examples))
        self._y_1n = rows.labels
        self._runs, self._last_arrival = runs, last_arrival
        self._held_out = held_out
        self._error_files = [ErrorFile(run.path) for run in runs] if has_matrix else []
        names = dataset.class_names
        self._num_classes = dataset.num_classes
        self._class_names = None if names is None else [str(one) for one in names]
        self._num_experts_written: int | None = None
        """Number of experts in the newest routing.npz. None if it is not known yet."""

    def __call__(self, learner: VisionLearner) -> list[Scores]:
        """Return the test scores of the learner's predictor, for each seed."""
        members = learner.members
        num_seeds = len(learner.seeds)
        total = self._outputs.of_predictor(learner)
        costs = [(len(stack) // num_seeds, stack.num_params, stack.flops.prediction) for _, stack in members]
        if isinstance(newest := members[-1][1], GatedStack):
            is_last = learner.validated_on[1] == self._last_arrival
            self._write_routing(newest, learner.stage_index, len(newest) // num_seeds, is_last)
        if self._error_files and self._held_out is not None:
            by_mega_batch = self._held_out.error_by_mega_batch(learner)
            by_class = error_by_class(total, self._y_1n, self._num_classes)
            for file, of_mega_batches, of_classes in zip(self._error_files, by_mega_batch, by_class, strict=True):
                file.add(learner.stage_index, of_mega_batches, of_classes, self._class_names)
        validation: Sequence[tuple[float, float] | None] = learner.validation
        if learner.stage_index and self._held_out is not None and validation[0] is None:
            validation = self._held_out.after_stage(learner)
        scores = []
        for number, error_rate in enumerate(total.error_rate(self._y_1n)):
            validation_loss, validation_error_rate = validation[number] or (None, None)
            scores.append(
                Scores(
                    num_params=sum(count * params for count, params, _ in costs),
                    forward_flops=sum(count * flops for count, _, flops in costs),
                    error_rate=error_rate,
                    validation_loss=validation_loss,
                    validation_error_rate=validation_error_rate,
                    num_experts=members[-1][1].num_experts,
                    num_members=learner.num_members,
                    num_stored=learner.num_stored,
                    expert_load=None if learner.expert_load is None else learner.expert_load[number],
                )
            )
        return scores

    def _write_routing(self, stack: GatedStack, k: int, networks_per_seed: int, is_last: bool) -> None:
        """Write routing.npz, which says how the first network of each seed distributes test images over experts.

        The file is written to the folder of stage k if the number of experts has grown since the last file, or if k is
        the last stage (`is_last`). It contains these arrays, for n images and E experts:

        images   pixels, uint8 [n, height, width], or [n, height, width, 3] for colour images
        label    class of each image, [n]
        weights  weights of the experts in the first mixture, [n, E]; with hard gates 1 for the chosen expert, else 0
        expert   index of the expert with the largest weight, [n]
        root     number of branches at the root (the first node) of the gate tree; 0 if the mixture began with one
                 expert, because then there is no root
        splits   the indices of the experts that were split in two, in the order of the splits
        """
        if not k:
            return
        if self._num_experts_written is None:
            self._num_experts_written = _num_experts_before(self._runs[0], k)
        if stack.num_experts <= self._num_experts_written and not is_last:
            return
        self._num_experts_written = stack.num_experts
        stack.logits_of_many(self._routed_1n)
        gates, weights_MnE = stack.gates[0], stack.expert_weights[0].cpu().numpy()
        for number, run in enumerate(self._runs):
            network = number * networks_per_seed
            with written_aside(run.routing(k), durable=False) as temporary:
                np.savez_compressed(
                    temporary,
                    images=_pictures(self._images[:ROUTING_EXAMPLES], self._image_shape),
                    label=self._y_1n[0, :ROUTING_EXAMPLES].cpu().numpy(),
                    expert=weights_MnE[network].argmax(-1),
                    weights=weights_MnE[network].astype(np.float16),
                    root=gates.root,
                    splits=np.array(gates.splits[network], dtype=np.int64),
                )


def _pictures(images: Tensor, shape: tuple[int, int, int]) -> np.ndarray:
    """Return images as an array, [n, height, width]. If there are several channels, [n, height, width, channels]."""
    pictures = images.view(-1, *shape).movedim(1, -1).numpy()
    return pictures[..., 0] if shape[0] == 1 else pictures


def _num_experts_before(run: RunFolder, k: int) -> int:
    """Return the number of experts in the newest routing.npz of the stages before k. If there is no file, return 0."""
    written = [path for index in range(k) if (path := run.routing(index)).exists()]
    if not written:
        return 0
    try:
        with np.load(written[-1]) as routing:
            return routing["weights"].shape[1]
    except Exception as error:  # zipfile, zlib and numpy raise many types of errors for a damaged file
        raise RunError(
            f"{written[-1]} cannot be read ({error!r}): remove the file to continue without its routing map"
        ) from error

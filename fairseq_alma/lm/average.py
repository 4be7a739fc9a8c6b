"""Average the weights of a language model over updates (`fairseq_alma.core.averaging`).

A checkpoint of the trained model carries the average in `extra_state`, under the key AVERAGE, so that a training that
continues from the checkpoint continues the average, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints import (
    AVERAGE,
    BEST,
    CONTINUATION,
    EXPERT_DIGESTS,
    LAST,
    link,
    require_checkpoint,
    write_checkpoint,
)
from fairseq_alma.core.averaging import AverageWeights
from fairseq_alma.core.files import remove
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.modules.expert_parallel import ExpertShard, digests_of_experts


class Average:
    """The average of a model's weights.

    If experts are spread over ranks (see modules/expert_parallel.py), each rank averages the weights of its own.

    Args:
        model: the model in training.
        average_weights: the weights of the average.
        entry: the entry AVERAGE of the checkpoint from which the training continues; None to begin a new average. An
            average of another shape, from before a growth, is not continued.
    """

    def __init__(self, model: nn.Module, average_weights: AverageWeights, entry: Mapping[str, Any] | None):
        self._average_weights = average_weights
        self._weights = dict(model.named_parameters())
        # A tied weight has several names in a checkpoint, and only one in `_weights`.
        first = {id(weight): name for name, weight in self._weights.items()}
        self._names = {name: first[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}
        self._shards: dict[str, ExpertShard] = {
            name: weight.expert for name, weight in self._weights.items() if hasattr(weight, "expert")
        }
        shapes = {name: tensor.shape for name, tensor in entry["model"].items()} if entry else {}
        if any(shapes.get(name) != self._shape(name) for name in self._weights):
            entry = None
        self._count: int = entry["count"] if entry else 0
        self._average = {
            name: (
                self._own(name, entry["model"][name]).to(weight.device, copy=True) if entry else weight.detach().clone()
            )
            for name, weight in self._weights.items()
        }

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a weight in a checkpoint, which has all experts."""
        shape = self._weights[name].shape
        return torch.Size([self._shards[name].num_experts, *shape[1:]]) if name in self._shards else shape

    def _own(self, name: str, saved: Tensor) -> Tensor:
        """Return the part of a weight in a checkpoint that this rank has."""
        return saved[self._shards[name].own] if name in self._shards else saved

    @torch.no_grad()
    def add(self) -> None:
        """Add the current weights to the average."""
        self._count += 1
        names = list(self._weights)
        torch._foreach_lerp_(
            [self._average[name] for name in names],
            [self._weights[name].detach() for name in names],
            self._average_weights.weight_of_newest(self._count),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Give the model the averaged weights within the `with` block, for example to validate them."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            weight.data, self._average[name] = self._average[name], weight.data

    def collect_experts(self) -> dict[str, Tensor]:
        """Return the averages of all experts that are spread over ranks, by name, for `entry`.

        All ranks must call this. The first rank gets the averages, the others an empty dict. Raise RuntimeError if an
        expert was damaged on its way.
        """
        collected = {name: shard.collect_checked(self._average[name]) for name, shard in self._shards.items()}
        return {name: found.values for name, found in collected.items() if found is not None}

    def entry(self, experts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the entry AVERAGE of a checkpoint, given the return value of `collect_experts`."""
        model = {
            name: experts[first] if first in experts else self._average[first].cpu()
            for name, first in self._names.items()
        }
        return {"count": self._count, "model": model}


def finish_stage(folder: Path, settings: LanguageModelSettings) -> None:
    """Write the checkpoints BEST and CONTINUATION of a finished training from its last one, if the settings need it.

    With `average`, BEST gets the averaged weights. CONTINUATION is the model after the last update, with the state of
    the optimizer if it is kept. If this function is interrupted, it can be called again.
    """
    if settings.average is not None:
        last = require_checkpoint(folder / LAST)
        average = last["extra_state"][AVERAGE]
        optimizer = last.pop("last_optimizer_state")
        extra_state = {name: value for name, value in last["extra_state"].items() if name != AVERAGE}
        if EXPERT_DIGESTS in extra_state:
            extra_state[EXPERT_DIGESTS] = {
                name: digests_of_experts(average["model"][name]) for name in extra_state[EXPERT_DIGESTS]
            }
        write_checkpoint(
            {**last, "extra_state": extra_state, "model": {**last["model"], **average["model"]}}, folder / BEST
        )
        if settings.keeps_optimizer:
            last["last_optimizer_state"] = optimizer
        write_checkpoint(last, folder / CONTINUATION)
    elif settings.keeps_optimizer:
        link(folder / LAST, folder / CONTINUATION)


def remove_old_continuations(run: RunFolder, stage_index: int, num_kept: int = 1) -> None:
    """Remove the checkpoints CONTINUATION of all stages but the last `num_kept`, the last of which is `stage_index`.

    A killed or forked run continues at its first unfinished stage, and so from the CONTINUATION of the stage before. A
    run that was rolled back continues from an earlier one (see `fairseq_alma.lm.rollback`).
    """
    for folder in run.stage_folders():
        is_old = index_of_stage(folder) <= stage_index - num_kept
        for path in folder.glob(f"member_*/{CONTINUATION}") if is_old else ():
            remove(path)

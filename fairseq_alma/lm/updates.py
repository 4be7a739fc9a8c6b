"""The updates of a training: forward and backward passes, the optimizer's step, and the values that are logged.

fairseq's `Trainer.train_step` reads about ten numbers from the device after each update, so that the host waits for the
device, and the device then for the host. Here, the values to log are summed on the device, and read when they are
logged.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from fairseq import utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor

METERS = "train_inner"
"""Name of the meters that average the logged values, and of the lines in the log. Checkpoints contain the meters."""


class Updates:
    """Makes the updates of a training.

    Args:
        trainer: fairseq's trainer, which has the task, the model, the criterion and the optimizer.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._cfg = trainer.cfg
        self._sums: dict[str, Any] = {}
        self._logged_at, self._num_tokens, self._num_updates = time.monotonic(), 0.0, 0

    def make(self, samples: Sequence[dict[str, Any]]) -> None:
        """Make one update: add the gradients of several batches, and let the optimizer make a step.

        Args:
            samples: the batches of this rank (process), as fairseq's collater makes them.

        Raises:
            FloatingPointError: if a loss or the norm of the gradient is not finite (see `LossCheck`).
            MemoryError: if the device does not have enough memory for a batch.
        """
        trainer, world_size = self._trainer, self._trainer.data_parallel_world_size
        number = trainer.get_num_updates()
        # The random numbers of an update do not depend on the updates before it, so a continued training equals an
        # uninterrupted one.
        utils.set_torch_seed(self._cfg.common.seed + number)
        trainer.model.train()
        trainer.criterion.train()
        trainer.zero_grad()
        num_tokens: Any = 0.0
        for position, sample in enumerate(samples, start=1):
            if trainer.cuda:
                sample = utils.apply_to_sample(self._to_device, sample)
            # Only the last backward pass of an update sums the gradients over the ranks.
            with nullcontext() if position == len(samples) else self._without_sum():
                _, count, log = trainer.task.train_step(
                    sample, trainer.model, trainer.criterion, trainer.optimizer, number
                )
            num_tokens += count
            self._add(log)
        if world_size > 1:
            num_tokens = torch.tensor(num_tokens, dtype=torch.float64, device=trainer.device)
            distributed_utils.all_reduce(num_tokens, trainer.data_parallel_process_group)
        # Without a token, because all text of the update is masked, the gradient is 0.
        num_tokens = num_tokens.clamp(min=1) if torch.is_tensor(num_tokens) else max(num_tokens, 1)
        trainer.optimizer.all_reduce_grads(trainer.model)
        # The gradient of the mean loss of a token. all_reduce_grads has computed the mean over the ranks.
        trainer.optimizer.multiply_grads(world_size / num_tokens)
        limit = self._cfg.optimization.clip_norm
        norm = trainer.clip_grad_norm(limit)
        trainer.task.check_finite(norm, number + 1, "norm of the gradient")
        trainer.task.optimizer_step(trainer.optimizer, model=trainer.model, update_num=number)
        trainer.set_num_updates(number + 1)
        self._add({"norm": norm, "clipped": norm > limit if limit > 0 else 0.0, "updates": 1 / world_size})

    def flush(self) -> dict[str, Any]:
        """Read the sums from the device, and add them to the meters and to the counts of the task.

        All ranks must call this at the same update. Call it before a checkpoint is written, because the checkpoint
        contains the meters and the counts.

        Returns:
            The sums since the last call, over all ranks.
        """
        if not self._sums:
            return {}
        trainer, sums = self._trainer, self._sums
        self._sums = {}
        if trainer.data_parallel_world_size > 1:
            group = trainer.data_parallel_process_group
            sums = distributed_utils.all_reduce_dict(sums, device=trainer.device, group=group)
        names = list(sums)
        on_device = [name for name in names if torch.is_tensor(sums[name])]
        if on_device:  # one transfer for all
            values = torch.stack([sums[name].detach().double().reshape(()) for name in on_device]).tolist()
            sums = {**sums, **dict(zip(on_device, values, strict=True))}
        count = round(sums["updates"])
        trainer.criterion.train()  # the task counts these tokens as those of the training
        with metrics.aggregate(METERS):
            trainer.task.reduce_metrics([sums], trainer.get_criterion())
            num_ranks = trainer.data_parallel_world_size
            metrics.log_scalar("gnorm", sums["norm"] / num_ranks / count, count, priority=400, round=3)
            metrics.log_scalar("clip", 100 * sums["clipped"] / num_ranks / count, count, priority=500, round=1)
            metrics.log_scalar("num_updates", trainer.get_num_updates(), weight=0, priority=200)
            metrics.log_scalar("lr", trainer.get_lr(), weight=0, priority=300)
        self._num_tokens += sums["ntokens"]
        self._num_updates += count
        return sums

    def to_log(self) -> dict[str, Any]:
        """Return the values to log: means since the last call, and the speed. All ranks must call this."""
        self.flush()
        values = metrics.get_smoothed_values(METERS)
        metrics.reset_meters(METERS)
        now = time.monotonic()
        seconds, self._logged_at = now - self._logged_at, now
        values["wps"] = round(self._num_tokens / seconds, 1)
        values["ups"] = round(self._num_updates / seconds, 2)
        values["wpb"] = round(self._num_tokens / max(1, self._num_updates), 1)
        values.pop("bsz", None)  # of all updates together
        values["wall"] = round(self._trainer.cumulative_training_time())
        self._num_tokens, self._num_updates = 0.0, 0
        return values

    def _add(self, log: dict[str, Any]) -> None:
        for name, value in log.items():
            # In float64, because the sum of the losses of many updates is large.
            value = value.detach().double() if torch.is_tensor(value) else value
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._trainer.device, non_blocking=True)

    def _without_sum(self) -> Any:
        """Return a context manager in which a backward pass does not sum the gradients over the ranks."""
        trainer = self._trainer
        # With fully_sharded, each rank would need memory for the gradients of all weights.
        can_wait = trainer.data_parallel_world_size > 1 and hasattr(trainer.model, "no_sync") and not trainer.is_fsdp
        return trainer.model.no_sync() if can_wait else nullcontext()

"""The training of a member in a stage: batches, updates, average, validation, checkpoints, stop.

The parts are fairseq's: its task, model, criterion, optimizer, learning rates, iterator, `Trainer` and the format of
checkpoints. `train_stage` calls them in their order.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from fairseq import utils
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from fairseq.logging import metrics, progress_bar
from fairseq.trainer import Trainer

from fairseq_alma.checkpoints import AVERAGE, BEST, EXPERT_DIGESTS, LAST, link
from fairseq_alma.core.files import written_aside
from fairseq_alma.lm.average import Average
from fairseq_alma.lm.compilation import cost_so_far
from fairseq_alma.lm.updates import METERS, Updates

logger = logging.getLogger(__name__)

STOPPED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, if a checkpoint was written. Shells show this number for a process ended by SIGTERM."""

SECONDS_PER_CHECK, MAX_UPDATES_PER_CHECK = 2.0, 10
"""Longest time, and largest number of updates, between two broadcasts that tell all processes of a training whether to
write a checkpoint.

If several processes train a member, the first process decides and tells the others. The broadcast is not sent after
every update, because it takes time."""


def train_stage(
    trainer: Trainer,
    epoch: EpochBatchIterator,
    checkpoint_minutes: float,
    average: Average | None = None,
    best: float | None = None,
) -> None:
    """Train a member until it has made the updates of the stage, and write its checkpoints.

    Args:
        trainer: fairseq's trainer, with the weights from which the training begins or continues.
        epoch: the iterator over the batches, at the position from which the training continues.
        checkpoint_minutes: time in minutes between two checkpoints if there is no validation in between.
        average: the average of the weights; None: they are not averaged.
        best: the best validation perplexity of the stage so far; None if it has none.

    Raises:
        SystemExit: with the status STOPPED, after SIGTERM and after a checkpoint was written.
        FloatingPointError: if a loss or a gradient is not finite.
    """
    config, last = trainer.cfg, trainer.cfg.optimization.max_update
    interval = config.dataset.validate_interval_updates or last
    updates = Updates(trainer)
    checkpoints, due = Checkpoints(trainer, updates, average, best), CheckpointTimer(trainer, checkpoint_minutes)
    with _garbage_kept():
        while trainer.get_num_updates() < last:
            batches = _batches_of_epoch(trainer, epoch)
            trainer.begin_epoch(epoch.epoch)
            for samples in batches:
                updates.make(samples)
                if average is not None:
                    average.add()
                number, perplexity = trainer.get_num_updates(), None
                if number % config.common.log_interval == 0:
                    batches.log(updates.to_log() | _compiled(trainer), tag=METERS, step=number)
                if number == last or number % interval == 0:
                    perplexity = validate(trainer, epoch.epoch, average, checkpoints.best)
                must_save, must_stop = due.after(number)
                if must_save or perplexity is not None:
                    checkpoints.save(epoch, perplexity)
                    due.saved()
                if number == last:
                    break
                if must_stop:
                    due.stop()
            logger.info("end of epoch %d", epoch.epoch)
            # fairseq makes a new iterator for each epoch. The old one refers to itself (through a bound method), so it
            # would exist until the next garbage collection, with its worker processes (if num_workers is above 0) and
            # open files. Removed by garbage collection, each worker process would also stop the training for 5 seconds.
            epoch.epoch_batch_sampler.ordered_batches = None
            trainer.lr_step(epoch.epoch)
            epoch = trainer.get_train_iterator(epoch.next_epoch_idx, load_dataset=False)


def validate(trainer: Trainer, epoch: int, average: Average | None, best: float | None) -> float:
    """Return the perplexity on the validation set, of the averaged weights if weights are averaged, and log it.

    Args:
        trainer: fairseq's trainer.
        epoch: number of the current epoch, for the log.
        average: the average of the weights, or None.
        best: the best validation perplexity of the stage before, for the log; None if there is none.
    """
    subset = trainer.cfg.dataset.valid_subset
    if (seed := trainer.cfg.dataset.fixed_validation_seed) is not None:
        utils.set_torch_seed(seed)
    logger.info('begin validation on "%s" subset', subset)
    with average.used() if average is not None else nullcontext():
        trainer.begin_valid_epoch(epoch)
        batches = trainer.get_valid_iterator(subset).next_epoch_itr(shuffle=False, set_dataset_epoch=False)
        with metrics.aggregate(new_root=True) as meters:
            for sample in batches:
                trainer.valid_step(sample)
        values = meters.get_smoothed_values()
        trainer.task.post_validate(trainer.get_model(), values, meters)
    values["num_updates"] = trainer.get_num_updates()
    values["best_ppl"] = values["ppl"] if best is None else min(best, values["ppl"])
    _progress(trainer, [], epoch).print(values, tag=subset, step=trainer.get_num_updates())
    return values["ppl"]


def _batches_of_epoch(trainer: Trainer, epoch: EpochBatchIterator) -> Any:
    """Return fairseq's progress bar over the batches that are left in an epoch, in one list for each update."""
    config = trainer.cfg
    batches = epoch.next_epoch_itr(fix_batches_to_gpus=config.distributed_training.fix_batches_to_gpus)
    (num_batches,) = config.optimization.update_freq
    return _progress(trainer, GroupedIterator(batches, num_batches), epoch.epoch)


def _progress(trainer: Trainer, batches: Any, epoch: int) -> Any:
    """Return fairseq's progress bar over batches, which writes the log and what the options of fairseq ask for."""
    options, is_first = trainer.cfg.common, trainer.is_data_parallel_master
    return progress_bar.progress_bar(
        batches, log_format=options.log_format, log_file=options.log_file, log_interval=options.log_interval,
        epoch=epoch, tensorboard_logdir=options.tensorboard_logdir if is_first else None,
        wandb_project=options.wandb_project if is_first else None,
        wandb_run_name=os.environ.get("WANDB_NAME", Path(trainer.cfg.checkpoint.save_dir).name),
        aim_repo=options.aim_repo if is_first else None, aim_run_hash=options.aim_run_hash if is_first else None,
        azureml_logging=options.azureml_logging if is_first else False, default_log_format="simple",
    )  # fmt: skip


def _compiled(trainer: Trainer) -> dict[str, Any]:
    """Return what compiling has cost so far, for the log. After the first updates, it should not grow any more."""
    if not trainer.cfg.model.get("compile_batch", 0):
        return {}
    num_graphs, seconds = cost_so_far()
    return {"compiled_graphs": num_graphs, "compile_seconds": seconds}


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """In the `with` block, the garbage collector is off, because each collection would stop the updates for a while.

    Garbage is collected before a checkpoint is written.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        # Otherwise, the triton library would report the frozen objects as memory leaks.
        gc.unfreeze()


class CheckpointTimer:
    """Says when a checkpoint is due, and when the training must stop: the same on all ranks (processes).

    From now on, SIGTERM does not end the process at once, but after a checkpoint was written.

    Args:
        trainer: fairseq's trainer.
        minutes: time between two checkpoints.
    """

    def __init__(self, trainer: Trainer, minutes: float):
        self._world_size, self._seconds = trainer.data_parallel_world_size, 60 * minutes
        self._saved = time.monotonic()
        self._must_stop = False
        # With several ranks: the number of updates at the next broadcast, and the time and the number of updates at the
        # last one.
        self._next_check, self._checked, self._checked_at = 0, time.monotonic(), 0
        signal.signal(signal.SIGTERM, self._stop_soon)
        # In a terminal, Ctrl-C sends SIGINT to all processes. The process that has started this one handles it: it
        # sends SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def after(self, num_updates: int) -> tuple[bool, bool]:
        """Return whether a checkpoint is due after an update, and whether the training must then stop after SIGTERM.

        All ranks get the answers of the first one.
        """
        answers = [self._must_stop or time.monotonic() - self._saved > self._seconds, self._must_stop]
        if self._world_size > 1:
            if num_updates < self._next_check:
                return False, False
            now = time.monotonic()
            seconds_per_update = (now - self._checked) / max(1, num_updates - self._checked_at)
            self._checked, self._checked_at = now, num_updates
            interval = max(1, min(MAX_UPDATES_PER_CHECK, int(SECONDS_PER_CHECK / max(seconds_per_update, 1e-6))))
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            broadcast = torch.tensor([*answers, interval], dtype=torch.int32, device=device)
            torch.distributed.broadcast(broadcast, src=0)
            *told, interval = broadcast.tolist()
            answers = [bool(answer) for answer in told]
            self._next_check = num_updates + interval
        return answers[0], answers[1]

    def saved(self) -> None:
        """Say that a checkpoint was written."""
        self._saved = time.monotonic()

    def stop(self) -> NoReturn:
        """End the process with the status STOPPED, on all ranks at the same time."""
        if self._world_size > 1:
            # If one process ended, the others would be killed, also the one that writes the checkpoint.
            torch.distributed.barrier()
        sys.exit(STOPPED)

    def _stop_soon(self, *_: object) -> None:
        self._must_stop = True


class Checkpoints:
    """Writes the checkpoints of a training.

    checkpoint_last.pt is the newest checkpoint. checkpoint_best.pt is the checkpoint with the best validation
    perplexity. If the newest checkpoint is also the best, the two names are hard links to one file. (fairseq would
    write three files with the same content.)

    Args:
        trainer: fairseq's trainer.
        updates: the updates so far, whose sums are part of a checkpoint.
        average: the average of the weights, which is part of a checkpoint; or None.
        best: the best validation perplexity of the stage so far, or None.
    """

    def __init__(self, trainer: Trainer, updates: Updates, average: Average | None, best: float | None):
        self._trainer, self._updates, self._average = trainer, updates, average
        self.best = best
        """The best validation perplexity of the stage so far."""

    def save(self, epoch: EpochBatchIterator, perplexity: float | None) -> None:
        """Write a checkpoint. All ranks (processes) must call this, and one of them writes it.

        Args:
            epoch: the iterator over the batches, whose position is saved.
            perplexity: the validation perplexity; None if the model was not validated now.
        """
        trainer = self._trainer
        gc.collect()
        self._updates.flush()
        folder = Path(trainer.cfg.checkpoint.save_dir)
        is_best = perplexity is not None and (
            self.best is None or perplexity <= self.best or not (folder / BEST).exists()
        )
        if is_best:
            self.best = perplexity
        trainer.consolidate_optimizer()
        averages_of_experts = {} if self._average is None else self._average.collect_experts()
        if not trainer.should_save_checkpoint_on_current_rank:
            if trainer.always_call_state_dict_during_save_checkpoint:
                trainer.state_dict()
            return
        extra_state = {
            "train_iterator": epoch.state_dict(), "val_loss": perplexity, **trainer.task.get_checkpoint_dict(),
        }  # fmt: skip
        if self.best is not None:
            extra_state["best"] = self.best
        if self._average is not None:
            extra_state[AVERAGE] = self._average.entry(averages_of_experts)
        if digests := _digests_of_collected_experts(trainer.get_model()):
            extra_state[EXPERT_DIGESTS] = digests
        # Replace checkpoint_last.pt. This does not change checkpoint_best.pt, even if both names are hard links to one
        # file, because the old file is not overwritten.
        with written_aside(folder / LAST, durable=False) as temporary:
            trainer.save_checkpoint(str(temporary), extra_state)
        if is_best:
            link(folder / LAST, folder / BEST)


def _digests_of_collected_experts(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the entry EXPERT_DIGESTS of a checkpoint, after the optimizer has collected the experts on this rank.

    It is empty if the experts are not spread over ranks.
    """
    collected = {name: parameter.__dict__.get("collected") for name, parameter in model.named_parameters()}
    return {name: values.digests for name, values in collected.items() if values is not None}

"""Trains one member of a stage: python -m fairseq_alma.lm.train_member CONFIG [--checkpoint-minutes N]

If several machines train the member, the program is started on each of them, with --address and --node.

alma-lm starts this program. CONFIG is a file with fairseq's configuration, which alma-lm writes to the folder of the
member. The training is that of fairseq-train, with these changes that fairseq has no option for:

- Checkpoints are written not only after a validation, but also at equal time intervals, and before the program ends
  after SIGTERM.
- The folder of the member is locked by a lease, so that no other process trains the same member.
- Every checkpoint is written only once. fairseq would write three files with the same content.
"""

import argparse
import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

# Import fairseq_cli before fairseq, because the package that is imported first determines the format of the log.
from fairseq_cli import train as fairseq_train
from torch.multiprocessing.spawn import ProcessExitedException

# isort: split
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import DictConfig, OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints import AVERAGE, BEST, EXPERT_DIGESTS, LAST, link, require_checkpoint
from fairseq_alma.core.allocator import keep_freed_memory
from fairseq_alma.core.averaging import AverageWeights
from fairseq_alma.core.errors import RunError, StageError
from fairseq_alma.core.fence import Fence, hold
from fairseq_alma.core.files import written_aside
from fairseq_alma.core.lease import Lease
from fairseq_alma.lm.average import Average
from fairseq_alma.modules.expert_parallel import digests_of_experts
from launch.local import killed_with

STOPPED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, if a checkpoint was written. Shells show this number for a process ended by SIGTERM."""

SECONDS_PER_CHECK, MAX_UPDATES_PER_CHECK = 2.0, 10
"""Longest time, and largest number of updates, between two broadcasts that tell all processes of a training whether to
write a checkpoint.

If several processes train a member, the first process decides and tells the others. The broadcast is not sent after
every update, because it takes time."""


class Checkpoints:
    """Decides when the checkpoints of a training are written, and writes them.

    checkpoint_last.pt is the newest checkpoint. checkpoint_best.pt is the checkpoint with the best validation score. If
    the newest checkpoint is also the best, the two names are hard links to one file.

    Args:
        minutes: time between two checkpoints if there is no validation in between.
        average: how the model's weights are averaged over the updates. By default they are not.
    """

    def __init__(self, minutes: float, average: AverageWeights | None = None):
        self._seconds = 60 * minutes
        self._average_weights = average
        self._average: Average | None = None
        self._averaged_at = 0
        self._saved = time.monotonic()
        self._saved_at = 0
        self._must_stop = False
        # With several processes: the number of updates at the next broadcast, and the time and the number of updates at
        # the last one.
        self._next_check, self._checked, self._checked_at = 0, time.monotonic(), 0
        self._validate_and_save, self._validate = fairseq_train.validate_and_save, fairseq_train.validate

    def validate_and_save(
        self, cfg: DictConfig, trainer: Any, task: Any, epoch_itr: Any, valid_subsets: list[str], end_of_epoch: bool
    ) -> tuple[list[float | None], bool]:
        """Validate and save like fairseq, and also save a checkpoint if enough time has passed since the last one.

        fairseq calls this method after every update, because it replaces `fairseq_cli.train.validate_and_save`. It
        returns the same: the validation losses, and whether the training should stop.

        The first call turns off the automatic garbage collection, because each collection would stop the training for
        up to half a second. Instead, garbage is collected before a checkpoint is written. From the first call on,
        SIGTERM does not end the process at once, but after a checkpoint was written.

        Raises:
            SystemExit: with the status STOPPED, after SIGTERM.
        """
        if gc.isenabled():
            signal.signal(signal.SIGTERM, self._stop_soon)
            # In a terminal, Ctrl-C sends SIGINT to all processes. The process that has started this one handles it: it
            # sends SIGTERM.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gc.collect()
            gc.freeze()
            gc.disable()
            # Undo gc.freeze at exit. Otherwise, the triton library would report the frozen objects as memory leaks.
            atexit.register(gc.unfreeze)
        if self._average is not None and trainer.get_num_updates() > self._averaged_at:
            self._average.add()
            self._averaged_at = trainer.get_num_updates()
        losses, should_stop = self._validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        if end_of_epoch:
            # fairseq makes a new iterator for each epoch. The old one refers to itself (through a bound method), so it
            # would exist until the next garbage collection, with its worker processes (if num_workers is above 0) and
            # open files. Removed by garbage collection, each worker process would also stop the training for 5 seconds.
            epoch_itr.epoch_batch_sampler.ordered_batches = None
        num_updates = trainer.get_num_updates()
        must_save, must_stop = self._what_is_due(num_updates, trainer.data_parallel_world_size)
        if must_save and num_updates != self._saved_at:
            self.save(cfg.checkpoint, trainer, epoch_itr, None)
        if must_stop and not should_stop:
            if trainer.data_parallel_world_size > 1:
                # If one process ended, the others would be killed, also the one that writes the checkpoint.
                torch.distributed.barrier()
            sys.exit(STOPPED)
        return losses, should_stop

    def begin(self, model: torch.nn.Module, entry: Mapping[str, Any] | None, num_updates: int) -> None:
        """Begin to average the weights, if the settings say so.

        Args:
            model: the model, with the weights from which the training continues.
            entry: the entry AVERAGE of the checkpoint from which it continues, or None.
            num_updates: number of updates of this stage in that checkpoint.
        """
        if self._average_weights is not None:
            self._average, self._averaged_at = Average(model, self._average_weights, entry), num_updates

    def validate(self, *arguments: Any) -> Any:
        """Validate like fairseq, but the averaged weights if weights are averaged."""
        with self._average.used() if self._average is not None else nullcontext():
            return self._validate(*arguments)

    def _stop_soon(self, *_: object) -> None:
        self._must_stop = True

    def _what_is_due(self, num_updates: int, world_size: int) -> tuple[bool, bool]:
        """Return whether it is time for a checkpoint, and whether the training must stop after SIGTERM.

        All processes of a training get the same answers: those of the first process.
        """
        answers = [self._must_stop or time.monotonic() - self._saved > self._seconds, self._must_stop]
        if world_size > 1:
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

    def save(self, cfg: DictConfig, trainer: Any, epoch_itr: Any, val_loss: float | None) -> str | None:
        """Write a checkpoint. This method replaces `fairseq.checkpoint_utils.save_checkpoint`.

        Args:
            cfg: the group `checkpoint` of the configuration.
            trainer: fairseq's trainer.
            epoch_itr: the iterator over the training data, whose position is saved.
            val_loss: the validation score, the smaller the better; None if the model was not validated now.

        Returns:
            The path of the checkpoint. Only one of the processes that train a member writes it; the others return None.
        """
        self._saved, self._saved_at = time.monotonic(), trainer.get_num_updates()
        gc.collect()
        folder = Path(cfg.save_dir)
        # fairseq reads and writes the best score so far as an attribute of its function save_checkpoint.
        best = getattr(checkpoint_utils.save_checkpoint, "best", None)
        is_best = val_loss is not None and (best is None or val_loss <= best or not (folder / BEST).exists())
        if is_best:
            best = checkpoint_utils.save_checkpoint.best = val_loss
        trainer.consolidate_optimizer()
        if not trainer.should_save_checkpoint_on_current_rank:
            if trainer.always_call_state_dict_during_save_checkpoint:
                trainer.state_dict()
            return None
        extra_state = {
            "train_iterator": epoch_itr.state_dict(),
            "val_loss": val_loss,
            **trainer.task.get_checkpoint_dict(),
        }
        if best is not None:
            extra_state["best"] = best
        if self._average is not None:
            extra_state[AVERAGE] = self._average.entry()
        if digests := digests_of_collected_experts(trainer.get_model()):
            extra_state[EXPERT_DIGESTS] = digests
        # Replace checkpoint_last.pt. This does not change checkpoint_best.pt, even if both names are hard links to one
        # file, because the old file is not overwritten.
        with written_aside(folder / LAST, durable=False) as temporary:
            trainer.save_checkpoint(str(temporary), extra_state)
        if is_best:
            link(folder / LAST, folder / BEST)
        return str(folder / LAST)


def digests_of_collected_experts(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the entry EXPERT_DIGESTS of a checkpoint, after the optimizer has collected the experts on this rank.

    It is empty if the experts are not spread over ranks.
    """
    collected = {name: parameter.__dict__.get("collected") for name, parameter in model.named_parameters()}
    return {name: values.digests for name, values in collected.items() if values is not None}


def check_experts(model: torch.nn.Module, digests: Mapping[str, list[str]], path: str | Path, advice: str) -> None:
    """Raise StageError if the experts that `model` has loaded from the checkpoint `path` are not those that were saved.

    The model has all experts or those of this rank. `digests` is the entry EXPERT_DIGESTS of the checkpoint, and
    `advice` the end of the message.
    """
    for name, parameter in model.named_parameters():
        own = parameter.expert.own if hasattr(parameter, "expert") else slice(None)
        if name in digests and digests_of_experts(parameter) != digests[name][own]:
            raise StageError(f"{path} is damaged: the experts in {name} are not those that were saved. {advice}")


def _continue_optimizer(trainer: Any, path: Path) -> None:
    """Load the state of the optimizer from the checkpoint `path`; fairseq starts a stage with a new state.

    A grown checkpoint, and that of an untrained model, has no state. Then the optimizer begins a new one.
    """
    state = require_checkpoint(path).get("last_optimizer_state")
    if state is not None:
        trainer.optimizer.load_state_dict(state, trainer.optimizer.optimizer_config)
        trainer.lr_step_update()


def _load_mapped(path: str, arg_overrides: None = None, load_on_all_ranks: bool = False) -> dict[str, Any]:
    """Return a checkpoint, with tensors memory-mapped. Replaces `fairseq.checkpoint_utils.load_checkpoint_to_cpu`.

    fairseq would read the whole file into the memory of each rank.
    """
    return require_checkpoint(Path(path))


def train(
    config: DictConfig,
    checkpoint_minutes: float,
    average: AverageWeights | None = None,
    keeps_optimizer: bool = False,
    fence: Fence | None = None,
) -> None:
    """Train a member in this process. If several processes train the member, each of them calls this function.

    Args:
        config: fairseq's configuration of the training.
        checkpoint_minutes: time in minutes between two checkpoints if there is no validation in between.
        average: how the model's weights are averaged. By default they are not.
        keeps_optimizer: whether the optimizer continues with its state in the checkpoint from which the stage starts.
        fence: the fence of the lease of the member's folder, which the main process holds.
    """
    if fence is not None:
        hold(fence)
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        # This is one of several processes, which the main process has started. If the main process is killed, the
        # others must end too. torch sends them SIGINT, which does not end a process that waits for another process.
        killed_with(os.getppid())()
    fairseq_alma.register()
    checkpoints = Checkpoints(checkpoint_minutes, average)
    load_checkpoint = checkpoint_utils.load_checkpoint

    def load_and_check(cfg: DictConfig, trainer: Any, **arguments: Any) -> tuple[dict[str, Any] | None, Any]:
        path, advice = Path(cfg.save_dir) / LAST, f"Remove {cfg.save_dir} to restart this stage"
        begins = not path.exists()
        if begins:
            path, advice = cfg.finetune_from_model, "Remove the folder of the stage that wrote it to train it again"
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **arguments)
        check_experts(trainer.get_model(), (extra_state or {}).get(EXPERT_DIGESTS, {}), path, advice)
        if begins and keeps_optimizer and path is not None:
            _continue_optimizer(trainer, Path(path))
        checkpoints.begin(trainer.get_model(), (extra_state or {}).get(AVERAGE), trainer.get_num_updates())
        return extra_state, epoch_itr

    if config.model.get("expert_parallel", 1) > 1:
        checkpoint_utils.load_checkpoint_to_cpu = _load_mapped
    # A function, because fairseq sets an attribute of it, which a method does not allow.
    checkpoint_utils.save_checkpoint = lambda *arguments: checkpoints.save(*arguments)
    checkpoint_utils.load_checkpoint = load_and_check
    fairseq_train.validate_and_save, fairseq_train.validate = checkpoints.validate_and_save, checkpoints.validate
    fairseq_train.main(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the member that the configuration file describes. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_alma.lm.train_member", description=__doc__)
    parser.add_argument("config", type=Path, help="file with fairseq's configuration")
    parser.add_argument(
        "--checkpoint-minutes", type=float, default=10.0, help="time between two checkpoints (default: 10 minutes)"
    )
    parser.add_argument(
        "--average", type=AverageWeights.parse, help="the setting `average` of alma-lm (default: no average)"
    )
    parser.add_argument(
        "--keep-optimizer", action="store_true", help="continue the state of the optimizer from the previous stage"
    )
    parser.add_argument(
        "--address",
        help="HOST:PORT at which the machines meet; HOST is node 0 (default: one machine trains the member)",
    )
    parser.add_argument(
        "--node", type=int, default=os.environ.get("SLURM_NODEID", 0), help="number of this machine, from 0"
    )
    arguments = parser.parse_args(argv)
    config = OmegaConf.load(arguments.config)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    if arguments.address:
        _use_several_nodes(config, arguments.address, arguments.node)
    # On a CPU, this made the updates of a model with 64 experts 40% faster, and with 4 experts 7% faster.
    keep_freed_memory()
    signal.signal(signal.SIGTERM, _stop_processes)
    try:
        is_first = config.distributed_training.distributed_rank == 0
        with Lease(config.checkpoint.save_dir) if is_first else nullcontext() as lease:
            distributed_utils.call_main(
                config, train, checkpoint_minutes=arguments.checkpoint_minutes,
                average=arguments.average, keeps_optimizer=arguments.keep_optimizer,
                fence=lease.fence if lease else None,
            )  # fmt: skip
    except RunError as error:
        print(f"RunError: {error}", file=sys.stderr)
        return 2
    except ProcessExitedException as error:
        if error.exit_code != STOPPED:
            raise
        return STOPPED
    return 0


def _use_several_nodes(config: DictConfig, address: str, node: int) -> None:
    """Change the configuration so that this machine and others train the member together. See `main`."""
    distributed = config.distributed_training
    distributed.distributed_init_method = f"tcp://{address}"
    # The number of the first process on this machine, among those of all machines.
    distributed.distributed_rank = node * distributed.nprocs_per_node
    if not config.common.cpu and torch.cuda.is_available():
        # fairseq starts a process for each GPU that it sees, also for those that this training does not use.
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if all(names) else [str(gpu) for gpu in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[: distributed.nprocs_per_node])


def _stop_processes(*_: object) -> None:
    """Handle SIGTERM: pass it on to the other processes of this training, or end this process if there are none.

    During the updates of a training with one process, `Checkpoints` handles SIGTERM instead.
    """
    processes = multiprocessing.active_children()
    for process in processes:
        process.terminate()
    if not processes:
        sys.exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())

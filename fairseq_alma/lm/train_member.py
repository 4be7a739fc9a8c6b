"""Trains one member of a stage: python -m fairseq_alma.lm.train_member CONFIG [--checkpoint-minutes N]

If several machines train the member, the program is started on each of them, with --address and --node.

alma-lm starts this program. CONFIG is a file with fairseq's configuration, which alma-lm writes to the folder of the
member. The training is that of fairseq-train, with another loop (see `training_loop`). The folder of the member is
locked by a lease, so that no other process trains the same member.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Before the rest of fairseq, which also configures the log. This module gives it the format of fairseq-train.
import fairseq_cli.train  # noqa: F401

# isort: split
import numpy as np
import torch
from fairseq import checkpoint_utils, tasks, utils
from fairseq.distributed import fsdp_enable_wrap, fsdp_wrap
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessExitedException

import fairseq_alma
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.checkpoints import AVERAGE, EXPERT_DIGESTS, LAST, require_checkpoint
from fairseq_alma.core.allocator import keep_freed_memory
from fairseq_alma.core.averaging import AverageWeights
from fairseq_alma.core.errors import RunError, StageError
from fairseq_alma.core.fence import Fence, LeaseLostError, hold
from fairseq_alma.core.lease import Lease
from fairseq_alma.lm.average import Average
from fairseq_alma.lm.compilation import keep_compiled_code
from fairseq_alma.lm.training_loop import STOPPED, train_stage
from fairseq_alma.modules.expert_parallel import digests_of_experts
from launch.local import killed_with

logger = logging.getLogger(__name__)


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
    plugin: str | None = None,
    fence: Fence | None = None,
) -> None:
    """Train a member in this process. If several processes train the member, each of them calls this function.

    Args:
        config: fairseq's configuration of the training.
        checkpoint_minutes: time in minutes between two checkpoints if there is no validation in between.
        average: how the model's weights are averaged. By default they are not.
        keeps_optimizer: whether the optimizer continues with its state in the checkpoint from which the stage starts.
        plugin: a module of the user that is imported first.
        fence: the fence of the lease of the member's folder, which the main process holds.
    """
    if fence is not None:
        hold(fence)
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        # This is one of several processes, which the main process has started. If the main process is killed, the
        # others must end too. torch sends them SIGINT, which does not end a process that waits for another process.
        killed_with(os.getppid())()
    fairseq_alma.register()
    if plugin is not None:
        load_plugin(plugin)
    if config.model.get("compile_batch", 0):
        keep_compiled_code()
    if config.model.get("expert_parallel", 1) > 1:
        checkpoint_utils.load_checkpoint_to_cpu = _load_mapped
    metrics.reset()
    np.random.seed(config.common.seed)
    utils.set_torch_seed(config.common.seed)
    logger.info(config)
    trainer = _trainer(config)
    folder = Path(config.checkpoint.save_dir)
    continues, start = (folder / LAST).exists(), config.checkpoint.finetune_from_model
    state, epoch = checkpoint_utils.load_checkpoint(config.checkpoint, trainer)
    state = state or {}
    if continues:
        path, advice = folder / LAST, f"Remove {folder} to restart this stage"
    else:
        path, advice = start, "Remove the folder of the stage that wrote it to train it again"
    check_experts(trainer.get_model(), state.get(EXPERT_DIGESTS, {}), path, advice)
    if not continues and keeps_optimizer and start is not None:
        _continue_optimizer(trainer, Path(start))
    averaged = None if average is None else Average(trainer.get_model(), average, state.get(AVERAGE))
    train_stage(trainer, epoch, checkpoint_minutes, averaged, state.get("best") if continues else None)


def _trainer(config: DictConfig) -> Trainer:
    """Return fairseq's trainer with the task, model, criterion and validation set that the configuration describes."""
    task = tasks.setup_task(config.task)
    if str(config.distributed_training.ddp_backend) == "fully_sharded":
        with fsdp_enable_wrap(config.distributed_training):
            model = fsdp_wrap(task.build_model(config.model))
    else:
        model = task.build_model(config.model)
    task.load_dataset(config.dataset.valid_subset)
    return Trainer(config, task, model, task.build_criterion(config.criterion))


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
    parser.add_argument("--plugin", help="the setting `plugin` of alma-lm (default: none)")
    parser.add_argument(
        "--run-fence", type=Path, help="the fence of alma-lm: without it, alma-lm has lost the run (default: not asked)"
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
            # Ask after the lease was taken: who has taken over the run from now on finds the folder in use. Before,
            # alma-lm may have slept between its last write and the start of this process.
            if is_first and arguments.run_fence is not None and not arguments.run_fence.is_dir():
                raise LeaseLostError(arguments.run_fence.parent)
            distributed_utils.call_main(
                config, train, checkpoint_minutes=arguments.checkpoint_minutes,
                average=arguments.average, keeps_optimizer=arguments.keep_optimizer, plugin=arguments.plugin,
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

    During the updates of a training with one process, `training_loop.CheckpointTimer` handles SIGTERM instead.
    """
    processes = multiprocessing.active_children()
    for process in processes:
        process.terminate()
    if not processes:
        sys.exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())

"""Trains the members (networks) of a stage: starts a process for each member, and manages the member's files."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app.plugins import plugin_digest
from fairseq_alma.checkpoints import (
    BEST,
    CONTINUATION,
    CRASH,
    LAST,
    digest_of_state,
    drop_optimizer_state,
    link,
    num_updates,
    read_checkpoint,
    repair_stage_folder,
    require_checkpoint,
)
from fairseq_alma.core.errors import RunError, StageError, StoppedError
from fairseq_alma.core.files import read_json, remove, unfinished_files, write_json, written_aside
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream import MegaBatch
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.data.mega_batch_set import parse_mega_batches
from fairseq_alma.evaluation.flops import RowFlops, count_forward_flops, count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.lm.average import finish_stage
from fairseq_alma.lm.batches import usable_devices
from fairseq_alma.lm.failures import STOPPED, failure_message
from fairseq_alma.lm.fairseq_config import (
    Member,
    OwnOptions,
    TrainingConfigs,
    identity_of_config,
    updates_of_stage,
    write_untrained_checkpoint,
)
from fairseq_alma.lm.init_from import initial_weights
from fairseq_alma.lm.member_config import CONFIG, read_config
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.shared_members import SharedMembers, key_of
from fairseq_alma.lm.stage_processes import LocalProcesses, training_command

logger = logging.getLogger(__name__)

STARTED, DONE = "started.json", "done.json"
"""Two files in the folder of a member. STARTED exists during the training of the member, DONE after it.

STARTED contains the type and the number of devices, the number of sequences in a forward pass and, with the setting
`share`, the key of the training (see SharedMembers). DONE contains the cost of the training."""


class Started(TypedDict):
    """The content of started.json, as far as it is read."""

    key: str | None


class MemberTraining:
    """Trains the members of a stage, each in a process of its own. Writes done.json for each trained member.

    Args:
        settings: settings of the run.
        stream: training and validation data.
        processes: starts the processes.
        own_options: what a learner of the user changes in a stage; None: nothing.
    """

    def __init__(
        self,
        settings: LanguageModelSettings,
        stream: TrainingView,
        processes: LocalProcesses,
        own_options: OwnOptions | None = None,
    ):
        self.settings = settings
        self._stream = stream
        self._shared = SharedMembers(settings.reuse_from) if settings.reuse_from else None
        self._processes = processes
        self._configs = TrainingConfigs(settings, stream, processes.memory, processes.num_nodes, own_options)
        self._flops: dict[tuple[int, ...], tuple[RowFlops, RowFlops]] = {}

    def check(self, member: Member, num_members: int) -> None:
        """Let fairseq check the options with which `member` is trained. Nothing is written to the run folder.

        Raise SettingError if fairseq refuses one, or if the shared folder (setting `reuse_from`) cannot be written.
        """
        num_devices = self._usable_devices(num_members)
        self._configs.of(member, num_devices)
        self._configs.check_fork(member)
        if self._shared:
            self._shared.check()

    def num_layers(self, member: Member) -> int:
        """Return the number of layers of a member."""
        return self._configs.of(member).model.decoder_layers

    def untrained(self, member: Member, folder: Path) -> Path:
        """Return the path of a member's untrained checkpoint. Write the checkpoint if it is missing or damaged."""
        path = folder / f"member_{member.number}" / "checkpoint_untrained.pt"
        if read_checkpoint(path) is None:
            weights = initial_weights(self.settings, self._stream) if self.settings.init_from else None
            write_untrained_checkpoint(self._configs.of(member, folder=path.parent), path, weights)
        return path

    def train(self, stage: Stage, starts: Mapping[Member, Path]) -> dict[int, tuple[Path, Path, Spent]]:
        """Train each member for one stage.

        If the stage was interrupted before, finished members are not trained again, and started members are resumed.
        A member that another process is training is left to that process; the others are trained.
        With the setting `reuse_from`, members that another run has trained in the same way are copied.

        Args:
            stage: the data to train on and the folder to write to.
            starts: the checkpoint from which each member starts.

        Returns:
            For each member number, the checkpoint that predicts (the one with the best validation perplexity, or that
            of the averaged weights), the checkpoint from which the next stage continues, and the cost of the training.

        Raises:
            StreamError: if a data file has changed since `alma-prep` wrote it.
            StageError: after all jobs have ended, if the training of a member failed (the message contains the last
                error in its log), or if another process is training a member.
        """
        self._processes.check_free(stage)
        updates = updates_of_stage(self.settings, stage)
        num_devices = self._usable_devices(len(starts))
        jobs: dict[int, tuple[list[str], Path]] = {}
        log_sizes: dict[int, int] = {}
        failures: list[str] = []
        busy = set()
        for member, start in starts.items():
            folder = self._folder(stage, member)
            if (folder / DONE).exists():
                continue
            try:
                Lease(folder).wait()
            except RunError as error:
                busy.add(member.number)
                failures.append(
                    f"member {member.number} of stage {stage.index} is trained by another process: {error}. When it "
                    f"has ended, give the same command again to continue"
                )
                continue
            if (job := self._prepare(stage, member, start, num_devices, updates)) is not None:
                jobs[member.number] = job
                log_sizes[member.number] = job[1].stat().st_size if job[1].exists() else 0
        if jobs:
            used = [*stage.new, *self._past(stage)]
            self._stream.verify_bytes(["valid", *(f"mega_batch_{mega_batch.t}" for mega_batch in used)])
        statuses = self._processes.run(stage, jobs, len(starts), updates) if jobs else {}
        trained = {}
        for member, start in starts.items():
            if member.number in busy:
                continue
            folder, status = self._folder(stage, member), statuses.get(member.number, 0)
            if not (done := folder / DONE).exists():
                if status is None:
                    continue
                if status != 0 or not is_trained(folder, updates):
                    log, batch_size = folder / "log.txt", read_config(folder).dataset.batch_size
                    log_size = log_sizes.get(member.number, 0)
                    failures.append(failure_message(log, log_size, status, self.settings.lr, batch_size, len(starts)))
                    continue
                finish_stage(folder, self.settings)
                write_json(done, asdict(self._spent(folder, start, member, stage.index)))
            self._publish(folder)
            _remove_leftovers(folder)
            continuation = CONTINUATION if self.settings.keeps_continuation else BEST
            trained[member.number] = (folder / BEST, folder / continuation, read_json(done, Spent))
        if failures:
            failed = {status for status in statuses.values() if status}
            was_stopped = failed and failed <= {*STOPPED} and not busy
            raise (StoppedError if was_stopped else StageError)("\n".join(failures))
        return trained

    def _prepare(
        self, stage: Stage, member: Member, start: Path, num_devices: int, updates: int
    ) -> tuple[list[str], Path] | None:
        """Prepare the folder of a member for its training. Return the command that trains it, and the log file.

        Return None if the member needs no training, because it is copied from another run, or its training has ended.
        """
        folder = self._folder(stage, member)
        repair_stage_folder(folder, needs_best=self.settings.average is None)
        config = self._configs.of(member, num_devices, stage, folder, start)
        key = self._start(stage, config, folder, start)
        if self._shared and key and self._shared.copy_to(folder, key):
            return None
        if is_trained(folder, updates):
            if not (folder / BEST).exists():
                logger.warning(
                    "%s: the checkpoint with the best validation score is lost, and the training has ended: the last "
                    "checkpoint takes its place",
                    folder,
                )
                link(folder / LAST, folder / BEST)
            return None
        with written_aside(folder / CONFIG) as temporary:
            OmegaConf.save(config, temporary)
        return training_command(folder / CONFIG, self.settings), folder / "log.txt"

    def _past(self, stage: Stage) -> Sequence[MegaBatch]:
        """Return the earlier mega-batches that the stage may replay."""
        return stage.past if stage.replay or self._configs.own_options else ()

    def _usable_devices(self, num_members: int) -> int:
        """Return the number of devices that train each member of a stage with `num_members` members."""
        return usable_devices(self.settings, self._processes.num_devices(num_members), self._processes.num_nodes)

    def _start(self, stage: Stage, config: DictConfig, folder: Path, start: Path) -> str | None:
        """Write started.json, with the devices and the key of the training (see SharedMembers). Return the key.

        If the training can be resumed, its key is kept. The key is None without the setting `reuse_from`.
        """
        path, num_devices = folder / STARTED, config.distributed_training.distributed_world_size
        now = {"kind": self._processes.kind, "devices": num_devices, "batch_size": config.dataset.batch_size,
               "expert_parallel": self.settings.expert_parallel}  # fmt: skip
        if path.exists() and (folder / LAST).exists():
            before: dict[str, Any] = dict(read_json(path, Started, advice=f"remove {folder} to restart this stage"))
            if {**now, **before} == {**before, **now}:
                return before["key"]
            # The result depends slightly on the devices, so the member is not shared if they have changed.
            write_json(path, {**now, "key": None})
            return None
        key = self._key(stage, config, start) if self._shared else None
        write_json(path, {**now, "key": key})
        return key

    def _publish(self, folder: Path) -> None:
        """Copy a trained member to the shared folder, if the setting `reuse_from` is set.

        Nothing is done if an earlier call has finished with this member, which then has no started.json, or if its
        training began without this setting.
        """
        if not self._shared or not (folder / STARTED).exists():
            return
        if key := read_json(folder / STARTED, Started)["key"]:
            try:
                self._shared.publish(folder, key)
            except OSError as error:  # only warn, because this run does not need the copy in the shared folder
                logger.warning("cannot copy the trained member in %s to the folder reuse_from=: %s", folder, error)

    def _folder(self, stage: Stage, member: Member) -> Path:
        """Return the folder of a member in a stage folder."""
        return stage.folder / f"member_{member.number}"

    def _key(self, stage: Stage, config: DictConfig, start: Path) -> str:
        """Return the key of a member's training in the shared folder: a digest of all that influences the result.

        It contains digests of the data and of the initial weights, not paths, so runs in different folders can share.
        """
        recipe: dict[str, Any] = {
            "config": identity_of_config(config),
            "replay": stage.replay,
            "new": [mega_batch.digest for mega_batch in stage.new],
            "past": [mega_batch.digest for mega_batch in self._past(stage)],
            "valid": self._stream.digest("valid"),
            "dict": self._stream.dictionary_digest,
            "devices": [self._processes.kind, config.distributed_training.distributed_world_size],
        }
        if self.settings.keeps_continuation:
            recipe |= {"average": self.settings.average, "optimizer_state": self.settings.optimizer_state}
            recipe["start_state"] = digest_of_state(start)
        if self.settings.plugin:
            recipe["plugin"] = plugin_digest(self.settings.plugin)
        if self._configs.own_options:  # the learner may have chosen other mega-batches than the stage
            chosen = [config.task.mega_batches, config.task.replay_mega_batches]
            numbers = [parse_mega_batches(text, stage.new[-1].t) if text else [] for text in chosen]
            recipe["read"] = [[self._stream.digest(f"mega_batch_{t}") for t in ts] for ts in numbers]
        return key_of(recipe, start)

    def _spent(self, folder: Path, start: Path, member: Member, stage_index: int) -> Spent:
        """Return the cost of a member's training: from the FLOPs of the model, and the updates and tokens in its
        checkpoint.

        The optimizer state is removed from the best checkpoint, which makes it much smaller.
        """
        last = require_checkpoint(folder / LAST)
        # fairseq adds the training time of this stage to the time in the checkpoint from which the stage started. So
        # subtract the earlier time. The numbers of updates and tokens need no such correction, because they start at
        # 0 in each stage.
        seconds_before = float(require_checkpoint(start)["extra_state"]["previous_training_time"])
        drop_optimizer_state(folder / BEST)
        # Members of the same size need the same FLOPs, so count only once for each size.
        # A learner of the user may choose another size for each stage.
        size = (member.num_experts, member.added_layers, stage_index if self._configs.own_options else 0)
        if size not in self._flops:
            model, _ = load_member(folder / BEST, self._stream, torch.device("cpu"), self.settings.arch)
            self._flops[size] = (count_training_flops(model), count_forward_flops(model))
        training_flops, forward_flops = self._flops[size]
        processed = last["extra_state"]["AlmaLanguageModelingTask"]["processed"]
        training, validation = processed["training"], processed["validation"]
        return Spent(
            train_flops=training_flops.total(training["tokens"], training["token_pairs"]),
            num_updates=num_updates(last),
            # With several devices, fairseq stores the mean of their times, as a tensor.
            train_seconds=round(float(last["extra_state"]["previous_training_time"]) - seconds_before, 3),
            validation_flops=forward_flops.total(validation["tokens"], validation["token_pairs"]),
        )


def is_trained(folder: Path, updates: int) -> bool:
    """Return whether the last checkpoint in the folder of a member was saved after all `updates` of the stage."""
    last = read_checkpoint(folder / LAST)
    return last is not None and num_updates(last) >= updates


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of a trained member that nothing needs any more."""
    leftovers = [*folder.glob("checkpoint*.pt*"), *unfinished_files(folder)]
    leftovers += [folder / name for name in (CRASH, STARTED, "lease.json")]
    for leftover in leftovers:
        if leftover.name not in (BEST, CONTINUATION):
            remove(leftover)

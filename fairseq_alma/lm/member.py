"""The training of one member for one stage: a fairseq-train process, and the files in the member's folder."""

import logging
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from fairseq_alma.checkpoints import (
    BEST,
    CRASH,
    LAST,
    drop_optimizer_state,
    num_updates,
    read_checkpoint,
    repair_stage_folder,
    require_checkpoint,
)
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import read_json, unfinished_files, write_json
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.evaluation.flops import RowFlops, count_forward_flops, count_training_flops
from fairseq_alma.lm.fairseq_train import USER_DIR, build_model, parse_train_arguments, write_untrained_checkpoint
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.shared_stages import SharedStages, key_of

logger = logging.getLogger(__name__)

MEMBER_SEED_STRIDE = 10_000_000
"""Difference between the seeds of two members. It exceeds every number of updates, because fairseq seeds update u with
seed + u and members must not share their dropout masks. It also keeps ensembles of neighbouring seeds apart."""

STARTED, DONE = "started.json", "done.json"
LOG_TAIL = 20_000
"""Number of characters at the end of a log in which known causes of a failure are searched."""


@dataclass(frozen=True)
class Member:
    """One network of a learner, at one stage."""

    number: int
    """m, counted from 1."""
    seed: int
    """Seed of its initialisation and of the order of its data."""
    num_experts: int
    """Number of experts in each of its mixtures."""

    @classmethod
    def of_run(cls, number: int, run_seed: int, num_experts: int) -> "Member":
        """Return member m of a run. Member 1 has the seed of the run and so equals SM with that seed."""
        return cls(number, run_seed + (number - 1) * MEMBER_SEED_STRIDE, num_experts)


class Processes(Protocol):
    """Runs the processes of a stage."""

    kind: str
    """Type of the devices: cpu or cuda."""

    def num_devices(self, num_jobs: int) -> int:
        """Return the number of devices that each of `num_jobs` jobs gets."""

    def run(self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int) -> dict[int, int | None]:
        """Run jobs to their end, at the same time where there is room, and return their exit statuses.

        Args:
            stage: the stage to which they belong.
            jobs: command and log file of each member, by its number.
            num_jobs: number of members among which the devices are divided. It may exceed the number of jobs: members
                that an earlier process has finished count too, so that a resumed stage computes the same result.

        Returns:
            The exit status of each member, negative for a signal; None if it was not started because another failed.
        """


class MemberTraining:
    """Trains the members of a stage: writes their command lines, checks their folders and sets their done marks.

    Args:
        settings: settings of the run.
        stream: training and validation data.
        processes: runs the fairseq-train processes.
    """

    def __init__(self, settings: LanguageModelSettings, stream: TrainingView, processes: Processes):
        self.settings = settings
        self._stream = stream
        self._shared = SharedStages(settings.share) if settings.share else None
        self._processes = processes
        self._flops: dict[int, tuple[RowFlops, RowFlops]] = {}

    def check(self, member: Member, num_members: int) -> None:
        """Let fairseq parse the command line of a stage, before anything is written.

        Raises:
            SettingError: fairseq refuses an option, or the folder of `share` cannot be written.
        """
        num_devices = self._processes.num_devices(num_members)
        parse_train_arguments(self._arguments(member, Path(self.settings.out), "1", 1, num_devices))
        if self._shared:
            self._shared.check()

    def untrained(self, member: Member, folder: Path) -> Path:
        """Return the checkpoint of a member before its first update. It is written if it is missing or damaged."""
        path = folder / f"member_{member.number}" / "checkpoint_untrained.pt"
        if read_checkpoint(path) is None:
            # Nothing is trained, so the number of the mega-batch does not matter.
            write_untrained_checkpoint(self._arguments(member, path.parent, "1", updates=1, num_devices=1), path)
        return path

    def train(self, stage: Stage, starts: Mapping[Member, Path]) -> dict[int, tuple[Path, Spent]]:
        """Train each member for one stage.

        Members that an earlier process has finished are skipped, and members that it has begun are resumed. With
        `share`, members that another run has trained in the same way are copied from there.

        Args:
            stage: what to train on, and where to write.
            starts: the checkpoint from which each member starts.

        Returns:
            The best checkpoint by validation perplexity and the cost of each member, by its number.

        Raises:
            StageError: a process ended without a result (the message contains the last error of its log; the other
                processes have run to their end), or a member was begun on another number of devices.
        """
        updates = self._updates(stage)
        num_devices = self._processes.num_devices(len(starts))
        jobs: dict[int, tuple[list[str], Path]] = {}
        log_sizes: dict[int, int] = {}
        for member, start in starts.items():
            folder = self._folder(stage, member)
            if (folder / DONE).exists():
                continue
            repair_stage_folder(folder)
            key = self._mark_started(stage, member, folder, start, num_devices)
            if self._shared and key and self._shared.copy_to(folder, key):
                continue
            if not self._is_trained(folder, updates):
                log = folder / "log.txt"
                log_sizes[member.number] = log.stat().st_size if log.exists() else 0
                jobs[member.number] = (self._command(stage, member, folder, start, num_devices), log)
        statuses = self._processes.run(stage, jobs, len(starts)) if jobs else {}
        trained, failures = {}, []
        for member, start in starts.items():
            folder = self._folder(stage, member)
            done, status = folder / DONE, statuses.get(member.number, 0)
            if not done.exists():
                if status != 0 or not self._is_trained(folder, updates):
                    if status is not None:
                        log_size = log_sizes.get(member.number, 0)
                        failures.append(
                            failure_message(folder / "log.txt", log_size, status, self.settings, len(starts))
                        )
                    continue
                write_json(done, asdict(self._spent(folder, start, member)))
            self._publish(folder)
            leftovers = [*folder.glob("checkpoint*.pt*"), *unfinished_files(folder), folder / CRASH, folder / STARTED]
            for leftover in leftovers:
                if leftover.name != BEST:
                    leftover.unlink(missing_ok=True)
            trained[member.number] = (folder / BEST, Spent(**read_json(done)))
        if failures:
            raise StageError("\n".join(failures))
        return trained

    def _mark_started(self, stage: Stage, member: Member, folder: Path, start: Path, num_devices: int) -> str | None:
        """Write started.json: the number of devices, and the key of this training for `share`.

        If the training can be resumed, started.json stays as it is.

        Returns:
            The key; None without `share`.

        Raises:
            StageError: the training was begun on another number of devices. fairseq counts batches by rank, so it would
                skip data or find an epoch too short.
        """
        path = folder / STARTED
        if path.exists() and (folder / LAST).exists():
            started = read_json(path)
            if started["devices"] != num_devices:
                raise StageError(
                    f"{folder} was begun on {started['devices']} device(s), now it would get {num_devices}: continue "
                    f"on the same number (CUDA_VISIBLE_DEVICES, parallel=), or remove {folder} to restart this stage"
                )
            return started["key"]
        key = self._key(stage, member, start, num_devices) if self._shared else None
        write_json(path, {"devices": num_devices, "key": key})
        return key

    def _publish(self, folder: Path) -> None:
        if not self._shared or not (folder / STARTED).exists():
            return
        if key := read_json(folder / STARTED)["key"]:
            try:
                self._shared.publish(folder, key)
            except OSError as error:  # sharing helps other runs; this run does not depend on it
                logger.warning("%s could not be shared: %s", folder, error)

    def _folder(self, stage: Stage, member: Member) -> Path:
        return stage.folder / f"member_{member.number}"

    def _is_trained(self, folder: Path, updates: int) -> bool:
        """Return True if the last checkpoint has all updates: also after a kill before the done mark was written."""
        last = read_checkpoint(folder / LAST)
        return last is not None and num_updates(last) >= updates

    def _key(self, stage: Stage, member: Member, start: Path, num_devices: int) -> str:
        """Return the key of this training for `share`. It depends on digests of data and weights, not on folders."""
        data, _ = _data_of_stage(stage)
        arguments = self._arguments(member, Path(), data, self._updates(stage), num_devices)
        paths = {"--user-dir", "--save-dir", "--mega-batches", "--replay-mega-batches"}
        options = [word for i, word in enumerate(arguments) if i and not {word, arguments[i - 1]} & paths]
        recipe: dict[str, Any] = {
            "options": options,
            "replay": stage.replay,
            "new": [mega_batch.digest for mega_batch in stage.new],
            "past": [mega_batch.digest for mega_batch in stage.past] if stage.replay else [],
            "valid": self._stream.digest("valid"),
            "dict": self._stream.dictionary_digest,
            "devices": [self._processes.kind, num_devices],
        }
        return key_of(recipe, start)

    def _updates(self, stage: Stage) -> int:
        replayed = len(stage.past) if stage.replay == "all" else 0
        return self.settings.updates_of_stage(len(stage.new) + replayed)

    def _command(self, stage: Stage, member: Member, folder: Path, start: Path, num_devices: int) -> list[str]:
        data, replay = _data_of_stage(stage)
        arguments = self._arguments(member, folder, data, self._updates(stage), num_devices)
        return [sys.executable, "-m", "fairseq_cli.train", *arguments, *replay, "--finetune-from-model", str(start)]

    def _arguments(self, member: Member, folder: Path, mega_batches: str, updates: int, num_devices: int) -> list[str]:
        """Return the command line of fairseq-train for a stage, without the program's name."""
        s = self.settings
        interval = max(1, -(-updates // s.validations))
        options = {
            "--user-dir": USER_DIR,
            "--task": "alma_lm",
            "--mega-batches": mega_batches,
            "--tokens-per-sample": s.tokens_per_sample,
            "--arch": s.arch,
            "--num-experts": member.num_experts,
            "--dropout": s.dropout,
            "--criterion": "switch_lm",
            "--optimizer": "adam",
            "--adam-betas": "(0.9, 0.98)",
            "--adam-eps": 1e-8,
            "--clip-norm": s.clip_norm,
            "--lr": s.lr,
            "--lr-scheduler": "polynomial_decay",
            "--warmup-updates": s.warmup_of_stage(updates),
            "--total-num-update": updates,
            "--end-learning-rate": 0.0,
            "--max-update": updates,
            "--batch-size": s.batch_size,
            "--update-freq": s.update_freq(num_devices),
            "--seed": member.seed,
            "--save-dir": str(folder),
            "--save-interval-updates": interval,
            "--keep-interval-updates": 1,
            "--save-interval": 10**6,  # in epochs: never reached, only the interval above counts
            "--validate-interval": 10**6,
            "--validate-interval-updates": interval,  # otherwise a save at the end of an epoch has no validation
            "--best-checkpoint-metric": "ppl",
            "--log-format": "json",
            "--log-interval": max(1, min(100, updates // 50)),
            "--num-workers": 0,
        }
        flat = [str(word) for option in options.items() for word in option]
        # Otherwise rank 0 reads the checkpoint and sends it to the others in a form that torch refuses to load.
        switches = ["--no-epoch-checkpoints", "--load-checkpoint-on-all-dp-ranks"]
        return [str(self._stream.path), *flat, *switches, *shlex.split(s.fairseq)]

    def _spent(self, folder: Path, start: Path, member: Member) -> Spent:
        """Return the cost of the stage: the tokens that the checkpoint has counted, times the FLOPs of the model."""
        last = require_checkpoint(folder / LAST)
        # fairseq's clock continues from the checkpoint that the stage started from; its counts start at 0.
        seconds_before = require_checkpoint(start)["extra_state"]["previous_training_time"]
        drop_optimizer_state(folder / BEST)
        if member.num_experts not in self._flops:  # once per distinct shape
            model = build_model(folder / BEST)
            self._flops[member.num_experts] = (count_training_flops(model), count_forward_flops(model))
        training_flops, forward_flops = self._flops[member.num_experts]
        processed = last["extra_state"]["AlmaLanguageModelingTask"]["processed"]
        training, validation = processed["training"], processed["validation"]
        return Spent(
            train_flops=training_flops.total(training["tokens"], training["token_pairs"]),
            num_updates=num_updates(last),
            train_seconds=round(last["extra_state"]["previous_training_time"] - seconds_before, 3),
            validation_flops=forward_flops.total(validation["tokens"], validation["token_pairs"]),
        )


def _data_of_stage(stage: Stage) -> tuple[str, list[str]]:
    """Return the value of --mega-batches, and the options of replay by share."""
    new, past = [m.t for m in stage.new], [m.t for m in stage.past]
    if not stage.replay or not past:
        return format_mega_batches(new), []
    if stage.replay == "all":
        return format_mega_batches(past + new), []
    options = ["--replay-mega-batches", format_mega_batches(past), "--replay-share", str(stage.replay)]
    return format_mega_batches(new), options


def failure_message(
    log: Path, log_size_before: int, status: int, settings: LanguageModelSettings, num_members: int
) -> str:
    """Return the error message for a stage that ended without a result: the last error of its log, and what to do.

    Args:
        log: the log of the member.
        log_size_before: its size in bytes before this attempt. What earlier attempts logged is ignored.
        status: exit status of fairseq-train, negative for a signal.
        settings: settings of the run, which the advice names.
        num_members: number of members of the stage.
    """
    text = log.read_bytes()[log_size_before:].decode("utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last_error = next((line for line in reversed(lines) if "Error" in line.split(":")[0]), "")
    end = text[-LOG_TAIL:]
    if "FloatingPointError" in end:
        advice = f"lower lr={settings.lr}, raise warmup_updates= or set clip_norm=1 in a new out="
    elif "No space left" in end or "Disk quota exceeded" in end:
        advice = "free space on the disk and run the same command again: it continues"
    elif "out of memory" in end.lower() or status == -9:
        advice = f"halve batch_size={settings.batch_size} (the size of an update does not change) in a new out="
        if num_members > 1:
            advice += ", or train fewer members at the same time (parallel=1)"
        if status == -9:
            advice = (
                f"if it was killed for lack of memory, {advice}; otherwise run the same command again: it continues"
            )
    else:
        advice = "correct what the log reports and run the same command again: it continues"
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"fairseq-train {ended}: {last_error or '(no error line)'}\n  log: {log}\n  what to do: {advice}"

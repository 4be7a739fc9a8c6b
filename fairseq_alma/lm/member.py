"""One member through one stage: a fairseq-train process in a folder of its own."""

import logging
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.evaluation.flops import RowFlops, count_forward_flops, count_training_flops
from fairseq_alma.lm.checkpoints import (
    BEST,
    CRASH,
    LAST,
    mend,
    num_updates,
    parse_train_arguments,
    read_whole,
    slim,
    write_untrained,
)
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.shared_stages import SharedStages, key_of

logger = logging.getLogger(__name__)

USER_DIR = str(Path(__file__).parents[1].absolute())
MEMBER_SEED_STRIDE = 10_000_000
"""Between the seeds of members. Larger than any number of updates: fairseq seeds update u with seed + u, and
members must not share their dropout masks; nor must the ensembles of neighbouring seeds share a member."""

STARTED, DONE = "started.json", "done.json"
LOG_TAIL = 20_000
"""Characters of a log in which a known way to fail is looked for."""


@dataclass(frozen=True)
class Member:
    """One network of a learner, at one stage."""

    number: int
    """m, counted from 1."""
    seed: int
    """Of initialisation and order."""
    num_experts: int

    @classmethod
    def of_run(cls, number: int, run_seed: int, num_experts: int) -> "Member":
        """Member 1 has the seed of the run: it is what SM would be, so that the two compare seed by seed."""
        return cls(number, run_seed + (number - 1) * MEMBER_SEED_STRIDE, num_experts)


class Processes(Protocol):
    """Where the processes of a stage run."""

    kind: str
    """cpu or cuda."""

    def num_devices(self, num_jobs: int) -> int:
        """How many devices each of so many jobs gets."""

    def run(self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int) -> dict[int, int | None]:
        """Run the (command, log) of each member to its end, side by side where there is room.

        Each gets as many devices as among `num_jobs`, also where some of them were finished by an earlier process:
        a stage that is continued is to come out as it would have.

        Returns the exit status of each, negative for a signal; None where it was not started because another failed.
        """


class MemberTraining:
    """Trains members for a stage; knows the command line of fairseq-train, the member's folder and its done mark."""

    def __init__(self, settings: LanguageModelSettings, stream: StreamFolder, processes: Processes):
        self.settings = settings
        self._stream = stream
        self._shared = SharedStages(settings.share) if settings.share else None
        self._processes = processes
        self._flops: dict[int, tuple[RowFlops, RowFlops]] = {}

    def check(self, member: Member, num_members: int) -> None:
        """Have fairseq parse the command line, before anything is written.

        Raises:
            SettingError: it refuses an option.
        """
        num_devices = self._processes.num_devices(num_members)
        parse_train_arguments(self._arguments(member, Path(self.settings.out), "1", 1, num_devices))
        if self._shared:
            self._shared.check()

    def untrained(self, member: Member, folder: Path) -> Path:
        """The checkpoint of the member before its first update; made where it is missing."""
        path = folder / f"member_{member.number}" / "checkpoint_untrained.pt"
        if read_whole(path) is None:
            # Any mega-batch will do: nothing is trained.
            write_untrained(self._arguments(member, path.parent, "1", updates=1, num_devices=1), path)
        return path

    def train(self, stage: Stage, starts: Mapping[Member, Path]) -> dict[int, tuple[Path, Spent]]:
        """Train each member from its checkpoint; its best checkpoint by validation, and what it cost, by number.

        Members that an earlier process has finished are passed over; those it had begun go on; those that another
        run has trained in the same way are taken from `share`.

        Raises:
            StageError: a process ended without its result; the message holds the end of its log. The others have
                been left to finish. Or one was begun on another number of devices.
        """
        updates = self._updates(stage)
        num_devices = self._processes.num_devices(len(starts))
        jobs, logged_before = {}, {}
        for member, start in starts.items():
            folder = self._folder(stage, member)
            if (folder / DONE).exists():
                continue
            mend(folder)
            key = self._begin(stage, member, folder, start, num_devices)
            if self._shared and key and self._shared.take(key, folder):
                continue
            if not self._is_trained(folder, updates):
                log = folder / "log.txt"
                logged_before[member.number] = log.stat().st_size if log.exists() else 0
                jobs[member.number] = (self._command(stage, member, folder, start, num_devices), log)
        statuses = self._processes.run(stage, jobs, len(starts)) if jobs else {}
        trained, failures = {}, []
        for member, start in starts.items():
            folder = self._folder(stage, member)
            done, status = folder / DONE, statuses.get(member.number, 0)
            if not done.exists():
                if status != 0 or not self._is_trained(folder, updates):
                    if status is not None:
                        since = logged_before.get(member.number, 0)
                        failures.append(_why(folder / "log.txt", since, status, self.settings, len(starts)))
                    continue
                write_json(done, asdict(self._spent(folder, start, member)))
            self._give(folder)
            leftovers = [*folder.glob("checkpoint*.pt*"), *folder.glob(".*.tmp"), folder / CRASH, folder / STARTED]
            for leftover in leftovers:
                if leftover.name != BEST:
                    leftover.unlink(missing_ok=True)
            trained[member.number] = (folder / BEST, Spent(**read_json(done)))
        if failures:
            raise StageError("\n".join(failures))
        return trained

    def _begin(self, stage: Stage, member: Member, folder: Path, start: Path, num_devices: int) -> str | None:
        """Note what the training depends on; its name for `share`, of when it was begun.

        Raises:
            StageError: it was begun on another number of devices. fairseq counts batches by rank: it would pass over
                data, or find an epoch too short.
        """
        path = folder / STARTED
        if path.exists() and (folder / LAST).exists():
            begun = read_json(path)
            if begun["devices"] != num_devices:
                raise StageError(
                    f"{folder} was begun on {begun['devices']} device(s), now it would get {num_devices}: continue on "
                    f"as many (CUDA_VISIBLE_DEVICES, parallel=), or remove {folder} to begin this stage anew"
                )
            return begun["key"]
        key = self._key(stage, member, start, num_devices) if self._shared else None
        write_json(path, {"devices": num_devices, "key": key})
        return key

    def _give(self, folder: Path) -> None:
        if not self._shared or not (folder / STARTED).exists():
            return
        if key := read_json(folder / STARTED)["key"]:
            try:
                self._shared.give(key, folder)
            except OSError as error:  # sharing is a favour to others: no reason to end this run
                logger.warning("%s could not be shared: %s", folder, error)

    def _folder(self, stage: Stage, member: Member) -> Path:
        return stage.folder / f"member_{member.number}"

    def _is_trained(self, folder: Path, updates: int) -> bool:
        """Also true for a stage that was killed after its last update and before its done mark."""
        last = read_whole(folder / LAST)
        return last is not None and num_updates(last) >= updates

    def _key(self, stage: Stage, member: Member, start: Path, num_devices: int) -> str:
        """Names this training for `share`: folders are left out, data and weights stand by their digests."""
        data, _ = _data_of_stage(stage)
        arguments = self._arguments(member, Path(), data, self._updates(stage), num_devices)
        paths = {"--user-dir", "--save-dir", "--mega-batches", "--replay-mega-batches"}
        options = [word for i, word in enumerate(arguments) if i and not {word, arguments[i - 1]} & paths]
        digests = {"new": [m.digest for m in stage.new], "past": [m.digest for m in stage.past] if stage.replay else []}
        digests |= {"valid": self._stream.digest("valid"), "dict": self._stream.dictionary_digest}
        recipe = {"options": options, "replay": stage.replay, **digests, "devices": [self._processes.kind, num_devices]}
        return key_of(recipe, start)

    def _updates(self, stage: Stage) -> int:
        replayed = len(stage.past) if stage.replay == "all" else 0
        return self.settings.updates_of_stage(len(stage.new) + replayed)

    def _command(self, stage: Stage, member: Member, folder: Path, start: Path, num_devices: int) -> list[str]:
        data, replay = _data_of_stage(stage)
        arguments = self._arguments(member, folder, data, self._updates(stage), num_devices)
        return [sys.executable, "-m", "fairseq_cli.train", *arguments, *replay, "--finetune-from-model", str(start)]

    def _arguments(self, member: Member, folder: Path, mega_batches: str, updates: int, num_devices: int) -> list[str]:
        """The command line of fairseq-train for a stage."""
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
            "--save-interval": 10**6,  # epochs: only the interval above decides
            "--validate-interval": 10**6,
            "--validate-interval-updates": interval,  # without it a save that falls on an epoch end validates nothing
            "--best-checkpoint-metric": "ppl",
            "--log-format": "json",
            "--log-interval": max(1, min(100, updates // 50)),
            "--num-workers": 0,
        }
        flat = [str(word) for option in options.items() for word in option]
        # fairseq sends a checkpoint from rank to rank by a way on which torch refuses its configuration.
        switches = ["--no-epoch-checkpoints", "--load-checkpoint-on-all-dp-ranks"]
        return [str(self._stream.path), *flat, *switches, *shlex.split(s.fairseq)]

    def _spent(self, folder: Path, start: Path, member: Member) -> Spent:
        """What the stage cost: the batches it counted, times FLOPs of its model."""
        last = read_whole(folder / LAST)
        # fairseq's clock goes on from the checkpoint that the stage started from; its counts do not.
        seconds_before = read_whole(start)["extra_state"]["previous_training_time"]
        slim(folder / BEST)
        if member.num_experts not in self._flops:  # once per distinct shape
            model = _build_model(folder / BEST)
            self._flops[member.num_experts] = (count_training_flops(model), count_forward_flops(model))
        training_flops, forward_flops = self._flops[member.num_experts]
        training, validation = (last["extra_state"]["AlmaLanguageModelingTask"]["processed"][kind]
                                for kind in ("training", "validation"))  # fmt: skip
        return Spent(
            train_flops=training_flops.total(training["tokens"], training["token_pairs"]),
            num_updates=num_updates(last),
            train_seconds=round(last["extra_state"]["previous_training_time"] - seconds_before, 3),
            validation_flops=forward_flops.total(validation["tokens"], validation["token_pairs"]),
        )


def _data_of_stage(stage: Stage) -> tuple[str, list[str]]:
    """--mega-batches, and the options of replay by share."""
    new, past = [m.t for m in stage.new], [m.t for m in stage.past]
    if not stage.replay or not past:
        return format_mega_batches(new), []
    if stage.replay == "all":
        return format_mega_batches(past + new), []
    options = ["--replay-mega-batches", format_mega_batches(past), "--replay-share", str(stage.replay)]
    return format_mega_batches(new), options


def _build_model(checkpoint: Path):
    import fairseq_alma

    fairseq_alma.register()
    from fairseq import checkpoint_utils

    (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], {"user_dir": USER_DIR})
    return model


def _why(log: Path, since: int, status: int, settings: LanguageModelSettings, num_members: int) -> str:
    """What to tell the person whose stage ended without its result; `since`: bytes that the log had before."""
    text = log.read_bytes()[since:].decode("utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last_error = next((line for line in reversed(lines) if "Error" in line.split(":")[0]), "")
    end = text[-LOG_TAIL:]
    if "FloatingPointError" in end:
        advice = f"lower lr={settings.lr}, raise warmup_updates= or set clip_norm=1 in a new out="
    elif "No space left" in end or "Disk quota exceeded" in end:
        advice = "make room on the disk and run the same command again: it continues"
    elif "out of memory" in end.lower() or status == -9:
        advice = f"halve batch_size={settings.batch_size} (an update stays the same size) in a new out="
        if num_members > 1:
            advice += ", or train fewer members side by side (parallel=1)"
        if status == -9:
            advice = f"if it was killed for its memory, {advice}; otherwise run the same command again: it continues"
    else:
        advice = "mend what the log says and run the same command again: it continues"
    ended = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"fairseq-train {ended}: {last_error or '(no error line)'}\n  log: {log}\n  what to do: {advice}"

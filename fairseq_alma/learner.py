"""The language-model learners. Training a member for a stage is one fairseq-train process."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_alma.checkpoints import (
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
from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.files import read_json, sha256_of, write_json
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.flops import count_forward_flops, count_training_flops
from fairseq_alma.settings import LanguageModelSettings

RunProcess = Callable[[list[str], Path, Stage], int]
"""Runs a command, its output appended to a log; returns the exit status."""

USER_DIR = str(Path(__file__).parent.absolute())


class SingleModel:
    """SM: one model, trained on from stage to stage (fine-tuned on each group of mega-batches).

    Args:
        settings: of the run.
        stream: where training and validation data lie.
        run_process: how a fairseq-train process is run.
    """

    def __init__(self, settings: LanguageModelSettings, stream: StreamFolder, run_process: RunProcess):
        self.settings = settings
        self.run_folder = Path(settings.out)
        self._stream_path = stream.path
        self._run_process = run_process
        self._checkpoint: Path | None = None
        # Options that fairseq refuses are found now, before anything is written.
        parse_train_arguments(self._arguments(self.run_folder, "1", updates=1))

    @property
    def predictor(self) -> list[Path]:
        """The checkpoints that predict now, their probabilities averaged. Before the first stage: untrained."""
        return [self._checkpoint or self._untrained()]

    def grow(self, stage: Stage) -> Spent:
        """SM does not grow."""
        return Spent()

    def train(self, stage: Stage) -> Spent:
        """Train the member for one stage, from the checkpoint that predicts now.

        Raises:
            StageError: the process ended without its result; the message holds the end of its log.
        """
        folder = stage.folder / "member_1"
        done = folder / "done.json"
        if not done.exists():
            start = self.predictor[0]
            mend(folder)
            self._run(stage, folder, start)
            write_json(done, asdict(self._spent(folder, start)))
        for leftover in [*folder.glob("checkpoint*.pt*"), folder / CRASH]:
            if leftover.name != BEST:
                leftover.unlink(missing_ok=True)
        self._checkpoint = folder / BEST
        return Spent(**read_json(done))

    def save(self, folder: Path) -> None:
        """Name what predicts, in `folder` and as the run's predictor.json: what the run would deploy now."""
        checkpoints = [
            {"path": str(path.relative_to(self.run_folder)), "sha256": sha256_of(path)} for path in self.predictor
        ]
        for target in (folder, self.run_folder):
            write_json(target / "predictor.json", {"combine": "mean of probabilities", "checkpoints": checkpoints})

    def load(self, folder: Path) -> None:
        """Go on from what `save` named.

        Raises:
            StageError: a checkpoint is gone.
        """
        (entry,) = read_json(folder / "predictor.json")["checkpoints"]
        path = self.run_folder / entry["path"]
        if not path.is_file():
            raise StageError(f"{path} is gone, {folder} needs it: restore it, or start the run anew in another out=")
        self._checkpoint = path

    def _untrained(self) -> Path:
        path = self.run_folder / "stages" / "stage_000" / "member_1" / "checkpoint_untrained.pt"
        if read_whole(path) is None:
            # Any mega-batch will do: nothing is read from it.
            write_untrained(self._arguments(path.parent, "1", updates=1), path)
        return path

    def _run(self, stage: Stage, folder: Path, start: Path) -> None:
        updates = self._updates(stage)
        last = read_whole(folder / LAST)
        if last is not None and num_updates(last) >= updates:
            return  # killed after the last update and before the done mark
        data, replay = self._data_of_stage(stage)
        arguments = self._arguments(folder, data, updates)
        arguments += replay + ["--finetune-from-model", str(start)]
        log = folder / "log.txt"
        status = self._run_process([sys.executable, "-m", "fairseq_cli.train", *arguments], log, stage)
        last = read_whole(folder / LAST)
        if status != 0 or last is None or num_updates(last) < updates:
            raise StageError(_why(log, status, self.settings))

    def _updates(self, stage: Stage) -> int:
        replayed = len(stage.past) if stage.replay == "all" else 0
        return self.settings.updates_of_stage(len(stage.new) + replayed)

    def _data_of_stage(self, stage: Stage) -> tuple[str, list[str]]:
        """--mega-batches, and the options of replay by share."""
        new, past = [m.t for m in stage.new], [m.t for m in stage.past]
        if not stage.replay or not past:
            return format_mega_batches(new), []
        if stage.replay == "all":
            return format_mega_batches(past + new), []
        options = ["--replay-mega-batches", format_mega_batches(past), "--replay-share", str(stage.replay)]
        return format_mega_batches(new), options

    def _arguments(self, folder: Path, mega_batches: str, updates: int) -> list[str]:
        """The command line of fairseq-train for a stage."""
        s = self.settings
        num_devices = max(1, torch.cuda.device_count())
        interval = max(1, -(-updates // s.validations))
        options = {
            "--user-dir": USER_DIR,
            "--task": "alma_lm",
            "--mega-batches": mega_batches,
            "--tokens-per-sample": s.tokens_per_sample,
            "--arch": s.arch,
            "--num-experts": s.experts,
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
            "--seed": s.seed,
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
        return [str(self._stream_path), *flat, *switches, *shlex.split(s.fairseq)]

    def _spent(self, folder: Path, start: Path) -> Spent:
        """What the stage cost: the batches it counted, times FLOPs of its model."""
        last = read_whole(folder / LAST)
        # fairseq's clock goes on from the checkpoint that the stage started from; its counts do not.
        seconds_before = read_whole(start)["extra_state"]["previous_training_time"]
        slim(folder / BEST)
        model = _build_model(folder / BEST)
        training, validation = (last["extra_state"]["AlmaLanguageModelingTask"]["processed"][kind]
                                for kind in ("training", "validation"))  # fmt: skip
        return Spent(
            train_flops=count_training_flops(model).total(training["tokens"], training["token_pairs"]),
            num_updates=num_updates(last),
            train_seconds=round(last["extra_state"]["previous_training_time"] - seconds_before, 3),
            validation_flops=count_forward_flops(model).total(validation["tokens"], validation["token_pairs"]),
        )


def _build_model(checkpoint: Path):
    import fairseq_alma

    fairseq_alma.register()
    from fairseq import checkpoint_utils

    (model,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], {"user_dir": USER_DIR})
    return model


def _why(log: Path, status: int, settings: LanguageModelSettings) -> str:
    """What to tell the person whose stage ended without its result."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last_error = next((line for line in reversed(lines) if "Error" in line.split(":")[0]), "")
    if "FloatingPointError" in text[-20_000:]:
        advice = f"lower lr={settings.lr}, raise warmup_updates= or set clip_norm=1 in a new out="
    elif "No space left" in text[-20_000:]:
        advice = "make room on the disk and run the same command again: it continues"
    elif "out of memory" in text[-20_000:].lower() or status == -9:
        advice = f"halve batch_size={settings.batch_size} (an update stays the same size) in a new out="
    else:
        advice = "mend what the log says and run the same command again: it continues"
    ended = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"fairseq-train {ended}: {last_error or '(no error line)'}\n  log: {log}\n  what to do: {advice}"


LEARNERS = {"sm": SingleModel}


def make_learner(settings: LanguageModelSettings, stream: StreamFolder, run_process: RunProcess) -> SingleModel:
    """The learner that `settings.learner` names.

    Raises:
        SettingError: there is none of this name.
    """
    if settings.learner not in LEARNERS:
        raise SettingError(f"learner={settings.learner!r} is not one of {', '.join(LEARNERS)}")
    return LEARNERS[settings.learner](settings, stream, run_process)

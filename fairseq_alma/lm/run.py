"""alma-lm: train a language-model learner over a stream of mega-batches and write its ledger.

alma-lm stream=STREAM out=RUN learner=sm wait=1 experts=4 updates=1000 arch=switch_lm_tiny
alma-lm -m stream=STREAM out=SWEEP updates=1000 lr=0.001,0.002 dropout=0,0.1    a sweep, sorted by validation score
alma-lm stream=STREAM out=RUN updates=1000 launch=slurm launch.partition=gpu launch.gpus=8    in Slurm jobs
alma-lm status RUN [--json]                                         the ledger, jobs, what is left; --json for monitors
alma-lm logs RUN                                                    the logs, until the run ends
alma-lm cancel RUN                                                  end the run; what is being trained is saved
alma-lm rollback RUN --to-stage K                                   go back to stage K; later stages are set aside
alma-lm --help                                                      every setting
"""

import math
import os
import sys
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from fairseq_alma.app.command import Command, Subcommand, slurm_settings, store_settings
from fairseq_alma.app.plugins import load_plugin, plugin_digest
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.slurm_jobs import JOB, RUN_STEP, refuse_queued
from fairseq_alma.app.tables import (
    NOTHING_TO_DO,
    deployed_message,
    is_refused,
    ledger_table,
    new_text_message,
    rows_in,
    title_of,
    waiting_message,
    wide_console,
)
from fairseq_alma.app.tracking import Tracker
from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores
from fairseq_alma.core.metrics import read_summary, score_of, write_mean
from fairseq_alma.core.printing import hide_messages_of_libraries, say
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from fairseq_alma.core.settings import defaults_of
from fairseq_alma.core.stream import MegaBatch
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.display import record_trained_members
from fairseq_alma.lm.rollback import finish_rollback, roll_back_runs
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.slurm_chain import SlurmProcesses, run_member_job, submit_runs, summarize_seeds
from fairseq_alma.lm.stage_processes import LocalProcesses
from fairseq_alma.lm.table2 import PRESETS, store_presets
from launch.slurm import SlurmSettings

CONFIGS = Path(__file__).parent / "configs"

UNTRAINED_TOKENS = 10_000
"""Number of tokens of the validation set and of the test set on which the untrained learner is scored, if no metric
includes its perplexity. The first tokens are taken."""

SHOWN_MEANS = ("average_perplexity", "final", "final_validation")
"""Metrics in summary.json whose means over several seeds are printed, with their standard errors."""

OTHER_KEYS = ("table_updates",)
"""Keys in the YAML files that are not settings of the run, but from which the YAML files compute settings."""


def run(settings: LanguageModelSettings, slurm: SlurmSettings | None = None) -> list[LedgerRow]:
    """Carry out one run (one seed) and return its ledger. An unfinished run in the run folder is continued.

    If `slurm` is given, the stages are trained in Slurm jobs that ask for it, otherwise on this machine.

    Raises:
        HandedOver: if other Slurm jobs continue the run.
        AlmaError: if the settings or the stream are invalid, if the run folder contains a run with other settings, or
            if a stage fails.
    """
    if settings.plugin:
        load_plugin(settings.plugin)
    stream_folder = StreamFolder.open(settings.stream)
    stream = stream_folder.stream(settings.mega_batches)
    more_will_follow = stream_folder.is_extended or len(stream) < stream_folder.num_mega_batches
    stream_settings = settings.stream_settings(len(stream), more_will_follow)

    record_trained = partial(record_trained_members, RunFolder(Path(settings.out)))
    tracker = Tracker(settings.out, settings.wandb, settings.to_json()) if settings.wandb else None
    scalars = RunScalars(settings.out, at_first=record_trained, tracker=tracker)
    # LocalProcesses starts a process that imports fairseq once for all training processes. Start it before the imports
    # below, because then both processes import fairseq at the same time, which saves seconds.
    processes: LocalProcesses
    if slurm is None:
        refuse_queued(settings.out)
        processes = LocalProcesses(len(stream), settings.parallel, scalars)
    else:
        processes = SlurmProcesses(settings.out, slurm, len(stream), scalars)
    # Import these modules only here, because they import fairseq and torch, which takes seconds. Invalid settings are
    # found before this point, so the user sees the error without this delay.
    from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
    from fairseq_alma.evaluation.held_out import score_before_training
    from fairseq_alma.lm.average import remove_old_continuations
    from fairseq_alma.lm.gate import decide
    from fairseq_alma.lm.learners import LanguageModelLearner, make_learner
    from fairseq_alma.lm.precision import with_known_precision

    settings = with_known_precision(settings)
    learner = make_learner(settings, stream_folder.without_test(), processes)
    RunFolder(Path(settings.out)).refuse_nested()
    with Lease(settings.out), closing(scalars):
        finish_rollback(Path(settings.out))
        record = SeedRecord(
            settings.out,
            _identity(settings, stream_folder),
            stream.digests,
            settings_that_are("free", "language model"),
            forkable=settings_that_are("forkable", "language model"),
            fork=settings.fork,
            on_rows=scalars.rows,
        )
        # If the first stage is trained at arrival 1, no metric includes the perplexity of the untrained learner, so it
        # is scored on a sample of tokens only. Otherwise the average perplexity includes it, and all tokens are scored.
        trains_first = stream_settings.arrivals_of_stages[:1] == [1] and 1 not in stream_settings.skip
        evaluator = PerplexityEvaluator(
            stream_folder,
            Path(settings.out) / "evaluated",
            shared=Path(settings.reuse_from) / "evaluated" if settings.reuse_from else None,
            untrained_tokens=UNTRAINED_TOKENS if trains_first else None,
            arch=settings.arch,
            code=plugin_digest(settings.plugin) if settings.plugin else None,
        )

        seconds = 0.0  # spent on scoring since the last stage

        def evaluate(learner: LanguageModelLearner) -> list[Scores]:
            nonlocal seconds
            began = time.perf_counter()
            scores, rows = evaluator(learner), record.rows()
            if settings.gate is not None and rows:
                skipped = [t for t in range(1, len(rows) + 1) if record.is_skipped(t, wanted=False)]
                scores = replace(scores, gate=decide(settings, stream_folder, rows, skipped))
            total, seconds = seconds + time.perf_counter() - began, 0.0
            return [replace(scores, score_seconds=round(total, 3))]

        def score_new(learner: LanguageModelLearner, mega_batch: MegaBatch) -> list[Prequential | None]:
            nonlocal seconds
            if not (learner.is_trained and stream_folder.came_later(mega_batch.t)):
                return [None]
            began = time.perf_counter()
            score = score_before_training(learner.predictor, stream_folder, mega_batch.t, settings.arch)
            seconds += time.perf_counter() - began
            if score is not None:
                say(new_text_message(record.rows(), mega_batch.t, score), sys.stderr)
            return [score]

        (rows,) = run_stream(
            stream,
            learner,
            evaluate,
            stream_settings,
            RunRecord([record]),
            score_new,
            complete_scores=lambda learner, scores: [evaluator.complete(learner, scores[0])],
        )
        remove_old_continuations(RunFolder(Path(settings.out)), rows[-1].stage, settings.keep_states)
        return rows


def _identity(settings: LanguageModelSettings, stream_folder: StreamFolder) -> dict[str, Any]:
    """Return the content of settings.json: the settings, and digests of the evaluation data and the dictionary."""
    return {
        **settings.recorded(),
        "evaluated_on": [stream_folder.digest(split) for split in ("valid", "test")],
        "dictionary": stream_folder.dictionary_digest,
    }


def run_seeds(settings: LanguageModelSettings, slurm: SlurmSettings | None = None) -> float:
    """Train the runs of all seeds, print their ledgers and write summary.json to the output folder.

    Returns the prequential validation perplexity, averaged over the seeds (see `score_of`). For `slurm`, see `run`.
    """
    console = wide_console()
    if settings.seeds == 1:
        before = rows_in(Path(settings.out))
        rows = run(settings, slurm)
        console.print(ledger_table(rows, title_of(settings.out, settings.to_json())))
        if message := waiting_message(rows, settings.wait, settings.known_mega_batches):
            console.print(message)
        if before == {Path(settings.out): rows}:
            console.print(NOTHING_TO_DO)
        console.print(f"ledger {settings.out}/ledger.jsonl, summary {settings.out}/summary.json")
        console.print(f"next: alma-generate {settings.out} --prompt TEXT, or alma-report {settings.out} --out FOLDER")
        if message := deployed_message(Path(settings.out), rows):
            console.print(message)
        if is_refused(rows):
            COMMAND.exit_status = 3
        return score_of(read_summary(Path(settings.out)))
    out = Path(settings.out)
    folders = RunFolder(out).of_each_seed(settings.seed, settings.seeds)
    with Lease(out):
        for seed, folder in enumerate(folders, settings.seed):
            say(f"seed {seed}, {seed - settings.seed + 1} of {settings.seeds}", sys.stderr)
            one = {**settings.to_json(), "seed": seed, "seeds": 1, "out": str(folder)}
            run_seeds(LanguageModelSettings.from_mapping(one))
            write_mean(out, folders[: seed - settings.seed + 1])
    found = read_summary(out)
    for key in SHOWN_MEANS:
        console.print(f"{key}: {found['mean'][key]:.4f} ± {found['stderr'][key]:.4f} (mean of {settings.seeds} seeds)")
    return score_of(found["mean"])


def refuse_other_layout(settings: LanguageModelSettings) -> None:
    """Raise RunError if the run folder contains a run of one seed, and several are wanted, or the other way round.

    A run of one seed is stored in the folder itself, and those of several seeds in folders below it. The summaries of
    both have the same path, and runs inside another run are not found.
    """
    out = RunFolder(Path(settings.out))
    out.refuse_runs_in([out] if settings.seeds > 1 else out.of_seeds())


def other_architectures() -> dict[str, dict[str, Any]]:
    """Return, by name, what the file in `configs/arch` of each architecture that has none would contain."""
    from fairseq_alma.lm.fairseq_config import architectures  # imports fairseq, which takes seconds

    names = ("tokens_per_sample", "sequences_per_update", "lr")
    defaults = {name: defaults_of(LanguageModelSettings)[name] for name in names}
    return {name: {"arch": name, **defaults, "table_updates": None} for name in architectures()}


store_settings(LanguageModelSettings)
store_presets()
COMMAND = Command(
    "alma-lm",
    __doc__ or "",
    LanguageModelSettings,
    CONFIGS,
    example_out="runs/sm_w1",
    other_keys=OTHER_KEYS,
    when_stopped="what is being trained is saved first, which takes up to a minute",
    data_setting="stream",
    other_choices={"arch": other_architectures},
    presets=PRESETS,
    subcommands={"rollback": Subcommand(roll_back_runs, {"--to-stage": {"type": int, "required": True}})},
)


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_lm")
def hydra_main(config: DictConfig) -> float:
    """Carry out the runs of all seeds with one combination of settings. Hydra calls this once per combination."""

    def run(values: dict[str, Any], given: Collection[str]) -> float:
        settings = LanguageModelSettings.from_mapping(values, given)
        refuse_other_layout(settings)
        slurm, job = slurm_settings(config), os.environ.get(JOB)
        if slurm is None:
            return run_seeds(settings)
        if job == RUN_STEP:
            score = run_seeds(settings, slurm)
            # Another seed may have ended at the same moment.
            summarize_seeds(Path(settings.out).parent, patience_seconds=10)
            return score
        if job is None:
            submit_runs(settings, slurm)
        else:
            run_member_job(settings, slurm, int(job.removeprefix("stage ")), int(os.environ["SLURM_ARRAY_TASK_ID"]))
        return math.nan  # the result is not known yet

    return COMMAND.run_job(config, run)


def main() -> None:
    """Run the command alma-lm."""
    # If alma-lm is started with `python -m`, it may run in a fork of a server process that has already imported
    # fairseq_cli. That import has configured logging for fairseq-train, so replace this configuration.
    hide_messages_of_libraries(force=__name__ == "__main__")
    COMMAND.main(hydra_main)


if __name__ == "__main__":
    main()

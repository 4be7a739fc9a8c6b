"""alma-vision: train a vision learner over a stream of mega-batches and write its ledger.

alma-vision                                                        a first result: SM and Ens on digits
alma-vision dataset=mnist learner=gmoe wait=10 width=32 seeds=3 out=RUN
alma-vision -m dataset=mnist learner=sm wait=1,10,50 width=4,32 out=SWEEP    a sweep, best run first
alma-vision dataset=mnist out=RUN launch=slurm launch.partition=cpu    in a Slurm job; also a sweep
alma-vision status RUN [--json]                                    the ledger, jobs, what is left; --json for monitors
alma-vision logs RUN                                               the logs of the jobs, until the run ends
alma-vision cancel RUN                                             end the run
alma-vision --help                                                 every setting
"""

import math
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from fairseq_alma.app.command import Command, print_errors, slurm_settings
from fairseq_alma.app.slurm_jobs import JOB, refuse_queued, submit_run
from fairseq_alma.app.tables import NOTHING_TO_DO, ledger_table, rows_in, title_of, waiting_message, wide_console
from fairseq_alma.core.allocator import keep_freed_memory
from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.core.metrics import score_of
from fairseq_alma.core.printing import hide_messages_of_libraries
from fairseq_alma.core.program import stopped
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.seed_record import refuse_other_settings
from vision.api import run
from vision.presets import CONFIGS, settings_of
from vision.settings import VisionSettings


def run_and_show(settings: VisionSettings) -> float:
    """Call `vision.run`, and print the results.

    Return the score by which runs are compared (see `score_of`), averaged over the seeds: the prequential error rate,
    or the final validation error rate if only one mega-batch arrived.

    This function also changes how the process frees memory (see `keep_freed_memory`). So only the command alma-vision
    calls `run_and_show`. Other code calls `vision.run`.
    """
    keep_freed_memory()
    console, out = wide_console(), Path(settings.out)
    before = rows_in(out.absolute())
    result = run(settings)
    title = title_of(settings.out, settings.to_json())
    summary, num_seeds = result.summary, settings.seeds
    if num_seeds == 1:
        console.print(ledger_table(result.ledger, title, at_most=20))
        console.print(f"CER {summary['cer']:.3f}, final error rate {summary['final']:.2%}, {summary['comp']:.3g} FLOPs")
    else:
        summary, stderr = summary["mean"], summary["stderr"]
        console.print(
            f"{title}: {num_seeds} seeds, CER {summary['cer']:.3f} +- {stderr['cer']:.3f}, final error rate "
            f"{summary['final']:.2%} +- {stderr['final']:.2%} (mean +- standard error), {summary['comp']:.3g} FLOPs "
            f"per seed"
        )
    if message := waiting_message(result.ledger, settings.wait):
        console.print(message)
    if before == dict(zip(result.folders, result.ledgers, strict=True)):
        console.print(NOTHING_TO_DO)
    console.print(f"ledger {out}{'' if num_seeds == 1 else '/seed_*'}/ledger.jsonl, summary {out}/summary.json")
    return score_of(summary)


def quickstart() -> None:
    """Train SM and Ens on digits and write a report. `alma-vision` without arguments calls this function."""
    # Import the report code only when it is needed, because it imports matplotlib, and that import takes a second.
    from fairseq_alma.report.cli import make

    out = Path("runs/quickstart")
    for folder in (out / "sm", out / "ens"):
        settings = VisionSettings(out=str(folder), learner=folder.name, preset="quickstart")
        sys.argv = ["alma-vision", "preset=quickstart", f"learner={settings.learner}", f"out={folder}"]
        print(f"\n$ {' '.join(sys.argv)}", flush=True)  # provenance.json contains the same
        run_and_show(settings)
    print(f"\n$ alma-report {out} --out {out / 'report'}", flush=True)
    make([str(out)], out / "report")


COMMAND = Command("alma-vision", __doc__ or "", VisionSettings, CONFIGS, example_out="runs/mnist/sm")


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_vision")
def hydra_main(config: DictConfig) -> float:
    """Train with the settings given on the command line, or with one combination of settings of a sweep.

    Hydra, the library that reads the command line, calls this function once for each combination.

    Return the prequential error rate, averaged over the seeds (see `run_and_show`). Return infinity if a job of a sweep
    failed.
    """

    def run(values: dict[str, Any], given: Collection[str]) -> float:
        settings, slurm = settings_of(values, given), slurm_settings(config)
        if slurm is not None and JOB not in os.environ:
            for seed, folder in enumerate(map(RunFolder, settings.seed_folders), settings.seed):
                now, free = {**settings.to_json(), "seed": seed}, settings_that_are("free", "vision")
                refuse_other_settings(folder, now, free, shared=RunFolder(Path(settings.out)))
            submit_run(
                Path(settings.out), "vision.cli", sys.argv[1:], slurm, settings.num_arrivals, settings.seed_folders
            )
            return math.nan  # the result is not known yet
        refuse_queued(settings.out)
        return run_and_show(settings)

    return COMMAND.run_job(config, run)


def main() -> None:
    """Entry point of the command alma-vision."""
    hide_messages_of_libraries()
    if len(sys.argv) == 1:
        with print_errors("alma-vision"):
            try:
                quickstart()
            except KeyboardInterrupt:
                sys.exit(stopped("alma-vision"))
        return
    COMMAND.main(hydra_main)


if __name__ == "__main__":
    main()

"""The demo (`make demo`). It runs the main experiment, from raw text to a report, on text that needs no download."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.lm.stage_processes import IMPORTED
from launch.local import Start, start_process
from launch.warm import warm_start

MEGA_BATCHES = 4
UPDATES_PER_MEGA_BATCH = 32
MODULES = {
    "alma-prep": "data_prep",
    "alma-lm": "fairseq_alma.lm.run",
    "alma-report": "fairseq_alma.report.cli",
}
"""Module that each command runs."""
SLOW_IMPORTS = (
    *IMPORTED,
    "fairseq_alma.lm.run",
    "fairseq_alma.lm.learners",
    "fairseq_alma.evaluation.evaluator",
    "tensorboardX",
)
"""Modules that alma-lm and its training processes need, and which take seconds to import.

The modules of the training processes come first in this list, because the first of them configures Python's logging.
Modules that are imported later cannot change this configuration. So the training processes log in the format of
fairseq-train."""


QUICKSTART = ("preset=quickstart",)
RUNS = {
    "SM, wait 1": ("sm/wait_1", *QUICKSTART, "learner=sm", "wait=1"),
    f"SM, wait {MEGA_BATCHES}": (f"sm/wait_{MEGA_BATCHES}", *QUICKSTART, "learner=sm", f"wait={MEGA_BATCHES}"),
    "gMoE, 4 to 12 experts": (
        "gmoe", *QUICKSTART, "learner=gmoe", "wait=1", "experts=4", "grow_experts=[2,2,4]",
    ),
    "Ens, 2 members": ("ens", *QUICKSTART, "learner=ens", "wait=1", "members=2"),
    "anytime": ("anytime", "preset=anytime", "arch=switch_lm_tiny", "dropout=0", "learner=sm", "wait=1"),
}  # fmt: skip
"""For each run, by its title: its folder in the output folder of the demo, and its settings of alma-lm."""


def main() -> int:
    """Prepare the stream, train the learners, write the report and print the ledgers. Return the exit status.

    If an earlier call has already prepared the stream or trained some of the learners, these steps are skipped.
    """
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="output folder (default: runs/demo)")
    parser.add_argument(
        "--updates-per-mega-batch",
        type=int,
        default=UPDATES_PER_MEGA_BATCH,
        help=f"number of optimizer updates per mega-batch (default: {UPDATES_PER_MEGA_BATCH})",
    )
    arguments = parser.parse_args()
    out = arguments.out
    stream = out / "stream"
    show = wide_console().print
    # Start a server process, which imports the slow modules of alma-lm once, while alma-prep runs. All calls of alma-lm
    # are forks of this server, and so are the training processes that they start. So they need not import the modules
    # again.
    warm = warm_start(SLOW_IMPORTS)
    show(
        f"The data are the docstrings of Python's standard library. They arrive in {MEGA_BATCHES} mega-batches.\n"
        f"SM, wait 1: one model is trained on each mega-batch when it arrives.\n"
        f"SM, wait {MEGA_BATCHES}: one model is trained when all mega-batches have arrived.\n"
        "gMoE: a mixture of experts gets more experts before each stage.\n"
        "Ens: the probabilities of two models are averaged.\n"
        "anytime: one model learns from all mega-batches so far, and predicts with the average of its weights.\n"
        "Each model is trained with the same number of updates.\n"
        "A model that an earlier run has trained in the same way is copied, not trained again (reuse_from=)."
    )
    _command("alma-prep", str(stream), "--source", "python-docs", "--mega-batches", str(MEGA_BATCHES),
             "--vocab-size", "4000", "--valid-words", "5000", "--seed", "0", "--duplicates", "keep")  # fmt: skip
    for folder, *settings in RUNS.values():
        _command("alma-lm", f"stream={stream}", f"out={out / folder}", *settings,
                 f"updates_per_mega_batch={arguments.updates_per_mega_batch}", "validations=2",
                 f"reuse_from={out / 'shared'}", start=warm)  # fmt: skip
    runs = {title: out / folder for title, (folder, *_) in RUNS.items()}
    _command("alma-report", *map(str, runs.values()), "--out", str(out / "report"))
    for title, run in runs.items():
        show(ledger_table(Ledger(run / "ledger.jsonl").rows(), title=title))
    first = next(iter(runs.values()))
    show(
        f"* the learner is untrained\n"
        f"report          {out}/report/index.html (open it in a browser)\n"
        f"figures         {out}/report/figures/\n"
        f"ledgers         {out}/.../ledger.jsonl\n"
        f"logs            {first}/stages/stage_001/member_1/log.txt ...\n"
        f"stream          {stream} (stream.json lists its contents)\n"
        f"score a model   .venv/bin/alma-eval {first}\n"
        f"README.md describes the settings of the paper."
    )
    return 0


def _command(name: str, *arguments: str, start: Start = start_process) -> None:
    """Print a command, one of MODULES, and run it. If it fails, end the demo with its exit status."""
    print(f"\n$ {name} {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", MODULES[name], *arguments]
    process = start(command, sys.stdout.fileno(), {**os.environ, "COLUMNS": "120"}, sys.stderr.fileno())
    if status := process.wait():
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())

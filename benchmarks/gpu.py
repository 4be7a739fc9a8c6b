"""Measure on a GPU what the other pages call "Not measured", the most important first, in at most 30 minutes.

.venv/bin/python benchmarks/gpu.py --out FOLDER --data-root DATA           DATA has CIFAR-10; without, images are left
                                                                           out
.venv/bin/python benchmarks/gpu.py --out FOLDER --data-root DATA --write   also written to benchmarks/*.md
.venv/bin/python benchmarks/gpu.py --out FOLDER --only lm_layer lm_eval    some of the commands
.venv/bin/python benchmarks/gpu.py --out FOLDER --device cpu --quick       whether the commands work, at tiny sizes

Each command writes to a file of its own, FOLDER/NAME.txt, and has a limit of time, after which it is killed. The exit
status is 0 if all commands have succeeded.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT


@dataclass(frozen=True)
class Command:
    """A command, and how long it may take."""

    name: str
    minutes: float
    """Longest time of the command."""
    words: str
    """The script and its options, without --device."""
    quick: str = ""
    """Further options that make it tiny."""
    writes: bool = True
    """Whether it has the option --write."""


TINY_MODEL = "--arch switch_lm_tiny --sequences 1"
COMMANDS = [
    Command("lm_train_base", 3, "lm_train.py --arch switch_lm_base --compiled", f"{TINY_MODEL} --repeats 1"),
    Command("lm_train_large", 4, "lm_train.py --arch switch_lm_large --compiled", f"{TINY_MODEL} --repeats 1"),
    Command(
        "lm_layer", 3, "lm_layer.py --precisions bfloat16 --dims 512 768 --repeats 5",
        "--dims 32 --experts 2 --tokens 512 --repeats 1",
    ),
    # Updates of 8 x 512 tokens, as in small studies. The page has no part for them.
    Command(
        "lm_train_small_updates", 2, "lm_train.py --arch switch_lm_base --compiled --sequences 8",
        f"{TINY_MODEL} --repeats 1", writes=False,
    ),
    Command("vision_cifar", 3, "vision_cifar.py --bfloat16 --repeats 5 --data-root {data}", "--widths 4 --repeats 1"),
    Command("lm_eval", 2, "lm_eval.py --repeats 3", "--archs switch_lm_tiny --tokens 512 --repeats 1"),
    Command("lm_profile_base", 2, "lm_profile.py --arch switch_lm_base", f"{TINY_MODEL} --only-profile"),
    Command("lm_profile_large", 1, "lm_profile.py --arch switch_lm_large --only-profile", TINY_MODEL),
    Command("tests", 4, "-m pytest -q -m gpu", "tests/vision/test_cuda_graphs.py", writes=False),
    # alma-lm as a whole, with evaluation and checkpoints.
    Command(
        "lm_table2_base", 2, "lm_table2.py --arch switch_lm_base --updates 200",
        "--arch switch_lm_tiny --updates 2 --sequences 1",
    ),
    Command(
        "lm_table2_large", 4, "lm_table2.py --arch switch_lm_large --updates 200",
        "--arch switch_lm_tiny --updates 2 --sequences 1",
    ),
]  # fmt: skip
"""The commands, in the order in which they run."""
OWN_DEVICE = ("tests", "lm_table2_base", "lm_table2_large")
"""Names of the commands that have no option --device. They use the GPU if there is one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the output of the commands")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to measure (default: cuda)")
    parser.add_argument("--data-root", help="folder of CIFAR-10 (default: the commands that need it are left out)")
    parser.add_argument("--minutes", type=float, default=30, help="time for all commands together (default: 30)")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in COMMANDS], help="names of commands to run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether the commands work")
    parser.add_argument("--write", action="store_true", help="write the tables in benchmarks/*.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end, all_succeeded = time.monotonic() + 60 * options.minutes, True
    for command in COMMANDS:
        if options.only and command.name not in options.only:
            continue
        if "{data}" in command.words and not options.data_root:
            print(f"{command.name}: left out, because it needs --data-root", flush=True)
            continue
        limit = min(60 * command.minutes, end - time.monotonic())
        if options.quick:
            limit = end - time.monotonic()
        outcome = run(words_of(command, options), options.out / f"{command.name}.txt", limit)
        all_succeeded &= outcome.startswith("done")
        print(f"{command.name}: {outcome}", flush=True)
    return 0 if all_succeeded else 1


def words_of(command: Command, options: argparse.Namespace) -> list[str]:
    """Return a command as a list of words, the program first."""
    script, *words = command.words.split()
    if script.endswith(".py"):
        script = str(ROOT / "benchmarks" / script)
    words = [options.data_root if word == "{data}" else word for word in words]
    words += command.quick.split() if options.quick else []
    words += [] if command.name in OWN_DEVICE else ["--device", options.device]
    words += ["--write"] if options.write and command.writes else []
    return [sys.executable, script, *words]


def run(words: list[str], output: Path, seconds: float) -> str:
    """Run a command for at most `seconds`, with its output in a file. Return how it has ended, for the user."""
    began = time.monotonic()
    if seconds <= 0:
        return "left out, because the time is over"
    with output.open("w", encoding="utf-8") as file:
        print(" ".join(words), file=file, flush=True)
        # A session of its own, so that the processes of the command are killed with it.
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"killed after {seconds:.0f} s, see {output}"
    spent = f"{time.monotonic() - began:.0f} s"
    return f"done in {spent}" if status == 0 else f"failed with status {status} after {spent}, see {output}"


if __name__ == "__main__":
    sys.exit(main())

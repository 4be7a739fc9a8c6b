"""Compare loss curves: of compiled and plain layers, or of the fast path and of an earlier version of ALMA (float32).

.venv/bin/python benchmarks/lm_curves.py --stream STREAM --logs FOLDER                    compiled and plain layers
.venv/bin/python benchmarks/lm_curves.py --stream STREAM --logs FOLDER --before FOLDER    fast path and earlier version
.venv/bin/python benchmarks/lm_curves.py ... --write               also written to benchmarks/lm_curves.md

STREAM is a stream folder of books (the command that made it is in lm_curves.md), and --before is a checkout of the
earlier version, which has its own .venv. For each seed, both train switch_lm_tiny for 300 updates by fairseq-train with
one thread. A training whose log is complete in the folder --logs is not repeated.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT, provenance, table, write_part

UPDATES, INTERVAL = 300, 100
OPTIONS = [
    "--user-dir", "fairseq_alma", "--task", "alma_lm", "--mega-batches", "1", "--arch", "switch_lm_tiny",
    "--num-experts", "4", "--dropout", "0", "--tokens-per-sample", "128", "--batch-size", "16", "--criterion",
    "switch_lm", "--adam-betas", "(0.9, 0.98)", "--lr", "0.005", "--lr-scheduler", "polynomial_decay",
    "--warmup-updates", "15", "--total-num-update", str(UPDATES), "--end-learning-rate", "0", "--clip-norm", "1",
    "--max-update", str(UPDATES), "--validate-interval-updates", str(INTERVAL), "--no-save", "--log-format", "json",
    "--log-interval", "20", "--num-workers", "0", "--cpu",
]  # fmt: skip
FAST = ["--optimizer", "fused_adam", "--precision", "bfloat16"]
PATHS = {
    "old": ["--optimizer", "adam"],
    "new": FAST,
    # In float32, because compiling is what is compared, and CPUs without instructions for bfloat16 emulate it.
    "plain": [*FAST, "--precision", "float32", "--batch-size", "4"],
    "compiled": [*FAST, "--precision", "float32", "--batch-size", "4", "--compile-batch", "4"],
}
"""Path -> further options. The name of a path is also the first part of the names of its logs."""


@dataclass(frozen=True)
class Comparison:
    """Two paths that are compared, and their names in the report."""

    paths: tuple[str, str]
    names: tuple[str, str]
    explanation: str
    """What the two paths are. It contains the commits as `{commits[0]}` and `{commits[1]}`."""
    options: str = ""
    """Options of this script that select the comparison."""


COMPARISONS = {
    "Fast and slow path": Comparison(
        ("old", "new"),
        ("slow", "fast"),
        "Fast: bfloat16 by autocast, fused Adam, chunked loss, the code of commit {commits[1]} (--now). Slow: float32 "
        "and fairseq's Adam, the code of commit {commits[0]} (--before).",
        " --before FOLDER",
    ),
    "Compiled and plain layers": Comparison(
        ("plain", "compiled"),
        ("plain", "compiled"),
        "Both: the fast path in float32, commit {commits[1]}, 512 tokens an update. Compiled: the layers and the "
        "loss, by torch.compile (--compile-batch), here with inductor's code for the CPU. The experts are then "
        "computed in slots, as on a GPU.",
    ),
}
"""Part of the report -> what it compares."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="checkout of an earlier version, with its own .venv")
    parser.add_argument("--now", type=Path, default=ROOT, help="checkout of the new version (default: this one)")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_curves.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    part = "Fast and slow path" if options.before else "Compiled and plain layers"
    comparison = COMPARISONS[part]
    codes = (options.before or options.now, options.now)
    first, second = (
        [curve(options, path, code, seed) for seed in range(1, options.seeds + 1)]
        for path, code in zip(comparison.paths, codes, strict=True)
    )
    commits = [commit_of(code) for code in codes]
    lines = [*section(comparison, first, second, commits, options.stream), "", *provenance(load_at_start)]
    print("\n".join(lines))
    if options.write:
        commands = {
            name: f"benchmarks/lm_curves.py --stream STREAM --logs FOLDER{one.options}"
            for name, one in COMPARISONS.items()
        }
        write_part("# Loss curves\n\nWritten by `benchmarks/lm_curves.py --write`.", commands, part, lines)


def curve(options: argparse.Namespace, path: str, code: Path, seed: int) -> dict[int, float]:
    """Train for 300 updates, unless the log is complete. Return the validation perplexities, by number of updates."""
    log = options.logs / f"{path}.{seed}.log"
    if not log.exists() or "done training" not in log.read_text():
        options.logs.mkdir(parents=True, exist_ok=True)
        own = code.absolute() / ".venv/bin/python"
        program = [str(own if own.exists() else sys.executable), "-m", "fairseq_cli.train"]
        command = [*program, str(options.stream.absolute()), *OPTIONS, *PATHS[path], "--seed", str(seed)]
        threads = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as output:
            subprocess.run(
                command, env=os.environ | threads, cwd=code, stdout=output, stderr=subprocess.STDOUT, check=True
            )
    found = re.findall(r"\| INFO \| valid \| (\{.*\})", log.read_text())
    values = [json.loads(line) for line in found]
    return {int(one["valid_num_updates"]): float(one["valid_ppl"]) for one in values}


Curves = list[dict[int, float]]
"""For each seed, the validation perplexities, by number of updates."""


def section(comparison: Comparison, first: Curves, second: Curves, commits: list[str], stream: Path) -> list[str]:
    """Return the lines of the report about the curves of two paths, `first` and `second`."""
    rows, notes = [], []
    one_name, other_name = comparison.names
    for updates in range(INTERVAL, UPDATES + 1, INTERVAL):
        ones, others = ([curve[updates] for curve in curves] for curves in (first, second))
        differences = [b - a for a, b in zip(ones, others, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        mean = statistics.mean(differences)
        rows.append([updates, summary(ones), summary(others), f"{mean:+.2f} ± {error:.2f}"])
        noise = statistics.stdev(ones)
        within = abs(mean) < noise and abs(mean) < 2 * error
        notes.append(
            f"- after {updates} updates: {'within' if within else 'outside'} seed noise (the difference is "
            f"{abs(mean) / error:.1f} of its standard errors and {abs(mean) / noise:.2f} of the spread of the seeds)"
        )
    by_seed = [
        [seed, *(f"{curve[UPDATES]:.2f}" for curve in pair)]
        for seed, pair in enumerate(zip(first, second, strict=True), start=1)
    ]
    return [
        "Validation perplexity, mean ± standard deviation over the seeds. "
        f"{comparison.explanation.format(commits=commits)} The difference is that of the runs with the same seed, ± "
        "its standard error.",
        "",
        *table(["updates", one_name, other_name, f"{other_name} - {one_name}"], rows),
        "",
        *notes,
        "",
        f"By seed, after {UPDATES} updates:",
        "",
        *table(["seed", one_name, other_name], by_seed),
        "",
        f"Stream: `{stream_command(stream)}`",
    ]


def summary(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def commit_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def stream_command(stream: Path) -> str:
    """Return the alma-prep command that made the stream, with PATH instead of the folders of this machine."""
    return re.sub(r"(?<=[ :])/\S*/", "PATH/", json.loads((stream / "stream.json").read_text())["command"])


if __name__ == "__main__":
    main()

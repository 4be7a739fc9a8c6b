"""Compare the loss curves of the fast path (bfloat16, fused Adam) and of an earlier version of ALMA (float32).

.venv/bin/python benchmarks/lm_curves.py --stream STREAM --before FOLDER --logs FOLDER
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
from pathlib import Path

from _common import ROOT, provenance, table

UPDATES, INTERVAL = 300, 100
OPTIONS = [
    "--user-dir", "fairseq_alma", "--task", "alma_lm", "--mega-batches", "1", "--arch", "switch_lm_tiny",
    "--num-experts", "4", "--dropout", "0", "--tokens-per-sample", "128", "--batch-size", "16", "--criterion",
    "switch_lm", "--adam-betas", "(0.9, 0.98)", "--lr", "0.005", "--lr-scheduler", "polynomial_decay",
    "--warmup-updates", "15", "--total-num-update", str(UPDATES), "--end-learning-rate", "0", "--clip-norm", "1",
    "--max-update", str(UPDATES), "--validate-interval-updates", str(INTERVAL), "--no-save", "--log-format", "json",
    "--log-interval", "20", "--num-workers", "0", "--cpu",
]  # fmt: skip
PATHS = {
    "old": ["--optimizer", "adam"],
    "new": ["--optimizer", "fused_adam", "--precision", "bfloat16"],
}
"""Path -> further options. The name of a path is also the first part of the names of its logs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", type=Path, required=True)
    parser.add_argument("--before", type=Path, required=True, help="checkout of an earlier version, with its own .venv")
    parser.add_argument("--now", type=Path, default=ROOT, help="checkout of the new version (default: this one)")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_curves.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    seeds = range(1, options.seeds + 1)
    curves = {
        path: [curve(options, path, code, seed) for seed in seeds]
        for path, code in {"old": options.before, "new": options.now}.items()
    }
    text = "\n".join([*section(curves, options), "", *provenance(load_at_start)])
    print(text)
    if options.write:
        title = "# Loss curves of the fast and the slow path\n\nWritten by `benchmarks/lm_curves.py --write`."
        Path(__file__).with_suffix(".md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")


def curve(options: argparse.Namespace, path: str, code: Path, seed: int) -> dict[int, float]:
    """Train for 300 updates, unless the log is complete. Return the validation perplexities, by number of updates."""
    log = options.logs / f"{path}.{seed}.log"
    if not log.exists() or "done training" not in log.read_text():
        options.logs.mkdir(parents=True, exist_ok=True)
        program = [str(code.absolute() / ".venv/bin/fairseq-train"), str(options.stream.absolute()), *OPTIONS]
        command = [*program, *PATHS[path], "--seed", str(seed)]
        threads = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as output:
            subprocess.run(
                command, env=os.environ | threads, cwd=code, stdout=output, stderr=subprocess.STDOUT, check=True
            )
    found = re.findall(r"\| INFO \| valid \| (\{.*\})", log.read_text())
    values = [json.loads(line) for line in found]
    return {int(one["valid_num_updates"]): float(one["valid_ppl"]) for one in values}


def section(curves: dict[str, list[dict[int, float]]], options: argparse.Namespace) -> list[str]:
    """Return the lines of the report."""
    rows, notes = [], []
    for updates in range(INTERVAL, UPDATES + 1, INTERVAL):
        old, new = ([one[updates] for one in curves[path]] for path in ("old", "new"))
        differences = [b - a for a, b in zip(old, new, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        mean = statistics.mean(differences)
        rows.append([updates, summary(old), summary(new), f"{mean:+.2f} ± {error:.2f}"])
        noise = statistics.stdev(old)
        within = abs(mean) < noise and abs(mean) < 2 * error
        notes.append(
            f"- after {updates} updates: {'within' if within else 'outside'} seed noise (the difference is "
            f"{abs(mean) / error:.1f} of its standard errors and {abs(mean) / noise:.2f} of the spread of the seeds)"
        )
    by_seed = [
        [seed, *(f"{one[UPDATES]:.2f}" for one in pair)]
        for seed, pair in enumerate(zip(curves["old"], curves["new"], strict=True), start=1)
    ]
    return [
        "Validation perplexity, mean ± standard deviation over the seeds. Fast: bfloat16 by autocast, fused Adam, "
        f"chunked loss, the code of commit {commit_of(options.now)} (--now). Slow: float32 and fairseq's Adam, the "
        f"code of commit {commit_of(options.before)} (--before). The difference is that of the runs with the same "
        "seed, ± its standard error.",
        "",
        *table(["updates", "slow", "fast", "fast - slow"], rows),
        "",
        *notes,
        "",
        f"By seed, after {UPDATES} updates:",
        "",
        *table(["seed", "slow", "fast"], by_seed),
        "",
        f"Stream: `{stream_command(options.stream)}`",
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

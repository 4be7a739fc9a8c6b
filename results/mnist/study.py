"""The paper's MNIST grid: learners x waits x widths, B = 500, 100 epochs, 3 seeds.

    .venv/bin/python results/mnist/study.py run --data-root DATA       what is missing, two runs side by side
    .venv/bin/python results/mnist/study.py table                      table.md and pictures from the committed ledgers

Every run is one command of alma-vision, printed before it starts and kept in its settings.json. A run that is
finished is passed over, a killed one goes on. Ledgers are committed gzipped: they are many, and between stages repeat.
"""

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs" / "mnist"
LEDGERS = HERE / "ledgers"

LEARNERS = ("sm", "gens", "umix", "ens", "gmoe")
LABELS = {"sm": "SM", "ens": "Ens", "umix": "UMix", "gens": "gEns", "gmoe": "gMoE"}
WAITS = (500, 50, 25, 10, 1)
WIDTHS = (4, 64, 8, 32)
SEEDS = 3
NUM_MEGA_BATCHES = 500
GROW_EVERY = {1: 25, 10: 3, 25: 1, 50: 1, 500: 1}
"""gMoE: stages from growth to growth, so that no run grows more than 20 times."""


def jobs() -> Iterator[tuple[str, list[str]]]:
    """Name and settings of every run, the cheap ones and the outer widths first."""
    for width, learner, wait in product(WIDTHS, LEARNERS, WAITS):
        settings = [f"learner={learner}", f"wait={wait}", f"width={width}"]
        if learner == "gmoe":
            settings.append(f"grow_every={GROW_EVERY[wait]}")
        yield f"{learner}_h{width}_w{wait}", settings


def run(arguments: argparse.Namespace) -> None:
    """Every run that has no committed ledgers, within the hours given."""
    until = time.monotonic() + 3600 * arguments.hours
    missing = [job for job in jobs() if not (LEDGERS / job[0] / "summary.json").exists()]
    with ThreadPoolExecutor(arguments.side_by_side) as pool:
        list(pool.map(lambda job: _one(*job, arguments.data_root, until), missing))


def _one(name: str, settings: list[str], data_root: str, until: float) -> None:
    if time.monotonic() > until:
        return
    out = RUNS / name
    program = Path(sysconfig.get_path("scripts")) / "alma-vision"
    command = [str(program), "dataset=mnist", f"data_root={data_root}", *settings, f"seeds={SEEDS}", f"out={out}",
               "routing_examples=0"]  # fmt: skip
    began = time.monotonic()
    print(f"$ {shlex.join(['alma-vision', *command[1:]])}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return
    target = LEDGERS / name
    target.mkdir(parents=True, exist_ok=True)
    for seed in range(SEEDS):
        content = (out / f"seed_{seed}" / "ledger.jsonl").read_bytes()
        # Without a name and a time inside: the same ledger is the same file.
        (target / f"seed_{seed}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    provenance = json.loads((out / "seed_0" / "provenance.json").read_text())
    summary = json.loads((out / "summary.json").read_text())
    kept = {"command": ["alma-vision", "dataset=mnist", *settings, f"seeds={SEEDS}"], "commit": provenance["commit"]}
    (target / "summary.json").write_text(json.dumps({**kept, **summary}, indent=1) + "\n")
    print(f"{name}: CER {summary['mean']['cer']:.2f}, {time.monotonic() - began:.0f} s", flush=True)


def summaries() -> dict[tuple[str, int, int], dict]:
    """(learner, width, wait) to the summary of its run, those that are there."""
    found = {}
    for width, learner, wait in product(sorted(WIDTHS), LABELS, sorted(WAITS)):
        path = LEDGERS / f"{learner}_h{width}_w{wait}" / "summary.json"
        if path.exists():
            found[learner, width, wait] = json.loads(path.read_text())
    return found


def table() -> None:
    """table.md, cer.png."""
    found = summaries()
    lines = [
        "| width | learner | wait | CER | final error, % | parameters, last | Mem | Comp, TFLOP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (learner, width, wait), summary in found.items():
        mean, stderr = summary["mean"], summary["stderr"]
        rows = rows_of(learner, width, wait, 0)
        lines.append(
            f"| {width} | {LABELS[learner]} | {wait} | {mean['cer']:.2f} +- {stderr['cer']:.2f} "
            f"| {100 * mean['final']:.2f} +- {100 * stderr['final']:.2f} | {rows[-1]['num_params']:,} "
            f"| {mean['mem']:.3g} | {mean['comp'] / 1e12:.3g} |"
        )
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    draw(found)
    print("\n".join(lines))


def rows_of(learner: str, width: int, wait: int, seed: int) -> list[dict]:
    """The ledger of a run, t = 0..B."""
    path = LEDGERS / f"{learner}_h{width}_w{wait}" / f"seed_{seed}.jsonl.gz"
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def draw(found: dict[tuple[str, int, int], dict]) -> None:
    """CER against the wait, one panel a width; and the anytime curves of SM at the smallest and largest width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    widths = sorted({width for _, width, _ in found})
    figure, panels = plt.subplots(
        1, len(widths), figsize=(1 + 3.6 * len(widths), 3.8), layout="constrained", squeeze=False
    )
    for axes, width in zip(panels[0], widths, strict=True):
        for number, (learner, label) in enumerate(LABELS.items()):
            waits = [wait for wait in sorted(WAITS) if (learner, width, wait) in found]
            points = [found[learner, width, wait] for wait in waits]
            axes.errorbar(
                waits, [one["mean"]["cer"] for one in points], yerr=[one["stderr"]["cer"] for one in points],
                label=label, color=f"C{number}", marker="os^Dv"[number], capsize=2,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted(WAITS), [str(wait) for wait in sorted(WAITS)])
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.tick_params(axis="y", which="minor", labelsize="x-small")
        axes.set_title(f"width {width}", fontsize="medium")
        axes.set_xlabel("wait (mega-batches)")
        axes.grid(which="both", alpha=0.3)
    panels[0][0].set_ylabel("CER over 500 arrivals (log scale)")
    panels[0][0].legend(fontsize="small")
    figure.savefig(HERE / "cer.png", dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--hours", type=float, default=3.0, help="after them no further run is started")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments)
    else:
        table()


if __name__ == "__main__":
    main()

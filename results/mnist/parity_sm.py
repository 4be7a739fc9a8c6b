"""Compare SM on MNIST with plain PyTorch and with the authors' code on many seeds: the first stage at wait 2.

    git clone https://github.com/facebookresearch/alma /elsewhere/alma
    pip install --target /elsewhere/extra fvcore
    python results/mnist/parity_sm.py --original /elsewhere/alma --extra /elsewhere/extra --data-root DATA

MNIST, B = 500, 100 epochs, the epoch with the best validation accuracy, 250 seeds that no other comparison uses. All
three train on the same partitions. The results are written to parity_sm.json and parity_sm.md. The errors of the
authors' code are stored after each seed, so the same command continues an interrupted comparison.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import parity  # noqa: E402
from _parity import Case  # noqa: E402

SEEDS = range(2000, 2250)
WIDTHS = (32, 4)


def case_of(width: int) -> Case:
    """Return the case that all three run: SM, the first stage at wait 2."""
    return Case("sm", width, wait=2, num_stages=1, epochs=100)


def ours(width: int, data_root: str, out: Path) -> list[float]:
    """Return the test error of this software for each seed."""
    return [errors[0] for errors in parity.ours(case_of(width), SEEDS, data_root, out / f"ours_{width}")]


def plain(width: int, data_root: str) -> list[float]:
    """Return the test error of a plain PyTorch loop for each seed."""
    import selection

    from vision.datasets import load_dataset

    dataset = load_dataset("mnist", data_root)
    x = dataset.pixels.normalise(dataset.test.images)
    data = selection.data_of(dataset, SEEDS)
    return selection.plain(data, x, dataset.test.labels, SEEDS.start, width)[0]


def original(width: int, arguments: argparse.Namespace) -> list[float]:
    """Return the test error of the authors' code for each seed. A process of its own imports the code."""
    path = arguments.out / f"original_{width}.jsonl"
    data = arguments.out / "original_data"
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "CachedMNIST").is_symlink():  # the name that the authors' code looks for
        (data / "CachedMNIST").symlink_to(Path(arguments.data_root).absolute() / "MNIST")
    paths = [str(path.absolute()) for path in (arguments.original, arguments.extra) if path]
    given = ["--original", str(arguments.original), "--data-root", str(data), "--one", str(width), str(path)]
    command = [sys.executable, "-W", "ignore", __file__, *given]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=True)
    return read_errors(path)


def read_errors(path: Path) -> list[float]:
    """Return the errors in a file with one number per line."""
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_original(width: int, path: Path, data_root: str) -> None:
    """Append the test errors of the authors' code to a file, for the seeds that are missing there."""
    for seed in SEEDS[len(read_errors(path)) :]:
        with redirect_stdout(sys.stderr):
            (error,) = parity.original(case_of(width), seed, data_root)
        with path.open("a") as file:
            file.write(f"{error!r}\n")


def text_of(errors: list[float]) -> str:
    """Return mean and standard error in percent."""
    stderr = statistics.stdev(errors) / len(errors) ** 0.5
    return f"{100 * statistics.mean(errors):.2f} +- {100 * stderr:.2f}"


def report(table: dict[str, dict[str, list[float]]]) -> str:
    """Return the Markdown report."""
    rows = [
        f"| {width} | " + " | ".join(text_of(table[str(width)][name]) for name in ("ours", "plain", "original")) + " |"
        for width in WIDTHS
    ]
    head = ["| width | ours | plain PyTorch | the authors' code |", "|---:|---:|---:|---:|"]
    lines = [
        "# SM after the first stage at wait 2, on MNIST",
        "",
        f"Test error in % (mean +- standard error over {len(SEEDS)} seeds). B = 500, 100 epochs, the epoch with the",
        "best validation accuracy (24 examples). Command: `parity_sm.py`.",
        "",
    ]
    return "\n".join([*lines, *head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path, required=True, help="a checkout of facebookresearch/alma")
    parser.add_argument("--extra", type=Path, help="a folder with the packages that the authors' code imports")
    parser.add_argument("--data-root", required=True, help="folder of the datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/parity_sm"), help="folder of the runs")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # WIDTH FILE: how this script calls itself
    arguments: Any = parser.parse_args()
    if arguments.one:
        run_original(int(arguments.one[0]), Path(arguments.one[1]), arguments.data_root)
        return
    table = {
        str(width): {
            "ours": ours(width, arguments.data_root, arguments.out),
            "plain": plain(width, arguments.data_root),
            "original": original(width, arguments),
        }
        for width in WIDTHS
    }
    (HERE / "parity_sm.json").write_text(json.dumps(table, indent=1) + "\n")
    (HERE / "parity_sm.md").write_text(report(table))
    print(report(table))


if __name__ == "__main__":
    main()

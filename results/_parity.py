"""Compare this software with the original code (facebookresearch/alma), stage by stage, on equal partitions.

    git clone https://github.com/facebookresearch/alma /elsewhere/alma
    pip install --target /elsewhere/extra fvcore      # and kornia, for cifar10
    python results/mnist/parity.py --original /elsewhere/alma --extra /elsewhere/extra --data-root DATA

Only the first stages are run, because a stage does not depend on later stages. The original is imported from its
checkout, in separate processes. The comparison is written to parity.json and parity.md beside the script. The errors
of the original are stored in a file, so a run of the original is not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Stage = dict[str, Any]
"""The comparison of this software with the original after one stage: means and standard errors of the test errors, and
z, the difference of the means divided by the combined standard error."""


@dataclass(frozen=True)
class Case:
    """One setting that is compared: a learner with a width and a wait."""

    learner: str
    width: int
    wait: int
    """w, in mega-batches."""
    num_stages: int
    """Number of stages that are run."""
    epochs: int
    """Number of epochs per stage."""

    @property
    def key(self) -> str:
        """The name of the case in parity.json."""
        return f"{self.learner} {self.width} {self.wait}"


@dataclass(frozen=True)
class Parity:
    """A comparison of this software with the original on one dataset."""

    script: Path
    """The script of the comparison, parity.py. It starts itself as a separate process for each run of the original."""
    title: str
    """Title of the report."""
    settings: str
    """A sentence for the report about the settings of this software and of the original."""
    cases: Sequence[Case]
    """The settings that are compared. The table of the report has a row for each stage of each of them."""
    ours: Callable[[Case, range, str, Path], list[list[float]]]
    """A function of (case, seeds, data_root, folder) that returns the test errors [seed][stage] of this software."""
    original: Callable[[Case, int, str], list[float]]
    """A function of (case, seed, data_root) that returns the test errors [stage] of the original."""
    data_links: dict[str, str]
    """Folder names under which the original looks for its data -> names of the folders in data_root."""

    def main(self) -> None:
        """Read the command line, run this software and the original, and write the comparison."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--original", type=Path, required=True, help="a checkout of facebookresearch/alma")
        parser.add_argument("--extra", type=Path, help="a folder with the packages that the original imports")
        parser.add_argument("--data-root", required=True, help="folder of the datasets")
        parser.add_argument("--out", type=Path, default=Path("runs/parity") / self.script.parent.name,
                            help="folder of the runs (default: %(default)s)")  # fmt: skip
        parser.add_argument("--seeds", default="3", help="number of seeds: one number for all learners, or 10,umix=20")
        parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default: 0)")
        parser.add_argument("--only", help="one case, for example 'sm 32 2'; written to parity_again.md")
        parser.add_argument(
            "--spread", action="store_true",
            help="compute standard errors from parity.json, which has more seeds; written to parity_spread.md",
        )  # fmt: skip
        parser.add_argument(
            "--itself", action="store_true",
            help="compare the original with itself, with the same number of other seeds; written to parity_itself.md",
        )  # fmt: skip
        parser.add_argument(
            "--one", nargs=2, help=argparse.SUPPRESS
        )  # CASE SEED: how this script calls itself for one run of the original
        arguments = parser.parse_args()
        if arguments.one:
            number, seed = (int(value) for value in arguments.one)
            with redirect_stdout(sys.stderr):  # the original prints, but stdout must contain only the result
                errors = self.original(self.cases[number], seed, arguments.data_root)
            print(json.dumps(errors))
            return
        seeds = self._seeds(arguments.seeds, arguments.first_seed)
        cases = [case for case in self.cases if arguments.only in (None, case.key)]
        further = {learner: range(which.stop, which.stop + len(which)) for learner, which in seeds.items()}
        original = self._run_original(arguments, cases, seeds)
        if arguments.itself:
            original = self._run_original(arguments, cases, further)
        table = {}
        more_seeds = json.loads(self.script.with_suffix(".json").read_text()) if arguments.spread else {}
        for case in cases:
            case_seeds = seeds[case.learner]
            name = str(len(case_seeds)) if not case_seeds.start else f"{case_seeds.start}_{case_seeds.stop}"
            out = arguments.out / f"ours_{name}" / case.key.replace(" ", "_")
            if arguments.itself:
                our_errors = [original[f"{case.key} {seed}"] for seed in further[case.learner]]
            else:
                our_errors = self.ours(case, case_seeds, arguments.data_root, out)
            table[case.key] = compare(our_errors, [original[f"{case.key} {seed}"] for seed in case_seeds])
            if arguments.spread:
                table[case.key] = [
                    with_spread_of(*stages) for stages in zip(table[case.key], more_seeds[case.key], strict=True)
                ]
        suffixes = {"again": arguments.only, "itself": arguments.itself, "spread": arguments.spread}
        path = self.script.parent / "_".join(["parity", *(suffix for suffix, given in suffixes.items() if given)])
        path.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
        text = self._report(cases, table, seeds)
        if arguments.itself:
            text = text.replace("| ours | original |", "| original, further seeds | original |").replace(
                "ours with `preset=original_code` against it", "the original code with as many further seeds against it"
            )
        path.with_suffix(".md").write_text(text)
        print(path.with_suffix(".md").read_text())

    def _run_original(
        self, arguments: argparse.Namespace, cases: Sequence[Case], seeds: dict[str, range]
    ) -> dict[str, list[float]]:
        """Return the test errors [stage] of the original by case and seed. Run it if they are not stored yet."""
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "original.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        paths = [str(path.absolute()) for path in (arguments.original, arguments.extra) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        data = arguments.out / "original_data"
        data.mkdir(exist_ok=True)
        for name, folder in self.data_links.items():
            if not (data / name).is_symlink():
                (data / name).symlink_to(Path(arguments.data_root).absolute() / folder)
        for case in cases:
            for seed in seeds[case.learner]:
                key = f"{case.key} {seed}"
                if key in known:
                    continue
                start = time.monotonic()
                command = [sys.executable, "-W", "ignore", str(self.script), "--original", str(arguments.original),
                           "--data-root", str(data), "--one", str(self.cases.index(case)), str(seed)]  # fmt: skip
                result = subprocess.run(command, env=environment, capture_output=True, text=True)
                if result.returncode:
                    sys.exit(f"the original failed on {key}:\n{result.stderr[-3000:]}")
                known[key] = json.loads(result.stdout)
                path.write_text(json.dumps(known, indent=1))
                print(f"original {key}: {known[key][-1]:.4f} at the end, {time.monotonic() - start:.0f} s", flush=True)
        return known

    def _seeds(self, counts_text: str, first: int) -> dict[str, range]:
        """Return the seeds of each learner.

        Args:
            counts_text: number of seeds. For example, 10,umix=20 means 20 seeds for umix and 10 for other learners.
            first: the first seed.
        """
        common, *others = counts_text.split(",")
        counts = {case.learner: int(common) for case in self.cases} | {
            name: int(count) for name, _, count in (other.partition("=") for other in others)
        }
        return {learner: range(first, first + count) for learner, count in counts.items()}

    def _report(self, cases: Sequence[Case], table: dict[str, list[Stage]], seeds: dict[str, range]) -> str:
        """Return the Markdown report: a table with one row for each case and stage, and a summary."""
        stages = [stage for row in table.values() for stage in row]
        above = [stage for stage in stages if abs(stage["z"]) >= 3]
        spread = "z_alone" in stages[0]
        lines = [
            f"# {self.title}",
            "",
            "Test error in % (mean +- standard error over seeds), ours with `preset=original_code` against it,",
            f"and their difference in combined standard errors (z). {self.settings} Command: `parity.py`.",
            "",
            *(SPREAD if spread else []),
            "| learner | width | wait | epochs | seeds | stage | ours | original | z |" + " z alone |" * spread,
            "|---|---|---|---|---|---|---|---|---|" + "---|" * spread,
        ]
        for case in cases:
            case_seeds = seeds[case.learner]
            for number, stage in enumerate(table[case.key], start=1):
                lines.append(
                    f"| {case.learner} | {case.width} | {case.wait} | {case.epochs} "
                    f"| {case_seeds.start} to {case_seeds.stop - 1} | {number} "
                    f"| {100 * stage['ours']:.2f} +- {100 * stage['ours_stderr']:.2f} "
                    f"| {100 * stage['original']:.2f} +- {100 * stage['original_stderr']:.2f} | {stage['z']:+.2f} |"
                    + (f" {stage['z_alone']:+.2f} |" if spread else "")
                )
        mean = sum(stage["z"] for stage in stages) / len(stages)
        summary = f"{len(stages)} comparisons, {len(above)} at 3 combined standard errors or more; mean z {mean:+.2f}."
        if spread:
            alone = sum(abs(stage["z_alone"]) >= 3 for stage in stages)
            summary += f" With the standard errors of the few seeds alone: {alone}."
        return "\n".join([*lines, "", summary, ""])


def our_errors(dataset: str, case: Case, seeds: range, data_root: str, out: Path, **more: Any) -> list[list[float]]:
    """Return the test errors [seed][stage] of this software after each of the first stages.

    Args:
        dataset: name of the dataset.
        case: the learner, its width and wait.
        seeds: the seeds, consecutive.
        data_root: folder of the datasets.
        out: the run folder.
        more: the values of `preset=original_code` for this dataset, without `select_by` and `combine`.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from vision.runs import run_learner
    from vision.settings import VisionSettings

    values = {
        "out": str(out), "dataset": dataset, "data_root": data_root, "learner": case.learner, "width": case.width,
        "wait": case.wait, "epochs": case.epochs, "seed": seeds.start, "seeds": len(seeds),
        "arrivals": case.num_stages * case.wait, "preset": "original_code", "select_by": "validation_accuracy",
        "combine": {"umix": "logit_sum", "gens": "logit"}.get(case.learner), **more,
    }  # fmt: skip
    # Treat all values as values of a preset (given=()), so that values for other learners are ignored and not refused.
    settings = VisionSettings.from_mapping(values, given=())
    ledgers = run_learner(settings)
    # A vision ledger has an error rate in every row.
    last_arrivals = [k * case.wait for k in range(1, case.num_stages + 1)]  # the last arrival of each stage
    return [[rows[t].scores.error_rate for t in last_arrivals] for rows in ledgers]  # type: ignore[misc]  # never None


class Silent:
    """A logger that is given to the original code and discards all messages."""

    def message(self, *_: Any) -> None:
        """Discard the message."""

    debug = add_scalar = message


def compare(ours_errors: list[list[float]], original_errors: list[list[float]]) -> list[Stage]:
    """Return the comparison of two sets of runs after each stage, see `Stage`.

    Args:
        ours_errors: test errors [seed][stage] of this software.
        original_errors: test errors [seed][stage] of the original.
    """

    def mean_and_stderr(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5

    stages = []
    for a, b in zip(zip(*ours_errors, strict=True), zip(*original_errors, strict=True), strict=True):
        (mean_a, stderr_a), (mean_b, stderr_b) = mean_and_stderr(list(a)), mean_and_stderr(list(b))
        combined = (stderr_a**2 + stderr_b**2) ** 0.5
        stages.append(
            {
                "ours": mean_a, "ours_stderr": stderr_a, "original": mean_b, "original_stderr": stderr_b,
                "combined": combined, "z": (mean_a - mean_b) / combined, "num_seeds": len(a),
                "ours_by_seed": list(a), "original_by_seed": list(b),
            }
        )  # fmt: skip
    return stages


SPREAD = [
    "The standard errors here are those of a mean of this many seeds, sigma / sqrt(n), with sigma from the more seeds",
    'of parity.json: from three numbers sigma itself is known within a factor of two only. "z alone" takes it from',
    "the few seeds themselves (Student's t with 4 degrees of freedom, beyond 3 by chance in 4% of comparisons).",
    "",
]


def with_spread_of(few: Stage, many: Stage) -> Stage:
    """Return the comparison `few` with other standard errors, estimated from the spread between the seeds of `many`.

    Args:
        few: a comparison with few seeds.
        many: the comparison after the same stage with more seeds.
    """
    ratio = (many["num_seeds"] / few["num_seeds"]) ** 0.5
    ours, original = many["ours_stderr"] * ratio, many["original_stderr"] * ratio
    combined = (ours**2 + original**2) ** 0.5
    return few | {
        "ours_stderr": ours, "original_stderr": original, "combined": combined,
        "z": (few["ours"] - few["original"]) / combined, "z_alone": few["z"],
    }  # fmt: skip

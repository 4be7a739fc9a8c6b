"""Ours beside the original code (facebookresearch/alma): the same partitions and settings, stage by stage.

    git clone https://github.com/facebookresearch/alma /elsewhere/alma
    pip install --target /elsewhere/extra fvcore      # and kornia, for cifar10
    python results/mnist/parity.py --original /elsewhere/alma --extra /elsewhere/extra --data-root DATA

Of the original's stages the first few are run; a stage depends on those before it alone. It is imported from where it
lies, in processes of its own. Writes parity.json and parity.md beside the script; runs that are known are kept.
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
"""A comparison after one stage: means, standard errors, z."""


@dataclass(frozen=True)
class Case:
    """One row of settings."""

    learner: str
    width: int
    wait: int
    num_stages: int
    """How many of them are run."""
    epochs: int
    """Of each stage."""

    @property
    def key(self) -> str:
        return f"{self.learner} {self.width} {self.wait}"


@dataclass(frozen=True)
class Parity:
    """A comparison on one dataset."""

    script: Path
    """The script, which is run again for each run of the original."""
    title: str
    settings: str
    """What both run, a sentence."""
    cases: Sequence[Case]
    ours: Callable[[Case, range, str, Path], list[list[float]]]
    """(case, seeds, data_root, folder) to the test error after each stage, seed after seed."""
    original: Callable[[Case, int, str], list[float]]
    """(case, seed, data_root) to the test error after each stage."""
    data_links: dict[str, str]
    """Where the original looks for data: names of links, to names of folders of data_root."""

    def main(self) -> None:
        """The command line."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--original", type=Path, required=True, help="a checkout of facebookresearch/alma")
        parser.add_argument("--extra", type=Path, help="a folder with what the original imports")
        parser.add_argument("--data-root", required=True)
        parser.add_argument("--out", type=Path, default=Path("runs/parity") / self.script.parent.name)
        parser.add_argument("--seeds", default="3", help="for all learners, or 10,umix=20")
        parser.add_argument("--first-seed", type=int, default=0)
        parser.add_argument("--only", help="a case, as 'sm 32 2': into parity_again.md")
        parser.add_argument(
            "--spread", action="store_true",
            help="standard errors from the spread between the more seeds of parity.json: into parity_spread.md",
        )  # fmt: skip
        parser.add_argument(
            "--itself", action="store_true",
            help="in place of ours: the original again, with as many further seeds; into parity_itself.md",
        )  # fmt: skip
        parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # case seed: one run of the original
        arguments = parser.parse_args()
        if arguments.one:
            case, seed = (int(value) for value in arguments.one)
            with redirect_stdout(sys.stderr):  # the original prints a lot
                errors = self.original(self.cases[case], seed, arguments.data_root)
            print(json.dumps(errors))
            return
        seeds = self._seeds(arguments.seeds, arguments.first_seed)
        cases = [case for case in self.cases if arguments.only in (None, case.key)]
        further = {learner: range(which.stop, which.stop + len(which)) for learner, which in seeds.items()}
        known = self._run_original(arguments, cases, seeds)
        if arguments.itself:
            known = self._run_original(arguments, cases, further)
        table = {}
        many = json.loads(self.script.with_suffix(".json").read_text()) if arguments.spread else {}
        for case in cases:
            which = seeds[case.learner]
            named = str(len(which)) if not which.start else f"{which.start}_{which.stop}"
            out = arguments.out / f"ours_{named}" / case.key.replace(" ", "_")
            if arguments.itself:
                our_errors = [known[f"{case.key} {seed}"] for seed in further[case.learner]]
            else:
                our_errors = self.ours(case, which, arguments.data_root, out)
            table[case.key] = compare(our_errors, [known[f"{case.key} {seed}"] for seed in which])
            if arguments.spread:
                table[case.key] = [by_spread(*stages) for stages in zip(table[case.key], many[case.key], strict=True)]
        looks = {"again": arguments.only, "itself": arguments.itself, "spread": arguments.spread}
        path = self.script.parent / "_".join(["parity", *(look for look, taken in looks.items() if taken)])
        path.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
        text = self._written_up(cases, table, seeds)
        if arguments.itself:
            text = text.replace("| ours | original |", "| original, further seeds | original |").replace(
                "ours with `preset=original_code` against it", "the original code with as many further seeds against it"
            )
        path.with_suffix(".md").write_text(text)
        print(path.with_suffix(".md").read_text())

    def _run_original(
        self, arguments: argparse.Namespace, cases: Sequence[Case], seeds: dict[str, range]
    ) -> dict[str, list[float]]:
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
                began = time.monotonic()
                command = [sys.executable, "-W", "ignore", str(self.script), "--original", str(arguments.original),
                           "--data-root", str(data), "--one", str(self.cases.index(case)), str(seed)]  # fmt: skip
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"the original failed on {key}:\n{done.stderr[-3000:]}")
                known[key] = json.loads(done.stdout)
                path.write_text(json.dumps(known, indent=1))
                print(f"original {key}: {known[key][-1]:.4f} at the end, {time.monotonic() - began:.0f} s", flush=True)
        return known

    def _seeds(self, told: str, first: int) -> dict[str, range]:
        """Which for each learner: of 10,umix=20."""
        common, *others = told.split(",")
        counts = {case.learner: int(common) for case in self.cases} | {
            name: int(count) for name, _, count in (one.partition("=") for one in others)
        }
        return {learner: range(first, first + count) for learner, count in counts.items()}

    def _written_up(self, cases: Sequence[Case], table: dict[str, list[Stage]], seeds: dict[str, range]) -> str:
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
            which = seeds[case.learner]
            for number, stage in enumerate(table[case.key], start=1):
                lines.append(
                    f"| {case.learner} | {case.width} | {case.wait} | {case.epochs} "
                    f"| {which.start} to {which.stop - 1} | {number} "
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


def our_errors(
    dataset: str, case: Case, seeds: range, data_root: str, out: Path, **more: float | str
) -> list[list[float]]:
    """Test error of ours after each of the first stages, seed after seed.

    Args:
        dataset: its name.
        case: what is run.
        seeds: which.
        data_root: where the dataset lies.
        out: the run folder.
        more: what `preset=original_code` means for this dataset, but the choice of the epoch.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from vision.run import run
    from vision.settings import VisionSettings

    settings = VisionSettings(
        out=str(out), dataset=dataset, data_root=data_root, learner=case.learner, width=case.width, wait=case.wait,
        epochs=case.epochs, seed=seeds.start, seeds=len(seeds), arrivals=case.num_stages * case.wait,
        preset="original_code", select_by="validation_accuracy", **more,
    )  # fmt: skip
    ledgers = run(settings)
    return [[rows[k * case.wait].scores.error_rate for k in range(1, case.num_stages + 1)] for rows in ledgers]


class Silent:
    """In place of the original's logger."""

    def message(self, *_):
        pass

    debug = add_scalar = message


def compare(ours_errors: list[list[float]], original_errors: list[list[float]]) -> list[Stage]:
    """Per stage: means, standard errors, and the difference in combined standard errors."""

    def moments(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5

    stages = []
    for a, b in zip(zip(*ours_errors, strict=True), zip(*original_errors, strict=True), strict=True):
        (mean_a, stderr_a), (mean_b, stderr_b) = moments(list(a)), moments(list(b))
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


def by_spread(few: Stage, many: Stage) -> Stage:
    """A comparison of few seeds, with the spread between seeds (of ours, of the original) as many showed it."""
    ratio = (many["num_seeds"] / few["num_seeds"]) ** 0.5
    ours, original = many["ours_stderr"] * ratio, many["original_stderr"] * ratio
    combined = (ours**2 + original**2) ** 0.5
    return few | {
        "ours_stderr": ours, "original_stderr": original, "combined": combined,
        "z": (few["ours"] - few["original"]) / combined, "z_alone": few["z"],
    }  # fmt: skip

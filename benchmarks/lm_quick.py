"""Measure the time to start a stage, in a few minutes on two cores. The target is 10 seconds.

.venv/bin/python benchmarks/lm_quick.py              printed
.venv/bin/python benchmarks/lm_quick.py --write      also written to benchmarks/lm_quick.md

The exit status is 0 whether the target is met or not.
"""

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from _common import provenance, table, tree_cpu_seconds, verdict
from _lm_stream import write_stream

TARGET_SECONDS = 10.0
"""Largest median wall time with which the verdict is PASS."""


class FirstUpdateSeen(BaseException):
    """Raised at the first update of a stage, to end the stage."""


def measure_start(repeats: int, scratch: Path) -> list[str]:
    """Measure the start of a stage, and return the lines of the report.

    Args:
        repeats: number of measurements.
        scratch: folder for temporary files.
    """
    from fairseq_alma.core.protocol import Stage
    from fairseq_alma.core.stream_folder import StreamFolder
    from fairseq_alma.lm.learners import make_learner
    from fairseq_alma.lm.settings import LanguageModelSettings
    from fairseq_alma.lm.stage_processes import IMPORTED, LocalProcesses
    from launch.local import Job, Start, run_processes, start_process
    from launch.warm import warm_start

    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    folder = StreamFolder.open(write_stream(scratch / "start_stream", 8_000, tokens=200_000))
    (mega_batch,) = folder.stream(1)
    starts: dict[str, Start] = {
        "a process of its own": start_process,
        "a fork, as alma-lm starts it": warm_start(IMPORTED),
    }
    walls: dict[str, list[float]] = {name: [] for name in starts}
    cpus: dict[str, list[float]] = {name: [] for name in starts}

    def start(command: list[str], log: Path) -> int | None:
        wall, cpu = time.perf_counter(), tree_cpu_seconds(os.getpid()) - own_cpu_seconds()

        def on_line(line: str) -> None:
            if "| train_inner |" in line:
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(tree_cpu_seconds(os.getpid()) - own_cpu_seconds() - cpu)
                raise FirstUpdateSeen

        return run_processes([Job(command, log, on_line, start=starts[name])])[0]

    class OneProcess(LocalProcesses):
        def __init__(self) -> None:
            self.kind, self.memory = "cpu", None

        def num_devices(self, num_jobs: int) -> int:
            return 1

        def run(
            self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int, updates: int
        ) -> dict[int, int | None]:
            return {number: start(command, log) for number, (command, log) in jobs.items()}

    # The first start of each kind is a warm-up, which fills the file cache and waits for the imports of the forks.
    for repeat, name in itertools.product(range(-1, repeats), starts):
        out = scratch / f"start_run_{repeat}_{list(starts).index(name)}"
        settings = LanguageModelSettings(
            stream=str(folder.path), out=str(out), arch="switch_lm_tiny", updates=20, tokens_per_sample=128,
            sequences_per_update=16, batch_size=16, precision="float32",
        )  # fmt: skip
        learner = make_learner(settings, folder.without_test(), OneProcess())
        stage = Stage(1, (mega_batch,), (), False, Path(settings.out) / "stages" / "stage_001")
        try:
            learner.train(stage)
        except FirstUpdateSeen:
            continue
        raise RuntimeError(f"the stage ended before an update was logged: see the logs in {stage.folder}")
    return _section({name: (walls[name][1:], cpus[name][1:]) for name in starts}, repeats)


def _section(seconds: Mapping[str, tuple[list[float], list[float]]], repeats: int) -> list[str]:
    """Return the lines of the report, from the wall seconds and the CPU seconds of each start, by the kind of start."""
    rows = []
    for name, (walls, cpus) in seconds.items():
        row = [f"{min(walls):.1f}", f"{statistics.median(walls):.1f}", f"{max(walls):.1f}"]
        row += [f"{min(cpus):.1f}", f"{statistics.median(cpus):.1f}"]
        rows.append([name, *row, verdict(statistics.median(walls), TARGET_SECONDS, at_most=True)])
    header = ("", "wall s, smallest", "median", "largest", "CPU s, smallest", "median")
    return [
        "From the launch of the training process (`switch_lm_tiny`, 8,000 words, E = "
        f"4, from the untrained checkpoint, torch's default number of threads), to the log line of its first update; "
        f"{repeats} times after one warm-up. The wall time is meaningful only on an idle machine.",
        "",
        *table([*header, f"wall, under {TARGET_SECONDS:g} s"], rows),
    ]


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements (default: 5)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_quick.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="lm_quick_") as scratch:
        section = "\n".join(measure_start(options.repeats, Path(scratch)))
    machine = "\n".join(provenance(load_at_start))
    print("\n".join([section, "", machine]))
    if options.write:
        title = "# Start of a stage\n\nWritten by `benchmarks/lm_quick.py --write`."
        Path(__file__).with_suffix(".md").write_text("\n\n".join([title, machine, section]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Part (d) of lm_quick.py: measure the time from the launch of a stage to its first update."""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from _common import table, tree_cpu_seconds, verdict
from _lm_stream import write_stream

TARGET_SECONDS = 10.0
"""Largest median wall time with which the verdict is PASS."""


class FirstUpdateSeen(BaseException):
    """Raised at the first update of a stage, to end the stage."""


def measure_start(repeats: int, scratch: Path) -> list[str]:
    """Measure the start of a stage, and return the lines of part (d) of the report.

    Args:
        repeats: number of measurements.
        scratch: folder for temporary files.
    """
    from fairseq_alma.core.protocol import Stage
    from fairseq_alma.core.stream_folder import StreamFolder
    from fairseq_alma.lm.learners import make_learner
    from fairseq_alma.lm.settings import LanguageModelSettings
    from launch.local import run_process

    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    folder = StreamFolder.open(write_stream(scratch / "start_stream", 8_000, tokens=200_000))
    (mega_batch,) = folder.stream(1)
    walls: list[float] = []
    cpus: list[float] = []

    def start(command: list[str], log: Path) -> int:
        wall, cpu = time.perf_counter(), tree_cpu_seconds(os.getpid()) - own_cpu_seconds()

        def on_line(line: str) -> None:
            if "| train_inner |" in line:
                walls.append(time.perf_counter() - wall)
                cpus.append(tree_cpu_seconds(os.getpid()) - own_cpu_seconds() - cpu)
                raise FirstUpdateSeen

        return run_process(command, log, on_line)

    class OneProcess:
        kind = "cpu"

        def num_devices(self, num_jobs: int) -> int:
            return 1

        def run(self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int) -> dict[int, int | None]:
            return {number: start(command, log) for number, (command, log) in jobs.items()}

    for repeat in range(-1, repeats):  # number -1 is a warm-up that fills the file cache
        settings = LanguageModelSettings(
            stream=str(folder.path), out=str(scratch / f"start_run_{repeat}"), arch="switch_lm_tiny", updates=20,
            tokens_per_sample=128, sequences_per_update=16, batch_size=16,
        )  # fmt: skip
        learner = make_learner(settings, folder, OneProcess())
        stage = Stage(1, (mega_batch,), (), False, Path(settings.out) / "stages" / "stage_001")
        try:
            learner.train(stage)
        except FirstUpdateSeen:
            continue
        raise RuntimeError(f"the stage ended before fairseq-train logged an update: see the logs in {stage.folder}")
    return _section(walls[1:], cpus[1:])


def _section(walls: list[float], cpus: list[float]) -> list[str]:
    """Return the lines of the report, from the wall seconds and the CPU seconds of each start."""
    row = [f"{min(walls):.1f}", f"{statistics.median(walls):.1f}", f"{max(walls):.1f}"]
    row += [f"{min(cpus):.1f}", f"{statistics.median(cpus):.1f}"]
    row += [verdict(statistics.median(walls), TARGET_SECONDS, at_most=True)]
    header = ("", "wall s, smallest", "median", "largest", "CPU s, smallest", "median")
    return [
        "## (d) Start of a stage",
        "",
        "From the launch of the `fairseq-train` process, as the driver launches it (`switch_lm_tiny`, 8,000 words, E = "
        f"4, from the untrained checkpoint, torch's default number of threads), to the log line of its first update; "
        f"{len(walls)} times after one warm-up. The wall time is meaningful only on an idle machine.",
        "",
        *table([*header, f"wall, under {TARGET_SECONDS:g} s"], [["launch to first update", *row]]),
    ]


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])

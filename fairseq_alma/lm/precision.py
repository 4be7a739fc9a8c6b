"""The setting `precision`: what `auto` means on this machine and for this run."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.lm.settings import LanguageModelSettings, Precision

SPEEDUP = 1.2
"""On a CPU, `auto` means bfloat16 if float32 takes more than SPEEDUP times as long as bfloat16."""


def with_known_precision(settings: LanguageModelSettings) -> LanguageModelSettings:
    """Return the settings with `precision=auto` replaced by float32 or bfloat16.

    A new run gets the precision that `fastest_precision` returns. If it is one of several seeds (seeds=3), and another
    seed was started before, perhaps on another machine, it gets the precision of that seed. If the run was started
    before, it keeps its precision and, if `batch_size` is not given, its `batch_size`, which settings.json contains.
    """
    out = Path(settings.out)
    recorded = read_settings(out, ("precision", "batch_size")) if (out / "settings.json").exists() else None
    precision, batch_size = settings.precision, settings.batch_size
    if precision == "auto":
        precision = recorded["precision"] if recorded else _of_other_seed(out) or fastest_precision()
    if batch_size is None and recorded:
        batch_size = recorded["batch_size"]
    return replace(settings, precision=precision, batch_size=batch_size)


def _of_other_seed(out: Path) -> Precision | None:
    """Return the recorded precision of another seed of a run with several seeds; None if there is none."""
    others = RunFolder(out.parent).of_seeds() if RunFolder(out).is_of_one_of_several_seeds else []
    return read_settings(others[0].path, ("precision",))["precision"] if others else None


def fastest_precision() -> Precision:
    """Return the precision that `auto` means on this machine, "bfloat16" or "float32".

    On a GPU, it is bfloat16 if the GPU supports it. On a CPU, the time of a small network is measured in both, because
    many CPUs have no hardware for bfloat16 and are much slower with it. This takes less than a second.
    """
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    inputs = torch.randn(512, 256)
    seconds = {False: float("inf"), True: float("inf")}
    # Two runs with the same settings must train in the same precision, whatever else the machine is doing. So measure
    # the computing time of one thread, and not the elapsed time. With other processes on the machine, the ratio of the
    # elapsed times varied between 0.6 and 3.1, and the ratio of the computing times between 1.9 and 2.3.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            for autocast in seconds:
                start = time.thread_time()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    network(inputs).float().sum().backward()
                seconds[autocast] = min(seconds[autocast], time.thread_time() - start)
    finally:
        torch.set_num_threads(num_threads)
    return "bfloat16" if seconds[False] > SPEEDUP * seconds[True] else "float32"

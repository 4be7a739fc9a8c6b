"""The setting `precision`: what `auto` means on this machine and for this run."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fairseq_alma.core.files import read_json
from fairseq_alma.lm.settings import LanguageModelSettings, Precision

SPEEDUP = 1.2
"""On a CPU, `auto` means bfloat16 if it is at least this much faster than float32."""


def as_recorded(settings: LanguageModelSettings) -> LanguageModelSettings:
    """Return the settings with `precision=auto` replaced by float32 or bfloat16.

    A run that was started before keeps the values that settings.json in its folder records. Runs of earlier versions
    had no setting `precision`, and used float32. They chose `batch_size` from `arch`, so it is taken from there, too,
    if it is not given.
    """
    path = Path(settings.out) / "settings.json"
    recorded = read_json(path) if path.exists() else None
    precision, batch_size = settings.precision, settings.batch_size
    if precision == "auto":
        precision = recorded.get("precision", "float32") if recorded else fastest_precision()
    if batch_size is None and recorded:
        batch_size = recorded.get("batch_size")
    return replace(settings, precision=precision, batch_size=batch_size)


def fastest_precision() -> Precision:
    """Return the precision that `auto` means on this machine, "bfloat16" or "float32".

    On a GPU, it is bfloat16 if the GPU supports it. On a CPU, a feed-forward network is timed in both, because a CPU
    without units for bfloat16 computes with it much more slowly. This takes less than a second.
    """
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    inputs = torch.randn(512, 256)
    seconds = {False: float("inf"), True: float("inf")}
    for _ in range(5):  # in turns, so that another process on the machine slows down both
        for autocast in seconds:
            start = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                network(inputs).float().sum().backward()
            seconds[autocast] = min(seconds[autocast], time.perf_counter() - start)
    return "bfloat16" if seconds[False] > SPEEDUP * seconds[True] else "float32"

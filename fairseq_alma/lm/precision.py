"""The setting `precision`: what `auto` means on this machine and for this run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.lm.settings import LanguageModelSettings, Precision


def with_known_precision(settings: LanguageModelSettings) -> LanguageModelSettings:
    """Return the settings with `precision=auto` replaced by float32 or bfloat16.

    A new run gets the precision of `precision_of_machine`. If it is one of several seeds (seeds=3), and another seed
    was started before, perhaps on another machine, it gets the precision of that seed. If the run was started before,
    it keeps its precision and, if `batch_size` is not given, its `batch_size`, which settings.json contains. Models
    other than switch_lm are computed in float32.
    """
    from fairseq_alma.lm.fairseq_config import is_switch_lm  # imports fairseq, which takes seconds

    out = Path(settings.out)
    recorded = read_settings(out, ("precision", "batch_size")) if (out / "settings.json").exists() else None
    precision: Precision | None = settings.precision
    batch_size = settings.batch_size
    if precision == "auto":
        precision = recorded["precision"] if recorded else _of_other_seed(out)
    precision = precision or (precision_of_machine() if is_switch_lm(settings.arch) else "float32")
    if batch_size is None and recorded:
        batch_size = recorded["batch_size"]
    return replace(settings, precision=precision, batch_size=batch_size)


def _of_other_seed(out: Path) -> Precision | None:
    """Return the recorded precision of another seed of a run with several seeds; None if there is none."""
    others = RunFolder(out.parent).of_seeds() if RunFolder(out).is_of_one_of_several_seeds else []
    return read_settings(others[0].path, ("precision",))["precision"] if others else None


def precision_of_machine() -> Precision:
    """Return the precision that `auto` means on this machine: "bfloat16" if its processors compute in it.

    This is known of the hardware, and not measured, so that equal machines always choose the same. A GPU has bfloat16
    from compute capability 8.0 on, and a CPU with the instructions AMX or AVX512-BF16. Other CPUs convert each number,
    which is slower than float32.
    """
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float32"
    cpu: Any = torch.cpu  # torch has no public name for these
    has_bfloat16 = cpu._is_amx_tile_supported() or cpu._is_avx512_bf16_supported()
    return "bfloat16" if has_bfloat16 else "float32"

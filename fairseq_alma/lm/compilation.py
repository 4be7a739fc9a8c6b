"""The setting `compile`: when the layers are compiled, where the compiled code is kept, and what compiling has cost."""

import os
from pathlib import Path
from typing import Any

MIN_FLOPS = 3e16
"""With compile=auto, a stage is compiled on a GPU if each device makes at least this many floating-point operations.

The first compilation takes about a minute, a later one some seconds, because the code is kept. On an H200, compiled
layers of switch_lm_base save about 0.06 s of an update of 3e13 operations. So they pay from about 1,000 updates on."""


def pays(model: Any, vocabulary: int, num_tokens: int, num_devices: int, is_gpu: bool) -> bool:
    """Return whether compiling pays in a stage (compile=auto). The same settings always give the same answer.

    On a CPU, compiled layers were not faster.

    Args:
        model: fairseq's configuration of the model. It contains the sizes of the layers.
        vocabulary: number of entries in the dictionary.
        num_tokens: number of tokens on which the stage trains.
        num_devices: number of devices that train the member.
        is_gpu: whether the devices are GPUs.
    """
    dim, ffn_dim = model.decoder_embed_dim, model.decoder_ffn_embed_dim
    # A token needs 6 operations for each weight that it uses: 2 in the forward and 4 in the backward pass.
    weights = model.decoder_layers * (4 * dim * dim + 2 * dim * ffn_dim) + vocabulary * dim
    return is_gpu and 6 * weights * num_tokens / num_devices >= MIN_FLOPS


def keep_compiled_code() -> None:
    """Let torch keep compiled code in a folder that all members, stages, seeds and runs of this user share.

    Call this before torch compiles. The folder is $XDG_CACHE_HOME/alma/compiled, by default in ~/.cache. torch's own
    variable TORCHINDUCTOR_CACHE_DIR has priority.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alma" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def cost_so_far() -> tuple[int, float]:
    """Return how many pieces of code were compiled in this process, and how many seconds that took."""
    import torch._dynamo.utils as dynamo  # takes a second, and most trainings do not compile

    times = dynamo.calculate_time_spent()
    return dynamo.counters["stats"]["unique_graphs"], round(float(times.get("total_wall_time", 0.0)), 1)

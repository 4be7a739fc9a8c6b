"""The type in which matrix products compute."""

import torch
from torch import Tensor


def compute_type(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product of `x` computes: that of autocast if it is on, otherwise that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

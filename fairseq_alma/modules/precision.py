"""The data type in which matrix products are computed."""

import torch
from torch import Tensor


def compute_type(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of `x` is computed: autocast's if autocast is on, otherwise x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

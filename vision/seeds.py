"""Random numbers: a generator of its own for everything that has a name, so that nothing shifts anything else."""

from hashlib import sha256

import torch


def generator(*name: int | str) -> torch.Generator:
    """On the CPU, wherever the networks are: (seed, "order", member, stage) draws the same on every machine."""
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

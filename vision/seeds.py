"""Random numbers: every purpose has a generator of its own, so that no draw shifts the numbers of another."""

from hashlib import sha256

import torch


def generator(*name: int | str) -> torch.Generator:
    """Return a CPU generator that is seeded by a name, for example (seed, "order", member, stage).

    The same name gives the same numbers on every machine, wherever the networks are computed.

    Args:
        name: what the numbers are for.
    """
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

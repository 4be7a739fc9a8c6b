"""Random generators.

Each purpose, for example the initial parameters of a network, has a separate generator. So the random numbers for one
purpose do not depend on how many were drawn for other purposes.
"""

from hashlib import sha256

import torch


def generator(*name: int | str) -> torch.Generator:
    """Return a CPU random generator whose seed is computed from a name, for example (seed, "order", network, stage).

    The same name gives the same numbers on every machine, also if the networks are on a GPU.

    Args:
        name: the parts of the name, which say what the numbers are used for.
    """
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

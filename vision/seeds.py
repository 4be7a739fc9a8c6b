"""Create random generators.

There is a separate generator for each purpose, for example for the initial parameters of a network. So the random
numbers for one purpose do not depend on how many numbers were drawn for other purposes.
"""

from hashlib import sha256

import torch


def generator(*name: int | str) -> torch.Generator:
    """Return a random generator on the CPU. Its seed is computed from a name that says what the numbers are used for.

    Generators with the same name return the same numbers on every machine, even if the networks are on a GPU.

    Args:
        name: the parts of the name, for example (seed, "order", network, stage).
    """
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

"""Create random generators.

There is a separate generator for each purpose, for example for the initial parameters of a network. So the random
numbers for one purpose do not depend on how many numbers were drawn for other purposes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch


def generator(*name: int | str) -> torch.Generator:
    """Return a random generator on the CPU. Its seed is computed from a name that says what the numbers are used for.

    The parts of the name are, for example, (seed, "order", network, stage). Generators with the same name return the
    same numbers on every machine.
    """
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own random state, and restore it at the end of the `with` block.

    Only the modules of users use this state, for example for dropout, on the given device.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_torch(seed, device)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's own random state, on the CPU and on the device."""
    # torch.manual_seed would also change the random numbers of GPUs that the run does not use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.empty(0, device=device).get_device()].manual_seed(seed)

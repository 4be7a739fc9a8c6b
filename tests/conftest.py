"""One thread a test process: the suite runs two of them side by side."""

import os
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(scope="session")
def alma_data() -> Path:
    """The folder of real data, where there is one."""
    if not os.environ.get("ALMA_DATA"):
        pytest.skip("ALMA_DATA is not set: the folder of real data (MNIST, CIFAR-10, books ...)")
    return Path(os.environ["ALMA_DATA"])

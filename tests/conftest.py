"""Set-up of every test process: one thread each, because two run side by side, and a working Ctrl-C."""

import os
import signal
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# A shell starts background jobs with SIGINT ignored. The commands that the tests start would inherit that, and tests
# that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def alma_data() -> Path:
    """Return the folder of real data; skip the test if there is none."""
    if not os.environ.get("ALMA_DATA"):
        pytest.skip("ALMA_DATA is not set: the folder of real data (MNIST, CIFAR-10, books ...)")
    return Path(os.environ["ALMA_DATA"])

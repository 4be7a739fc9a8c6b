"""Setup of every test process: use only one thread, because several test processes run in parallel; enable Ctrl-C."""

import os
import signal
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# A shell starts background jobs with SIGINT ignored. The commands that the tests start would inherit this setting, and
# the tests that send Ctrl-C to a command would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def alma_data() -> Path:
    """Return the folder with real data sets. Skip the test if the variable ALMA_DATA is not set."""
    if not os.environ.get("ALMA_DATA"):
        pytest.skip("ALMA_DATA is not set: set it to the folder with real data (MNIST, CIFAR-10, books ...)")
    return Path(os.environ["ALMA_DATA"])

"""Setup of every test process: use only one thread, because several test processes run in parallel; store compiled
modules; enable Ctrl-C."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.slurm import LocalSlurm

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Compiled modules are stored, also if the environment forbids it. Otherwise each of the hundreds of commands that the
# tests start, and each process of a command, would compile the whole project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Each test file imports its modules before the first test runs. Garbage collections would take a fifth of this time.
gc.disable()

# A shell starts background jobs with SIGINT ignored. The commands that the tests start would inherit this setting, and
# the tests that send Ctrl-C to a command would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from all tests but those of `make test-gpu`.

    The tests compare results exactly, and fork processes, which a process that has used a GPU cannot do.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


LONGEST = (
    "lm/test_run.py", "data_prep/test_corpora.py", "dividing/test_causal.py", "fairseq_alma/test_api.py",
    "report/test_browser.py", "lm/test_learners.py", "evaluation/test_harness.py", "data_prep/test_prepare_killed.py",
    "fairseq_alma/test_deploy.py", "forget/test_runs.py", "test_distributed.py", "lm/test_gate.py",
    "tasks/test_alma_lm.py",
)  # fmt: skip
"""The files of tests that take longest, about 45 seconds each. They run first, so that no worker ends much later than
the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the files in LONGEST run first."""
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def pytest_collection_finish() -> None:
    """Let garbage collections begin, which ignore all that was imported. With torch and fairseq, one takes 0.1 s."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python destroy all objects at exit. Some libraries check that it does."""
    gc.unfreeze()


EXPECTED_SKIPS = (
    "needs a CUDA device",
    "root can read everything",
    "there is a GPU here",
    *(() if os.environ.get("ALMA_DATA") else ("ALMA_DATA",)),
    # These depend on the rights of the user and on the kernel, not on what is installed.
    "a full disk needs the right to mount",
    "this test needs the right to mount",
    "needs mount",
    "needs chattr",
    "cannot mount a file",
    "this user may not create PID namespaces",
    "no process namespaces here",
    "the C library of this machine keeps freed memory by default",
)
"""How the reasons of tests begin that continuous integration may skip."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In continuous integration, let a test fail that is skipped for a reason that is not expected there.

    Otherwise the tests would stay green on a machine without Slurm or without a browser.
    """
    report = yield
    if report.skipped and os.environ.get("ALMA_NO_SKIPS") == "1" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(EXPECTED_SKIPS):
            report.outcome, report.longrepr = "failed", f"{item.nodeid} must not be skipped here: {reason}"
    return report


@pytest.fixture(scope="session")
def alma_data() -> Path:
    """Return the folder with real data sets. Skip the test if the variable ALMA_DATA is not set."""
    if not os.environ.get("ALMA_DATA"):
        pytest.skip("ALMA_DATA is not set: set it to the folder with real data (MNIST, CIFAR-10, books ...)")
    return Path(os.environ["ALMA_DATA"])


@pytest.fixture(scope="session")
def _slurm_daemons() -> Iterator[LocalSlurm]:
    if reason := LocalSlurm.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder:
        slurm = LocalSlurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


@pytest.fixture
def slurm(_slurm_daemons: LocalSlurm, monkeypatch) -> LocalSlurm:
    """Return a real Slurm of two virtual nodes, to which commands submit their jobs. Skip the test without Slurm."""
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in _slurm_daemons.environment.items():
        monkeypatch.setenv(name, value)
    return _slurm_daemons

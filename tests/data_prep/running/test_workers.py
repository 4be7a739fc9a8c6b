"""Worker processes on this machine: forks of one server, which get the environment of the process that needs them."""

import os
import sys
from pathlib import Path

import pytest

from data_prep.running.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, workers are new interpreters")


def states(*arguments, processes=1):
    """What `state` returns in a worker, for each of these arguments."""
    with Workers(processes) as workers:
        return list(workers.run_in_order(state, [(argument,) for argument in arguments]))


def state(name):
    """The parent of this worker, its current folder, the value of an environment variable, and known modules."""
    modules = ("data_prep.pipeline", "pyarrow", "tokenizers", "datatrove", "tqdm")
    return os.getppid(), Path.cwd(), os.environ.get(name), [name for name in modules if name in sys.modules]


def test_workers_of_all_calls_are_forks_of_one_server_with_the_environment_of_now(tmp_path, monkeypatch):
    [(server, _, value, modules)] = states("ALMA_TEST")
    assert server != os.getpid()
    assert value is None
    assert modules == ["data_prep.pipeline"]  # nothing that takes long and not every task needs
    monkeypatch.setenv("ALMA_TEST", "now")
    monkeypatch.chdir(tmp_path)
    assert states("ALMA_TEST") == [(server, tmp_path, "now", modules)]
    assert states("RAYON_NUM_THREADS", "PYTHONSAFEPATH")[0][2] == "1"
    assert states("PYTHONSAFEPATH")[0][2] == os.environ.get("PYTHONSAFEPATH")


def test_the_server_has_a_single_thread():
    [(server, *_)] = states("HOME")
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1

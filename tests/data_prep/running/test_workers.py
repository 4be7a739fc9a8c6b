"""Worker processes on this machine: forks of one server, which get the environment of the process that needs them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.running.workers import Workers
from tests.commands import ROOT

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
    assert {*modules} >= {"data_prep.pipeline", "pyarrow"}
    monkeypatch.setenv("ALMA_TEST", "now")
    monkeypatch.chdir(tmp_path)
    assert states("ALMA_TEST") == [(server, tmp_path, "now", modules)]
    assert states("RAYON_NUM_THREADS", "PYTHONSAFEPATH")[0][2] == "1"
    assert states("PYTHONSAFEPATH")[0][2] == os.environ.get("PYTHONSAFEPATH")


def test_the_server_imports_nothing_that_takes_long_and_not_every_call_needs():
    """In a process of its own, because the server of these tests imports more (see tests/data_prep/conftest.py)."""
    code = "from tests.data_prep.running.test_workers import states; print(states('HOME')[0][3])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[-2] == "['data_prep.pipeline', 'pyarrow']"


def test_with_a_long_name_of_the_folder_of_temporary_files_workers_are_new_interpreters(tmp_path):
    """The name of a socket may have 107 characters."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = (
        "import os\nfrom tests.data_prep.running.test_workers import states\n"
        "if __name__ == '__main__':\n    print(states('HOME')[0][0] == os.getpid())"
    )
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert found.stdout.split("\n")[-2:-1] == ["True"], found.stderr


def test_the_server_has_a_single_thread():
    [(server, *_)] = states("HOME")
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1


def test_without_a_server_workers_are_new_interpreters(tmp_path):
    """Forking a process with several threads is not safe, so the server ends if a module starts one at import."""
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    code = (
        "import os\nfrom tests.data_prep.running.test_workers import states\n"
        "if __name__ == '__main__':\n"
        "    print({state[0] for state in states('HOME', 'HOME', processes=2)} == {os.getpid()})"
    )
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_script_without_a_main_guard_is_refused_with_the_line_that_it_lacks(tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom data_prep.prepare import prepare\nfrom data_prep.settings import PrepSettings\n"
        "from data_prep.sources import Source\n"
        "prepare(PrepSettings(Path('out'), (Source.parse('text:text.txt'),), num_mega_batches=2, workers=1))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert "under `if __name__ == '__main__':`, because each worker imports the script" in done.stderr
    assert "alma-prep: the script calls prepare() when a worker process imports it" in done.stderr
    assert "memory" not in done.stderr


def compute(seconds):
    """Use the CPU for some seconds. Return the process id of the server."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return os.getppid()


def test_the_server_ends_with_its_process_and_the_cpu_time_of_workers_counts():
    code = (
        "from tests.data_prep.running.test_workers import Workers, compute\n"
        "with Workers(1) as workers: print(*workers.run_in_order(compute, [(2,)]))"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    after = os.times()
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    assert after.children_user + after.children_system - before.children_user - before.children_system > 2

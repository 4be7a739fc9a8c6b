"""Forks of one process that has imported modules: they are like processes of `python -m`. All are real."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local, warm
from launch.local import Job, run_processes, start_process
from launch.warm import Fork, warm_start
from tests.commands import ROOT
from tests.launch.test_local import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server needs Linux")

SLOW = """
import time
time.sleep(0.5)
number = 0
print("imported")
"""
"""A module that the server imports. It counts how often its process was used."""


class Server:
    """A server of this test process, which imports some modules."""

    def __init__(self, modules):
        # With a name of its own, so that no other test uses the same server.
        modules = (*modules, f"no_such_module_{next(NUMBERS)}")
        self.start = warm_start(modules)
        self._server = warm._server(modules)
        self.pid = self._server._forkserver_pid

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def close(self):
        warm.end_server(self._server, os.getpid())


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the modules that the processes import and run. It is in the module search path of all processes."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "slow_import.py").write_text(SLOW)
    (folder / "broken_import.py").write_text("raise ValueError('broken')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        yield folder


@pytest.fixture(scope="module")
def server(folder):
    """A server without torch, whose forks take milliseconds."""
    server = Server(["slow_import", "no_such_module", "broken_import"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def torch_server(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        server = Server(["slow_import", "torch", "numpy", "no_such_module", "broken_import"])
    yield server
    server.close()


@pytest.fixture
def run(folder, server, tmp_path):
    """Run code as a module, in a fork or by `subprocess`. Return its exit status and its output lines."""
    return runner(folder, server, tmp_path)


@pytest.fixture
def run_with_torch(folder, torch_server, tmp_path):
    """As `run`, in forks of the server that has imported torch."""
    return runner(folder, torch_server, tmp_path)


def runner(folder, server, tmp_path):
    """Return the function of the fixture `run`, for a server."""
    numbers = iter(range(1000))

    def run(code, *arguments, environment=None, start=server.start, on_line=None, name=None):
        name = name or f"module_{tmp_path.name}_{next(numbers)}"
        (folder / f"{name}.py").write_text(code)
        lines: list[str] = []
        command = [sys.executable, "-m", name, *arguments]
        job = Job(command, tmp_path / name, on_line or lines.append, environment or {}, start)
        (status,) = run_processes([job])
        return status, lines

    return run


def test_a_fork_has_the_imports_of_the_server_and_its_own_values(run, server):
    code = "import os, sys\nprint('slow_import' in sys.modules)\n"
    code += "import slow_import; slow_import.number += 1; print(slow_import.number, os.getppid())"
    for _ in range(2):
        assert run(code) == (0, ["True", f"1 {server.pid}"])


def test_a_fork_runs_a_module_as_python_m_does(run_with_torch, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = """
import atexit, logging, multiprocessing, os, sys
atexit.register(print, "exit")
print(__name__, __file__, __spec__.name, sys.modules["__main__"].__file__)
print(sys.argv, sys.path[0], os.getcwd(), sys.executable, sys.stdin.fileno(), sys.stdout.isatty())
print(multiprocessing.current_process().name, multiprocessing.parent_process())
print(sys.stdout.encoding, sys.stdout.line_buffering, logging.root.handlers)
for name, value in sorted(os.environ.items()):
    print(name, value)
"""
    environment = {"ALMA_GIVEN": "größe \udcff", "HOME": None, "OMP_NUM_THREADS": "2"}
    forked = run_with_torch(code, "a", "b c", environment=environment, name="same_module")
    started = run_with_torch(code, "a", "b c", environment=environment, name="same_module", start=start_process)
    assert forked == started
    assert forked[0] == 0
    assert str(["a", "b c"])[1:-1] in forked[1][1]
    assert forked[1][-1] == "exit"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('message')", 1),
        ("raise ValueError('message')", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("import no_such_module", 1),
        ("import broken_import", 1),
    ],
)
def test_a_fork_ends_with_the_status_of_python_m(run, code, status):
    forked, started = run(code), run(code, start=start_process)
    assert forked[0] == started[0] == status
    assert forked[1][-1:] == started[1][-1:]  # the line with the error


def test_a_module_that_does_not_exist_is_an_error_in_the_log(server, tmp_path):
    job = Job([sys.executable, "-m", "no_such_module"], tmp_path / "log", start=server.start)
    assert run_processes([job]) == [1]
    assert "no_such_module" in (tmp_path / "log").read_text().splitlines()[-1]


def test_all_output_is_in_the_log_also_that_of_c_code_and_of_grandchildren(run, tmp_path):
    code = """
import ctypes, os, subprocess, sys
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
os.write(1, b"gr\\xf6\\xdfe\\n")
libc = ctypes.CDLL(None)
libc.puts(b"from C")
libc.fflush(None)
subprocess.run(["echo", "grandchild"], check=True)
print("no line end", end="")
"""
    status, lines = run(code, name="output")
    assert (status, lines) == (0, ["out", "err", "gr\ufffd\ufffde", "from C", "grandchild", "no line end"])
    assert (tmp_path / "output").read_bytes() == b"out\nerr\ngr\xf6\xdfe\nfrom C\ngrandchild\nno line end"


def test_lines_come_while_the_fork_runs(run, tmp_path):
    answer = tmp_path / "answer"
    code = f"import pathlib, time\nprint('waiting', flush=True)\nanswer = pathlib.Path({str(answer)!r})\n"
    code += "while not answer.exists(): time.sleep(0.01)"
    assert run(code, on_line=lambda line: answer.touch()) == (0, [])


def test_the_number_of_threads_is_that_of_the_job(run_with_torch):
    code = """
import os, torch
torch.ones(1 << 20).exp().sum()  # starts the threads
print(os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), len(os.listdir("/proc/self/task")))
"""
    for number in (1, 3):
        _, lines = run_with_torch(code, environment={"OMP_NUM_THREADS": str(number)})
        assert lines[0].startswith(f"{number} {number} ")
    # Without the variable, torch chooses the number itself, although the server was started with OMP_NUM_THREADS=7.
    default = run_with_torch(code, environment={"OMP_NUM_THREADS": None}, start=start_process)
    assert run_with_torch(code, environment={"OMP_NUM_THREADS": None})[1][0].split()[:2] == default[1][0].split()[:2]


def test_the_server_has_one_thread_and_sees_no_gpu(run_with_torch, torch_server):
    assert run_with_torch("pass")[0] == 0  # the imports are done
    folder = Path(f"/proc/{torch_server.pid}")
    assert len(list((folder / "task").iterdir())) == 1
    assert b"CUDA_VISIBLE_DEVICES=\0" in (folder / "environ").read_bytes()
    code = "import os, torch; print(os.environ.get('CUDA_VISIBLE_DEVICES'), torch.cuda._is_in_bad_fork())"
    assert run_with_torch(code, environment={"CUDA_VISIBLE_DEVICES": "2,3"}) == (0, ["2,3 False"])
    assert run_with_torch(code, environment={"CUDA_VISIBLE_DEVICES": None}) == (0, ["None False"])


def test_a_server_whose_modules_start_threads_forks_nothing(folder, tmp_path):
    (folder / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    server = Server(["threads"])
    lines: list[str] = []
    (folder / "parent_of.py").write_text("import os; print(os.getppid())")
    command = [sys.executable, "-m", "parent_of"]
    assert run_processes([Job(command, tmp_path / "log", lines.append, start=server.start)]) == [0]
    assert lines == [str(os.getpid())]  # it was started by `subprocess`
    server.close()


def test_each_fork_has_its_own_random_state(run_with_torch):
    random.seed(0)
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    states = {value for _ in range(3) for value in run_with_torch(code)[1][0].split()}
    assert len(states) == 9


def test_a_fork_inherits_no_files(run, tmp_path):
    code = """
import os
names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
print([path for path in map(os.readlink, filter(os.path.exists, names)) if path.endswith("held")])
print(os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"))
"""
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        assert run(code) == (0, ["[]", "True"])


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


def test_a_fork_that_ends_while_another_runs_frees_its_slot(folder, server, tmp_path):
    # No fork keeps the output or the status of another one open. Otherwise, this test would wait for the sleeping one.
    (folder / "short.py").write_text("import sys; print('short', *sys.argv[1:])")
    (folder / "sleeping.py").write_text(SLEEP)
    pids: list[int] = []
    lines: list[str] = []

    def on_line(line):
        lines.append(line)
        if line == "short 2":
            raise ValueError

    jobs = [
        Job([sys.executable, "-m", "short", str(i)], tmp_path / "short", on_line, start=server.start) for i in range(3)
    ]
    sleeping = Job(
        [sys.executable, "-m", "sleeping"], tmp_path / "long", lambda line: pids.append(int(line)), start=server.start
    )
    start = time.monotonic()
    with pytest.raises(ValueError):
        run_processes([sleeping, *jobs], slots=[{}, {}])
    assert time.monotonic() - start < local.GRACE_SECONDS
    assert lines == ["short 0", "short 1", "short 2"]
    assert (tmp_path / "short").read_text() == "short 0\nshort 1\nshort 2\n"
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("code", [SLEEP, STUBBORN])
def test_an_exception_in_the_callback_ends_the_fork(run, monkeypatch, code):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.2)
    pids = []

    def on_line(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(code, on_line=on_line)
    assert not is_alive(pids[0])


def test_ctrl_c_reaches_the_fork_and_not_the_server(folder, server, run):
    code = (
        "import os, time\ntry: print(os.getpid(), flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('stop')"
    )
    lines: list[str] = []

    def on_line(line):
        lines.append(line)
        if len(lines) == 1:
            for pid in (server.pid, int(line)):
                os.kill(pid, signal.SIGINT)

    assert run(code, on_line=on_line) == (0, [])
    assert lines[1] == "stop"
    assert run("pass") == (0, [])


PARENT = """
import os, sys
from pathlib import Path
from launch.local import Job, run_processes
from launch import warm
start = warm.warm_start(["slow_import"])
print(warm._server(("slow_import",))._forkserver_pid, flush=True)
jobs = [Job([sys.executable, "-m", name], Path(sys.argv[1]) / name, lambda line: print(line, flush=True),
            start=start) for name in sys.argv[2:]]
run_processes(jobs, [{}] * len(jobs))
"""


@pytest.mark.parametrize("victim", ["parent", "server", "group"])
def test_forks_are_killed_with_their_parent_and_with_the_server(folder, tmp_path, victim):
    (folder / "sleeping.py").write_text(SLEEP)
    (folder / "stubborn.py").write_text(STUBBORN)
    command = [sys.executable, "-c", PARENT, str(tmp_path), "sleeping", "stubborn"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    assert parent.stdout is not None
    server, *pids = (int(parent.stdout.readline()) for _ in range(3))
    assert all(map(is_alive, [server, *pids]))
    if victim == "group":
        os.killpg(parent.pid, signal.SIGKILL)
    else:
        os.kill(parent.pid if victim == "parent" else server, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, [server, *pids])))
    assert parent.wait(20) == (0 if victim == "server" else -signal.SIGKILL)
    parent.communicate()


def test_the_server_ends_with_its_parent_also_while_it_imports(folder):
    code = 'from launch import warm; warm.warm_start(["slow_import"]); '
    code += 'import os; print(warm._server(("slow_import",))._forkserver_pid)'
    server = int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
    wait_until(lambda: not is_alive(server))


def test_if_the_server_was_killed_a_process_is_started_without_it(folder, tmp_path):
    (folder / "late.py").write_text("import os; print(os.getppid())")
    server = Server([])
    server.kill()
    lines: list[str] = []
    job = Job([sys.executable, "-m", "late"], tmp_path / "log", lines.append, start=server.start)
    assert run_processes([job]) == [0]
    assert lines == [str(os.getpid())]
    server.close()


def test_a_killed_server_means_that_its_fork_was_killed(folder, tmp_path):
    (folder / "sleeping.py").write_text(SLEEP)
    server = Server([])
    with open(tmp_path / "log", "wb") as log:
        fork = server.start([sys.executable, "-m", "sleeping"], log.fileno(), os.environ, log.fileno())
    assert isinstance(fork, Fork)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(timeout=0.01)
    server.kill()
    assert fork.wait() == fork.wait(timeout=0) == -signal.SIGKILL
    fork.terminate()  # does nothing, because it has ended
    server.close()


def test_other_commands_and_other_settings_use_subprocess(server, tmp_path, monkeypatch):
    lines: list[str] = []
    command = [sys.executable, "-c", "import os; print(os.getppid())"]
    assert run_processes([Job(command, tmp_path / "log", lines.append, start=server.start)]) == [0]
    assert lines == [str(os.getpid())]
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_processes([Job(["no-such-command"], tmp_path / "log", start=server.start)])
    monkeypatch.setenv("ALMA_WARM", "0")
    assert warm_start(["json"]) is start_process
    monkeypatch.delenv("ALMA_WARM")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert warm_start(["json"]) is start_process


NESTING = """
import os, sys
from pathlib import Path
from launch.local import Job, run_processes
from launch.warm import warm_start
import slow_import
print(os.getppid(), os.getpid(), slow_import.number, flush=True)
slow_import.number += 1
if sys.argv[2:]:
    job = Job([sys.executable, "-m", "nesting", *sys.argv[1:-1]], Path(sys.argv[1]) / f"log_{len(sys.argv)}",
              lambda line: print(line, flush=True), start=warm_start(["slow_import"]))
    assert run_processes([job, job]) == [0, 0]
"""


def test_a_fork_starts_its_processes_as_forks_of_its_server(folder, tmp_path):
    (folder / "nesting.py").write_text(NESTING)
    server = Server(["slow_import"])
    lines: list[str] = []
    job = Job([sys.executable, "-m", "nesting", str(tmp_path), "1", "2"], tmp_path / "log", lines.append,
              start=server.start)  # fmt: skip
    assert run_processes([job]) == [0]
    processes = [line.split() for line in lines]
    assert len(processes) == 7
    assert {number for *_, number in processes} == {"0"}, "no process shares the imported modules of another one"
    assert {parent for parent, *_ in processes} == {str(server.pid)}
    server.close()


def test_the_forks_of_a_fork_end_with_it(folder, tmp_path):
    (folder / "stubborn.py").write_text(STUBBORN)
    (folder / "owner.py").write_text(
        PARENT.replace('print(warm._server(("slow_import",))._forkserver_pid, flush=True)', "")
    )
    server = Server(["slow_import"])
    log = tmp_path / "log"
    with log.open("wb") as file:
        arguments = [sys.executable, "-m", "owner", str(tmp_path), "stubborn"]
        fork = server.start(arguments, file.fileno(), os.environ, file.fileno())
    assert isinstance(fork, Fork)
    wait_until(lambda: log.read_text().endswith("\n"))
    fork.kill()
    assert fork.wait(20) == -signal.SIGKILL
    wait_until(lambda: not is_alive(int(log.read_text())))
    assert is_alive(server.pid)
    server.close()


def test_the_errors_of_a_command_can_be_kept_apart(folder, server, tmp_path):
    (folder / "two_streams.py").write_text("import sys; print('out'); print('err', file=sys.stderr)")
    command = [sys.executable, "-m", "two_streams"]
    for start in (server.start, start_process):
        with open(tmp_path / "out", "wb") as output, open(tmp_path / "err", "wb") as errors:
            assert start(command, output.fileno(), os.environ, errors.fileno()).wait() == 0
        assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("out\n", "err\n")


SPAWN = """
import os, sys, torch

def rank(i, word):
    print("rank", i, word, __name__, os.environ["ALMA_GIVEN"], torch.get_num_threads(), flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, args=(sys.argv[1],), nprocs=int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_fork_starts_the_processes_of_torch(run_with_torch, number):
    """As fairseq starts one process for each GPU: these are new processes, which import the main module again.

    Each of them also imports torch again, which takes seconds, so this is slow.
    """
    environment = {"ALMA_GIVEN": "g", "OMP_NUM_THREADS": "1"}
    status, lines = run_with_torch(SPAWN, "word", str(number), environment=environment)
    assert (status, sorted(lines)) == (0, [f"rank {i} word __mp_main__ g 1" for i in range(number)])

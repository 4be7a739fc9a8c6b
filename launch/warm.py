"""Start processes as forks of a server process that has imported slow libraries already, such as torch and fairseq.

The server is the fork server of Python's module `multiprocessing`. It has one thread and uses no GPU, because only such
a process can be forked safely. alma-prep uses it for its pool of workers (`start_server`), and alma-lm for its training
processes (`warm_start`), which must be like processes of `python -m`: with their own environment, folder, output,
random state, number of threads and exit status. A fork ends when the process that asked for it ends.

The server is used on Linux only. If it cannot be started, or its modules start threads, `subprocess` is used instead.
"""

import atexit
import gc
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from launch.local import SPIN, Process, Start, killed_with, start_process

MODULES = "ALMA_SERVER_MODULES"
"""Environment variable that tells the server which modules to import, see `launch.warm_server`."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "NUMEXPR_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}
"""Environment variables of the server. A fork gets those of its job instead.

The server sees no GPU. At import, numpy's library OpenBLAS, pyarrow's memory allocator and numexpr, which pandas
imports, must not start threads. Modules in the current folder must not replace others."""

_inherited: tuple[str, ...] = ()
"""In a fork: the modules that its server has imported. The fork uses this server, too, and starts none of its own."""
_servers: list[tuple[int, frozenset[str], Any]] = []
"""Each server that was started, with the process that started it and the modules that it imports."""


def warm_start(modules: Sequence[str]) -> Start:
    """Return a function that starts `python -m` commands as forks of a server, and other commands by `start_process`.

    The first call starts the server, and does not wait until it has imported the modules. Later calls with the same
    modules or some of them use the same server, and so do calls in its forks. The server ends when this process ends.

    Args:
        modules: dotted names of the modules that the server imports. A module that cannot be imported is ignored.
    """
    if sys.platform != "linux" or os.environ.get("ALMA_WARM") == "0":
        return start_process
    if {*modules} <= {*_inherited}:
        # Python would start another server in a fork.
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server.ensure_running = lambda: None
    else:
        server = _server(modules)

    def start(command: Sequence[str], output: int, environment: Mapping[str, str], errors: int) -> Process:
        if [*command[:2]] == [sys.executable, "-m"] and len(command) > 2:
            job = _Job(tuple(command[2:]), dict(environment), str(Path.cwd()), tuple(modules))
            with suppress(OSError, EOFError):  # the server could not be started, or cannot fork
                return Fork(server, job, [output, errors])
        return start_process(command, output, environment, errors)

    return start


def _server(modules: Sequence[str]) -> Any:
    """Return a server of this process that imports these modules and perhaps others. Start it if there is none."""
    for pid, known, server in _servers:
        if pid == os.getpid() and known >= {*modules}:
            return server
    server = forkserver.ForkServer()
    with suppress(OSError):
        start_server(server, modules)
    _servers.append((os.getpid(), frozenset(modules), server))
    return server


def start_server(server: Any, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Start a server (`multiprocessing.forkserver.ForkServer`) if it is not running. It is killed at exit.

    Then the CPU time of the server and of its forks counts as that of this process, for example for `time alma-prep`.

    Args:
        server: the server.
        modules: dotted names of the modules that it imports.
        environment: further environment variables of the server.

    Raises:
        OSError: if the server cannot be started.
    """
    is_new = server._forkserver_pid is None
    before = dict(os.environ)
    os.environ.update({**SPIN, **before, **ENVIRONMENT, **(environment or {}), MODULES: " ".join(modules)})
    os.environ.pop("OMP_NUM_THREADS", None)  # OpenMP reads it only once, and the forks may differ in it
    try:
        server.set_forkserver_preload(["launch.warm_server"])
        server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    if is_new:
        atexit.register(end_server, server, os.getpid())


def end_server(server: Any, owner: int) -> None:
    """Kill a server and its forks, unless this process is not `owner`, the process that started it."""
    if os.getpid() == owner and server._forkserver_pid is not None:
        with suppress(OSError):  # it has ended already
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def end_with_parent(parent: int) -> None:
    """Kill this process when the process that asked for it has ended. Then `parent`, the end of a pipe, is closed."""

    def watch() -> None:
        os.read(parent, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class _Job:
    """What a fork does. The server unpickles it in the fork, and calls `_bootstrap`."""

    arguments: tuple[str, ...]
    """The arguments of `python -m`."""
    environment: dict[str, str]
    folder: str
    modules: tuple[str, ...]

    def _bootstrap(self, parent: int) -> None:
        """Run the module as `python -m` does, and end this process. `parent`: see `end_with_parent`."""
        global _inherited
        _inherited = self.modules
        killed_with(os.getppid())()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The server blocks SIGTERM, see there.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        end_with_parent(parent)
        for number, descriptor in zip((1, 2), forkserver.get_inherited_fds() or [], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (the server has another one)
        # Libraries such as triton check at exit whether their objects were deleted. Frozen ones never are.
        atexit.register(gc.unfreeze)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, self.folder)
        # All forks would start with the same random state. Python itself seeds its module `random` in every fork.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
            threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
            if threads.isdigit() and int(threads) > 0:
                sys.modules["torch"].set_num_threads(int(threads))
        _end(_run_module(*self.arguments))


def _run_module(module: str, *arguments: str) -> int:
    """Run a module as `__main__`, and return its exit status, negative for a signal."""
    # It is executed again, also if the server has imported it.
    sys.modules.pop(module, None)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> None:
    """End this process as Python does, but leave it to the operating system to free the memory.

    Python would destroy every object one by one, which takes two seconds after torch and fairseq were imported.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


class Fork:
    """A fork of a server. It has the methods of `subprocess.Popen` that `launch.local` uses.

    Args:
        server: the server.
        job: what the fork does.
        files: file descriptors for stdout and stderr.

    Raises:
        OSError, EOFError: if the server cannot be started, or has ended without forking.
    """

    def __init__(self, server: Any, job: _Job, files: list[int]):
        self._status: int | None = None
        # `_parent` stays open until the fork has ended, see `end_with_parent`.
        self._replies, self._parent = server.connect_to_new_process(files)
        try:
            self.pid: int = forkserver.read_signed(self._replies)  # type: ignore[attr-defined]
            with open(self._parent, "wb", closefd=False) as file:
                pickle.dump({}, file)  # the settings of multiprocessing, which forks do not need
                pickle.dump(job, file)
        except BaseException:
            self._close()
            raise

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit status, negative if a signal ended it.

        Raises:
            subprocess.TimeoutExpired: if the process still runs after `timeout` seconds.
        """
        if self._status is None:
            if not select.select([self._replies], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process with id {self.pid}", timeout or 0)
            try:
                self._status = forkserver.read_signed(self._replies)  # type: ignore[attr-defined]
            except EOFError:  # the server was killed, and so the kernel has killed its forks
                self._status = -signal.SIGKILL
            self._close()
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        # If it has ended, another process may have its id now.
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _close(self) -> None:
        os.close(self._replies)
        os.close(self._parent)

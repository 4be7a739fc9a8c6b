"""Start Python modules in a process that has imported slow libraries already, such as torch and fairseq.

`warm_start(MODULES)` starts a server process, once. The server imports MODULES and waits. For each command `python -m
MODULE ARGUMENTS`, the server forks, and the new process (the fork) runs the module, as `python -m` would run it, but
without the seconds that the imports take. Before it runs the module, the fork gets the environment variables, working
directory and output of its job. Like a process that is started by `subprocess`, it has its own exit status, it does not
inherit open files of this process or of other jobs, and it is killed when this process ends.

The module `multiprocessing.forkserver` of the standard library is similar, but a process that it forks differs from
`python -m`: it imports the main script of the parent again, does not run functions registered with `atexit`, ends with
status 1 instead of by SIGINT after Ctrl-C, and keeps the server alive if the parent is killed.

The server is only used on Linux, and not if the environment variable ALMA_WARM is 0. Without it, and for other commands
than `python -m`, processes are started by `subprocess`.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from launch.local import Process, Start, killed_with, start_process

QUIET_IMPORTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}
"""Environment variables of the server, which make sure that it can fork. A fork gets the variables of its job instead.

A process that has used CUDA cannot use it after a fork, so the server sees no GPU. A process that has several threads
should not fork, so numpy's library OpenBLAS and pyarrow's memory allocator must not start threads at import. In a fork,
OpenBLAS continues to use one thread. Modules in the current folder of this process are not imported, because they need
not be those of the job."""


def warm_start(modules: Sequence[str]) -> Start:
    """Return a function that starts `python -m` commands as forks of one server, for the argument `start` of Job.

    The server is started by the first call, in the background. Further calls with the same modules use it again. It
    ends with this process.

    Args:
        modules: dotted names of the modules that the server imports before it forks. A module that cannot be imported
            is ignored.
    """
    if sys.platform != "linux" or os.environ.get("ALMA_WARM") == "0":
        return start_process
    return _server(os.getpid(), tuple(modules)).start


@cache
def _server(pid: int, modules: tuple[str, ...]) -> "Server":
    """Return the only server with these modules. A fork of this process has another `pid`, and gets its own server."""
    return Server(modules)


class Server:
    """A process that has imported modules and forks when it is asked to. This object is the connection to it.

    Args:
        modules: dotted names of the modules that the server imports.
    """

    def __init__(self, modules: Sequence[str]):
        self._control, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs:
            # The server removes OMP_NUM_THREADS, because OpenMP reads it only when it is loaded. So a fork can have a
            # number of threads of its own, or OpenMP's default.
            environment = {**os.environ, **QUIET_IMPORTS}
            environment.pop("OMP_NUM_THREADS", None)
            # Linux would kill the server at the end of the thread that started it, not of the process. If this is not
            # the main thread, rely on the end of the connection only, which the server notices too.
            is_main_thread = threading.current_thread() is threading.main_thread()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch.warm", str(theirs.fileno()), *modules],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                preexec_fn=killed_with(self._owner) if is_main_thread else None,
            )
        atexit.register(self.close)

    def start(self, command: Sequence[str], output: int, environment: Mapping[str, str]) -> Process:
        """Start a command, in a fork if it is a `python -m` command and the server runs (see launch.local.Start)."""
        if [*command[:2]] != [sys.executable, "-m"] or len(command) < 3:
            return start_process(command, output, environment)
        request = {"arguments": command[2:], "environment": dict(environment), "folder": str(Path.cwd())}
        reply, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [output, theirs.fileno()])
            reply.sendall(json.dumps(request).encode())
            reply.shutdown(socket.SHUT_WR)
            return Fork(reply)
        except OSError:  # the server has ended, or cannot fork
            reply.close()
            return start_process(command, output, environment)
        except BaseException:
            reply.close()
            raise

    def close(self) -> None:
        """End the server, and kill its forks. In a fork of this process, which did not start the server, do nothing."""
        atexit.unregister(self.close)
        if os.getpid() == self._owner:
            self._control.close()
            self.process.kill()
            self.process.wait()


class Fork:
    """A process that a server has forked. It has those methods of `subprocess.Popen` that `launch.local` uses.

    Args:
        reply: connection on which the server sends the process id and later the exit status.

    Raises:
        ConnectionError: if the server did not fork.
    """

    def __init__(self, reply: socket.socket):
        self._reply = reply
        self._status: int | None = None
        self.pid = self._read()  # waits while the server imports its modules
        if self.pid is None:
            raise ConnectionError("the server did not fork")

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit status, negative if a signal ended it.

        Raises:
            subprocess.TimeoutExpired: if the process still runs after `timeout` seconds.
        """
        if self._status is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            status = self._read()
            # Without a status, the server has been killed, and Linux has killed the fork for this reason.
            self._status = -signal.SIGKILL if status is None else status
            self._reply.close()
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)  # if the process has ended, its id may belong to another process now
        if self._status is None:
            assert self.pid is not None
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self) -> int | None:
        """Return the next number that the server sends, or None if it has ended."""
        line = b""
        with suppress(ConnectionError):
            while not line.endswith(b"\n") and (character := self._reply.recv(1)):
                line += character
        return int(line) if line.endswith(b"\n") else None


def serve(control: socket.socket, modules: Sequence[str]) -> list[str]:
    """Import modules, then fork for each request until the other end of `control` is closed.

    In the server, this function does not return: the process exits. In a fork, it returns the arguments of `python -m`,
    a module name and the arguments of the module.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all processes; the forks handle it
    for module in modules:
        with suppress(Exception):  # a fork that needs this module imports it again and reports the error
            importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        os._exit(1)  # a library has started threads at import, so it is not safe to fork
    gc.collect()
    gc.freeze()  # otherwise the first garbage collection of each fork copies the memory that it shares with the server
    prepare = killed_with(os.getpid())
    ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    replies: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                os.read(ended, 1 << 16)
                _send_statuses(replies)
            if control not in ready:
                continue
            message, (*received,), _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                os._exit(0)
            output, reply = received[0], socket.socket(fileno=received[1])
            if (pid := _fork()) == 0:
                prepare()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for descriptor in (ended, wake_up):
                    os.close(descriptor)
                for connection in (control, *replies.values()):
                    connection.close()
                return _take_over(output, reply)
            os.close(output)
            if pid is None:
                reply.close()
            else:
                replies[pid] = reply
                with suppress(OSError):
                    reply.sendall(f"{pid}\n".encode())


def _fork() -> int | None:
    """Return the process id of a fork, 0 in the fork, and None if there is not enough memory for a fork."""
    try:
        return os.fork()
    except OSError:
        return None


def _send_statuses(replies: dict[int, socket.socket]) -> None:
    """Send the exit statuses of the forks that have ended, and remove them from `replies`."""
    with suppress(ChildProcessError):  # no fork runs
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with suppress(OSError, KeyError), replies.pop(pid) as reply:
                reply.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _take_over(output: int, reply: socket.socket) -> list[str]:
    """Give this process, a fork, the output, environment, folder, threads and random state of its job.

    Returns:
        The arguments of `python -m`.
    """
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    with reply, reply.makefile("rb") as file:
        request = json.load(file)
    atexit.register(gc.unfreeze)  # libraries such as triton check at the end whether all their objects are deleted
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, request["folder"])  # as `python -m` does
    # Every process starts with random numbers of its own. Python sees to that in a fork, numpy and torch do not.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))
    return request["arguments"]


def run_module(module: str, *arguments: str) -> None:
    """Run a module as `python -m` does."""
    sys.modules.pop(module, None)  # if the server has imported it, run it once more, as the main module
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_module(*serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))

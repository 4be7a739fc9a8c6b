"""Start Python modules in a process that has imported slow libraries already, such as torch and fairseq.

`warm_start(MODULES)` starts a server process, once. The server imports MODULES and waits. For each command `python -m
MODULE ARGUMENTS`, the server forks, and the new process (the fork) runs the module, as `python -m` would run it, but
without the seconds that the imports take. Before it runs the module, the fork gets the environment variables, working
directory and output of its job. Like a process that is started by `subprocess`, it has its own exit status, it does not
inherit open files of this process or of other jobs, and it is killed when this process ends.

The module `multiprocessing.forkserver` of the standard library is similar, but a process that it forks differs from
`python -m`: it imports the main script of the parent again, does not run functions registered with `atexit`, ends with
status 1 instead of by SIGINT after Ctrl-C, and keeps the server alive if the parent is killed.

A command that runs in a fork may call `warm_start` itself, as alma-lm does. Normally, `warm_start` would then start a
second server, which would import the modules again. To avoid this, a server with `generations=1` creates a new server
for each of its forks. The new server is a fork of this fork, so it contains the imported modules already.

The server is only used on Linux, and not if the environment variable ALMA_WARM is 0. Commands other than `python -m`,
and all commands if there is no server, are started by `subprocess`.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from launch.local import SPIN, Process, Start, killed_with, start_process

QUIET_IMPORTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}
"""Environment variables of the server, which make sure that it can fork. A fork gets the variables of its job instead.

A process that has used CUDA cannot use it after a fork, so the server sees no GPU. A process that has several threads
should not fork, so numpy's library OpenBLAS and pyarrow's memory allocator must not start threads at import. In a fork,
OpenBLAS continues to use one thread. PYTHONSAFEPATH excludes the current folder from the server's sys.path, because the
current folder of a job may be a different folder with different modules."""


def warm_start(modules: Sequence[str], generations: int = 0) -> Start:
    """Return a function that starts `python -m` commands as forks of one server, for the argument `start` of Job.

    The first call of `warm_start` starts the server, and does not wait until the server has imported the modules. Later
    calls with the same modules use the same server. The server ends when this process ends.

    Args:
        modules: dotted names of the modules that the server imports before it forks. A module that cannot be imported
            is ignored.
        generations: see `Server`.
    """
    if sys.platform != "linux" or os.environ.get("ALMA_WARM") == "0":
        return start_process
    if nested_server and nested_server.is_owned() and {*modules} <= {*nested_server.modules}:
        return nested_server.start
    return _server(os.getpid(), tuple(modules), generations).start


nested_server: "Server | None" = None
"""The server process that was created for this process when this process was forked, or None if there is none.

This process can start its child processes as forks of this server. A process has such a server only if it was itself
forked by a server whose argument `generations` is above 0 (see `Server`)."""


@cache
def _server(pid: int, modules: tuple[str, ...], generations: int) -> "Server":
    """Return the server for these modules. The first call creates it, and later calls return it from the cache.

    Args:
        pid: id of the calling process. If this process forks, the child has a different id and gets a separate server.
        modules: dotted names of the modules that the server imports.
        generations: see `Server`.
    """
    return Server(modules, generations)


class Server:
    """Connection to a server process, which has imported modules and creates a fork for each job.

    Args:
        modules: dotted names of the modules that the server imports.
        generations: number of generations of forks that get a server of their own, from which they can start
            processes. With 0, forks of this server have no server. With 1, each fork of this server has a server. With
            2, each fork of those servers has a server, too.
    """

    def __init__(self, modules: Sequence[str], generations: int = 0):
        control, theirs = socket.socketpair()
        with theirs:
            # Start the server without OMP_NUM_THREADS. OpenMP reads this variable only once, when the server loads
            # OpenMP. So with OMP_NUM_THREADS, all forks would use the number of threads of the server. Without it, each
            # fork uses the number of threads of its job, or OpenMP's default.
            # SPIN must be set now, because OpenMP also reads GOMP_SPINCOUNT only once.
            environment = {**SPIN, **os.environ, **QUIET_IMPORTS}
            environment.pop("OMP_NUM_THREADS", None)
            # killed_with tells Linux to kill the server when the thread that started the server ends, even if this
            # process continues. So use killed_with only in the main thread. A server that another thread has started
            # exits when this process ends, because its connection to this process is closed then.
            is_main_thread = threading.current_thread() is threading.main_thread()
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.warm_server", str(theirs.fileno()), str(generations), *modules],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                preexec_fn=killed_with(os.getpid()) if is_main_thread else None,
            )
        self._connect(control, process, modules)

    @classmethod
    def nested(cls, control: socket.socket, pid: int, modules: Sequence[str]) -> "Server":
        """Return the connection to a server that is a fork of this process.

        Args:
            control: end of a socket pair. The server has the other end.
            pid: process id of the server.
            modules: the modules that the server has imported.
        """
        server = cls.__new__(cls)
        server._connect(control, _Child(pid), modules)
        return server

    def _connect(self, control: socket.socket, process: Process, modules: Sequence[str]) -> None:
        self._control, self.process, self.modules = control, process, tuple(modules)
        self._owner = os.getpid()
        atexit.register(self.close)

    def is_owned(self) -> bool:
        """Return whether this process has started the server. A fork of this process has not."""
        return os.getpid() == self._owner

    def start(
        self, command: Sequence[str], output: int, environment: Mapping[str, str], errors: int | None = None
    ) -> Process:
        """Start a command and return its process. The arguments are those of `launch.local.Start`.

        If the command is a `python -m` command and the server runs, the server forks a process for the command.
        Otherwise, `subprocess` starts the command.
        """
        if [*command[:2]] != [sys.executable, "-m"] or len(command) < 3:
            return start_process(command, output, environment, errors)
        request = {"arguments": command[2:], "environment": dict(environment), "folder": str(Path.cwd())}
        reply, theirs = socket.socketpair()
        try:
            with theirs:
                files = [output, output if errors is None else errors, theirs.fileno()]
                socket.send_fds(self._control, [b"f"], files)
            reply.sendall(json.dumps(request).encode())
            reply.shutdown(socket.SHUT_WR)
            return Fork(reply)
        except OSError:
            # The server has ended or cannot fork, so start the command without the server.
            reply.close()
            return start_process(command, output, environment, errors)
        except BaseException:
            reply.close()
            raise

    def close(self) -> None:
        """End the server and kill its forks. Do nothing if this process did not start the server.

        A process that was forked from this process has a copy of this object, but it must not end the server.
        """
        atexit.unregister(self.close)
        if self.is_owned():
            self._control.close()
            self.process.kill()
            self.process.wait()


class _Child:
    """A child process that this process created with `os.fork`.

    This class has the methods of `subprocess.Popen` that `Server` uses.
    """

    def __init__(self, pid: int):
        self.pid = pid

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Fork:
    """A process that the server (see Server) has forked.

    This class has the methods of `subprocess.Popen` that `launch.local` uses.

    Args:
        reply: connection on which the server sends the id of the new process and later its exit status.

    Raises:
        ConnectionError: if the server did not fork.
    """

    def __init__(self, reply: socket.socket):
        self._reply = reply
        self._status: int | None = None
        # Read the process id. This waits until the server has imported its modules and has forked.
        self.pid = self._read()
        if self.pid is None:
            raise ConnectionError("the server did not fork: it has ended, or it could not create a process")

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit status, negative if a signal ended it.

        Raises:
            subprocess.TimeoutExpired: if the process still runs after `timeout` seconds.
        """
        if self._status is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process with id {self.pid}", timeout or 0)
            status = self._read()
            # If there is no status, the server was killed before it could send one. Linux kills all forks of a killed
            # server with SIGKILL, so use this signal as the status.
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
        # First check whether the process has ended. In this case, do not send the signal, because the process id may
        # belong to another process now.
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        if self._status is None:
            assert self.pid is not None
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self) -> int | None:
        """Return the next number that the server sends, or None if the server has closed the connection."""
        line = b""
        with suppress(ConnectionError):
            while not line.endswith(b"\n") and (character := self._reply.recv(1)):
                line += character
        return int(line) if line.endswith(b"\n") else None

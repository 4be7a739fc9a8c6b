"""Start Python modules in a process that has imported slow libraries already, such as torch and fairseq.

`warm_start(MODULES)` starts a server process, once. The server imports MODULES and waits. For each command `python -m
MODULE ARGUMENTS`, the server forks, and the new process (the fork) runs the module, as `python -m` would run it, but
without the seconds that the imports take. Before it runs the module, the fork gets the environment variables, working
directory and output of its job. Like a process that is started by `subprocess`, it has its own exit status, it does not
inherit open files of this process or of other jobs, and it is killed when this process ends.

The module `multiprocessing.forkserver` of the standard library is similar, but a process that it forks differs from
`python -m`: it imports the main script of the parent again, does not run functions registered with `atexit`, ends with
status 1 instead of by SIGINT after Ctrl-C, and keeps the server alive if the parent is killed.

The server is only used on Linux, and not if the environment variable ALMA_WARM is 0. Commands other than `python -m`,
and all commands if there is no server, are started by `subprocess`.
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
OpenBLAS continues to use one thread. PYTHONSAFEPATH excludes the current folder from the server's sys.path, because the
current folder of a job may be a different folder with different modules."""


def warm_start(modules: Sequence[str]) -> Start:
    """Return a function that starts `python -m` commands as forks of one server, for the argument `start` of Job.

    The first call of `warm_start` starts the server, and does not wait until the server has imported the modules. Later
    calls with the same modules use the same server. The server ends when this process ends.

    Args:
        modules: dotted names of the modules that the server imports before it forks. A module that cannot be imported
            is ignored.
    """
    if sys.platform != "linux" or os.environ.get("ALMA_WARM") == "0":
        return start_process
    return _server(os.getpid(), tuple(modules)).start


@cache
def _server(pid: int, modules: tuple[str, ...]) -> "Server":
    """Return the server for these modules. The first call creates it, and later calls return it from the cache.

    Args:
        pid: id of the calling process. If this process forks, the child has a different id and gets a separate server.
        modules: dotted names of the modules that the server imports.
    """
    return Server(modules)


class Server:
    """Connection to a server process, which has imported modules and creates a fork for each job.

    Args:
        modules: dotted names of the modules that the server imports.
    """

    def __init__(self, modules: Sequence[str]):
        self._control, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs:
            # Start the server without OMP_NUM_THREADS. OpenMP reads this variable only once, when the server loads
            # OpenMP. So with OMP_NUM_THREADS, all forks would use the number of threads of the server. Without it, each
            # fork uses the number of threads of its job, or OpenMP's default.
            environment = {**os.environ, **QUIET_IMPORTS}
            environment.pop("OMP_NUM_THREADS", None)
            # Use killed_with only in the main thread, because Linux kills the server when the thread that started it
            # ends, even if this process continues. In another thread, do without killed_with: the server also exits
            # when this process ends, because the connection is closed then.
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
        except OSError:
            # The server has ended or cannot fork, so start the command without the server.
            reply.close()
            return start_process(command, output, environment)
        except BaseException:
            reply.close()
            raise

    def close(self) -> None:
        """End the server and kill its forks. Do nothing if this process did not start the server.

        A process that was forked from this process has a copy of this object, but it must not end the server.
        """
        atexit.unregister(self.close)
        if os.getpid() == self._owner:
            self._control.close()
            self.process.kill()
            self.process.wait()


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


def serve(control: socket.socket, modules: Sequence[str]) -> list[str]:
    """Import modules. Then wait for requests, and fork for each request.

    In the server, this function never returns: the server exits when its parent has closed the connection `control`. In
    a fork, this function returns the arguments of `python -m`: a module name and the arguments of the module.

    Args:
        control: connection on which the requests arrive.
        modules: dotted names of the modules to import.
    """
    # Ignore Ctrl-C in the server. In a terminal, Ctrl-C sends SIGINT to all processes, and the forks handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        # Ignore import errors, because a fork that needs the module imports it again and reports the error.
        with suppress(Exception):
            importlib.import_module(module)
    # Exit if a library has started threads at import, because it is not safe to fork a process with several threads.
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        os._exit(1)
    gc.collect()
    # Exclude all existing objects from garbage collection. Otherwise, the first garbage collection in a fork would
    # write to these objects, so Linux would have to copy the memory that the fork shares with the server.
    gc.freeze()
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
    """Fork this process. Return the process id of the fork, or 0 in the fork, or None if forking failed."""
    try:
        return os.fork()
    except OSError:
        return None


def _send_statuses(replies: dict[int, socket.socket]) -> None:
    """Send the exit statuses of the forks that have ended, and remove them from `replies`."""
    # waitpid raises ChildProcessError if no fork is left.
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with suppress(OSError, KeyError), replies.pop(pid) as reply:
                reply.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _take_over(output: int, reply: socket.socket) -> list[str]:
    """Set up a new fork for its job: output, environment variables, working directory, threads and random state.

    This function runs in the fork.

    Args:
        output: file descriptor to which stdout and stderr of the fork are redirected.
        reply: connection from which the arguments, environment variables and folder of the job are read.

    Returns:
        The arguments of `python -m`.
    """
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    with reply, reply.makefile("rb") as file:
        request = json.load(file)
    # At exit, undo gc.freeze(), which the server has called. Libraries such as triton check at exit whether all their
    # objects have been deleted, and frozen objects are never deleted by garbage collection.
    atexit.register(gc.unfreeze)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # Add the working directory to sys.path, as `python -m` does. `python -m` does not add it if PYTHONSAFEPATH is set.
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, request["folder"])
    # Seed numpy and torch anew, because all forks would otherwise start with the same random state. Python seeds its
    # module `random` in every fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))
    return request["arguments"]


def run_module(module: str, *arguments: str) -> None:
    """Run a module like the command `python -m MODULE ARGUMENTS`."""
    # The server may have imported the module. Remove it from sys.modules, so that it is executed again as `__main__`.
    sys.modules.pop(module, None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_module(*serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))

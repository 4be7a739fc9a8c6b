"""The server process that imports modules once and then forks for each request: see `launch.warm`, which starts it.

Command line: python -m launch.warm_server CONNECTION GENERATIONS MODULES...

CONNECTION   file descriptor of the socket on which the requests arrive
GENERATIONS  number of generations of forks that get a server of their own (see `launch.warm.Server`)
MODULES      dotted names of the modules to import
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from launch import warm
from launch.local import killed_with


def serve(control: socket.socket, generations: int, modules: Sequence[str]) -> list[str]:
    """Import modules. Then wait for requests, and fork for each request.

    In the server, this function never returns: the server exits when its parent has closed the connection `control`. In
    a fork, this function returns the arguments of `python -m`: a module name and the arguments of the module.

    Args:
        control: connection on which the requests arrive.
        generations: number of generations of forks that get a server of their own (see `launch.warm.Server`).
        modules: dotted names of the modules to import.
    """
    # Ignore Ctrl-C and SIGTERM in the server. In a terminal, Ctrl-C sends SIGINT to all processes, and Slurm sends
    # SIGTERM to all processes of a job. The forks handle these signals, and they would be killed if the server ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _import(modules)
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
            message, (*received,), _, _ = socket.recv_fds(control, 1, 3)
            if not message:
                os._exit(0)
            output, errors, reply = *received[:2], socket.socket(fileno=received[2])
            if (pid := _fork()) == 0:
                prepare()
                _reset_signals()
                for descriptor in (ended, wake_up):
                    os.close(descriptor)
                for connection in (control, *replies.values()):
                    connection.close()
                break
            os.close(output)
            os.close(errors)
            if pid is None:
                reply.close()
            else:
                replies[pid] = reply
                with suppress(OSError):
                    reply.sendall(f"{pid}\n".encode())
    # Only a fork leaves the loop above. If the fork needs a server of its own, create this server by forking the fork
    # now, before the job begins. The job may start threads, and a process with several threads is not safe to fork.
    if generations and (theirs := _fork_server(modules)):
        os.close(output)
        os.close(errors)
        reply.close()
        return serve(theirs, generations - 1, modules)
    return _take_over(output, errors, reply)


def _import(modules: Sequence[str]) -> None:
    """Import modules and prepare this process for forking. Exit if this process is not safe to fork."""
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


def _reset_signals() -> None:
    """Handle signals in a fork as in a new Python process, and not as in the server."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _fork_server(modules: Sequence[str]) -> socket.socket | None:
    """Create a server for this process by forking, and store the connection to it in `warm.nested_server`.

    Return None in this process. In the new server, return the socket on which its requests arrive.
    """
    control, theirs = socket.socketpair()
    prepare = killed_with(os.getpid())
    if (pid := _fork()) == 0:
        prepare()
        control.close()
        return theirs
    theirs.close()
    if pid is None:
        control.close()
    else:
        warm.nested_server = warm.Server.nested(control, pid, modules)
    return None


def _fork() -> int | None:
    """Fork this process. Return the process id of the fork, or 0 in the fork, or None if forking failed."""
    try:
        return os.fork()
    except OSError:
        return None


def _send_statuses(replies: dict[int, socket.socket]) -> None:
    """For each fork that has ended, send its exit status to the process that requested the fork.

    Args:
        replies: the connections to send to, by process id of the fork. The connections of ended forks are removed
            from it.
    """
    # waitpid raises ChildProcessError if no fork is left.
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with suppress(OSError, KeyError), replies.pop(pid) as reply:
                reply.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _take_over(output: int, errors: int, reply: socket.socket) -> list[str]:
    """Set up a new fork for its job: output, environment variables, working directory, threads and random state.

    This function runs in the fork.

    Args:
        output: file descriptor to which stdout of the fork is redirected.
        errors: file descriptor to which stderr of the fork is redirected.
        reply: connection from which the arguments, environment variables and folder of the job are read.

    Returns:
        The arguments of `python -m`.
    """
    for number, descriptor in ((1, output), (2, errors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
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


def exit_quickly(status: int) -> None:
    """End this process like `sys.exit`, but leave it to the operating system to free the memory.

    Python would destroy every object one by one, which takes two seconds after torch and fairseq were imported. The
    other steps are those of Python: wait for threads, call the functions registered with `atexit`, write the output.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    control, generations, *modules = sys.argv[1:]
    try:
        run_module(*serve(socket.socket(fileno=int(control)), int(generations), modules))
    except SystemExit as error:
        # Python itself prints a status that is a text.
        if not isinstance(error.code, int | None):
            raise
        exit_quickly((error.code or 0) & 0xFF)
    exit_quickly(0)

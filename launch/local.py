"""Run a process on this machine, line by line, and never outlive or be outlived by it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1

GRACE_SECONDS = 10.0
"""Between asking a process to end and killing it."""

# OpenMP threads that spin while they wait take the processor from whoever has work: with one busy neighbour
# on two cores a stage ran at a tenth of its speed. Short spins cost a free machine little.
SPIN = {"GOMP_SPINCOUNT": "10000"}


def run_process(
    command: Sequence[str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` to its end; return its exit status (negative: the signal that ended it).

    All it prints, stdout and stderr, is appended to `log` as it comes, and each line is handed to
    `on_line`. An exception here (Ctrl-C among them) ends the process before it goes on. On Linux the
    process is killed with its parent, so that a killed run leaves nobody writing into its folder.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "ab") as file,
        subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**SPIN, **os.environ, **(environment or {})},
            preexec_fn=_dying_with(os.getpid()) if sys.platform == "linux" else None,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line.decode("utf-8", errors="replace").rstrip("\n"))
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=GRACE_SECONDS)
            finally:  # a second Ctrl-C does not leave it behind either
                process.kill()
                process.wait()
            raise


def _dying_with(parent: int) -> Callable[[], None]:
    """What a child of process `parent` does first: ask to be killed when that ends."""
    libc = ctypes.CDLL(None)  # before the fork: after it, with other threads about, loading might wait for ever

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between fork and prctl. (1 is no sign: in a container we may be 1.)
            os._exit(1)

    return ask

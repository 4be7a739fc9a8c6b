"""Run a process on this machine, line by line, and never outlive or be outlived by it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1

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
    with open(log, "ab") as file:
        process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**SPIN, **os.environ, **(environment or {})},
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
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
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent died between fork and prctl
        os._exit(1)

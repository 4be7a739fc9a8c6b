"""Kernels of our own in C: compiled for this machine when they are first wanted, kept for the next process.

    ALMA_COMPILE=0      without them (torch's own operations compute the same, slower)
    CC=clang            another compiler than cc
    XDG_CACHE_HOME      where they are kept: $XDG_CACHE_HOME/alma, else ~/.cache/alma

What is kept has the digest of source, compiler, flags and processor in its name: machines of different kinds that
share a home do not take one another's.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)
FLAGS = (("-O3", "-march=native"), ("-O3", "-mcpu=native"), ("-O3",))
"""To be tried in turn: compilers differ in how they are told of this processor."""


class CompileError(RuntimeError):
    """There is no compiler, or it refuses."""


@lru_cache
def kernels(source: Path, real: str) -> ctypes.CDLL | None:
    """A source file as a library; None where it cannot be had, which is said once.

    Args:
        source: a file of C.
        real: what the macro REAL is to be, float or double.
    """
    if os.environ.get("ALMA_COMPILE", "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(compiled(source, real)))
    except (CompileError, OSError) as error:
        logger.warning("%s is not used: %s. The same is computed by torch, slower.", source.name, error)
        return None


def compiled(source: Path, real: str) -> Path:
    """The library of a source file, compiled if it is not there.

    Raises:
        CompileError: with what the compiler said.
        OSError: nothing can be written.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    version = _run([*compiler, "--version"]).stdout
    about = [source.read_text(), real, version, str(compiler), str(FLAGS), platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alma"
    library = folder / f"{source.stem}-{real}-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / library.name
        told = []
        for flags in FLAGS:
            command = [*compiler, *flags, f"-DREAL={real}", "-shared", "-fPIC", "-o", str(made), str(source), "-lm"]
            done = _run(command, check=False)
            if done.returncode == 0:
                # Processes that start together each make their own; the last one's stays.
                made.replace(library)
                return library
            told.append(done.stderr.strip())
    raise CompileError(f"{shlex.join(command)}: {told[-1][-500:]}")


def _run(command: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=check)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{command[0]} does not run ({error}); a C compiler is wanted (CC names it)") from error


def _processor() -> str:
    """What this processor can do, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

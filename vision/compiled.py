"""Compile C code for this machine when it is first needed, and cache the library for other processes.

Environment variables:
    ALMA_COMPILE=0      do not compile: torch operations compute the same results, more slowly
    CC=clang            use this compiler instead of cc
    XDG_CACHE_HOME      store the cache in $XDG_CACHE_HOME/alma instead of ~/.cache/alma

The file name of a cached library contains two digests. The first is the digest of everything that the library depends
on (source, compiler, flags, processor). So machines of different kinds can share one home folder. The
second is the digest of the library file itself. So a damaged file is detected, and the library is compiled again. A
file that another user could have written is not loaded. If the library cannot be cached, it is compiled for the current
process only.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from fairseq_alma.core.files import written_aside

logger = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """Raised if there is no C compiler, or if the compiler reports an error."""


@lru_cache
def load_or_warn(source: Path, real: str) -> ctypes.CDLL | None:
    """Return what `load` returns, or None if ALMA_COMPILE=0 or the compilation fails, which is logged as a warning."""
    if os.environ.get("ALMA_COMPILE", "1") == "0":
        return None
    try:
        return load(source, real)
    except (CompileError, OSError) as error:
        logger.warning("%s is not used: %s. torch computes the same results instead, more slowly.", source.name, error)
        return None


def load(source: Path, real: str) -> ctypes.CDLL:
    """Return the compiled library of a C file. It is loaded from the cache, or compiled if it is not in the cache.

    Args:
        source: the C file.
        real: number type of the C code, the value of the macro REAL: "float" or "double".

    Raises:
        CompileError: if the compiler failed, or if CC is not a command. The message contains the compiler's output.
        OSError: if a temporary folder cannot be created.
    """
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
    except ValueError as error:
        raise CompileError(f"CC={os.environ['CC']} is not a valid command ({error})") from error
    command = [*compiler, *_flags(), f"-DREAL={real}", "-shared", "-fPIC"]
    version = _run([command[0], "--version"])
    about = [source.read_text(), version, *command, platform.machine(), _processor()]
    name, folder = f"{source.stem}-{real}-{_digest(chr(0).join(about).encode())}", None
    with suppress(OSError):
        folder = _cache_folder()
        for path in sorted(folder.glob(f"{name}-*.so")):
            if _is_private(path) and path.name == f"{name}-{_digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path))
    # Compile to a temporary folder. A loaded library can be used without its file.
    with tempfile.TemporaryDirectory(prefix="alma-") as work:
        library = Path(work) / f"{name}.so"
        _run([*command, "-o", str(library), str(source), "-lm"])
        try:
            if folder is None:
                raise PermissionError("other users can write to the cache folder, or it cannot be created")
            # Another process may have loaded a file of this name, so replace the file and do not write to it.
            with written_aside(folder / f"{name}-{_digest(library.read_bytes())}.so") as temporary:
                shutil.copyfile(library, temporary)
                temporary.chmod(0o700)
        except OSError as error:
            logger.info("%s is compiled again in each process, because it cannot be cached: %s", source.name, error)
        return ctypes.CDLL(str(library))


def _cache_folder() -> Path:
    """Return the folder of cached libraries. It is created if necessary."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "alma"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(
            f"{folder} belongs to another user, or other users can write to it: set the environment variable "
            "XDG_CACHE_HOME to a folder of yours"
        )
    return folder


def _is_private(path: Path) -> bool:
    """Return True if the current user owns this file or folder and nobody else can write to it."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _flags() -> list[str]:
    """Return the compiler flags that optimise for the processor of this machine. x86 and ARM need different flags."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-O3", "-march=native"]
    return ["-O3", "-mcpu=native"] if machine in ("aarch64", "arm64") else ["-O3"]


def _run(command: list[str]) -> str:
    """Run a command and return its standard output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(
            f"{command[0]} cannot be started ({error}); install a C compiler, or set the environment variable CC"
        ) from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    """Return the name and the features of the processor, as far as the operating system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

"""Compile C code for this machine when it is first needed, and cache the library for other processes.

    ALMA_COMPILE=0      do not compile; torch's operations compute the same results, more slowly
    CC=clang            the compiler, by default cc
    XDG_CACHE_HOME      the cache is $XDG_CACHE_HOME/alma, by default ~/.cache/alma

The file name of a cached library contains two digests. The first is the digest of everything that the library depends
on (source and headers, compiler, flags, processor), so that machines of different kinds can share a home folder. The
second is the digest of the library itself, so that a damaged file is detected and compiled again. A file that another
user could have written is not loaded. If nothing can be cached, the library is compiled for this process only.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """Raised if there is no C compiler, or if it reports an error."""


@lru_cache
def load_or_warn(source: Path, real: str) -> ctypes.CDLL | None:
    """Return the library of a C file, or None if it is turned off or cannot be compiled.

    A failure is logged once per process, as a warning.

    Args:
        source: the C file.
        real: the value of the macro REAL, "float" or "double".
    """
    if os.environ.get("ALMA_COMPILE", "1") == "0":
        return None
    try:
        return load(source, real)
    except (CompileError, OSError) as error:
        logger.warning("%s is not used: %s. torch computes the same results, more slowly.", source.name, error)
        return None


def load(source: Path, real: str) -> ctypes.CDLL:
    """Return the library of a C file: from the cache, or else compiled.

    Args:
        source: the C file. It may include header files (.h) of its folder.
        real: the value of the macro REAL, "float" or "double".

    Raises:
        CompileError: the compiler failed; the message contains its output.
        OSError: a temporary folder could not be created.
    """
    command = [*_compiler(), *_flags(), f"-DREAL={real}", "-shared", "-fPIC"]
    version = _run([command[0], "--version"])
    sources = [source, *sorted(source.parent.glob("*.h"))]
    about = [*(path.read_text() for path in sources), version, *command, platform.machine(), _processor()]
    name = f"{source.stem}-{real}-{_digest(chr(0).join(about).encode())}"
    try:
        folder = _cache_folder()
        for path in sorted(folder.glob(f"{name}-*.so")):
            if _is_private(path) and path.name == f"{name}-{_digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("compiled libraries are not cached: %s", error)
        folder = None
    with tempfile.TemporaryDirectory(prefix="alma-") as work:
        library = Path(work) / f"{name}.so"
        _run([*command, "-o", str(library), str(source), "-lm"])
        if folder is not None:
            try:
                return ctypes.CDLL(str(_add_to_cache(library, folder)))
            except OSError as error:
                logger.info("compiled libraries are not cached: %s", error)
        # A loaded library can be used after its file is deleted.
        return ctypes.CDLL(str(library))


def _add_to_cache(library: Path, folder: Path) -> Path:
    """Copy a library to the cache folder and return its path there.

    A whole file of this name is not replaced, because another process, perhaps on another machine, may have loaded
    it. Hence a hard link, which fails if the name exists, in place of the rename in core/files.py.
    """
    content = library.read_bytes()
    path = folder / f"{library.stem}-{_digest(content)}.so"
    descriptor, name = tempfile.mkstemp(dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o700)
        if path.exists() and path.read_bytes() != content:
            path.unlink()
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()
    return path


def _cache_folder() -> Path:
    """Return the folder of cached libraries. It is created if necessary.

    Raises:
        OSError: the folder cannot be created, or other users can write to it.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "alma"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} belongs to another user, or other users can write to it")
    return folder


def _is_private(path: Path) -> bool:
    """Return True if this user owns a file or folder and nobody else can write to it."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _compiler() -> list[str]:
    """Return the compiler's command and its first arguments.

    Raises:
        CompileError: the variable CC is not a valid command.
    """
    command = os.environ.get("CC") or "cc"
    try:
        return shlex.split(command)
    except ValueError as error:
        raise CompileError(f"CC={command} is not a valid command ({error})") from error


def _flags() -> list[str]:
    """Return the flags for fast code for exactly this processor. Their names depend on the architecture."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-O3", "-march=native"]
    return ["-O3", "-mcpu=native"] if machine in ("aarch64", "arm64") else ["-O3"]


def _run(command: list[str]) -> str:
    """Run a command and return its standard output.

    Raises:
        CompileError: the command cannot be started, or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(
            f"{command[0]} cannot be started ({error}); install a C compiler, or name one by the variable CC"
        ) from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name and features, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

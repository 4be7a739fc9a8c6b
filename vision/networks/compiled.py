"""Kernels of our own in C: compiled for this machine when they are first wanted, kept for the next process.

    ALMA_COMPILE=0      without them (torch's own operations compute the same, slower)
    CC=clang            another compiler than cc
    XDG_CACHE_HOME      where they are kept: $XDG_CACHE_HOME/alma, else ~/.cache/alma

A library that is kept has two digests in its name: of what it was made from (source, compiler, flags, processor), so
that machines of different kinds may share a home, and of itself, so that a damaged one is made anew. One that others
could have written is not loaded. Where nothing can be kept it is compiled for this process alone.
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
        return load(source, real)
    except (CompileError, OSError) as error:
        logger.warning("%s is not used: %s. The same is computed by torch, slower.", source.name, error)
        return None


def load(source: Path, real: str) -> ctypes.CDLL:
    """The library of a source file, compiled if it is not kept.

    Raises:
        CompileError: with what the compiler said.
        OSError: there is not even a temporary folder.
    """
    command = [*_compiler(), *_flags(), f"-DREAL={real}", "-shared", "-fPIC"]
    version = _run([command[0], "--version"])
    about = [source.read_text(), version, *command, platform.machine(), _processor()]
    name = f"{source.stem}-{real}-{_digest(chr(0).join(about).encode())}"
    try:
        folder = _cache()
        for path in sorted(folder.glob(f"{name}-*.so")):
            if _is_ours(path) and path.name == f"{name}-{_digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
        folder = None
    with tempfile.TemporaryDirectory(prefix="alma-") as work:
        made = Path(work) / f"{name}.so"
        _run([*command, "-o", str(made), str(source), "-lm"])
        if folder is not None:
            try:
                return ctypes.CDLL(str(_kept(made, folder)))
            except OSError as error:
                logger.info("compiled kernels are not kept: %s", error)
        return ctypes.CDLL(str(made))  # stays with the process when the file has gone


def _kept(made: Path, folder: Path) -> Path:
    """Where it is for the next process. One that is there already stays, for other processes may be using it."""
    content = made.read_bytes()
    path = folder / f"{made.stem}-{_digest(content)}.so"
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


def _cache() -> Path:
    """The folder where libraries are kept.

    Raises:
        OSError: it cannot be made, or others can write there.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "alma"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} belongs to, or can be written by, others")
    return folder


def _is_ours(path: Path) -> bool:
    """Whether nobody else could have put something there."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _compiler() -> list[str]:
    told = os.environ.get("CC") or "cc"
    try:
        return shlex.split(told)
    except ValueError as error:
        raise CompileError(f"CC={told} is no command ({error})") from error


def _flags() -> list[str]:
    """Fast, for this very processor: compilers are told of it in different ways."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-O3", "-march=native"]
    return ["-O3", "-mcpu=native"] if machine in ("aarch64", "arm64") else ["-O3"]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileError(f"{command[0]} does not run ({error}); a C compiler is wanted (CC names it)") from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    """What this processor can do, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))

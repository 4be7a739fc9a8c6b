"""The stream folder: what lies where, what may be deleted, and how it becomes whole in one moment.

Everything is made in OUT/.alma-prep. When all pieces are whole they are renamed into OUT, stream.json last: a
folder without it is not a stream. While .alma-prep is there, pieces beside it are leftovers of a killed run.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from data_prep.errors import PrepError
from data_prep.mmap_writer import sync
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.stream_folder import STREAM_FILE, StreamFolder

WORK = ".alma-prep"
LOCK = "lock"
PIECE = re.compile(
    r"(mega_batch_\d+/train|valid/valid|test/test)\.(bin|idx)|dict\.txt|tokenizer\.json|sentencepiece\.model"
)


class WorkFolder(NamedTuple):
    """Where a stream is made before it is whole."""

    spool: Path
    """Text and indices that are thrown away in the end."""
    stream: Path
    """The pieces, laid out as they will be in OUT."""


def read_stream(out: Path) -> StreamFolder | None:
    """A finished stream whose files are whole; None where there is none.

    Raises PrepError if it was not written by this release, or is damaged.
    """
    if not (out / STREAM_FILE).is_file():
        return None
    try:
        return StreamFolder.open(out)
    except StreamError as error:
        raise PrepError(
            f"the stream in {out} cannot be used: {error}. Remove the folder and run the same command again."
        ) from error


def check_free(out: Path):
    """Raise PrepError if `out` holds anything that is not ours. Nothing is written or deleted."""
    if out.exists() and not out.is_dir():
        raise PrepError(f"{out} is a file: name a folder for the stream.")
    ours = (out / WORK).is_dir()
    foreign = [name for name in _files_beside_work(out) if not (ours and PIECE.fullmatch(name))]
    if foreign:
        names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise PrepError(
            f"{out} holds files that are not of a stream by alma-prep: {names}. "
            "Nothing was changed. Choose an empty or new folder."
        )


@contextmanager
def work_folder(out: Path):
    """The WorkFolder of `out`, empty. It is gone afterwards, and unless `finish` was called, the pieces too.

    Raises PrepError if another alma-prep is at work in `out`.
    """
    was_there = out.is_dir()
    work = WorkFolder(out / WORK / "spool", out / WORK / "stream")
    lock = _hold(out)
    try:
        _remove_leftovers(out)
        work.spool.mkdir()
        work.stream.mkdir()
        yield work
    finally:
        _remove_leftovers(out)
        lock.close()
        remove_work(out)
        if not was_there and not any(out.iterdir()):
            out.rmdir()


def remove_work(out: Path):
    """Delete the work folder of a run that has ended."""
    for name in ("spool", "stream"):
        shutil.rmtree(out / WORK / name, ignore_errors=True)
    with suppress(OSError):  # not there, or another run has just begun in it
        (out / WORK / LOCK).unlink()
        (out / WORK).rmdir()


def finish(out: Path, work: WorkFolder, stream: dict):
    """Rename the pieces into `out` and write stream.json last: from this moment there is a stream."""
    file_in_work = work.spool / STREAM_FILE
    with open(file_in_work, "w", encoding="utf-8") as file:
        json.dump(stream, file, indent=1, ensure_ascii=False)
        file.write("\n")
        sync(file)
    for piece in sorted(work.stream.iterdir()):
        _sync_folder(piece)
        os.replace(piece, out / piece.name)
    _sync_folder(out)
    os.replace(file_in_work, out / STREAM_FILE)
    _sync_folder(out)


def _hold(out: Path) -> TextIO:
    """Make the work folder and keep others out of it. The lock goes with the process, however it ends."""
    (out / WORK).mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        lock = undo.enter_context(open(out / WORK / LOCK, "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepError(f"another alma-prep is at work in {out}: wait for it, or choose another folder.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                raise
        if (out / STREAM_FILE).exists():
            raise PrepError(f"another alma-prep has just finished in {out}: run the same command again to check it.")
        undo.pop_all()
        return lock


def _files_beside_work(out: Path) -> list[str]:
    """Every file below `out` outside the work folder, and every folder that is empty, relative to `out`."""
    found = []
    for folder, subfolders, names in os.walk(out):
        here = Path(folder).relative_to(out)
        if here == Path():
            subfolders[:] = [name for name in subfolders if name != WORK]
        elif not names and not subfolders:
            found.append(here.as_posix())
        found += [(here / name).as_posix() for name in names]
    return sorted(found)


def _remove_leftovers(out: Path):
    """Delete what a run left that did not end well: its work, and the pieces beside it unless they are a stream."""
    if not (out / STREAM_FILE).exists():
        for name in filter(PIECE.fullmatch, _files_beside_work(out)):
            (out / name).unlink()
            if "/" in name and not any((out / name).parent.iterdir()):
                (out / name).parent.rmdir()
    for name in ("spool", "stream"):
        if (out / WORK / name).exists():
            shutil.rmtree(out / WORK / name)


def _sync_folder(path: Path):
    if not path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

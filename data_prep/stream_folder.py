"""The stream folder: what lies where, what may be deleted, and how it becomes whole in one moment.

Everything is made in OUT/.alma-prep. When all pieces are whole they are renamed into OUT, stream.json last: a
folder without it is not a stream. While .alma-prep is there, pieces beside it are leftovers of a killed run.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from data_prep.errors import PrepError
from data_prep.mmap_writer import index_num_bytes, sync

FORMAT_VERSION = 1
STREAM_FILE = "stream.json"
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


def split_names(num_mega_batches: int) -> list[str]:
    """The splits in the order of the partition."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def split_prefix(root: Path, name: str) -> Path:
    """Where a split's dataset lies, without `.bin` and `.idx`."""
    return root / name / ("train" if name.startswith("mega_batch_") else name)


def read_stream(out: Path) -> dict | None:
    """stream.json of a finished stream; None where there is none. Raises PrepError if it cannot be read."""
    path = out / STREAM_FILE
    try:
        stream = json.loads(path.read_text(encoding="utf-8"))
        version = stream["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PrepError(
            f"{path} was not written by alma-prep ({error!r}). Choose another folder, or remove this one."
        ) from error
    if version != FORMAT_VERSION:
        raise PrepError(
            f"{path} has format version {version}, and this alma-prep writes {FORMAT_VERSION}. "
            "Choose another folder, or remove this one."
        )
    return stream


def check_whole(out: Path, stream: dict):
    """Raise PrepError unless every file is there with the size, and the small ones with the digest, on record."""
    for name, split in stream["splits"].items():
        prefix = split_prefix(out, name)
        num_bytes = {
            "bin": split["tokens"] * {"uint16": 2, "uint32": 4}[stream["dtype"]],
            "idx": index_num_bytes(split["sequences"]),
        }
        for ending, wanted in num_bytes.items():
            path = Path(f"{prefix}.{ending}")
            found = path.stat().st_size if path.is_file() else None
            if found != wanted:
                state = "is missing" if found is None else f"has {found} bytes"
                raise _damaged(out, f"{path} {state}, and {STREAM_FILE} says {wanted} bytes")
    tokenizer = stream["tokenizer"]
    for name, wanted in {
        tokenizer["file"]: tokenizer["sha256"],
        "dict.txt": tokenizer["dict_sha256"],
    }.items():
        path = out / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            raise _damaged(out, f"{path} is missing or was changed")


def _damaged(out: Path, what: str) -> PrepError:
    return PrepError(f"the stream in {out} is damaged: {what}. Remove the folder and run the same command again.")


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

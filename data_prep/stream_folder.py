"""The stream folder: what lies where, what may be deleted, and how it becomes whole in one moment.

Everything is made in OUT/.alma-prep, which a killed run leaves for the next one to go on with. When all pieces are
whole they are renamed into OUT, stream.json last: a folder without it is not a stream, and a mega-batch that it does
not name is not part of one.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from data_prep.errors import PrepError, Unworkable
from data_prep.mmap_writer import sync
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import sha256_of, write_json
from fairseq_alma.core.stream_folder import STREAM_FILE, StreamFolder

WORK = ".alma-prep"
LOCK = "lock"
BEGUN = "settings.json"
MANIFEST = "manifest.json"
PIECE = re.compile(
    r"(mega_batch_\d+/train|valid/valid|test/test)\.(bin|idx)|dict\.txt|tokenizer\.json|sentencepiece\.model"
    r"|dedup/\d{4}\.(keys|signatures)|manifest\.json"
)


class WorkFolder(NamedTuple):
    """Where a stream is made before it is whole."""

    folder: Path
    """Of all that is thrown away in the end."""

    @property
    def spool(self) -> Path:
        """The text of all documents."""
        return self.folder / "spool"

    @property
    def stream(self) -> Path:
        """The pieces, laid out as they will be in OUT."""
        return self.folder / "stream"


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


def check_bytes(out: Path, what_to_do: str) -> None:
    """Raise PrepError if a file of a finished stream is not what the manifest says, to the last byte.

    A stream of an earlier release, which has no manifest, is taken as it is.
    """
    if not (out / MANIFEST).is_file():
        if "given" in json.loads((out / STREAM_FILE).read_text(encoding="utf-8")):
            raise PrepError(f"{out / MANIFEST} is missing. {what_to_do}")
        return
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        outputs = {name: (told["bytes"], told["sha256"]) for name, told in manifest["outputs"].items()}
        _ = manifest["extensions"][:0]  # a list: --extend adds to it
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrepError(f"{out / MANIFEST} cannot be read ({error!r}). {what_to_do}") from error
    stream = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
    had = (stream["num_mega_batches"], len(stream.get("extensions", [])))
    for name, (num_bytes, digest) in outputs.items():
        if PIECE.fullmatch(name) and not vouched(name, *had):
            continue  # of an extension that was killed before stream.json told of it: it is no part of this stream
        path = out / name
        if not path.is_file():
            raise PrepError(f"{path} is missing. {what_to_do}")
        if path.stat().st_size != num_bytes or sha256_of(path) != digest:
            raise PrepError(f"{path} is not what alma-prep wrote: it was altered since. {what_to_do}")


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
def work_folder(out: Path, begun: Mapping, extend: bool) -> Iterator[WorkFolder]:
    """The WorkFolder of `out`: a new one, or one that a run with these settings (`begun`) left.

    It is gone when `finish` was called, or Unworkable raised; another error leaves it to be gone on with.

    Raises:
        PrepError: another alma-prep is at work in `out`, or one with other settings was, and did not finish.
    """
    was_there = out.is_dir()
    work = WorkFolder(out / WORK)
    lock = _hold(out, extend)
    try:
        goes_on = _check_begun(out, begun)
        _remove_strays(out, begun, goes_on)
        write_json(work.folder / BEGUN, begun)
        shutil.rmtree(work.stream, ignore_errors=True)
        work.spool.mkdir(exist_ok=True)
        work.stream.mkdir()
        yield work
    except Unworkable:
        remove_work(out)
        if not was_there and not any(out.iterdir()):
            out.rmdir()
        raise
    else:
        remove_work(out)
    finally:
        lock.close()


def remove_work(out: Path):
    """Delete the work folder of a run that has ended."""
    if not (out / WORK).is_dir():
        return
    # The settings last: what is left after a kill here is still known as ours, and of these settings.
    for path in sorted((out / WORK).iterdir(), key=lambda path: path.name in (BEGUN, LOCK)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):  # another run has just begun in it
        (out / WORK).rmdir()


def remove_finished_work(out: Path, num_extensions: int):
    """Delete what a run left that was killed after its stream was whole; not that of a run at work or unfinished."""
    if not (out / WORK).is_dir():
        return
    try:
        lock = _lock(out)
    except PrepError:
        return
    with lock:
        if _begun_before(out).get("extension", 0) <= num_extensions:
            remove_work(out)


def vouched(name: str, num_mega_batches: int, num_extensions: int) -> bool:
    """Whether a stream of so many mega-batches and extensions has a piece of this name."""
    batch, dedup = re.match(r"mega_batch_(\d+)/", name), re.match(r"dedup/(\d+)\.", name)
    if batch:
        return int(batch[1]) <= num_mega_batches
    return int(dedup[1]) <= num_extensions if dedup else True


def _begun_before(out: Path) -> dict:
    try:
        found = json.loads((out / WORK / BEGUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finish(out: Path, work: WorkFolder, stream: dict, manifest: dict):
    """Rename the pieces into `out`, then manifest.json, then stream.json: from this moment it is the stream.

    The manifest gets size and SHA-256 of every piece added under "outputs".
    """
    for path in sorted(work.stream.rglob("*")):
        if path.is_file():
            name = path.relative_to(work.stream).as_posix()
            manifest["outputs"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    for path in sorted(work.stream.rglob("*")):
        target = out / path.relative_to(work.stream)
        if path.is_dir():
            _sync_folder(path)
            target.mkdir(exist_ok=True)
        else:
            os.replace(path, target)
    for folder in {(out / name).parent for name in manifest["outputs"]}:
        _sync_folder(folder)
    _sync_folder(out)
    write_json(out / MANIFEST, manifest)
    file_in_work = work.folder / STREAM_FILE
    # A path whose bytes are not UTF-8 reaches us with lone surrogates: they are spelled as escapes.
    with open(file_in_work, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(stream, file, indent=1, ensure_ascii=False)
        file.write("\n")
        sync(file)
    os.replace(file_in_work, out / STREAM_FILE)
    _sync_folder(out)


def _check_begun(out: Path, begun: Mapping) -> bool:
    """Whether an unfinished run of these settings is to be gone on with. Raise PrepError if it has others, by name."""
    before = _begun_before(out)
    if before.get("extension", 0) < begun.get("extension", 0):
        before = {}  # of a run that was killed when all but its work folder was done
    if not before:
        for leftover in (out / WORK).iterdir():
            if leftover.name != LOCK:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return False
    changed = [
        f"{name} was {before.get(name)} and is now {now}"
        for name, now in json.loads(json.dumps(begun)).items()
        if before.get(name) != now
    ]
    if changed:
        raise PrepError(
            f"{out} was begun with other settings, and is not finished: {'; '.join(changed)}. Give the old values to "
            f"go on, choose another folder, or remove {out / WORK} to begin anew."
        )
    return True


def _hold(out: Path, extend: bool) -> TextIO:
    """Make the work folder and keep others out of it. The lock goes with the process, however it ends."""
    (out / WORK).mkdir(parents=True, exist_ok=True)
    lock = _lock(out)
    if (out / STREAM_FILE).exists() != extend:
        lock.close()
        raise PrepError(f"another alma-prep has just finished in {out}: run the same command again to check it.")
    return lock


def _lock(out: Path) -> TextIO:
    """Raises PrepError: another process has it."""
    with ExitStack() as undo:
        lock = undo.enter_context(open(out / WORK / LOCK, "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepError(f"another alma-prep is at work in {out}: wait for it, or choose another folder.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                raise
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


def _remove_strays(out: Path, begun: Mapping, goes_on: bool):
    """Delete the pieces beside the work of a run that was killed while they were renamed: they are made again.

    In a stream that is extended these are the pieces that its stream.json does not have, and only if an extension was
    under way: what else lies there is not ours, and stays.

    Raises:
        PrepError: a file lies where a piece of the extension is to be written.
    """
    names = list(filter(PIECE.fullmatch, _files_beside_work(out)))
    if "extension" in begun:
        stream = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
        count = stream["num_mega_batches"]
        names = [name for name in names if not vouched(name, count, begun["extension"] - 1)]
        if names and not goes_on:
            raise PrepError(
                f"{out} holds files not of its stream, where an extension would write: {', '.join(names[:5])}. "
                "Nothing was changed. Move them away."
            )
    for name in names:
        (out / name).unlink()
        if "/" in name and not any((out / name).parent.iterdir()):
            (out / name).parent.rmdir()


def _sync_folder(path: Path):
    if not path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

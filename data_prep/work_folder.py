"""The work folder OUT/.alma-prep, in which a stream is made before it becomes whole in one moment.

A killed run leaves it to the next run, which continues there. When all shards are whole, they are renamed into OUT,
stream.json last.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from data_prep.errors import PrepError, Unworkable
from data_prep.interrupts import interrupts_delayed
from data_prep.stream_folder import MANIFEST, SHARD_NAME, WORK, belongs_to_stream, files_beside_work
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, sha256_of, sync, sync_folder, write_json, write_whole
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.stream_folder import STREAM_FILE

SETTINGS = "settings.json"
_LEASE = "lease.json"
_LEASE_TEMPORARIES = ".lease."
"""What the names of other files of a lease begin with: `Lease` writes its file aside and claims stale ones."""


class WorkFolder(NamedTuple):
    """Where a stream is made before it is whole."""

    folder: Path
    """The folder that holds everything else, and is removed in the end."""

    @property
    def spool(self) -> Path:
        """The folder of the text of all documents."""
        return self.folder / "spool"

    @property
    def stream(self) -> Path:
        """The folder of finished shards, laid out as they will be in OUT."""
        return self.folder / "stream"


@contextmanager
def work_folder(out: Path, settings: Mapping, extend: bool) -> Iterator[WorkFolder]:
    """Hold the work folder of `out`: a new one, or one that a run with the same settings left unfinished.

    The folder is removed if the block ends without an error or with Unworkable. After any other error it stays, so
    that the next run continues there.

    Args:
        out: the stream folder.
        settings: the settings that an unfinished run must have had to be continued.
        extend: True if the stream in `out` is extended.

    Raises:
        PrepError: another alma-prep works in `out`, or a run with other settings did not finish there.
    """
    out_existed = out.is_dir()
    work = WorkFolder(out / WORK)
    try:
        with _held(out):
            if (out / STREAM_FILE).exists() != extend:
                raise PrepError(
                    f"another alma-prep has just finished in {out}. Run the same command again to check it."
                )
            resumes = _can_resume(out, settings)
            _remove_strays(out, settings, resumes)
            write_json(work.folder / SETTINGS, settings)
            shutil.rmtree(work.stream, ignore_errors=True)
            work.spool.mkdir(exist_ok=True)
            work.stream.mkdir()
            try:
                yield work
            except Unworkable:
                _empty(work.folder)
                raise
            _empty(work.folder)
    except Unworkable:
        if not out_existed:
            with suppress(OSError):  # not empty: another run has just begun in it
                out.rmdir()
        raise


@contextmanager
def full_disk_reported(out: Path) -> Iterator[None]:
    """Turn the error of a full disk into a PrepError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PrepError(
            f"no space left on the disk of {out}. Finished tasks were kept in {out / WORK}: free space (the text is "
            "copied once, and its tokens take about as much again) and run the same command."
        ) from error


def publish(out: Path, work: WorkFolder, stream: dict, manifest: dict) -> None:
    """Rename the shards into `out`, then manifest.json, then stream.json: from this moment `out` is the stream.

    Args:
        out: the stream folder.
        work: its work folder.
        stream: the content of stream.json.
        manifest: the content of manifest.json. The size and the SHA-256 of every shard are added to its "outputs".
    """
    shards = sorted(path for path in work.stream.rglob("*") if path.is_file())
    for path in shards:
        name = path.relative_to(work.stream).as_posix()
        manifest["outputs"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    sync(work.stream)
    for path in shards:
        target = out / path.relative_to(work.stream)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    for folder in {(out / name).parent for name in manifest["outputs"]}:
        if folder.is_dir():
            sync_folder(folder)
    sync_folder(out)
    # These two are made in the work folder, too: a kill must not leave a temporary file beside the stream.
    write_json(work.folder / MANIFEST, manifest)
    text = json.dumps(stream, indent=1, ensure_ascii=False) + "\n"
    # A path whose bytes are not UTF-8 arrives with lone surrogates: they are written as escapes.
    write_whole(work.folder / STREAM_FILE, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    for name in (MANIFEST, STREAM_FILE):
        os.replace(work.folder / name, out / name)
        sync_folder(out)


def remove_finished_work(out: Path, num_extensions: int) -> None:
    """Remove the work folder of a run that was killed after its stream was whole.

    The folder of a run that is still at work, or of an unfinished extension, stays.

    Args:
        out: the stream folder.
        num_extensions: how many extensions the stream has.
    """
    if not (out / WORK).is_dir():
        return
    with suppress(PrepError), _held(out):  # PrepError: another alma-prep is at work there
        if _previous_settings(out).get("extension", 0) <= num_extensions:
            _empty(out / WORK)


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold the lease of the work folder of `out`, which is made if necessary. An empty folder is removed at the end.

    Raises:
        PrepError: another alma-prep holds it.
    """
    lease = Lease(out / WORK)
    with ExitStack() as at_end:
        try:
            with interrupts_delayed():  # also for the thread of the lease
                lease.__enter__()
                at_end.callback(_release, lease)
        except RunError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise PrepError(
                f"another alma-prep is at work in {out}{_holder(out)}. Wait for it, stop it, or choose another folder."
            ) from error
        yield


def _release(lease: Lease) -> None:
    """Give a lease back, and remove its folder if it is empty."""
    with interrupts_delayed():
        lease.__exit__(None, None, None)
        _remove_if_empty(lease.path.parent)


def _holder(out: Path) -> str:
    """Return who holds the work folder, as part of a sentence; nothing if the lease was given back meanwhile."""
    try:
        holder = read_json(out / WORK / _LEASE)
        return f": process {holder['pid']} on {holder['host']}"
    except (OSError, RunError, KeyError, TypeError):
        return ""


def _empty(folder: Path) -> None:
    """Remove everything in a work folder but the lease that holds it."""
    # The settings last: after a kill in between, the rest is still known as the work of a run with these settings.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == SETTINGS):
        if path.name != _LEASE and not path.name.startswith(_LEASE_TEMPORARIES):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    """Remove a work folder that holds nothing but what killed leases left."""
    with suppress(OSError):  # another run has just begun in it, or ended there
        left = list(folder.iterdir())
        if all(path.name.startswith(_LEASE_TEMPORARIES) for path in left):
            for path in left:
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()


def _previous_settings(out: Path) -> dict:
    """Return the settings of the run that left the work folder; empty if there was none, or it had hardly begun."""
    try:
        found = json.loads((out / WORK / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _can_resume(out: Path, settings: Mapping) -> bool:
    """Return True if an unfinished run had these settings. If there was none, empty the work folder.

    Raises:
        PrepError: an unfinished run had other settings; the message names them.
    """
    previous = _previous_settings(out)
    if previous.get("extension", 0) < settings.get("extension", 0):
        previous = {}  # that run finished its stream, and was killed before it removed the work folder
    if not previous:
        _empty(out / WORK)
        return False
    changed = [
        f"{name} was {previous.get(name)} and is now {value}"
        for name, value in json.loads(json.dumps(settings)).items()
        if previous.get(name) != value
    ]
    if changed:
        raise PrepError(
            f"{out} was begun with other settings, and is not finished: {'; '.join(changed)}. Give the old values to "
            f"continue, choose another folder, or remove {out / WORK} to begin again."
        )
    return True


def _remove_strays(out: Path, settings: Mapping, resumes: bool) -> None:
    """Remove the shards beside the work folder that a run left when it was killed while it renamed them.

    They are made again. In a stream that is extended these are the shards that do not belong to the stream, and only
    if an extension was interrupted: other files belong to somebody else and stay.

    Args:
        out: the stream folder.
        settings: the settings of this run; with "extension", the number of the extension from 1.
        resumes: True if this run continues an unfinished one.

    Raises:
        PrepError: a file that is not ours has the name of a shard of the extension.
    """
    names = list(filter(SHARD_NAME.fullmatch, files_beside_work(out)))
    if "extension" in settings:
        num_mega_batches = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))["num_mega_batches"]
        names = [name for name in names if not belongs_to_stream(name, num_mega_batches, settings["extension"] - 1)]
        if names and not resumes:
            raise PrepError(
                f"{out} holds files not of its stream, where an extension would write: {', '.join(names[:5])}. "
                "Nothing was changed. Move them away."
            )
    for name in names:
        (out / name).unlink()
        if "/" in name and not any((out / name).parent.iterdir()):
            (out / name).parent.rmdir()

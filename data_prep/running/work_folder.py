"""The work folder OUT/.alma-prep, in which alma-prep makes a stream or an extension.

If alma-prep is killed, the work folder is kept, and the next call of alma-prep continues there. When all shards (the
files of the stream) are complete, they are moved into OUT by renaming. stream.json is moved last. Without stream.json,
OUT does not count as a stream.
"""

import errno
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.errors import NothingNew, PrepError, Unworkable, is_full_disk
from data_prep.running.progress import Bar, interrupts_delayed, note
from data_prep.running.stream_folder import (
    MANIFEST,
    SHARD_NAME,
    WORK,
    Recorded,
    belongs_to_stream,
    check_free,
    files_beside_work,
    part_of_stream,
    read_manifest,
)
from data_prep.running.tasks import Executor, Step, Task, digests_of
from data_prep.sources import Source
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, remove, sync, sync_folder, write_json, written_aside
from fairseq_alma.core.lease import Lease, holder_of
from fairseq_alma.core.store import link_or_copy
from fairseq_alma.core.stream_description import STREAM_FILE

SETTINGS = "settings.json"
_UNWORKABLE = "unworkable"
"""Key in the settings file: the error message of a call whose settings did not fit the text."""
_OF_READING = ("spool", "kept")
"""Names of the folders in the work folder with the results of reading tasks."""
_LEASE = "lease.json"
_LEASE_TEMPORARIES = ".lease."
"""Prefix of the names of files and folders that `Lease` (a lock) creates in addition to the lease file: the places
where holders write their files, empty files whose times show the clock of the file system, and the folder .lease.claim,
which exists while a process removes the lease of an ended process."""


@dataclass(frozen=True)
class WorkFolder:
    """The paths of a work folder and its subfolders, and what runs the tasks in it."""

    folder: Path
    """The work folder itself. It is removed when the stream is finished."""
    place: Path | None = None
    """Where the holder of the lease writes (see `fairseq_alma.core.fence`); None: there is no lease."""
    executor: Executor | None = None
    """Runs the tasks, on this machine or on a Slurm cluster."""
    digests: dict[str, Mapping] = field(default_factory=dict)
    """{"bytes": .., "sha256": ..} of the shards that tasks have written, by the path relative to the stream folder."""
    whole: Path | None = None
    """For a part of the work (see `within`): the work folder itself."""

    @property
    def spool(self) -> Path:
        """The spool folder, which contains the text of all documents in plain text files."""
        return (self.whole or self.folder) / "spool"

    @property
    def kept(self) -> Path:
        """The store (`core.store`) with the results of reading tasks of earlier calls, which had other tasks."""
        return self.folder / "kept"

    @property
    def stream(self) -> Path:
        """The folder for finished shards. A shard at the relative path P in this folder is later moved to OUT/P, where
        OUT is the stream folder."""
        return (self.whole or self.folder) / "stream"

    def run(
        self, name: str, tasks: Sequence[Task], title: str = "", unit: str = "tasks",
        weights: Sequence[int] | None = None, threads: int = 1,
    ) -> Step:  # fmt: skip
        """Do tasks in the subfolder `name`, as far as no earlier call has done them, and return the finished step.

        For the other arguments and the errors, see `finish`. Without a title, there is no progress bar.
        """
        step = Step(self.folder / name, tasks)
        self.finish(step, title, unit, weights, threads)
        return step

    def finish(
        self, step: Step, title: str, unit: str, weights: Sequence[int] | Mapping[int, int] | None = None,
        threads: int = 1, on_done: Callable[[int], None] = lambda number: None, numbers: Sequence[int] | None = None,
        finished: Mapping[int, dict] | None = None,
    ) -> list[dict]:  # fmt: skip
        """Run a step with a progress bar, and return the results of its tasks.

        Args:
            step: the step.
            title: what the progress bar says.
            unit: what the progress bar counts.
            weights: how much of it each task does; None: 1.
            threads, on_done, numbers, finished: see `Step.run`.

        Raises:
            PrepError: if a worker died, hung, or left no done mark.
        """
        assert self.executor is not None
        weights = [1] * len(step.tasks) if weights is None else weights
        total = sum(weights.values() if isinstance(weights, Mapping) else weights)
        with Bar(title, total, unit) if title else nullcontext() as bar:

            def advance(number: int) -> None:
                on_done(number)
                if bar:
                    bar.advance(weights[number])

            return step.run(self.executor, advance, threads, numbers, finished)

    def within(self, name: str) -> "WorkFolder":
        """Return the subfolder `name` as a work folder, for the steps of a part of the work. It is created."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return replace(self, folder=self.folder / name, whole=self.whole or self.folder)

    def add_shard(self, name: str, path: Path, digest: Mapping) -> None:
        """Add a task's output file to the stream under a name, which is its path relative to the stream folder.

        The file stays under its first path, too, because the next call of alma-prep checks it if this call is killed.
        So the shard is a hard link, or a copy if the file system has no hard links. See `digests` for `digest`.
        """
        with written_aside(self.stream / name, durable=False) as temporary:
            link_or_copy(path, temporary)
        self.digests[name] = digest


@contextmanager
def work_folder(
    out: Path, settings: Mapping, reading: Collection[str], base: Mapping | None = None
) -> Iterator[WorkFolder]:
    """Lock and yield the work folder of `out`, in which alma-prep makes a stream or adds mega-batches to it.

    The work folder is new, unless an earlier call of alma-prep was interrupted or failed. At the end of the `with`
    statement, it is removed if there was no error, or a NothingNew error, or an Unworkable error before anything was
    read. Otherwise it is kept, so that the next call of alma-prep can continue.

    The next call must give the same values of the settings in `reading`, so that the text that was read is not lost by
    mistake. Other settings can change, because a task is done again if a setting on which it depends has changed. All
    settings can change for an extension, and after an Unworkable error, which says that the settings do not fit the
    text.

    Args:
        out: the stream folder.
        settings: the settings of this call of alma-prep, the versions of the libraries, and a digest of the code.
        reading: the names of the settings on which reading depends.
        base: the content of stream.json of the stream in `out` that is extended; None: make a new stream.

    Raises:
        PrepError: if another alma-prep is running in `out` or has just finished there, or if an interrupted call of
            alma-prep that makes a new stream from other text left a work folder there.
    """
    with _new_folder_removed_after(Unworkable, out), lease_held(out) as place:
        work = WorkFolder(out / WORK, place)
        _check_unchanged(out, base)
        resumes = _can_resume(out, settings, reading)
        _remove_leftover_shards(out, settings, resumes)
        write_json(work.folder / SETTINGS, settings)
        remove(work.stream)
        work.spool.mkdir(exist_ok=True)
        work.stream.mkdir()
        try:
            yield work
        except (NothingNew, Unworkable) as error:
            if isinstance(error, NothingNew) or not _has_read(work):
                _empty(work.folder)
                raise
            write_json(work.folder / SETTINGS, {**settings, _UNWORKABLE: str(error)})
            raise Unworkable(
                f"{error} The text that was read is kept in {work.folder}: the next call for {out} uses it again, "
                "also with other settings. To give up, remove this folder."
            ) from error
        _empty(work.folder)


@contextmanager
def unfinished_copy(out: Path) -> Iterator[WorkFolder]:
    """Lock and yield the work folder of `out`, in which a copy of a stream is made. The next call begins again.

    Raises:
        PrepError: if another alma-prep is running in `out`, or if `out` contains other files.
    """
    check_free(out)  # before there is a work folder, with which shards count as those of a killed call
    if _previous_settings(out):
        raise PrepError(f"{out} contains an unfinished stream: choose another folder, or remove it.")
    with _new_folder_removed_after(PrepError, out), lease_held(out) as place:
        work = WorkFolder(out / WORK, place)
        _empty(work.folder)  # what a killed call has left
        _remove_leftover_shards(out, {}, resumes=True)
        work.stream.mkdir()
        # After a kill or an error while shards are moved, this file keeps the work folder, which says that the
        # shards beside it are not somebody else's.
        (work.folder / "copy").touch()
        try:
            yield work
        except PrepError:  # nothing was moved
            _empty(work.folder)
            raise
        _empty(work.folder)


@contextmanager
def _new_folder_removed_after(error: type[PrepError], out: Path) -> Iterator[None]:
    """Context manager that, after such an error, removes `out` if it did not exist before and is empty."""
    existed = out.is_dir()
    try:
        yield
    except error:
        if not existed:
            # Ignore the error that rmdir raises if another alma-prep has just created files in the folder.
            with suppress(OSError):
                out.rmdir()
        raise


@contextmanager
def lease_held_if_writable(out: Path) -> Iterator[None]:
    """Like `lease_held`. If this user may not write into `out`, the folder is not locked."""
    with ExitStack() as at_end:
        try:
            at_end.enter_context(lease_held(out))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        yield


def _check_unchanged(out: Path, base: Mapping | None) -> None:
    """Check, with the lease, that no other alma-prep has finished a stream or an extension since this one looked."""
    try:
        found = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    if found == base:
        return
    does = "only checks the finished stream" if base is None else "extends the stream as it is now"
    raise PrepError(
        f"another alma-prep has just finished in {out}. Run the same command again: it {does}, and repeats no work."
    )


@contextmanager
def full_disk_reported(out: Path) -> Iterator[None]:
    """Context manager that turns a disk-full error into a PrepError that says what to do."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise PrepError(
            f"no space left on the disk of {out}. Finished tasks are stored in {out / WORK}. Free some space and run "
            "the same command again. alma-prep needs space for a copy of the text and for its tokens, which take about "
            "as much as the text."
        ) from error


def remove_finished_work(out: Path, num_extensions: int) -> None:
    """Remove the work folder that alma-prep left because it was killed just after it had finished the stream.

    The work folder is kept if another alma-prep is working in it, or if it contains an unfinished extension.
    `num_extensions` is the number of finished extensions.
    """
    if not (out / WORK).is_dir():
        return
    # If another alma-prep is running in `out`, `lease_held` raises PrepError, and nothing is removed.
    with suppress(PrepError), lease_held(out):
        # The settings of an extension contain its number, from 1.
        if _previous_settings(out).get("extension", 0) <= num_extensions:
            _empty(out / WORK)


@contextmanager
def lease_held(out: Path) -> Iterator[Path]:
    """Context manager that holds the lease (lock) of `out`'s work folder, which guards all files in `out`.

    It creates the work folder if the folder does not exist. At the end, it removes the work folder if it is empty. It
    yields the place where files are written before they are moved (see `fairseq_alma.core.fence`).
    """
    lease = Lease(out / WORK, guarded=out)
    with ExitStack() as at_end:
        try:
            lease.wait()
            # Delay Ctrl-C (SIGINT) until the lease is created and `_release` is registered. Otherwise, a Ctrl-C after
            # the creation would leave the lease in the folder. `lease.__enter__` also starts a thread. SIGINT is
            # blocked at this time, so the thread never receives SIGINT. If the thread received SIGINT, Python would
            # interrupt the main thread, even while the main thread delays SIGINT.
            with interrupts_delayed():
                lease.__enter__()
                at_end.callback(_release, lease)
        except RunError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            holder = holder_of(out / WORK)  # None if it has ended in the meantime
            named = f": process {holder.pid} on {holder.host}" if holder else ""
            raise PrepError(
                f"another alma-prep is running in {out}{named}. Wait for it, stop it, or choose another folder."
            ) from error
        assert lease.fence is not None
        try:
            yield lease.fence.place
        except FileNotFoundError as error:  # perhaps because another process has removed the place
            lease.fence.check(error)
            raise


def _release(lease: Lease) -> None:
    """Release the lease (lock) of a work folder, and remove the work folder if it is then empty."""
    with interrupts_delayed():
        lease.__exit__(None, None, None)
        _remove_if_empty(lease.path.parent)


def _empty(folder: Path) -> None:
    """Remove everything in a work folder except the lease files, because this process still holds the lease (lock)."""
    # Remove the settings file last. If this process is killed before it has removed all other files, the next call of
    # alma-prep can still read which settings the remaining files belong to.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == SETTINGS):
        if path.name != _LEASE and not path.name.startswith(_LEASE_TEMPORARIES):
            remove(path)


def _remove_if_empty(folder: Path) -> None:
    """Remove a work folder if it is empty or contains only temporary lease files of killed processes."""
    # Ignore errors, because another alma-prep may create or remove files in this folder at the same time.
    with suppress(OSError):
        left = list(folder.iterdir())
        if all(path.name.startswith(_LEASE_TEMPORARIES) for path in left):
            for path in left:
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()


def _previous_settings(out: Path) -> dict:
    """Return the settings that are stored in the work folder, or {} if there are no readable settings."""
    try:
        return dict(read_json(out / WORK / SETTINGS, Recorded))
    except (OSError, RunError):
        return {}


def _has_read(work: WorkFolder) -> bool:
    """Return True if a work folder contains text that this call or an earlier call has read."""
    return any(work.spool.glob("*.done")) or any(work.kept.glob("*"))


def _can_resume(out: Path, settings: Mapping, reading: Collection[str]) -> bool:
    """Return True if the work folder contains the work of an earlier call of alma-prep that was interrupted.

    If the work folder contains nothing that this call can use, remove all files except the lease files. Return False if
    the earlier call was not interrupted, but ended because its settings did not fit the text: then it has not begun to
    move shards into `out`.
    """
    previous = _previous_settings(out)
    # alma-prep extends only a finished stream. So work on the stream or on an earlier extension is finished, and
    # alma-prep was killed just before it removed the work folder.
    if previous.get("extension", 0) < settings.get("extension", 0):
        previous = {}
    if not previous:
        _empty(out / WORK)
        return False
    changed = {
        name: f"{name} was {previous.get(name)} and is now {value}"
        for name, value in json.loads(json.dumps(settings)).items()
        if previous.get(name) != value
    }
    is_other_code = changed.pop("code", None) is not None
    was_interrupted = _UNWORKABLE not in previous
    lost = [text for name, text in changed.items() if name in (*reading, "versions", "extension")]
    if "sources" in changed and set(_names(previous.get("sources", []))) <= set(_names(settings["sources"])):
        lost.remove(changed["sources"])  # other shares, or more sources: nothing that was read is lost
    begins_again = bool(lost) and was_interrupted
    if begins_again and "extension" not in settings:
        raise PrepError(
            f"{out} contains an unfinished stream with other settings: {'; '.join(lost)}. Use the old values to "
            f"continue it, choose another folder, or remove {out / WORK} to start again."
        )
    if changed or is_other_code:
        # A step may now have fewer tasks. The heartbeat of a task that no longer exists would look like a hung worker.
        for path in (out / WORK).rglob("*.alive"):
            path.unlink(missing_ok=True)
    if changed:
        does = (
            f"beginning the unfinished extension of {out} again"
            if begins_again
            else f"continuing the work in {out / WORK}"
        )
        note(f"{does}. Changed settings: {'; '.join(changed.values())}")
    if is_other_code:
        note(
            f"alma-prep has changed since the work in {out / WORK} was begun. Text that was read is used if the code "
            "that reads it is the same. All other steps are repeated"
        )
    if "versions" in changed or is_other_code:
        # Only reading tasks contain a digest of libraries and code, so results of other tasks are not used. `remove`
        # renames a folder first, because a job that still runs could finish a task while it is removed.
        for path in list(out.joinpath(WORK).iterdir()):
            if path.is_dir() and path.name not in _OF_READING and not path.name.startswith(_LEASE_TEMPORARIES):
                remove(path)
    return was_interrupted


def _names(sources: Sequence[str]) -> list[str]:
    """Return the names, without shares, of sources that are written as KIND:PATH@SHARE."""
    return [Source.parse(source).name for source in sources]


def _remove_leftover_shards(out: Path, settings: Mapping, resumes: bool) -> None:
    """Remove shards in `out` that alma-prep left because it was killed while it moved shards into `out`.

    For an extension, the shards of the existing stream are kept. A file at a path where the extension will write a
    shard is removed if `resumes` is True, because the earlier call of alma-prep wrote the file. If `resumes` is False,
    the file may belong to the user, and an error is raised.
    """
    found = files_beside_work(out)
    names = list(filter(SHARD_NAME.fullmatch, found))
    if "extension" not in settings:
        names += [name for name in found if (out / name).is_dir()]  # folders that are empty
    else:
        stream = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
        names = [name for name in names if not belongs_to_stream(name, stream)]
        if names and not resumes:
            raise PrepError(
                f"{out} contains files that do not belong to its stream: {', '.join(names[:5])}. Extending the stream "
                "would overwrite them, so nothing was changed. Move these files away."
            )
    for name in names:
        _remove_shard(out, name)


def _remove_shard(out: Path, name: str) -> None:
    """Remove a shard, and the folders that become empty."""
    remove(out / name)
    folder = (out / name).parent
    while folder != out and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def take_back(out: Path, base: Mapping, stream: Mapping) -> None:
    """Replace the stream with the stream.json `base` by an earlier one with the stream.json `stream`.

    The earlier stream.json is written first. From then on, the shards of later mega-batches do not belong to the
    stream, and are removed, as is the work folder of an unfinished extension. A call that was killed in between is
    continued by a call with `base` equal to `stream`.

    Raises:
        PrepError: if another alma-prep is running in `out` or has just finished there.
    """
    with lease_held(out):
        _check_unchanged(out, base)
        if stream != base:
            write_json(out / STREAM_FILE, stream, indent=1)
        for name in filter(SHARD_NAME.fullmatch, files_beside_work(out)):
            if not belongs_to_stream(name, stream):
                _remove_shard(out, name)
        write_json(out / MANIFEST, part_of_stream(read_manifest(out), stream))
        _empty(out / WORK)


def unfinished_extension(out: Path, num_extensions: int) -> bool:
    """Return True if a call that adds to a stream with this number of extensions was interrupted or has failed."""
    return _previous_settings(out).get("extension", 0) > num_extensions


def publish(out: Path, work: WorkFolder, stream: dict, manifest: dict) -> None:
    """Move the finished shards from the work folder into `out`, then manifest.json, and then stream.json.

    stream.json is moved last, because `out` counts as a finished stream (or extension) as soon as it contains the new
    stream.json. If this process is killed earlier, the next call of alma-prep continues. `stream` is the content of
    stream.json, and `manifest` that of manifest.json, to whose entry "outputs" the shards are added.
    """
    shards = {
        path.relative_to(work.stream).as_posix(): path for path in sorted(work.stream.rglob("*")) if path.is_file()
    }
    others = {name: path for name, path in shards.items() if name not in work.digests}
    for (name, path), sha256 in zip(others.items(), digests_of([*others.values()]), strict=True):
        work.digests[name] = {"bytes": path.stat().st_size, "sha256": sha256}
    manifest["outputs"] |= {name: work.digests[name] for name in shards}
    sync(work.stream)
    # Move the folder to the place of this process first. If the lease was lost, this fails, or the moves below do.
    source = (work.place or work.folder) / "publish"
    os.replace(work.stream, source)
    for name in shards:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, out / name)
    for folder in {(out / name).parent for name in manifest["outputs"]}:
        if folder.is_dir():
            sync_folder(folder)
    sync_folder(out)
    write_json(out / MANIFEST, manifest)
    write_json(out / STREAM_FILE, stream, indent=1)

"""The entry: `prepare` makes a stream folder, or finds it made. `alma-prep` calls it."""

import errno
from pathlib import Path

from data_prep import partition
from data_prep.errors import PrepError
from data_prep.progress import note
from data_prep.settings import PrepSettings
from data_prep.sources import Source, SourceFile, fingerprint, list_files
from data_prep.steps import make_pieces
from data_prep.stream_folder import check_free, finish, read_stream, remove_work, work_folder
from data_prep.workers import Workers


def prepare(settings: PrepSettings) -> dict:
    """Make the stream folder, or find it made. Returns the content of its stream.json.

    Raises PrepError, with a message for the person at the keyboard, when it cannot be made. Workers are started
    with multiprocessing's `spawn`: a script that calls this needs the usual `if __name__ == "__main__":`.
    """
    files = {source: list_files(source) for source in settings.sources}
    _check_out_is_not_a_source(settings)
    finished = read_stream(settings.out)
    if finished is not None:
        stream = dict(finished.description)
        _check_same(settings, files, stream)
        remove_work(settings.out)  # there only if the run was killed in its last moment
        note(f"{settings.out} is whole and was made with these settings: nothing to do")
        return stream
    check_free(settings.out)
    try:
        with work_folder(settings.out) as work, Workers(settings.workers) as workers:
            stream = make_pieces(settings, files, work, workers)
            finish(settings.out, work, stream)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PrepError(
            f"no space left on the disk of {settings.out}. Nothing half-written was kept. Free some space (the text "
            "is copied once, and its tokens take about half as much again) and run the same command."
        ) from error
    return stream


def _check_out_is_not_a_source(settings: PrepSettings):
    for source in settings.sources:
        if source.path and settings.out.resolve().is_relative_to(Path(source.path).resolve()):
            raise PrepError(
                f"the stream folder {settings.out} lies inside the source {source}, whose next reading "
                "would find it. Choose a folder outside."
            )


def _check_same(settings: PrepSettings, files: dict[Source, list[SourceFile]], stream: dict):
    """Raise PrepError if the finished stream was made with other settings or from other files."""
    before = stream["settings"]
    total_words = sum(source["words"] for source in stream["sources"])
    valid_words = settings.valid_words or partition.default_valid_words(total_words)
    mega_batch_words = (total_words - before["valid_words"]) // (before["num_mega_batches"] + 1)
    passage_words = settings.passage_words or partition.default_passage_words(mega_batch_words)
    now = settings.recorded(valid_words, passage_words)
    changed = [f"{name} was {before.get(name)} and is now {now[name]}" for name in now if before.get(name) != now[name]]
    what_to_do = f"Give the old value, choose another folder, or remove {settings.out} to make it anew."
    if changed:
        raise PrepError(f"{settings.out} was made with other settings: {'; '.join(changed)}. {what_to_do}")
    recorded = {Source(source["kind"], source["path"]): source["fingerprint"] for source in stream["sources"]}
    for source in settings.sources:
        if recorded[source] != fingerprint(files[source]):
            raise PrepError(
                f"{settings.out} was made from {source}, whose files have changed since (names, sizes or times). "
                f"Restore them, choose another folder, or remove {settings.out} to make it anew."
            )

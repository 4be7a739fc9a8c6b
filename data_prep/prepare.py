"""Make a new stream, add mega-batches to a stream, or check a finished stream.

The command `alma-prep` calls the function `prepare`.
"""

import sys
from collections.abc import Mapping, Sequence
from multiprocessing import current_process

from data_prep.checks import (
    check_benchmarks,
    check_endings,
    check_filters,
    check_installed,
    check_out_is_not_a_source,
    check_same_stream,
    check_sizes,
)
from data_prep.errors import NothingNew
from data_prep.extend import extend, with_values_of_stream
from data_prep.pipeline import build_stream
from data_prep.reading.provenance import code_digest, inputs, versions
from data_prep.running.executors import open_executor
from data_prep.running.progress import note
from data_prep.running.stream_folder import check_bytes, check_free, read_stream
from data_prep.running.work_folder import full_disk_reported, publish, remove_finished_work, work_folder
from data_prep.settings import PrepSettings
from data_prep.sources import Files, Source, SourceFile, list_files
from data_prep.tokenization.given import given_tokenizer
from data_prep.tokenization.tokenizers import TOKENIZERS


def prepare(settings: PrepSettings) -> dict:
    """Make a new stream, add mega-batches to a stream, or check a finished stream.

    If the setting `extend` is True, mega-batches are added to the stream in the folder `settings.out`. Otherwise, a
    finished stream in this folder is only checked: it must be undamaged and must have been made with these settings.
    If the folder contains no finished stream, a new stream is made.

    A script must call this function under `if __name__ == "__main__":`. Otherwise each worker process would call this
    function again, because every worker process imports the script (multiprocessing's start method `spawn`).

    Returns:
        The content of stream.json.

    Raises:
        PrepError: if the stream cannot be made; the message says what to do.
    """
    if getattr(current_process(), "_inheriting", False):
        sys.exit("alma-prep: the script calls prepare() when a worker process imports it")
    files: Files = {source: list_files(source) for source in settings.sources}
    if settings.partition != "as-given":
        # Sort the sources, because the bytes of the stream must not depend on the order in which the sources are given.
        # If partition is "as-given", keep the given order, because it is the order of the mega-batches.
        files = dict(sorted(files.items(), key=lambda item: _content_key(*item)))
    check_out_is_not_a_source(settings, files)
    finished = read_stream(settings.out)
    if settings.extend and finished is not None:
        settings = with_values_of_stream(settings, finished.description)
    check_filters(settings)
    check_benchmarks(settings)
    check_endings(settings)
    check_installed(settings, files)
    if settings.extend:
        try:
            return extend(settings, files, finished)
        except NothingNew as error:
            assert finished is not None
            note(f"{settings.out}: {error}, so there is nothing to add")
            return dict(finished.description)
    if finished is not None:
        return _check_finished(settings, files, finished.description)
    return _make_new(settings, files)


def _make_new(settings: PrepSettings, files: Files) -> dict:
    """Make a new stream, or continue to make one if alma-prep was interrupted. Return the content of stream.json."""
    check_free(settings.out)
    check_sizes(settings, files)
    if settings.tokenizer not in TOKENIZERS:
        # Read the tokenizer now, so that an unreadable file raises an error at the start and not after hours of work.
        given_tokenizer(settings.tokenizer)
    identity = settings.identity()
    recorded = identity | {"versions": versions(), "code": code_digest()}
    with (
        full_disk_reported(settings.out),
        work_folder(settings.out, recorded, settings.reading_settings()) as work,
    ):
        with open_executor(settings) as executor:
            stream = build_stream(settings, files, work._replace(executor=executor))
            work.add_digests()
        stream["given"] = identity
        publish(settings.out, work, stream, inputs(settings, files) | {"outputs": {}, "extensions": []})
    return stream


def _check_finished(settings: PrepSettings, files: Files, stream: Mapping) -> dict:
    """Check that a finished stream is undamaged and was made with these settings. Return the content of stream.json.

    Args:
        settings: the settings of this call of alma-prep.
        files: the files of each source.
        stream: the content of stream.json.

    Raises:
        PrepError: if the stream was made with other settings or from other files, or is damaged.
    """
    check_same_stream(settings, files, stream)
    check_bytes(settings.out, f"Restore it, or remove {settings.out} and run the same command again.")
    remove_finished_work(settings.out, len(stream.get("extensions", [])))
    note(f"{settings.out} is complete and was made with these settings: nothing to do")
    return dict(stream)


def _content_key(source: Source, files: Sequence[SourceFile]) -> tuple:
    """Return a tuple by which `prepare` sorts the sources.

    The name of the source is the last element of the tuple, so the name matters only if all other elements are equal.
    This is intended, because renaming a source should not change the stream. The order of the sources can change the
    stream: if two sources contain the same text, the text is kept only in the first source. The second source then has
    fewer words left to provide its share (its fraction of the stream's words).
    """
    return (source.kind, source.share or 0.0, sum(file.num_bytes for file in files), len(files), source.name)

"""Make a new stream, add mega-batches to a stream, or check a finished stream.

The command `alma-prep` calls the function `prepare`.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from data_prep.checks import (
    check_endings,
    check_filters,
    check_installed,
    check_known_settings,
    check_out_is_not_a_source,
    check_same_stream,
    check_sizes,
)
from data_prep.copies.deduplication import load_keys
from data_prep.dividing.chronological import is_causal
from data_prep.errors import NothingNew, PrepError
from data_prep.pipeline import BaseStream, build_stream
from data_prep.reading.provenance import code_digest, inputs, versions
from data_prep.running.progress import note
from data_prep.running.slurm import open_executor
from data_prep.running.stream_folder import (
    check_bytes,
    check_free,
    num_dedup_files,
    part_of_stream,
    read_manifest,
    read_stream,
)
from data_prep.running.work_folder import (
    WorkFolder,
    full_disk_reported,
    publish,
    remove_finished_work,
    take_back,
    unfinished_extension,
    work_folder,
)
from data_prep.settings import PrepSettings
from data_prep.settings.options import options_of
from data_prep.sources import Files, Source, SourceFile, fingerprint, list_files
from data_prep.tokenization.given import given_tokenizer
from data_prep.tokenization.tokenizers import TOKENIZERS
from data_prep.unusual import unusual
from fairseq_alma.core.stream_folder import StreamFolder


def with_values_of_stream(settings: PrepSettings, stream: Mapping) -> PrepSettings:
    """Return the settings of an extension, in which the settings that the user has not given are those of the stream.

    This concerns only the settings on which it depends which text can be in the stream, such as the language and
    --decontaminate (`Option.is_inherited`). So the added text is of the same sort as the text of the stream. The values
    are those with which the stream was first made. `stream` is the content of stream.json.
    """
    given = tuple(name for name in options_of(settings) if settings.is_given(name))
    of_stream: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stream["settings"].items()
        if name in options_of(settings) and options_of(settings)[name].is_inherited and name not in given
    }
    if filters := of_stream.pop("filters", ""):
        raise PrepError(
            f"the stream was made with --filter {filters!r}. A stream may be somebody else's, so code that it names "
            f"is not run: give this option again if you trust it, or --filter '' to add text without it."
        )
    if "decontaminate" in given and settings.decontaminate is None:  # --decontaminate 0
        of_stream["decontaminate_against"] = ()
    changed = {name: value for name, value in of_stream.items() if value != getattr(settings, name)}
    if changed:
        note(f"settings taken from the stream: {', '.join(f'{name} {value}' for name, value in changed.items())}")
    try:
        settings = replace(settings, **of_stream, given=given)
    except ValueError as error:  # for example, the stream was made by a release with other languages
        raise PrepError(f"the settings of the stream cannot be used: {error}. Give other values.") from error
    if settings.period is not None and "periods" not in stream:
        raise PrepError("this stream has no periods, because it is not chronological: omit --period.")
    if settings.late != "error" and "periods" not in stream:
        raise PrepError("in this stream no text is late, because it is not chronological: omit --late.")
    if "periods" in stream and settings.duplicates == "keep":
        raise PrepError(
            "this stream holds out whole documents, so it cannot be extended with --duplicates "
            "keep, which could add copies of them to a mega-batch: omit --duplicates."
        )
    return settings


def extend(settings: PrepSettings, files: Files, finished: StreamFolder | None) -> dict:
    """Add mega-batches to a stream. The files of existing splits do not change.

    The mega-batches that one call of alma-prep --extend adds are called an extension. If an earlier extension was made
    from the same input files, nothing is added, and the earlier extension is only checked.

    Return the content of stream.json. `finished` is the stream in `settings.out`, or None if there is none.

    Raises:
        PrepError: if the stream is missing or damaged, if the files were added before with other settings, or if
            another call of alma-prep has just extended the stream.
    """
    out = settings.out
    if finished is None:
        raise PrepError(f"there is no stream in {out} to extend: run the command without --extend to make one.")
    stream = dict(finished.description)
    fingerprints = {source.name: fingerprint(found) for source, found in files.items()}
    # Before reading, so that stream.json records what was used, also if a file is changed after it was used.
    digests = settings.digests()
    for extension in stream.get("extensions", []):
        if extension["fingerprints"] == fingerprints:
            _check_finished_extension(settings, stream, extension, digests)
            if extension is stream["extensions"][-1]:
                _warn_if_unusual(out, stream)
            return stream
    name = "sha256 of decontaminate_against"
    is_changed = name in digests and stream["settings"].get(name, digests[name]) != digests[name]
    if is_changed and "decontaminate_against" not in settings.given:
        raise PrepError(
            "the files of --decontaminate-against, which is taken from the stream, have changed since it was made. "
            "Restore them, or give --decontaminate-against and --decontaminate to use the files as they are now."
        )
    check_bytes(out)
    check_sizes(settings, files)
    base = BaseStream(out, stream, *load_keys(out / "dedup", num_dedup_files(stream), settings.duplicates))
    with _work_folder(settings, base) as work:
        added = _build(settings, files, work, base)
        manifest = part_of_stream(read_manifest(out), stream)
        manifest["extensions"].append(inputs(settings, files))
        stream = _extended(settings, stream, added, fingerprints, digests)
        publish(out, work, stream, manifest)
    _warn_if_unusual(out, stream)
    return stream


def _warn_if_unusual(out: Path, stream: Mapping) -> None:
    """Print a warning if the mega-batches of the last extension differ from those before."""
    if found := unusual(out, stream):
        note(
            f"warning: the new text is unusual. {'; '.join(found)}. If it is wrong, "
            f"`alma-prep --drop-last {shlex.quote(str(out))}` takes it back"
        )


@contextmanager
def _work_folder(settings: PrepSettings, base: BaseStream | None = None) -> Iterator[WorkFolder]:
    """Lock and yield the work folder (see `work_folder`) for a new stream, or for an extension of `base`."""
    recorded = settings.identity() | {"versions": versions(), "code": code_digest()}
    recorded |= {"extension": base.num_extensions + 1} if base else {}
    place = (settings.out, recorded, settings.reading_settings(), base.description if base else None)
    with full_disk_reported(settings.out), work_folder(*place) as work:
        yield work


def _build(settings: PrepSettings, files: Files, work: WorkFolder, base: BaseStream | None = None) -> dict:
    """Open the executor, and call `build_stream`."""
    with open_executor(settings) as executor:
        return build_stream(settings, files, replace(work, executor=executor), base)


def _extended(
    settings: PrepSettings, stream: Mapping, added: Mapping, fingerprints: Mapping[str, str], digests: Mapping[str, str]
) -> dict:
    """Return the content of stream.json after an extension."""
    first, last = stream["num_mega_batches"] + 1, stream["num_mega_batches"] + added["num_mega_batches"]
    identity = settings.identity()
    extension = {
        "mega_batches": [first, last],
        "fingerprints": fingerprints,
        "settings": identity | dict(digests) | {"passage_words": added["passage_words"]},
        "given": identity,
        "command": settings.command(),
        "sources": added["sources"],
        "cleaning": added["cleaning"],
        "leakage": added["leakage"],
    }
    splits = {name: split for name, split in stream["splits"].items() if name != "test"}
    # Only a chronological stream has periods.
    periods = {"periods": [*stream["periods"], *added["periods"]]} if "periods" in added else {}
    return {
        **stream,
        **periods,
        "num_mega_batches": last,
        "splits": splits | added["splits"] | {"test": stream["splits"]["test"]},
        "extensions": [*stream.get("extensions", []), extension],
    }


def _check_finished_extension(
    settings: PrepSettings, stream: Mapping, extension: Mapping, digests: Mapping[str, str]
) -> None:
    """Raise PrepError if an earlier extension by the same files had other settings, or if the stream is damaged."""
    out = settings.out
    identity = json.loads(json.dumps(settings.identity()))
    options = options_of(settings)
    changed = [
        f"{name} was {value} and is now {identity[name]}"
        for name, value in extension["given"].items()
        # A setting that is taken from the stream unless it is given is compared only if it is given.
        if name in identity
        and value != identity[name]
        and not (name in options and options[name].is_inherited and name not in settings.given)
    ]
    for name, now in digests.items():
        if extension["settings"].get(name, now) != now:
            changed.append(f"a file of the {name.removeprefix('sha256 of ')} setting has changed")
    if changed:
        raise PrepError(
            f"{out} was extended with these files, but with other settings: {'; '.join(changed)}. The same files "
            "cannot be added again. To add text, give other files. To only check the stream, run the command again "
            "with the old values of these settings."
        )
    check_bytes(out)
    remove_finished_work(out, len(stream["extensions"]))
    first, last = extension["mega_batches"]
    added = f"mega-batch {first}" + (f" to {last}" * (last > first))
    note(f"{out} already contains the text of these input files, in {added}: nothing to do")


def prepare(settings: PrepSettings) -> dict:
    """Make a new stream, add mega-batches to a stream, or check a finished stream.

    If the setting `extend` is True, mega-batches are added to the stream in the folder `settings.out`. Otherwise, a
    finished stream in this folder is only checked: it must be undamaged and must have been made with these settings.
    If the folder contains no finished stream, a new stream is made.

    A script must call this function under `if __name__ == "__main__":`. Otherwise each worker process calls it, too,
    because it imports the script; then the worker says so on stderr and ends.

    Returns:
        The content of stream.json.

    Raises:
        PrepError: if the stream cannot be made; the message says what to do.
    """
    if getattr(current_process(), "_inheriting", False):
        # A fork of multiprocessing's server does not print the argument of sys.exit.
        print("alma-prep: the script calls prepare() when a worker process imports it", file=sys.stderr, flush=True)
        sys.exit(1)
    files: Files = {source: list_files(source) for source in settings.sources}
    check_out_is_not_a_source(settings, files)
    finished = read_stream(settings.out)
    if settings.partition != "as-given":
        # The bytes of the stream must not depend on the order in which the sources are given. With "as-given", this is
        # the order of the mega-batches.
        causal = is_causal(settings, finished.description if settings.extend and finished else None)
        files = dict(sorted(files.items(), key=lambda item: _content_key(item[0], item[1], causal)))
    if finished is not None:
        check_known_settings(settings, finished.description)
    if settings.extend and finished is not None:
        settings = with_values_of_stream(settings, finished.description)
    check_filters(settings)
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


def drop_last(out: Path) -> dict:
    """Take the newest extension of a stream back: the mega-batches that the last call of alma-prep --extend added.

    If the last call has not finished, only its work is removed. Afterwards, the stream has the bytes that it had
    before, so a following extension is the same as if this one had never been. A call that was killed is finished by
    the next one.

    Returns:
        The content of stream.json.

    Raises:
        PrepError: if there is no stream or no extension, or if another alma-prep is running in `out`.
    """
    finished = read_stream(out)
    if finished is None:
        raise PrepError(f"there is no stream in {out}: give the folder that alma-prep has written.")
    base = dict(finished.description)
    extensions = base.get("extensions", [])
    if unfinished_extension(out, len(extensions)):
        take_back(out, base, base)
        note(
            f"the unfinished extension of {out} is removed, and the stream still ends with mega-batch "
            f"{base['num_mega_batches']}. The same command again takes that one back"
        )
        return base
    if len(read_manifest(out)["extensions"]) > len(extensions):  # an earlier call was killed
        take_back(out, base, base)
        note(f"{out} now ends with mega-batch {base['num_mega_batches']}, as an interrupted call has begun")
        return base
    if not extensions:
        raise PrepError(f"the stream in {out} was never extended, so there is no mega-batch to take back.")
    first, last = extensions[-1]["mega_batches"]
    removed = {f"mega_batch_{t}" for t in range(first, last + 1)}
    stream = {**base, "num_mega_batches": first - 1, "extensions": extensions[:-1]}
    stream["splits"] = {name: split for name, split in base["splits"].items() if name not in removed}
    if "periods" in base:
        stream["periods"] = base["periods"][: first - 1]
    if not stream["extensions"]:
        del stream["extensions"]
    take_back(out, base, stream)
    note(
        f"{out} now ends with mega-batch {first - 1}. Runs that have trained on a later one: give "
        "`alma-lm rollback RUN --to-stage K` with the stage before it"
    )
    if any(t >= first for one in base.get("grown_from", []) for t in one["learned_from"]):
        note(
            "The vocabulary was grown with text that is now removed, and stays as it is: to be without these symbols, "
            "grow the vocabulary of the earlier stream again (alma-prep grow-vocab)"
        )
    return stream


def _make_new(settings: PrepSettings, files: Files) -> dict:
    """Make a new stream, or continue to make one if alma-prep was interrupted. Return the content of stream.json."""
    check_free(settings.out)
    check_sizes(settings, files)
    if settings.tokenizer not in TOKENIZERS:
        # Read the tokenizer now, so that an unreadable file raises an error at the start and not after hours of work.
        given_tokenizer(settings.tokenizer)
    with _work_folder(settings) as work:
        stream = _build(settings, files, work) | {"given": settings.identity()}
        publish(settings.out, work, stream, inputs(settings, files) | {"outputs": {}, "extensions": []})
    return stream


def _check_finished(settings: PrepSettings, files: Files, stream: Mapping) -> dict:
    """Check that a finished stream is undamaged and was made with these settings. Return the content of stream.json."""
    check_same_stream(settings, files, stream)
    check_bytes(settings.out)
    remove_finished_work(settings.out, len(stream.get("extensions", [])))
    note(f"{settings.out} is complete and was made with these settings: nothing to do")
    return dict(stream)


def _content_key(source: Source, files: Sequence[SourceFile], causal: bool) -> tuple:
    """Return a tuple by which `prepare` sorts the sources.

    The name matters only if everything else is equal, because renaming a source should not change the stream. The order
    of the sources can change it: if two sources contain the same text, the text is kept only in the first source, and
    the second has fewer words left to provide its share. In a causal stream, the sizes of the files cannot be used,
    because files grow when later text is added to them.
    """
    if causal:
        return (source.kind, source.share or 0.0, source.name)
    return (source.kind, source.share or 0.0, sum(file.num_bytes for file in files), len(files), source.name)

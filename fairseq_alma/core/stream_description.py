"""The file stream.json, which describes a stream."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from fairseq_alma.core.declarations import fault_in, value_of
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import parse_json
from fairseq_alma.core.settings import Count, NonNegative

FORMAT_VERSION = 1
STREAM_FILE = "stream.json"
ITEM_SIZE = {"uint16": 2, "uint32": 4, "int32": 4}
ADVICE = "copy the whole stream again, or remove the stream folder and run `alma-prep` again"


def split_names(num_mega_batches: int) -> list[str]:
    """Return the names of all splits (data sets) of a stream: mega_batch_1, ..., mega_batch_B, valid, test."""
    return [*(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "valid", "test"]


class _Versioned(TypedDict):
    format_version: int


class Split(TypedDict):
    """What stream.json says about a split."""

    tokens: Count
    sequences: Count
    sha256: str
    words: NotRequired[Count]
    documents: NotRequired[NonNegative]
    bytes: NotRequired[NonNegative]


class _Period(TypedDict):
    valid: Split
    test: Split


class _Tokenizer(TypedDict):
    file: str
    dict_sha256: str
    sha256: NotRequired[str]


class _Extension(TypedDict):
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    given: dict[str, Any]
    mega_batches: tuple[Count, Count]


class _SourceEntry(TypedDict):
    kind: str
    path: str
    fingerprint: str


class Description(TypedDict):
    """The content of stream.json, as far as it is read."""

    num_mega_batches: Count
    dtype: Literal["uint16", "uint32", "int32"]
    dictionary_size: Count
    tokenizer: _Tokenizer
    splits: dict[str, Split]
    periods: NotRequired[list[_Period]]
    periods_in_test: NotRequired[NonNegative]
    extensions: NotRequired[list[_Extension]]
    settings: NotRequired[dict[str, Any]]
    given: NotRequired[dict[str, Any]]
    sources: NotRequired[list[_SourceEntry]]


def read_description(path: Path) -> dict[str, Any]:
    """Return the content of stream.json in a stream folder.

    Raises:
        StreamError: if the file is missing or damaged, or has another format version.
    """
    file = path / STREAM_FILE
    if not file.is_file():
        raise StreamError(
            f"no stream at {path} (stream.json is missing): run `alma-prep {shlex.quote(str(path))} ...` first"
        )
    try:
        description = parse_json(file.read_bytes())
        version = value_of(description, _Versioned)["format_version"]
    except ValueError as error:
        raise StreamError(f"{file} cannot be read ({error}): run `alma-prep` again") from error
    if version != FORMAT_VERSION:
        raise StreamError(
            f"{file} has format version {version}, but this version of ALMA reads {FORMAT_VERSION}: "
            f"prepare the stream again with `alma-prep`"
        )
    missing = _missing(description)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise StreamError(f"{file} lacks the keys {', '.join(missing[:3])}{more}: run `alma-prep` again")
    num_mega_batches = description["num_mega_batches"]
    if type(num_mega_batches) is not int or num_mega_batches < 1:
        raise StreamError(
            f"{file} has num_mega_batches={num_mega_batches!r}, expected 1 or more: run `alma-prep` again"
        )
    if description["dtype"] not in ITEM_SIZE:
        known = ", ".join(ITEM_SIZE)
        raise StreamError(f"{file} has dtype {description['dtype']!r}, expected one of {known}: run `alma-prep` again")
    if fault := fault_in(description, Description):
        raise StreamError(f"{file} is damaged ({fault}): {ADVICE}")
    return description


def _missing(description: Mapping[str, Any]) -> list[str]:
    """Return the required keys that are missing in stream.json, in dotted notation such as splits.valid.tokens."""
    needed = [("num_mega_batches",), ("dtype",), ("tokenizer", "file"), ("tokenizer", "dict_sha256")]
    num_mega_batches = description.get("num_mega_batches")
    if isinstance(num_mega_batches, int):
        # Name only some of the splits that are missing: the number can be wrong, and as large as the memory.
        found = description.get("splits")
        num_found = len(found) if isinstance(found, Mapping) else 0
        splits = split_names(min(num_mega_batches, num_found + 1))
        needed += [("splits", split, key) for split in splits for key in ("tokens", "sequences", "sha256")]
    missing = []
    for path in needed:
        value: Any = description
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            missing.append(".".join(path))
    return missing

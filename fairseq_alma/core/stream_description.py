"""The file stream.json, which describes a stream."""

import shlex
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import parse_json
from fairseq_alma.core.json_types import fault_in, value_of
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
    words: NotRequired[NonNegative]
    documents: NotRequired[NonNegative]
    bytes: NotRequired[NonNegative]
    masked: NotRequired[list[tuple[NonNegative, Count]]]


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


class EarlierVocabulary(TypedDict):
    """The vocabulary of the stream that `alma-prep grow-vocab` has copied."""

    dict_sha256: str
    num_symbols: Count
    learned_from: list[Count]


class Description(TypedDict):
    """The content of stream.json, as far as it is read."""

    num_mega_batches: Count
    dtype: Literal["uint16", "uint32", "int32"]
    dictionary_size: Count
    tokenizer: _Tokenizer
    splits: dict[str, Split]
    periods: NotRequired[list[_Period]]
    periods_in_test: NotRequired[NonNegative]
    grown_from: NotRequired[list[EarlierVocabulary]]
    extensions: NotRequired[list[_Extension]]
    settings: NotRequired[dict[str, Any]]
    given: NotRequired[dict[str, Any]]
    sources: NotRequired[list[_SourceEntry]]


def read_description(path: Path) -> dict[str, Any]:
    """Return the content of stream.json in a stream folder.

    Raise StreamError if the file is missing or damaged, or has another format version.
    """
    file = path / STREAM_FILE
    if not file.is_file():
        missing = f"no stream at {path} (stream.json is missing)"
        if below := [str(one.parent) for one in sorted(path.glob(f"*/{STREAM_FILE}"))]:
            raise StreamError(f"{missing}: give one of {', '.join(below)}")
        names = [one.name for one in path.iterdir()] if path.is_dir() else []
        # A folder with one of these names is of an alma-prep that has not finished.
        if names and not any(name == ".alma-prep" or name.startswith("mega_batch_") for name in names):
            raise StreamError(f"{missing}: alma-prep STREAM --source text:{path} makes a stream of text in this folder")
        raise StreamError(f"{missing}: run `alma-prep {shlex.quote(str(path))} ...` first")
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
    fault = fault_in(description, Description)
    if fault is None:
        found = description["splits"]
        # Look only for some of the splits: the number can be wrong, and as large as the memory.
        wanted = split_names(min(description["num_mega_batches"], len(found) + 1))
        fault = next((f"splits.{name} is missing" for name in wanted if name not in found), None)
    if fault:
        raise StreamError(f"{file} is damaged ({fault}): {ADVICE}")
    return description

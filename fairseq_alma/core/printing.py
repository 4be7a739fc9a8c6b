"""Print texts that contain names from files, folders and settings, which may come from somebody else.

A terminal interprets some characters as commands: they move the cursor, hide text or change the title of the window.
"""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

_UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and line feed, characters that change the direction of the text, and lone
surrogates, which cannot be encoded: Python puts them into a path if the bytes of the path are not valid UTF-8."""


def printable(text: str) -> str:
    """Return the text with escapes such as `\\x1b` for the characters that a terminal or UTF-8 would not show."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: object, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a text and a line feed, by default on stdout. Characters that cannot be printed are shown as escapes."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(printable(str(text)).encode(encoding, "backslashreplace").decode(encoding), file=file, end=end, flush=True)


def perplexity_text(value: float, decimals: int) -> str:
    """Return a perplexity with this number of decimals; from a million on, with three significant digits."""
    return f"{value:,.{decimals}f}" if value < 1e6 else f"{value:.3g}"


def json_text(value: Mapping[str, Any]) -> str:
    """Return an object as JSON. JSON has no infinity and no NaN, which a diverged model may have: these are null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


def log_to_stderr(level: str, force: bool = False) -> None:
    """Let the root logger write messages of at least this level on stderr, as `logging.basicConfig` does."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(logging.BASIC_FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=force)


def hide_messages_of_libraries(force: bool = False) -> None:
    """Configure logging and warnings, so that messages of libraries that users cannot act on are not printed.

    With `force`, an existing configuration of logging is replaced.
    """
    level = os.environ.get("LOGLEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        say(f"LOGLEVEL={level} is not known, WARNING is used: {', '.join(logging.getLevelNamesMapping())}", sys.stderr)
        level = "WARNING"
    log_to_stderr(level, force)
    for library in ("fairseq", "lm_eval"):  # also if logging was configured before
        logging.getLogger(library).setLevel(level)
    if "PYTHONWARNINGS" not in os.environ:
        # Hide the warnings that libraries use deprecated features, because users of our commands cannot change the code
        # of libraries. Warnings about their own plugins are shown.
        libraries = r"(fairseq|fairscale|hydra|omegaconf|torch|torchvision|transformers|lm_eval|datasets|wandb)\b"
        warnings.filterwarnings("ignore", category=FutureWarning, module=libraries)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|torch|fairseq")


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

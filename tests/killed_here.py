"""Let a call end as if its process were killed at a place in the code, and then undo the change."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_prep.running import work_folder
from fairseq_alma.core.stream_description import STREAM_FILE


class KilledError(BaseException):
    """The process is killed. No handler of `Exception` catches it."""


def _die(*arguments: Any, **options: Any) -> None:
    raise KilledError


@contextmanager
def killed_when_it_calls(owner: Any, name: str) -> Iterator[None]:
    """Context manager in which OWNER.NAME kills. Fail if the block does not call it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(owner, name, _die)
        yield


@contextmanager
def killed_before_stream_json() -> Iterator[None]:
    """Context manager in which alma-prep is killed before it writes stream.json, its last file."""
    write = work_folder.write_json

    def write_or_die(path: Path, value: Any, **options: Any) -> None:
        if path.name == STREAM_FILE:
            _die()
        write(path, value, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(work_folder, "write_json", write_or_die)
        yield

"""Let a call end as if its process were killed at a place in the code, and then undo the change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


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

"""Leases of processes that a test cannot see."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def beating(folder: Path) -> Iterator[None]:
    """The holder of the lease, on a machine that this one does not see, renews it ten times a second.

    Who waits for it looks at it ten times a second, too.
    """
    ended = threading.Event()

    def renew():
        while not ended.wait(0.1):
            with contextlib.suppress(FileNotFoundError):
                os.utime(folder / "lease.json")

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with mock.patch("fairseq_alma.core.lease.POLL_SECONDS", 0.1):
            yield
    finally:
        ended.set()
        thread.join()

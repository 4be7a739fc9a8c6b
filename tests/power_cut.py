"""Power cuts: what a disk holds at some moment, while a process writes to it.

The disk is a file with a file system of its own. A copy of this file has what the kernel has written to the disk at
that moment, and nothing of what is still in memory, as after a power failure.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEGABYTES = 256


@contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """Yield the folder in which the file system of an image is mounted. Skip the test if this user cannot mount it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a file: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def new_disk(path: Path) -> Path:
    """Make the image of an empty disk."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs the program mkfs.ext4")
    with open(path, "wb") as file:
        file.truncate(_MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", path], check=True)
    return path


def cut_power(
    start: Callable[[Path], int], folder: Path, moments: int, seconds: float, chance: random.Random
) -> list[Path]:
    """Run a process on a new disk, and copy the disk at random moments, the last time after the process has ended.

    Args:
        start: starts the process, which writes into the folder that it is given, and returns its id.
        folder: where the images are stored.
        moments: largest number of moments before the end.
        seconds: the time that the process takes, about.
        chance: chooses the moments.

    Returns:
        The images.
    """
    images, disk = [], new_disk(folder / "disk")
    with mounted(disk) as here:
        pid, status = start(here), None
        while status is None:
            time.sleep(chance.uniform(0, 2) * seconds / (moments + 1))
            ended, found = os.waitpid(pid, os.WNOHANG if len(images) < moments else 0)
            if ended:
                status = found
                break
            os.kill(pid, signal.SIGSTOP)
            images.append(folder / f"cut_{len(images)}")
            subprocess.run(["cp", "--sparse=always", disk, images[-1]], check=True)
            os.kill(pid, signal.SIGCONT)
        assert status == 0
        images.append(folder / "cut_at_the_end")
        subprocess.run(["cp", "--sparse=always", disk, images[-1]], check=True)
    return images

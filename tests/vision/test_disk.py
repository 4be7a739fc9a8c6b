"""Errors of the operating system while a run is written: real ones, which the command names with file and cause."""

import contextlib
import os
import resource
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from fairseq_alma.core.errors import AlmaError, message_of
from tests.vision.tiny_runs import as_arguments, small_run

SETTINGS = as_arguments(learner="ens", members=3, width=64, epochs=1)
"""Settings of a run with files of 70 kB."""


def done(*words) -> None:
    """Run a command that needs the rights of root. Skip the test without them."""
    if subprocess.run(list(map(str, words)), capture_output=True).returncode:
        pytest.skip(f"needs {' '.join(map(str, words))}")


@contextlib.contextmanager
def limited(kind: int, limit: int):
    """Lower a limit of this process for as long as the block runs."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def mounted(folder: Path, *options):
    """Mount something on a folder for as long as the block runs."""
    folder.mkdir(exist_ok=True)
    done("mount", *options, folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def immutable(path: Path):
    """Forbid every change of a file or folder, also to root, for as long as the block runs."""
    done("chattr", "+i", path)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_a_full_disk_is_named_with_the_file_and_the_run_continues_in_a_larger_one(alma_vision, tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=120k", "tmpfs"):
        said = alma_vision(*SETTINGS, f"out={disk}/run")
        assert said.status == 2
        assert "alma-vision: No space left on device: " in said.err
        assert "networks.pt: free space on the disk, then run the same command again" in said.err
        done("mount", "-o", "remount,size=10m", disk)
        said = alma_vision(*SETTINGS, f"out={disk}/run")
        assert said.status == 0, said.err


@pytest.mark.parametrize(("limit", "file"), [(30_000, "networks.pt"), (1000, "settings.json")])
def test_a_limit_on_the_size_of_files_is_named_with_the_file(alma_vision, tmp_path, limit, file):
    with limited(resource.RLIMIT_FSIZE, limit):
        said = alma_vision(*SETTINGS, f"out={tmp_path}/run")
    assert said.status == 2
    assert "alma-vision: File too large: " in said.err
    assert f"{file}: raise the limit on the size of files (ulimit -f)" in said.err


def test_too_many_open_files_are_named(tmp_path):
    small_run(tmp_path / "other", epochs=1, arrivals=1)  # imports what is needed
    with open(os.devnull) as file:
        lowest = file.fileno()
    with limited(resource.RLIMIT_NOFILE, lowest), pytest.raises((AlmaError, OSError)) as raised:
        small_run(tmp_path / "run", epochs=1)
    assert message_of(raised.value).startswith("Too many open files: /")


def test_a_file_that_must_not_be_changed_is_named(alma_vision, tmp_path):
    out = tmp_path / "run"
    assert alma_vision(*SETTINGS, "arrivals=1", f"out={out}").status == 0
    ledger = out / "ledger.jsonl"
    with immutable(ledger):
        said = alma_vision(*SETTINGS, f"out={out}")
    assert said.status == 2
    assert f"alma-vision: Operation not permitted: {ledger}: fix the permissions or attributes" in said.err
    assert alma_vision(*SETTINGS, f"out={out}").status == 0


def test_a_disk_that_is_read_only_is_named(alma_vision, tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs"):
        said = alma_vision(*SETTINGS, f"out={tmp_path}/disk/run")
    assert (said.status, "cannot be created (Read-only file system)" in said.err) == (2, True)


def test_a_dangling_link_as_the_folder_of_data_is_named(alma_vision, tmp_path):
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(9):
                Image.new("L", (8, 8), number).save(tmp_path / "images" / split / name / f"{number}.png")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    words = as_arguments(
        dataset=tmp_path / "images", data_root=tmp_path / "link", mega_batches=2, backbone="mlp", batch_size=4
    )
    said = alma_vision(*words, f"out={tmp_path}/run")
    assert said.status == 2
    assert f"alma-vision: File exists: {tmp_path}/link: remove this file or broken link" in said.err

"""A cache that cannot be written does not end a run."""

import errno
import shutil

import pytest

from data_prep.cli import main
from data_prep.running import task_store
from tests.data_prep.test_changed_settings import num_entries, write_lines


def make(out, source, cache):
    argv = [str(out), "--mega-batches", "1", "--vocab-size", "300", "--workers", "1", "--duplicates", "exact"]
    argv += [word for name in "ab" for word in ("--source", f"text:{source}/{name}.txt")]
    return main([*argv, "--cache", str(cache)])


@pytest.fixture
def lines(tmp_path):
    """Two sources, each of which is read by a task."""
    for seed, name in enumerate("ab"):
        write_lines(tmp_path / "in" / f"{name}.txt", 200, seed)
    return tmp_path / "in"


@pytest.mark.parametrize("kind", ["unwritable", "full"])
def test_a_cache_that_cannot_be_written_is_reported_once(tmp_path, lines, folder_bytes, monkeypatch, capsys, kind):
    cache, copies = tmp_path / "cache", []
    if kind == "unwritable":
        cache.write_text("this is no folder")  # chmod would not keep root from writing
    else:

        def other_disk(source, target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        def full_disk(source, target):
            copies.append(target)
            shutil.copyfile(source, target)
            if len(copies) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(task_store.os, "link", other_disk)
        monkeypatch.setattr(task_store.shutil, "copy2", full_disk)
    assert make(tmp_path / "out", lines, cache) == 0
    errors = capsys.readouterr().err
    assert errors.count(f"nothing more is stored in the cache {cache}: ") == 1
    assert ("No space left on device" in errors) == (kind == "full")
    monkeypatch.undo()
    if kind == "full":
        assert [path for path in cache.glob("??/*/*") if path.is_file()] == []
    assert make(tmp_path / "wanted", lines, tmp_path / "other_cache") == 0
    assert num_entries(tmp_path / "other_cache") == 2
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")

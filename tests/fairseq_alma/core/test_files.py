import errno
import json
import os
import stat
import subprocess

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import (
    read_json,
    remove_unfinished,
    sha256_of,
    unfinished_files,
    write_json,
    write_whole,
    written_aside,
)


def test_a_file_is_replaced_and_its_folders_are_made(tmp_path):
    path = tmp_path / "new" / "größe.txt"
    write_whole(path, "first")
    write_whole(path, "単語\n")
    assert path.read_text(encoding="utf-8") == "単語\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_text_that_cannot_be_encoded_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "marks.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \udcff")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, fails):
    path = tmp_path / "marks.json"
    write_whole(path, "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_while_writing_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "marks.json"
    write_whole(path, "old")

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_and_then_the_rename_are_sent_to_the_disk(tmp_path, monkeypatch):
    # A power cut must not undo the rename of a mark and keep the ledger row that was written after it.
    synced = []
    fsync = os.fsync

    def record(descriptor):
        of_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((of_folder, (tmp_path / "mark.json").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_whole(tmp_path / "mark.json", "done")
    assert synced == [(False, False), (True, True)]


def test_json_comes_back_equal_and_readable(tmp_path):
    value = {"name": "größe", "flops": 10**20, "rate": 0.1, "list": [1, None, True]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert '"größe"' in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_a_path_that_is_no_utf8_comes_back_equal(tmp_path):
    latin_1 = os.fsdecode(b"runs/gr\xf6\xdfe")  # how Python hands such a command line over
    write_json(tmp_path / "provenance.json", {"command": ["alma-lm", f"out={latin_1}"]})
    assert read_json(tmp_path / "provenance.json")["command"][1] == f"out={latin_1}"


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe"])
def test_a_json_file_that_does_not_parse_is_named(tmp_path, content):
    (tmp_path / "marks.json").write_bytes(content)
    with pytest.raises(RunError, match=r"marks.json is not valid JSON .*: restore the file or remove it"):
        read_json(tmp_path / "marks.json")


def test_a_value_that_is_no_json_leaves_the_old_content(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())
    assert json.loads((tmp_path / "a.json").read_text()) == 1


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # the example of FIPS 180-2
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_folder_that_cannot_be_synced_is_passed_over_and_a_failing_disk_is_told(tmp_path, monkeypatch):
    real = os.fsync

    def fail_on_folders_with(number):
        def fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            real(descriptor)

        return fsync

    monkeypatch.setattr(os, "fsync", fail_on_folders_with(errno.EINVAL))
    write_json(tmp_path / "a.json", 1)
    assert read_json(tmp_path / "a.json") == 1
    monkeypatch.setattr(os, "fsync", fail_on_folders_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        write_json(tmp_path / "a.json", 2)


def test_what_a_killed_process_left_is_found_and_finished_files_are_not(tmp_path):
    write_whole(tmp_path / "marks.json", "whole")
    with written_aside(tmp_path / "array.npy") as temporary:
        temporary.write_text("half")
        assert unfinished_files(tmp_path) == [temporary]
    assert unfinished_files(tmp_path) == []


def test_what_other_processes_left_is_removed_but_not_what_they_are_writing(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    written = f".v1.{os.getppid()}.tmp.0"
    for name in (f".v1.{ended.pid}.tmp.0", f".v1.{os.getpid()}.tmp.0", written, f".v1.{ended.pid}.tmp.1"):
        (tmp_path / name).mkdir()
    remove_unfinished(tmp_path / "v1.0")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([written, f".v1.{ended.pid}.tmp.1"])

"""Tokens are joined by tasks, and removed as soon as they are joined. Digests are computed by tasks."""

import json

import numpy as np
import pytest

from data_prep.encoding import encode as encoding
from data_prep.encoding import encode as joining
from data_prep.reading.index import ENTRY
from data_prep.running import tasks, work_folder
from data_prep.running.heartbeat import Heartbeat


class StoppedError(Exception):
    """Ends a run before the shards are moved into the stream folder."""


@pytest.fixture
def stopped_run(tmp_path, books, alma_prep, monkeypatch):
    """stopped_run(): make a stream of small tasks, but stop when all splits are joined. Return the work folder."""
    monkeypatch.setattr(encoding, "TASK_BYTES", 8_000)

    def run():
        with monkeypatch.context() as patched:
            patched.setattr("data_prep.prepare.publish", stop)
            with pytest.raises(StoppedError):
                alma_prep(tmp_path / "out", f"books:{books}")
        return tmp_path / "out" / ".alma-prep"

    def stop(*arguments):
        raise StoppedError

    return run


def times_of(folder, pattern):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(pattern)}


def test_tokens_are_removed_when_they_are_joined_and_not_encoded_again(tmp_path, books, alma_prep, stopped_run):
    work = stopped_run()
    encoded, joined = times_of(work / "encode", "*.done"), times_of(work / "join", "*.done")
    assert len(encoded) > 10 and len(joined) == 5  # valid, three mega-batches, test
    left = {path.name.partition(".")[2] for path in (work / "encode").iterdir()}
    assert left == {"done", "sha256"}
    stopped_run()
    assert times_of(work / "encode", "*.done") == encoded
    assert times_of(work / "join", "*.done") == joined
    assert alma_prep(tmp_path / "out", f"books:{books}") == 0


@pytest.mark.parametrize("ending", ["bin", *(pytest.param(one, marks=pytest.mark.slow) for one in ("idx", "done"))])
def test_a_split_that_was_altered_or_lost_is_encoded_again(
    tmp_path, books, alma_prep, stopped_run, folder_bytes, monkeypatch, ending
):
    work = stopped_run()
    whole = {path.name: path.read_bytes() for path in (work / "join").iterdir()}
    encoded = times_of(work / "encode", "*.done")
    path = work / "join" / f"000001.{ending}"
    content = whole[path.name]
    path.unlink()  # the shard in the stream is a link to this file
    if ending != "done":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same length
    stopped_run()
    again = times_of(work / "encode", "*.done")
    assert 0 < sum(again[name] != encoded[name] for name in encoded) < len(encoded)
    assert {path.name: path.read_bytes() for path in (work / "join").iterdir()} == whole
    assert alma_prep(tmp_path / "out", f"books:{books}") == 0
    assert alma_prep(tmp_path / "new", f"books:{books}") == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "new")


def test_the_texts_of_a_split_are_counted_slice_by_slice_with_a_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "_ROWS", 3)
    passages = np.zeros(8, ENTRY)
    passages["document"] = [bytes([number]) * 16 for number in (5, 1, 1, 5, 2, 7, 1, 5)]
    passages["num_words"], passages["num_bytes"] = range(8), 10
    with Heartbeat(tmp_path / "alive") as heartbeat:
        monkeypatch.setattr(heartbeat, "beat", lambda place: beats.append(place))
        beats: list[str] = []
        counts = joining._text_counts(passages, heartbeat)
        nothing = joining._text_counts(passages[:0], heartbeat)
    assert counts == {"documents": 4, "passages": 8, "words": 28, "bytes": 80}
    assert nothing == dict.fromkeys(counts, 0)
    assert len(beats) == 3


def test_another_vocabulary_does_not_use_what_was_joined(tmp_path, books, alma_prep, stopped_run, folder_bytes):
    stopped_run()
    for name in ("out", "new"):
        assert alma_prep(tmp_path / name, f"books:{books}", vocab_size=320) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "new")


def test_manifest_and_stream_json_have_the_digests_of_the_files(tmp_path, books, alma_prep):
    out = tmp_path / "out"
    assert alma_prep(out, f"books:{books}", more=["--gopher", "all"]) == 0
    outputs = json.loads((out / "manifest.json").read_text())["outputs"]
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert outputs.keys() == files.keys() - {"manifest.json", "stream.json"}
    for name, expected in outputs.items():
        assert expected == {"bytes": files[name].stat().st_size, "sha256": tasks.sha256_of(files[name])}
        assert files[name].stat().st_nlink == 1
    splits = json.loads((out / "stream.json").read_text())["splits"]
    assert list(splits) == ["valid", "mega_batch_1", "mega_batch_2", "mega_batch_3", "test"]
    for name, split in splits.items():
        prefix = f"{name}/{'train' if name.startswith('mega') else name}"
        assert split["sha256"] == outputs[f"{prefix}.bin"]["sha256"]
        assert split["tokens"] == np.fromfile(out / f"{prefix}.bin", np.uint16).size


def test_a_file_system_without_hard_links(tmp_path, books, alma_prep, folder_bytes, monkeypatch):
    assert alma_prep(tmp_path / "linked", f"books:{books}") == 0

    def refuse(*arguments):
        raise PermissionError("no links")

    monkeypatch.setattr(work_folder.os, "link", refuse)
    assert alma_prep(tmp_path / "copied", f"books:{books}") == 0
    assert folder_bytes(tmp_path / "linked") == folder_bytes(tmp_path / "copied")

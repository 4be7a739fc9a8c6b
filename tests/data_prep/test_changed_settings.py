"""What was read is used again: after settings that did not fit the text, after an interruption, by other streams."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.reading.provenance import reading_digest
from fairseq_alma.core import store
from fairseq_alma.core.files import sha256_of

WORDS = [a + b + c for a in "bdfgklm" for b in "aeiou" for c in "nrst"]


def write_lines(path: Path, count: int, seed: int) -> Path:
    """A file of lines of 60 words, each of which is one document, all different."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(" ".join(rng.choices(WORDS, k=60)) + "\n" for _ in range(count)))
    return path


def spoil(folder: Path) -> None:
    """Alter each source file, but neither its size nor its time: text that is read again would be wrong."""
    for path in folder.rglob("*.txt"):
        status = path.stat()
        path.write_text("x" * (status.st_size - 1) + "\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def work_of(out: Path) -> Path:
    return out / ".alma-prep"


@pytest.fixture
def lines(tmp_path):
    """Two sources in different folders, 24 000 words."""
    write_lines(tmp_path / "in" / "a" / "a.txt", 200, 1)
    write_lines(tmp_path / "in" / "b" / "b.txt", 200, 2)
    return tmp_path / "in"


def test_text_that_was_read_survives_settings_that_do_not_fit_it(tmp_path, lines, alma_prep, folder_bytes, capsys):
    sources = [f"text:{lines}/a@0.5", f"text:{lines}/b@0.5"]
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=2, more=["--seed", "3"]) == 0
    other = [f"text:{lines}/b@0.2", f"text:{lines}/a@0.8"]
    more = ["--passage-words", "150", "--partition", "as-given"]
    assert alma_prep(tmp_path / "out", *other, num_mega_batches=2, more=more) == 2
    message = capsys.readouterr().err
    assert "passage_words=150 is more than 1% of a mega-batch" in message
    assert f"The text that was read is kept in {work_of(tmp_path / 'out')}" in message
    assert not (tmp_path / "out" / "stream.json").exists()
    spoil(lines)
    # Other shares, sources in another order, another partition and another seed.
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=["--seed", "3"]) == 0
    assert "continuing the work in" in capsys.readouterr().err
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")
    assert not work_of(tmp_path / "out").exists()


def test_more_text_can_be_added_to_what_was_read(tmp_path, lines, alma_prep, folder_bytes):
    a, b, more = f"text:{lines}/a", f"text:{lines}/b", ["--duplicates", "exact", "--cache"]
    (tmp_path / "file").touch()  # a cache that cannot be written
    assert alma_prep(tmp_path / "out", b, num_mega_batches=12, more=[*more, tmp_path / "file"]) == 2  # too few words
    assert alma_prep(tmp_path / "wanted", a, b, num_mega_batches=12, more=more[:2]) == 0
    spoil(lines / "b")
    # What was read goes into the cache of a later call, too.
    assert alma_prep(tmp_path / "out", a, b, num_mega_batches=12, more=[*more, tmp_path / "cache"]) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")
    assert num_entries(tmp_path / "cache") == 2


def test_a_run_that_continues_does_not_read_its_cache_again(tmp_path, lines, alma_prep, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    arguments = {"num_mega_batches": 2, "more": ["--duplicates", "exact", "--cache", tmp_path / "cache"]}
    monkeypatch.setattr("data_prep.pipeline.make_tokenizer", interrupt)
    assert alma_prep(tmp_path / "out", f"text:{lines}/a", **arguments) == 130
    read: list[Path] = []
    monkeypatch.setattr(store, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    assert alma_prep(tmp_path / "out", f"text:{lines}/a", **arguments) == 130
    assert read == []


@pytest.mark.slow
def test_an_interrupted_run_continues_with_settings_on_which_reading_does_not_depend(
    tmp_path, lines, alma_prep, folder_bytes, monkeypatch, capsys
):
    import data_prep.pipeline

    sources = [f"text:{lines}/a", f"text:{lines}/b"]
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=3, more=["--seed", "3"]) == 0

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(data_prep.pipeline, "make_tokenizer", interrupt)
        assert alma_prep(tmp_path / "out", *sources, num_mega_batches=4) == 130
        # The heartbeat of a task that may no longer exist would look like a worker that hangs.
        alive = work_of(tmp_path / "out") / "find_pairs" / "000009.alive"
        alive.touch()
        assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2) == 130
        assert not alive.exists()
    capsys.readouterr()
    for changed, name in ((["--language", "en"], "language"), (["--duplicates", "exact"], "duplicates")):
        assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=changed) == 2
        assert f"contains an unfinished stream with other settings: {name} was" in capsys.readouterr().err
    assert alma_prep(tmp_path / "out", sources[0], num_mega_batches=2) == 2
    assert "other settings: sources was" in capsys.readouterr().err
    spoil(lines)
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=3, more=["--seed", "3"]) == 0
    assert "Changed settings: num_mega_batches was 2 and is now 3; seed was 1 and is now 3" in capsys.readouterr().err
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")


def test_impossible_numbers_are_refused_before_anything_is_read(tmp_path, lines, alma_prep, capsys, monkeypatch):
    import data_prep.pipeline

    monkeypatch.delattr(data_prep.pipeline, "read_sources")
    a, b = f"text:{lines}/a", f"text:{lines}/b"
    with open(lines / "b" / "b.txt", "ab") as file:
        file.write(b"x" * (3 << 20))  # at most 1.6 million words in all
    for sources, more, message in (
        ([f"{a}@0.6", f"{b}@0.6"], [], "the source shares sum to 1.2"),
        ([a, b], ["--partition", "as-given"], "--mega-batches is 3, but --partition as-given finds 2 snapshots"),
        ([a, b], ["--partition", "by-date"], "--partition by-date needs a date in every path"),
        ([a, b], ["--valid-words", "1900000"], "too small for these settings"),
        ([a, b], ["--passage-words", "5000"], "is more than 1% of a mega-batch"),
    ):
        assert alma_prep(tmp_path / "out", *sources, num_mega_batches=3, more=more) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_new_versions_of_libraries_read_again(tmp_path, lines, alma_prep, capsys):
    source = f"text:{lines}/a"
    assert alma_prep(tmp_path / "out", source, num_mega_batches=12) == 2
    settings = work_of(tmp_path / "out") / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"versions": {"python": "2.7"}}))
    spool = work_of(tmp_path / "out") / "spool"
    (spool / "tasks.sha256").write_text("0" * 64)
    for path in spool.glob("*.done"):
        path.write_text(path.read_text().replace(reading_digest(), "0" * 64))
    for path in lines.rglob("*.txt"):  # the text of the new version
        status = path.stat()
        path.write_text(path.read_text().replace("ban", "yyy"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert alma_prep(tmp_path / "out", source, num_mega_batches=3) == 0
    assert b"yyy" in (tmp_path / "out" / "tokenizer.json").read_bytes()


def test_another_release_continues_with_the_text_and_repeats_the_other_steps(
    tmp_path, lines, alma_prep, folder_bytes, monkeypatch, capsys
):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    source, work = f"text:{lines}/a", work_of(tmp_path / "out")
    assert alma_prep(tmp_path / "wanted", source, num_mega_batches=2) == 0
    with monkeypatch.context() as context:
        context.setattr("data_prep.pipeline.check_vocabulary", interrupt)
        assert alma_prep(tmp_path / "out", source, num_mega_batches=2) == 130
    # The other release cut and counted the documents in another way.
    path = next((work / "count_words").glob("*.words"))
    path.write_text("zzzz 99\n")
    mark = json.loads(path.with_suffix(".done").read_text())
    mark["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    path.with_suffix(".done").write_text(json.dumps({k: v for k, v in mark.items() if k != "sha256_of_this_file"}))
    settings = json.loads((work / "settings.json").read_text())
    (work / "settings.json").write_text(json.dumps(settings | {"code": "other"}))
    spoil(lines)
    capsys.readouterr()
    assert alma_prep(tmp_path / "out", source, num_mega_batches=2) == 0
    message = capsys.readouterr().err
    assert f"alma-prep has changed since the work in {work} was begun" in message
    assert "Changed settings" not in message
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")


def num_entries(cache: Path) -> int:
    return sum(path.parent.suffix != ".part" for path in cache.glob("*/text"))  # without what killed processes left


@pytest.mark.parametrize("kind", [pytest.param("unwritable", marks=pytest.mark.slow), "full"])
def test_a_cache_that_cannot_be_written_is_reported_once(
    tmp_path, lines, alma_prep, folder_bytes, monkeypatch, capsys, kind
):
    sources, cache, copies = [f"text:{lines}/a", f"text:{lines}/b"], tmp_path / "cache", []
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

        monkeypatch.setattr(store.os, "link", other_disk)
        monkeypatch.setattr(store.shutil, "copy2", full_disk)
    more = ["--duplicates", "exact", "--cache"]
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=1, more=[*more, cache]) == 0
    errors = capsys.readouterr().err
    assert errors.count(f"nothing more is stored in the cache {cache}: ") == 1
    assert ("No space left on device" in errors) == (kind == "full")
    monkeypatch.undo()
    if kind == "full":
        assert [path for path in cache.glob("*/*") if path.is_file()] == []
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=1, more=[*more, tmp_path / "other"]) == 0
    assert num_entries(tmp_path / "other") == 2
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")


@pytest.mark.slow
def test_a_cache_gives_the_same_bytes_without_reading_again(tmp_path, lines, alma_prep, folder_bytes, monkeypatch):
    a, b, cache = f"text:{lines}/a", f"text:{lines}/b", tmp_path / "cache"
    other = [f"{b}@0.5", f"{a}@0.5"], {"num_mega_batches": 4, "vocab_size": 290}
    assert alma_prep(tmp_path / "wanted", *other[0], **other[1], more=["--seed", "9"]) == 0
    cached = ["--seed", "9", "--cache", cache]
    assert alma_prep(tmp_path / "first", a, b, num_mega_batches=2, more=["--cache", cache]) == 0
    assert num_entries(cache) == 2
    originals = {path: path.read_text() for path in lines.rglob("*.txt")}
    spoil(lines)
    monkeypatch.chdir(tmp_path)  # relative paths are the same files
    assert alma_prep("second", "text:in/b@0.5", "text:in/a@0.5", **other[1], more=cached) == 0
    wanted = folder_bytes(tmp_path / "wanted")

    def without_sources(content: dict[str, bytes]) -> dict[str, bytes]:
        """Leave out documents/, whose rows contain the names of the sources, which are relative paths here."""
        return {name: data for name, data in content.items() if not name.startswith("documents/")}

    assert without_sources(folder_bytes(tmp_path / "second")) == without_sources(wanted)
    # Without signatures, those in the cache are not needed; with other cleaning or another time, it is read again.
    more = ["--duplicates", "exact", "--cache", cache]
    assert alma_prep(tmp_path / "exact", a, num_mega_batches=2, more=more) == 0
    assert num_entries(cache) == 2
    for path, text in originals.items():
        path.write_text(text)
    assert alma_prep(tmp_path / "third", *other[0], **other[1], more=cached) == 0
    assert num_entries(cache) == 4
    assert folder_bytes(tmp_path / "third") == folder_bytes(tmp_path / "wanted")
    # A damaged entry is replaced.
    for path in cache.glob("*/text"):
        path.write_bytes(b"y" * path.stat().st_size)
    assert alma_prep(tmp_path / "fourth", *other[0], **other[1], more=cached) == 0
    assert folder_bytes(tmp_path / "fourth") == folder_bytes(tmp_path / "wanted")
    spoil(lines)
    shutil.rmtree(tmp_path / "fourth")
    assert alma_prep(tmp_path / "fourth", *other[0], **other[1], more=cached) == 0
    assert folder_bytes(tmp_path / "fourth") == folder_bytes(tmp_path / "wanted")
    assert alma_prep(tmp_path / "no", a, num_mega_batches=2, more=["--cache", tmp_path / "no" / "cache"]) == 2


@pytest.mark.slow
def test_processes_that_share_a_cache_and_are_killed_lose_nothing(tmp_path, alma_prep, folder_bytes):
    for number in range(12):
        write_lines(tmp_path / "in" / f"{number}" / "a.txt", 200, number)
    sources = [f"text:{tmp_path}/in/{number}" for number in range(12)]
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=3) == 0
    cache = tmp_path / "cache"
    for attempt in range(3):
        outs = [tmp_path / f"{attempt}_{number}" for number in range(3)]
        command = ["--mega-batches", "3", "--vocab-size", "300", "--seed", "1", "--workers", "1", "--cache", str(cache)]
        command += [word for source in sources for word in ("--source", source)]
        running = [
            subprocess.Popen([sys.executable, "-m", "data_prep", str(out), *command], stderr=subprocess.DEVNULL)
            for out in outs
        ]
        if attempt < 2:
            deadline = time.monotonic() + 60
            while num_entries(cache) < 4 * (attempt + 1) and time.monotonic() < deadline:
                time.sleep(0.01)
            for process in running:
                process.kill()
        assert {process.wait() for process in running} <= ({-9, 0} if attempt < 2 else {0})
    for out in outs:
        assert folder_bytes(out) == folder_bytes(tmp_path / "wanted")
    assert num_entries(cache) == 12

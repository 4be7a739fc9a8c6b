"""--keep-removed: every document that is removed can be read, with the reason."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from data_prep.cleaning.cleaner import known_languages
from data_prep.cli import main
from data_prep.reading.removed import keep_removed, removed_path
from data_prep.running.work_folder import WorkFolder
from data_prep.sources import Source
from fairseq_alma.core.files import sha256_of
from tests.data_prep.cleaning.test_cleaner import GERMAN, of_words
from tests.data_prep.copies.test_duplicates import Here
from tests.data_prep.files import read_all, read_all_documents

pytest.importorskip("datatrove", reason="needs the extra `corpora`")


def write_pages(path):
    """20 German pages, 20 exact and 20 near copies, and 60 other pages."""
    english = [f"The {n}th page. {of_words(60, n)}" for n in range(60)]
    texts = [*english, *(f"{n}. {GERMAN}" for n in range(20)), *english[:20]]
    texts += [f"{text} and more" for text in english[20:40]]
    path.parent.mkdir(exist_ok=True)
    rows = [{"text": text, "id": f"page {n}", "date": "2020-01-01"} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return texts


def test_every_removed_document_is_kept_with_its_reason(tmp_path, alma_prep, capsys, folder_bytes):
    texts = write_pages(tmp_path / "pages.jsonl")
    out, plain = tmp_path / "out", tmp_path / "plain"
    more = ["--language", "en", "--keep-removed"]
    assert alma_prep(out, f"text:{tmp_path / 'pages.jsonl'}", num_mega_batches=1, more=more) == 0
    stream = json.loads((out / "stream.json").read_text())
    table = {row["step"]: row["documents"] for row in stream["cleaning"]}
    assert table == {"language": 20, "exact copy": 20, "near copy": 20}
    # The files are themselves a source.
    found, skipped = read_all_documents(Source("text", str(out / "removed")))
    assert not skipped
    by_reason, _ = read_all(Source("text", str(out / "removed")), text_field="reason")
    assert {reason: by_reason.count(reason) for reason in table} == table
    of_language = [one for one, reason in zip(found, by_reason, strict=True) if reason == "language"]
    assert {one.text for one in of_language} == set(texts[60:80])
    assert {one.date for one in found} == {"2020-01-01"}  # that of copies, too
    of_copies = [one.id for one, reason in zip(found, by_reason, strict=True) if reason != "language"]
    assert len(set(of_copies)) == 40 and all(one.startswith("page ") for one in of_copies)
    kept_near = [one.text for one, reason in zip(found, by_reason, strict=True) if reason == "near copy"]
    assert len({text.removesuffix(" and more") for text in kept_near}) == 20
    # The stream itself is the same, can be checked, and does without the folder.
    assert alma_prep(plain, f"text:{tmp_path / 'pages.jsonl'}", num_mega_batches=1, more=more[:2]) == 0
    files = {name: content for name, content in folder_bytes(out).items() if not name.startswith("removed/")}
    assert files == folder_bytes(plain)
    shutil.rmtree(out / "removed")
    assert alma_prep(out, f"text:{tmp_path / 'pages.jsonl'}", num_mega_batches=1, more=more) == 0
    # An extension adds files of its own.
    write_pages(tmp_path / "more.jsonl")
    new = [json.dumps({"text": of_words(50, n)}) for n in range(100, 160)]
    (tmp_path / "more.jsonl").write_text((tmp_path / "pages.jsonl").read_text() + "\n".join(new))
    capsys.readouterr()
    extension = ["--extend", "--source", f"text:{tmp_path / 'more.jsonl'}", *more, "--workers", "1"]
    assert main([str(out), *extension]) == 0, capsys.readouterr().err
    names = {path.name[:11] for path in (out / "removed").iterdir()}
    assert names == {"0001-000000", "0001-copies"}
    reasons, _ = read_all(Source("text", str(out / "removed")), text_field="reason")
    assert reasons.count("exact copy") == 100
    assert reasons.count("language") == 21  # one of the new ones too
    assert {"en", "de"} <= known_languages()


def test_a_file_that_a_killed_call_left_is_not_part_of_the_stream(tmp_path):
    work = WorkFolder(tmp_path)
    work.spool.mkdir()
    digest = {"bytes": 5, "sha256": ""}
    for shard, files in enumerate(({}, {"000001.removed.jsonl.zst": digest})):
        always = {f"{shard:06d}.facts.npy": digest, f"{shard:06d}.ids.arrow": digest}
        (work.spool / f"{shard:06d}.done").write_text(json.dumps({"files": files | always}))
        removed_path(work.spool, shard).write_text("stale")
    keep_removed(work, 2, 0, Here())
    assert [path.name for path in work.shards()] == ["0000-000001.jsonl.zst"]


@pytest.mark.slow
def test_nothing_is_lost_if_the_run_is_interrupted(tmp_path, alma_prep, monkeypatch):
    import data_prep.pipeline

    write_pages(tmp_path / "pages.jsonl")

    def interrupt(*_):
        raise KeyboardInterrupt

    arguments = {"num_mega_batches": 1, "more": ["--language", "en", "--keep-removed"]}
    with monkeypatch.context() as patch:
        patch.setattr(data_prep.pipeline, "make_tokenizer", interrupt)  # after the files were put into place
        assert alma_prep(tmp_path / "out", f"text:{tmp_path / 'pages.jsonl'}", **arguments) == 130
    assert alma_prep(tmp_path / "out", f"text:{tmp_path / 'pages.jsonl'}", **arguments) == 0
    assert len(read_all(Source("text", str(tmp_path / "out" / "removed")))[0]) == 60


def test_names_that_are_not_utf8_are_escaped(tmp_path, alma_prep, capsys):
    """As the names of files and folders on old disks."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    write_pages(folder / os.fsdecode(b"\xe9t\xe9.jsonl"))
    more = ["--language", "en", "--keep-removed"]
    assert alma_prep(tmp_path / "out", f"text:{folder}", num_mega_batches=1, more=more) == 0, capsys.readouterr().err
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "documents" / "mega_batch_1.parquet").to_pylist()
    assert {row["source"] for row in rows} == {f"text:{tmp_path}/caf\\udce9"}
    import zstandard

    with zstandard.open(tmp_path / "out" / "removed" / "0000-000000.jsonl.zst", "rt", encoding="utf-8") as file:
        assert {os.fsencode(json.loads(line)["file"]) for line in file} == {b"\xe9t\xe9.jsonl"}
    assert alma_prep(tmp_path / "out", f"text:{folder}", num_mega_batches=1, more=more) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "out")]) == 0


def test_the_number_of_tasks_does_not_matter_for_how_often_a_file_is_hashed(tmp_path, alma_prep, monkeypatch):
    for number in range(2):
        write_pages(tmp_path / "in" / f"{number}.jsonl")
    (tmp_path / "spam.txt").write_text("spam.example\n")
    counts = Counter()

    def counted(path):
        counts[Path(path).name] += 1
        return sha256_of(path)

    monkeypatch.setattr("data_prep.reading.read.MIN_SHARD_BYTES", 20_000)
    monkeypatch.setattr("data_prep.reading.removed._TASK_BYTES", 9000)
    monkeypatch.setattr("data_prep.settings.sha256_of", counted)
    monkeypatch.setattr("data_prep.reading.removed.sha256_of", counted)
    more = ["--block-urls", tmp_path / "spam.txt", "--duplicates", "exact", "--keep-removed"]
    assert alma_prep(tmp_path / "out", f"text:{tmp_path / 'in'}", num_mega_batches=1, more=more) == 0
    assert len(list((tmp_path / "out" / "removed").iterdir())) >= 5
    assert counts == {"spam.txt": 2, "exact_copies.npy": 1, "near_copies.npy": 1}  # the list also for stream.json

"""Reading tasks: they refuse to read with other code, or other files, than those that they were described with."""

import os

import pytest

from data_prep.errors import PrepError
from data_prep.reading.provenance import reading_digest
from data_prep.reading.spool import SpoolTask, stamp_of
from data_prep.running.tasks import Step
from data_prep.sources import Source, list_files, split_into_parts
from tests.data_prep.copies.test_duplicates import Here
from tests.data_prep.encoding.test_documents import prose


def task_of(folder, **more):
    """A task that reads all files in a folder."""
    source = Source("text", str(folder))
    files = list_files(source)
    stamp = stamp_of((file.num_bytes, file.mtime_ns) for file in files)
    values = {"stamp": stamp, "versions": reading_digest(), "sign": True, **more}
    return SpoolTask(parts=split_into_parts(source, files, 1 << 30), cleaning=None, **values)


def run(task, folder):
    return Step(folder, [task]).run(Here())


def test_a_task_refuses_other_code_and_other_files(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(f"{prose(90, 1)}\n")
    with pytest.raises(PrepError, match=r"libraries or the code that reads documents were changed.*same command again"):
        run(task_of(tmp_path / "in", versions="earlier"), tmp_path / "work")
    task = task_of(tmp_path / "in")
    run(task, tmp_path / "work")
    path = tmp_path / "in" / "b.txt"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(PrepError, match=r"b\.txt \(or another one of the 2 files of this task\) was changed"):
        run(task, tmp_path / "again")
    path.unlink()
    with pytest.raises(PrepError, match=r"b\.txt was removed while"):
        run(task, tmp_path / "again")
    assert not list((tmp_path / "again").glob("*.done"))


def test_a_file_that_changes_while_it_is_read_ends_the_run_and_is_read_again(
    tmp_path, alma_prep, folder_bytes, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    old, new = ("".join(prose(60, seed).replace("\n\n", " ") + "\n" for seed in range(n, n + 60)) for n in (0, 100))
    (tmp_path / "my_filter.py").write_text(
        "from pathlib import Path\n\ndef replace_file(document):\n"
        "    if Path('new.txt').exists():\n        Path('new.txt').rename('in/a.txt')\n    return True\n"
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(old)
    (tmp_path / "new.txt").write_text(new)
    arguments = {"num_mega_batches": 1, "more": ["--filter", "my_filter:replace_file", "--duplicates", "keep"]}
    assert alma_prep("out", "text:in", **arguments) == 2
    assert f"{tmp_path}/in/a.txt was changed while alma-prep was running. Run the same" in capsys.readouterr().err
    assert alma_prep("out", "text:in", **arguments) == 0
    assert alma_prep("wanted", "text:in", **arguments) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")

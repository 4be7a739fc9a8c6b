"""Results by key: what is stored is taken whole, or not at all."""

import os
import subprocess
import sys

import pytest

from fairseq_alma.core.store import Store
from tests.commands import ROOT

KEY, OTHER = "ab" * 32, "cd" * 32


def test_files_and_values_are_taken_as_they_were_put(tmp_path):
    store = Store(tmp_path / "store")
    assert store.take(KEY) is None
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("one")
    (tmp_path / "in" / "sub" / "b.txt").write_text("two")
    store.put(KEY, {name: tmp_path / "in" / name for name in ("a.txt", "sub/b.txt")}, {"words": 2})
    entry = store.take(KEY)
    assert entry.value == {"words": 2}
    assert {name: (entry.folder / name).read_text() for name in entry.files} == {"a.txt": "one", "sub/b.txt": "two"}
    assert entry.files["a.txt"]["bytes"] == 3
    store.put(OTHER, {"a.txt": tmp_path / "in" / "a.txt"})
    assert (store.take(OTHER).folder / "a.txt").read_text() == "one"
    with store.writing("ef" * 32) as folder:
        (folder / "c.txt").write_text("three")
    assert list(store.take("ef" * 32).files) == ["c.txt"]
    store.remove_all_but([KEY])
    assert store.take(OTHER) is None and store.take(KEY) is not None


def test_links_share_the_disk_and_known_digests_are_not_computed_again(tmp_path):
    path, store = tmp_path / "a.txt", Store(tmp_path / "store", durable=False)
    path.write_text("one")
    store.put(KEY, {"b.txt": path}, link=True, known={"b.txt": {"bytes": 3, "sha256": "wrong"}})
    assert (store.take(KEY, check_digests=False).folder / "b.txt").samefile(path)
    assert store.take(KEY) is None  # the digest is not that of the file


@pytest.mark.parametrize("damage", ["changed", "short", "missing", "mark"])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(tmp_path, damage):
    path, store = tmp_path / "a.txt", Store(tmp_path / "store")
    path.write_text("one")
    store.put(KEY, {"a.txt": path})
    stored = store.take(KEY).folder
    if damage == "missing":
        (stored / "a.txt").unlink()
    elif damage == "mark":
        (stored / "entry.json").write_text("{")
    else:
        (stored / "a.txt").write_text("two" if damage == "changed" else "o")
    assert store.take(KEY) is None
    store.put(KEY, {"a.txt": path})
    assert (store.take(KEY).folder / "a.txt").read_text() == "one"
    assert [each.name for each in (tmp_path / "store").iterdir()] == [KEY]


def test_an_error_while_writing_leaves_nothing(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(OSError, match="full"), store.writing(KEY) as folder:
        (folder / "a.txt").write_text("half")
        raise OSError("full")
    assert store.take(KEY) is None
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path):
    left, path = tmp_path / "store" / f"{KEY}.1.part", tmp_path / "a.txt"
    left.mkdir(parents=True)
    path.write_text("one")
    os.utime(left, (0, 0))
    Store(tmp_path / "store").put(KEY, {"a.txt": path})
    assert not left.exists()


def test_several_processes_store_the_same_result(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom fairseq_alma.core.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "for number in range(50):\n"
        "    key = f'{number:02d}' * 32\n"
        "    with store.writing(key) as folder:\n"
        "        (folder / 'a').write_bytes(b'x' * 1000)\n"
        "    assert store.take(key) is not None\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "s").glob("*"))) == 50

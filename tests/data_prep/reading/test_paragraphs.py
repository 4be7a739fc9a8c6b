"""--duplicate-paragraphs: a line that is in several documents is kept in one of them."""

import contextlib
import itertools
import json

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.reading import paragraphs
from data_prep.sources import Source
from tests.data_prep.cleaning.test_cleaner import of_words
from tests.data_prep.files import read_all

NOTICE = "This notice is at the end of every page of this site and of its mirrors."
MENU = "Home About Contact"  # too short


def write_pages(folder, order=1):
    """60 pages with a notice, in 3 files; a page that consists of the notice, and one page twice."""
    folder.mkdir()
    rows = [f"{MENU}\n{of_words(40, n)}\n{of_words(40, 1000 + n)}\n{NOTICE}" for n in range(60)]
    rows[5] = rows[4]
    rows[7] = f"{NOTICE}\n\n{NOTICE}"
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in rows[number::3]]
        (folder / f"{'cba'[number] if order < 0 else 'abc'[number]}.jsonl").write_text("\n".join(lines[::order]))
    return rows


def run(folder, out, *more):
    argv = [str(out), "--source", f"text:{folder}", "--mega-batches", "1", "--vocab-size", "300", *more]
    return main([*argv, "--duplicate-paragraphs", "8", "--duplicates", "exact"])


def test_one_of_several_copies_of_a_paragraph_is_kept(tmp_path, monkeypatch, folder_bytes, read_passages):
    rows = write_pages(tmp_path / "pages")
    write_pages(tmp_path / "reordered", order=-1)
    assert run(tmp_path / "pages", tmp_path / "out", "--workers", "1", "--keep-removed") == 0
    stream = json.loads((tmp_path / "out" / "stream.json").read_text())
    table = {row["step"]: (row["documents"], row["words"]) for row in stream["cleaning"]}
    words, num_notices = len(NOTICE.split()), sum(text.count(NOTICE) for text in rows)
    kept = stream["splits"].values()
    left = sum(split["words"] for split in kept)
    lost = table.pop("duplicate paragraphs", (0, 0))
    assert lost in ((0, 0), (1, 2 * words))  # of the page that consists of the notice, if it does not keep the notice
    # The page that is there twice: if it keeps the notice, both copies do until one of them is removed as a copy.
    changed, copies = table["duplicate paragraphs: changed text"], table["exact copy"]
    assert copies[0] == 1
    num_left = num_notices - (changed[1] + lost[1]) // words
    assert 1 <= num_left <= 2
    assert left == sum(len(text.split()) for text in rows) - changed[1] - lost[1] - copies[1]
    # Another order of files and lines, more ranges of hashes and more workers give the same bytes.
    monkeypatch.setattr(paragraphs, "_RANGE_PAIRS", 10)
    assert run(tmp_path / "reordered", tmp_path / "again", "--workers", "2") == 0
    files = {
        name: content for name, content in folder_bytes(tmp_path / "out", named=False).items() if "removed/" not in name
    }
    assert folder_bytes(tmp_path / "again", named=False) == files
    if lost[0]:
        assert NOTICE in read_all(Source("text", str(tmp_path / "out" / "removed")))[0][0]


@pytest.mark.slow
def test_a_run_that_is_interrupted_between_the_two_passes_continues(tmp_path, monkeypatch, folder_bytes):
    import data_prep.reading.read

    write_pages(tmp_path / "pages")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_prep.reading.read, "_records", interrupt)
        assert run(tmp_path / "pages", tmp_path / "out", "--workers", "1") == 130
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.paragraphs.npy")}
    assert before
    assert run(tmp_path / "pages", tmp_path / "out", "--workers", "1") == 0
    assert run(tmp_path / "pages", tmp_path / "plain", "--workers", "1") == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "plain")


def test_pairs_are_found_whatever_the_ranges(tmp_path):
    rng = np.random.default_rng(0)
    wanted: dict[int, set[int]] = {}
    for number in range(3):
        pairs = np.zeros(500, paragraphs.PAIR)
        pairs["paragraph"] = rng.integers(0, 400, 500).astype(np.uint64) << np.uint64(55)
        pairs["document"] = rng.integers(0, 1 << 60, 500)
        np.save(tmp_path / f"{number:06d}.paragraphs.npy", np.unique(pairs))
        for paragraph, document in pairs.tolist():
            wanted.setdefault(paragraph, set()).add(document)
    repeated = {key: min(documents) for key, documents in wanted.items() if len(documents) > 1}

    class Beat:
        beat = staticmethod(lambda place: None)
        computing = staticmethod(contextlib.nullcontext)

    for num_ranges in (1, 3, 64):
        found = {}
        bounds = [(number << 64) // num_ranges for number in range(num_ranges + 1)]
        for low, high in itertools.pairwise(bounds):
            paragraphs.RepeatedTask(str(tmp_path), 3, "", low, high - 1).run(tmp_path / "out", Beat())
            part = np.load(tmp_path / "out.repeated.npy")
            assert (np.diff(part["paragraph"].astype(object)) > 0).all()
            found |= dict(part.tolist())
        assert found == repeated


def test_a_number_below_one_is_refused(capsys):
    assert main(["out", "--source", "text:x", "--mega-batches", "1", "--duplicate-paragraphs", "0"]) == 2
    assert "duplicate_paragraphs=0 is too small" in capsys.readouterr().err

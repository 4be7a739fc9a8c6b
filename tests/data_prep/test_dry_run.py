"""--dry-run: a sample that is spread over the files, estimates for all of them, and nothing written."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest

from data_prep import dry_run
from data_prep.sources import Source, list_files, sampling
from tests.data_prep.cleaning.test_cleaner import GERMAN, of_words
from tests.data_prep.files import read_all

NUM_PAGES = 1000


def pages(seed):
    """Every fourth page is German."""
    for number in range(NUM_PAGES):
        text = GERMAN if number % 4 == 0 else of_words(60, f"{seed} {number}")
        yield {"text": f"{text} {number}", "id": f"{seed} {number}"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three kinds of large files, and small ones."""
    pytest.importorskip("datatrove", reason="needs the extra `corpora`")
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("corpus")
    lines = {name: "".join(json.dumps(row) + "\n" for row in pages(name)).encode() for name in "abc"}
    (folder / "a.jsonl").write_bytes(lines["a"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines["b"]))
    parquet.write_table(pyarrow.Table.from_pylist(list(pages("p"))), folder / "p.parquet", row_group_size=300)
    for number, line in enumerate(lines["c"].splitlines()[:40]):
        (folder / f"small_{number:02d}.jsonl").write_bytes(line + b"\n")
    return folder


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(sampling, "_LEAST_BYTES", 8_000)


def test_a_sample_has_the_beginning_of_large_files_and_stands_for_its_share(corpus, small_pieces, tmp_path):
    files = list_files(Source("text", str(corpus)))
    total = sum(file.num_bytes for file in files)
    sample = sampling.sample_files("text", files, total / 4, tmp_path / "sample")
    names = [file.name for file in sample.files]
    assert {"a.jsonl", "b.jsonl.gz", "p.parquet"} <= set(names)
    assert names == sorted(names)
    assert 0.85 * total / 4 < sample.num_bytes < 1.3 * total / 4
    for name in ("a.jsonl", "p.parquet"):
        path = next(file.path for file in sample.files if file.name == name)
        texts, skipped = read_all(Source("text", str(path)))
        whole, _ = read_all(Source("text", str(corpus / name)))
        assert not skipped
        assert 0 < len(texts) < len(whole) / 2
        assert texts == whole[: len(texts)]
    everything = sampling.sample_files("text", files, total, tmp_path / "all")
    assert everything.num_bytes == total
    assert [file.path for file in everything.files if file.num_bytes < 8_000] == sorted(corpus.glob("small_*"))


def test_estimates_are_near_the_truth_and_nothing_is_written(corpus, small_pieces, alma_prep, tmp_path, capsys):
    texts, _ = read_all(Source("text", str(corpus)))
    words = sum(len(text.split()) for text in texts)
    english = sum(len(text.split()) for text in texts if "Wal" not in text)
    before = sorted(corpus.rglob("*"))
    more = ["--language", "en", "--duplicates", "exact", "--dry-run", sum(map(len, texts)) / 1e6 / 3]
    assert alma_prep(tmp_path / "out", f"text:{corpus}", num_mega_batches=3, vocab_size=300, more=more) == 0
    out = capsys.readouterr().out
    assert "language" in out
    found = re.search(r"([\d,]+) documents and ([\d,]+) words are read, ([\d,]+) words are left", out)
    documents, read, left = (int(number.replace(",", "")) for number in found.groups())
    assert documents == pytest.approx(len(texts), rel=0.15)
    assert read == pytest.approx(words, rel=0.15)
    assert left == pytest.approx(english, rel=0.15)
    mega_batch = re.search(r"a mega-batch: about ([\d,]+) words", out)[1]
    assert int(mega_batch.replace(",", "")) == pytest.approx(left / 4, rel=0.01)
    assert re.search(r"core-hours: \d.*\n  time with 1 workers: \d.* hours\n  disk: \d", out)
    assert not (tmp_path / "out").exists()
    assert sorted(corpus.rglob("*")) == before


def test_words_are_counted_by_all_workers_but_the_tokenizer_is_trained_by_one():
    record = {"kind": "text", "path": "a", "documents": 1, "words": 1_000_000, "bytes": 500, "files": 1}
    splits = {"test": {"tokens": 100}}
    stream = {"sources": [record], "cleaning": [], "splits": splits, "dtype": "uint16"}
    seconds = {"spool": 3600.0, "count_words": 36_000.0, "tokenizer": 7200.0, "encode": 3600.0, "rest": 3600.0}
    measured = dry_run._Measured(stream, seconds, {dry_run.source_name(record): 1.0}, 500, 500)
    settings = SimpleNamespace(
        tokenizer_words=1_000_000, workers=10, duplicates="keep", num_mega_batches=1, extend=False
    )
    text = "\n".join(dry_run._estimates(settings, measured))
    assert "core-hours: 15.00" in text and "train the tokenizer 12.00" in text
    assert "time with 10 workers: 4.20 hours" in text


def test_a_sample_that_is_too_small_is_refused(corpus, alma_prep, tmp_path, capsys):
    assert alma_prep(tmp_path / "out", f"text:{corpus}", more=["--dry-run", "0"]) == 2
    assert "for example 20" in capsys.readouterr().err
    (tmp_path / "few.txt").write_text("one\n")
    assert alma_prep(tmp_path / "out", f"text:{tmp_path / 'few.txt'}", more=["--dry-run", "1"]) == 2
    assert "Or give --dry-run more" in capsys.readouterr().err

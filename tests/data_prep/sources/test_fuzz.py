"""Random and mutated bytes as every kind of source: no crash, no hang, no text that cannot be written."""

import bz2
import gzip
import io
import lzma
import os
import random
import time
from datetime import date
from pathlib import Path

import pytest

from data_prep.sources import Document, Skipped, Source, list_files, read_documents_of, split_into_parts
from data_prep.sources.base import no_report
from tests.data_prep.files import read_all, write_dump, write_epub, write_warc

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")

TEXT = "A line of text, naïve café 単語.\nAnd {{another}} [[link|one]] with <b>marks</b> &amp; more.\n" * 5
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # a zstd frame without data, as pzstd writes it
ARC = (
    b"filedesc://x.arc 127.0.0.1 20140216050221 text/plain 75\n1 0 LiveWeb Capture\n"
    b"URL IP-address Archive-date Content-type Archive-length\n\n"
    b"http://example.com/ 93.184.216.119 20140216050221 text/html 76\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>A page of text</p>\r\n\r\n"
)


def seeds_of(folder: Path) -> dict[str, list[tuple[str, bytes]]]:
    """Whole files of every kind, to be mutated: (name, content)."""
    folder.mkdir()
    warc = write_warc(folder / "a.warc", [TEXT, "Page two."]).read_bytes()
    packed = write_warc(folder / "b.warc.gz", [TEXT, "Page two."]).read_bytes()
    wet = write_warc(folder / "c.wet", [TEXT, "Two."], kind="conversion").read_bytes()
    dump = write_dump(folder / "d.xml", [("A", 0, None, TEXT), ("B", 0, "A", "#REDIRECT [[A]]")]).read_bytes()
    epub = write_epub(folder / "e.epub", [TEXT, "Two."]).read_bytes()
    import pyarrow
    import zstandard
    from pyarrow import parquet

    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [TEXT, "two"]}), table)
    dated = io.BytesIO()
    columns = {"text": [TEXT, None, "three"], "id": [1, 2, 3], "date": [date(2020, 1, 2), None, date(1, 1, 1)]}
    parquet.write_table(pyarrow.table(columns), dated, row_group_size=1, compression="zstd")
    stream, feather = io.BytesIO(), io.BytesIO()
    for file, new, codec in ((stream, pyarrow.ipc.new_stream, None), (feather, pyarrow.ipc.new_file, "zstd")):
        options, rows = pyarrow.ipc.IpcWriteOptions(compression=codec), pyarrow.table(columns)
        with new(file, rows.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=2)
    lines = b'{"text": "one"}\n{"text": "two \\u00e9"}\n[1]\n'
    return {
        "common-crawl": [("a.warc", warc), ("b.warc.gz", packed), ("c.warc.wet", wet), ("d.arc", ARC),
                         ("e.arc.gz", gzip.compress(ARC)), ("f.warc.bz2", bz2.compress(warc)),
                         ("g.warc.wet.gz", gzip.compress(wet)), ("h.warc.zst", zstandard.compress(warc))],
        "wikipedia": [("a.xml", dump), ("b.xml.bz2", bz2.compress(dump)), ("c.xml.gz", gzip.compress(dump))],
        "books": [("a.txt", TEXT.encode()), ("b.epub", epub), ("c.md", TEXT.encode())],
        "text": [("a.txt", TEXT.encode()), ("b.jsonl", lines), ("c.parquet", table.getvalue()),
                 ("d.jsonl.gz", gzip.compress(lines)), ("e.json.xz", lzma.compress(lines)),
                 ("f.json.zst", SKIPPABLE + zstandard.compress(lines)), ("g.json", b"[" + lines + b"]"),
                 ("h.jsonl.zst", zstandard.compress(lines)), ("i.txt.gz", gzip.compress(TEXT.encode())),
                 ("j.txt.zst", zstandard.compress(TEXT.encode())), ("k.ndjson.bz2", bz2.compress(lines)),
                 ("l.parquet", dated.getvalue()), ("m.arrow", stream.getvalue()), ("n.feather", feather.getvalue()),
                 ("o.txt", TEXT.encode("utf-16")), ("p.jsonl", lines.decode().encode("utf-32")),
                 ("q.jsonl.gz", gzip.compress(lines.decode().encode("utf-16")))],
        "hf": [("a.parquet", table.getvalue()), ("b.parquet", dated.getvalue())],
    }  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in; or all of it random."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(2000))
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([1, 2, 10, 100]))
        how = rng.randrange(5)
        if how == 0:
            data[start:end] = rng.randbytes(end - start)
        elif how == 1:
            del data[start:end]
        elif how == 2:
            data[start:start] = data[start:end]
        elif how == 3:
            data[start:start] = rng.choice(
                [b"\0", b"\n", b"\xff", b"{{", b"[[", b"<", b"&", b"WARC/1.0\r\n", b"9" * 30]
            )
        else:
            del data[start:]
    return bytes(data)


def read(kind: str, folder: Path, part_bytes: int):
    """Read all files of a folder. Return the texts, and what was skipped."""
    if kind != "hf":
        return read_all(Source(kind, str(folder)), part_bytes)
    # A dataset of the Hub, whose files are here.
    files = list_files(Source("text", str(folder)))
    parts = split_into_parts(Source(kind, "me/texts"), files, part_bytes, {"text_field": "text"})
    found = [one for part in parts for one in read_documents_of(part, folder, no_report)]
    return [one.text for one in found if isinstance(one, Document)], [one for one in found if isinstance(one, Skipped)]


def fuzz(tmp_path, kind, rng, more):
    """Read one mutated file after another as long as `more()`; how many."""
    seeds, count = seeds_of(tmp_path / "seeds")[kind], 0
    while more(count):
        name, content = rng.choice(seeds)
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        data = mutated(content, rng)
        (folder / name).write_bytes(data)
        before, began = sorted(tmp_path.rglob("*")), time.monotonic()
        try:
            texts, skipped = read(kind, folder, rng.choice([7, 100, 1 << 20]))
        except BaseException:
            (tmp_path / "failed").write_bytes(data)
            print(f"{kind} {name}: the bytes are in {tmp_path / 'failed'}")
            raise
        assert time.monotonic() - began < 20, f"{kind} {name}"
        for text in texts:
            text.encode("utf-8")
        for entry in skipped:
            assert entry.name == name
            entry.reason().encode("utf-8")
        assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked anywhere
        (folder / name).unlink()
        count += 1
    return count


KINDS_OF_FILES = ("common-crawl", "wikipedia", "books", "text")
KINDS = pytest.mark.parametrize("kind", [*KINDS_OF_FILES, "hf"])


@KINDS
def test_mutated_files_are_read_or_skipped(tmp_path, kind):
    assert fuzz(tmp_path, kind, random.Random(0), lambda count: count < 150) == 150


@pytest.mark.slow
@KINDS
def test_mutated_files_for_a_minute(tmp_path, kind):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    until = time.monotonic() + 60
    assert fuzz(tmp_path, kind, random.Random(seed), lambda count: time.monotonic() < until) > 20


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_mutated_files_behind_a_url_give_what_local_files_give(tmp_path, kind):
    pytest.importorskip("fsspec", reason="needs the extra `corpora`")
    rng, seeds = random.Random(3), seeds_of(tmp_path / "seeds")[kind]
    (tmp_path / "work").mkdir()
    for number in range(60):
        name, content = rng.choice(seeds)
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(mutated(content, rng))
        part_bytes = rng.choice([7, 100, 1 << 20])
        found = []
        for path in (str(tmp_path / "in"), f"file://{tmp_path}/in"):
            source = Source(kind, path)
            parts = split_into_parts(source, list_files(source), part_bytes, {"text_field": "text"})
            found.append([one for part in parts for one in read_documents_of(part, tmp_path / "work", no_report)])
        assert found[0] == found[1], f"{number}: {name}"
        assert not any((tmp_path / "work").iterdir())
        (tmp_path / "in" / name).unlink()


@pytest.mark.parametrize("kind", ["common-crawl", "wikipedia"])
def test_a_run_over_mutated_files_makes_a_whole_stream_or_none(tmp_path, kind, alma_prep, capsys):
    rng = random.Random(1)
    for number, (name, content) in enumerate(seeds_of(tmp_path / "seeds")[kind]):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}{name}").write_bytes(mutated(content, rng))
    (tmp_path / "books").mkdir()
    for number in range(5):
        (tmp_path / "books" / f"{number}.txt").write_text(" ".join(rng.choices(TEXT.split(), k=1500)))
    sources = (f"{kind}:{tmp_path}/in", f"books:{tmp_path}/books")
    code = alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=["--max-bad", "1"])
    assert code in (0, 2)
    assert (tmp_path / "out" / "stream.json").exists() == (code == 0)
    assert "Traceback" not in capsys.readouterr().err

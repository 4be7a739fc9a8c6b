"""Pages, books, tables and file names that attack, and files that people have."""

import base64
import bz2
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from data_prep.sources import Source, bounded
from data_prep.sources import epub as epub_module
from tests.data_prep.files import DUMP_HEAD, read_all, write_dump, write_epub, write_warc, write_zip

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")

ATTRIBUTES = " ".join(f"a{number}=1" for number in range(130_000))  # 30 seconds of CPU time and more
PAGE = f"<html><body><main><p>Before.</p><div {ATTRIBUTES}>inside</div></main></body></html>"


@pytest.fixture
def impatient(monkeypatch):
    """A second is enough for the small pages here."""
    monkeypatch.setattr(bounded, "SECONDS", 1)
    monkeypatch.setattr(bounded, "BATCH_SECONDS", 1)


def test_a_page_with_130_000_attributes_is_set_aside_by_name_and_the_archive_is_not_damaged(tmp_path, impatient):
    write_warc(tmp_path / "a.warc", ["First.", PAGE.encode(), "Second.", "Third."])
    texts, [skipped] = read_all(Source("common-crawl", str(tmp_path)))
    assert texts == ["First.", "Second.", "Third."]
    assert (skipped.num_units, skipped.damaged) == (1, False)
    assert skipped.reason().startswith("1 record: parsing takes more than 1 s of CPU time (the first at byte ")
    assert skipped.reason().endswith("http://example.com/1)")


@pytest.mark.slow
def test_a_book_with_130_000_attributes_is_set_aside(tmp_path, impatient):
    with zipfile.ZipFile(write_epub(tmp_path / "b.epub", ["two"])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chapter = next(name for name in members if name.endswith("c0.xhtml"))
    write_zip(tmp_path / "a.epub", members | {chapter: PAGE.encode()})
    texts, [skipped] = read_all(Source("books", str(tmp_path)))
    assert [" ".join(text.split()) for text in texts] == ["Chapter 0 two"]
    assert (skipped.name, skipped.why, skipped.damaged) == ("a.epub", "parsing takes more than 1 s of CPU time", False)


def test_an_article_that_is_slow_to_parse_is_set_aside(tmp_path, impatient):
    slow = "".join(f"<b{number}>{{{{a|" for number in range(3000)) + "x" * 10_000
    write_dump(tmp_path / "d.xml", [("Bomb", 0, None, slow), ("Whale", 0, None, "A whale.")])
    texts, skipped = read_all(Source("wikipedia", str(tmp_path)))
    assert texts[-1] == "Whale\n\nA whale."
    assert sum(one.num_units for one in skipped if one.unit == "page") + len(texts) == 2


def test_a_page_that_fills_the_memory_is_set_aside(tmp_path, monkeypatch):
    bounded._child._end()
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 64 << 20)
    try:
        write_warc(tmp_path / "a.warc", ["First.", b"<html><body>" + b"<p>x" * 1_500_000, "Second."])
        texts, [skipped] = read_all(Source("common-crawl", str(tmp_path)))
    finally:
        bounded._child._end()
    assert texts == ["First.", "Second."]
    assert (skipped.num_units, skipped.damaged) == (1, False)


def test_a_dump_whose_page_never_ends_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.wikipedia._MAX_PAGE_BYTES", 4 << 20)
    before = write_dump(tmp_path / "a.xml", [("A", 0, None, "An article.")]).read_text().removesuffix("</mediawiki>\n")
    (tmp_path / "a.xml").write_text(before + "<page><title>" + "x" * (8 << 20))
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert texts == ["A\n\nAn article."]
    assert skipped.why == "a page of the dump has more than 4 MiB"
    assert DUMP_HEAD in before


def test_an_epub_is_read_without_its_pictures_and_not_beyond_a_limit(tmp_path, monkeypatch):
    epub = write_epub(tmp_path / "a.epub", ["It was the best of times."])
    with zipfile.ZipFile(epub) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    opf = next(name for name in members if name.endswith(".opf"))
    item = b'<item href="big.png" id="big" media-type="image/png"/></manifest>'
    members[opf] = members[opf].replace(b"</manifest>", item)
    noise = os.urandom(1 << 20) * 8
    write_zip(epub, members | {opf.replace(opf.rpartition("/")[2], "big.png"): noise})
    [text], skipped = read_all(Source("books", str(tmp_path)))
    assert "best of times" in text
    assert not skipped
    monkeypatch.setattr(epub_module, "_MAX_UNPACKED_BYTES", 100)
    with pytest.raises(Exception, match="decompress to more than the 100 bytes"):
        epub_module.read_epub((str(epub), "a.epub"))


@pytest.mark.parametrize("dictionary", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_small_parquet_file_with_large_texts_is_a_bomb(tmp_path, dictionary):
    """In a process of its own, which measures its memory and that of its child."""
    code = f"""
if __name__ == "__main__":  # the child imports this script, and imports pyarrow later
    import pyarrow, pyarrow.parquet, resource
    from data_prep.sources import Source
    from tests.data_prep.files import read_all
    texts = pyarrow.array(["x" * (8 << 20)] * 50)
    path = {str(tmp_path)!r} + "/a.parquet"
    table = pyarrow.table({{"text": texts}})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary={dictionary})
    del table
    del texts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts, [skipped] = read_all(Source("text", {str(tmp_path)!r}))
    print(len(texts), skipped.why)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (300 << 10)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert "decompression bomb" in done.stdout, done.stderr
    assert (tmp_path / "a.parquet").stat().st_size < 100_000


def test_a_parquet_file_that_fills_the_memory_is_set_aside(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    bounded._child._end()
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 100 << 20)
    texts = [os.urandom(6 << 20).hex() for _ in range(6)]  # no bomb: random, 12 MiB each
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", data_page_size=1 << 30)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "b.parquet")
    try:
        found, [skipped] = read_all(Source("text", str(tmp_path)))
    finally:
        bounded._child._end()
    assert found[-1] == "one"
    assert skipped.name == "a.parquet"
    assert skipped.damaged


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("ending", ["json", "jsonl", "ndjson"])
@pytest.mark.parametrize("packed", [*PACK, ".zst"])
def test_json_lines_have_many_endings(tmp_path, ending, packed):
    import zstandard

    content = b'{"text": "one", "url": "x"}\n{"text": "two"}\n'
    pack = PACK.get(packed, zstandard.compress)
    (tmp_path / f"c4-train.00000.{ending}{packed}").write_bytes(pack(content))
    for path in (tmp_path, f"{tmp_path}/*.{ending}{packed}"):
        assert read_all(Source("text", str(path))) == (["one", "two"], [])


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_json_array_is_refused_and_the_message_says_how_to_convert_it(tmp_path, indent, pack):
    rows = [{"text": f"number {number}"} for number in range(20)]
    name = f"a.json{'' if pack is bytes else '.gz'}"
    (tmp_path / name).write_bytes(pack(json.dumps(rows, indent=indent).encode()))
    for part_bytes in (50, 1 << 20):
        texts, skipped = read_all(Source("text", str(tmp_path)), part_bytes)
        assert texts == []
        assert {one.why for one in skipped} == {
            "the file is one JSON array, not one JSON object per line. Convert it with: jq -c '.[]' FILE > FILE.jsonl"
        }


def test_a_json_file_that_describes_the_corpus_is_skipped_by_name_and_is_no_damage(tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"text": "no document", "b": 1}, indent=2))
    (tmp_path / "a.jsonl").write_text('[1]\n{"text": "one"}\n')
    texts, skipped = read_all(Source("text", str(tmp_path)))
    assert texts == ["one"]
    assert [(one.name, one.damaged) for one in skipped] == [("a.jsonl", True), ("dataset_info.json", False)]


def test_a_run_on_a_json_array_says_what_to_do(tmp_path, alma_prep, capsys):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}]))
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/*.json") == 2
    assert "one JSON array" in capsys.readouterr().err


def skippable(num_bytes, number=0):
    return struct.pack("<II", 0x184D2A50 + number, num_bytes) + b"x" * num_bytes


def test_zstd_files_of_pzstd_and_of_many_frames_are_read(tmp_path):
    import zstandard

    pack = zstandard.ZstdCompressor().compress
    one, two, empty = pack(b'{"text": "one"}\n'), pack(b'{"text": "two"}\n'), pack(b"")
    for number, content in enumerate([
        one + two, skippable(4) + one + skippable(4) + two, one + skippable(0, 15) + two + skippable(9000),
        empty + one + empty + two + empty, skippable(300_000) + one + two,
    ]):  # fmt: skip
        (tmp_path / f"{number}.jsonl.zst").write_bytes(content)
        source = Source("text", f"{tmp_path}/{number}.jsonl.zst")
        assert read_all(source) == (["one", "two"], []), number
        (tmp_path / "cut.jsonl.zst").write_bytes(content + skippable(9)[:-3])
        assert "cut short" in read_all(Source("text", f"{tmp_path}/cut.jsonl.zst"))[1][0].why
    if subprocess.run(["which", "pzstd"], capture_output=True).returncode == 0:
        (tmp_path / "p.jsonl").write_bytes(b'{"text": "one"}\n' * 10_000)
        subprocess.run(["pzstd", "-q", "-p", "2", tmp_path / "p.jsonl"], check=True, capture_output=True)
        assert len(read_all(Source("text", f"{tmp_path}/p.jsonl.zst"))[0]) == 10_000


def test_an_archive_with_its_zstd_dictionary_in_the_first_frame_is_read(tmp_path):
    """As ArchiveTeam writes .warc.zst: the dictionary, which may be compressed itself, then one frame per record."""
    import zstandard

    texts = [f"Page {number} about whales and the sea, with enough words." for number in range(3)]
    plain = write_warc(tmp_path / "plain", texts).read_bytes()
    records = [b"WARC/1.0" + record for record in plain.split(b"WARC/1.0")[1:]]
    dictionary = zstandard.train_dictionary(2000, [b"%d %b" % (number, plain) for number in range(300)])
    frames = b"".join(map(zstandard.ZstdCompressor(dict_data=dictionary).compress, records))
    stored = dictionary.as_bytes()
    for first in (stored, zstandard.compress(stored)):
        content = struct.pack("<II", 0x184D2A5D, len(first)) + first + frames
        (tmp_path / "a.warc.zst").write_bytes(content)
        assert read_all(Source("common-crawl", str(tmp_path))) == (texts, [])
    cut = struct.pack("<II", 0x184D2A5D, len(stored)) + stored[:1000]
    no_dictionary = "the zstd data needs a dictionary that the file does not contain. Decompress the file with: "
    for content, why in (
        (frames, f"{no_dictionary}zstd -d -D DICTIONARY FILE"),
        (skippable(100, 13) + frames, f"{no_dictionary}zstd -d -D DICTIONARY FILE"),
        (cut, "cut short: the zstd data ends too early, at byte 1,008"),
    ):
        (tmp_path / "a.warc.zst").write_bytes(content)
        assert [one.why for one in read_all(Source("common-crawl", str(tmp_path)))[1]] == [why]


# A zstd frame with a window of 2^(21 + 10) bytes, as `zstd --long=31` writes it. A block begins with its length x 8 in
# three bytes; + 1 if it is the last block, and + 2 if it contains one byte, which is repeated.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3])


def test_zstd_with_a_window_of_2_gib_is_read(tmp_path):
    line = b'{"text": "one"}\n'
    (tmp_path / "a.jsonl.zst").write_bytes(LONG_WINDOW + (8 * len(line) + 1).to_bytes(3, "little") + line)
    assert read_all(Source("text", str(tmp_path))) == (["one"], [])


def test_a_small_zstd_file_with_a_window_of_2_gib_uses_little_memory(tmp_path):
    """In a process of its own, which measures its memory, and then limits it."""
    block = (8 * (128 << 10) + 2).to_bytes(3, "little") + b"x"  # 128 KiB in 4 bytes
    (tmp_path / "a.txt.zst").write_bytes(LONG_WINDOW + block * 30_000)  # 3.7 GiB
    code = f"""
import resource
from data_prep.sources import Source
from tests.data_prep.files import read_all
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(read_all(Source("text", {str(tmp_path)!r}))[1][0].why)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (400 << 10)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(read_all(Source("text", {str(tmp_path)!r}))[1][0].why)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    bomb, memory = done.stdout.splitlines()
    assert "decompression bomb" in bomb, done.stderr
    assert memory.startswith("the zstd data needs more memory than this process may use"), done.stderr
    assert done.returncode == 0, done.stderr


# 177 bytes that bzip2 decompresses to 184 MiB.
BZIP2_BOMB = base64.b64decode(
    "QlpoOTFBWSZTWQ4J4t8BX45AAMAAAAggADCATUZCoCWpCoCXMUFZJlNZDgni3wFfjkAAwAAACCAAMIBNRkKgJakKgJcxQVkmU1kOCeLfAV+OQADA"
    "AAAIIAAwgE1GQqAlqQqAlzFBWSZTWQ4J4t8BX45AAMAAAAggADCATUZCoCWpCoCXMUFZJlNZ837sgQBHi8BAwAAAgAAIIAAgpTQZjVIVQ2BQqh4u"
    "5IpwoSCPNzKW"
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets the peak of the memory")
def test_a_bomb_of_each_format_takes_little_more_memory_than_one_of_gzip(tmp_path):
    zeros = bytes(66 << 20)
    pack_zstd = pytest.importorskip("zstandard").compress
    xz = lzma.compress(zeros, preset=0)
    for ending, bomb in {"gz": gzip.compress(zeros, 1), "bz2": BZIP2_BOMB, "xz": xz, "zst": pack_zstd(zeros)}.items():
        (tmp_path / f"a.txt.{ending}").write_bytes(bomb)
    (tmp_path / "page").write_bytes(pytest.importorskip("brotli").compress(zeros, quality=1))
    code = f"""
from pathlib import Path
from data_prep import compression
from data_prep.sources import web_page
from data_prep.sources.bounded import _peak_kib

def peak(function):
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return _peak_kib() >> 10

def read(ending):
    try:
        file = compression.open_plain({str(tmp_path)!r} + "/a.txt." + ending)
        while file.read(1 << 16):
            pass
    except compression.DamagedFile as error:
        print(error)

for ending in ("gz", "gz", "bz2", "xz", "zst"):
    print(peak(lambda: read(ending)))
page = Path({str(tmp_path)!r}, "page").read_bytes()
print(peak(lambda: web_page._decode(page, ["br"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, of_bz2, of_xz, of_zst, of_brotli = peaks = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert max(of_bz2, of_xz, of_zst, of_brotli) < peaks[1] + 80


@pytest.mark.parametrize(("name", "content", "why"), [
    ("a.warc.lz4", b"\x04\x22\x4d\x18data", "the lz4 format cannot be read. Decompress the file with: lz4 -d FILE"),
    ("a.warc.gz", b"PK\x03\x04data", "the zip format cannot be read. Decompress the file with: unzip FILE"),
    ("a.warc.Z", b"\x1f\x9ddata", "the compress (.Z) format cannot be read. Decompress the file with: uncompress FILE"),
    ("a.warc.7z", b"7z\xbc\xaf\x27\x1c", "the 7-Zip format cannot be read. Decompress the file with: 7z x FILE"),
    ("a.warc.br", b"\x8b\x02\x80", "the Brotli format cannot be read. Decompress the file with: brotli -d FILE"),
    ("a.warc.tar", b"a.warc".ljust(257, b"\0") + b"ustar\0", "the file is a tar archive, not a WARC or ARC archive. "
     "Unpack it with: tar -xf FILE"),
])  # fmt: skip
def test_a_format_that_is_not_read_is_named(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    [skipped] = read_all(Source("common-crawl", str(tmp_path)))[1]
    assert (skipped.why, skipped.damaged) == (why, True)


def test_an_error_page_under_the_name_of_an_archive_is_named(tmp_path):
    (tmp_path / "a.warc.wet.gz").write_text("<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>")
    _, [skipped] = read_all(Source("common-crawl", str(tmp_path)))
    assert skipped.why == "the file name says gzip, but the content does not begin like a gzip file"


@pytest.mark.parametrize("encoding", ["utf-8", pytest.param("ascii", marks=pytest.mark.slow)])
def test_a_file_name_outside_utf_8_does_not_end_the_summary(tmp_path, encoding):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"bad\xe9 \xc3\xa9.txt")).write_bytes(b"not utf-8 \xff\n")
    words = [f"word{number}" for number in range(50)]
    for number in range(8):
        (tmp_path / "in" / f"{number}.txt").write_text(" ".join(words * 20) + f" {number}")
    command = [
        sys.executable,
        "-m",
        "data_prep",
        tmp_path / "out",
        "--source",
        f"books:{tmp_path}/in",
        "--workers",
        "1",
    ]
    command += ["--mega-batches", "2", "--vocab-size", "300", "--max-bad", "1", "--duplicates", "keep"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert b"skipped bad\\udce9" in done.stdout

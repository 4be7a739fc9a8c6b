"""Web archives: what counts as a page, and what is said of an archive that is damaged."""

import bz2
import gzip
import io
import random

import pytest

from data_prep.sources import Source
from data_prep.sources.compression import DamagedFile, open_plain
from tests.data_prep.files import read_all, write_warc

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")

TEXTS = [f"This is page number {number} about whales and the sea, with enough words." for number in range(5)]


def crawl(path):
    return Source("common-crawl", str(path))


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_a_page_is_its_main_text(tmp_path, name):
    write_warc(tmp_path / name, TEXTS)
    assert read_all(crawl(tmp_path)) == (TEXTS, [])


def test_zstd_and_bzip2_are_unpacked_too(tmp_path):
    import zstandard

    plain = write_warc(tmp_path / "a.warc", TEXTS).read_bytes()
    # As crawlers write them: a frame for every few records.
    half = plain.index(b"WARC/1.0", len(plain) // 2)
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "b.warc.zst").write_bytes(pack(plain[:half]) + pack(plain[half:]))
    (tmp_path / "c.warc.bz2").write_bytes(bz2.compress(plain[:half]) + bz2.compress(plain[half:]))
    assert read_all(crawl(tmp_path)) == (TEXTS * 3, [])


def test_a_wet_file_is_its_text(tmp_path):
    write_warc(tmp_path / "a.warc.wet.gz", [*TEXTS[:2], b"caf\xe9 not UTF-8", TEXTS[2]], kind="conversion")
    texts, skipped = read_all(crawl(tmp_path))
    assert texts == TEXTS[:3]
    assert [(one.unit, one.num_units, one.why) for one in skipped] == [("record", 1, "not valid UTF-8")]


def test_records_that_are_no_page_with_status_200_are_skipped(tmp_path):
    write_warc(tmp_path / "a.warc", TEXTS[:1], status="404 Not Found")
    write_warc(tmp_path / "b.warc", TEXTS[:1], content_type="application/json")
    write_warc(tmp_path / "c.warc", ["a request"], kind="request")
    write_warc(tmp_path / "d.warc", ["just text"], kind="resource", content_type="text/plain")
    (tmp_path / "e.warc.wat.gz").write_bytes(b"metadata is not read")
    (tmp_path / "notes.txt").write_text("no archive")
    assert read_all(crawl(tmp_path))[1] == []
    assert not any(text in TEXTS for text in read_all(crawl(tmp_path))[0])


def test_pages_in_old_encodings_come_out_as_text(tmp_path):
    german = "Die Größe der Wale läßt sich schätzen, übrigens auch bei Nacht."
    page = f"<html><body><main><p>{german}</p></main></body></html>".encode("latin-1")
    write_warc(tmp_path / "a.warc", [page], content_type="text/html; charset=ISO-8859-1")
    assert read_all(crawl(tmp_path)) == ([german], [])


@pytest.mark.parametrize("charset", ["utf8mb4", "none", "raw_unicode_escape", "ISO-8859-1,utf-8"])
def test_a_charset_that_no_browser_knows_is_ignored(tmp_path, charset):
    text = "Die Größe der Wale läßt sich schätzen, übrigens auch bei Nacht \\ud800."
    write_warc(tmp_path / "a.warc", [text.encode()], content_type=f"text/plain; charset={charset}")
    [found], skipped = read_all(crawl(tmp_path))
    found.encode("utf-8")
    assert skipped == []
    assert "Wale" in found


def test_the_charset_of_a_resource_counts(tmp_path):
    text = "Zażółć gęślą jaźń, powiedział kapitan statku."
    write_warc(
        tmp_path / "a.warc", [text.encode("iso-8859-2")], "resource", content_type="text/plain; charset=iso-8859-2"
    )
    from warcio.warcwriter import WARCWriter

    with open(tmp_path / "a.warc", "wb") as file:
        writer = WARCWriter(file, gzip=False)
        content = io.BytesIO(text.encode("iso-8859-2"))
        kind = "text/plain; charset=iso-8859-2"
        writer.write_record(writer.create_warc_record("file:///a", "resource", content, warc_content_type=kind))
    assert read_all(crawl(tmp_path)) == ([text], [])


def test_a_file_a_folder_and_a_pattern(tmp_path):
    for folder in ("CC-MAIN-2019-13", "CC-MAIN-2019-18"):
        (tmp_path / folder).mkdir()
        write_warc(tmp_path / folder / "x.warc.gz", TEXTS[:1])
    assert len(read_all(crawl(tmp_path / "CC-MAIN-2019-13" / "x.warc.gz"))[0]) == 1
    assert len(read_all(crawl(tmp_path / "CC-MAIN-*"))[0]) == 2
    assert len(read_all(crawl(tmp_path / "*" / "x.*.gz"))[0]) == 2
    assert len(read_all(crawl(tmp_path / "CC-MAIN-2019-1[34]" / "*.gz"))[0]) == 1


@pytest.mark.parametrize("ending", [".warc", ".warc.gz"])
def test_the_pages_before_the_cut_of_a_truncated_archive_are_kept_and_the_cut_is_recorded(tmp_path, ending):
    path = write_warc(tmp_path / f"a{ending}", TEXTS)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    texts, [skipped] = read_all(crawl(tmp_path))
    assert 0 < len(texts) < 5
    assert texts == TEXTS[: len(texts)]
    assert "cut short" in skipped.why or "damaged" in skipped.why
    assert (skipped.name, skipped.num_units, skipped.damaged) == (f"a{ending}", 0, True)


def test_a_cut_anywhere_in_the_second_record_is_recorded(tmp_path):
    first, second = "A first page of some words.", "A second."
    one = len(write_warc(tmp_path / "one.wet", [first], kind="conversion").read_bytes())
    both = write_warc(tmp_path / "two.wet", [first, second], kind="conversion").read_bytes()
    for length in range(one + 1, len(both) - 4, 7):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut/a.wet").write_bytes(both[:length])
        texts, skipped = read_all(Source("common-crawl", str(tmp_path / "cut")))
        assert texts == ["A first page of some words."]
        assert [part.damaged for part in skipped] == [True], length
    (tmp_path / "cut/a.wet").write_bytes(both[:one])
    assert not read_all(Source("common-crawl", str(tmp_path / "cut")))[1]


def test_damage_inside_a_compressed_archive_is_recorded(tmp_path):
    path = write_warc(tmp_path / "a.warc.gz", TEXTS)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 20] = bytes(20)
    path.write_bytes(content)
    texts, skipped = read_all(crawl(tmp_path))
    assert texts == TEXTS[: len(texts)]
    assert "damaged: invalid gzip data near byte" in skipped[0].why


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b", b"WARC/1.0\r\n", bytes(1000)])
def test_a_file_that_is_no_archive_is_skipped(tmp_path, content):
    (tmp_path / "a.warc.gz").write_bytes(content)
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == []
    assert skipped.damaged == bool(content)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.compression.BOMB_FLOOR_BYTES", 1 << 20)
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == []
    assert "decompression bomb" in skipped.why


def test_a_page_that_is_too_long_is_skipped_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.common_crawl.MAX_DOCUMENT_BYTES", 2000)
    write_warc(tmp_path / "a.warc", [TEXTS[0], "long " * 1000, TEXTS[1]])
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == TEXTS[:2]
    assert (skipped.num_units, skipped.unit) == (1, "record")


def test_any_compressed_file_is_read_as_its_content(tmp_path):
    import zstandard

    rng = random.Random(0)
    content = bytes(rng.choices(range(32, 127), k=1_000_000))
    packed = {
        "plain": content, "a.gz": gzip.compress(content), "a.bz2": bz2.compress(content),
        "a.zst": zstandard.compress(content), "members.gz": gzip.compress(content[:9]) + gzip.compress(content[9:]),
        "padded.gz": gzip.compress(content) + bytes(512), "empty.gz": gzip.compress(b""),
    }  # fmt: skip
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        with open_plain(tmp_path / name) as file:
            assert file.read() == (b"" if name == "empty.gz" else content), name
        if name.startswith("a."):
            (tmp_path / name).write_bytes(data[:-5])
            with open_plain(tmp_path / name) as file, pytest.raises(DamagedFile, match=r"cut short|invalid"):
                file.read()
    (tmp_path / "wrong.gz").write_bytes(b"plain text")
    with pytest.raises(DamagedFile, match="the file name says gzip"):
        open_plain(tmp_path / "wrong.gz")


# Pages of each real file, and whether it is damaged.
REAL = {
    "aut-example.warc.gz": (128, False), "aut-issue-514.warc": (3, False), "ccnet-sample.wet.txt": (2, False),
    "resiliparse-clipped.warc.gz": (0, True), "resiliparse-clueweb-quirk.warc.gz": (29, False),
    "resiliparse-warcfile.warc.gz": (16, False), "warcio-bad.arc": (0, True), "warcio-example.arc.gz": (1, False),
    "warcio-example-bad-non-chunked.warc.gz": (1, False), "warcio-example-trunc.warc": (1, True),
    "warcio-example-wrong-chunks.warc.gz": (1, False), "warcio-example.warc": (1, False),
    "warcio-example-iana.org-chunked.warc": (1, False), "whirlwind.warc": (1, False), "whirlwind.warc.gz": (1, False),
    "whirlwind.warc.wet": (1, False), "whirlwind.warc.wet.gz": (1, False),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_archives_and_damaged_ones(shared_data, name):
    texts, skipped = read_all(crawl(shared_data / "warc" / name))
    assert (len(texts), any(one.damaged for one in skipped)) == REAL[name]
    if name.startswith("warcio-example") and texts and "iana" not in name:
        assert "This domain is" in texts[0]
    if name == "resiliparse-clueweb-quirk.warc.gz":
        assert any("ショップ" in text or "商品" in text for text in texts)  # EUC-JP


def test_the_same_page_from_warc_gz_and_plain(shared_data):
    [one], [other] = (
        read_all(crawl(shared_data / "warc" / name))[0] for name in ("whirlwind.warc", "whirlwind.warc.gz")
    )
    assert one == other

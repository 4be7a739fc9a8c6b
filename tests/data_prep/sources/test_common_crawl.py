"""Web archives: what counts as a page, and what is said of an archive that is damaged."""

import bz2
import gzip
import io
import os
import random
import re
import zlib

import pytest

from data_prep.compression import DamagedFile, open_plain
from data_prep.sources import Source
from tests.data_prep.files import read_all, read_all_documents, write_warc

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


def record(kind, block, content_type, uri="http://a.example/"):
    """A WARC record with this block."""
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {uri}\r\nWARC-Record-ID: <urn:uuid:{len(block)}>\r\n"
    head += f"Content-Type: {content_type}\r\nContent-Length: {len(block)}\r\n\r\n"
    return head.encode() + block + b"\r\n\r\n"


def response(body, *headers, status="200 OK", uri="http://a.example/"):
    """A WARC record with an HTTP response of these headers."""
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *headers)) + "\r\n"
    return record("response", head.encode("latin-1") + body, "application/http; msgtype=response", uri)


def read_records(tmp_path, *records):
    """The texts of an archive with these records; and for each reason, how many records were skipped."""
    (tmp_path / "a.warc").write_bytes(b"".join(records))
    texts, skipped = read_all(crawl(tmp_path))
    assert not any(one.damaged for one in skipped)
    return texts, {one.why: one.num_units for one in skipped}


def html(text, head=""):
    return f"<html><head>{head}<title>T</title></head><body><main><p>{text}</p></main></body></html>"


HTML = "Content-Type: text/html"
UTF_8 = "Content-Type: text/html; charset=utf-8"


def test_each_record_that_is_no_document_is_counted_with_a_reason(tmp_path):
    page = html("A page.").encode()
    texts, skipped = read_records(
        tmp_path,
        record("warcinfo", b"software: test\r\n", "application/warc-fields"),  # not a page, so it is not counted
        record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),  # nor this
        response(page, UTF_8),
        response(page, UTF_8, status="404 Not Found"),
        response(page, UTF_8, status="301 Moved"),
        response(b"{}", "Content-Type: application/json"),
        response(page),
        response(b"<html><body></body></html>", UTF_8),
        response(b" \n", "Content-Type: text/plain"),
        record("revisit", b"HTTP/1.1 200 OK\r\n\r\n", "application/http; msgtype=response"),
        record("conversion", b"", "text/plain"),
        record("conversion", b"\x89PNG\xff", "image/png"),
        record("resource", b"Just text.", "text/plain"),
        record("response", b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nA response.", ""),
    )
    assert texts == ["A page.", "Just text.", "A response."]
    assert skipped == {
        "HTTP status other than 200": 2,
        "not an HTML page or plain text": 3,
        "page without text": 3,
        "revisit record, which refers to an earlier capture of the page": 1,
    }


def test_each_record_of_an_arc_file_that_is_no_document_is_counted_too(tmp_path):
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: x-gzip\r\n\r\n"
    content = b"filedesc://x.arc 0.0.0.0 20140216050221 text/plain 24\n1 0 Test\nURL IP-address\n\n"
    for block in (
        page + gzip.compress(html("A page.").encode()),
        b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\n\r\n<p>Sorry</p>",
        b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n\x89PNG",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n",
    ):
        content += b"http://a.example/ 0.0.0.0 20140216050221 text/html %d\n" % len(block) + block + b"\n"
    (tmp_path / "a.arc").write_bytes(content)
    texts, skipped = read_all(crawl(tmp_path))
    assert texts == ["A page."]
    assert [(one.why, one.num_units, one.first_byte, one.damaged) for one in skipped] == [
        ("HTTP status other than 200", 1, 0, False),
        ("not an HTML page or plain text", 1, 0, False),
        ("page without text", 1, 0, False),
    ]
    (tmp_path / "a.arc").write_bytes(content[:-20])
    assert read_all(crawl(tmp_path))[1][0].why == "cut short: the record at byte 507 has 25 of its 44 bytes"


def arc_record(length=None, fields="text/html", uri="http://a.example/"):
    """A record of an ARC archive with a page of 8 letters, and `length` instead of its length."""
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + html("A page by").encode() + b"<p>B page"
    return f"{uri} 0.0.0.0 20140216050221 {fields} {length or len(block)}\n".encode() + block + b"\n"


ARC_HEAD = b"filedesc://x.arc 0.0.0.0 20140216050221 text/plain 9\n1 0 Test\n\n"


@pytest.mark.parametrize(
    "fields", ["text/html", "text/html; charset=utf-8", "", "text/html 200 - - 517 x.arc", "no-type 200 abc"]
)
def test_the_address_and_date_of_an_arc_record_do_not_depend_on_its_other_fields(tmp_path, fields):
    (tmp_path / "a.arc").write_bytes(ARC_HEAD + arc_record(fields=fields, uri="http://a.example/b c") * 2)
    documents, skipped = read_all_documents(crawl(tmp_path))
    assert [(one.id, one.date) for one in documents] == [("http://a.example/b c", "20140216050221")] * 2
    assert skipped == []


@pytest.mark.parametrize(
    ("middle", "num_pages", "why"),
    [
        # The length is too small, but the next record shows where this one ends.
        (arc_record(60), 3, {"the record has more bytes than its length says": 1}),
        (arc_record()[:-1], 3, {}),  # no line end after the record
        (arc_record(250), 3, {"the record has fewer bytes than its length says": 1}),
        (arc_record("-1"), 2, {"the length is unknown": 1}),
    ],
)
def test_an_arc_record_with_a_wrong_length_spoils_no_other(tmp_path, middle, num_pages, why):
    (tmp_path / "a.arc").write_bytes(ARC_HEAD + arc_record() + middle + arc_record())
    texts, skipped = read_all(crawl(tmp_path))
    assert len(texts) == num_pages
    assert all(text.endswith("B page") for text in texts)
    assert {one.why: one.num_units for one in skipped} == why


def test_headers_may_be_in_lower_case_folded_and_with_other_line_ends(tmp_path):
    whole = response(html("A page.").encode(), UTF_8)
    head, rest = whole.split(b"\r\n\r\n", 1)
    for changed in (
        head.lower().replace(b"warc/", b"WARC/"),
        head.replace(b"\r\n", b"\n"),
        head.replace(b": ", b":\r\n  "),
    ):
        texts, skipped = read_records(tmp_path, whole, changed + b"\r\n\r\n" + rest, whole)
        assert (texts, skipped) == (["A page."] * 3, {})
    assert read_records(tmp_path, whole, whole[:-4]) == (["A page."] * 2, {})  # only line ends are missing
    assert read_records(tmp_path, whole[:-4], whole) == (["A page."] * 2, {})


@pytest.mark.parametrize(
    ("change", "num_pages", "why"),
    [
        (-30, 3, {"the record has more bytes than its length says": 1}),  # the next record shows where it ends
        (2, 3, {}),  # the line ends after the record
        (30, 3, {"the record has fewer bytes than its length says": 1}),
        (200, 3, {"the record has fewer bytes than its length says": 1}),
        (9000, 3, {"the record has fewer bytes than its length says": 1}),  # beyond the end of the file
    ],
)
def test_a_record_with_a_wrong_length_spoils_no_other(tmp_path, change, num_pages, why):
    whole = response(html("A page.").encode() + b"<p>With an end.", UTF_8)
    length = re.search(rb"Content-Length: (\d+)", whole)[1]
    wrong = whole.replace(b"Length: " + length, b"Length: %d" % (int(length) + change))
    (tmp_path / "a.warc").write_bytes(whole + wrong + whole)
    texts, skipped = read_all(crawl(tmp_path))
    assert texts == ["A page.\n\nWith an end."] * num_pages
    assert {one.why: one.num_units for one in skipped} == why


@pytest.mark.parametrize("junk", [bytes(600), b"junk\r\n", b"a line\r\n\r\nWARC/ no record\r\n\r\n"])
def test_bytes_between_records_are_counted_and_the_next_record_is_read(tmp_path, junk):
    whole = response(html("A page.").encode(), UTF_8)
    (tmp_path / "a.warc").write_bytes(whole + junk + whole)
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == ["A page."] * 2
    assert skipped.reason() == f"1 record: bytes that belong to no record (the first at byte {len(whole)})"


def test_brackets_and_urns_around_an_address_are_no_part_of_it(tmp_path):
    for uri in ("<http://a.example/?q=<b>>", "http://a.example/?q=<b>", "urn:text:http://a.example/?q=<b>"):
        (tmp_path / "a.warc").write_bytes(response(html("A page.").encode(), UTF_8, uri=uri))
        [document], _ = read_all_documents(crawl(tmp_path))
        assert document.id == "http://a.example/?q=<b>"
    (tmp_path / "a.warc").write_bytes(record("resource", b"A file.", "text/plain", "urn:isbn:123"))
    [document], _ = read_all_documents(crawl(tmp_path))
    assert document.id == "urn:isbn:123"


GERMAN = "Die Größe der Wale läßt sich schätzen, übrigens auch bei Nacht."
RUSSIAN = "Река текла мимо старого дома, и вечером соседи собирались у ворот."
KOREAN = "강은 오래된 집 옆으로 흘렀고 똠방각하 이웃들이 모여"  # with a letter that EUC-KR has only in browsers
JAPANESE = "川は古い家のそばを流れ①髙い山の人々が門の前に集まった。"
CHINESE = "河水流過老屋旁，傍晚鄰居們聚集在門前。"
ENCODED = {
    "iso-8859-1": (GERMAN, "cp1252"), "utf8": (GERMAN, "utf-8"), "koi8-r": (RUSSIAN, "koi8-r"),
    "windows-1251": (RUSSIAN, "cp1251"), "euc-kr": (KOREAN, "cp949"), "shift_jis": (JAPANESE, "cp932"),
    "gb2312": (CHINESE, "gb18030"), "big5": (CHINESE, "big5"),
}  # fmt: skip


@pytest.mark.parametrize("label", ENCODED)
def test_the_encoding_is_found_wherever_it_is_declared(tmp_path, label):
    text, encoding = ENCODED[label]
    plain, xhtml = "Content-Type: text/plain", "Content-Type: application/xhtml+xml"
    meta = f'<meta charset="{label}">'
    pages = [
        (html(text), f'{HTML}; charset="{label}"'),
        (html(text, meta), HTML),
        (html(text, f"<META content='text/html; charset={label}' HTTP-EQUIV=Content-Type />"), HTML),
        (html(text, f"<!-- <meta charset=koi8-u> --><meta name=a content='charset=koi8-u'>{meta}"), HTML),
        (html(text, f"<style>{'p { margin: 0 }' * 200}</style>{meta}"), HTML),  # after the first 1024 bytes
        (html(text, meta), f"{HTML}; charset=none"),
        (html(text, meta), UTF_8),  # wrong, except for UTF-8
        (f'<?xml version="1.0" encoding="{label}"?>{html(text)}', xhtml),
        (text, f"{plain}; charset={label}"),
    ]
    found = read_records(tmp_path, *(response(page.encode(encoding), header) for page, header in pages))
    assert found == ([text] * len(pages), {})


def test_an_encoding_that_is_guessed_has_the_characters_of_browsers_too(tmp_path):
    page = html(JAPANESE).encode("cp932")
    assert read_records(tmp_path, response(page, HTML)) == ([JAPANESE], {})


def test_a_byte_order_mark_and_utf_16_win_over_what_is_declared(tmp_path):
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"):
        page = html(RUSSIAN, "<meta charset=koi8-r>").encode(encoding)
        found = read_records(tmp_path, *(response(page, f"{HTML}; charset={c}") for c in ("iso-8859-1", "utf-16")))
        assert found == ([RUSSIAN] * 2, {}), encoding
    text = response(RUSSIAN.encode("utf-16"), "Content-Type: text/plain")
    in_utf_8 = [
        response(html(RUSSIAN, "<meta charset=utf-16>").encode(), f"{HTML}{c}") for c in ("", ";charset=utf-16")
    ]
    assert read_records(tmp_path, text, *in_utf_8) == ([RUSSIAN] * 3, {})


def test_utf_8_that_is_declared_as_latin_1_is_utf_8_and_one_bad_byte_spoils_only_itself(tmp_path):
    latin_1, one_bad = f"{HTML}; charset=iso-8859-1", html(f"{GERMAN}?").encode().replace(b"?", b"\xff")
    found = read_records(tmp_path, response(html(GERMAN).encode(), latin_1), response(one_bad, UTF_8))
    assert found == ([GERMAN, f"{GERMAN}\ufffd"], {})


def raw_deflate(data):
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def zstd(data):
    import zstandard

    return zstandard.compress(data)


def brotli(data):
    return pytest.importorskip("brotli").compress(data)


def chunks(data):
    pieces = [data[start : start + 100] for start in range(0, len(data), 100)]
    return b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


CODINGS = {
    "gzip": gzip.compress, "X-GZIP": gzip.compress, "deflate": zlib.compress, "Deflate": raw_deflate, "br": brotli,
    "zstd": zstd, "gzip, deflate": lambda data: zlib.compress(gzip.compress(data)), "gzip, gzip": gzip.compress,
    "identity, gzip": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "identity": bytes, "utf-8": bytes,
}  # fmt: skip


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_is_decoded_as_its_headers_say_or_kept_if_it_was_stored_decoded(tmp_path, coding):
    text = " ".join(f"word{number}" for number in range(300))
    page, encoded = html(text).encode(), CODINGS[coding](html(text).encode())
    headers = (UTF_8, f"content-encoding: {coding}")
    chunked = (*headers, "Transfer-Encoding: chunked")
    found = read_records(
        tmp_path, response(encoded, *headers), response(chunks(encoded), *chunked), response(encoded, *chunked),
        response(page, *headers), response(chunks(page), *chunked),
        response(b"Stored", "Content-Type: text/plain", headers[1]),
    )  # fmt: skip
    assert found == ([text] * 5 + ["Stored"], {})


def test_the_size_of_a_chunk_may_be_wrong(tmp_path):
    chunked = (HTML.replace("html", "plain"), "Transfer-Encoding: chunked")
    for body, text in (
        (b"5\r\nabcde\r\n5\r\nfghij\r\n0\r\n\r\n", "abcdefghij"),
        (b"\r\n0005\r\nabcde\r\n\r\n5;x=1\r\nfghij\r\n", "abcdefghij"),  # line ends too many, and no last chunk
        (b"5\r\nabcde\r\n4\r\nfghij klm", "abcdefghij klm"),  # the rest is kept
        (b"5\r\nabcde\r\n1", "abcde"),  # cut within the size of a chunk
    ):
        assert read_records(tmp_path, response(body, *chunked)) == ([text], {})


def test_xhtml_ends_elements_as_xml_does(tmp_path):
    page = b"<html><head><title/><script src='a.js'/></head><body><p>A page.</p></body></html>"
    assert read_records(tmp_path, response(page, "Content-Type: application/xhtml+xml")) == (["A page."], {})


def test_what_cannot_be_decoded_is_no_text(tmp_path):
    page = html(" ".join(str(number) for number in range(3000))).encode()
    broken = bytearray(gzip.compress(page))
    broken[1000:1100] = bytes(100)
    coded = [(bytes(broken), "gzip"), (raw_deflate(page)[:-9], "deflate"), (b"\x1f\x9d" + os.urandom(500), "compress")]
    binary = [
        gzip.compress(page),
        zstd(page),
        bz2.compress(page),
        raw_deflate(page),
        b"%PDF-1.4\n(Text)",
        b"PK\x03\x04" + page,
    ]
    headers = [HTML, UTF_8, "Content-Type: text/plain", "Content-Type: text/plain; charset=gbk"]
    found = read_records(
        tmp_path, *(response(body, header, f"Content-Encoding: {name}") for body, name in coded for header in headers),
        *(response(body, header) for body in binary for header in headers),
    )  # fmt: skip
    assert found == ([], {
        "the Content-Encoding cannot be decoded": 12, "binary content that is declared as HTML or plain text": 24,
    })  # fmt: skip


def test_a_body_that_is_cut_short_is_read_up_to_the_cut(tmp_path):
    page = html(" ".join(f"word{number}" for number in range(3000))).encode()
    packed = gzip.compress(page)
    [unpacked, joined], skipped = read_records(
        tmp_path,
        response(packed[: len(packed) // 2], UTF_8, "Content-Encoding: gzip"),
        response(chunks(page)[:2000], UTF_8, "Transfer-Encoding: chunked"),
    )
    assert skipped == {}
    assert unpacked.startswith("word0 word1 word2 ")
    assert joined.startswith("word0 word1 word2 ")
    assert "\n" not in joined  # no sizes of chunks


@pytest.mark.parametrize("pack", [gzip.compress, zstd, brotli])
def test_a_body_that_is_a_decompression_bomb_is_too_long(tmp_path, pack):
    coding = {gzip.compress: "gzip", zstd: "zstd", brotli: "br"}[pack]
    bomb = response(pack(bytes(64 << 20)), UTF_8, f"Content-Encoding: {coding}")
    found = read_records(tmp_path, bomb, response(html("Next.").encode(), UTF_8))
    assert found == (["Next."], {"longer than 16 MiB": 1})


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
    monkeypatch.setattr("data_prep.compression.BOMB_FLOOR_BYTES", 1 << 20)
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == []
    assert "decompression bomb" in skipped.why


def test_a_page_that_is_too_long_is_skipped_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.records.MAX_DOCUMENT_BYTES", 2000)
    write_warc(tmp_path / "a.warc", [TEXTS[0], "long " * 1000, TEXTS[1]])
    texts, [skipped] = read_all(crawl(tmp_path))
    assert texts == TEXTS[:2]
    assert (skipped.num_units, skipped.unit) == (1, "record")


def test_any_compressed_file_is_read_as_its_content(tmp_path):
    import zstandard

    rng = random.Random(0)
    content = bytes(rng.choices(range(32, 127), k=1_000_000))
    whole = gzip.compress(content)
    padded = whole + bytes(512 + -len(whole) % 512)  # up to the end of a block
    packed = {
        "plain": content, "a.gz": gzip.compress(content), "a.bz2": bz2.compress(content),
        "a.zst": zstandard.compress(content), "members.gz": gzip.compress(content[:9]) + gzip.compress(content[9:]),
        "padded.gz": padded, "empty.gz": gzip.compress(b""),
    }  # fmt: skip
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        with open_plain(tmp_path / name) as file:
            assert file.read() == (b"" if name == "empty.gz" else content), name
        if name.startswith("a."):
            (tmp_path / name).write_bytes(data[:-5])
            with open_plain(tmp_path / name) as file, pytest.raises(DamagedFile, match=r"cut short|invalid"):
                file.read()
    (tmp_path / "zeros.gz").write_bytes(padded[:-1])
    with open_plain(tmp_path / "zeros.gz") as file, pytest.raises(DamagedFile, match="zero bytes from byte"):
        file.read()
    (tmp_path / "wrong.gz").write_bytes(b"plain text")
    with pytest.raises(DamagedFile, match="the file name says gzip"):
        open_plain(tmp_path / "wrong.gz")


# Pages of each real file, and whether it is damaged.
REAL = {
    "aut-example.warc.gz": (128, False), "aut-issue-514.warc": (3, False), "ccnet-sample.wet.txt": (3, True),
    "resiliparse-clipped.warc.gz": (0, True), "resiliparse-clueweb-quirk.warc.gz": (29, False),
    "resiliparse-warcfile.warc.gz": (16, False), "warcio-bad.arc": (0, True), "warcio-example.arc.gz": (1, False),
    "warcio-example-bad-non-chunked.warc.gz": (1, False), "warcio-example-trunc.warc": (1, False),
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

"""EPUB files: chapters in reading order, encodings, and what is lost."""

import io
import zipfile

import pytest

from data_prep.sources import Source
from data_prep.sources.epub import read_epub
from tests.data_prep.files import CONTAINER, XHTML, epub_files, read_all, write_epub, write_zip

pytest.importorskip("resiliparse", reason="needs the extra `corpora`")

XHTML_ITEM = 'media-type="application/xhtml+xml"'


def read(tmp_path, files):
    """The words of the book with these files, and what was skipped: (reason, damaged)."""
    text, skipped = read_epub((str(write_zip(tmp_path / "a.epub", files)), "a.epub"))
    return " ".join(text.split()), [(one.reason(), one.damaged) for one in skipped]


def with_package(files, *replacements):
    """The files of an EPUB whose package document is changed."""
    package = files["EPUB/book.opf"].decode()
    for old, new in replacements:
        assert old in package
        package = package.replace(old, new)
    return files | {"EPUB/book.opf": package.encode()}


def test_an_epub_is_its_chapters_in_order(tmp_path):
    write_epub(tmp_path / "a.epub", ["It was the best of times.", "It was the worst of times."])
    [text], skipped = read_all(Source("books", str(tmp_path)))
    words = "Chapter 0 It was the best of times. Chapter 1 It was the worst of times."
    assert " ".join(text.split()) == words
    assert skipped == []


def test_a_file_that_is_no_epub_is_skipped_and_nothing_is_unpacked(tmp_path):
    folder = tmp_path / "in" / "books"
    folder.mkdir(parents=True)
    whole = write_epub(folder / "whole.epub", ["Text."]).read_bytes()
    (folder / "cut.epub").write_bytes(whole[: len(whole) // 2])
    (folder / "not.epub").write_bytes(b"not a zip")
    write_zip(folder / "climbs.epub", {"../../escaped.xhtml": b"<p>out</p>", "mimetype": b"application/epub+zip"})
    write_zip(folder / "bomb.epub", {"a.xhtml": bytes(300 << 20)})
    before = sorted(tmp_path.rglob("*"))
    texts, skipped = read_all(Source("books", str(folder)))
    assert len(texts) == 1
    assert {one.name for one in skipped} == {"cut.epub", "not.epub", "climbs.epub", "bomb.epub"}
    assert "decompression bomb" in next(one.why for one in skipped if one.name == "bomb.epub")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("declared", "encoding", "word"),
    [
        ("windows-1251", "cp1251", "Река"),
        ("ISO-8859-1", "latin-1", "rivière"),
        ("iso-2022-jp", "iso2022_jp", "日本"),
        ("Shift_JIS", "cp932", "①日本"),
        ("gb2312", "gb18030", "朱镕基"),
        ("UTF-16", "utf-16", "Река"),
        ("UTF-16", "utf-16-be", "Река"),
        ("utf-8", "utf-8", "Река"),
        ("windows-1251", "utf-8-sig", "Река"),  # the mark counts
        ("utf-16", "utf-8", "Река"),  # converted, and the declaration was forgotten
        ("unknown", "utf-8", "Река"),
    ],
)
def test_a_chapter_is_read_in_its_encoding(tmp_path, declared, encoding, word):
    chapter = XHTML.format(declared, f"<p>{word}</p>").encode(encoding)
    assert read(tmp_path, epub_files(["x"]) | {"EPUB/c0.xhtml": chapter}) == (word, [])


def test_html_declares_its_encoding_in_meta(tmp_path):
    for meta in ("<meta charset=koi8-r>", "<meta http-equiv=Content-Type content='text/html; charset=koi8-r'>"):
        chapter = f"<html><head>{meta}</head><body>Река</body></html>".encode("koi8-r")
        assert read(tmp_path, epub_files(["x"]) | {"EPUB/c0.xhtml": chapter}) == ("Река", [])


def test_chapters_that_cannot_be_read_are_named_and_the_others_are_kept(tmp_path):
    files = epub_files(["one", "two", "three", "four", "five"])
    files["EPUB/c1.xhtml"] = XHTML.format("utf-8", "Река").encode("cp1251")
    del files["EPUB/c2.xhtml"]
    files = with_package(
        files,
        ('<item id="c3"', '<item id="other"'),
        (f'c4.xhtml" {XHTML_ITEM}', 'c4.pdf" media-type="application/pdf"'),
    )
    assert read(tmp_path, files) == (
        "Chapter 0 one",
        [
            ("1 chapter: the EPUB file does not contain the chapter (the first at chapter 4, c2.xhtml)", True),
            ("1 chapter: the manifest does not list the chapter (the first at chapter 5, c3)", True),
            ("1 chapter: the media type application/pdf is not text (the first at chapter 6, c4.pdf)", False),
            ("1 chapter: not in the reading order of the book (its spine)", False),  # the item "other"
            (
                "1 chapter: the text is not valid in the encoding that it declares, or in UTF-8 "
                "(the first at chapter 3, EPUB/c1.xhtml)",
                True,
            ),
        ],
    )
    texts, skipped = read_all(Source("books", str(tmp_path)))
    assert (len(texts), len(skipped)) == (1, 5)


def test_a_chapter_that_cannot_be_unpacked_is_named_and_the_others_are_kept(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # not compressed
        for name, content in epub_files(["one", "two"]).items():
            archive.writestr(name, content)
    (tmp_path / "a.epub").write_bytes(packed.getvalue().replace(b"<p>two", b"<p>owt"))
    [text], [skipped] = read_all(Source("books", str(tmp_path)))
    assert text.split() == ["Chapter", "0", "one"]
    assert (
        skipped.reason()
        == "1 chapter: the chapter cannot be unpacked (BadZipFile) (the first at chapter 3, EPUB/c1.xhtml)"
    )


ENCRYPTION = """<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"
xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData><enc:EncryptionMethod Algorithm="{}"/>
<enc:CipherData><enc:CipherReference URI="{}"/></enc:CipherData></enc:EncryptedData></encryption>"""


def test_an_encrypted_book_is_skipped_without_being_damaged(tmp_path):
    aes = ENCRYPTION.format("http://www.w3.org/2001/04/xmlenc#aes128-cbc", "EPUB/c1%2Exhtml")
    files = epub_files(["one", "two"]) | {"EPUB/c1.xhtml": bytes(range(256)), "META-INF/encryption.xml": aes.encode()}
    write_zip(tmp_path / "a.epub", files)
    texts, [skipped] = read_all(Source("books", str(tmp_path)))
    assert (texts, skipped.damaged) == ([], False)
    assert skipped.why == "encrypted (DRM): 1 of 2 chapters. Use a copy of the book without DRM"


def test_a_book_with_obfuscated_fonts_is_read(tmp_path):
    fonts = ENCRYPTION.format("http://www.idpf.org/2008/embedding", "EPUB/a.otf").encode()
    files = epub_files(["one"]) | {"EPUB/a.otf": b"x", "META-INF/encryption.xml": fonts}
    assert read(tmp_path, files) == ("Chapter 0 one", [])


def test_the_files_that_are_no_chapters_need_not_exist(tmp_path):
    files = with_package(
        epub_files(["one"]), ("</manifest>", '<item id="f" href="gone.otf" media-type="font/otf"/></manifest>')
    )
    del files["EPUB/nav.xhtml"]
    assert read(tmp_path, files)[0] == "Chapter 0 one"


@pytest.mark.parametrize(
    "media_type", ["text/html", "Application/XHTML+XML; charset=utf-8", "text/x-oeb1-document", ""]
)
def test_chapters_have_several_media_types(tmp_path, media_type):
    files = with_package(epub_files(["one"]), (f'c0.xhtml" {XHTML_ITEM}', f'c0.xhtml" media-type="{media_type}"'))
    assert read(tmp_path, files) == ("Chapter 0 one", [])


def test_a_picture_in_the_spine_is_left_out_or_replaced_by_its_fallback(tmp_path):
    files = with_package(
        epub_files(["one", "two"]),
        (f'<item id="c0" href="c0.xhtml" {XHTML_ITEM}', '<item id="c0" href="c0.svg" media-type="image/svg+xml"'),
        (
            f'<item id="c1" href="c1.xhtml" {XHTML_ITEM}',
            '<item id="c1" href="c1.png" media-type="image/png" fallback="t"',
        ),
        ("</manifest>", f'<item id="t" href="c1.xhtml" {XHTML_ITEM}/></manifest>'),
    )
    assert read(tmp_path, files) == ("Chapter 1 two", [("1 chapter: a picture or sound", False)])


def test_a_chapter_is_read_once_and_also_if_it_is_not_linear(tmp_path):
    files = with_package(
        epub_files(["one", "two"]), ('<itemref idref="c0"/>', '<itemref idref="c0" linear="no"/>' * 1000)
    )
    assert read(tmp_path, files) == ("Chapter 0 one Chapter 1 two", [])


@pytest.mark.parametrize(
    ("href", "name"),
    [
        ("a%20%C3%A9.xhtml", "EPUB/a é.xhtml"),
        ("a é.xhtml", "EPUB/a e\u0301.xhtml"),  # written by macOS
        ("100%25.xhtml", "EPUB/100%.xhtml"),
        ("a%20b.xhtml", "EPUB/a%20b.xhtml"),
        ("./x/../c.xhtml#start", "EPUB/c.xhtml"),
        ("../text/c.xhtml", "text/c.xhtml"),
        ("../../c.xhtml", "c.xhtml"),
        ("/EPUB/c.xhtml", "EPUB/c.xhtml"),
        ("text\\c.xhtml", "EPUB/text/c.xhtml"),
        ("text/c.xhtml", "EPUB\\text\\c.xhtml"),
        ("Text/C.XHTML", "EPUB/text/c.xhtml"),
        ("a&amp;b.xhtml", "EPUB/a&b.xhtml"),
    ],
)
def test_links_are_followed_to_the_file_that_they_mean(tmp_path, href, name):
    files = with_package(epub_files(["one"]), ('href="c0.xhtml"', f'href="{href}"'))
    files[name] = files.pop("EPUB/c0.xhtml")
    assert read(tmp_path, files) == ("Chapter 0 one", [])


@pytest.mark.parametrize(
    "chapter",
    [
        "<html><head><title/><script src='a.js'/></head><body><p>one</p><p>two</p></body></html>",
        "<html><head><title>T</title></head><body><p>one</p>\n<![CDATA[two]]></body></html>",
        "<!DOCTYPE html [<!ENTITY a 'x'>]><html><head/><body>one&nbsp;two</body></html>",
        '<h:html xmlns:h="http://www.w3.org/1999/xhtml"><h:body><h:p>one</h:p><h:p>two</h:p></h:body></h:html>',
        "<dtbook><head><meta/></head><book><level1><p>one</p><p>two</p></level1></book></dtbook>",
    ],
)
def test_xhtml_is_not_mistaken_for_html(tmp_path, chapter):
    assert read(tmp_path, epub_files(["x"]) | {"EPUB/c0.xhtml": chapter.encode()}) == ("one two", [])


def test_figures_and_their_captions_are_text(tmp_path):
    files = epub_files(
        ["<figure><img src='a.png'/><pre>code</pre><figcaption>Caption.</figcaption></figure><p>End.</p>"]
    )
    assert read(tmp_path, files) == ("Chapter 0 code Caption. End.", [])


def test_chapters_without_text_or_outside_the_spine_are_counted(tmp_path):
    files = epub_files(["one", "two", "three"])
    files["EPUB/c0.xhtml"] = XHTML.format("utf-8", "<img src='cover.png'/>").encode()
    files = with_package(files, ('<itemref idref="c1"/>', ""))
    reasons = ["1 chapter: not in the reading order of the book (its spine)", "1 chapter: without text"]
    assert read(tmp_path, files) == ("Chapter 2 three", [(reason, False) for reason in reasons])


def test_the_first_package_of_several_is_read(tmp_path):
    other = '<rootfile full-path="EPUB/{}" media-type="{}"/>'
    container = CONTAINER.replace("<rootfiles>", "<rootfiles>" + other.format("a.pdf", "application/pdf"))
    container = container.replace(
        "</rootfiles>", other.format("braille.opf", "application/oebps-package+xml") + "</rootfiles>"
    )
    files = epub_files(["one"]) | {"META-INF/container.xml": container.encode(), "EPUB/braille.opf": b"<package/>"}
    assert read(tmp_path, files) == ("Chapter 0 one", [])


def test_the_package_is_read_in_its_encoding_and_its_entities_are_not_expanded(tmp_path):
    files = with_package(
        epub_files(["one"]),
        ("<package", '<!DOCTYPE package [<!ENTITY a "&a;&a;"><!ENTITY b SYSTEM "http://localhost/x">]><opf:package'),
        ("</package>", "</opf:package>"),
        ("<metadata/>", "<metadata><dc:title>A & &a; &b;</dc:title></metadata>"),
        ("<item ", "<opf:item "),
    )
    files["EPUB/book.opf"] = files["EPUB/book.opf"].decode().encode("utf-16")
    assert read(tmp_path, files) == ("Chapter 0 one", [])


def test_the_archive_may_be_written_in_another_way(tmp_path):
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with (
            zipfile.ZipFile(tmp_path / "a.epub", "w", compression) as archive,
            pytest.warns(UserWarning, match="Duplicate"),
        ):
            archive.comment = b"a comment"
            archive.writestr("EPUB/c0.xhtml", b"an older version")
            for name, content in epub_files(["one"]).items():
                with archive.open(name, "w", force_zip64=True) as file:
                    file.write(content if name != "mimetype" else b"application/zip\n")
        assert read_epub((str(tmp_path / "a.epub"), "a.epub")) == ("Chapter 0\n\none", [])

"""Small archives, dumps and books, written as others write them."""

import bz2
import gzip
import io
import zipfile
from pathlib import Path

PAGE = "<html><head><title>T</title></head><body><nav>Home About</nav><main><p>{}</p></main></body></html>"
DUMP_HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en">
<siteinfo><sitename>Wikipedia</sitename><dbname>enwiki</dbname><base>https://en.wikipedia.org/wiki/Main_Page</base>
<generator>MediaWiki 1.27</generator><case>first-letter</case><namespaces>
<namespace key="0" case="first-letter" /><namespace key="1" case="first-letter">Talk</namespace>
<namespace key="10" case="first-letter">Template</namespace></namespaces></siteinfo>
"""


def read_all(source, part_bytes=1 << 30, **options):
    """Texts of the documents and what was skipped of a source, in order."""
    documents, skipped = read_all_documents(source, part_bytes, **options)
    return [document.text for document in documents], skipped


def read_all_documents(source, part_bytes=1 << 30, **options):
    """Documents and what was skipped of a source, in order."""
    from data_prep.sources import Document, Skipped, list_files, read_documents, split_into_parts

    options = {"text_field": "text", "id_field": "", "date_field": "date", **options}
    parts = split_into_parts(source, list_files(source), part_bytes, options)
    found = [document for part in parts for document in read_documents(part)]
    return [one for one in found if isinstance(one, Document)], [one for one in found if isinstance(one, Skipped)]


def write_arrow(path: Path, table) -> Path:
    """A file in the stream format of Arrow, as the library datasets writes it."""
    import pyarrow

    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def write_warc(path: Path, pages, kind="response", status="200 OK", content_type="text/html; charset=utf-8") -> Path:
    """A WARC of these pages (text of each), or a WET (kind conversion), by warcio."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        for number, text in enumerate(pages):
            uri = f"http://example.com/{number}"
            if kind == "conversion":
                content = io.BytesIO(text if isinstance(text, bytes) else text.encode())
                writer.write_record(writer.create_warc_record(uri, kind, content, warc_content_type="text/plain"))
                continue
            header = StatusAndHeaders(status, [("Content-Type", content_type)], protocol="HTTP/1.1")
            content = text if isinstance(text, bytes) else PAGE.format(text).encode()
            writer.write_record(writer.create_warc_record(uri, kind, io.BytesIO(content), http_headers=header))
    return path


def write_dump(path: Path, pages) -> Path:
    """A dump of (title, namespace, redirect, markup)."""
    from xml.sax.saxutils import escape

    parts = [DUMP_HEAD]
    for number, (title, namespace, redirect, markup) in enumerate(pages, start=1):
        parts.append(
            f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>"
            + (f'<redirect title="{escape(redirect)}" />' if redirect else "")
            + f"<revision><id>{number}</id><timestamp>2020-01-01T00:00:00Z</timestamp><contributor><username>u"
            f"</username><id>1</id></contributor><model>wikitext</model><format>text/x-wiki</format>"
            f'<text xml:space="preserve">{escape(markup)}</text><sha1>x</sha1></revision></page>\n'
        )
    content = ("".join(parts) + "</mediawiki>\n").encode()
    packed = {".bz2": bz2.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(content)
    path.write_bytes(packed)
    return path


CONTAINER = """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="EPUB/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
XHTML = """<?xml version="1.0" encoding="{}"?><!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body>{}</body></html>"""


def epub_files(chapters) -> dict[str, bytes]:
    """The files of an EPUB: chapters c0.xhtml, c1.xhtml, ..., and a navigation document at the start of the spine."""
    names = [f"c{number}" for number in range(len(chapters))]
    items = "".join(f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>' for name in names)
    nav = '<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>'
    spine = "".join(f'<itemref idref="{name}"/>' for name in ["nav", *names])
    package = f"""<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata/>
<manifest>{nav}{items}</manifest><spine>{spine}</spine></package>"""
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "EPUB/book.opf": package}
    files["EPUB/nav.xhtml"] = XHTML.format("utf-8", "<nav>Contents</nav>")
    for number, text in enumerate(chapters):
        files[f"EPUB/c{number}.xhtml"] = XHTML.format("utf-8", f"<h1>Chapter {number}</h1><p>{text}</p>")
    return {name: content.encode() for name, content in files.items()}


def write_epub(path: Path, chapters) -> Path:
    return write_zip(path, epub_files(chapters))


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path

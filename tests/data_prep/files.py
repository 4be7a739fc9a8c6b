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


def write_epub(path: Path, chapters) -> Path:
    """By ebooklib, with a table of contents as books have it."""
    from ebooklib import epub

    book = epub.EpubBook()
    book.set_identifier("id")
    book.set_title("A Book")
    book.set_language("en")
    items = []
    for number, text in enumerate(chapters):
        item = epub.EpubHtml(title=f"Chapter {number}", file_name=f"c{number}.xhtml", lang="en")
        item.content = f"<html><body><h1>Chapter {number}</h1><p>{text}</p></body></html>"
        book.add_item(item)
        items.append(item)
    book.toc = items
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", *items]
    epub.write_epub(str(path), book)
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path

"""Bytes in, characters out: documents in many encodings, containers and languages, whole and damaged.

What comes out is compared with what was put in. Every character is in a document that is read, or it belongs to a unit,
a file or a document that is counted with a reason.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data_prep.cleaning.cleaner import Cleaner, Cleaning
from data_prep.sources import Document, Skipped, Source, list_files, read_documents, split_into_parts
from tests.data_prep.files import DUMP_HEAD, XHTML, epub_files, write_zip
from tests.data_prep.languages import PARAGRAPHS, document

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")

ENCODINGS = {
    "utf-8": set(PARAGRAPHS), "utf-8-sig": set(PARAGRAPHS), "utf-16": set(PARAGRAPHS), "utf-32": set(PARAGRAPHS),
    "utf-16-le": {"en", "ru"}, "utf-16-be": {"en", "ru"}, "windows-1251": {"en", "ru"}, "koi8-r": {"en", "ru"},
    "iso-8859-5": {"en", "ru"}, "windows-1256": {"en", "ar"}, "euc-kr": {"en", "ko"}, "gb18030": {"en", "zh", "ja"},
    "big5": {"en"}, "shift_jis": {"en", "ja"}, "euc-jp": {"en", "ja"}, "windows-874": {"en", "th"},
    "iso-8859-1": {"en"},
}  # fmt: skip
"""Encodings by their names on the web, and the languages of `languages` that each of them can express."""
PYTHON_NAMES = {"windows-874": "cp874"}
MINUTES = 10


def encoded(text: str, encoding: str) -> bytes:
    return text.encode(PYTHON_NAMES.get(encoding, encoding))


def squeezed(text: str) -> str:
    """Return a text without white space, which extraction from HTML and wiki markup may change."""
    return re.sub(r"\s", "", text)


@dataclass
class Case:
    """A file, the texts that were put into it, and what may become of them."""

    kind: str
    name: str
    content: bytes
    texts: list[str]
    per_unit: bool = True
    """Whether each text is a unit of its own that can be counted: a line, a record, a page or a row."""
    may_refuse: bool = False
    """Whether the file may be refused as a whole, with a reason, because nothing says what its encoding is."""
    checked: bool = False
    """Whether the container has a checksum, so that no changed byte goes unnoticed."""
    damage: list[str] = field(default_factory=list)


def text_lines(rng, texts, encoding) -> Case:
    declared = encoding.startswith("utf-8") or encoding in ("utf-16", "utf-32")
    flat = [text.replace("\n", " ") for text in texts]
    return Case("text", "a.txt", encoded("\n".join(flat), encoding), flat, may_refuse=not declared)


def json_lines(rng, texts, encoding) -> Case:
    escaped = rng.random() < 0.3
    lines = [json.dumps({"id": n, "text": text}, ensure_ascii=escaped) for n, text in enumerate(texts)]
    ascii_only = escaped and not encoding.startswith("utf-")
    declared = ascii_only or encoding.startswith("utf-8") or encoding in ("utf-16", "utf-32")
    return Case("text", "a.jsonl", encoded("\r\n".join(lines), encoding), texts, may_refuse=not declared)


def table(rng, texts, encoding) -> Case:
    import pyarrow
    import pyarrow.parquet

    rows, file = pyarrow.table({"text": texts}), io.BytesIO()
    name = rng.choice(["a.parquet", "a.arrow", "a.feather"])
    if name == "a.parquet":
        pyarrow.parquet.write_table(rows, file, compression=rng.choice(["zstd", "snappy", "none"]))
    else:
        with (pyarrow.ipc.new_stream if name == "a.arrow" else pyarrow.ipc.new_file)(file, rows.schema) as writer:
            writer.write_table(rows)
    return Case("text", name, file.getvalue(), texts)


def book(rng, texts, encoding) -> Case:
    declared = encoding.startswith("utf-8") or encoding in ("utf-16", "utf-32")
    return Case("books", "a.txt", encoded(texts[0], encoding), texts[:1], may_refuse=not declared)


def epub(rng, texts, encoding) -> Case:
    files = epub_files(["x"] * len(texts))
    for number, text in enumerate(texts):
        body = "".join(f"<p>{line}</p>" for line in text.split("\n"))
        files[f"EPUB/c{number}.xhtml"] = encoded(XHTML.format(encoding.removesuffix("-sig"), body), encoding)
    path = Path(os.environ["PYTEST_TMP"]) / "a.epub"
    return Case("books", "a.epub", write_zip(path, files).read_bytes(), texts, per_unit=False, checked=True)


def web(rng, texts, encoding) -> Case:
    where = rng.choice(["http", "meta", "xml"]) if "utf-16" not in encoding and encoding != "utf-32" else "http"
    label = encoding.removesuffix("-sig")
    records = []
    for number, text in enumerate(texts):
        paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n"))
        meta = f'<meta charset="{label}">' if where == "meta" else ""
        prolog = f'<?xml version="1.0" encoding="{label}"?>' if where == "xml" else ""
        html = f"{prolog}<html><head>{meta}<title>t</title></head><body><article>{paragraphs}</article></body></html>"
        body, coding = encoded(html, encoding), rng.choice(["", "", "gzip", "x-gzip", "deflate"])
        headers = f"Content-Type: text/html{f'; charset={label}' if where == 'http' else ''}\r\n"
        if coding:
            import zlib

            headers += f"Content-Encoding: {coding}\r\n"
            body = gzip.compress(body) if "gzip" in coding else zlib.compress(body)
        block = f"HTTP/1.1 200 OK\r\n{headers}\r\n".encode() + body
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://x.example/{number}\r\n"
            f"WARC-Date: 2024-03-01T10:00:00Z\r\nWARC-Record-ID: <urn:uuid:{number:032d}>\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
        )
        records.append(head.encode() + block + b"\r\n\r\n")
    name = rng.choice(["a.warc", "a.warc.gz"])
    content = b"".join(map(gzip.compress, records) if name.endswith(".gz") else records)
    # The web has no UTF-32: browsers do not read it.
    return Case("common-crawl", name, content, texts, checked=name.endswith(".gz"), may_refuse=encoding == "utf-32")


def wiki(rng, texts, encoding) -> Case:
    pages = "".join(
        f"<page><title>T{n}</title><ns>0</ns><id>{n}</id><revision><id>{n}</id>"
        f"<timestamp>2020-01-01T00:00:00Z</timestamp><text>{text}</text></revision></page>\n"
        for n, text in enumerate(texts)
    )
    return Case("wikipedia", "a.xml", f"{DUMP_HEAD}{pages}</mediawiki>\n".encode(), texts)


CONTAINERS = (text_lines, json_lines, table, book, epub, web, wiki)
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": None}


def packed(rng, case: Case) -> Case:
    """Return the case with a compressed file, if the kind of file can be compressed."""
    if not case.name.endswith((".txt", ".jsonl", ".warc", ".xml")) or case.kind == "books":
        return case
    ending = rng.choice(list(PACKED))
    if ending == ".xz" and case.kind != "text":
        return case
    import zstandard

    case.content = (PACKED[ending] or zstandard.compress)(case.content)
    case.name += ending
    case.checked |= ending in (".gz", ".bz2", ".xz")
    return case


def damaged(rng, case: Case) -> Case:
    """Return the case with a damaged file."""
    content, how = bytearray(case.content), rng.choice(["cut", "flip", "zeros", "removed"])
    place = rng.randrange(len(content))
    if how == "cut":
        del content[place:]
    elif how == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    else:
        del content[place : place + rng.randrange(1, 200)]
    case.content = bytes(content)
    case.damage.append(f"{how} at {place}")
    return case


def make_case(rng: random.Random, container=None, encoding=None) -> Case:
    encoding = encoding or rng.choice(list(ENCODINGS))
    languages = sorted(ENCODINGS[encoding])
    texts = []
    for number in range(rng.randrange(1, 7)):
        language = rng.choice(languages)
        lines = document(language, rng.randrange(10**9), rng.choice([60, 120, 300])).split("\n")
        texts.append("\n".join([f"Beginning {number}.", *lines, f"End {number}."]))
    case = packed(rng, (container or rng.choice(CONTAINERS))(rng, texts, encoding))
    return damaged(rng, case) if rng.random() < 0.5 else case


def check(case: Case, folder: Path) -> None:
    """Read the file of a case, and compare what is read with what was put in."""
    for old in folder.iterdir():
        old.unlink()
    (folder / case.name).write_bytes(case.content)
    source = Source(case.kind, str(folder / case.name if case.kind != "books" else folder))
    options = {"text_field": "text", "id_field": "", "date_field": "date"}
    parts = split_into_parts(
        source, list_files(source), random.Random(len(case.content)).choice([700, 1 << 30]), options
    )
    found = [one for part in parts for one in read_documents(part)]
    cleaner = Cleaner(Cleaning())
    read = [one.text for one in found if isinstance(one, Document)]
    unreadable = sum(cleaner.clean(Document(text)).reason is not None for text in read)
    counted = [one for one in found if isinstance(one, Skipped)]
    read_squeezed = [squeezed(text) for text in read]
    wanted = [squeezed(text) for text in case.texts]
    if case.kind == "wikipedia":  # the title comes first
        exact = sum(any(text.endswith(want) for text in read_squeezed) for want in wanted)
    elif not case.per_unit:
        exact = sum(any(want in text for text in read_squeezed) for want in wanted)
    else:
        exact = sum(want in read_squeezed for want in wanted)
    missing = len(wanted) - exact
    described = (case.kind, case.name, case.damage, [one.reason() for one in counted], len(wanted), len(read), exact)
    if not case.damage:
        if case.may_refuse and missing:
            assert counted or unreadable == len(read), described
        else:
            assert not missing, described
            assert not any(one.damaged for one in counted), described
        return
    # A text that is not exact is counted as damage, or it is there with a change that no reader can notice, because
    # nothing in the file says what the bytes were.
    changed = len(read) - exact if case.per_unit else bool(read)
    # A file of lines or records that ends after one of them is whole. In web archives, so is each compressed record.
    is_shorter = case.per_unit and case.damage[0].startswith("cut") and exact == len(read)
    is_shorter &= not case.checked or case.kind == "common-crawl"
    # Without the bytes from the middle of a page to that of the next, the XML of a dump has one page of both.
    is_joined = case.kind == "wikipedia" and case.damage[0].startswith("removed")
    explained = bool(counted) or unreadable or is_shorter or (not case.checked and (changed >= 1 or is_joined))
    assert not missing or explained, described


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_every_container_and_encoding_gives_the_text_that_was_put_in(container, encoding, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    (tmp_path / "in").mkdir()
    rng = random.Random(f"{container.__name__} {encoding}")
    for _ in range(2):
        case = make_case(rng, container, encoding)
        while case.damage:
            case = make_case(rng, container, encoding)
        check(case, tmp_path / "in")


@pytest.mark.slow
def test_ten_minutes_of_random_files_lose_nothing_silently(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    (tmp_path / "in").mkdir()
    seed = int(os.environ.get("ALMA_FUZZ_SEED", random.randrange(10**9)))
    end, number = time.monotonic() + 60 * float(os.environ.get("ALMA_FUZZ_MINUTES", MINUTES)), 0
    while time.monotonic() < end:
        case = make_case(random.Random(f"{seed} {number}"))
        try:
            check(case, tmp_path / "in")
        except AssertionError as error:
            raise AssertionError(f"ALMA_FUZZ_SEED={seed}, case {number}: {error}") from error
        number += 1
    print(f"{number} files, seed {seed}")

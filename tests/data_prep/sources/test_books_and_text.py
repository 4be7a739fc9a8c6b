"""Books without Project Gutenberg's frame; text in JSON lines, Parquet and compressed files."""

import datetime
import gzip
import json

import pytest

from data_prep.sources import Source
from data_prep.sources.books import without_gutenberg
from tests.data_prep.files import read_all, read_all_documents, write_dump, write_warc

FRAME = """The Project Gutenberg EBook of Moby Dick, by Herman Melville

This eBook is for the use of anyone anywhere

{start}



Produced by Daniel Lazarus and
Jonesey



MOBY DICK

Call me Ishmael.

{end}
*** END: FULL LICENSE ***
Section 1. General Terms
"""


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (
            "*** START OF THIS PROJECT GUTENBERG EBOOK MOBY DICK ***",
            "End of Project Gutenberg's Moby Dick, by Melville",
        ),
        ("*** START OF THE PROJECT GUTENBERG EBOOK 2701 ***", "*** END OF THE PROJECT GUTENBERG EBOOK 2701 ***"),
        ("***START OF THE PROJECT GUTENBERG EBOOK MOBY\nDICK***", "***END OF THE PROJECT GUTENBERG EBOOK MOBY***"),
        ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*", "End of the Project Gutenberg Etext"),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_text_added_by_project_gutenberg_is_removed(start, end, line_end):
    text = FRAME.format(start=start, end=end).replace("\n", line_end)
    assert without_gutenberg(text).replace("\r\n", "\n") == "MOBY DICK\n\nCall me Ishmael.\n"


def test_other_books_are_unchanged():
    text = "  A book about Project Gutenberg.\r\nEnd of Project Gutenberg? *** Never ***\n"
    assert without_gutenberg(text) == text


def test_small_print_at_the_end_does_not_remove_the_book():
    book = "A line of the book.\n" * 50
    text = f"{book}\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\nlegal\n"
    assert book.strip() in without_gutenberg(text)
    licence = "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nSection 1. General Terms\n"
    assert without_gutenberg(book + licence) == book.strip() + "\n"


def test_endings_in_capitals_are_recognised(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "one"}\n')
    (tmp_path / "B.TXT").write_text("two\n")
    assert read_all(Source("text", str(tmp_path))) == (["one", "two"], [])


def test_a_real_book_begins_with_itself(shared_data, tmp_path):
    (tmp_path / "a.txt").write_bytes((shared_data / "books" / "gitenberg_moby_dick_2701-0.txt").read_bytes())
    [text], _ = read_all(Source("books", str(tmp_path)))
    assert text.startswith("MOBY-DICK;")
    assert text.split()[-4:] == ["only", "found", "another", "orphan."]
    assert "START OF" not in text
    assert "General Terms" not in text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_book_with_a_byte_order_mark_is_read_in_its_encoding(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("Ишмаэль & Ахав\n".encode(encoding))
    assert read_all(Source("books", str(tmp_path))) == (["Ишмаэль & Ахав\n"], [])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            "Call me".encode("utf-16-le"),
            "the text looks like UTF-16LE without a byte order mark. Replace the file by the output of: "
            "iconv -f UTF-16LE -t UTF-8 FILE",
        ),
        (
            "café".encode("latin-1"),
            "the text is not valid UTF-8 at byte 3. Replace the file by the output of: "
            "iconv -f WINDOWS-1252 -t UTF-8 FILE (if it is in Windows-1252)",
        ),
        (b"\xff\xfea\0\0", "the text begins with the mark of utf-16, but is not valid at byte 4"),
    ],
)
def test_a_book_in_an_unknown_encoding_is_skipped_with_the_way_to_convert_it(tmp_path, content, why):
    (tmp_path / "a.md").write_bytes(content)
    texts, [skipped] = read_all(Source("books", str(tmp_path)))
    assert (texts, skipped.why, skipped.damaged) == ([], why, True)


def test_json_lines_give_their_field(tmp_path):
    rows = [{"text": "one two", "url": "x"}, {"text": "drei vier é"}, {"text": " "}, {"other": "x"}, {"text": 5}, [1]]
    lines = [json.dumps(row) for row in rows] + ["", "{broken", '{"text": "half a pair \\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    texts, skipped = read_all(Source("text", str(tmp_path)))
    assert texts == ["one two", "drei vier é", "half a pair ?", "packed"]
    assert {(one.why, one.num_units) for one in skipped} == {
        ("the JSON object has no field 'text'", 1), ("the field 'text' is not text", 1),
        ("the line is not a JSON object", 1), ("not valid JSON", 1),
    }  # fmt: skip
    assert read_all(Source("text", str(tmp_path)), text_field="url")[0] == ["x"]
    # Split anywhere, each line is read once.
    for part_bytes in (1, 7, 50):
        assert read_all(Source("text", str(tmp_path)), part_bytes)[0] == texts


def test_a_row_of_parquet_that_is_no_text_is_skipped_and_the_others_are_kept(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `corpora`")
    import pyarrow

    rows = [f"row {number}".encode() for number in range(600)]
    rows[300] = b"not utf-8 \xff"
    offsets, data = pyarrow.array(rows, pyarrow.binary()).buffers()[1:]
    texts = pyarrow.StringArray.from_buffers(len(rows), offsets, data)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    days = pyarrow.array([2**31 - 1, 0], pyarrow.int32()).cast(pyarrow.date32())
    parquet.write_table(pyarrow.table({"text": days}), tmp_path / "days.parquet")
    found, skipped = read_all(Source("text", str(tmp_path)))
    assert len(found) == 599
    assert [(one.name, one.num_units) for one in skipped] == [("a.parquet", 1), ("days.parquet", 2)]


def test_parquet_gives_its_column(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `corpora`")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["one two", None, "three"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-10])
    texts, skipped = read_all(Source("text", str(tmp_path)))
    assert texts == ["one two", "three"]
    assert [(one.name, one.num_units) for one in skipped] == [("a.parquet", 1), ("b.parquet", 0)]
    texts, [other, *_] = read_all(Source("text", str(tmp_path)), text_field="body")
    assert (texts, other.why) == ([], "no column 'body': the columns are text, n")


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.text.MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt").write_text("short\n" + "x" * 1000 + "\nlast\n" + "y" * 101)
    texts, [skipped] = read_all(Source("text", str(tmp_path)))
    assert texts == ["short", "last"]
    assert (skipped.num_units, skipped.first_byte) == (2, 6)
    for part_bytes in (5, 64, 300):
        assert read_all(Source("text", str(tmp_path)), part_bytes)[0] == texts


def test_shares_and_at_signs():
    assert Source.parse("books:/a@0.25") == Source("books", "/a", 0.25)
    assert Source.parse("books:/a@b") == Source("books", "/a@b")
    assert Source.parse("python-docs@0.5") == Source("python-docs", "", 0.5)
    assert str(Source.parse("text:/x@0.5")) == "text:/x@0.5"
    with pytest.raises(ValueError, match=r"share of 1\.5: the share must be above 0"):
        Source.parse("text:/x@1.5")


def test_an_at_sign_in_a_name_that_exists_is_a_name(tmp_path):
    (tmp_path / "a@0.5").mkdir()
    assert Source.parse(f"books:{tmp_path}/a@0.5").share is None


def test_documents_have_the_names_and_dates_of_their_source(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"text": "one", "id": "a1", "url": "http://a", "date": "1996-05-08"},
        {"text": "two", "url": "http://b", "date": None},
        {"text": "three", "id": 7, "when": "1790"},
        {"text": "four", "id": True},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt").write_text("five\n\nsix\n")
    day = datetime.date(2019, 3, 25)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["seven"], "date": [day]}), tmp_path / "c.parquet")
    source = Source("text", str(tmp_path))
    starts = [sum(len(json.dumps(row)) + 1 for row in rows[:number]) for number in range(4)]
    assert [tuple(document) for document in read_all_documents(source)[0]] == [
        ("one", "a1", "1996-05-08"), ("two", "http://b", ""), ("three", "7", ""), ("four", f"a.jsonl:{starts[3]}", ""),
        ("five", "b.txt:0", ""), ("six", "b.txt:6", ""), ("seven", "c.parquet:0", "2019-03-25"),
    ]  # fmt: skip
    named = read_all_documents(source, id_field="url", date_field="when")[0]
    assert [document.id for document in named[:3]] == ["http://a", "http://b", f"a.jsonl:{starts[2]}"]
    assert named[2].date == "1790"


def test_pages_articles_and_books_have_names(tmp_path):
    write_warc(tmp_path / "a.warc", ["a page"])
    (page,) = read_all_documents(Source("common-crawl", str(tmp_path)))[0]
    assert page.id == "http://example.com/0"
    assert page.date[:2] == "20"
    write_dump(tmp_path / "a.xml", [("Title", 0, None, "an article")])
    (article,) = read_all_documents(Source("wikipedia", str(tmp_path)))[0]
    assert (article.id, article.date) == ("Title", "2020-01-01T00:00:00Z")
    (tmp_path / "book.txt").write_text("a book")
    (book,) = read_all_documents(Source("books", str(tmp_path)))[0]
    assert (book.id, book.date) == ("book.txt", "")

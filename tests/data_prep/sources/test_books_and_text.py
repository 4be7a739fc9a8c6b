"""Books without Project Gutenberg's frame; text in JSON lines, Parquet and compressed files."""

import datetime
import gzip
import json

import pytest

from data_prep.errors import PrepError
from data_prep.sources import Source, list_files
from data_prep.sources.books import without_gutenberg
from data_prep.sources.dates import parse_date
from tests.data_prep.files import read_all, read_all_documents, write_arrow, write_dump, write_warc

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
def test_text_added_by_project_gutenberg_is_removed(tmp_path, start, end, line_end):
    (tmp_path / "a.txt").write_bytes(FRAME.format(start=start, end=end).replace("\n", line_end).encode())
    assert read_all(Source("books", str(tmp_path))) == (["MOBY DICK\n\nCall me Ishmael.\n"], [])


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


def test_lines_of_books_from_other_systems_end_alike(tmp_path):
    for name, end in (("a.txt", "\r\n"), ("b.txt", "\n"), ("c.md", "\r")):
        (tmp_path / name).write_bytes(f"One{end}{end}two{end}".encode())
    assert read_all(Source("books", str(tmp_path))) == (["One\n\ntwo\n"] * 3, [])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_book_with_a_byte_order_mark_is_read_in_its_encoding(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("Ишмаэль & Ахав\n".encode(encoding))
    assert read_all(Source("books", str(tmp_path))) == (["Ишмаэль & Ахав\n"], [])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            "Call me".encode("utf-16-le"),
            "the file looks like UTF-16LE without a byte order mark, not UTF-8. Replace the file by the output of: "
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
        ("the line is not a JSON object", 1), ("not valid JSON", 1), ("no text", 1),
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


def test_text_and_dates_that_parquet_stores_as_bytes_and_nanoseconds_are_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `corpora`")
    import pyarrow

    times = pyarrow.array([1_577_836_800_000_000_001, 2**62], pyarrow.timestamp("ns"))
    days = pyarrow.array([2**31 - 1, 18262], pyarrow.int32()).cast(pyarrow.date32())
    table = {"text": ["één".encode(), b"\xff"], "id": [b"a1", b"a2"], "time": times, "day": days}
    parquet.write_table(pyarrow.table(table), tmp_path / "2015.parquet")
    source = Source("text", str(tmp_path))
    [document], [skipped] = read_all_documents(source, date_field="time")
    assert document == ("één", "a1", "2020-01-01 00:00:00.000000001")
    assert parse_date(document.date) == 20200101000000
    assert skipped.reason() == "1 row: not valid UTF-8 (the first at row 2)"
    # A day in the year 5881580 is no missing date, for which that of the file would be taken.
    [document], _ = read_all_documents(source, date_field="day")
    assert document.date == "<value out of range: 2147483647>" and not parse_date(document.date)


def test_a_page_of_parquet_that_the_library_passes_over_is_damage(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `corpora`")
    import pyarrow

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a text of some words"]}), path)
    content, column = bytearray(path.read_bytes()), parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content[column.data_page_offset + 1] ^= 1 << 1  # the kind of the page, now one that is not read
    path.write_bytes(content)
    texts, [skipped] = read_all(Source("text", str(path)))
    assert (texts, skipped.reason()) == ([], "damaged: only 0 of 1 rows can be read")


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


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_a_null_and_an_empty_text_are_counted_and_are_no_damage(tmp_path, ending):
    import pyarrow
    import pyarrow.parquet

    texts = ["one", None, "", " \t", "two"]
    if ending == "jsonl":
        lines = [json.dumps({"text": text}) for text in texts] + ['{"text": NaN}', ""]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
    elif ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts + [None]}), tmp_path / "a.parquet")
    else:
        write_arrow(tmp_path / "a.arrow", pyarrow.table({"text": texts + [None]}))
    found, [skipped] = read_all(Source("text", str(tmp_path)))
    assert found == ["one", "two"]
    assert (skipped.why, skipped.num_units, skipped.damaged) == ("no text", 4, False)


def test_a_dataset_that_the_library_datasets_saved_is_read(tmp_path):
    import pyarrow

    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write_arrow(tmp_path / split / "data-00000-of-00001.arrow", pyarrow.table({"text": [split], "n": [1]}))
        (tmp_path / split / "dataset_info.json").write_text(json.dumps({"features": {"text": {}}}, indent=2))
        (tmp_path / split / "state.json").write_text(json.dumps({"_fingerprint": "1"}, indent=2))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    write_arrow(tmp_path / "train" / "cache-0123.arrow", pyarrow.table({"indices": [0]}))
    documents, skipped = read_all_documents(Source("text", str(tmp_path)))
    assert [(one.text, one.id) for one in documents] == [
        ("test", "test/data-00000-of-00001.arrow:0"), ("train", "train/data-00000-of-00001.arrow:0"),
    ]  # fmt: skip
    assert len(skipped) == 6
    assert not any(one.damaged for one in skipped)


def test_a_path_is_no_dataset_of_the_hub(tmp_path):
    with pytest.raises(PrepError, match=f"this is a path, not the name of a dataset of the Hub. Write text:{tmp_path}"):
        list_files(Source("hf", str(tmp_path)))


def test_text_columns_of_all_arrow_types_are_read(tmp_path):
    import pyarrow

    texts = ["one", None, "two"]
    types = {
        "large": pyarrow.large_string(), "view": pyarrow.string_view(), "json": pyarrow.json_(pyarrow.string()),
        "dictionary": pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    }  # fmt: skip
    for name, kind in types.items():
        text = (
            pyarrow.array(texts, pyarrow.string()).cast(kind)
            if name != "json"
            else pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(texts))
        )
        write_arrow(tmp_path / f"{name}.arrow", pyarrow.table({"text": text, "url": ["a", "b", "c"]}))
    table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.chunked_array([["one", None], ["two"]])})
    for codec in ("lz4", "zstd"):
        with pyarrow.ipc.new_file(
            str(tmp_path / f"{codec}.feather"), table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec)
        ) as writer:
            writer.write_table(table)
    write_arrow(tmp_path / "numbers.arrow", pyarrow.table({"text": [1, 2]}))
    (tmp_path / "cut.arrow").write_bytes((tmp_path / "large.arrow").read_bytes()[:-100])
    (tmp_path / "no.arrow").write_bytes(b"no Arrow file")
    for name in (*types, "lz4", "zstd"):
        path = next(tmp_path.glob(f"{name}.*"))
        found, [null] = read_all(Source("text", str(path)))
        assert (found, null.reason()) == (["one", "two"], "1 row: no text"), name
    found, [number] = read_all(Source("text", str(tmp_path / "numbers.arrow")))
    assert number.reason() == "2 rows: the column 'text' is not text (the first at row 1, it is int64)"
    for name in ("cut", "no"):
        found, [damage] = read_all(Source("text", str(tmp_path / f"{name}.arrow")))
        assert damage.why.startswith("damaged: not readable as Arrow (")
    found, [other] = read_all(Source("text", str(tmp_path / "lz4.feather")), text_field="body")
    assert other.why == "no column 'body': the columns are n, text"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_files_in_utf_16_and_utf_32_are_read_as_one_part(tmp_path, name, encoding):
    texts = [f"déjà vu {number} \U0001f433" for number in range(3000)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts] if "json" in name else texts
    content = ("\ufeff" * (encoding == "utf-16-be") + "\r\n".join(lines)).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for part_bytes in (1 << 30, 5000):
        assert read_all(Source("text", str(tmp_path)), part_bytes) == (texts, [])


def test_damage_in_utf_16_is_counted(tmp_path):
    half = "half \ud800 a pair\n".encode("utf-16-le", "surrogatepass")
    (tmp_path / "a.txt").write_bytes("one\n".encode("utf-16") + half + "two\n".encode("utf-16-le"))
    (tmp_path / "b.txt").write_bytes("three\nfour\n".encode("utf-16") + b"x")
    texts, skipped = read_all(Source("text", str(tmp_path)))
    assert texts[:2] == ["one", "two"]
    assert [(one.name, one.why, one.num_units) for one in skipped] == [
        ("a.txt", "not valid UTF-8", 1), ("b.txt", "damaged: the file is not valid UTF-16 (truncated data)", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("one two\nthree\n".encode("utf-16-le"), "UTF-16LE without a byte order mark"),
        ("one two\nthree\n".encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
        (b"one\rtwo\r", "tr '\\r' '\\n'"),
        (b"one\rtwo\rthree\n", "tr '\\r' '\\n'"),
        ("one\u2028two".encode(), "U+2028 and no \\n"),
        (gzip.compress(b"one\ntwo\n", mtime=0), "the content is that of a gzip file, not text"),
        (b"%PDF-1.7\none\n", "the content is that of a PDF file"),
        ("一つ\n二つ\n".encode("iso-2022-jp"), "iconv -f ISO-2022-JP -t UTF-8"),
    ],
)
def test_a_text_file_with_other_line_ends_or_another_encoding_is_refused(tmp_path, content, why):
    (tmp_path / "a.txt").write_bytes(content)
    for part_bytes in (1 << 30, 5):
        texts, skipped = read_all(Source("text", str(tmp_path)), part_bytes)
        assert texts == []
        assert {why in one.why and one.damaged for one in skipped} == {True}
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\nthree\xe2\x80\xa8four\n")
    assert read_all(Source("text", str(tmp_path)))[0] == ["one\rtwo", "three\u2028four"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_byte_order_marks_where_files_were_joined_are_no_part_of_the_text(tmp_path, encoding):
    rows = [json.dumps({"text": "one"}), json.dumps({"text": "two \ufeff too"}, ensure_ascii=False)]
    for name, lines in (("a.txt", ["one", "two \ufeff too"]), ("a.jsonl", rows)):
        # Twice a file that begins with two marks and ends with an empty line that has one.
        content = "\ufeff\ufeff" + "\n".join([*lines, "\ufeff", ""])
        (tmp_path / name).write_bytes((content * 2).encode(encoding))
        assert read_all(Source("text", str(tmp_path / name))) == (["one", "two \ufeff too"] * 2, [])


def test_the_files_that_macos_adds_are_no_damage(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "._a.txt").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        \nATTR\n")
    (tmp_path / "._b.txt").write_text("two\n")
    (tmp_path / "b.txt").write_bytes("\ufeff\ufeffthree".encode())
    for kind in ("text", "books"):
        texts, [skipped] = read_all(Source(kind, str(tmp_path)))
        assert [text.strip() for text in texts] == ["two", "one", "three"]
        assert (skipped.name, skipped.damaged, skipped.num_units) == ("._a.txt", False, 0)


def test_a_file_in_another_encoding_says_once_what_to_run(tmp_path):
    (tmp_path / "a.txt").write_bytes("déjà\nvu\nété\n".encode("latin-1"))
    texts, [skipped] = read_all(Source("text", str(tmp_path)))
    assert texts == ["vu"]
    assert skipped.reason() == (
        "2 lines: not valid UTF-8 (the first at byte 0, if the file is in another encoding: iconv -f ENCODING -t UTF-8)"
    )


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

import os

import pytest

from data_prep.errors import PrepError
from data_prep.sources import (
    Skipped,
    Source,
    fingerprint,
    list_files,
    merge_skipped,
    python_docs,
    read_documents,
    split_into_parts,
)

IN_ANOTHER_ENCODING = "if the file is in another encoding: iconv -f ENCODING -t UTF-8"


def read_all(source: Source, part_bytes: int = 1 << 20) -> list:
    parts = split_into_parts(source, list_files(source), part_bytes)
    found = [document for part in parts for document in read_documents(part)]
    return [one if isinstance(one, Skipped) else one.text for one in found]


def test_text_is_one_document_per_line_that_is_not_blank(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone two\r\n\n  \n three \nlast")
    (tmp_path / "b.md").write_text("not a text file")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.txt").write_text("four\n")
    assert read_all(Source("text", str(tmp_path))) == ["one two", " three ", "last", "four"]


def test_text_may_be_one_file_with_an_ending_of_text(tmp_path):
    for name in ("corpus.raw", "wiki.train.tokens", "a.TEXT"):
        (tmp_path / name).write_text("one\ntwo\n")
        assert read_all(Source("text", str(tmp_path / name))) == ["one", "two"]


@pytest.mark.parametrize("path", ["data.csv.gz", "*.gz", "data.bin", "data"])
def test_a_file_with_an_unknown_ending_is_refused_by_name(tmp_path, path):
    for name in ("data.csv.gz", "data.bin", "data", "a.txt.gz"):
        (tmp_path / name).write_text("a,b\n")
    name = "data.csv.gz" if path == "*.gz" else path
    with pytest.raises(
        PrepError,
        match=rf"unknown how to read {name}. The known endings are .parquet, .arrow, .feather; .txt, .*\.json,",
    ):
        list_files(Source("text", str(tmp_path / path)))


@pytest.mark.parametrize("part_bytes", range(1, 20))
def test_lines_are_read_once_wherever_a_file_is_split(tmp_path, part_bytes):
    (tmp_path / "a.txt").write_bytes("ab\n\ncdé\nf\n\xff\ng h\n".encode() + b"\xff\nlast")
    found = read_all(Source("text", str(tmp_path)), part_bytes)
    assert [text for text in found if isinstance(text, str)] == ["ab", "cdé", "f", "\xff", "g h", "last"]
    # ab, blank, cdé (2 bytes for é), f, \xff (2 bytes), g h: 3 + 1 + 5 + 2 + 3 + 4 bytes come before the bad line.
    assert merge_skipped([entry for entry in found if isinstance(entry, Skipped)]) == [
        Skipped("a.txt", "not valid UTF-8", num_units=1, first_byte=18, found=IN_ANOTHER_ENCODING)
    ]


def test_bad_lines_are_counted_and_the_others_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n\xfe\nfine\n")
    *texts, skipped = read_all(Source("text", str(tmp_path)))
    assert texts == ["good", "fine"]
    assert skipped.reason() == "2 lines: not valid UTF-8 (the first at byte 5, " + IN_ANOTHER_ENCODING + ")"


def test_a_book_is_one_document_and_a_bad_or_empty_one_is_skipped(tmp_path):
    (tmp_path / "a.md").write_bytes("# Café\r\n\r\ntext\n".encode())
    (tmp_path / "b.txt").write_bytes(b"abc\xe9")
    (tmp_path / "c.txt").write_bytes(b"\n \n")
    (tmp_path / "d.html").write_text("not a book")
    hint = "Replace the file by the output of: iconv -f WINDOWS-1252 -t UTF-8 FILE (if it is in Windows-1252)"
    assert read_all(Source("books", str(tmp_path))) == [
        "# Café\n\ntext\n",
        Skipped("b.txt", f"the text is not valid UTF-8 at byte 3. {hint}"),
        Skipped("c.txt", "empty file", damaged=False),
    ]


def test_an_empty_text_file_is_skipped_by_name(tmp_path):
    (tmp_path / "a.txt").touch()
    assert read_all(Source("text", str(tmp_path))) == [Skipped("a.txt", "empty file", damaged=False)]


def test_sources_are_read_from_the_command_line():
    assert Source.parse("text:/a:b") == Source("text", "/a:b")
    assert str(Source.parse("python-docs")) == "python-docs"
    for text, message in {
        "tweets:x": "unknown",
        "text": "needs a path",
        "python-docs:x": "but this kind accepts none",
    }.items():
        with pytest.raises(ValueError, match=message):
            Source.parse(text)


def test_an_impossible_source_is_an_error(tmp_path):
    with pytest.raises(PrepError, match="missing does not exist"):
        list_files(Source("text", str(tmp_path / "missing")))
    with pytest.raises(PrepError, match=r"contains no \*.txt, \*.json, \*.jsonl, \*.parquet or \*.arrow"):
        list_files(Source("text", str(tmp_path)))
    (tmp_path / "book.txt").write_text("a")
    with pytest.raises(PrepError, match="is not a folder"):
        list_files(Source("books", str(tmp_path / "book.txt")))


def test_a_fingerprint_follows_names_sizes_and_times(tmp_path):
    path = tmp_path / "a.txt"
    source = Source("text", str(tmp_path))
    path.write_text("one")
    os.utime(path, ns=(0, 10))
    first = fingerprint(list_files(source))
    assert fingerprint(list_files(source)) == first
    os.utime(path, ns=(0, 11))
    assert fingerprint(list_files(source)) != first
    path.rename(tmp_path / "b.txt")
    os.utime(tmp_path / "b.txt", ns=(0, 10))
    assert fingerprint(list_files(source)) != first


def test_docstrings_come_in_the_order_of_the_file():
    source = b'''"""Module
    indented."""
class A:
    """Class A."""
    def f(self):
        """Method f."""
        def inner():
            "  Inner."
    x = "no docstring"
async def g():
    """Function g."""
'''
    assert python_docs.docstrings(source) == "Module\nindented.\n\nClass A.\n\nMethod f.\n\nInner.\n\nFunction g."


def test_docstrings_are_found_below_every_statement():
    places = (
        "if x:",
        "for x in y:",
        "while x:",
        "with x:",
        "try:",
        "except E:",
        "else:",
        "finally:",
        "match x:\n case 1:",
    )
    source = ""
    for number, place in enumerate(places):
        source += "".join(f"{line}\n" for line in place.splitlines()) + f'  def f{number}(): "{number}"\n'
    assert python_docs.docstrings(source.encode()).split() == [str(number) for number in range(len(places))]


def test_the_embedded_corpus_is_the_standard_library_without_its_tests():
    source = Source("python-docs")
    names = {file.name for file in list_files(source)}
    assert {"argparse.py", "json/decoder.py"} <= names
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test"}


def test_a_folder_of_another_kind_and_a_source_without_a_kind_are_explained(tmp_path):
    (tmp_path / "book.md").write_text("text")
    with pytest.raises(PrepError, match=f"It has files that books:{tmp_path} reads"):
        list_files(Source("text", str(tmp_path)))
    with pytest.raises(ValueError, match=r"a source is KIND:PATH, for example text:my_texts"):
        Source.parse("my_texts")
    with pytest.raises(ValueError, match=r"kind 'txt' is unknown: use one of [^()]*$"):
        Source.parse("txt:my_texts")

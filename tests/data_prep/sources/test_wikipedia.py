"""Dumps: which pages are articles, and what is left of their markup."""

import bz2

import pytest

from data_prep.sources import Source, list_files, split_into_parts
from tests.data_prep.files import DUMP_HEAD, read_all, write_dump

pytest.importorskip("mwxml", reason="needs the extra `corpora`")

MARKUP = """{{Infobox whale|name=Moby}}
'''Moby Dick''' is a ''white'' [[sperm whale|whale]] in the [[novel]].<ref>Melville, 1851</ref>
[[File:Whale.jpg|thumb|200px|A [[whale]] at sea]]
__NOTOC__
== History ==
It was hunted ({{lang|en|x}}) by [[Captain Ahab]]; see [https://example.com the page].

{| class="wikitable"
! Year !! Ship
|-
| 1851 || Pequod
|}
=== Sinking ===
* The ship sank.
<math>x^2</math><!-- nobody sees this -->
== References ==
{{reflist}}
== External links ==
[[Category:Whales]]
[[de:Moby Dick]]
"""
TEXT = """Moby Dick

Moby Dick is a white whale in the novel.

History

It was hunted by Captain Ahab; see the page.

Sinking

The ship sank."""


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("name", ["d.xml", "d.xml.bz2", "enwiki-pages-articles1.xml-p1p2.bz2", "d.xml.gz"])
def test_an_article_is_its_title_and_its_text(tmp_path, name):
    pages = [
        ("Moby Dick", 0, None, MARKUP), ("Moby", 0, "Moby Dick", "#REDIRECT [[Moby Dick]]"),
        ("Talk:Moby Dick", 1, None, "I disagree."), ("Template:Whale", 10, None, "a template"), ("Empty", 0, None, ""),
    ]  # fmt: skip
    write_dump(tmp_path / name, pages)
    [text], skipped = read_all(Source("wikipedia", str(tmp_path)))
    assert lines(text) == lines(TEXT)
    assert skipped == []


def test_what_only_looks_like_markup_stays(tmp_path):
    markup = "He starred in [[Mission: Impossible]] and wrote C#, the following:\n* one;\nHalf a pair: &amp;#xD800;"
    write_dump(tmp_path / "d.xml", [("A", 0, None, markup)])
    [text], _ = read_all(Source("wikipedia", str(tmp_path)))
    assert lines(text)[1:3] == ["He starred in Mission: Impossible and wrote C#, the following:", "one;"]
    text.encode("utf-8")


def test_a_multistream_dump_of_one_stream_is_read_once(tmp_path):
    pages = [(f"Page {number}", 0, None, f"Text of page {number}. " * 20) for number in range(30)]
    write_dump(tmp_path / "multistream.xml.bz2", pages)
    assert len(read_all(Source("wikipedia", str(tmp_path)), 100)[0]) == 30


def test_the_articles_before_the_cut_of_a_truncated_dump_are_kept_and_the_cut_is_recorded(tmp_path):
    pages = [(f"Page {number}", 0, None, f"Text of page {number}. " * 50) for number in range(20)]
    content = write_dump(tmp_path / "d.xml", pages).read_bytes()
    (tmp_path / "d.xml").write_bytes(content[: len(content) // 2])
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert 5 < len(texts) < 12
    assert "not readable as a MediaWiki dump after page" in skipped.why


@pytest.mark.parametrize("part_bytes", [100, 400, 1000, 10**6])
def test_a_multistream_dump_is_read_in_parts_each_page_once(tmp_path, part_bytes):
    pages = [(f"Page {number}", 0, None, f"Text of page {number}. " * 20) for number in range(60)]
    content = write_dump(tmp_path / "plain.xml", pages).read_bytes()
    (tmp_path / "plain.xml").unlink()
    head, *rest = content.split(b"<page>")
    rest[-1], end = rest[-1].split(b"</mediawiki>")
    tens = [b"".join(b"<page>" + page for page in rest[start : start + 10]) for start in range(0, 60, 10)]
    streams = [head, *tens, b"</mediawiki>" + end]
    (tmp_path / "enwiki-multistream.xml.bz2").write_bytes(b"".join(map(bz2.compress, streams)))
    source = Source("wikipedia", str(tmp_path))
    assert (len(split_into_parts(source, list_files(source), part_bytes)) > 1) == (part_bytes < 2000)
    texts, skipped = read_all(source, part_bytes)
    assert skipped == []
    assert [text.split("\n")[0] for text in texts] == [title for title, *_ in pages]
    assert texts == read_all(source)[0]


@pytest.mark.parametrize(
    "content",
    [b"<html></html>", b"<mediawiki><page>", DUMP_HEAD.encode() + b"<page><title>x</title></mediawiki>", b"\0" * 99],
)
def test_a_file_that_is_no_dump_is_skipped(tmp_path, content):
    (tmp_path / "d.xml").write_bytes(content)
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert texts == []
    assert skipped.damaged


def test_entities_that_multiply_are_refused(tmp_path):
    entities = '<!DOCTYPE x [<!ENTITY a "whale">' + "".join(
        f'<!ENTITY {name} "{f"&{before};" * 10}">' for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    page = "<page><title>&i;</title><ns>0</ns><id>1</id></page></mediawiki>"
    (tmp_path / "d.xml").write_text(entities + "]>" + DUMP_HEAD + page)
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert texts == []
    assert skipped.damaged


@pytest.mark.parametrize("bomb", ["{{" * 50_000, "<b>" * 15_000 + "x" * 200_000, "[[a|" * 9_000, "<ref>a" * 9_000])
def test_markup_that_nests_without_end_is_skipped_and_the_next_page_is_read(tmp_path, bomb):
    write_dump(tmp_path / "d.xml", [("Bomb", 0, None, bomb), ("Whale", 0, None, "A whale.")])
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert texts == ["Whale\n\nA whale."]
    assert (skipped.num_units, skipped.unit) == (1, "page")


def test_an_entity_is_no_heading(tmp_path):
    pages = [("Bell", 0, None, "Some text.\n\n&#2;\n\n&#2;3 more text.")]
    write_dump(tmp_path / "d.xml", pages)
    texts, skipped = read_all(Source("wikipedia", str(tmp_path)))
    assert not skipped
    assert texts[0].startswith("Bell\n\nSome text.")
    assert texts[0].endswith("3 more text.")


def test_many_tags_that_need_no_end_are_an_article(tmp_path):
    lines = "".join(f"line {n}<br>\n<ref name=a />" for n in range(6_000))
    write_dump(tmp_path / "d.xml", [("List", 0, None, lines)])
    texts, skipped = read_all(Source("wikipedia", str(tmp_path)))
    assert not skipped
    assert texts[0].endswith("line 5999")


def test_real_dumps(shared_data):
    texts, skipped = read_all(Source("wikipedia", str(shared_data / "wikipedia")))
    assert len(texts) == 107
    assert [one.name for one in skipped] == ["enwiki-table-markup.xml.bz2"]
    autism = next(text for text in texts if text.startswith("Autism\n"))
    assert autism.splitlines()[2].startswith("Autism is a neurodevelopmental disorder characterized by")
    assert not autism.rstrip().endswith("External links")
    assert (
        sum(text.count(mark) for text in texts for mark in ("{{", "}}", "[[", "]]", "thumb|", "{|", "''", "<ref")) < 5
    )

"""Dumps: which pages are articles, and what is left of their markup."""

import bz2
import html

import pytest

from data_prep.sources import Source, list_files, split_into_parts
from data_prep.sources.wikipedia import _Dump
from tests.data_prep.files import DUMP_HEAD, read_all, write_dump

pytest.importorskip("mwparserfromhell", reason="needs the extra `corpora`")

MARKUP = """{{Infobox whale|name=Moby}}
'''Moby Dick''' is a ''white'' [[sperm whale|whale]] in the [[novel]].<ref>Melville, 1851</ref>
[[File:Whale.jpg|thumb|200px|A [[whale]] at sea]]
__NOTOC__
== History ==
It was hunted ({{citation needed}}) by [[Captain Ahab]]; see [https://example.com the page].

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


def text_of(tmp_path, markup, head=DUMP_HEAD):
    """The text of an article with this markup, without its title; `head` is the beginning of the dump."""
    path = write_dump(tmp_path / "d.xml", [("A", 0, None, f"Begin. {markup}")])
    path.write_text(path.read_text().replace(DUMP_HEAD, head))
    [text], _ = read_all(Source("wikipedia", str(tmp_path)))
    return text.removeprefix("A\n\nBegin.").strip()


def read_xml(tmp_path, xml):
    """The texts, and why pages were skipped with how many there are, of a dump that is written as it is."""
    (tmp_path / "d.xml").write_bytes(xml if isinstance(xml, bytes) else xml.encode())
    texts, skipped = read_all(Source("wikipedia", str(tmp_path)))
    return texts, {one.why: one.num_units for one in skipped}


def page(title, text, *more, ns="<ns>0</ns>", about=""):
    """XML of a page; `more` is added to the page, and `about` to its revision."""
    revision = f"<revision><timestamp>2020-01-01T00:00:00Z</timestamp>{about}<text>{text}</text></revision>"
    return f"<page><title>{title}</title>{ns}{''.join(more)}{revision}</page>"


END = "</mediawiki>"
GERMAN = """<mediawiki xml:lang="de"><siteinfo><namespaces><namespace key="1">Diskussion</namespace>
<namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace></namespaces></siteinfo>"""


@pytest.mark.parametrize("name", ["d.xml", "d.xml.bz2", "enwiki-pages-articles1.xml-p1p2.bz2", "d.xml.gz"])
def test_an_article_is_its_title_and_its_text(tmp_path, name):
    pages = [
        ("Moby Dick", 0, None, MARKUP), ("Moby", 0, "Moby Dick", "#REDIRECT [[Moby Dick]]"),
        ("Talk:Moby Dick", 1, None, "I disagree."), ("Template:Whale", 10, None, "a template"), ("Empty", 0, None, ""),
    ]  # fmt: skip
    write_dump(tmp_path / name, pages)
    [text], skipped = read_all(Source("wikipedia", str(tmp_path)))
    assert lines(text) == lines(TEXT)
    assert [(one.why, one.num_units, one.unit, one.damaged) for one in skipped] == [
        ("a redirect", 1, "page", False),
        ("not an article (another namespace)", 2, "page", False),
        ("no text", 1, "page", False),
        ("the text that it shows is not known", 3, "template", False),
    ]


def test_a_line_end_in_html_separates_words(tmp_path):
    text = "One line<br>two<br/>three<BR />four\n----\nfive<includeonly>Only where it is included.</includeonly>"
    texts, _ = read_xml(tmp_path, DUMP_HEAD + page("A", html.escape(text)) + END)
    assert texts[0].split() == ["A", "One", "line", "two", "three", "four", "five"]


def test_what_only_looks_like_markup_stays(tmp_path):
    markup = "He starred in [[Mission: Impossible]] and wrote C#, the following:\n* one;\nHalf a pair: &amp;#xD800;"
    write_dump(tmp_path / "d.xml", [("A", 0, None, markup)])
    [text], _ = read_all(Source("wikipedia", str(tmp_path)))
    assert lines(text)[1:3] == ["He starred in Mission: Impossible and wrote C#, the following:", "one;"]
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        ("{{convert|330|m|ft}}", "330 m"),
        ("{{cvt|6|ft|4|in|cm|abbr=on}}", "6 ft 4 in"),
        ("{{convert|8|-|12|km|mi|0}}", "8–12 km"),
        ("{{Convert|40|to|50|C}}", "40 to 50 °C"),
        ("{{convert|44|e6acre|km2}}", "44 million acre"),
        ("{{formatnum:24567}}", "24567"),
        ("{{formatnum:{{val|12}}|R}}", "12"),
        ("{{lang|de|[[Zeitgeist|Geist]]}}", "Geist"),
        ("{{lang-de|Zeitgeist}}", "Zeitgeist"),
        ("{{lang-la|1=Anno Domini = AD}}", "Anno Domini = AD"),
        ("{{transl|ar|ALA|al-Jazā'ir}}", "al-Jazā'ir"),
        ("{{Nowrap<!-- one line -->|{{convert|5|km|mi}} away}}", "5 km away"),
        ("{{template:nobr|7300 tonnes}}", "7300 tonnes"),
        ("{{abbr|kn|knots}}", "kn"),
        ("{{val|6.24|0.01|e=18|u=m}}", "6.24±0.01×1018 m"),
        ("{{frac|2}} {{frac|3|4}} {{frac|1|2|3}}", "1⁄2 3⁄4 1 2⁄3"),
        ("{{ill|Emmy|de|Emmy Noether|lt=Noether}}", "Noether"),
        ("{{sic|teh}}", "teh [sic]"),
        ("{{IPAc-en|UK|audio=a.ogg|ˈ|k|æ|t}} {{IPA|/kæt/}}", "/ˈkæt/ /kæt/"),
        ("{{IPA-de|kats|lang}} {{IPA|de|kats}}", "[kats] [kats]"),
        ("{{circa|1800|1850}}", "c. 1800 – c. 1850"),
        ("{{start date|1999|12|31}}, {{start date|1999|12|31|df=y}}", "December 31, 1999, 31 December 1999"),
        ("{{date|1|janvier|2000}}, {{dts|2000|May}}, {{date|1999|02}}", "1 janvier 2000, 2000 May, February 1999"),
        ("{{as of|2014|lc=y}}", "as of 2014"),
        ("{{IPAc-en|i|.|aɪ}}", "/i.aɪ/"),
        ("{{quote|Call me Ishmael.|Herman Melville}}", "Call me Ishmael.\n— Herman Melville"),
        ("{{USS|Hornet|CV-12}}", "USS Hornet (CV-12)"),
        ("{{nihongo|Forearm return|小手返し|kotegaeshi}}", "Forearm return (小手返し, kotegaeshi)"),
        ("1939{{ndash}}1945", "1939–1945"),
        ("x{{PAGENAME}}{{CURRENTYEAR}}{{#if:a|b}}{{Infobox whale|name={{nowrap|Moby}}}}{{cite book|title=T}}", "x"),
    ],
)  # fmt: skip
def test_of_common_templates_what_a_reader_sees_stays(tmp_path, markup, shown):
    assert text_of(tmp_path, markup) == shown


def test_nested_templates_are_each_read_once(tmp_path):
    assert text_of(tmp_path, "{{sfrac|1|" * 18 + "whale" + "}}" * 18) == "1/" * 18 + "whale"


@pytest.mark.parametrize("head", [DUMP_HEAD, GERMAN, "<mediawiki>"])
def test_links_to_files_categories_and_languages_are_no_text(tmp_path, head):
    hidden = (
        "[[File:Song.mp3|thumb|A [[song]]]][[image: b.flac]][[Datei:Ton.opus|mini|Ton]][[Kategorie:Wale]][[de:Wal]]"
    )
    hidden += "[[Category:Whales|Moby]][[FILE:A|b]][[be-tarask:Кіт]]"
    assert text_of(tmp_path, f"a{hidden}b", head) == "ab"


def test_the_header_of_a_dump_says_what_its_files_are_called(tmp_path):
    assert text_of(tmp_path, "a[[Datei:Wal|mini|Ein Wal]]b", GERMAN) == "ab"
    assert text_of(tmp_path, "a [[Datei:Wal|mini]] b") == "a mini b"


def test_titles_with_a_colon_are_text(tmp_path):
    titles = ["Re:Zero", "Halo:Reach", "2001: A Space Odyssey", "Help:Contents", "doi:10.1000/1"]
    links = " ".join(f"[[{title}]]" for title in titles)
    assert text_of(tmp_path, links) == " ".join(titles)
    more = "[[:Category:Whales]] [[:de:Wal]] [[wikt:art|art]] [[Media:Song.ogg|listen]] [[:File:A.jpg|a file]]"
    assert text_of(tmp_path, more) == "Category:Whales de:Wal art a file"


def test_elements_that_mediawiki_does_not_write_are_ignored(tmp_path):
    odd = page(
        "B", "Second.", "<sha1>x</sha1><upload><title>U</title><text>u</text></upload><a><a><a><text/></a></a></a>"
    )
    xml = DUMP_HEAD + page("A", "First.") + odd + "<log><title>L</title></log>" + page("C", "Third.") + END
    texts, skipped = read_xml(tmp_path, xml)
    assert texts == ["A\n\nFirst.", "B\n\nSecond.", "C\n\nThird."]
    assert skipped == {"neither a page nor information about the site": 1}  # the log


def test_dumps_in_one_file_are_read_one_after_another(tmp_path):
    german = GERMAN + page("Wal", "a[[Datei:Wal|mini]]b") + page("Diskussion:Wal", "No.", ns="") + END
    xml = DUMP_HEAD + page("A", "One.") + END + '\n<?xml version="1.0"?>\n' + german + "<mediawiki/>" + german
    texts, skipped = read_xml(tmp_path, xml)
    assert texts == ["A\n\nOne.", "Wal\n\nab", "Wal\n\nab"]
    assert skipped == {"not an article (another namespace)": 2}


def test_what_follows_a_dump_and_is_no_dump_is_recorded(tmp_path):
    texts, skipped = read_xml(tmp_path, DUMP_HEAD + page("A", "One.") + END + "<html>" + page("B", "Two."))
    assert texts == ["A\n\nOne."]
    assert [why.split(",")[0] for why in skipped] == ["not a MediaWiki dump: the first XML element is <html>"]


def test_pages_without_text_are_counted_by_reason(tmp_path):
    css, old_css = "<model>css</model><format>text/css</format>", "<format>text/css</format>"
    pages = [
        "<page><ns>0</ns><revision><text>No title.</text></revision></page>", "<page><title>No text</title></page>",
        '<page><title>D</title><ns>0</ns><revision><text deleted="deleted" /></revision></page>', "<page/>",
        page("Empty", "{{disambiguation}}"), page("C", "a {b: c}", about=css), page("C", "a {b: c}", about=old_css),
        page("W", "Whale.", about="<model>wikitext</model><format>text/x-wiki</format>"),
        page("W", "T.", ns="<ns>1</ns>"),
        "<page><title>No revision</title><ns>0</ns></page>",
    ]  # fmt: skip
    texts, skipped = read_xml(tmp_path, DUMP_HEAD + "".join(pages) + END)
    assert texts == ["No title.", "W\n\nWhale."]
    removed = skipped.pop("the text that it shows is not known")
    assert (removed, skipped) == (1, {"no text": 5, "not wikitext": 2, "not an article (another namespace)": 1})
    assert len(texts) + sum(skipped.values()) == len(pages)


def test_old_dumps_name_namespaces_in_titles_and_redirects_in_texts(tmp_path):
    talk = ["Diskussion:Wal", "talk:Wal", "user_talk:W", "Image:Wal.jpg", "Kategorie:Wale"]
    redirects = ["#REDIRECT [[Wal]]", "#weiterleitung:[[Wal]] {{R}}", "\n#пренасочване [[Wal]]", "#転送[[Wal]]"]
    pages = [page(title, "No.", ns="") for title in talk] + [page("A", text, ns="") for text in redirects]
    pages += [page("Wal: Ein Film", "Text.", ns=""), page("Liste", "# Der [[Wal]]", ns="")]
    texts, skipped = read_xml(tmp_path, GERMAN + "".join(pages) + END)
    assert texts == ["Wal: Ein Film\n\nText.", "Liste\n\nDer Wal"]
    assert skipped == {"not an article (another namespace)": 5, "a redirect": 4}


def test_of_several_revisions_the_last_is_read(tmp_path):
    revisions = "".join(f"<revision><timestamp>{n}</timestamp><text>Text {n}.</text></revision>" for n in (1, 2))
    gone = '<revision><text>Old.</text></revision><revision><text deleted="deleted"/></revision>'
    xml = f"{DUMP_HEAD}<page><title>A</title>{revisions}</page><page><title>B</title>{gone}</page>{END}"
    assert read_xml(tmp_path, xml) == (["A\n\nText 2."], {"no text": 1})


def test_a_dump_in_utf_16_is_read(tmp_path):
    xml = DUMP_HEAD + page("Кит", "Бял кит.") + END
    assert read_xml(tmp_path, ('<?xml version="1.0" encoding="utf-16"?>' + xml).encode("utf-16")) == (
        ["Кит\n\nБял кит."],
        {},
    )


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


@pytest.mark.slow
def test_real_dumps(shared_data):
    texts, skipped = read_all(Source("wikipedia", str(shared_data / "wikipedia")))
    assert len(texts) == 112
    assert not any(one.damaged for one in skipped)
    assert sum(one.num_units for one in skipped if one.why == "a redirect") == 99
    autism = next(text for text in texts if text.startswith("Autism\n"))
    assert autism.splitlines()[2].startswith("Autism is a neurodevelopmental disorder characterized by")
    assert not autism.rstrip().endswith("External links")
    assert any("At 6 ft 4 in, he was tall" in text for text in texts)
    assert any("„AD“ (Anno Domini = Лето Господне), но също така" in text for text in texts)
    assert (
        sum(text.count(mark) for text in texts for mark in ("{{", "}}", "[[", "]]", "thumb|", "{|", "''", "<ref")) < 5
    )


@pytest.mark.parametrize(
    "damage",
    ["\x0b", "&#x1;", "&nbsp;", "<unclosed>", "</text>", "\ufffe"],
    ids=["control", "code", "name", "tag", "end", "no character"],
)
def test_damage_in_a_page_spoils_no_other_page(tmp_path, monkeypatch, damage):
    xml = DUMP_HEAD + page("A", "First.") + page("B", f"Sec{damage}ond.") + page("C", "[[File:x.jpg|y]]Third.") + END
    for chunk in (1 << 18, 7):  # the next page begins in the same piece of the file, or in a later one
        monkeypatch.setattr("data_prep.sources.wikipedia._PIECE_BYTES", chunk)
        assert read_xml(tmp_path, xml) == (["A\n\nFirst.", "C\n\nThird."], {"not readable as XML": 1})


def test_bytes_that_are_not_utf8_spoil_only_their_page(tmp_path):
    xml = DUMP_HEAD + page("A", "First.") + page("B", "Secönd.") + page("C", "Third.") + END
    (tmp_path / "d.xml").write_bytes(xml.encode().replace("ö".encode(), b"\xf6"))
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert texts == ["A\n\nFirst.", "C\n\nThird."]
    assert skipped.reason() == "1 page: not readable as XML (the first at page 2)" and skipped.damaged


def test_a_tag_that_never_ends_ends_the_reading_and_white_space_after_a_dump_takes_no_memory(tmp_path):
    path = write_dump(tmp_path / "a.xml", [("A", 0, None, "An article.")])
    whole = path.read_text()
    path.write_text(whole.replace("</mediawiki>", "<!--" + "x" * 200_000))
    texts, [skipped] = read_all(Source("wikipedia", str(tmp_path)))
    assert (texts, skipped.why) == (["A\n\nAn article."], "a tag or comment of the dump has more than 128 KiB")
    path.write_text(whole + "\n" * 200_000 + whole)
    assert read_all(Source("wikipedia", str(tmp_path))) == (["A\n\nAn article."] * 2, [])
    dump = _Dump()
    for content in (b"<mediawiki></mediawiki>", *[b"\n" * 10_000] * 20):
        assert dump.feed(content) is None
    assert len(dump._held) <= 10_000

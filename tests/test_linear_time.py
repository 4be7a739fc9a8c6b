"""The time that a text takes grows at most linearly with its length, whatever somebody has written into it.

Every regular expression of ALMA is in a table: with the texts that take it longest, or with the reason why no foreign
text reaches it. So a new one needs a line there. Loops over foreign text are in the table, too.
"""

import ast
import gzip
import importlib
import io
import re
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from data_prep import compression
from data_prep.cleaning.cleaner import Cleaner, Cleaning, our_words
from data_prep.copies.near_copies import removed_copies
from data_prep.dividing.partition import cut_document
from data_prep.reading.ngrams import unit_hashes, unit_hashes_of
from data_prep.sources import KINDS, records, web_page, wikipedia
from data_prep.sources.base import Document, SkippedUnits, no_report
from data_prep.sources.books import without_gutenberg
from data_prep.sources.dates import date_in_path, parse_date, snapshot_of
from data_prep.sources.wiki_templates import shown_text
from data_prep.tokenization.tokenizers import dictionary_names
from data_prep.tokenization.word_counts import count_words as count_training_words
from data_prep.tokenization.word_counts import split_words as split_training_words
from data_prep.words import count_words, split_words, word_starts
from fairseq_alma.core import holder
from fairseq_alma.lm.failures import _last_error
from fairseq_alma.report.tables import Table, _without_formula
from tests.commands import ROOT
from tests.linear_time import MOST_GROWTH, growth
from vision.dataset_names import natural_key

PACKAGES = ("data_prep", "fairseq_alma", "vision", "launch")


def repeated(unit, before="", after=""):
    """A function that returns a text of a given length."""
    return lambda length: before + unit * (length // len(unit)) + after


def search(*units, before="", after="", method="sub"):
    """What to do with a pattern, and its inputs. "sub" looks for a match at every position of a text.

    A unit may be (unit, before, after), for the text before and after the repetitions.
    """
    return method, [repeated(*unit) if isinstance(unit, tuple) else repeated(unit, before, after) for unit in units]


match, fullmatch = partial(search, method="match"), partial(search, method="fullmatch")

SPACES = (" ", "\n", "\t", " \n", "\n ", "\r\n")
PATTERNS = {
    "data_prep.cleaning.cleaner:_SENTENCE_END": search(".", ".'", "'", ".)", "。", "。”", "! ", ("'", "."), "…"),
    "data_prep.dividing.partition:PARAGRAPH_END": search(*SPACES, "\n\t x", ("\t", "\n", "x"), ("\n ", "", "x")),
    "data_prep.dividing.partition:LINE_END": search("\n", "a"),
    "data_prep.reading.ngrams:_CHUNK_END": search("a", " "),
    "data_prep.running.stream_folder:SHARD_NAME": fullmatch(("1", "mega_batch_", "!"), "removed/", "valid/"),
    "data_prep.sources.common_crawl:_URI": fullmatch("<", ">", "urn:", "urn:a:", ("a", "urn:"),
    ("-", "<urn:", ":http")),
    "data_prep.sources.dates:_YEAR_OR_MONTH": fullmatch("1999", "1999-", "1"),
    "data_prep.sources.dates:_IN_NAME": search("1", "1999", "1999-", "1999-01-", "19990101", "1999-01-01", "9-"),
    "data_prep.sources.dates:_YEAR_IN_NAME": search("1", "1999", "1999_", "19", "1999-of-", "-of-1999"),
    "data_prep.sources.dates:_CRAWL": search("CC-MAIN-", "CC-MAIN-1999-", "CC-MAIN-1999-011"),
    "data_prep.sources.dates:_DATE": search("1", "1999", "1999-", "1999-01-", "199901", "20-"),
    "data_prep.sources.books:_START": search(
        " ", "*", "\n", " \n", "*** START OF THE PROJECT GUTENBERG", "*** START OF THE PROJECT GUTENBERG\n", "***\t",
        (" ", "*** START OF THE PROJECT GUTENBERG", "\n"), ("x", "*** START OF THE PROJECT GUTENBERG\n"),
        "*** START OF THE PROJECT GUTENBERG *** x\n", (" ", "*** START OF THE PROJECT GUTENBERG ***", "x"),
    ),
    "data_prep.sources.books:_END": search(" ", "*", "***", "*** END OF THE ", "End of \n", " \n",
    "End of the Project"),
    "data_prep.sources.books:_LICENCE": search(" ", "*", "***", "*** END OF THE ", "*** END OF THIS PROJECT\n", " \n"),
    "data_prep.sources.books:_OLD_START": search("*", "*END", "*END*", "*END* \n", ("\t", "*END*"),
    "*END*THE SMALL PRINT\n"),
    "data_prep.sources.books:_PRODUCED": match(
        *SPACES, "Produced by", ("a\n", "Produced by\n"), (" ", "Produced by\n", "x"), ("\t\ta\n", "Produced by\n"),
    ),
    "data_prep.sources.epub:_FIGURE": search("<", "</", "<figure", "</figcaptio", "<noscript_"),
    "data_prep.sources.records:_WARC_START": fullmatch(("1", "WARC/1", "x"), (" ", "WARC/1", "x"),
    ("1.", "WARC/1.", "x")),
    "data_prep.sources.records:_WARC_ENDING": search("WARC/1.0", "WARC/1", "WARC/1 ", ("1", "WARC/1", "x"), "\r\n"),
    "data_prep.sources.records:_ARC_START": fullmatch(
        ("a", "", "\v\n"), ("a", "a:", "\v\n"), (" x 12345678 ", "a:", "\v\n"), (" 12345678", "a:", "\v\n"),
        ("b ", "a: x 12345678 ", "\v\n"), ("b", "a: x 12345678 ", "\v\n"), (" ", "a: x 12345678 ", "\v\n"),
        (" ", "a:", "\v\n"), ("\t ", "a: x 12345678 b", "\v\n"), (" 123456789012345678", "a:", "\v\n"),
    ),
    "data_prep.sources.records:_ARC_ENDING": search(
        "a", "a:", ("a:", "", "\v\n"), ("a: x 12345678 ", "", "\v\n"), ("a", "", "\v\n"), ("1", "", "\v\n"),
        ("a b", "", "\v\n"),
        (" x 12345678 ", "a:", "\v\n"), ("b ", "a: x 12345678 ", "\v\n"),
    ),
    "data_prep.sources.records:_LINE_END": search("\r", "\n", "\r\n", "a"),
    "data_prep.sources.web_page:_CHUNK": match(" ", "\n", ("a", "\n"), ("\t", "a"), (";", "a;"), ("\r", "a")),
    "data_prep.sources.web_page:_CUT_SIZE": fullmatch(*((space, "", "x") for space in SPACES), ("a", "", "x"),
    (" ", "a", "x")),
    "data_prep.sources.web_page:_CHARSET": search(
        "charset", "charset=", ("\t", "charset"), ("\t", "charset=", "!"), ("\t", "charset='", "!"), "charset= ",
        "charset ='",
    ),
    "data_prep.sources.web_page:_COMMENT": search("<!--", "<!-- -", "<!-", "-->", "<!-- --"),
    "data_prep.sources.web_page:_META": search(
        "<meta", "<meta ", "<meta '", "<meta \"", "<meta '<meta \"", ("'", "<meta "),
        ("''", "<meta ", '"'), ("a", "<meta "),
    ),
    "data_prep.sources.web_page:_ATTRIBUTE": search(
        "a", "a ", "a=", "-", "a='", 'a="', ("\t", "a"), ("\t", "a="), ("a", "", "="), "a='\"", "a =",
    ),
    "data_prep.sources.web_page:_XML_ENCODING": match(
        " ", (" ", "<?xml"), ("a", "<?xml "), ("encoding", "<?xml "), ("encoding ", "<?xml "), ("encoding='", "<?xml "),
        ("encoding=' ", "<?xml "), ("\t", "<?xml encoding"),
    ),
    "data_prep.sources.epub:_DECLARED": search(
        "<meta", "<?xml", "<meta charset", "<?xml encoding", ("\t", "<meta charset="), ("\t", "<?xml encoding='", "!"),
        ("charset", "<meta "), ("charset=", "<meta "), ("charset ", "<meta "), (" encoding", "<?xml"),
    ),
    "data_prep.sources.wiki_markup:_MEDIA_ENDING": search(".", ".jpg", ".jpg ", ("\t", ".jpg", "x"), ".djv", " "),
    "data_prep.sources.wiki_markup:_LANGUAGE": match("a", "aa-", ("-aaa", "aa"), ("-a", "aa"), "simple", "doi"),
    "data_prep.sources.wiki_markup:_QUOTES": search("'", "' ", "'''' "),
    "data_prep.sources.wiki_markup:_DOUBLE_UNDERSCORE": search("_", "__A", "A", ("A", "__"), "__A_", "_A_"),
    "data_prep.sources.wiki_markup:_EMPTY_BRACKETS": search("(", " (", "( ", " ", ",", "(,;", ("\t", "(")),
    "data_prep.sources.wiki_markup:_SPACES": search(" ", "a ", "\t"),
    "data_prep.sources.wiki_markup:_COMMENT": search("<!--", "<!-- -", "<!-", "-->"),
    "data_prep.sources.wiki_markup:_BLANK_LINES": search(*SPACES, "\n\ta", ("\t", "\n", "x"), ("\n\t", "", "x"),
    ("\t", "\n\n", "x")),
    "data_prep.sources.wiki_markup:_OPENING": search("{", "[", "<", "{|", "<a"),
    "data_prep.sources.wiki_markup:_TAG": search(
        "<", "</", "<a", "<a ", "<a/", ("/", "<a "), ("/ ", "<a "), ("\t", "<a/"), ("a", "<"), ("a", "<a "), "<a/ ",
    ),
    "data_prep.sources.wiki_templates:_NUMBER": match("-", "1", ","),
    "data_prep.sources.wiki_templates:_MANY": match("e3", "e", "\n"),
    "data_prep.sources.wiki_templates:_SOUND_FILE": search(".", ".a", ".aaaa", "a"),
    "data_prep.sources.wikipedia:_REDIRECT": match(
        *SPACES, ("a", "#"), (" ", "#a"), (" ", "#a:"), (" ", "#a :", "[["), ("a", "#a[["), ("]", "#a[["),
        ("#a:", "", "[["),
    ),
    "data_prep.sources.web_page:_SUBSET": search("<!DOCTYPE", "<!DOCTYPE[", "<!DOCTYPE ", ("a", "<!DOCTYPE"),
    "<!DOCTYPE]"),
    "data_prep.sources.web_page:_SUBSET_END": search("]", "] ", ("\t", "]"), "]\t\n"),
    "data_prep.sources.web_page:_CDATA": search("<![CDATA[", "]]", "<![CDATA[]]", ("]", "<![CDATA[")),
    "data_prep.sources.web_page:_EMPTY": search(
        "<", "<a", "<a ", "<a/", ("a", "<"), (":", "<a"), (" ", "<a"), ("/", "<a "), ("/ ", "<a "), "<area/", "<br",
    ),
    "data_prep.sources.web_page:_PREFIX": search(
        "xmlns:", "xmlns:a", "xmlns:a=", ("a", "xmlns:"), ("\t", "xmlns:a"), ("\t", "xmlns:a="),
        "xmlns:a='http://www.w3.org/",
    ),
    "fairseq_alma.core.fence:_NAME": fullmatch(".lease.", ("a", ".lease.")),
    "fairseq_alma.core.holder:_ANY_TEXT": fullmatch("a", ":", "[", "a]"),
    "fairseq_alma.growth.layers:LAYER": match("decoder.layers.", ("1", "decoder.layers."),
    ("1.", "decoder.layers.", "\n")),
    "fairseq_alma.lm.display:LOG_RECORD": search(
        "| INFO | ", "| INFO | valid | ", "| INFO | valid | {", ("{", "| INFO | valid | "), ("a", "| INFO | valid | {"),
        "| INFO | valid | {}",
    ),
    "fairseq_alma.lm.display:RESUMED": search(
        "checkpoint_last.pt", "checkpoint_last.pt (epoch 1 @ ", ("1", "checkpoint_last.pt (epoch "),
        ("1", "checkpoint_last.pt (epoch 1 @ "),
    ),
    "fairseq_alma.core.printing:_UNSAFE": search("\x1b", "a\x1b", "a"),
    "fairseq_alma.lm.failures:RANK": match(("1", "[rank"), "[rank"),
    "vision.dataset_names:_NUMERIC_DATE": match(*SPACES, "1", "1/", (" ", "1/20")),
    "vision.dataset_names:_NAMED_MONTH": search(
        "may", "may ", "may 2", "may 12 ", " may", "2020", "2020 ", "2020 may", "2020 mayx ", (" ", "may 20"), " ",
    ),
    "vision.dataset_names:_MONTH_ALONE": fullmatch("may", "september"),
    "vision.dataset_names:_MONTH_AND_YEAR": fullmatch("1", "12.2000", "0"),
    "vision.dataset_names:_YEAR_AND_MONTH": fullmatch("1", "2000.1", "2000.12"),
    "fairseq_alma.lm.failures:AFTER_ANOTHER": search("connection ", "Connection rese", "Broken pip", "NCC", "c"),
}  # fmt: skip
"""Each pattern with its worst inputs: the method that ALMA calls, and functions that return texts of a given length."""

OWN = {
    "fairseq_alma.app.arguments:_INTERPOLATION": "an argument",
    "fairseq_alma.app.arguments:_PART": "an argument",
    "data_prep.cleaning.filters:_FILTER_NAME": "an option",
    "data_prep.running.stream_folder:belongs_to_stream": "a name that SHARD_NAME matches",
    "data_prep.sources.remote:list_remote": "an option",
    "data_prep.sources.bounded:_peak_kib": "a file of the system",
    "fairseq_alma.core.files:remove_unfinished": "names of files",
    "fairseq_alma.report.sweep:_SETTING_ENDS": "settings of the user's own sweep",
    "fairseq_alma.app.arguments:name_and_value": "an argument",
    "fairseq_alma.app.arguments:_plain": "an argument",
    "fairseq_alma.app.command:_check_arguments": "an argument",
    "fairseq_alma.app.command:run_job": "an argument",
    "fairseq_alma.core.program:with_nearest": "an argument",
    "fairseq_alma.report.page:key_of": "a page of ours",
    "fairseq_alma.core.run_folder:is_of_one_of_several_seeds": "the name of a folder",
    "vision.dataset_names:kind_of": "a setting",
    "vision.dataset_names:is_function": "a setting",
    "vision.dataset_names:mega_batch_folders": "the name of a folder",
    "data_prep.tokenization.word_counts:_IS_ASCII_SPACE": "a single character",
    "data_prep.tokenization.word_counts:_WIDE_SPACES": "all characters",
    "fairseq_alma.report.page:GLOSSARY_ENTRY": "a page of ours",
    "fairseq_alma.report.page:_plain": "a page of ours",
}
"""Patterns that no foreign text reaches, with what reaches them."""

ARC_LINE = "http://a.example/ 0.0.0.0 20140216050221 text/html 9\n"
WARC_LINES = "WARC/1.0\nContent-Length: 1048576\n\n"
DUMP = "<mediawiki>"
NAMESPACE = '<namespace key="6">n</namespace>'
PAGE = "<page><title>a</title><ns>0</ns><revision><text>b</text></revision></page>"


def read_archive(read, text):
    """Read a web archive."""
    with suppress(compression.DamagedFile):
        list(read(io.BufferedReader(io.BytesIO(text.encode())), SkippedUnits("a", "record"), no_report))


def read_gzip(content):
    return b"".join(compression._unpacked(io.BytesIO(content), "gzip", compression._gzip))


def read_dump(text):
    file = io.BytesIO(text.encode())
    pieces = [*iter(lambda: file.read(wikipedia._PIECE_BYTES), b""), b""]
    with suppress(compression.DamagedFile):
        list(wikipedia._articles(pieces, SkippedUnits("a", "page"), no_report))


def namespaces(length):
    """The header of a dump with different names of namespaces."""
    names = (f'<namespace key="6">{number}</namespace>' for number in range(length // 40))
    return f"{DUMP}<siteinfo><namespaces>{''.join(names)}</namespaces></siteinfo>{PAGE}</mediawiki>"


def rows_of_dates(text):
    return parse_date(text), date_in_path(text, text), snapshot_of(text)


def shown(name, text):
    """What a template shows with this text as its arguments."""
    return shown_text(name, {str(number): text for number in range(1, 4)})


MARKS = "\u0301\u0316"  # combining marks in an order that normalization changes
TEXTS = [
    *map(
        repeated, ("a", " ", "\n", "a ", "a\n", "\n \n", ". ", "...", "a-", "ก", "漢", "漢 ", "ﷺ", "İ", "\u3000", "\0")
    )
]
TEXTS += [
    lambda length: "a" + "\u0301" * (length // 2) + "\u0316" * (length // 2),
    repeated(MARKS),
    repeated(f"a{MARKS}"),
]
FUNCTIONS = {
    "fairseq_alma.report.tables:_without_formula": (_without_formula, [
        repeated("1", "+"), repeated("1", "+1e"), repeated("1", "+1 ± "), repeated("a", "="),
    ]),
    # The text of documents
    "data_prep.cleaning.cleaner:span_tokenize": (lambda text: our_words().span_tokenize(text), TEXTS),
    "data_prep.cleaning.cleaner:Cleaner": (lambda text: Cleaner(Cleaning()).clean(Document(text)), TEXTS),
    "data_prep.words:count_words": (count_words, TEXTS),
    "data_prep.words:split_words": (split_words, TEXTS),
    "data_prep.words:word_starts": (word_starts, TEXTS),
    "data_prep.dividing.partition:cut_document": (lambda text: cut_document(text, 10, 20), TEXTS),
    "data_prep.reading.ngrams:unit_hashes": (unit_hashes, TEXTS),
    "data_prep.reading.ngrams:unit_hashes_of": (unit_hashes_of, [lambda length: ["a"] * length]),
    "data_prep.tokenization.word_counts:split_words": (lambda text: split_training_words([text]), TEXTS),
    "data_prep.tokenization.word_counts:count_words": (lambda text: count_training_words([text]), TEXTS),
    "data_prep.tokenization.tokenizers:dictionary_names": (
        dictionary_names, [lambda length: [" "] * length, lambda length: ["<U+0020>", *["#"] * length, " "]]
    ),
    "data_prep.copies.near_copies:removed_copies": (
        lambda chain: removed_copies(chain[:-1], chain[1:]), [lambda length: np.arange(length)]
    ),
    # Dates and names of files
    "data_prep.sources.dates:parse_date": (rows_of_dates, [
        *map(repeated, ("1", "1999", "1999-", "1999-01-01", "1999-01-01T", " ", " UTC", "Z", "a")),
        repeated("0", "1999-01-01."),
    ]),
    "data_prep.sources.base:is_wanted": (
        lambda text: [kind.is_wanted(text) for kind in KINDS.values()],
        [*map(repeated, ("/", ".", ".txt.", ".json.gz", ".war", ".warcc", ".cdxjj", ".xmll", "\n"))]
    ),
    # Files
    "data_prep.sources.books:without_gutenberg": (without_gutenberg, [
        *map(repeated, (" ", "\n", "*", "***", "*** START OF THE PROJECT GUTENBERG ***\n", "Produced by\n", "*END*\n")),
        repeated("a\n", "*** START OF THE PROJECT GUTENBERG ***\nProduced by\n"),
    ]),
    "data_prep.sources.records:warc_records": (partial(read_archive, records.warc_records), [
        repeated(" a\n", "WARC/1.0\n", "\n"), repeated("a: b\n", "WARC/1.0\n", "\n"), repeated("\n"), repeated("a"),
        repeated("WARC/1.0\n"), repeated("WARC/1.0"), repeated("WARC/1.0\n\n"), repeated(WARC_LINES), repeated("\r"),
        repeated(f"{WARC_LINES}a\n"), repeated("WARC/1.0\nContent-Length: 0\n\na\n"), repeated("a\n", WARC_LINES),
    ]),
    "data_prep.sources.records:arc_records": (partial(read_archive, records.arc_records), [
        *map(repeated, ("a:", "a:\n", ARC_LINE, f"{ARC_LINE}a\n", f"a{ARC_LINE}", ARC_LINE.replace(" 9", " 99999"))),
        repeated(" x 12345678 ", "a:", "\v\n"), repeated("a: x 12345678 \v\n"),
        repeated("a:" * 500 + " 1 12345678 \v\n"),
    ]),
    "data_prep.sources.wikipedia:_articles": (read_dump, [
        namespaces, repeated(PAGE, DUMP), repeated("<page>&", DUMP), repeated("<page>", DUMP),
        repeated("\n", f"{DUMP}</mediawiki>"),
        repeated("<a/>", DUMP), repeated("<revision/>", f"{DUMP}<page>"), repeated("a='' ", f"{DUMP}<page "),
        repeated(f"{DUMP}</mediawiki>"), repeated("<!--", DUMP), repeated("&amp;", f"{DUMP}<page><revision><text>"),
    ]),
    "data_prep.sources.web_page:media_type_of": (web_page.media_type_of, [*map(repeated, (" ", ";", "a", ", "))]),
    "data_prep.sources.web_page:_join_chunks": (
        lambda text: web_page._join_chunks(text.encode()),
        [*map(repeated, ("1\r\na\r\n", "1\n", " ", "\r\n", "f", "f\n", "1;\n"))]
    ),
    "data_prep.sources.web_page:_to_text": (lambda text: web_page._to_text(text.encode(), text, True), [
        *map(repeated, ("<meta", "<!--", "<meta charset=", "<meta http-equiv=content-type content=charset=")),
        *map(repeated, ("ä", "\0", "charset=")),
    ]),
    "data_prep.sources.web_page:as_html": (web_page.as_html, [
        *map(repeated, ("<!DOCTYPE[", "<![CDATA[", "<a", "<a/>", "<a />", "]]>", "xmlns:a='", "<a:b")),
        repeated("a:", "xmlns:a='http://www.w3.org/1999/xhtml'"), repeated("] ", "<!DOCTYPE["),
        repeated("]]>", "<![CDATA["),
    ]),
    "data_prep.sources.wiki_templates:_date": (partial(shown, "start date"), [*map(repeated, ("1", "0", "a"))]),
    "data_prep.sources.wiki_templates:_is_range": (partial(shown, "convert"), [*map(repeated, ("to ", "-", "a"))]),
    "data_prep.sources.wiki_templates:_ipa": (partial(shown, "ipa"), [*map(repeated, ("a", "aa-", "-"))]),
    "data_prep.sources.wiki_templates:_link_to_other_wiki": (partial(shown, "ill"), [repeated("a")]),
    "data_prep.compression:_unpacked": (read_gzip, [
        lambda length: gzip.compress(b"") * (length // 20), lambda length: gzip.compress(b"a") * (length // 20),
        lambda length: gzip.compress(b"a") + b"\0" * (length // 512 * 512 - 21),
    ]),
    # Runs of others
    "fairseq_alma.core.holder:_PATTERNS": (
        lambda text: [pattern.fullmatch(text) for pattern in holder._PATTERNS.values()], [*map(repeated, ("1", "1_"))]
    ),
    "vision.dataset_names:natural_key": (natural_key, [*map(repeated, ("1", "-1", "a", "a1", "0", "a0"))]),
    "fairseq_alma.lm.failures:_last_error": (lambda text: _last_error(text.splitlines()), [
        *map(repeated, ("a", ".", "Error", "a\n", "Error\n", "Error: connection ", "[rank1]:", ":"))
    ]),
    "fairseq_alma.report.grouping:group_runs": (partial(re.sub, r"\W+", "_"), [repeated(" "), repeated("a ")]),
    "fairseq_alma.report.tables:markdown": (
        lambda text: Table("a", "a", ["a"], [[text]]).markdown(), [*map(repeated, (" ", "-", "|", "a"))]
    ),
}  # fmt: skip
"""Functions with their worst inputs."""


def used_patterns():
    """The name of each regular expression of ours: of the constant, or of the function that uses it."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                yield from (f"{module}:{name}" for name in patterns_in(node))


def patterns_in(node, name=""):
    if isinstance(node, ast.FunctionDef):
        name = node.name
    if isinstance(node, ast.Assign) and not name:
        names = [one.id for one in ast.walk(node.targets[0]) if isinstance(one, ast.Name)]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            yield from patterns_in(value, name)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.func.attr != "escape":
        yield name
    else:
        for child in ast.iter_child_nodes(node):
            yield from patterns_in(child, name)


def test_each_pattern_has_its_worst_input():
    used = set(used_patterns())
    assert len(used) > 90
    assert used - PATTERNS.keys() - FUNCTIONS.keys() - OWN.keys() == set()
    assert (PATTERNS.keys() | OWN.keys()) - used == set()


@pytest.mark.parametrize("name", PATTERNS)
def test_the_time_of_a_pattern_is_linear(name):
    module, _, constant = name.partition(":")
    pattern = getattr(importlib.import_module(module), constant)
    method, inputs = PATTERNS[name]
    for number, make in enumerate(inputs):
        function = partial(pattern.sub, b"" if isinstance(pattern.pattern, bytes) else "")
        function = getattr(pattern, method) if method != "sub" else function
        encode = str.encode if isinstance(pattern.pattern, bytes) else str
        assert growth(function, lambda length: encode(make(length))) <= MOST_GROWTH, (number, make(40))  # noqa: B023


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_time_of_a_function_is_linear(name):
    function, inputs = FUNCTIONS[name]
    for number, make in enumerate(inputs):
        assert growth(function, make) <= MOST_GROWTH, (number, str(make(60))[:200])

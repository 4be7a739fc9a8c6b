"""Rules for the quality of text, by name: gopher (Rae et al., 2021), c4 (Raffel et al., 2020), and fineweb (Penedo et
al., 2024).

datatrove implements the rules. Words are those of `data_prep.words`: separated by white space, as in the papers, or
found by ICU in scripts without spaces. datatrove's default English word tokenizer is not used, for three reasons.
First, it counts punctuation marks as words. Pages of dialogue would then fail the rule that most words must contain a
letter. Second, it takes a minute for 25 MB of text. Third, it downloads data.

The rules were made for English. Words and lines of Hangul and of scripts without spaces (`characters.SCRIPTS`) have
fewer characters, and sentences end with other marks or none. So text in these scripts has rules of its own, in which
the limits that depend on this are lower or left out.
"""

from collections.abc import Callable, Mapping
from typing import Any

from data_prep.cleaning.words import our_words

SCOPES = ("crawls", "all", "off")
"""Which sources a set of rules applies to: common-crawl sources, all sources, or none."""
_STOP_WORDS_OF = "en"
"""Language of the stop words ("the", "of", "and", ...) that one of the Gopher rules looks for."""


def quality_rules(names: tuple[str, ...], language: str, script: str) -> list[tuple[str, Any]]:
    """Return the rules with these names as pairs (name of a group of rules, datatrove filter), in the order of RULES.

    Args:
        names: names of rules, keys of RULES.
        language: ISO 639 code of the language to keep. The rule that requires English stop words ("the", "of", ...) is
            used only if this is English.
        script: the kind of script of the text, one of `characters.SCRIPTS`.
    """
    return [rule for name, make in RULES.items() if name in names for rule in make(language, script)]


def _gopher(language: str, script: str) -> list[tuple[str, Any]]:
    """Return the quality rules (section A1.1 of the paper) and the repetition rules (table A1)."""
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    words = our_words()
    # One Gopher rule requires English stop words in every document. Skip this rule unless the setting `language` keeps
    # only English documents, because documents in other languages would fail it.
    options: dict[str, Any] = {} if language == _STOP_WORDS_OF else {"min_stop_words": None}
    if script != "alphabet":
        # Words have at least three characters on average. English ones have 4.7, Korean ones 3, and Chinese ones 1.6.
        options["min_avg_word_length"] = None
    return [
        ("gopher quality", GopherQualityFilter(language=words, **options)),
        ("gopher repetition", GopherRepetitionFilter(language=words)),
    ]


def _c4(language: str, script: str) -> list[tuple[str, Any]]:
    """Return the rules of C4 without the list of bad words, which would have to be downloaded.

    They remove lines, and documents with fewer than five sentences, with "lorem ipsum", or with a curly bracket.
    """
    from datatrove.pipeline.filters import C4QualityFilter, c4_filters
    from datatrove.utils.text import TERMINAL_PUNCTUATION

    # C4 knows only the marks of English, so all lines of Hindi, Armenian or Urdu would be removed. datatrove has no
    # option for the marks.
    known = dict.fromkeys((*c4_filters.END_PUNCTUATION, *sorted(TERMINAL_PUNCTUATION)))
    c4_filters.END_PUNCTUATION = tuple(known)
    options: dict[str, Any] = {}
    if script == "unspaced":
        # datatrove takes the text between white space for words here, and Thai has no mark at the end of a sentence.
        options = {"filter_no_terminal_punct": False, "min_num_sentences": -1, "min_words_per_line": -1}
        options["max_word_length"] = -1
    return [("c4", C4QualityFilter(language=our_words(), **options))]


def _fineweb(language: str, script: str) -> list[tuple[str, Any]]:
    """Return the rules that FineWeb adds to those of Gopher and C4: line ends, short lines, repeated lines, lists."""
    from datatrove.pipeline.filters import FineWebQualityFilter

    # 30 characters of English, 15 of Korean and 10 of Chinese have five to seven words.
    length = {"alphabet": 30, "syllables": 15, "unspaced": 10}[script]
    # Thai has no mark at the end of a sentence.
    options = {"short_line_length": length, "line_punct_exclude_zero": script == "unspaced"}
    return [("fineweb", FineWebQualityFilter(language=our_words(), **options))]


RULES: Mapping[str, Callable[[str, str], list[tuple[str, Any]]]] = {"gopher": _gopher, "c4": _c4, "fineweb": _fineweb}
"""All rules, in the order in which they are applied, which is the order of FineWeb."""


def parse_rules(text: str) -> dict[str, str]:
    """Return the scope (see SCOPES) of each rule of a text such as `gopher,c4:all`, by name.

    Raises:
        ValueError: if a name or a scope is unknown, or a name is given twice.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, scope = entry.partition(":")
        if name not in RULES:
            raise ValueError(f"rules={text}: '{name}' is unknown: use {', '.join(RULES)}, with commas between them")
        if (scope or "crawls") not in SCOPES:
            raise ValueError(f"rules={text}: '{scope}' is unknown: use {name}:{f' or {name}:'.join(SCOPES)}")
        if name in found:
            raise ValueError(f"rules={text}: {name} is given twice")
        found[name] = scope or "crawls"
    return found

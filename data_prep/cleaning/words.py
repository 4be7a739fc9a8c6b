"""A word tokenizer for datatrove that splits text at white space, as the paper does to count words."""

import re
from typing import Any

# The end of a sentence: a punctuation mark and closing quotation marks or brackets, then white space; or a full stop of
# a script without spaces.
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]+[”’」』）]*")


def words_between_spaces() -> Any:
    """Return a word tokenizer that splits at white space. Pass it to datatrove as the argument `language`.

    datatrove's English tokenizer is not used, because it counts punctuation marks as words and takes a minute for every
    25 MB. The returned tokenizer splits text into sentences at punctuation marks. It does not know abbreviations, so it
    finds a sentence end after "Mr."; the rules only need to know whether a text has about five sentences.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:end] for start, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            spans, start = [], 0
            for found in _SENTENCE_END.finditer(text):
                spans.append((start, found.end()))
                start = found.end()
            return [*spans, (start, len(text))] if text[start:].strip() or not spans else spans

    return Words()

"""The word tokenizer that datatrove uses here: words are separated by white space, as in the paper's counts."""

from typing import Any


def words_between_spaces() -> Any:
    """Return a `WordTokenizer` that datatrove's filters and signatures accept in place of the name of a language.

    datatrove's own tokenizer for English counts punctuation as words, and takes a minute for every 25 MB. This one
    cannot find sentences: none of the rules used here needs them.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        span_tokenize = sent_tokenize

    return Words()

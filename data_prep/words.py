"""A word tokenizer for datatrove that splits text at white space, as the paper does to count words."""

from typing import Any


def words_between_spaces() -> Any:
    """Return a word tokenizer that splits at white space. Pass it to datatrove as the argument `language`.

    datatrove's English tokenizer is not used, because it counts punctuation marks as words and takes a minute for every
    25 MB. The returned tokenizer cannot split text into sentences. alma-prep does not need sentences, because it uses
    only parts of datatrove that work without them.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        span_tokenize = sent_tokenize

    return Words()

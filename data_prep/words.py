"""A word tokenizer for datatrove that splits text at white space, as the paper does to count words."""

from typing import Any


def words_between_spaces() -> Any:
    """Return a word tokenizer that splits at white space, to pass to datatrove as `language`.

    datatrove's English tokenizer counts punctuation marks as words, and takes a minute for every 25 MB. The returned
    `WordTokenizer` cannot split text into sentences, because nothing that we use of datatrove needs sentences.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        span_tokenize = sent_tokenize

    return Words()

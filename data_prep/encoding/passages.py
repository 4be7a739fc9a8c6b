"""Read the tokens of a stream, passage by passage."""

import itertools
from collections.abc import Iterator

import numpy as np

from data_prep.encoding.mmap_writer import best_dtype
from data_prep.errors import PrepError
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, Tokenizer
from fairseq_alma.core.stream_folder import StreamFolder

_BATCH_TOKENS = 1 << 20
"""Approximate number of tokens that are read at a time."""


def passages_of(stream: StreamFolder, split: str) -> Iterator[list[np.ndarray]]:
    """Yield the ids of the passages of a split, int64, without </s>, in its order, many of them at a time."""
    tokens = np.memmap(stream.prefix(split).with_suffix(".bin"), best_dtype(stream.dictionary_size), "r")
    start = 0
    while start < len(tokens):
        ends = start + np.flatnonzero(tokens[start : start + _BATCH_TOKENS] == EOS)
        if not len(ends):  # a passage that is longer
            ends = start + np.flatnonzero(tokens[start:] == EOS)[:1]
        if not len(ends):
            raise PrepError(
                f"{stream.prefix(split)}.bin does not end with the end of a passage: make the stream again."
            )
        bounds = itertools.pairwise([start - 1, *ends.tolist()])
        yield [tokens[first + 1 : last].astype(np.int64) for first, last in bounds]
        start = int(ends[-1]) + 1


def texts_of(stream: StreamFolder, split: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of the passages of a split, in its order. Masked tokens have no text."""
    for passages in passages_of(stream, split):
        yield from tokenizer.decode_all([(ids[ids >= NUM_SPECIAL] - NUM_SPECIAL).tolist() for ids in passages])

"""Perplexity of a model or an ensemble on a split of a stream. Every token is scored exactly once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fairseq_alma.core.errors import StreamError, message_of
from fairseq_alma.core.metrics import perplexity_of
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, StreamFolder, split_entry

if TYPE_CHECKING:
    import pyarrow

# Names of array dimensions: N members, T tokens in a split. A name that ends in _NT belongs to an array [N, T].

TOKENS_PER_CHUNK = 1 << 20
"""Number of tokens in a chunk. To limit the memory use, `combine` processes one chunk of a split at a time."""


@dataclass(frozen=True)
class PerplexityScore:
    """The score of a predictor on a split. End-of-document tokens are scored like all other tokens. Masked ones are
    not (see `fairseq_alma.forget`)."""

    nll_sum: float
    """Negative log-likelihood in nats, summed over all tokens that were scored."""
    num_tokens: int
    """Number of tokens that were scored."""
    num_words: int
    """Number of words in the text of the split. `alma-prep` counts them (see docs/corpora.md)."""
    num_bytes: int | None = None
    """Number of UTF-8 bytes of the same text; None if it is not known."""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, in nats per token; NaN if all text of the split is masked."""
        return self.nll_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return perplexity_of(self.loss)

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word; NaN without words. Unlike that per token, it can be compared across tokenizers."""
        return perplexity_of(self.nll_sum / self.num_words) if self.num_words else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte of the text. It depends neither on the tokenizer nor on what counts as a word."""
        return self.nll_sum / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_json(self) -> dict[str, float]:
        """Return the score as a JSON object, without what is not known."""
        values = {
            "num_tokens": self.num_tokens,
            "num_words": self.num_words,
            "num_bytes": self.num_bytes,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        return {name: value for name, value in values.items() if value is not None}


def combine(
    log_probability_N: Sequence[np.ndarray], num_words: int, num_bytes: int | None = None, num_masked: int = 0
) -> PerplexityScore:
    """Return the score of an ensemble on a split. Without words, there is none, because alma-forget has masked them.

    The ensemble predicts the mean of the probabilities of its members, computed in float64.

    Args:
        log_probability_N: for each of the N members, the float32 log-probabilities [T] of all tokens of one split.
        num_words: number of words in the split.
        num_bytes: number of UTF-8 bytes of the split's text; None if it is not known.
        num_masked: how many of the tokens are masked, see `StreamFolder.num_masked`. Their log-probability is 0.
    """
    if not num_words:  # alma-forget keeps the </s> after each text
        return PerplexityScore(0.0, 0, 0, num_bytes)
    num_tokens, nll_sum = len(log_probability_N[0]), 0.0
    for start in range(0, num_tokens, TOKENS_PER_CHUNK):
        chunk_NT = np.stack(
            [np.asarray(member_T[start : start + TOKENS_PER_CHUNK], np.float64) for member_T in log_probability_N]
        )
        nll_sum -= float((np.logaddexp.reduce(chunk_NT, axis=0) - math.log(len(chunk_NT))).sum())
    return PerplexityScore(nll_sum, num_tokens - num_masked, num_words, num_bytes)


def read_documents(stream: StreamFolder, split: str, columns: Sequence[str]) -> tuple["pyarrow.Table", np.ndarray]:
    """Return what documents/SPLIT.parquet says about the sequences of a split, and the number of tokens of each.

    Raise StreamError if the file is missing, cannot be read, or does not have these columns (see
    `data_prep.encoding.documents`) and one row for each sequence.
    """
    # Import pyarrow only here, because it is rarely needed, and the import takes a tenth of a second.
    import pyarrow.parquet

    path = stream.path / "documents" / f"{split}.parquet"
    if not path.is_file():
        raise StreamError(f"{path} is missing, so it is not known where the text is from: make the stream again")
    try:
        missing = {*columns} - {*pyarrow.parquet.read_schema(path).names}
        if missing:
            raise StreamError(f"{path} has no column {', '.join(sorted(missing))}: make the stream again")
        table = pyarrow.parquet.read_table(path, columns=list(columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise StreamError(f"{path} cannot be read ({message_of(error)}): restore the file") from error
    index, num_sequences = stream.prefix(split).with_suffix(".idx"), stream.counts(split)["sequences"]
    if len(table) != num_sequences:
        raise StreamError(f"{path} has {len(table):,} rows, expected {num_sequences:,}: restore the file")
    return table, np.fromfile(index, np.int32, num_sequences, offset=IDX_HEADER_BYTES)


def scores_by_source(members: Sequence[np.ndarray], stream: StreamFolder, split: str) -> dict[str, PerplexityScore]:
    """Return the score on each source whose text is in the split, and was not masked, by the name of the source.

    The first tokens of a passage are predicted from the passage before, as in the score of the complete split. Raise
    StreamError if the stream does not say from which source its passages come, or if the file has changed.
    """
    stream.verify_file(f"documents/{split}.parquet")
    table, sizes = read_documents(stream, split, ["source", "words", "bytes"])
    sources = table.column("source").combine_chunks().dictionary_encode()
    source_of = sources.indices.to_numpy()
    source_T = np.repeat(source_of, sizes)
    for first, last in split_entry(stream.description, split).get("masked", []):
        source_T[first:last] = -1  # of no source
    scores = {}
    for name, number in sorted((name, number) for number, name in enumerate(sources.dictionary.to_pylist())):
        sums = [int(table[unit].to_numpy()[source_of == number].sum(dtype=np.int64)) for unit in ("words", "bytes")]
        if not sums[0]:
            continue
        members_T = [member_T[source_T == number] for member_T in members]
        scores[name] = combine(members_T, *sums)
    return scores

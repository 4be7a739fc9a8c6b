"""What a person may set, checked when it is made."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources import Source
from data_prep.tokenization import TOKENIZERS


@dataclass(frozen=True)
class PrepSettings:
    """How corpora become a stream. Raises ValueError when made with a value that cannot work."""

    out: Path
    """The stream folder to write."""
    sources: tuple[Source, ...]
    """Where the text comes from; their order does not matter."""
    num_mega_batches: int
    """B: how many mega-batches the stream offers; one more of the same size becomes the test set."""
    vocab_size: int
    """V: symbols of the tokenizer, without fairseq's four special symbols."""
    seed: int
    """Which of the many possible partitions of the text."""
    tokenizer: str = "byte-bpe"
    """byte-bpe (GPT-2 style, lossless: the paper's) or sentencepiece (BPE with byte fallback)."""
    valid_words: int | None = None
    """Words of the validation set; None: min(500 000, 1% of all words)."""
    passage_words: int | None = None
    """Words a long document is cut into; None: min(2000, 0.2% of a mega-batch)."""
    workers: int = os.cpu_count() or 1
    """Processes at work. Changes the time taken, never a byte of the result."""

    def __post_init__(self):
        if not self.sources:
            raise ValueError("no source given: add --source KIND:PATH")
        for source in self.sources:
            if self.sources.count(source) > 1:
                raise ValueError(f"source {source} is given more than once")
        if self.tokenizer not in TOKENIZERS:
            raise ValueError(f"tokenizer={self.tokenizer} is unknown: use one of {', '.join(TOKENIZERS)}")
        smallest = TOKENIZERS[self.tokenizer].smallest_vocab_size
        at_least = {"num_mega_batches": 1, "vocab_size": smallest, "workers": 1}
        at_least |= {name: 1 for name in ("valid_words", "passage_words") if getattr(self, name) is not None}
        for name, minimum in at_least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} is too small: it must be at least {minimum}")

    def command(self) -> str:
        """The command line that makes the same stream again."""
        words = ["alma-prep", str(self.out)]
        for source in self.sources:
            words += ["--source", str(source)]
        words += ["--mega-batches", str(self.num_mega_batches), "--vocab-size", str(self.vocab_size)]
        words += ["--seed", str(self.seed), "--tokenizer", self.tokenizer]
        if self.valid_words is not None:
            words += ["--valid-words", str(self.valid_words)]
        if self.passage_words is not None:
            words += ["--passage-words", str(self.passage_words)]
        return shlex.join(words)

    def recorded(self, valid_words: int, passage_words: int) -> dict:
        """Every setting that shapes the result, defaults resolved, as stream.json keeps it.

        `out` and `workers` are left out: they change no byte. Sources are sorted: their order changes none.
        """
        return {
            "sources": sorted(map(str, self.sources)),
            "num_mega_batches": self.num_mega_batches,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "valid_words": valid_words,
            "passage_words": passage_words,
        }

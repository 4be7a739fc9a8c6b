"""What a person may set, checked when it is made."""

import os
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from data_prep.cleaning import known_languages
from data_prep.sources import Source
from data_prep.tokenization import TOKENIZERS, check_tokenizer

PARTITIONS = ("equal", "by-date", "as-given")
DUPLICATES = ("near", "exact", "keep")
GOPHER = ("crawls", "all", "off")
EXECUTORS = ("local", "slurm")


@dataclass(frozen=True)
class Cluster:
    """Of a Slurm job that makes a piece."""

    partition: str | None = None
    time: str = "04:00:00"
    memory_gb: int = 4
    """Of each task; one core each."""


@dataclass(frozen=True)
class PrepSettings:
    """How corpora become a stream. Raises ValueError when made with a value that cannot work."""

    out: Path
    """The stream folder to write, or with `extend` to add to."""
    sources: tuple[Source, ...]
    """Where the text comes from; their order matters with partition as-given only."""
    num_mega_batches: int | None = None
    """B: how many mega-batches the stream offers; one more of the same size becomes the test set. With `extend`: how
    many are added. None: what the partition gives (a snapshot each), or 1 with `extend`."""
    vocab_size: int = 50_000
    """V: symbols of a tokenizer that is trained, without fairseq's four special symbols."""
    seed: int = 0
    """Which of the many possible partitions of the text."""
    tokenizer: str = "byte-bpe"
    """byte-bpe (GPT-2 style, lossless: the paper's), sentencepiece (BPE with byte fallback), or the path of one."""
    tokenizer_words: int = 200_000_000
    """Of more training text than this, an even sample of so many words trains the tokenizer."""
    valid_words: int | None = None
    """Words of the validation set; None: min(500 000, 1% of all words)."""
    valid_source: str | None = None
    """Kind of source that the validation set is taken from; None: all."""
    passage_words: int | None = None
    """Words a long document is cut into; None: min(2000, 0.2% of a mega-batch)."""
    partition: str = "equal"
    """equal (words and sources alike in every mega-batch), by-date (one a snapshot), as-given (one a --source)."""
    language: str = ""
    """Documents of other languages are removed; empty: none are."""
    gopher: str = "crawls"
    """Where the quality rules of Gopher are applied: crawls (common-crawl sources), all, off."""
    duplicates: str = "near"
    """What is removed: near (and exact) copies, exact ones, or none (keep)."""
    text_field: str = "text"
    """Of JSON lines and Parquet."""
    extend: bool = False
    """Add mega-batches to a stream that is there, with its tokenizer."""
    max_bad: float = 0.01
    """Share of the input files that may be damaged. Changes no byte."""
    workers: int = os.cpu_count() or 1
    """Processes at work. Changes the time taken, never a byte of the result."""
    stall_seconds: float = 40.0
    """A worker without progress for so long ends the run. Documents are limited in size, so that none takes it."""
    executor: str = "local"
    """local, or slurm: the same pieces, made by jobs."""
    cluster: Cluster = Cluster()

    def __post_init__(self):
        if not self.sources:
            raise ValueError("no source given: add --source KIND:PATH")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"source {name} is given more than once")
        choices = {
            "partition": PARTITIONS, "gopher": GOPHER, "duplicates": DUPLICATES, "executor": EXECUTORS,
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} is unknown: use one of {', '.join(known)}")
        if self.language and self.language not in known_languages():
            raise ValueError(f"language={self.language} is unknown: give a code such as en, de, bg (ISO 639-1)")
        if self.valid_source is not None and self.valid_source not in {source.kind for source in self.sources}:
            known = ", ".join(sorted({source.kind for source in self.sources}))
            raise ValueError(f"valid_source={self.valid_source} is none of the sources' kinds: {known}")
        check_tokenizer(self.tokenizer)
        if self.extend:
            of_stream = ("seed", "tokenizer", "vocab_size", "tokenizer_words", "valid_words", "valid_source")
            for field in fields(self):
                if field.name in of_stream and getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"an extension takes {field.name} from its stream: leave {OPTIONS[field.name]} out"
                    )
        if self.num_mega_batches is None and self.partition == "equal" and not self.extend:
            raise ValueError("how many mega-batches? Give --mega-batches")
        if self.extend and self.partition != "equal":
            raise ValueError("an extension is cut into equal mega-batches: add snapshots one after another instead")
        if not 0 <= self.max_bad <= 1:
            raise ValueError(f"max_bad={self.max_bad} is no share: it must be from 0 to 1")
        at_least: dict[str, float] = {"workers": 1, "stall_seconds": 2, "tokenizer_words": 1000, "seed": 0}
        if self.tokenizer in TOKENIZERS:
            at_least["vocab_size"] = TOKENIZERS[self.tokenizer].smallest_vocab_size
        optional = ("num_mega_batches", "valid_words", "passage_words")
        at_least |= {name: 1 for name in optional if getattr(self, name) is not None}
        for name, minimum in at_least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} is too small: it must be at least {minimum}")

    def command(self) -> str:
        """The command line that makes the same stream again."""
        words = ["alma-prep", *(["--extend"] if self.extend else []), str(self.out)]
        for source in self.sources:
            words += ["--source", str(source)]
        defaults = type(self)(
            self.out, self.sources, self.num_mega_batches, partition=self.partition, extend=self.extend
        )
        always = () if self.extend else ("num_mega_batches", "vocab_size", "seed")
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None and (name in always or value != getattr(defaults, name)):
                words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
            elif name in ("partition", "num_mega_batches") and value not in (None, "equal"):
                words += [option, str(value)]
        return shlex.join(words)

    def shaping(self) -> dict:
        """Every setting that shapes the result, as given: what two runs of one folder must agree on.

        `out`, `workers`, `max_bad` and where it runs are left out: they change no byte. Sources are sorted where
        their order changes none.
        """
        sources = list(map(str, self.sources))
        return {
            "sources": sources if self.partition == "as-given" else sorted(sources),
            **{name: getattr(self, name) for name in OPTIONS if name not in _NOT_SHAPING},
        }

    def recorded(self, num_mega_batches: int, valid_words: int, passage_words: int) -> dict:
        """`shaping` with defaults resolved, as stream.json keeps it."""
        return self.shaping() | {
            "num_mega_batches": num_mega_batches,
            "valid_words": valid_words,
            "passage_words": passage_words,
        }

    def cleans(self, kind: str) -> bool:
        """Whether Gopher's rules are applied to a kind of source."""
        return self.gopher == "all" or (self.gopher == "crawls" and kind == "common-crawl")


OPTIONS = {
    "num_mega_batches": "--mega-batches", "vocab_size": "--vocab-size", "seed": "--seed", "tokenizer": "--tokenizer",
    "tokenizer_words": "--tokenizer-words", "valid_words": "--valid-words", "valid_source": "--valid-source",
    "passage_words": "--passage-words", "partition": "--partition", "language": "--language", "gopher": "--gopher",
    "duplicates": "--duplicates", "text_field": "--text-field", "max_bad": "--max-bad",
}  # fmt: skip
_NOT_SHAPING = ("max_bad",)

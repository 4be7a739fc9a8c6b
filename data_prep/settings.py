"""The settings of alma-prep, each declared together with its command-line option.

Creating a PrepSettings object checks the values.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from data_prep.cleaning import known_languages
from data_prep.options import defaults_of, options_of, setting
from data_prep.sources import Source
from data_prep.tokenization import TOKENIZERS, check_tokenizer

_SOURCES = "sources"
_CLEANING = "cleaning"
_MEGA_BATCHES = "mega-batches"
_TOKENIZER = "tokenizer"
_WHERE_IT_RUNS = "where it runs"


@dataclass(frozen=True)
class Cluster:
    """Settings of the Slurm jobs that run tasks."""

    partition: str | None = setting(
        None, "--slurm-partition", _WHERE_IT_RUNS, metavar="NAME",
        help="Slurm partition of the jobs; default: the cluster's default partition",
    )  # fmt: skip
    time: str = setting(
        "04:00:00", "--slurm-time", _WHERE_IT_RUNS, metavar="HH:MM:SS",
        help="time limit of a job; default: %(default)s",
    )  # fmt: skip
    memory_gb: int = setting(
        4, "--slurm-memory-gb", _WHERE_IT_RUNS, metavar="N",
        help="memory of a job in GB per core; jobs use one core, except the job that trains the tokenizer; "
        "default: %(default)s",
    )  # fmt: skip


@dataclass(frozen=True)
class PrepSettings:
    """All settings of a run of alma-prep. Creating an object with an invalid value raises ValueError."""

    out: Path
    """The stream folder to write or, if `extend` is True, to extend."""
    sources: tuple[Source, ...]
    """Where to read text from. The order of sources matters only with `partition="as-given"`."""
    num_mega_batches: int | None = setting(
        None, "--mega-batches", _MEGA_BATCHES, metavar="B", minimum=1, always_in_command=True,
        help="number of mega-batches of the stream; the test set has the same size as a mega-batch. With --extend: "
        "number of mega-batches to add; default: 1. With --partition by-date or as-given, the default is one per "
        "snapshot",
    )  # fmt: skip
    vocab_size: int = setting(
        50_000, "--vocab-size", _TOKENIZER, metavar="V", always_in_command=True, fixed_by_stream=True,
        help="number of symbols of a tokenizer that is trained here, without fairseq's four special symbols; "
        "default: %(default)s",
    )  # fmt: skip
    seed: int = setting(
        0, "--seed", _MEGA_BATCHES, metavar="S", minimum=0, always_in_command=True, fixed_by_stream=True,
        help="seed for shuffling the passages; default: %(default)s",
    )  # fmt: skip
    tokenizer: str = setting(
        "byte-bpe", "--tokenizer", _TOKENIZER, metavar="NAME|PATH", fixed_by_stream=True,
        help="byte-bpe (GPT-2 style, lossless, as in the paper; default) or sentencepiece (BPE with byte fallback), "
        "which are trained on mega-batches 1..B; or the path of an existing tokenizer: a tokenizer.json, a .model, or "
        "GPT-2's vocab.bpe with encoder.json in the same folder",
    )  # fmt: skip
    tokenizer_words: int = setting(
        200_000_000, "--tokenizer-words", _TOKENIZER, metavar="N", minimum=1000, fixed_by_stream=True,
        help="maximum number of words used to train the tokenizer; from a larger training text, every n-th passage is "
        "used; default: 200 million (for sentencepiece at most 50 million, because its trainer keeps the text in "
        "memory)",
    )  # fmt: skip
    valid_words: int | None = setting(
        None, "--valid-words", _MEGA_BATCHES, metavar="N", minimum=1, fixed_by_stream=True,
        help="number of words in the validation set; default: min(500000, 1%% of all words)",
    )  # fmt: skip
    valid_source: str | None = setting(
        None, "--valid-source", _MEGA_BATCHES, metavar="KIND", fixed_by_stream=True,
        help="take the validation set only from sources of this kind, such as books; default: all kinds",
    )  # fmt: skip
    passage_words: int | None = setting(
        None, "--passage-words", _MEGA_BATCHES, metavar="N", minimum=1,
        help="length of a passage in words. Documents longer than 1%% of a mega-batch are cut at paragraph ends into "
        "passages of about this length; default: min(2000, 0.2%% of a mega-batch)",
    )  # fmt: skip
    partition: str = setting(
        "equal", "--partition", _MEGA_BATCHES, choices=("equal", "by-date", "as-given"),
        help="equal: all mega-batches have the same number of words and the same mix of sources (default). For streams "
        "that drift: by-date makes one mega-batch per snapshot, which is named by a date in the path (such as "
        "CC-MAIN-2019-13 or 20190325); as-given makes one mega-batch per --source, in the given order",
    )  # fmt: skip
    language: str = setting(
        "", "--language", _CLEANING, metavar="CODE",
        help="keep only documents in this language, such as en; default: keep all languages",
    )  # fmt: skip
    gopher: str = setting(
        "crawls", "--gopher", _CLEANING, choices=("crawls", "all", "off"),
        help="sources to filter with the Gopher rules for quality and repetition; default: crawls, which means "
        "common-crawl sources only",
    )  # fmt: skip
    duplicates: str = setting(
        "near", "--duplicates", _CLEANING, choices=("near", "exact", "keep"),
        help="which copies to remove across all sources. near: near and exact copies (default); exact: exact copies; "
        "keep: none",
    )  # fmt: skip
    decontaminate: int | None = setting(
        None, "--decontaminate", _CLEANING, metavar="N", minimum=5,
        help="remove training passages that have N words in a row in common with the validation set, the test set, or "
        "the files given by --decontaminate-against; 13 is usual; default: only report overlaps of 13 words",
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = setting(
        (), "--decontaminate-against", _CLEANING, metavar="PATH",
        help="benchmark text that --decontaminate looks for: a text file (one document per line), JSON lines, or a "
        "folder of such files; can be given several times",
    )  # fmt: skip
    text_field: str = setting(
        "text", "--text-field", _SOURCES, metavar="NAME",
        help="name of the field (JSON lines) or column (Parquet) that contains the text; default: %(default)s",
    )  # fmt: skip
    id_field: str = setting(
        "", "--id-field", _SOURCES, metavar="NAME",
        help="name of the field or column that names a document; default: id, or else url",
    )  # fmt: skip
    date_field: str = setting(
        "date", "--date-field", _SOURCES, metavar="NAME",
        help="name of the field or column with the date of a document; default: %(default)s",
    )  # fmt: skip
    max_bad: float = setting(
        0.01, "--max-bad", _SOURCES, metavar="FRACTION", shapes_stream=False,
        help="maximum fraction of damaged input files. If more are damaged, the run fails after it has read all files; "
        "default: %(default)s",
    )  # fmt: skip
    extend: bool = setting(
        False, "--extend", "options", shapes_stream=False, in_command=False,
        help="add --mega-batches mega-batches (default: 1) to the stream in OUT. They are encoded with the stream's "
        "tokenizer. Existing split files do not change, and copies of documents in the stream are left out",
    )  # fmt: skip
    workers: int = setting(
        os.cpu_count() or 1, "--workers", _WHERE_IT_RUNS, metavar="N", minimum=1, shapes_stream=False, in_command=False,
        help="number of worker processes; default: number of CPU cores. With --executor slurm: number of jobs that run "
        "at the same time",
    )  # fmt: skip
    stall_seconds: float = setting(
        40.0, "--stall-seconds", _WHERE_IT_RUNS, metavar="S", minimum=2, shapes_stream=False, in_command=False,
        help="stop the run if a worker makes no progress for this many seconds, and report which file the worker was "
        "reading; default: %(default)g",
    )  # fmt: skip
    executor: str = setting(
        "local", "--executor", _WHERE_IT_RUNS, choices=("local", "slurm"), shapes_stream=False, in_command=False,
        help="where tasks run: in processes on this machine, or as jobs on a Slurm cluster; default: %(default)s",
    )  # fmt: skip
    cluster: Cluster = Cluster()

    def __post_init__(self):
        self._check_sources()
        for name, option in options_of(self).items():
            if option.choices and getattr(self, name) not in option.choices:
                known = ", ".join(option.choices)
                raise ValueError(f"{name}={getattr(self, name)} is unknown: use one of {known}")
        if self.language and self.language not in known_languages():
            raise ValueError(f"language={self.language} is unknown: give a code such as en, de, bg (ISO 639-1)")
        if self.valid_source is not None and self.valid_source not in {source.kind for source in self.sources}:
            known = ", ".join(sorted({source.kind for source in self.sources}))
            raise ValueError(f"valid_source={self.valid_source}: no source of this kind is given. Use one of {known}")
        check_tokenizer(self.tokenizer)
        self._check_partition()
        self._check_numbers()

    def _check_sources(self) -> None:
        if not self.sources:
            raise ValueError("no source given: add --source KIND:PATH")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"source {name} is given more than once")

    def _check_partition(self) -> None:
        if self.extend:
            defaults = defaults_of(self)
            for name, option in options_of(self).items():
                if option.fixed_by_stream and getattr(self, name) != defaults[name]:
                    raise ValueError(f"an extension uses the {name} of the existing stream: omit {option.flag}")
        if self.num_mega_batches is None and self.partition == "equal" and not self.extend:
            raise ValueError("the number of mega-batches is missing: give --mega-batches")
        if self.extend and self.partition != "equal":
            raise ValueError(
                f"--extend does not support --partition {self.partition}, because new mega-batches have equal numbers "
                "of words: run alma-prep --extend once for each snapshot, oldest first"
            )

    def _check_numbers(self) -> None:
        if self.decontaminate_against and self.decontaminate is None:
            raise ValueError("--decontaminate-against needs the number of words: give --decontaminate 13")
        if not 0 <= self.max_bad <= 1:
            raise ValueError(f"max_bad={self.max_bad} is not a fraction: it must be between 0 and 1")
        minima = {name: option.minimum for name, option in options_of(self).items()}
        if self.tokenizer in TOKENIZERS:
            minima["vocab_size"] = TOKENIZERS[self.tokenizer].smallest_vocab_size
        for name, minimum in minima.items():
            value = getattr(self, name)
            if minimum is not None and value is not None and value < minimum:
                raise ValueError(f"{name}={value} is too small: it must be at least {minimum}")

    def command(self) -> str:
        """Return the command line that makes the same stream again, or that adds the same mega-batches again."""
        words = ["alma-prep", *(["--extend"] if self.extend else []), str(self.out)]
        for source in self.sources:
            words += ["--source", str(source)]
        defaults = defaults_of(self)
        for name, option in options_of(self).items():
            value = getattr(self, name)
            is_named = option.in_command and value != defaults[name]
            if isinstance(value, tuple):
                words += [word for each in value for word in (option.flag, each)]
            elif value is not None and (is_named or (option.always_in_command and not self.extend)):
                words += [option.flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words)

    def identity(self) -> dict:
        """Return all settings that affect the bytes of the stream.

        They must be equal in all calls of alma-prep for one stream folder.

        A setting that the user did not give, and whose default alma-prep computes from the text, is None. `out`,
        `workers`, `max_bad` and the executor settings are not included, because they do not affect the bytes. Sources
        are sorted, except with partition="as-given", where their order matters.
        """
        sources = list(map(str, self.sources))
        values = {name: getattr(self, name) for name, option in options_of(self).items() if option.shapes_stream}
        return {
            "sources": sources if self.partition == "as-given" else sorted(sources),
            # The order of values of an option that can be given several times does not matter.
            **{name: sorted(value) if isinstance(value, tuple) else value for name, value in values.items()},
        }

    def recorded(self, num_mega_batches: int, valid_words: int, passage_words: int) -> dict:
        """Return the settings that stream.json records: the result of `identity()`, with three values replaced.

        The arguments are the values with which the stream was made. They replace the values in `identity()`, which are
        None for settings that the user did not give.
        """
        return self.identity() | {
            "num_mega_batches": num_mega_batches,
            "valid_words": valid_words,
            "passage_words": passage_words,
        }

    def field_options(self) -> dict[str, str]:
        """Return the names of the fields of JSON objects and Parquet files that are read, by option name."""
        return {"text_field": self.text_field, "id_field": self.id_field, "date_field": self.date_field}

    def applies_gopher(self, kind: str) -> bool:
        """Return True if documents from sources of this kind are filtered with the Gopher rules for text quality."""
        return self.gopher == "all" or (self.gopher == "crawls" and kind == "common-crawl")

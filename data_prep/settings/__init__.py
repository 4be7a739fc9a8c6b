"""The settings of alma-prep, each declared together with its command-line option.

Creating a PrepSettings object checks the values.
"""

import hashlib
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.cleaning.cleaner import Cleaning, known_languages
from data_prep.cleaning.filters import filter_sha256, parse_filters
from data_prep.settings.cluster import WHERE_IT_RUNS, Cluster
from data_prep.settings.options import options_of, with_option
from data_prep.sources import Source, fingerprint, list_files
from data_prep.sources.dates import check_period
from data_prep.tokenization.given import check_tokenizer
from data_prep.tokenization.tokenizers import TOKENIZERS
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_description import STREAM_FILE

SLURM_JOBS = 64
"""Number of Slurm jobs that run at the same time by default. It does not depend on the number of cores of the login
node, because no task runs there. Most clusters give one user as many cores; more must be asked for."""
STALL_SECONDS = {"local": 40.0, "slurm": 300.0}
"""Seconds without progress after which a worker counts as hung, for each executor. Nodes of a cluster see each other's
files through a network file system, which may show a change only after a minute (NFS's attribute cache)."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    This can be fewer than the machine has: a process can be limited to some cores (its CPU affinity, see the command
    taskset). Inside a Slurm job, the job's allocation counts too, because not every cluster enforces it by affinity.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    if "SLURM_JOB_ID" in os.environ:
        for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
            value = os.environ.get(name, "")
            if value.isdigit() and int(value) > 0:
                return min(cores, int(value))
    return cores


def default_workers(executor: str) -> int:
    """Return the default of --workers for this executor, "local" or "slurm"."""
    return SLURM_JOBS if executor == "slurm" else usable_cores()


_SOURCES = "sources"
_CLEANING = "cleaning"
_MEGA_BATCHES = "mega-batches"
_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class PrepSettings:
    """All settings of a run of alma-prep. Creating an object with an invalid value raises SettingError."""

    out: Path
    """The stream folder to write or, if `extend` is True, to extend."""
    sources: tuple[Source, ...]
    """Where to read text from. The order of sources matters only with `partition="as-given"`."""
    num_mega_batches: int | None = with_option(
        None, "--mega-batches", _MEGA_BATCHES, metavar="B", minimum=1, always_in_command=True,
        help="number of mega-batches of the stream; the test set has the same size as a mega-batch. With --extend: "
        "number of mega-batches to add; default: 1. With --partition by-date or as-given, the default is one per "
        "snapshot",
    )  # fmt: skip
    vocab_size: int = with_option(
        50_000, "--vocab-size", _TOKENIZER, metavar="V", always_in_command=True, fixed_by_stream=True,
        help="number of symbols of a tokenizer that is trained here, without fairseq's four special symbols; "
        "default: %(default)s",
    )  # fmt: skip
    seed: int = with_option(
        0, "--seed", _MEGA_BATCHES, metavar="S", minimum=0, always_in_command=True, fixed_by_stream=True,
        help="seed for shuffling the passages; default: %(default)s",
    )  # fmt: skip
    tokenizer: str = with_option(
        "byte-bpe", "--tokenizer", _TOKENIZER, metavar="NAME|PATH", fixed_by_stream=True,
        help="byte-bpe (GPT-2 style, lossless, as in the paper; default) or sentencepiece (BPE with byte fallback), "
        "which are trained on mega-batches 1..B; or the path of an existing tokenizer: a tokenizer.json, a .model, or "
        "GPT-2's vocab.bpe with encoder.json in the same folder",
    )  # fmt: skip
    tokenizer_words: int = with_option(
        200_000_000, "--tokenizer-words", _TOKENIZER, metavar="N", minimum=1000, fixed_by_stream=True,
        help="maximum number of words used to train the tokenizer; from a larger training text, a random sample of "
        "passages is used; default: 200 million (for sentencepiece at most 50 million, because its trainer keeps the "
        "text in memory)",
    )  # fmt: skip
    valid_words: int | None = with_option(
        None, "--valid-words", _MEGA_BATCHES, metavar="N", minimum=1, fixed_by_stream=True,
        help="number of words in the validation set; default: min(500000, 1%% of all words), with --causal 5%% of the "
        "first period",
    )  # fmt: skip
    valid_source: str | None = with_option(
        None, "--valid-source", _MEGA_BATCHES, metavar="KIND", fixed_by_stream=True,
        help="take the validation set only from sources of this kind, such as books; default: all kinds",
    )  # fmt: skip
    passage_words: int | None = with_option(
        None, "--passage-words", _MEGA_BATCHES, metavar="N", minimum=1,
        help="length of a passage in words. Documents longer than 1%% of a mega-batch (or than half of the validation "
        "or test set, unless the partition is chronological) are cut at paragraph ends into passages of about this "
        "length; default: min(2000, 0.2%% of a mega-batch)",
    )  # fmt: skip
    partition: str = with_option(
        "equal", "--partition", _MEGA_BATCHES, choices=("equal", "chronological", "by-date", "as-given"),
        help="equal: all mega-batches have the same number of words and the same mix of sources (default). For streams "
        "that drift: chronological sorts documents by date, and cuts the order into periods with equal numbers of "
        "words, each with held-out text of its own; by-date makes one mega-batch per snapshot, which "
        "is named by a date in the path (such as CC-MAIN-2019-13 or 20190325); as-given makes one mega-batch per "
        "--source, in the given order",
    )  # fmt: skip
    test_words: int | None = with_option(
        None, "--test-words", _MEGA_BATCHES, metavar="N", minimum=1, fixed_by_stream=True,
        help="number of words in the test set; default: as many as in a mega-batch, with --causal 10%% of the "
        "first period",
    )  # fmt: skip
    period: str | None = with_option(
        None, "--period", _MEGA_BATCHES, metavar="year|month|DATE,DATE,...", inherited=True,
        help="with --partition chronological: the limits of the periods, instead of --mega-batches. year, month: one "
        "mega-batch per calendar year or month that has text; dates such as 1900,1950-06: the periods begin at these "
        "dates, the first one before them. --extend takes year or month from the stream",
    )  # fmt: skip
    causal: bool = with_option(
        False, "--causal", _MEGA_BATCHES, fixed_by_stream=True,
        help="with --partition chronological and --period: nothing depends on later text. The tokenizer, the "
        "validation set and the test set are those of the first period, and copies are compared with earlier text only",
    )  # fmt: skip
    undated: str = with_option(
        "error", "--undated", _MEGA_BATCHES, choices=("error", "drop"), shapes_stream=False,
        help="with --partition chronological: what to do if documents have no date, or one later than tomorrow (UTC). "
        "error: stop after reading; drop: leave them out; default: %(default)s",
    )  # fmt: skip
    late: str = with_option(
        "error", "--late", _MEGA_BATCHES, choices=("error", "drop", "as-new"),
        help="with --extend, in a chronological stream: what to do with documents that are earlier than the last one "
        "of the stream. error: stop after reading; drop: leave them out; as-new: they count as text of the new period; "
        "default: %(default)s. Such documents are named",
    )  # fmt: skip
    language: str = with_option(
        "", "--language", _CLEANING, reads=True, metavar="CODE",
        help="keep only documents in this language, such as en; default: keep all languages",
    )  # fmt: skip
    gopher: str = with_option(
        "crawls", "--gopher", _CLEANING, reads=True, choices=("crawls", "all", "off"),
        help="sources to filter with the Gopher rules for quality and repetition; default: crawls, which means "
        "common-crawl sources only",
    )  # fmt: skip
    filters: str = with_option(
        "", "--filter", _CLEANING, reads=True, metavar="MODULE:FUNCTION,...",
        help="your own filters: functions in Python modules in the current folder. A function receives a document "
        "(text, id, date), and returns True to keep it, False or (False, reason) to remove it, or a new text",
    )  # fmt: skip
    duplicates: str = with_option(
        "near", "--duplicates", _CLEANING, reads=True, choices=("near", "exact", "keep"),
        help="which copies to remove across all sources. near: near and exact copies (default); exact: exact copies; "
        "keep: none",
    )  # fmt: skip
    decontaminate: int | None = with_option(
        None, "--decontaminate", _CLEANING, metavar="N", minimum=5, inherited=True,
        help="remove training passages that have N words in a row in common with the validation set, the test set, or "
        "the files given by --decontaminate-against; 13 is usual; default, or 0: only report overlaps of 13 words",
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = with_option(
        (), "--decontaminate-against", _CLEANING, metavar="PATH", inherited=True,
        help="benchmark text that --decontaminate looks for: a text file (one document per line), JSON lines, or a "
        "folder of such files; can be given several times",
    )  # fmt: skip
    text_field: str = with_option(
        "text", "--text-field", _SOURCES, reads=True, metavar="NAME",
        help="name of the field (JSON lines) or column (Parquet, Arrow) that contains the text; default: %(default)s",
    )  # fmt: skip
    id_field: str = with_option(
        "", "--id-field", _SOURCES, reads=True, metavar="NAME",
        help="name of the field or column that names a document; default: id, or else url",
    )  # fmt: skip
    date_field: str = with_option(
        "date", "--date-field", _SOURCES, reads=True, metavar="NAME",
        help="name of the field or column with the date of a document, which must not be later than tomorrow (UTC); "
        "default: %(default)s",
    )  # fmt: skip
    max_bad: float = with_option(
        0.01, "--max-bad", _SOURCES, metavar="FRACTION", shapes_stream=False,
        help="maximum fraction of damaged input files. If more are damaged, the run fails after it has read all files; "
        "default: %(default)s",
    )  # fmt: skip
    extend: bool = with_option(
        False, "--extend", "options", shapes_stream=False, in_command=False,
        help="add --mega-batches mega-batches (default: 1) to the stream in OUT. They are encoded with the stream's "
        "tokenizer. Existing split files do not change, and copies of documents in the stream are left out. If the "
        "options --language, --gopher, --duplicates, --decontaminate and those that name fields are not given, they "
        "have the values with which the stream was first made, also if it was extended with other values since then",
    )  # fmt: skip
    workers: int = with_option(
        None, "--workers", WHERE_IT_RUNS, metavar="N", minimum=1, shapes_stream=False, in_command=False,
        help="number of worker processes (default: the CPU cores that this process may use: its CPU affinity, and "
        "inside a Slurm job the cores of the job). With --executor slurm: number of jobs that run at the same time, "
        "each on one core (default: 64, whatever the number of cores of this machine; further jobs wait in the queue)",
    )  # fmt: skip
    """Never None: without the option, `__post_init__` sets the default."""
    cache: str | None = with_option(
        None, "--cache", WHERE_IT_RUNS, metavar="FOLDER", shapes_stream=False, in_command=False,
        help="folder in which the text that was read, cleaned and compared, and its tokens, are kept for other streams "
        "from the same files, for example with another seed, vocabulary, number of mega-batches or shares. The tokens "
        "serve streams with the same tokenizer. Several processes can use it at the same time",
    )  # fmt: skip
    executor: str = with_option(
        "local", "--executor", WHERE_IT_RUNS, choices=("local", "slurm"), shapes_stream=False, in_command=False,
        help="where tasks run: in processes on this machine, or as jobs on a Slurm cluster; default: %(default)s",
    )  # fmt: skip
    cluster: Cluster = field(default_factory=Cluster)
    given: tuple[str, ...] = ()
    """Names of settings that the user has given. Settings whose values are not the defaults count as given, too."""

    def __post_init__(self):
        # These defaults depend on the machine and on another setting. The class is frozen, hence `object.__setattr__`.
        if self.workers is None:
            object.__setattr__(self, "workers", default_workers(self.executor))
        if self.decontaminate == 0:  # so that an extension can do without, although its stream has a value
            object.__setattr__(self, "decontaminate", None)
            object.__setattr__(self, "given", (*self.given, "decontaminate"))
        self._check_values()
        self._check_partition()

    def _check_values(self) -> None:
        if not self.sources:
            raise SettingError("no source given: add --source KIND:PATH")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise SettingError(f"source {name} is given more than once")
        for name, option in options_of(self).items():
            value, minimum = getattr(self, name), option.minimum
            if option.choices and value not in option.choices:
                raise SettingError(f"{option.flag} {value} is unknown: use one of {', '.join(option.choices)}")
            if name == "vocab_size" and self.tokenizer in TOKENIZERS:
                minimum = TOKENIZERS[self.tokenizer].smallest_vocab_size
            if minimum is not None and value is not None:
                if isinstance(value, str):
                    raise SettingError(f"{option.flag} {value!r} is a text: give a number")
                if value < minimum:
                    raise SettingError(f"{option.flag} {value} is too small: it must be at least {minimum}")
        if not 0 <= self.max_bad <= 1:
            raise SettingError(f"--max-bad {self.max_bad} is not a fraction: it must be between 0 and 1")
        if self.language and self.language not in known_languages():
            raise SettingError(f"--language {self.language} is unknown: give a code such as en, de, bg (ISO 639-1)")
        kinds = {source.kind for source in self.sources}
        if self.valid_source is not None and self.valid_source not in kinds:
            known = ", ".join(sorted(kinds))
            raise SettingError(
                f"--valid-source {self.valid_source}: no source of this kind is given. Use one of {known}"
            )
        if self.decontaminate_against and self.decontaminate is None:
            raise SettingError("--decontaminate-against needs the number of words: give --decontaminate 13")
        parse_filters(self.filters)
        check_tokenizer(self.tokenizer)

    def _check_partition(self) -> None:
        options, is_chronological = options_of(self), self.partition == "chronological"
        if self.extend:
            for name, option in options.items():
                if option.fixed_by_stream and getattr(self, name) != option.default:
                    raise SettingError(f"an extension uses the {name} of the existing stream: omit {option.flag}")
            if self.partition != "equal":
                raise SettingError(
                    f"--extend does not support --partition {self.partition}, because new mega-batches have equal "
                    "numbers of words: run alma-prep --extend once for each snapshot, oldest first"
                )
        elif self.causal and self.period is None:
            raise SettingError("--causal needs limits of periods that do not depend on later text: add --period")
        elif self.num_mega_batches is None and self.period is None and (self.partition == "equal" or is_chronological):
            if (self.out / STREAM_FILE).is_file():
                raise SettingError(f"{self.out} contains a finished stream: give --extend to add mega-batches to it")
            flag = "--period or --mega-batches" if is_chronological else "--mega-batches"
            raise SettingError(f"the number of mega-batches is missing: give {flag}")
        if self.period is not None:
            check_period(self.period)
            if self.num_mega_batches is not None:
                raise SettingError("--period determines the number of mega-batches: omit --mega-batches")
        if self.causal and self.duplicates == "keep":
            raise SettingError("--causal holds out whole documents of later periods, too: omit --duplicates keep")
        if self.late != "error" and not self.extend:
            raise SettingError("--late says what an extension does with earlier documents: add --extend")
        for name in ("undated", "period", "causal"):
            if getattr(self, name) != options[name].default and not (is_chronological or self.extend):
                raise SettingError(f"{options[name].flag} needs a chronological stream: add --partition chronological")

    def command(self) -> str:
        """Return the command line that makes the same stream again, or that adds the same mega-batches again."""
        words = ["alma-prep", *(["--extend"] if self.extend else []), str(self.out)]
        for source in self.sources:
            words += ["--source", str(source)]
        for name, option in options_of(self).items():
            value = getattr(self, name)
            # An extension takes some values from the stream, so a given default must be named.
            is_named = option.in_command and (value != option.default or (self.extend and name in self.given))
            if isinstance(value, tuple):
                words += [word for each in value for word in (option.flag, each)]
            elif value is not None and (is_named or (option.always_in_command and not self.extend)):
                words.append(option.flag)
                if not isinstance(value, bool):
                    words.append(f"{value:g}" if isinstance(value, float) else str(value))
        return shlex.join(words)

    def is_given(self, name: str) -> bool:
        """Return True if the user has given this setting, or its value is not the default."""
        return name in self.given or getattr(self, name) != options_of(self)[name].default

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

    def reading_settings(self) -> list[str]:
        """Return the names of the settings in `identity()` on which it depends which documents are read."""
        return ["sources", *(name for name, option in options_of(self).items() if option.reads)]

    def field_options(self) -> dict[str, str]:
        """Return the names of the fields of JSON objects and Parquet files that are read, by option name."""
        return {"text_field": self.text_field, "id_field": self.id_field, "date_field": self.date_field}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 digests of the user's filters, and one of the states of the files of benchmarks.

        Raises:
            PrepError: if the module of a filter is missing.
        """
        found = {f"sha256 of {name}": filter_sha256(name) for name in parse_filters(self.filters)}
        if states := [fingerprint(list_files(Source("text", path))) for path in sorted(self.decontaminate_against)]:
            found["sha256 of decontaminate_against"] = hashlib.sha256("".join(states).encode()).hexdigest()
        return found

    def uses_gopher(self, kind: str) -> bool:
        """Return True if the Gopher rules apply to sources of this kind."""
        return self.gopher == "all" or (self.gopher == "crawls" and kind == "common-crawl")

    def cleaning(self, kind: str) -> Cleaning | None:
        """Return the cleaning of documents from sources of this kind; None: all documents are kept as they are."""
        cleaning = Cleaning(
            language=self.language,
            gopher=self.uses_gopher(kind),
            filters=tuple((name, filter_sha256(name)) for name in parse_filters(self.filters)),
        )
        return cleaning if any(cleaning) else None

"""Make dict.txt and the tokenizer file of a stream: copy the user's tokenizer, or train one on the mega-batches."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dividing.layout import key_halves
from data_prep.reading.index import Index, Texts, byte_ranges
from data_prep.reading.spool import read_text
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Step, Task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.tokenization.given import given_tokenizer
from data_prep.tokenization.tokenizers import (
    TOKENIZERS,
    ByteBPE,
    dictionary_names,
    dictionary_text,
    load_tokenizer,
)
from data_prep.tokenization.word_counts import MAX_TRAINING_WORD_BYTES, added_tables, count_words, write_table

TASK_BYTES = 16 << 20
"""Approximate number of bytes of text in which one task counts words."""
MAX_TABLES = 100
"""Approximate maximum number of tasks that count words. The task that trains the tokenizer opens a file of
each. Some systems allow a process only 256 open files."""


def make_tokenizer(settings: PrepSettings, index: Index, work: WorkFolder) -> Path:
    """Write the tokenizer file into the work folder: copy the user's tokenizer, or train one on all mega-batches.

    In a causal stream, it is trained on the first mega-batch. Return the path of the file.
    """
    if settings.tokenizer not in TOKENIZERS:
        name, content = given_tokenizer(settings.tokenizer)
        return _write(work.stream / name, content)
    tokenizer = TOKENIZERS[settings.tokenizer]
    # The passages from `start` to `end` are those of all mega-batches, without the validation set and the test set.
    start, end = index.training(only_first=settings.causal)
    num_words = int(index.passages["num_words"][start:end].sum(dtype=np.int64))
    most = min(settings.tokenizer_words, tokenizer.max_training_words or settings.tokenizer_words)
    # Train only on a share of the passages, so that the training text has about `most` words.
    num_trained = min(num_words, most)
    keys = _sampling_keys(index.passages[start:end])
    count = -(-len(keys) * num_trained // num_words)
    max_key = int(np.partition(keys, count - 1)[count - 1])
    task: Task = TrainTokenizerTask(settings.tokenizer, settings.vocab_size, index.texts(start, end), max_key)
    if tokenizer is ByteBPE:
        chosen = start + np.flatnonzero(keys <= np.uint64(max_key))
        counting = _count_words(index, index.passages["num_bytes"], chosen, max_key, work)
        prefixes = [str(counting.prefix(number)) for number in range(len(counting.tasks))]
        digests = [counting.file(number, "words")[1]["sha256"] for number in range(len(counting.tasks))]
        task = TrainOnCountsTask(settings.vocab_size, prefixes, hashlib.sha256("".join(digests).encode()).hexdigest())
    title, threads = f"train {settings.tokenizer}", settings.workers
    step = work.run("tokenizer", [task], title, "words", [num_trained], threads=threads)
    return _write(work.stream / tokenizer.file_name, Path(f"{step.prefix(0)}.tokenizer").read_bytes())


def _sampling_keys(passages: np.ndarray) -> np.ndarray:
    """Return a pseudo-random number for each passage, uint64. The training text has the passages with the smallest.

    Every n-th passage of the stream would not do: the sources alternate in the stream, so it could be always the same.
    """
    return key_halves(passages["key"], "tokenizer")[:, 0]


def _to_train_on(texts: Texts, max_key: int) -> np.ndarray:
    """Return the index entries of the passages to train on among some passages, see `_sampling_keys`."""
    passages = texts.entries()
    return passages[_sampling_keys(passages) <= np.uint64(max_key)]


def _count_words(index: Index, num_bytes: np.ndarray, chosen: np.ndarray, max_key: int, work: WorkFolder) -> Step:
    """Count the words of the passages to train on, and return the finished step. Its tasks are `CountWordsTask`."""
    sizes = num_bytes[chosen]
    # Long passages can make ranges that have only half as many bytes. So plan with half as many tables.
    most = max(TASK_BYTES, -(-2 * int(sizes.sum(dtype=np.int64)) // MAX_TABLES))
    ranges = list(byte_ranges(sizes, 0, len(sizes), most))
    bounds = [(int(chosen[first]), int(chosen[last - 1]) + 1) for first, last in ranges]
    tasks = [CountWordsTask(index.texts(*bound), max_key) for bound in bounds]
    step = work.run("count_words", tasks, "count words", "passages", [last - first for first, last in ranges])
    results = step.results()
    if num_divided := sum(result["divided"] for result in results):
        note(
            f"words of the training text with more than {MAX_TRAINING_WORD_BYTES:,} bytes: {num_divided:,}, the "
            f"longest with {max(result['longest'] for result in results):,}. The tokenizer is trained on pieces of them"
        )
    return step


@dataclass(frozen=True)
class CountWordsTask(Task):
    """Task that counts the words (see `word_counts`) of the passages to train on among some passages.

    It writes a table of words and counts to PREFIX.words. Its result is how many long words were divided into pieces,
    and the length of the longest.
    """

    texts: Texts
    max_key: int
    """The largest sampling key of the passages to train on, see `_sampling_keys`."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        passages = _to_train_on(self.texts, self.max_key)
        with heartbeat.computing():
            counts = count_words(_texts(Path(self.texts.spool), passages, "word counting", heartbeat))
            write_table(counts, Path(f"{prefix}.words"))
        return {"divided": counts.num_divided, "longest": counts.longest}


@dataclass(frozen=True)
class TrainOnCountsTask(Task):
    """Task that trains a byte-level BPE tokenizer on the tables of all tasks `CountWordsTask`.

    It writes the content of the tokenizer file to PREFIX.tokenizer. Its memory does not grow with the text, only with
    the number of different words: the trainer needs about 1 KB for each. The setting `tokenizer_words` limits this
    number, because it limits the text.
    """

    vocab_size: int
    prefixes: list[str]
    """The path prefixes of the tasks that counted words."""
    tables_sha256: str
    """SHA-256 digest of the digests of all tables. If a table has changed, the task has changed, and is done again."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        with heartbeat.computing():
            content = ByteBPE.train_on_counts(self._counts(heartbeat), self.vocab_size)
        Path(f"{prefix}.tokenizer").write_bytes(content)
        return {}

    def _counts(self, heartbeat: Heartbeat) -> Iterator[tuple[str, int]]:
        for counted in added_tables([Path(f"{prefix}.words") for prefix in self.prefixes]):
            heartbeat.beat("tokenizer training")
            yield counted


@dataclass(frozen=True)
class TrainTokenizerTask(Task):
    """Task that trains a tokenizer on the passages to train on among some passages.

    It writes the content of the tokenizer file to PREFIX.tokenizer.
    """

    kind: str
    """Name of the tokenizer to train, a key of `tokenizers.TOKENIZERS`."""
    vocab_size: int
    texts: Texts
    max_key: int
    """The largest sampling key of the passages to train on, see `_sampling_keys`."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        with heartbeat.computing():
            passages = _to_train_on(self.texts, self.max_key)
            texts = _texts(Path(self.texts.spool), passages, "tokenizer training", heartbeat)
            content = TOKENIZERS[self.kind].train(texts, self.vocab_size)
        Path(f"{prefix}.tokenizer").write_bytes(content)
        return {}


def _texts(spool: Path, passages: np.ndarray, place: str, heartbeat: Heartbeat) -> Iterator[str]:
    """Yield the texts of passages. `place` is what the heartbeat file says about the task."""
    for passage in passages:
        heartbeat.beat(place)
        yield read_text(spool, passage)


def check_vocabulary(settings: PrepSettings, tokenizer_file: Path) -> list[str]:
    """Return the tokenizer's symbols. Print a warning if a trained tokenizer has fewer than `vocab_size` symbols."""
    symbols = load_tokenizer(tokenizer_file).symbols()
    if settings.tokenizer in TOKENIZERS and len(symbols) < settings.vocab_size:
        note(
            f"warning: the tokenizer has only {len(symbols)} symbols instead of {settings.vocab_size}, because the "
            f"training text is too small. stream.json records vocab_size {len(symbols)}"
        )
    return symbols


def write_dictionary(symbols: list[str], work: WorkFolder) -> Path:
    """Write dict.txt, fairseq's list of the tokenizer's symbols, into the work folder, and return its path."""
    return _write(work.stream / "dict.txt", dictionary_text(dictionary_names(symbols)).encode("utf-8"))


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path

"""Make dict.txt and the tokenizer file of a stream: copy the user's tokenizer, or train one on the mega-batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.reading.index import Index, read_index
from data_prep.reading.spool import read_text
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar, note
from data_prep.running.tasks import Executor, Step, Task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.tokenization.dictionary import NUM_SPECIAL, dictionary_names, dictionary_size, dictionary_text
from data_prep.tokenization.tokenizers import TOKENIZERS, given_tokenizer, load_tokenizer


def make_tokenizer(settings: PrepSettings, index: Index, work: WorkFolder, executor: Executor) -> Path:
    """Write the tokenizer file into the work folder: copy the user's tokenizer, or train one on all mega-batches.

    Args:
        settings: the settings of this call of alma-prep.
        index: the passages in their final order, and the splits.
        work: the work folder.
        executor: runs the training task, on this machine or on a Slurm cluster.

    Returns:
        The path of the tokenizer file.
    """
    if settings.tokenizer not in TOKENIZERS:
        name, content = given_tokenizer(settings.tokenizer)
        return _write(work.stream / name, content)
    tokenizer = TOKENIZERS[settings.tokenizer]
    # The passages from `start` to `end` are those of all mega-batches, without the validation set and the test set.
    start, end = index.training()
    num_words = int(index.passages["num_words"][start:end].sum(dtype=np.int64))
    most = min(settings.tokenizer_words, tokenizer.max_training_words or settings.tokenizer_words)
    # Train only on every `stride`-th passage, so that the training text has about `most` words or fewer.
    stride = max(1, math.ceil(num_words / most))
    task = TrainTokenizerTask(
        settings.tokenizer, settings.vocab_size, str(index.spool), str(index.path), index.sha256, start, end, stride
    )
    step = Step(work.folder / "tokenizer", [task])
    with Bar(f"train {settings.tokenizer}", num_words // stride, "words") as bar:
        step.run(executor, lambda number: bar.advance(num_words // stride), threads=settings.workers)
    return _write(work.stream / tokenizer.file_name, Path(f"{step.prefix(0)}.tokenizer").read_bytes())


@dataclass(frozen=True)
class TrainTokenizerTask(Task):
    """Task that trains a tokenizer on every `stride`-th passage from `start` (included) to `end` (excluded).

    `start` and `end` are positions in the index file, which lists all passages. The task writes the content of the
    tokenizer file to PREFIX.tokenizer, where PREFIX is the argument `prefix` of `run`.
    """

    kind: str
    """Name of the tokenizer to train, a key of `tokenizers.TOKENIZERS`."""
    vocab_size: int
    spool: str
    """Path of the spool folder, which contains the text of the passages."""
    index: str
    """Path of the index file, which lists all passages."""
    index_sha256: str
    """SHA-256 digest of the index file. If the file has changed, the task has changed, and is done again."""
    start: int
    end: int
    stride: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        with heartbeat.computing():
            content = TOKENIZERS[self.kind].train(self._texts(heartbeat), self.vocab_size)
        Path(f"{prefix}.tokenizer").write_bytes(content)
        return {}

    def _texts(self, heartbeat: Heartbeat) -> Iterator[str]:
        passages, spool = read_index(Path(self.index)), Path(self.spool)
        for number in range(self.start, self.end, self.stride):
            heartbeat.beat("tokenizer training")
            yield read_text(spool, passages[number])


def check_vocabulary(settings: PrepSettings, tokenizer_file: Path) -> list[str]:
    """Return the tokenizer's symbols. Print a warning if a trained tokenizer has fewer than `vocab_size` symbols."""
    symbols = load_tokenizer(tokenizer_file).symbols()
    if settings.tokenizer in TOKENIZERS and len(symbols) < settings.vocab_size:
        note(
            f"warning: the tokenizer has only {len(symbols)} symbols instead of {settings.vocab_size}, because the "
            f"training text is too small. stream.json records vocab_size {len(symbols)}"
        )
    return symbols


def write_dictionary(symbols: list[str], counts: np.ndarray, work: WorkFolder) -> Path:
    """Write dict.txt, fairseq's list of symbols with counts, and return its path.

    Args:
        symbols: the tokenizer's symbols.
        counts: int [dictionary size], number of occurrences of each fairseq id in the training text.
        work: the work folder. dict.txt is written into its subfolder `stream`.
    """
    assert len(counts) == dictionary_size(len(symbols))
    content = dictionary_text(dictionary_names(symbols), counts[NUM_SPECIAL:].tolist())
    return _write(work.stream / "dict.txt", content.encode("utf-8"))


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path

"""Encode passages as tokens, in the final order of the passages, and write fairseq's dataset files.

The passages of a split are divided among several tasks, which write tokens to temporary files. Another task joins the
tokens of a split into the files of the split (see `join`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.encoding.join import join_step, join_tokens, remove_outdated, tasks_to_join
from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, best_dtype, sequence_sizes
from data_prep.reading.index import Index, byte_ranges, is_training, read_index
from data_prep.reading.spool import READ_BYTES, read_texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar, note
from data_prep.running.tasks import Step, Task
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.dictionary import EOS, NUM_SPECIAL
from data_prep.tokenization.losses import added_losses, losses, losses_text
from data_prep.tokenization.tokenizers import cached_tokenizer
from fairseq_alma.core.files import sha256_of

TASK_BYTES = 16 << 20
"""Approximate number of bytes of text that one task processes. A task encodes passages, or cuts documents into
passages. For a large corpus, a task that encodes processes more (see _MAX_TASKS)."""
_MAX_TASKS = 4000
"""Approximate largest number of tasks that encode, in addition to one for each split."""
_BATCH_BYTES = 1 << 20
"""Approximate number of bytes of text that a task encodes at a time."""


class Encoded(NamedTuple):
    """The result of `encode`: what stream.json records about the splits, and token counts."""

    splits: dict[str, dict]
    """For each split, its entry in stream.json."""
    counts: np.ndarray
    """int [dictionary size]: number of occurrences of each fairseq id in the encoded mega-batches. The validation
    set and the test set are not counted."""
    num_sequences: np.ndarray
    """int [n, 2]: (passage, number of sequences) of each passage that is stored as several sequences."""


def encode(index: Index, tokenizer_file: Path, num_symbols: int, work: WorkFolder) -> Encoded:
    """Encode all passages and write the fairseq dataset of every split into the work folder.

    Args:
        index: the passages in their final order, and the splits.
        tokenizer_file: the tokenizer file of the stream.
        num_symbols: the size of the fairseq dictionary.
        work: the work folder.
    """
    dtype, passages = best_dtype(num_symbols), index.passages
    num_bytes = int(passages["num_bytes"].sum(dtype=np.int64))
    task_bytes = max(TASK_BYTES, num_bytes // _MAX_TASKS)
    tokenizer_sha256 = sha256_of(tokenizer_file)
    tasks: list[EncodeTask] = []
    weights: list[int] = []
    tasks_of_split: dict[str, range] = {}
    for name, (start, end) in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        ranges = list(byte_ranges(passages["num_bytes"], start, end, task_bytes))
        tasks_of_split[name] = range(len(tasks), len(tasks) + len(ranges))
        for first, last in ranges:
            where = (str(index.spool), str(index.path), index.sha256, first, last)
            tasks.append(EncodeTask(str(tokenizer_file), tokenizer_sha256, *where, dtype, num_symbols))
            weights.append(int(passages["num_bytes"][first:last].sum(dtype=np.int64)))
    assert work.executor is not None
    step = Step(work.folder / "encode", tasks)
    join = join_step(step, tasks_of_split, index, dtype, num_symbols, work.folder / "join")
    joined = join.finished()
    remove_outdated(join, joined)
    # The tokens of a split were removed when they were joined, so they are not encoded again.
    numbers = tasks_to_join(join, joined)
    with Bar("encode", sum(weights[number] for number in numbers), "bytes") as bar:
        step.run(work.executor, lambda number: bar.advance(weights[number]), numbers=numbers)
    splits, long = join_tokens(step, join, joined, index, work)
    if warning := losses_text({name: splits[name] for name in index.splits}):
        note(warning)
    counts = np.zeros(num_symbols, dtype=np.int64)
    for number, name in enumerate(index.splits):
        if is_training(name):
            counts += np.fromfile(f"{join.prefix(number)}.counts", np.int64)
    return Encoded(splits, counts, np.array(long, np.int64).reshape(-1, 2))


@dataclass(frozen=True)
class EncodeTask(Task):
    """Task that encodes the passages from `start` (included) to `end` (excluded) of the index file.

    The task contains the digests of the tokenizer file and the index file. So if one of these files has changed, the
    task has changed too, and is done again.

    The task writes three files. PREFIX is the argument `prefix` of `run`.
        PREFIX.tokens: the fairseq ids of all passages, with </s> after each passage.
        PREFIX.sizes: int32, the number of tokens of each stored sequence. A sequence is a passage, or a piece of a very
            long passage (see `sequence_sizes`).
        PREFIX.counts: int64 [num_symbols], the number of occurrences of each fairseq id.

    The result of the task contains [passage, number of sequences] for each passage that is stored as several sequences,
    and what the tokens lose of the text (see `losses`).
    """

    tokenizer_file: str
    tokenizer_sha256: str
    spool: str
    index: str
    index_sha256: str
    start: int
    end: int
    dtype: str
    num_symbols: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        counts = np.zeros(self.num_symbols, np.int64)
        long: list[list[int]] = []
        lost: dict = {}
        with open(f"{prefix}.tokens", "wb") as tokens_file, open(f"{prefix}.sizes", "wb") as sizes_file:
            for first, encoded, lost_here in self._batches(heartbeat):
                lost = added_losses([lost, lost_here])
                # Add 1 to each length, because </s> is stored after each passage.
                passage_tokens = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
                tokens = np.full(passage_tokens.sum(), EOS, dtype=self.dtype)
                position = 0
                for ids in encoded:
                    tokens[position : position + len(ids)] = ids
                    position += len(ids) + 1
                tokens_file.write(tokens.data)
                sizes_file.write(sequence_sizes(passage_tokens).astype(np.int32).data)
                for which in np.flatnonzero(passage_tokens > MAX_SEQUENCE_TOKENS).tolist():
                    long.append([first + which, len(sequence_sizes(passage_tokens[which : which + 1]))])
                counts += np.bincount(tokens, minlength=self.num_symbols)
        counts.tofile(f"{prefix}.counts")
        return {"long": long, "lost": lost}

    def _batches(self, heartbeat: Heartbeat) -> Iterator[tuple[int, list[np.ndarray], dict]]:
        """Yield the first index, the fairseq ids and the losses of batches of about _BATCH_BYTES bytes of passages."""
        tokenizer = cached_tokenizer(self.tokenizer_file, self.tokenizer_sha256)
        passages, spool = read_index(Path(self.index)), Path(self.spool)

        def beat() -> None:  # a read can take long on a shared file system, so show progress for each passage
            heartbeat.beat("text encoding")

        for start, end in byte_ranges(passages["num_bytes"], self.start, self.end, READ_BYTES):
            texts = read_texts(spool, passages[start:end], beat)
            for first, last in byte_ranges(passages["num_bytes"], start, end, _BATCH_BYTES):
                batch = texts[first - start : last - start]
                beat()
                with heartbeat.computing():  # a passage without white space can have 16 MB
                    ids = tokenizer.encode(batch)
                    lost = losses(tokenizer, batch, ids)
                yield first, [each + NUM_SPECIAL for each in ids], lost
            del texts  # before the next texts are read

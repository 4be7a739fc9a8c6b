"""Encode passages as tokens, in the final order of the passages, and write fairseq's dataset files.

The passages of a split are divided among several tasks, which write tokens to temporary files. Another task joins the
tokens of a split into the files of the split (see `JoinTask`).
"""

import collections
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.encoding.documents import write_documents
from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, MMapWriter, best_dtype, sequence_sizes
from data_prep.encoding.stored_tokens import BATCH_BYTES, store_tokens, stored_tokens
from data_prep.reading.facts import facts_digest
from data_prep.reading.index import Index, Texts, TextsTask, byte_ranges, is_training
from data_prep.reading.spool import READ_BYTES, read_texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar, note
from data_prep.running.tasks import Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.losses import added_losses, losses, losses_text
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, cached_tokenizer
from fairseq_alma.core.files import remove, sha256_of
from fairseq_alma.core.stream_folder import split_prefix

_ROWS = 1 << 18
"""Number of index entries that are read at a time, 16 MB."""
_ENDINGS = ("tokens", "sizes", "counts")
"""The endings of the files that a task writes when it encodes passages (see `encode.EncodeTask`)."""


def join_step(
    encode: Step, tasks_of_split: Mapping[str, range], index: Index, dtype: str, num_symbols: int,
    sources: Sequence[str], source_of_shard: Sequence[int], folder: Path,
) -> Step:  # fmt: skip
    """Return the step that joins the tokens of each split: first `index.splits`, then `index.unions`.

    Args:
        encode: the step that encodes the passages.
        tasks_of_split: the numbers of the tasks of `encode` for each split.
        index: the passages in their final order, and the splits.
        dtype: the integer type of stored tokens: uint16 or uint32.
        num_symbols: the size of the fairseq dictionary.
        sources: the name of each source.
        source_of_shard: index of the source of each spool file.
        folder: the folder of the step.
    """
    tasks, named = [], (facts_digest(index.spool, len(source_of_shard)), list(sources), list(source_of_shard))
    for members in _members(index).values():
        parts = range(tasks_of_split[members[0]].start, tasks_of_split[members[-1]].stop)
        digest = hashlib.sha256()
        for number in parts:
            digest.update(f"{encode.tasks[number].description()}\n".encode())
        start, end = index.cuts[index.splits.index(members[0])], index.cuts[index.splits.index(members[-1]) + 1]
        place = (str(encode.folder), parts.start, parts.stop, digest.hexdigest())
        tasks.append(JoinTask(*place, index.texts(start, end), dtype, num_symbols, *named))
    return Step(folder, tasks)


def tasks_to_join(join: Step, joined: Mapping[int, dict]) -> list[int]:
    """Return the numbers of the tasks whose tokens must still be joined.

    Args:
        join: the step that joins the tokens.
        joined: the results of those of its tasks that are finished.
    """
    tasks = [task for number, task in enumerate(join.tasks) if number not in joined]
    return sorted({number for task in tasks for number in _parts(task)})


def remove_outdated(join: Step, joined: Mapping[int, dict]) -> None:
    """Remove what an earlier call has joined with other settings, because it only takes disk space.

    Args:
        join: the step that joins the tokens.
        joined: the results of those of its tasks that are finished.
    """
    for path in join.folder.glob("*.bin"):
        if int(path.stem) not in joined:
            path.unlink()


def join_tokens(
    encode: Step, join: Step, joined: Mapping[int, dict], index: Index, work: WorkFolder
) -> dict[str, dict]:
    """Write the files of every split into the work folder, and remove the files that were joined.

    Args:
        encode: the step that encodes the passages. The tasks of all splits that are not joined must be finished.
        join: the step that joins the tokens, see `join_step`.
        joined: the results of those of its tasks that are finished.
        index: the passages in their final order, and the splits.
        work: the work folder.

    Returns:
        For each split, its entry in stream.json.
    """
    # In a chronological stream, the held-out text of a period is part of two splits.
    uses = collections.Counter(number for task in join.tasks for number in _parts(task))

    def remove_parts(number: int) -> None:
        for part in _parts(join.tasks[number]):
            uses[part] -= 1
            if not uses[part]:
                for ending in _ENDINGS:
                    Path(f"{encode.prefix(part)}.{ending}").unlink(missing_ok=True)
        bar.advance(sizes[number])

    assert work.executor is not None
    sizes = [len(_parts(task)) for task in join.tasks]
    with Bar("join tokens", sum(sizes), "parts") as bar:
        results = join.run(work.executor, remove_parts, finished=joined)
    splits = {}
    for number, name in enumerate(_members(index)):
        for ending in ("bin", "idx"):
            work.add_shard(f"{split_prefix(Path(), name)}.{ending}", *join.file(number, ending))
        work.add_shard(f"documents/{name}.parquet", *join.file(number, "parquet"))
        splits[name] = results[number]["split"] | {"sha256": join.file(number, "bin")[1]["sha256"]}
    return splits


@dataclass(frozen=True)
class JoinTask(TextsTask):
    """Task that joins the tokens of a split.

    The task writes these files. PREFIX is the argument `prefix` of `run`.
        PREFIX.bin, PREFIX.idx: the fairseq dataset of the split.
        PREFIX.parquet: the document that each sequence comes from (see `documents`).
        PREFIX.counts: int64 [num_symbols], the number of occurrences of each fairseq id.

    The result of the task is the entry of the split in stream.json ("split"), without its digest.
    """

    parts: str
    """The folder of the step that has encoded the passages."""
    first_part: int
    """Number of the first task of this step that belongs to the split."""
    end_part: int
    """Number after the last task of the split."""
    parts_sha256: str
    """SHA-256 digest of the descriptions of these tasks, on which their files depend. The files themselves are removed
    when this task is done."""
    texts: Texts
    """The passages of the split."""
    dtype: str
    num_symbols: int
    facts_sha256: str
    """Digest of the ids and dates of all documents, see `facts.facts_digest`."""
    sources: list[str]
    """The name of each source."""
    source_of_shard: list[int]
    """Index of the source of each spool file."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        counts = np.zeros(self.num_symbols, np.int64)
        long: list[list[int]] = []
        lost: dict = {}
        num_tokens = num_sequences = 0
        step = Step(Path(self.parts), ())
        with MMapWriter(prefix, self.dtype, heartbeat.beat) as writer:
            for number in _parts(self):
                heartbeat.beat("joining tokens")
                tokens = np.fromfile(f"{step.prefix(number)}.tokens", self.dtype)
                sizes = np.fromfile(f"{step.prefix(number)}.sizes", np.int32)
                writer.write(tokens, sizes)
                num_tokens, num_sequences = num_tokens + len(tokens), num_sequences + len(sizes)
                counts += np.fromfile(f"{step.prefix(number)}.counts", np.int64)
                result = mark_of(step.folder, number)["result"]
                long += result["long"]
                lost = added_losses([lost, result["lost"]])
        counts.tofile(f"{prefix}.counts")
        split = _text_counts(self.texts.entries(), heartbeat)
        split |= {"sequences": num_sequences, "tokens": num_tokens} | ({"lost": lost} if lost else {})
        documents = (self.sources, self.source_of_shard, long)
        write_documents(Path(f"{prefix}.parquet"), self.texts, *documents, heartbeat)
        return {"split": split}


def _members(index: Index) -> dict[str, list[str]]:
    """Return the names of all splits to write, each with the names of the splits in the index of which it consists."""
    return {name: [name] for name in index.splits} | index.unions


def _parts(task: Task) -> range:
    """Return the numbers of the tasks that have encoded the passages of a split."""
    assert isinstance(task, JoinTask)
    return range(task.first_part, task.end_part)


def _text_counts(passages: np.ndarray, heartbeat: Heartbeat) -> dict:
    """Return the number of documents, passages, words and bytes of a split."""
    documents, words, num_bytes = np.empty(len(passages), "V16"), 0, 0
    for start in range(0, len(passages), _ROWS):
        heartbeat.beat("counting words and documents")
        rows = np.array(passages[start : start + _ROWS])
        documents[start : start + _ROWS] = rows["document"]
        words += int(rows["num_words"].sum(dtype=np.int64))
        num_bytes += int(rows["num_bytes"].sum(dtype=np.int64))
    # To count different documents, sort the hashes of their texts, and count how often the next hash is different.
    halves = documents.view(">u8").reshape(-1, 2)
    with heartbeat.computing():  # sorting takes long
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        changes = (halves[order[1:]] != halves[order[:-1]]).any(axis=1)
    num_documents = int(changes.sum()) + 1 if len(passages) else 0
    return {"documents": num_documents, "passages": len(passages), "words": words, "bytes": num_bytes}


TASK_BYTES = 16 << 20
"""Approximate number of bytes of text that one task processes. A task encodes passages, or cuts documents into
passages. For a large corpus, a task that encodes processes more (see _MAX_TASKS)."""
_MAX_TASKS = 4000
"""Approximate largest number of tasks that encode, in addition to one for each split."""
_MIN_STORED_TASKS = 100
"""A task that takes tokens from the cache opens the files of most spool files. So there are few such tasks, and each
processes up to READ_BYTES bytes. But there are not fewer than about this number, so that workers have equal shares."""


class Encoded(NamedTuple):
    """The result of `encode`: what stream.json records about the splits, and token counts."""

    splits: dict[str, dict]
    """For each split, its entry in stream.json."""
    counts: np.ndarray
    """int [dictionary size]: number of occurrences of each fairseq id in the encoded mega-batches. The validation
    set and the test set are not counted."""


def encode(
    index: Index, tokenizer_file: Path, num_symbols: int, sources: Sequence[str], source_of_shard: Sequence[int],
    work: WorkFolder, cache: str | None = None,
) -> Encoded:  # fmt: skip
    """Encode all passages, and write the files of every split into the work folder.

    Args:
        index: the passages in their final order, and the splits.
        tokenizer_file: the tokenizer file of the stream.
        num_symbols: the size of the fairseq dictionary.
        sources: the name of each source.
        source_of_shard: index of the source of each spool file.
        work: the work folder.
        cache: the folder in which tokens are kept for other streams (see `stored_tokens`); None: there is none.
    """
    dtype, passages = best_dtype(num_symbols), index.passages
    num_bytes = int(passages["num_bytes"].sum(dtype=np.int64))
    task_bytes = max(TASK_BYTES, num_bytes // _MAX_TASKS)
    if cache:
        task_bytes = max(task_bytes, min(READ_BYTES, num_bytes // _MIN_STORED_TASKS))
    tokens = work.folder / "tokens"
    tokenizer_sha256 = sha256_of(tokenizer_file)
    tasks: list[EncodeTask] = []
    weights: list[int] = []
    tasks_of_split: dict[str, range] = {}
    for name, (start, end) in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        ranges = list(byte_ranges(passages["num_bytes"], start, end, task_bytes))
        tasks_of_split[name] = range(len(tasks), len(tasks) + len(ranges))
        for first, last in ranges:
            texts = index.texts(first, last)
            stored = str(tokens) if cache else ""
            tasks.append(EncodeTask(str(tokenizer_file), tokenizer_sha256, texts, dtype, num_symbols, stored))
            weights.append(int(passages["num_bytes"][first:last].sum(dtype=np.int64)))
    assert work.executor is not None
    step = Step(work.folder / "encode", tasks)
    named = (sources, source_of_shard)
    join = join_step(step, tasks_of_split, index, dtype, num_symbols, *named, work.folder / "join")
    joined = join.finished()
    remove_outdated(join, joined)
    # The tokens of a split were removed when they were joined, so they are not encoded again.
    numbers = tasks_to_join(join, joined)
    if cache and numbers:
        store_tokens(index, tokenizer_file, tokenizer_sha256, dtype, cache, work)
    with Bar("encode", sum(weights[number] for number in numbers), "bytes") as bar:
        step.run(work.executor, lambda number: bar.advance(weights[number]), numbers=numbers)
    remove(tokens)
    splits = join_tokens(step, join, joined, index, work)
    if warning := losses_text({name: splits[name] for name in index.splits}):
        note(warning)
    counts = np.zeros(num_symbols, dtype=np.int64)
    for number, name in enumerate(index.splits):
        if is_training(name):
            counts += np.fromfile(f"{join.prefix(number)}.counts", np.int64)
    return Encoded(splits, counts)


@dataclass(frozen=True)
class EncodeTask(TextsTask):
    """Task that encodes some passages.

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
    """SHA-256 digest of the tokenizer file. If the file has changed, the task has changed, and is done again."""
    texts: Texts
    dtype: str
    num_symbols: int
    tokens: str = ""
    """The folder with the tokens of all passages (see `stored_tokens`); "": this task encodes them."""

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
                    long.append(
                        [self.texts.start + first + which, len(sequence_sizes(passage_tokens[which : which + 1]))]
                    )
                counts += np.bincount(tokens, minlength=self.num_symbols)
        counts.tofile(f"{prefix}.counts")
        return {"long": long, "lost": lost}

    def _batches(self, heartbeat: Heartbeat) -> Iterator[tuple[int, list[np.ndarray], dict]]:
        """Yield the first index, the fairseq ids and the losses of batches of about BATCH_BYTES bytes of passages."""
        tokenizer = cached_tokenizer(self.tokenizer_file, self.tokenizer_sha256)
        passages, spool = self.texts.entries(), Path(self.texts.spool)

        def beat() -> None:  # a read can take long on a shared file system, so show progress for each passage
            heartbeat.beat("text encoding")

        for start, end in byte_ranges(passages["num_bytes"], 0, len(passages), READ_BYTES):
            entries = np.asarray(passages[start:end])
            stored = stored_tokens(Path(self.tokens), self.dtype, entries, beat) if self.tokens else []
            # With tokens, the text is needed only to count what they lose.
            is_read = not stored or not tokenizer.is_lossless
            texts = read_texts(spool, entries, beat) if is_read else [""] * len(entries)
            for first, last in byte_ranges(passages["num_bytes"], start, end, BATCH_BYTES):
                where = slice(first - start, last - start)
                batch = texts[where]
                beat()
                with heartbeat.computing():  # a passage without white space can have 16 MB
                    ids = stored[where] if stored else [each + NUM_SPECIAL for each in tokenizer.encode(batch)]
                    lost = losses(tokenizer, batch, (each - NUM_SPECIAL for each in ids))
                yield first, ids, lost
            del texts, stored  # before the next texts are read

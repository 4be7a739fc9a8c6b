"""Encode passages as tokens, in the final order of the passages, and write fairseq's dataset files.

The passages of a split are divided among several tasks (`EncodeTask`), which write tokens to temporary files. Another
task (`JoinTask`) joins the tokens of a split into the files of the split.
"""

import collections
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.accounts import count_documents
from data_prep.encoding.documents import write_documents
from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, MMapWriter, best_dtype, sequence_sizes
from data_prep.encoding.stored_tokens import BATCH_BYTES, store_tokens, stored_tokens
from data_prep.reading.facts import facts_digest
from data_prep.reading.index import Index, Texts, byte_ranges
from data_prep.reading.spool import READ_BYTES, read_texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.losses import added_losses, losses, losses_text
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, cached_tokenizer
from fairseq_alma.core.files import remove, sha256_of
from fairseq_alma.core.stream_folder import split_prefix

TASK_BYTES = 16 << 20
"""Approximate number of bytes of text that one task processes. A task encodes passages, or cuts documents into
passages. For a large corpus, a task that encodes processes more (see _MAX_TASKS)."""
_MAX_TASKS = 4000
"""Approximate largest number of tasks that encode, in addition to one for each split."""
_MIN_STORED_TASKS = 100
"""A task that takes tokens from the cache opens the files of most spool files. So there are few such tasks, and each
processes up to READ_BYTES bytes. But there are not fewer than about this number, so that workers have equal shares."""
_ROWS = 1 << 18
"""Number of index entries that are read at a time, 16 MB."""


def encode(
    index: Index, tokenizer_file: Path, num_symbols: int, sources: Sequence[str], source_of_shard: Sequence[int],
    work: WorkFolder, cache: str | None = None,
) -> dict[str, dict]:  # fmt: skip
    """Encode all passages, and write the files of every split into the work folder.

    Return the entry of each split in stream.json.

    Args:
        index: the passages in their final order, and the splits.
        tokenizer_file: the tokenizer file of the stream.
        num_symbols: the size of the fairseq dictionary.
        sources: the name of each source.
        source_of_shard: index of the source of each spool file.
        work: the work folder.
        cache: the folder in which tokens are kept for other streams (see `stored_tokens`); None: there is none.
    """
    dtype, num_bytes, tokens = best_dtype(num_symbols), index.passages["num_bytes"], work.folder / "tokens"
    total_bytes = int(num_bytes.sum(dtype=np.int64))
    task_bytes = max(TASK_BYTES, total_bytes // _MAX_TASKS)
    if cache:
        task_bytes = max(task_bytes, min(READ_BYTES, total_bytes // _MIN_STORED_TASKS))
    tokenizer_sha256 = sha256_of(tokenizer_file)
    tasks: list[EncodeTask] = []
    tasks_of_split: dict[str, range] = {}
    for name, bounds in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        texts = [index.texts(*bound) for bound in byte_ranges(num_bytes, *bounds, task_bytes)]
        tasks_of_split[name] = range(len(tasks), len(tasks) + len(texts))
        stored = str(tokens) if cache else ""
        tasks += [EncodeTask(str(tokenizer_file), tokenizer_sha256, part, dtype, stored) for part in texts]
    encoding = Step(work.folder / "encode", tasks)

    # In a chronological stream, some splits consist of neighbouring splits.
    members = {name: [name] for name in index.splits} | index.unions
    named = (facts_digest(index.spool, len(source_of_shard)), list(sources), list(source_of_shard))
    joins: list[JoinTask] = []
    for names in members.values():
        first, last = index.splits.index(names[0]), index.splits.index(names[-1])
        parts = range(tasks_of_split[names[0]].start, tasks_of_split[names[-1]].stop)
        digest = hashlib.sha256("\n".join(tasks[part].description() for part in parts).encode()).hexdigest()
        place = (str(encoding.folder), parts.start, parts.stop, digest)
        split = index.texts(index.cuts[first], index.cuts[last + 1])
        joins.append(JoinTask(*place, split, dtype, *named))
    join = Step(work.folder / "join", joins)
    joined = join.finished()
    for path in join.folder.glob("*.bin"):
        if int(path.stem) not in joined:  # an earlier call has joined it with other settings; it takes disk space
            path.unlink()

    # The tokens of a split are removed when they are joined, so they are not encoded again.
    wanted = sorted({part for number, task in enumerate(joins) if number not in joined for part in task.parts})
    if cache and wanted:
        store_tokens(index, tokenizer_file, tokenizer_sha256, dtype, cache, work)
    weights = {part: int(tasks[part].texts.entries()["num_bytes"].sum(dtype=np.int64)) for part in wanted}
    work.finish(encoding, "encode", "bytes", weights, numbers=wanted)
    remove(tokens)
    uses = collections.Counter(part for task in joins for part in task.parts)

    def on_joined(number: int) -> None:
        for part in joins[number].parts:
            uses[part] -= 1
            if not uses[part]:
                encoding.path(part, "tokens").unlink(missing_ok=True)

    sizes = [len(task.parts) for task in joins]
    results = work.finish(join, "join tokens", "parts", sizes, on_done=on_joined, finished=joined)
    return _encoded(index, join, list(members), results, work)


def _encoded(
    index: Index, join: Step, names: Sequence[str], results: Sequence[dict], work: WorkFolder
) -> dict[str, dict]:
    """Add the joined files to the stream. `names` are those of the splits, in the order of the tasks of `join`."""
    splits = {}
    for number, (name, split) in enumerate(zip(names, results, strict=True)):
        for ending in ("bin", "idx"):
            work.add_shard(f"{split_prefix(Path(), name)}.{ending}", *join.file(number, ending))
        work.add_shard(f"documents/{name}.parquet", *join.file(number, "parquet"))
        splits[name] = split | {"sha256": join.file(number, "bin")[1]["sha256"]}
    if warning := losses_text({name: splits[name] for name in index.splits}):
        note(warning)
    return splits


@dataclass(frozen=True)
class EncodeTask(Task):
    """Task that encodes some passages.

    It writes the fairseq ids of all passages, with </s> after each passage, to PREFIX.tokens. Its result is what the
    tokens lose of the text (see `losses`).
    """

    tokenizer_file: str
    tokenizer_sha256: str
    """SHA-256 digest of the tokenizer file. If the file has changed, the task has changed, and is done again."""
    texts: Texts
    dtype: str
    tokens: str = ""
    """The folder with the tokens of all passages (see `stored_tokens`); "": this task encodes them."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        lost: dict = {}
        end = np.array([EOS])
        with open(f"{prefix}.tokens", "wb") as file:
            for encoded, lost_here in self._batches(heartbeat):
                lost = added_losses([lost, lost_here])
                parts = [part for ids in encoded for part in (ids, end)]
                file.write(np.concatenate(parts, dtype=self.dtype, casting="unsafe").data)
        return lost

    def _batches(self, heartbeat: Heartbeat) -> Iterator[tuple[list[np.ndarray], dict]]:
        """Yield the fairseq ids and the losses of batches of about BATCH_BYTES bytes of passages."""
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
                yield ids, lost
            del texts, stored  # before the next texts are read


@dataclass(frozen=True)
class JoinTask(Task):
    """Task that joins the tokens of a split.

    The task writes these files. PREFIX is the argument `prefix` of `run`.
        PREFIX.bin, PREFIX.idx: the fairseq dataset of the split.
        PREFIX.parquet: the document that each sequence comes from (see `documents`).

    The result of the task is the entry of the split in stream.json, without its digest.
    """

    encoded: str
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
    facts_sha256: str
    """Digest of the ids and dates of all documents, see `facts.facts_digest`."""
    sources: list[str]
    """The name of each source."""
    source_of_shard: list[int]
    """Index of the source of each spool file."""

    @property
    def parts(self) -> range:
        """The numbers of the tasks that have encoded the passages of the split."""
        return range(self.first_part, self.end_part)

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        pieces = [np.empty(0, np.int32)]
        lost: dict = {}
        num_tokens = 0
        step = Step(Path(self.encoded), ())
        with MMapWriter(prefix, self.dtype, heartbeat.beat) as writer:
            for number in self.parts:
                heartbeat.beat("joining tokens")
                tokens = np.fromfile(step.path(number, "tokens"), self.dtype)
                passage_tokens = np.diff(np.flatnonzero(tokens == EOS), prepend=-1)
                writer.write(tokens, sequence_sizes(passage_tokens))
                pieces.append((-(-passage_tokens // MAX_SEQUENCE_TOKENS)).astype(np.int32))
                num_tokens += len(tokens)
                lost = added_losses([lost, mark_of(step.folder, number)["result"]])
        num_pieces = np.concatenate(pieces)
        split = _text_counts(self.texts.entries(), heartbeat)
        split |= {"sequences": int(num_pieces.sum()), "tokens": num_tokens} | ({"lost": lost} if lost else {})
        path = Path(f"{prefix}.parquet")
        write_documents(path, self.texts, self.sources, self.source_of_shard, num_pieces, heartbeat)
        return split


def _text_counts(passages: np.ndarray, heartbeat: Heartbeat) -> dict:
    """Return the number of documents, passages, words and bytes of a split."""
    documents, words, num_bytes = np.empty(len(passages), "V16"), 0, 0
    for start in range(0, len(passages), _ROWS):
        heartbeat.beat("counting words and documents")
        rows = np.array(passages[start : start + _ROWS])
        documents[start : start + _ROWS] = rows["document"]
        words += int(rows["num_words"].sum(dtype=np.int64))
        num_bytes += int(rows["num_bytes"].sum(dtype=np.int64))
    with heartbeat.computing():  # sorting takes long
        num_documents = count_documents(documents)
    return {"documents": num_documents, "passages": len(passages), "words": words, "bytes": num_bytes}

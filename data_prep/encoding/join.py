"""Join the tokens of a split, which several tasks have written, into fairseq's dataset files.

One task joins one split. As soon as the task is done, the files that it has joined are removed, to save disk space. If
alma-prep is killed, its next call does not encode the text of these splits again.
"""

import collections
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.encoding.mmap_writer import MMapWriter
from data_prep.reading.index import Index, read_index
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar
from data_prep.running.tasks import Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.losses import added_losses
from fairseq_alma.core.stream_folder import split_prefix

_ROWS = 1 << 18
"""Number of index entries that are read at a time, 16 MB."""
_ENDINGS = ("tokens", "sizes", "counts")
"""The endings of the files that a task writes when it encodes passages (see `encode.EncodeTask`)."""


def join_step(
    encode: Step, tasks_of_split: Mapping[str, range], index: Index, dtype: str, num_symbols: int, folder: Path
) -> Step:
    """Return the step that joins the tokens of each split: first `index.splits`, then `index.unions`.

    Args:
        encode: the step that encodes the passages.
        tasks_of_split: the numbers of the tasks of `encode` for each split.
        index: the passages in their final order, and the splits.
        dtype: the integer type of stored tokens: uint16 or uint32.
        num_symbols: the size of the fairseq dictionary.
        folder: the folder of the step.
    """
    tasks = []
    for members in _members(index).values():
        parts = range(tasks_of_split[members[0]].start, tasks_of_split[members[-1]].stop)
        digest = hashlib.sha256()
        for number in parts:
            digest.update(f"{encode.tasks[number].description()}\n".encode())
        start, end = index.cuts[index.splits.index(members[0])], index.cuts[index.splits.index(members[-1]) + 1]
        where = (str(index.path), index.sha256, start, end)
        tasks.append(
            JoinTask(str(encode.folder), parts.start, parts.stop, digest.hexdigest(), *where, dtype, num_symbols)
        )
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
) -> tuple[dict[str, dict], list[list[int]]]:
    """Write the fairseq dataset of every split into the work folder, and remove the files that were joined.

    Args:
        encode: the step that encodes the passages. The tasks of all splits that are not joined must be finished.
        join: the step that joins the tokens, see `join_step`.
        joined: the results of those of its tasks that are finished.
        index: the passages in their final order, and the splits.
        work: the work folder.

    Returns:
        For each split, its entry in stream.json, and [passage, number of sequences] of each passage that is stored as
        several sequences.
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
        splits[name] = results[number]["split"] | {"sha256": join.file(number, "bin")[1]["sha256"]}
    long = [one for result in results[: len(index.splits)] for one in result["long"]]
    return splits, long


@dataclass(frozen=True)
class JoinTask(Task):
    """Task that joins the tokens of a split.

    The task writes three files. PREFIX is the argument `prefix` of `run`.
        PREFIX.bin, PREFIX.idx: the fairseq dataset of the split.
        PREFIX.counts: int64 [num_symbols], the number of occurrences of each fairseq id.

    The result of the task contains the entry of the split in stream.json ("split"), without its digest, and
    [passage, number of sequences] for each passage that is stored as several sequences ("long").
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
    index: str
    """Path of the index file, which lists all passages."""
    index_sha256: str
    start: int
    """Index of the first passage of the split."""
    end: int
    """Index of the last passage of the split, plus 1."""
    dtype: str
    num_symbols: int

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
        split = _text_counts(read_index(Path(self.index))[self.start : self.end], heartbeat)
        split |= {"sequences": num_sequences, "tokens": num_tokens} | ({"lost": lost} if lost else {})
        return {"split": split, "long": long}


def _members(index: Index) -> dict[str, list[str]]:
    """Return the names of all splits to write, each with the names of the splits in the index of which it consists."""
    return {name: [name] for name in index.splits} | index.unions


def _parts(task: Task) -> range:
    """Return the numbers of the tasks that have encoded the passages of a split."""
    assert isinstance(task, JoinTask)
    return range(task.first_part, task.end_part)


def _text_counts(passages: np.ndarray, heartbeat: Heartbeat) -> dict:
    """Return the number of documents, passages, words and bytes of a split.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage of the split, memory-mapped.
        heartbeat: the heartbeat of the task.
    """
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

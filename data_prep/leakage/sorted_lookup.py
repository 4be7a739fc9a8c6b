"""Look up the n-grams of training text among very many held-out n-grams.

If there are few held-out n-grams, each task reads all of them (see `overlap.ScanTask`). If there are many, because much
text is held out, each task would read more hashes than text. So the hashes of the training text are sorted and stored,
too. Then a task compares those hashes of the training text and of the held-out text that are in one range:

1. SortTask      hashes the n-grams of a part of the training text.
2. LookUpTask    looks up those that are in one range of hashes.

So each hash is written once and read once. The hashes of the training text take 12 bytes for each word, about twice as
much as the text. They are removed when they have been compared.
"""

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.leakage.texts import Texts, TextsTask, contains_ordered, load_part, ngrams_of, range_of
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar
from data_prep.running.tasks import Executor, Step, Task


def look_up_sorted(
    folder: Path, size: int, training: Sequence[Texts], held_out: tuple[str, int, str], executor: Executor
) -> tuple[Iterable[np.ndarray], np.ndarray]:
    """Find the held-out n-grams that occur in training texts.

    Args:
        folder: folder for the output of the tasks, in the work folder.
        size: number of words of an n-gram, n.
        training: the parts of the training texts, one for each task.
        held_out: the folder with the output of the MergeTasks (see `overlap`), their number, and the digest of what
            they depend on.
        executor: runs the tasks.

    Returns:
        First, arrays that together contain the hashes of the n-grams that were found, uint64. Second, a bool array:
        True for each training text that contains one of them.
    """
    sorting = [SortTask(texts, size) for texts in training]
    stamp = hashlib.sha256("".join(task.description() for task in sorting).encode()).hexdigest()
    sort, num_parts = Step(folder / "sort", sorting), held_out[1]
    comparing = [LookUpTask(str(sort.folder), len(sorting), stamp, *held_out, part) for part in range(num_parts)]
    compare = Step(folder / "compare", comparing)
    finished = compare.finished(executor)
    if len(finished) < num_parts:  # otherwise, the sorted hashes have been removed
        with Bar("hash training text", len(sorting), "tasks") as bar:
            sort.run(executor, lambda number: bar.advance(1))
    with Bar("search for held-out text", num_parts, "tasks") as bar:
        compare.run(executor, lambda number: bar.advance(1), finished=finished)
    shutil.rmtree(sort.folder, ignore_errors=True)
    starts = np.cumsum([0, *(len(texts.entries()) for texts in training)])
    overlaps = np.zeros(starts[-1], bool)
    for part in range(num_parts):
        found = np.load(f"{compare.prefix(part)}.overlaps.npy")
        overlaps[starts[found[:, 0]] + found[:, 1]] = True
    return (np.fromfile(f"{compare.prefix(part)}.found", np.uint64) for part in range(num_parts)), overlaps


@dataclass(frozen=True)
class SortTask(TextsTask):
    """Task that hashes the n-grams of some training texts.

    It writes two files. PREFIX.hashes: the hashes, sorted, uint64. PREFIX.texts: the index of the text of each n-gram,
    in the sequence of these texts, int32.
    """

    texts: Texts
    size: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        hashes, text_of = ngrams_of(self.texts, self.size, heartbeat)
        with heartbeat.computing():  # sorting takes long
            order = np.argsort(hashes)
        hashes[order].tofile(f"{prefix}.hashes")
        text_of[order].tofile(f"{prefix}.texts")
        return {}


@dataclass(frozen=True)
class LookUpTask(Task):
    """Task that looks up the n-grams of all training texts that are in one range of hashes.

    It writes two files. PREFIX.found: the hashes of the held-out n-grams that occur in training texts, sorted, uint64.
    PREFIX.overlaps.npy: int32 [n, 2], the number of the SortTask, and the index in its texts, of each text that
    contains at least one of them.
    """

    folder: str
    """Folder with the output of the SortTasks."""
    count: int
    """Number of SortTasks."""
    sorted_stamp: str
    """Digest of the descriptions of all SortTasks. If one of them has changed, this task is done again."""
    held_out: str
    """Folder with the output of the MergeTasks."""
    num_parts: int
    stamp: str
    part: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        held_out, overlaps = load_part(self.held_out, self.part), [np.empty((0, 2), np.int32)]
        occurs = np.zeros(len(held_out), bool)
        for number in range(self.count):
            heartbeat.beat()
            path = Path(self.folder) / f"{number:06d}.hashes"
            if not path.stat().st_size:
                continue
            hashes = np.memmap(path, np.uint64, "r")
            of_part = range_of(hashes, self.part, self.num_parts)
            is_found = contains_ordered(held_out, hashes[of_part])
            occurs[np.searchsorted(held_out, hashes[of_part][is_found])] = True
            texts = np.unique(np.memmap(path.with_suffix(".texts"), np.int32, "r")[of_part][is_found])
            overlaps.append(np.stack([np.full_like(texts, number), texts], axis=1))
        held_out[occurs].tofile(f"{prefix}.found")
        np.save(f"{prefix}.overlaps.npy", np.concatenate(overlaps))
        return {}

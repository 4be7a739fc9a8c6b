"""Find the paragraphs that occur in several documents, such as menus and notices (--duplicate-paragraphs).

A paragraph is a line of a document, as in CCNet (Wenzek et al., 2020). Each paragraph that occurs in several documents
is kept in one of them: the one whose text has the smallest hash. So the result does not depend on the order of files.

The documents are read twice:

1. Each `ParagraphTask` reads parts of files, and writes a sorted file of pairs: a paragraph, and its document.
2. Each `RepeatedTask` takes the pairs of one range of hashes from all of these files, and writes one pair for each
   paragraph that occurs in several documents.
3. When the documents are read into the spool, the cleaning removes these paragraphs (see `repeated_lines`).

Memory: a task of step 2 keeps about _RANGE_PAIRS pairs of 16 bytes. No process keeps all pairs.
"""

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.cleaning.cleaner import Cleaner, Cleaning
from data_prep.cleaning.repeated_lines import PAIR, hash_of, paragraphs_of
from data_prep.reading.spool import ReadingTask, SpoolTask, date_of
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar
from data_prep.running.tasks import Executor, Step, Task
from data_prep.sources import Skipped, read_documents_of
from data_prep.sources.dates import UNDATED
from fairseq_alma.core.files import sha256_of

_RANGE_PAIRS = 4 << 20
"""Average number of pairs that one task of step 2 sorts."""


def without_repeated(tasks: Sequence[SpoolTask], min_words: int, folder: Path, executor: Executor) -> list[SpoolTask]:
    """Return tasks that also remove the paragraphs that occur in several documents.

    Args:
        tasks: the tasks that read all documents.
        min_words: number of words from which a line counts as a paragraph.
        folder: the work folder.
        executor: runs the tasks, on this machine or on a Slurm cluster.
    """
    firsts = [
        ParagraphTask(list(task.parts), task.cleaning, task.stamp, task.versions, min_words, task.needs_date)
        for task in tasks
    ]
    weights = [sum(part.end - part.start for part in task.parts) for task in firsts]
    step = Step(folder / "paragraphs", firsts)
    with Bar("read paragraphs", sum(weights), "bytes") as bar:
        results = step.run(executor, lambda number: bar.advance(weights[number]))
    num_pairs = sum(result["pairs"] for result in results)
    digest = hashlib.sha256("".join(result["sha256"] for result in results).encode()).hexdigest()
    # The bounds depend only on the number of pairs. Hashes are spread evenly, so each range has about equally many.
    num_ranges = max(1, -(-num_pairs // _RANGE_PAIRS))
    bounds = [(number << 64) // num_ranges for number in range(num_ranges + 1)]
    seconds = [
        RepeatedTask(str(step.folder), len(firsts), digest, low, high - 1) for low, high in itertools.pairwise(bounds)
    ]
    second = Step(folder / "repeated_paragraphs", seconds)
    with Bar("find repeated paragraphs", num_pairs, "paragraphs") as bar:
        counts = second.run(executor, lambda number: bar.advance(num_pairs // num_ranges))
    path = folder / "repeated_paragraphs.npy"
    with open(path, "wb") as file:
        shape = (sum(result["repeated"] for result in counts),)
        header = {"descr": np.lib.format.dtype_to_descr(PAIR), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for number in range(num_ranges):
            file.write(np.load(f"{second.prefix(number)}.repeated.npy").data)
    paragraphs = (str(path), sha256_of(path), min_words)
    return [replace(task, cleaning=(task.cleaning or Cleaning())._replace(paragraphs=paragraphs)) for task in tasks]


def _sorted(pairs: np.ndarray) -> np.ndarray:
    """Return pairs, sorted by paragraph, then by document, without repetitions."""
    pairs = pairs[np.lexsort((pairs["document"], pairs["paragraph"]))]
    return pairs[np.concatenate([[True], pairs[1:] != pairs[:-1]])] if len(pairs) else pairs


@dataclass(frozen=True)
class ParagraphTask(ReadingTask):
    """Task that writes the paragraphs of all documents that pass the cleaning to PREFIX.paragraphs.npy.

    The file contains PAIR of each paragraph, sorted, without repetitions. PREFIX is the argument `prefix` of `run`.
    """

    min_words: int
    """Number of words from which a line counts as a paragraph."""
    needs_date: bool
    """Whether documents without a date are left out."""

    def read(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        cleaner = Cleaner(self.cleaning or Cleaning())
        found = array("Q")
        for part in self.parts:
            heartbeat.beat(part.name)
            for document in read_documents_of(part, prefix.parent, heartbeat.beat):
                heartbeat.beat()
                if isinstance(document, Skipped):
                    continue
                text, reason, _ = cleaner.clean(document)
                if reason is None and not (self.needs_date and date_of(document, part) == UNDATED):
                    identity = hash_of(text)
                    for _, paragraph in paragraphs_of(text, self.min_words):
                        found.append(paragraph)
                        found.append(identity)
        pairs = _sorted(np.frombuffer(found, PAIR)) if found else np.empty(0, PAIR)
        path = Path(f"{prefix}.paragraphs.npy")
        np.save(path, pairs)
        return {"pairs": len(pairs), "sha256": sha256_of(path)}


@dataclass(frozen=True)
class RepeatedTask(Task):
    """Task that finds the paragraphs that occur in several documents, among those in a range of hashes.

    For each of them, it writes PAIR of the paragraph and the document in which it is kept to PREFIX.repeated.npy, in
    the order of the paragraphs. PREFIX is the argument `prefix` of `run`.
    """

    folder: str
    """The folder with the files of all ParagraphTasks."""
    count: int
    """Number of ParagraphTasks."""
    sha256: str
    """Digest of all files. If a file has changed, the task has changed, and is done again."""
    low: int
    """Smallest hash of the range."""
    high: int
    """Largest hash of the range."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        pieces = [np.empty(0, PAIR)]
        for number in range(self.count):
            heartbeat.beat("repeated paragraphs")
            pairs = np.load(Path(self.folder) / f"{number:06d}.paragraphs.npy", mmap_mode="r")
            start = np.searchsorted(pairs["paragraph"], np.uint64(self.low), "left")
            end = np.searchsorted(pairs["paragraph"], np.uint64(self.high), "right")
            pieces.append(np.array(pairs[start:end]))
        with heartbeat.computing():
            pairs = _sorted(np.concatenate(pieces))
        # The pairs are sorted by paragraph, then by document. The first of several with one paragraph is written.
        same = pairs["paragraph"][1:] == pairs["paragraph"][:-1]
        is_repeated = np.concatenate([same, [False]]) & ~np.concatenate([[False], same])
        repeated = pairs[is_repeated[: len(pairs)]]
        np.save(f"{prefix}.repeated.npy", repeated)
        return {"repeated": len(repeated)}

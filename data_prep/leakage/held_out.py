"""Read held-out text: the validation and test set of a finished stream, and benchmark files.

The text is written into a folder in the same form as the spool, so that the same tasks can read it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, best_dtype
from data_prep.errors import Unworkable
from data_prep.leakage.overlap import Texts
from data_prep.reading.facts import documents_path
from data_prep.reading.index import ENTRY, byte_ranges
from data_prep.reading.provenance import reading_digest
from data_prep.reading.read import Shard, make_entries
from data_prep.reading.spool import SpoolTask
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Skipped, Source, list_files, merge_skipped, split_into_parts
from data_prep.tokenization.dictionary import EOS, NUM_SPECIAL
from data_prep.tokenization.tokenizers import load_tokenizer
from data_prep.words import count_words
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, IDX_SEQUENCE_BYTES, split_entry, split_prefix

_TASK_TOKENS = 1 << 22
"""Approximate number of tokens that one task decodes."""
_MANY_TASKS = 4000
"""Number of tasks from which each decodes more tokens."""


def read_benchmarks(settings: PrepSettings, work: WorkFolder) -> list[Texts]:
    """Copy the text of the files given by --decontaminate-against into the subfolder `benchmarks` of a work folder.

    Raises:
        Unworkable: if a file contains no text.
    """
    tasks: list[SpoolTask] = []
    for path in settings.decontaminate_against:
        source = Source("text", path)
        files = list_files(source)
        stamp = hashlib.sha256(repr([(file.num_bytes, file.mtime_ns) for file in files]).encode()).hexdigest()
        parts = split_into_parts(source, files, 1 << 40, settings.field_options())
        tasks.append(SpoolTask(parts, cleaning=None, sign=False, stamp=stamp, versions=reading_digest()))
    step = work.run("benchmarks", tasks)
    folder, texts = step.folder, []
    for number, result in enumerate(step.results()):
        count = result["documents"]
        if not count:
            why = "".join(f" ({skipped[0]}: {skipped[1]})" for skipped in result["skipped"][:1])
            raise Unworkable(
                f"--decontaminate-against {settings.decontaminate_against[number]} contains no text{why}. Give text "
                f"files with one document per line, or JSON lines with the text in the field {settings.text_field} "
                "(--text-field)."
            )
        for skipped in merge_skipped([Skipped(*entry) for entry in result["skipped"]]):
            note(
                f"warning: --decontaminate-against {settings.decontaminate_against[number]}: {skipped.name} is not "
                f"compared completely: {skipped.reason()}"
            )
        shard = Shard(number, count, result["documents_sha256"], 0, [0])
        entries = make_entries(0, [shard], folder, f"benchmarks/entries_{number}", work)
        index = folder / f"{number:06d}.index.npy"
        np.save(index, entries)
        texts.append(Texts(str(index), sha256_of(index), str(folder), 0, count))
    return texts


def decoded_texts(work: WorkFolder, stream: Path, name: str, description: Mapping, every: int = 1) -> Texts:
    """Decode the passages of a split of a finished stream into a subfolder of a work folder.

    Args:
        work: the work folder.
        stream: the stream folder.
        name: name of the split.
        description: the content of the stream's stream.json.
        every: decode every k-th passage, from the first on, where k is this number.
    """
    path, dtype = split_prefix(stream, name).with_suffix(".bin"), best_dtype(description["dictionary_size"])
    tokenizer_file = stream / description["tokenizer"]["file"]
    passages = _passages(path, dtype)[::every]
    part = name.replace("/", "_") + (f"_every_{every}" if every > 1 else "")
    folder = work.within(f"held_out/{part}").folder
    places = folder / "passages.npy"
    np.save(places, passages)
    # The stream was checked before, so the digest in stream.json is that of the file.
    sha256 = split_entry(description, name).get("sha256") or sha256_of(path)
    place = (str(path), sha256, dtype, str(tokenizer_file), sha256_of(tokenizer_file), str(places), sha256_of(places))
    num_tokens = passages[:, 1] - passages[:, 0]
    most = max(_TASK_TOKENS, int(num_tokens.sum()) // _MANY_TASKS)
    ranges = byte_ranges(num_tokens, 0, len(passages), most)
    tasks = [DecodeTask(number, *place, first, last) for number, (first, last) in enumerate(ranges)]
    work.run(f"held_out/{part}", tasks)
    entries = np.concatenate([np.load(documents_path(folder, number)) for number in range(len(tasks))])
    index = folder / "index.npy"
    np.save(index, entries)
    return Texts(str(index), sha256_of(index), str(folder), 0, len(entries))


def _passages(path: Path, dtype: str) -> np.ndarray:
    """Return the positions in a .bin file where each passage starts and where it ends, int64 [number of passages, 2].

    The position where a passage ends is that of its end-of-sequence token.

    Args:
        path: the .bin file. The .idx file must be beside it.
        dtype: the integer type of the tokens.
    """
    index = path.with_suffix(".idx")
    count = (index.stat().st_size - IDX_HEADER_BYTES) // IDX_SEQUENCE_BYTES
    sizes = np.fromfile(index, np.int32, count, offset=IDX_HEADER_BYTES)
    ends = np.cumsum(sizes, dtype=np.int64)
    # A passage is one sequence, or several if it is very long. All of these but the last have the largest size.
    is_last = sizes < MAX_SEQUENCE_TOKENS
    large = np.flatnonzero(~is_last)
    is_last[large] = np.memmap(path, dtype, "r")[ends[large] - 1] == EOS
    ends = ends[is_last]
    return np.stack([np.concatenate([[0], ends[:-1]]), ends - 1], axis=1)


@dataclass(frozen=True)
class DecodeTask(Task):
    """Task that decodes passages of a .bin file: those from `start` (included) to `end` (excluded) in a list.

    It writes the text of the passages to PREFIX.text, and their index entries to PREFIX.documents.npy. The place of a
    passage in its document is not known, so each passage counts as a document.
    """

    shard: int
    """Index of this task in the list of tasks. This number is also part of the name of the text file."""
    path: str
    sha256: str
    dtype: str
    tokenizer_file: str
    tokenizer_sha256: str
    passages: str
    """Path of the list, an array of the positions where each passage starts and where it ends (.npy)."""
    passages_sha256: str
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        tokenizer = load_tokenizer(Path(self.tokenizer_file))
        tokens, passages = np.memmap(self.path, self.dtype, "r"), np.load(self.passages, mmap_mode="r")
        rows, offset = [], 0
        # The words of a passage of 16 MB can take minutes.
        with open(f"{prefix}.text", "wb") as file, heartbeat.computing():
            for first, last in passages[self.start : self.end].tolist():
                heartbeat.beat()
                text = tokenizer.decode((tokens[first:last].astype(np.int64) - NUM_SPECIAL).tolist())
                content = text.encode("utf-8", "replace")
                identity = hashlib.sha256(content).digest()[:16]
                rows.append((identity, identity, offset, self.shard, len(content), count_words(text, content), 0, 0, 0))
                offset += file.write(content)
        np.save(f"{prefix}.documents.npy", np.array(rows, ENTRY))
        return {}

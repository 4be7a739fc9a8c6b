"""Read held-out text: the validation and test set of a finished stream, and benchmark files.

The text is written into a folder in the same form as the spool, so that the same tasks can read it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.encoding.mmap_writer import best_dtype
from data_prep.errors import Unworkable
from data_prep.leakage.texts import Texts
from data_prep.reading.entries import Shard, make_entries
from data_prep.reading.index import ENTRY
from data_prep.reading.provenance import reading_digest
from data_prep.reading.spool import SpoolTask, documents_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Executor, Step, Task
from data_prep.settings import PrepSettings
from data_prep.sources import Skipped, Source, list_files, merge_skipped, split_into_parts
from data_prep.tokenization.dictionary import EOS, NUM_SPECIAL
from data_prep.tokenization.tokenizers import load_tokenizer
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import split_prefix

_TASK_TOKENS = 1 << 22
"""Approximate number of tokens that one task decodes."""


def read_benchmarks(settings: PrepSettings, folder: Path, executor: Executor) -> list[Texts]:
    """Copy the text of the files given by --decontaminate-against into a folder.

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
    results = Step(folder, tasks).run(executor)
    texts = []
    for number, result in enumerate(results):
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
        entries = make_entries(0, [shard], folder, folder / f"entries_{number}", executor)
        index = folder / f"{number:06d}.index.npy"
        np.save(index, entries)
        texts.append(Texts(str(index), sha256_of(index), str(folder), 0, count))
    return texts


def decoded_texts(folder: Path, stream: Path, name: str, description: Mapping, executor: Executor) -> Texts:
    """Decode a split of a finished stream into a folder.

    Args:
        folder: the folder, in the work folder.
        stream: the stream folder.
        name: name of the split.
        description: the content of the stream's stream.json.
        executor: runs the tasks.
    """
    path, dtype = split_prefix(stream, name).with_suffix(".bin"), best_dtype(description["dictionary_size"])
    tokenizer_file = stream / description["tokenizer"]["file"]
    tokens = np.memmap(path, dtype, "r")
    # The stream was checked before, so the digest in stream.json is that of the file.
    sha256 = description["splits"][name].get("sha256") or sha256_of(path)
    place = (str(path), sha256, dtype, str(tokenizer_file), sha256_of(tokenizer_file))
    tasks: list[DecodeTask] = []
    start = 0
    while start < len(tokens):
        end = _after_passage(tokens, min(start + _TASK_TOKENS, len(tokens)))
        tasks.append(DecodeTask(len(tasks), *place, start, end))
        start = end
    step = Step(folder, tasks)
    step.run(executor)
    entries = np.concatenate([np.load(documents_path(folder, number)) for number in range(len(tasks))])
    index = folder / "index.npy"
    np.save(index, entries)
    return Texts(str(index), sha256_of(index), str(folder), 0, len(entries))


def _after_passage(tokens: np.ndarray, start: int) -> int:
    """Return the first position from `start` at which a passage has ended."""
    while start < len(tokens) and tokens[start - 1] != EOS:
        start += 1
    return start


@dataclass(frozen=True)
class DecodeTask(Task):
    """Task that decodes the tokens from `start` (included) to `end` (excluded) of a .bin file.

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
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        tokenizer = load_tokenizer(Path(self.tokenizer_file))
        tokens = np.memmap(self.path, self.dtype, "r")[self.start : self.end]
        rows, offset, position = [], 0, 0
        with open(f"{prefix}.text", "wb") as file:
            for end in np.flatnonzero(tokens == EOS).tolist():
                heartbeat.beat()
                text = tokenizer.decode((tokens[position:end].astype(np.int64) - NUM_SPECIAL).tolist())
                content = text.encode("utf-8", "replace")
                identity = hashlib.sha256(content).digest()[:16]
                rows.append((identity, identity, offset, self.shard, len(content), len(text.split()), 0, 0, 0))
                offset += file.write(content)
                position = end + 1
        np.save(f"{prefix}.documents.npy", np.array(rows, ENTRY))
        return {}

"""Keep the tokens of documents in the cache (--cache), for other streams that have the same tokenizer.

Passages are encoded in the order of the stream, which differs between streams. So with a cache, the documents of a
spool file are encoded first, one task per file, in the order of the file. `encode.EncodeTask` then looks up the tokens
of its passages. It encodes only what is not found: passages of documents that are cut, and those in files whose tokens
are not stored (see `store_tokens`).

What a task writes is found in the cache by the text, the boundaries of the documents, and the tokenizer. It does not
depend on anything else of the stream.
"""

import functools
import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError
from data_prep.reading.index import Index, byte_ranges
from data_prep.reading.provenance import encoding_digest
from data_prep.reading.spool import documents_path, read_range, text_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar
from data_prep.running.task_store import TaskStore, take_finished
from data_prep.running.tasks import Executor, Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.dictionary import NUM_SPECIAL
from data_prep.tokenization.tokenizers import cached_tokenizer

BATCH_BYTES = 1 << 20
"""Approximate number of bytes of text that a task encodes at a time."""
_LEAST_USED = 0.5
"""Share of the bytes of a spool file that the stream must use, so that its tokens are stored."""
_MOST_BYTES = 1 << 30
"""Largest spool file whose tokens are stored. Files that can be split have up to 256 MB."""
_ROWS = 1 << 20
"""Number of index entries that are read at a time."""
_LIMITS = tuple(1 << power for power in range(10, 32, 3))
"""Values of `StoreTokensTask.most_words`: few, so that streams of different sizes find the same tokens."""
_MAX_MAPS = 128
"""Number of spool files whose tokens are kept mapped into memory. Each takes two file descriptors, and systems usually
allow 1024."""


class TokenStore(TaskStore):
    """The results of finished tasks of the class `StoreTokensTask`, in a folder."""

    def keys(self, task: "StoreTokensTask") -> list[str]:
        # Tokens that were stored for a larger limit also serve a smaller one.
        limits = [limit for limit in _LIMITS if limit >= task.most_words]
        return [task.key(limit) for limit in limits]


@dataclass(frozen=True)
class StoreTokensTask(Task):
    """Task that encodes the documents of a spool file, except long ones, which the stream may cut into passages.

    The task writes two files. PREFIX is the argument `prefix` of `run`.
        PREFIX.tokens: the fairseq ids of all documents, without </s>.
        PREFIX.places: int64 [3, number of documents]: for each document, where its text begins in the spool file,
            the length of the text, both in bytes, and the index after its last token. A document that was left out has
            no tokens.
    """

    spool: str
    """The spool folder."""
    shard: int
    """Number of the spool file."""
    text_sha256: str
    documents_sha256: str
    tokenizer_file: str
    tokenizer_sha256: str
    most_words: int
    """The largest number of words of a document that is encoded."""
    dtype: str
    """The integer type of stored tokens: uint16 or uint32."""
    code: str
    """Digest of the code and the libraries that encode (`provenance.encoding_digest`)."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        if self.code != encoding_digest():
            raise PrepError(
                "alma-prep or one of its libraries has changed since this run was started. Run the same command again."
            )
        tokenizer = cached_tokenizer(self.tokenizer_file, self.tokenizer_sha256)
        documents = np.load(documents_path(Path(self.spool), self.shard))
        path = text_path(Path(self.spool), self.shard)
        lengths = np.zeros(len(documents), np.int64)
        chosen = np.flatnonzero(documents["num_words"] <= self.most_words)
        num_bytes = documents["num_bytes"][chosen]
        with open(f"{prefix}.tokens", "wb") as file:
            for first, last in byte_ranges(num_bytes, 0, len(chosen), BATCH_BYTES):
                texts = []
                for document in documents[chosen[first:last]]:
                    heartbeat.beat("text encoding")  # for each text, because a read can take long
                    texts.append(read_range(path, int(document["offset"]), int(document["num_bytes"])))
                with heartbeat.computing():  # a document without white space can have 16 MB
                    encoded = tokenizer.encode(texts)
                lengths[chosen[first:last]] = [len(ids) for ids in encoded]
                (np.concatenate(encoded) + NUM_SPECIAL).astype(self.dtype).tofile(file)
        np.stack([documents["offset"], documents["num_bytes"], np.cumsum(lengths)]).tofile(f"{prefix}.places")
        return {}

    def key(self, most_words: int) -> str:
        """Return the digest of all that the result depends on, for a value of `most_words`. Paths do not matter."""
        task = replace(self, spool="", shard=0, tokenizer_file="", most_words=most_words)
        return hashlib.sha256(task.description().encode()).hexdigest()


class Stored(NamedTuple):
    """The cache in which tokens are stored."""

    cache: Path
    """The folder of the cache."""
    longest: int
    """The largest number of words of a document that the stream does not cut into passages."""
    code: str
    """Digest of the code and the libraries that encode, from before the sources were read."""


def tokens_folder(work: WorkFolder) -> Path:
    """Return the folder with the tokens of documents in the work folder."""
    return work.folder / "tokens"


def store_tokens(
    index: Index, tokenizer_file: Path, tokenizer_sha256: str, dtype: str, stored: Stored, work: WorkFolder,
    executor: Executor,
) -> None:  # fmt: skip
    """Encode the documents of all spool files that the index uses, or take their tokens from the cache.

    Args:
        index: the passages in their final order.
        tokenizer_file: the tokenizer file of the stream.
        tokenizer_sha256: its digest.
        dtype: the integer type of stored tokens: uint16 or uint32.
        stored: the cache.
        work: the work folder. The tokens are in `tokens_folder` then.
        executor: runs the tasks.
    """
    used_bytes = _bytes_by_shard(index.passages)
    most_words = next((limit for limit in _LIMITS if limit >= stored.longest), _LIMITS[-1])
    tasks = []
    for shard in range(len(used_bytes)):
        files = mark_of(index.spool, shard)["files"]
        text, documents = (files[path(index.spool, shard).name]["sha256"] for path in (text_path, documents_path))
        of_tokenizer = (str(tokenizer_file), tokenizer_sha256)
        where = (str(index.spool), shard, text, documents)
        tasks.append(StoreTokensTask(*where, *of_tokenizer, most_words, dtype, stored.code))
    step, store = Step(tokens_folder(work), tasks), TokenStore(stored.cache / "tokens", is_cache=True)
    sizes = [text_path(index.spool, shard).stat().st_size for shard in range(len(tasks))]
    # A file of which the stream uses little is left out, because most of its tokens would be of no use. So is a file
    # that is much larger than others, because one task would encode all of it.
    used = [
        shard
        for shard in range(len(tasks))
        if _LEAST_USED * sizes[shard] < used_bytes[shard] and sizes[shard] <= _MOST_BYTES
    ]
    _remove_others(step.folder, used)
    take_finished(step, [store], used)
    with Bar("encode documents", sum(sizes[shard] for shard in used), "bytes") as bar:

        def on_done(number: int) -> None:
            bar.advance(sizes[number])
            store.put(step, number)

        step.run(executor, on_done, numbers=used)


def _remove_others(folder: Path, numbers: Sequence[int]) -> None:
    """Remove the files of all tasks but `numbers` from the folder of the step.

    An earlier call, which was killed, may have stored tokens of spool files that are left out now. It may have had
    another tokenizer, and `stored_tokens` would read them.
    """
    names = {f"{number:06d}" for number in numbers}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name[:6].isdigit() and path.name[:6] not in names:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _bytes_by_shard(passages: np.ndarray) -> np.ndarray:
    """Return the number of bytes of the passages of each spool file."""
    total = np.zeros(0, np.int64)
    for start in range(0, len(passages), _ROWS):
        part = np.array(passages[["shard", "num_bytes"]][start : start + _ROWS])
        found = np.bincount(part["shard"], part["num_bytes"], len(total)).astype(np.int64)
        total = found + np.pad(total, (0, len(found) - len(total)))
    return total


def stored_tokens(folder: Path, dtype: str, entries: np.ndarray, beat: Callable[[], None]) -> dict[int, np.ndarray]:
    """Return the fairseq ids of the passages whose tokens are stored, without </s>.

    Args:
        folder: the folder `tokens_folder`, after `store_tokens`.
        dtype: the integer type of stored tokens.
        entries: the index entries (`index.ENTRY`) of the passages.
        beat: called for each passage.

    Returns:
        Position in `entries` -> ids.
    """
    found = {}
    by_shard = np.argsort(entries["shard"], kind="stable")
    for numbers in np.split(by_shard, np.flatnonzero(np.diff(entries["shard"][by_shard])) + 1):
        opened = _open(folder, int(entries["shard"][numbers[0]]), dtype)
        if opened is None:
            continue
        (offsets, num_bytes, ends), tokens = opened
        wanted = entries[numbers]
        rows = np.minimum(np.searchsorted(offsets, wanted["offset"]), len(offsets) - 1)
        # The first passage of a document that is cut begins where the document begins, but is shorter.
        is_whole = (offsets[rows] == wanted["offset"]) & (num_bytes[rows] == wanted["num_bytes"])
        starts = np.where(rows > 0, ends[rows - 1], 0)
        for number, start, end in zip(
            numbers[is_whole].tolist(), starts[is_whole].tolist(), ends[rows[is_whole]].tolist(), strict=True
        ):
            beat()
            if end > start:
                found[number] = tokens[start:end].copy()
    return found


@functools.lru_cache(_MAX_MAPS)
def _open(folder: Path, shard: int, dtype: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places and the tokens of the documents of a spool file, mapped into memory. None: none are stored."""
    prefix = Step(folder, ()).prefix(shard)
    try:
        places = _mapped(f"{prefix}.places", "int64")
    except FileNotFoundError:
        return None
    return (places.reshape(3, -1), _mapped(f"{prefix}.tokens", dtype)) if len(places) else None


def _mapped(path: str, dtype: str) -> np.ndarray:
    """Map a file into memory. np.memmap takes ten times as long, and a stream maps a file for every few passages."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # cannot be mapped
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)

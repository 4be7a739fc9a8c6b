"""Keep the tokens of passages in the cache (--cache), for other streams that have the same tokenizer.

Passages are encoded in the order of the stream, which differs between streams. So with a cache, one task for each spool
file first collects the tokens of its passages, and `encode.EncodeTask` then only copies them.

In the cache, tokens/DIGEST is a store (`core.store`) for one spool file and one tokenizer. Each entry has the tokens of
some passages: the first stream stores those of all its passages, and another stream adds those that are missing.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.reading.index import Index, Texts, byte_ranges, write_index
from data_prep.reading.provenance import code_digest, versions
from data_prep.reading.spool import read_texts, text_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.tokenizers import NUM_SPECIAL, cached_tokenizer
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.store import Store

BATCH_BYTES = 1 << 20
"""Approximate number of bytes of text that a task encodes at a time."""


@dataclass(frozen=True)
class StoreTokensTask(Task):
    """Task that collects the tokens of the passages in a spool file, from the cache or by encoding them.

    The task writes two files. An entry of the cache has the same files.
        PREFIX.tokens: the fairseq ids of the passages, without </s>.
        PREFIX.places: int64 [4, number of passages], ordered by the first row: for each passage, where its text begins
            in the spool file, the length of the text, both in bytes, and where its tokens begin and end.

    The result of the task is why new tokens could not be stored in the cache ("not_stored"), or "".
    """

    cache: str
    text_sha256: str
    """SHA-256 digest of the spool file."""
    tokenizer_file: str
    tokenizer_sha256: str
    texts: Texts
    """The passages in the spool file, ordered by their places."""
    dtype: str

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        passages, spool = np.asarray(self.texts.entries()), Path(self.texts.spool)
        tokenizer = cached_tokenizer(self.tokenizer_file, self.tokenizer_sha256)
        # The digest of the code is that of this process, which may be a job that has started much later than the run.
        key = json.dumps([self.text_sha256, self.tokenizer_sha256, self.dtype, code_digest(), versions()])
        store = Store(Path(self.cache) / "tokens" / hashlib.sha256(key.encode()).hexdigest(), durable=False)
        ranges = np.full((len(passages), 2), -1)
        with open(f"{prefix}.tokens", "wb") as file:

            def add(number: int, ids: np.ndarray) -> None:
                start = file.tell() // ids.itemsize
                ranges[number] = start, start + len(ids)
                file.write(ids.data)
                heartbeat.beat("text encoding")

            for path in sorted(store.folder.glob("?" * 64)):
                if store.take(path.name) is not None:
                    for number, ids in _read(f"{path}/", passages, self.dtype):
                        # Two streams that were made at the same time can store the same tokens.
                        if ranges[number, 0] < 0:
                            add(number, ids)
            missing, new_start = np.flatnonzero(ranges[:, 0] < 0), file.tell()
            for start, end in byte_ranges(passages["num_bytes"][missing], 0, len(missing), BATCH_BYTES):
                numbers = missing[start:end]
                texts = read_texts(spool, passages[numbers], lambda: heartbeat.beat("text encoding"))
                with heartbeat.computing():  # a passage without white space can have 16 MB
                    encoded = tokenizer.encode(texts)
                for number, ids in zip(numbers.tolist(), encoded, strict=True):
                    add(number, (ids + NUM_SPECIAL).astype(self.dtype))
        places = np.stack([passages["offset"], passages["num_bytes"], *ranges.T])
        places.tofile(f"{prefix}.places")
        try:
            if len(missing):
                new = places[:, missing]
                new[2:] -= new_start // np.dtype(self.dtype).itemsize
                with store.writing(hashlib.sha256(new.tobytes()).hexdigest()) as folder:
                    new.tofile(folder / "places")
                    with open(f"{prefix}.tokens", "rb") as source, open(folder / "tokens", "wb") as target:
                        source.seek(new_start)
                        shutil.copyfileobj(source, target)
        except OSError as error:  # for example, the cache is full or read-only
            return {"not_stored": str(error)}
        return {"not_stored": ""}


def store_tokens(
    index: Index, tokenizer_file: Path, tokenizer_sha256: str, dtype: str, cache: str, work: WorkFolder
) -> None:
    """Collect the tokens of all passages in the folder "tokens" of the work folder, for `stored_tokens`.

    See `encode.encode` for the arguments.
    """
    shards, path = index.passages["shard"], work.folder / "by_place.npy"
    order = np.lexsort((index.passages["offset"], shards))
    write_index(path, index.passages, order)
    by_place = index._replace(path=path, sha256=sha256_of(path))
    weights = np.bincount(shards, index.passages["num_bytes"]).astype(np.int64).tolist()
    cuts = np.searchsorted(shards[order], np.arange(len(weights) + 1)).tolist()
    tasks = []
    for shard in range(len(weights)):
        text = mark_of(index.spool, shard)["files"][text_path(index.spool, shard).name]["sha256"]
        source = (str(Path(cache).absolute()), text, str(tokenizer_file), tokenizer_sha256)
        tasks.append(StoreTokensTask(*source, by_place.texts(cuts[shard], cuts[shard + 1]), dtype))
    results = work.run("tokens", tasks, "encode documents", "bytes", weights).results()
    if errors := [result["not_stored"] for result in results if result["not_stored"]]:
        note(f"not all tokens are stored in the cache {cache}: {errors[0]}")


def stored_tokens(folder: Path, dtype: str, passages: np.ndarray, beat: Callable[[], None]) -> list[np.ndarray]:
    """Return the fairseq ids of passages, without </s>, after `store_tokens`.

    Args:
        folder: the folder "tokens" of the work folder.
        dtype: the integer type of stored tokens.
        passages: the index entries (`index.ENTRY`) of the passages.
        beat: called for each passage.
    """
    found = [np.empty(0, dtype)] * len(passages)
    by_shard = np.argsort(passages["shard"], kind="stable")
    for numbers in np.split(by_shard, np.flatnonzero(np.diff(passages["shard"][by_shard])) + 1):
        prefix = Step(folder, ()).prefix(int(passages["shard"][numbers[0]]))
        for which, ids in _read(f"{prefix}.", passages[numbers], dtype):
            beat()
            found[numbers[which]] = ids
    return found


def _read(prefix: str, passages: np.ndarray, dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the ids of each of these passages of a spool file whose tokens are in the files PREFIX*."""
    offsets, num_bytes, starts, ends = np.fromfile(f"{prefix}places", np.int64).reshape(4, -1)
    rows = np.minimum(np.searchsorted(offsets, passages["offset"]), len(offsets) - 1)
    # Passages of a document that two streams cut in different ways may only begin at the same place.
    is_found = (offsets[rows] == passages["offset"]) & (num_bytes[rows] == passages["num_bytes"])
    item, found = np.dtype(dtype).itemsize, rows[is_found]
    with open(f"{prefix}tokens", "rb") as file:
        for number, start, end in zip(np.flatnonzero(is_found).tolist(), starts[found], ends[found], strict=True):
            file.seek(start * item)
            yield number, np.frombuffer(file.read((end - start) * item), dtype)

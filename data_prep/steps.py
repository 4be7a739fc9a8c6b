"""The way of the data, step by step: spool, plan, cut, order, train the tokenizer, encode, write."""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import partition
from data_prep.dictionary import EOS, NUM_SPECIAL, dictionary_size, dictionary_text, symbols
from data_prep.errors import PrepError
from data_prep.mmap_writer import MMapWriter, best_dtype, sequence_sizes, sync
from data_prep.progress import Step, note
from data_prep.settings import PrepSettings
from data_prep.sources import Part, Source, SourceFile, fingerprint, merge_skipped, split_into_parts
from data_prep.spool import ENTRY, cut_documents, read_index, read_text, spool_parts, write_index
from data_prep.stream_folder import WorkFolder
from data_prep.tokenization import TOKENIZERS, Tokenizer
from data_prep.workers import Workers
from fairseq_alma.core.stream_folder import FORMAT_VERSION, split_prefix

MIN_SHARD_BYTES = 2 << 20
MAX_SHARDS = 500
TASK_BYTES = 1 << 20
"""Text that a worker cuts or encodes at a time."""


def make_pieces(
    settings: PrepSettings, files: dict[Source, list[SourceFile]], work: WorkFolder, workers: Workers
) -> dict:
    """Write every piece of the stream into the work folder; return what stream.json is to say."""
    documents, sources = _spool_sources(settings, files, work, workers)
    total_words = sum(source["words"] for source in sources)
    plan = partition.make_plan(total_words, settings.num_mega_batches, settings.valid_words, settings.passage_words)
    _order_passages(settings, plan, documents, work, workers)
    del documents  # a gigabyte for every 19 million
    passages = read_index(work.spool)
    cuts = partition.cut_points(passages["num_words"], plan.valid_words, settings.num_mega_batches)

    tokenizer_file = _train_tokenizer(settings, passages, cuts, work)
    pieces = TOKENIZERS[settings.tokenizer](tokenizer_file).pieces()
    if len(pieces) < settings.vocab_size:
        note(
            f"warning: the training text gives {len(pieces)} symbols, not {settings.vocab_size}: "
            f"stream.json records vocab_size {len(pieces)}"
        )
    num_symbols = dictionary_size(len(pieces))
    splits, counts = _encode_splits(settings, passages, cuts, num_symbols, tokenizer_file, work, workers)
    dict_file = _write_dictionary(pieces, counts, work)
    return {
        "format_version": FORMAT_VERSION,
        "num_mega_batches": settings.num_mega_batches,
        "seed": settings.seed,
        "vocab_size": len(pieces),
        "dictionary_size": num_symbols,
        "dtype": best_dtype(num_symbols),
        "tokenizer": {
            "kind": settings.tokenizer,
            "file": tokenizer_file.name,
            "sha256": _sha256(tokenizer_file),
            "dict_sha256": _sha256(dict_file),
        },
        "sources": sources,
        "settings": settings.recorded(plan.valid_words, plan.passage_words),
        "command": settings.command(),
        "splits": splits,
    }


def _spool_sources(
    settings: PrepSettings, files: dict[Source, list[SourceFile]], work: WorkFolder, workers: Workers
) -> tuple[np.ndarray, list[dict]]:
    """Copy all documents into the spool: (ENTRY per document, what stream.json says of each source)."""
    total_bytes = sum(file.num_bytes for source_files in files.values() for file in source_files)
    shard_bytes = max(MIN_SHARD_BYTES, total_bytes // MAX_SHARDS)
    documents, records, num_shards = [], [], 0
    with Step("read sources", total_bytes, "bytes") as step:
        for source, source_files in files.items():
            batches = list(_batches(split_into_parts(source, source_files, shard_bytes), shard_bytes))
            tasks = [(work.spool, shard, settings.seed, batch) for shard, batch in enumerate(batches, start=num_shards)]
            num_shards += len(tasks)
            found, skipped = [np.empty(0, ENTRY)], []
            for batch, spooled in zip(batches, workers.run_in_order(spool_parts, tasks), strict=True):
                found.append(spooled.entries)
                skipped += spooled.skipped
                step.advance(sum(part.end - part.start for part in batch))
            entries = np.concatenate(found)
            documents.append(entries)
            records.append(
                {
                    "kind": source.kind,
                    "path": source.path,
                    "files": len(source_files),
                    "fingerprint": fingerprint(source_files),
                    "documents": len(entries),
                    "words": int(entries["num_words"].sum(dtype=np.int64)),
                    "bytes": int(entries["num_bytes"].sum()),
                    "skipped": [{"name": entry.name, "reason": entry.reason()} for entry in merge_skipped(skipped)],
                }
            )
            if not len(entries):
                raise PrepError(_no_documents(source, records[-1]))
    return np.concatenate(documents), records


def _no_documents(source: Source, record: dict) -> str:
    message = f"source {source} holds no documents in {record['files']} files"
    if record["skipped"]:
        first = record["skipped"][0]
        message += f"; {len(record['skipped'])} were skipped, the first {first['name']}: {first['reason']}"
    return f"{message}. Check the path and the kind."


def _batches(parts: list[Part], most_bytes: int) -> Iterator[list[Part]]:
    """Group neighbouring parts up to `most_bytes`, so that many small files make few spool files."""
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.end - part.start > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.end - part.start
    yield batch


def _order_passages(
    settings: PrepSettings, plan: partition.Plan, documents: np.ndarray, work: WorkFolder, workers: Workers
):
    """Cut long documents into passages, and write the index of all passages in their seeded order."""
    is_long = documents["num_words"] > plan.limit_words
    long_documents = documents[is_long]
    tasks = [
        (work.spool, settings.seed, plan, long_documents[start:end])
        for start, end in _ranges(long_documents, 0, len(long_documents))
    ]
    passages = [documents[~is_long]]
    with Step("cut long documents", len(long_documents), "documents") as step:
        for task, cut in zip(tasks, workers.run_in_order(cut_documents, tasks), strict=True):
            passages.append(cut)
            step.advance(len(task[-1]))
    # The order of sources and files ends here: what follows depends on content and seed alone.
    write_index(work.spool, partition.in_order(np.concatenate(passages)))


def _ranges(entries: np.ndarray, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Split entries start..end into ranges of about TASK_BYTES of text, at least one entry each."""
    ends = np.cumsum(entries["num_bytes"][start:end])
    done_bytes = 0
    position = start
    while position < end:
        stop = max(position + 1, start + int(np.searchsorted(ends, done_bytes + TASK_BYTES)))
        stop = min(stop, end)
        yield position, stop
        done_bytes, position = int(ends[stop - start - 1]), stop


def _train_tokenizer(settings: PrepSettings, passages: np.ndarray, cuts: list[int], work: WorkFolder) -> Path:
    """Train on mega-batches 1..B alone and write the tokenizer's file."""
    tokenizer = TOKENIZERS[settings.tokenizer]
    start, end = cuts[1], cuts[-2]  # neither the validation set before nor the test set behind
    num_words = int(passages["num_words"][start:end].sum(dtype=np.int64))
    stride = math.ceil(num_words / (tokenizer.max_training_words or num_words))
    with Step(f"train {settings.tokenizer}", num_words // stride, "words") as step:
        # A process of its own gives the memory back, and may use all cores where the pool's workers use one each.
        with Workers(1, tokenizer_threads=settings.workers) as trainer:
            arguments = (settings.tokenizer, settings.vocab_size, work.spool, range(start, end, stride))
            content = trainer.run(_train_on_passages, *arguments)
        step.advance(num_words // stride)
    path = work.stream / tokenizer.file_name
    with open(path, "wb") as file:
        file.write(content)
        sync(file)
    return path


def _train_on_passages(kind: str, vocab_size: int, spool: Path, numbers: range) -> bytes:
    """In a worker: the tokenizer's file."""
    passages = read_index(spool)
    return TOKENIZERS[kind].train((read_text(spool, passages[number]) for number in numbers), vocab_size)


def _encode_splits(
    settings: PrepSettings,
    passages: np.ndarray,
    cuts: list[int],
    num_symbols: int,
    tokenizer_file: Path,
    work: WorkFolder,
    workers: Workers,
) -> tuple[dict[str, dict], np.ndarray]:
    """Write every split's dataset: (what stream.json says of each, how often training text has each fairseq id)."""
    dtype = best_dtype(num_symbols)
    counts = np.zeros(num_symbols, dtype=np.int64)
    bounds = dict(zip(partition.split_order(settings.num_mega_batches), itertools.pairwise(cuts), strict=True))
    ranges = {name: list(_ranges(passages, start, end)) for name, (start, end) in bounds.items()}
    # One queue over all splits: no worker waits for a split to end.
    tasks = (
        (settings.tokenizer, tokenizer_file, work.spool, start, end, dtype)
        for start, end in itertools.chain.from_iterable(ranges.values())
    )
    results = workers.run_in_order(_encode_passages, tasks)
    splits = {}
    with Step("encode", int(passages["num_bytes"].sum()), "bytes") as step:
        for name, (split_start, split_end) in bounds.items():
            prefix = split_prefix(work.stream, name)
            prefix.parent.mkdir()
            num_tokens, num_sequences = 0, 0
            with MMapWriter(prefix, dtype) as writer:
                for start, end in ranges[name]:
                    tokens, passage_tokens = next(results)
                    sizes = sequence_sizes(passage_tokens)
                    writer.write(tokens, sizes)
                    num_tokens, num_sequences = num_tokens + len(tokens), num_sequences + len(sizes)
                    if name not in ("valid", "test"):
                        counts += np.bincount(tokens, minlength=num_symbols)
                    step.advance(int(passages["num_bytes"][start:end].sum()))
            splits[name] = _text_counts(passages[split_start:split_end])
            splits[name] |= {"sequences": num_sequences, "tokens": num_tokens, "sha256": writer.sha256()}
    return splits, counts


def _text_counts(passages: np.ndarray) -> dict:
    """What a split holds, before it is tokenized."""
    documents = passages["document"].copy().view(">u8").reshape(-1, 2)
    return {
        "documents": len(np.unique(documents, axis=0)),
        "passages": len(passages),
        "words": int(passages["num_words"].sum(dtype=np.int64)),
        "bytes": int(passages["num_bytes"].sum()),
    }


def _encode_passages(
    kind: str, tokenizer_file: Path, spool: Path, start: int, end: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """In a worker: (fairseq ids of passages start..end one after another, each with eos; tokens per passage)."""
    texts = [read_text(spool, passage) for passage in read_index(spool)[start:end]]
    encoded = _load_tokenizer(kind, tokenizer_file).encode(texts)
    passage_tokens = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
    tokens = np.full(passage_tokens.sum(), EOS, dtype=dtype)
    position = 0
    for ids in encoded:
        tokens[position : position + len(ids)] = ids + NUM_SPECIAL
        position += len(ids) + 1
    return tokens, passage_tokens


@functools.lru_cache(maxsize=1)
def _load_tokenizer(kind: str, file: Path) -> Tokenizer:
    return TOKENIZERS[kind](file)


def _write_dictionary(pieces: list[str], counts: np.ndarray, work: WorkFolder) -> Path:
    path = work.stream / "dict.txt"
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(dictionary_text(symbols(pieces), counts[NUM_SPECIAL:].tolist()))
        sync(file)
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

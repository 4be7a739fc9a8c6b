"""From passages in their order to fairseq's files: the tokenizer is frozen, all cores encode, pieces are joined."""

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.dictionary import EOS, NUM_SPECIAL, dictionary_size, dictionary_text, symbols
from data_prep.mmap_writer import MMapWriter, best_dtype, sequence_sizes, sync
from data_prep.pieces import Executor, Step, beat, in_one_go
from data_prep.progress import Bar, note
from data_prep.settings import PrepSettings
from data_prep.spool import read_index, read_text
from data_prep.stream_folder import WorkFolder
from data_prep.tokenization import TOKENIZERS, given_tokenizer, load_tokenizer
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import split_prefix

BATCH_BYTES = 1 << 20
"""Text that is encoded at a time."""
PIECE_BYTES = 16 << 20
"""Text of one piece of work."""


class Index(NamedTuple):
    """Where the passages lie, in the order in which they are written."""

    path: Path
    sha256: str
    """Tells pieces made from it from pieces of another."""
    spool: Path
    cuts: list[int]
    splits: list[str]
    """A name for what lies between each two cuts."""

    @property
    def passages(self) -> np.ndarray:
        return read_index(self.path)

    def training(self) -> tuple[int, int]:
        """The passages of all mega-batches."""
        which = [number for number, name in enumerate(self.splits) if name not in ("valid", "test")]
        return self.cuts[which[0]], self.cuts[which[-1] + 1]


def make_tokenizer(settings: PrepSettings, index: Index, work: WorkFolder, executor: Executor) -> Path:
    """Write the tokenizer's file: the one that was given, or one trained on mega-batches 1..B alone."""
    if settings.tokenizer not in TOKENIZERS:
        name, content = given_tokenizer(settings.tokenizer)
        return _write(work.stream / name, content)
    tokenizer = TOKENIZERS[settings.tokenizer]
    start, end = index.training()  # neither the validation set nor the test set
    num_words = int(index.passages["num_words"][start:end].sum(dtype=np.int64))
    most = min(settings.tokenizer_words, tokenizer.max_training_words or settings.tokenizer_words)
    stride = max(1, math.ceil(num_words / most))
    where = (str(index.spool), str(index.path), index.sha256, start, end, stride)
    task = (settings.tokenizer, settings.vocab_size, *where)
    step = Step(work.folder / "tokenizer", "data_prep.encoding:train_tokenizer", [task])
    with Bar(f"train {settings.tokenizer}", num_words // stride, "words") as bar:
        step.run(executor, lambda piece: bar.advance(num_words // stride), threads=settings.workers)
    return _write(work.stream / tokenizer.file_name, Path(f"{step.prefix(0)}.tokenizer").read_bytes())


def _write(path: Path, content: bytes) -> Path:
    with open(path, "wb") as file:
        file.write(content)
        sync(file)
    return path


def train_tokenizer(
    prefix: Path,
    kind: str,
    vocab_size: int,
    spool: str,
    index: str,
    index_sha256: str,
    start: int,
    end: int,
    stride: int,
) -> dict:
    """In a worker: the tokenizer's file, from every `stride`-th passage of start..end."""
    passages = read_index(Path(index))

    def texts() -> Iterator[str]:
        for number in range(start, end, stride):
            beat("the text for the tokenizer")
            yield read_text(Path(spool), passages[number])

    with in_one_go():
        content = TOKENIZERS[kind].train(texts(), vocab_size)
    Path(f"{prefix}.tokenizer").write_bytes(content)
    return {}


class Encoded(NamedTuple):
    """What was written."""

    splits: dict[str, dict]
    """What stream.json says of each."""
    counts: np.ndarray
    """How often training text has each fairseq id."""


def encode(index: Index, tokenizer_file: Path, num_symbols: int, work: WorkFolder, executor: Executor) -> Encoded:
    """Write every split's dataset. Pieces are encoded anywhere; joining them is copying."""
    dtype, passages = best_dtype(num_symbols), index.passages
    tokenizer_sha256 = sha256_of(tokenizer_file)
    tasks: list[tuple] = []
    weights: list[int] = []
    pieces_of: dict[str, range] = {}
    for name, (start, end) in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        ranges = list(byte_ranges(passages["num_bytes"], start, end, PIECE_BYTES))
        pieces_of[name] = range(len(tasks), len(tasks) + len(ranges))
        for first, last in ranges:
            where = (str(index.spool), str(index.path), index.sha256, first, last)
            tasks.append((str(tokenizer_file), tokenizer_sha256, *where, dtype, num_symbols))
            weights.append(int(passages["num_bytes"][first:last].sum(dtype=np.int64)))
    step = Step(work.folder / "encode", "data_prep.encoding:encode_passages", tasks)
    with Bar("encode", sum(weights), "bytes") as bar:
        step.run(executor, lambda piece: bar.advance(weights[piece]))
    counts = np.zeros(num_symbols, dtype=np.int64)
    splits = {}
    for name, (start, end) in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        prefix = split_prefix(work.stream, name)
        prefix.parent.mkdir(exist_ok=True)
        num_tokens = num_sequences = 0
        with MMapWriter(prefix, dtype) as writer:
            for piece in pieces_of[name]:
                tokens = np.fromfile(f"{step.prefix(piece)}.tokens", dtype)
                sizes = np.fromfile(f"{step.prefix(piece)}.sizes", np.int32)
                writer.write(tokens, sizes)
                num_tokens, num_sequences = num_tokens + len(tokens), num_sequences + len(sizes)
                if name not in ("valid", "test"):
                    counts += np.fromfile(f"{step.prefix(piece)}.counts", np.int64)
        splits[name] = _text_counts(passages[start:end])
        splits[name] |= {"sequences": num_sequences, "tokens": num_tokens, "sha256": writer.sha256()}
    return Encoded(splits, counts)


def byte_ranges(num_bytes: np.ndarray, start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Split passages start..end into ranges of about `most` bytes of text, at least one passage each."""
    ends = np.cumsum(num_bytes[start:end], dtype=np.int64)
    done, position = 0, start
    while position < end:
        stop = max(position + 1, start + int(np.searchsorted(ends, done + most)))
        stop = min(stop, end)
        yield position, stop
        done, position = int(ends[stop - start - 1]), stop


def encode_passages(
    prefix: Path, tokenizer_file: str, tokenizer_sha256: str, spool: str, index: str, index_sha256: str,
    start: int, end: int, dtype: str, num_symbols: int,
) -> dict:  # fmt: skip
    """In a worker: the fairseq ids of passages start..end, each with eos, their lengths, and the counts of ids."""
    tokenizer = _load_tokenizer(tokenizer_file, tokenizer_sha256)
    passages = read_index(Path(index))
    counts = np.zeros(num_symbols, np.int64)
    with open(f"{prefix}.tokens", "wb") as tokens_file, open(f"{prefix}.sizes", "wb") as sizes_file:
        for first, last in byte_ranges(passages["num_bytes"], start, end, BATCH_BYTES):
            encoded = tokenizer.encode([read_text(Path(spool), passage) for passage in passages[first:last]])
            passage_tokens = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
            tokens = np.full(passage_tokens.sum(), EOS, dtype=dtype)
            position = 0
            for ids in encoded:
                tokens[position : position + len(ids)] = ids + NUM_SPECIAL
                position += len(ids) + 1
            tokens_file.write(tokens.data)
            sizes_file.write(sequence_sizes(passage_tokens).astype(np.int32).data)
            counts += np.bincount(tokens, minlength=num_symbols)
            beat("the encoding of text")
    counts.tofile(f"{prefix}.counts")
    return {}


@functools.lru_cache(maxsize=1)
def _load_tokenizer(file: str, sha256: str):
    return load_tokenizer(Path(file))


def _text_counts(passages: np.ndarray) -> dict:
    """What a split holds, before it is tokenized."""
    documents = np.ascontiguousarray(passages["document"]).view(">u8").reshape(-1, 2)
    order = np.lexsort((documents[:, 1], documents[:, 0]))
    changes = (documents[order[1:]] != documents[order[:-1]]).any(axis=1)
    return {
        "documents": int(changes.sum()) + 1 if len(passages) else 0,
        "passages": len(passages),
        "words": int(passages["num_words"].sum(dtype=np.int64)),
        "bytes": int(passages["num_bytes"].sum(dtype=np.int64)),
    }


def check_vocabulary(settings: PrepSettings, tokenizer_file: Path) -> list[str]:
    """The tokenizer's symbols; a note if they are fewer than was asked for."""
    pieces = load_tokenizer(tokenizer_file).pieces()
    if settings.tokenizer in TOKENIZERS and len(pieces) < settings.vocab_size:
        note(
            f"warning: the training text gives {len(pieces)} symbols, not {settings.vocab_size}: "
            f"stream.json records vocab_size {len(pieces)}"
        )
    return pieces


def write_dictionary(pieces: list[str], counts: np.ndarray, work: WorkFolder) -> Path:
    """dict.txt, with the counts of training text."""
    assert len(counts) == dictionary_size(len(pieces))
    content = dictionary_text(symbols(pieces), counts[NUM_SPECIAL:].tolist())
    return _write(work.stream / "dict.txt", content.encode("utf-8"))

"""Copy a stream with more symbols in its vocabulary: `alma-prep grow-vocab STREAM NEW --symbols N`.

The new symbols are learned from the newest text, and have the ids after the old ones, so a model keeps all its
embeddings. All text is decoded and encoded again, also the held-out text, so that scores in bits per byte of models
with the old and with the new vocabulary compare the same text. The division of the text into splits does not change.

The copy is a stream of its own, because scores per token of two vocabularies cannot be compared, and so must not be in
one ledger.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, MMapWriter, best_dtype, sequence_sizes
from data_prep.encoding.passages import passages_of, texts_of
from data_prep.encoding.stream_tokenizer import write_dictionary
from data_prep.errors import NothingNew, PrepError
from data_prep.running.progress import Bar, note
from data_prep.running.stream_folder import (
    SHARD_NAME,
    check_bytes,
    part_of_stream,
    read_manifest,
    read_stream,
)
from data_prep.running.work_folder import full_disk_reported, lease_held_if_writable, publish, unfinished_copy
from data_prep.tokenization.given import given_tokenizer
from data_prep.tokenization.growth import with_more_symbols, words_as_symbols
from data_prep.tokenization.tokenizers import (
    EOS,
    NUM_SPECIAL,
    PAD,
    ByteBPE,
    Tokenizer,
    dictionary_size,
    load_tokenizer,
)
from data_prep.tokenization.word_counts import count_words
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_description import STREAM_FILE, read_description
from fairseq_alma.core.stream_folder import StreamFolder, split_prefix


def grow_vocabulary(source: Path, target: Path, num_symbols: int, learn_from: Sequence[int] = ()) -> dict:
    """Copy a stream with more symbols in its vocabulary. If the copy exists, it is only checked.

    Args:
        source: the folder of a finished stream with a byte-level BPE tokenizer. It is not changed.
        target: the folder of the copy.
        num_symbols: largest number of symbols to add.
        learn_from: the mega-batches from whose text they are learned; by default the last one.

    Returns:
        The content of stream.json of the copy.

    Raises:
        PrepError: if there is no stream, if it is damaged or has another kind of tokenizer, if there is no such
            mega-batch, if its text gives no symbols, or if `target` contains something else.
    """
    if num_symbols < 1:
        raise PrepError(f"--symbols {num_symbols}: give the number of symbols to add, 1 or more.")
    if not (source / STREAM_FILE).is_file():
        raise PrepError(f"there is no stream in {source}: give the folder that alma-prep has written.")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise PrepError(f"{target} is in the folder of the stream {source}: choose another folder.")
    # So that neither `--extend` nor alma-forget changes the stream while it is read.
    with lease_held_if_writable(source):
        return _grow(source, target, num_symbols, learn_from)


def _grow(source: Path, target: Path, num_symbols: int, learn_from: Sequence[int]) -> dict:
    stream = read_stream(source)
    assert stream is not None
    learn_from = sorted({*learn_from} or {stream.num_mega_batches})
    if outside := [t for t in learn_from if not 1 <= t <= stream.num_mega_batches]:
        raise PrepError(f"{source} has no mega-batch {outside[0]}: it has {stream.num_mega_batches} of them.")
    file = source / stream.description["tokenizer"]["file"]
    given_tokenizer(str(file))  # The stream may be somebody else's: this refuses a file with few symbols and large ids.
    tokenizer = load_tokenizer(file)
    if not (isinstance(tokenizer, ByteBPE) and tokenizer.is_lossless):
        raise PrepError(
            f"the tokenizer of {source} is no plain byte-level BPE (GPT-2's, without added tokens), so text could be "
            "lost when it is decoded: make a stream from its sources, with a tokenizer of more symbols "
            "(--tokenizer FILE)."
        )
    grown_from: dict[str, Any] = {
        "dict_sha256": stream.dictionary_digest,
        "num_symbols": len(tokenizer.symbols()),
        "wanted": num_symbols,
        "learned_from": learn_from,
    }
    if (target / STREAM_FILE).exists():
        return _checked_copy(target, stream, grown_from)
    check_bytes(source)
    with full_disk_reported(target), unfinished_copy(target) as work:
        texts = (text for t in learn_from for text in texts_of(stream, f"mega_batch_{t}", tokenizer))
        words = words_as_symbols(file.read_bytes(), count_words(texts))
        (work.stream / file.name).write_bytes(with_more_symbols(file.read_bytes(), words, num_symbols))
        grown = ByteBPE(work.stream / file.name)
        num_new = len(grown.symbols()) - grown_from["num_symbols"]
        if num_new == 0:
            raise NothingNew(f"no pair of symbols occurs twice in the text from which symbols are learned, in {source}")
        if num_new < num_symbols:
            note(f"warning: only {num_new:,} symbols were added, because no other pair of symbols occurs twice")
        write_dictionary(grown.symbols(), work)
        description = _copied(stream, tokenizer, grown, work.stream)
        description["tokenizer"] = {
            **description["tokenizer"],
            "sha256": sha256_of(work.stream / file.name),
            "dict_sha256": sha256_of(work.stream / "dict.txt"),
        }
        description["grown_from"] = [*description.get("grown_from", []), grown_from]
        publish(target, work, description, part_of_stream(read_manifest(source), stream.description))
    return description


def _checked_copy(target: Path, source: StreamFolder, grown_from: Mapping) -> dict:
    """Check that `target` is the copy that `grow_vocabulary` would make, and return the content of its stream.json."""
    try:
        found = read_description(target)
    except StreamError:
        found = {}
    splits = [
        {name: one["words"] for name, one in each.get("splits", {}).items()} for each in (found, source.description)
    ]
    if found.get("grown_from", [])[-1:] != [grown_from] or splits[0] != splits[1]:
        raise PrepError(
            f"{target} exists and is not the copy of {source.path} with {grown_from['wanted']} new symbols, or one of "
            "the two has been changed since, for example extended: choose another folder."
        )
    check_bytes(target)
    note(f"{target} is complete: nothing to do")
    return found


def _copied(stream: StreamFolder, old: ByteBPE, new: ByteBPE, folder: Path) -> dict:
    """Write the shards of the copy into a folder, and return the content of its stream.json without the vocabulary."""
    size = dictionary_size(len(new.symbols()))
    sizes = {"vocab_size": len(new.symbols()), "dictionary_size": size, "dtype": best_dtype(size)}
    description = {**stream.description, **sizes}
    if "forgotten" in description:
        # The texts stay out of extensions. The certificates are of the other stream, and are not copied.
        description["forgotten"] = [{**one, "number": 0} for one in description["forgotten"]]
    for name in part_of_stream(read_manifest(stream.path), stream.description)["outputs"]:
        if SHARD_NAME.fullmatch(name) and name.startswith(("dedup/", "documents/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(stream.path / name, folder / name)
    names = [*stream.splits, *stream.period_splits]
    entries = {}
    with Bar("encode again", sum(stream.counts(name)["tokens"] for name in names), "tokens") as bar:
        for name in names:
            entries[name] = _copy_split(stream, name, old, new, folder, bar)
    description["splits"] = {name: entries[name] for name in description["splits"]}
    if "periods" in description:
        description["periods"] = [
            period | {part: entries[f"mega_batch_{t}/{part}"] for part in ("valid", "test")}
            for t, period in enumerate(description["periods"], start=1)
        ]
    return description


def _copy_split(stream: StreamFolder, name: str, old: ByteBPE, new: ByteBPE, folder: Path, bar: Bar) -> dict:
    """Write the data files of a split in the new encoding, and return its entry in stream.json."""
    prefix = split_prefix(folder, name)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rows_before, rows_after = [], []
    spans: list[list[int]] = []
    num_tokens = 0
    with MMapWriter(prefix, best_dtype(dictionary_size(len(new.symbols())))) as writer:
        for passages in passages_of(stream, name):
            encoded = _encode_again(passages, old, new)
            tokens = np.concatenate([part for ids in encoded for part in (ids, [EOS])])
            lengths = np.array([len(ids) + 1 for ids in encoded])
            sizes = sequence_sizes(lengths)
            writer.write(tokens, sizes)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens == PAD, [False]])))
            for start, end in (edges.reshape(-1, 2) + num_tokens).tolist():
                spans.append([start, end])
            rows_before += [-(-(len(ids) + 1) // MAX_SEQUENCE_TOKENS) for ids in passages]
            rows_after += (-(-lengths // MAX_SEQUENCE_TOKENS)).tolist()
            num_tokens += len(tokens)
            bar.advance(sum(len(ids) + 1 for ids in passages))
    if rows_after != rows_before:
        _leave_out_rows(folder / f"documents/{name}.parquet", rows_before, rows_after)
    entry = stream.counts(name) | {"tokens": num_tokens, "sequences": sum(rows_after)}
    return entry | {"sha256": sha256_of(prefix.with_suffix(".bin"))} | ({"masked": spans} if spans else {})


def _encode_again(passages: Sequence[np.ndarray], old: Tokenizer, new: Tokenizer) -> list[np.ndarray]:
    """Return the ids of passages, without </s>, in the new encoding. Masked tokens stay as they are."""
    last = NUM_SPECIAL + len(old.symbols())
    if any(((ids != PAD) & ((ids < NUM_SPECIAL) | (ids >= last))).any() for ids in passages):
        raise PrepError("the stream contains ids that are not in its vocabulary: copy it again, or make it again.")
    parts = [np.split(ids, np.flatnonzero(np.diff(ids == PAD)) + 1) for ids in passages]
    texts = [part for each in parts for part in each if len(part) and part[0] != PAD]
    found = iter(new.encode(old.decode_all([(part - NUM_SPECIAL).tolist() for part in texts])))
    return [
        np.concatenate(
            [np.empty(0, np.int64)]
            + [part if part[0] == PAD else next(found).astype(np.int64) + NUM_SPECIAL for part in each if len(part)]
        )
        for each in parts
    ]


def _leave_out_rows(path: Path, before: Sequence[int], after: Sequence[int]) -> None:
    """Leave out rows of a Parquet file of `documents`, because very long passages have fewer sequences than before."""
    import pyarrow.parquet

    starts = np.cumsum([0, *before[:-1]])
    kept = np.concatenate([np.arange(start, start + number) for start, number in zip(starts, after, strict=True)])
    table = pyarrow.parquet.read_table(path).take(pyarrow.array(kept))
    pyarrow.parquet.write_table(table, path, compression="zstd")

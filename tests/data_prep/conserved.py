"""The law of conservation: all text that alma-prep read is in the stream, or in a count with a reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet

from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, load_tokenizer
from fairseq_alma.core.stream_folder import StreamFolder, split_entry


def check_conserved(out: Path) -> None:
    """Check the documents, words and bytes of a stream and of each of its extensions, from its files alone."""
    stream = json.loads((out / "stream.json").read_text())
    extensions = stream.get("extensions", [])
    num_first = extensions[0]["mega_batches"][0] - 1 if extensions else stream["num_mega_batches"]
    names = [*(f"mega_batch_{t}" for t in range(1, num_first + 1)), "valid", "test"]
    if "periods" in stream:  # of a causal stream, only the text of the first period is in `valid` and `test`
        later = range(stream["periods_in_test"] + 1, num_first + 1)
        names += [f"mega_batch_{t}/{held_out}" for t in later for held_out in ("valid", "test")]
    _check_part(out, stream, stream, names)
    for extension in extensions:
        first, last = extension["mega_batches"]
        names = [f"mega_batch_{t}" for t in range(first, last + 1)]
        if "periods" in stream:
            names += [f"{name}/{held_out}" for name in list(names) for held_out in ("valid", "test")]
        _check_part(out, stream, extension, names)


def _check_part(out: Path, stream: dict, part: dict, names: list[str]) -> None:
    entries = [split_entry(stream, name) for name in names]
    for unit in ("words", "bytes"):
        read = sum(source[unit] for source in part["sources"])
        removed = sum(row[unit] for row in part["cleaning"])
        kept = sum(entry[unit] for entry in entries)
        assert read == kept + removed, (out, unit, read, kept, removed, part["cleaning"])
    rows = [row for row in part["cleaning"] if not row.get("changes_text")]
    # A passage is removed because of an overlap, and not its document. An extension can use what a share left out.
    if not any("overlap" in row["step"] for row in rows) and part is stream:
        documents = set()
        for name in names:
            with pyarrow.parquet.ParquetFile(out / "documents" / f"{name}.parquet") as file:
                documents.update(file.read(["document"]).column("document").to_pylist())
        # Exact copies have the same hash. If they are kept, they cannot be told apart.
        read, removed = (sum(row["documents"] for row in each) for each in (part["sources"], rows))
        if stream["settings"]["duplicates"] != "keep":
            assert read == len(documents) + removed, (out, read, len(documents), part["cleaning"])
    if stream["tokenizer"]["kind"] == "byte-bpe":  # which is lossless
        for name, entry in zip(names, entries, strict=True):
            assert sum(map(len, decoded(out, name))) == entry["bytes"], (out, name)


def decoded(out: Path, split: str) -> Iterator[bytes]:
    """Yield the text of each passage of a split, in UTF-8."""
    stream = StreamFolder.open(out)
    tokens = np.fromfile(f"{stream.prefix(split)}.bin", stream.description["dtype"]).astype(np.int64)
    tokenizer = load_tokenizer(out / stream.description["tokenizer"]["file"])
    for ids in np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]:
        yield tokenizer.decode((ids[:-1] - NUM_SPECIAL).tolist()).encode("utf-8")

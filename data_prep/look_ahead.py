"""Find what in a finished stream depends on later text: `alma-prep check --look-ahead STREAM`.

A stream does not look ahead if each mega-batch, and everything that a model uses before the next one arrives, would be
the same without the text of later periods. What can be compared is compared: the tokenizer is trained again on the
first mega-batch, dates of documents are compared with the limits of their periods,
and removed near copies with the documents of the stream. The rest follows from how the stream was made, by stream.json.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data_prep.copies.candidates import SURE_IN_STREAM
from data_prep.encoding.passages import texts_of
from data_prep.errors import PrepError
from data_prep.reading.index import sortable
from data_prep.reading.provenance import versions
from data_prep.reading.signatures import SignatureFiles, estimate_similarity
from data_prep.running.stream_folder import check_bytes, num_dedup_files, read_manifest, read_stream
from data_prep.sources.dates import date_text, parse_date, period_of
from data_prep.tokenization.tokenizers import TOKENIZERS, ByteBPE, load_tokenizer
from data_prep.tokenization.word_counts import count_words
from fairseq_alma.core.stream_folder import StreamFolder

_MAX_PAIRS = 1 << 28
"""Largest number of pairs of sketches that are compared, which takes minutes. Later near copies are not compared."""
_FORGOTTEN = "alma-forget has masked text of the first period, so it cannot be compared"

Verdict = Literal["looks ahead", "unknown", "ok"]


class Finding(NamedTuple):
    """What a quantity of a stream depends on."""

    verdict: Verdict
    quantity: str
    why: str


def check_stream(out: Path) -> StreamFolder:
    """Return the finished stream in `out`. Raise PrepError if there is none, or if a file has changed."""
    stream = read_stream(out)
    if stream is None:
        raise PrepError(f"there is no stream in {out}: give the folder that alma-prep has written.")
    check_bytes(out)
    return stream


def look_ahead(stream: StreamFolder) -> list[Finding]:
    """Return what each quantity of an undamaged stream depends on. Those that look ahead are first."""
    if not stream.num_periods:
        why = "not chronological: text of all dates is in each split. Give --partition chronological --causal"
        quantities = "mega-batches", "validation set", "tokenizer and dictionary", "copies"
        return [Finding("looks ahead", quantity, why) for quantity in quantities]
    calls = _calls(stream.description)
    found = [
        *_dates(stream, calls),
        *_limits(stream, calls),
        _of_first(stream, "valid", "validation set", "it chooses checkpoints, growth and waits"),
        *_sizes(stream.description, calls),
        *_copies(stream, calls),
        _tokenizer(stream),
        *_from_outside(stream.description),
        _of_first(stream, "test", "test set", "it measures, and chooses nothing"),
    ]
    order = {"looks ahead": 0, "unknown": 1, "ok": 2}
    return sorted(found, key=lambda finding: order[finding.verdict])


class _Call(NamedTuple):
    """Mega-batches that one call of alma-prep made."""

    first: int
    last: int
    settings: Mapping
    """The settings of the call, as stream.json records them."""

    @property
    def is_divided(self) -> bool:
        """Whether the text of several periods was available when these mega-batches were made."""
        return self.last > self.first

    @property
    def name(self) -> str:
        return f"mega-batches {self.first} to {self.last}" if self.is_divided else f"mega-batch {self.first}"


def _calls(description: Mapping) -> list[_Call]:
    extensions = description.get("extensions", [])
    num_first = extensions[0]["mega_batches"][0] - 1 if extensions else description["num_mega_batches"]
    bounds = [each["mega_batches"] for each in extensions]
    added = [_Call(first, last, each["settings"]) for (first, last), each in zip(bounds, extensions, strict=True)]
    return [_Call(1, num_first, description["settings"]), *added]


def _documents(stream: StreamFolder, split: str, column: str) -> list:
    import pyarrow.parquet  # here and not above, because the import takes long

    return pyarrow.parquet.read_table(stream.path / "documents" / f"{split}.parquet", columns=[column])[
        column
    ].to_pylist()


def _dates_of(stream: StreamFolder, *splits: str) -> np.ndarray:
    """Return the different dates of the documents of some splits, in order. Masked text (`alma-forget`) has no date."""
    texts = {text for split in splits for text in _documents(stream, split, "date") if text}
    return np.array(sorted(map(parse_date, texts)), np.int64)


def _splits_of(t: int) -> list[str]:
    return [f"mega_batch_{t}", f"mega_batch_{t}/valid", f"mega_batch_{t}/test"]


def _dates_at(stream: StreamFolder, calls: list[_Call], t: int) -> np.ndarray:
    """Return the different dates of the documents of a mega-batch. Late text counts as text of the new period."""
    dates = _dates_of(stream, *_splits_of(t))
    (call,) = (one for one in calls if one.first <= t <= one.last)
    if call.settings.get("late") == "as-new":
        dates = np.unique(np.maximum(dates, parse_date(stream.description["periods"][t - 1]["first_date"])))
    return dates


def _dates(stream: StreamFolder, calls: list[_Call]) -> Iterator[Finding]:
    """Compare the dates of the documents of each mega-batch with those of the next one."""
    found = {t: _dates_at(stream, calls, t) for t in range(1, stream.num_periods + 1)}
    is_late = False
    for (t, now), (later, then) in itertools.pairwise((t, dates) for t, dates in found.items() if len(dates)):
        if now[-1] > then[0]:
            is_late = True
            last, first = date_text(int(now[-1])), date_text(int(then[0]))
            what = f"it has text of {last}, and mega-batch {later} begins on {first}"
            yield Finding("looks ahead", f"mega-batch {t}", what)
    if not is_late:
        yield Finding("ok", "order of the text", "no mega-batch has text from after the start of the next one")


def _limits(stream: StreamFolder, calls: list[_Call]) -> Iterator[Finding]:
    """Look for limits between periods that were not given as dates."""
    for call in calls:
        period, quantity = call.settings.get("period"), f"limits of {call.name}"
        if not call.is_divided:
            yield Finding("ok", quantity, "all text that one call of alma-prep has read")
        elif period is None:
            why = "equal numbers of words, which depend on the total. Give --period"
            yield Finding("looks ahead", quantity, why)
        else:
            numbers = [
                set(period_of(period, _dates_at(stream, calls, t)).tolist()) for t in range(call.first, call.last + 1)
            ]
            numbers = [one for one in numbers if one]
            union = set().union(*numbers)
            if all(len(one) == 1 for one in numbers) and len(union) == len(numbers):
                yield Finding("ok", quantity, f"dates: --period {period}")
            else:
                yield Finding("looks ahead", quantity, f"they are not those of --period {period}")


def _of_first(stream: StreamFolder, split: str, quantity: str, use: str) -> Finding:
    """Compare the validation set or the test set with that of the first period."""
    dates, first = _dates_of(stream, split), _dates_of(stream, *_splits_of(1))
    if not len(dates) or not len(first):
        return Finding("unknown", quantity, _FORGOTTEN)
    last, end = date_text(int(dates[-1])), date_text(int(first[-1]))
    if dates[-1] > first[-1]:
        return Finding("looks ahead", quantity, f"it has text of up to {last}; the first period ends {end}. {use}")
    if stream.digest(split) != stream.digest(f"mega_batch_1/{split}"):
        return Finding("looks ahead", quantity, f"it is not the {split} text of the first period. {use}")
    return Finding("ok", quantity, f"text of the first period, which ends {end}")


def _sizes(description: Mapping, calls: list[_Call]) -> Iterator[Finding]:
    """Name the sizes that were computed from the number of words of all periods of a call."""
    is_causal = bool(description["settings"].get("causal"))
    for call in calls:
        if not call.is_divided or is_causal:
            continue
        yield Finding(
            "looks ahead", f"passages of {call.name}", "documents of at least 1% of the mean mega-batch are cut"
        )
        if call.first == 1:
            yield Finding("looks ahead", "held-out shares", "a share of the number of words of all periods")
        if call.settings.get("decontaminate"):
            why = "passages that overlap held-out text of later periods are left out"
            yield Finding("looks ahead", f"decontamination of {call.name}", why)
        if any("@" in source for source in call.settings["sources"]):
            why = "how much of a source is used depends on all of its text"
            yield Finding("looks ahead", f"shares of the sources in {call.name}", why)


def _copies(stream: StreamFolder, calls: list[_Call]) -> Iterator[Finding]:
    """Look for near copies that were removed although no earlier text of the stream is similar."""
    description, folder = stream.description, stream.path / "dedup"
    is_causal = bool(description["settings"].get("causal"))
    for call in calls:
        if call.is_divided and not is_causal and call.settings["duplicates"] == "near":
            why = "which pages of one template are compared depends on later pages"
            yield Finding("looks ahead", f"near copies in {call.name}", why)
    parts = [(t, t) for t in range(1, stream.num_periods + 1)] if is_causal else [call[:2] for call in calls]
    files = [SignatureFiles(folder / f"{number:04d}") for number in range(num_dedup_files(description))]
    if not all(each.sketches.is_file() for each in files):
        return
    kept, removed = [], []
    for (first, last), each in zip(parts, files, strict=True):
        names = {
            text
            for t in range(first, last + 1)
            for split in _splits_of(t)
            for text in _documents(stream, split, "document")
        }
        keys = sortable(np.fromfile(f"{each.prefix}.keys", "V16"))
        is_kept = np.isin(keys, sortable(np.array([bytes.fromhex(name) for name in names], "V16")))
        sketches = each.map_sketches()
        kept.append(sketches[is_kept])
        removed.append(sketches[~is_kept])
    num_kept = max(1, sum(map(len, kept)))
    num_left = _MAX_PAIRS // num_kept
    num_checked = num_late = 0
    for number, sketches in enumerate(removed):
        for sketch in sketches[: max(0, num_left - num_checked)]:
            num_checked += 1
            best = [
                float(estimate_similarity(np.broadcast_to(sketch, some.shape), some).max(initial=0)) for some in kept
            ]
            # A document inside a longer one is not similar to it as a whole, so the check ignores it.
            num_late += max(best[: number + 1]) < SURE_IN_STREAM <= max(best[number + 1 :], default=0)
    if num_late:
        why = f"{num_late:,} of {num_checked:,} documents were removed that are similar only to text of later periods"
        yield Finding("looks ahead", "near copies", why)
    elif is_causal or not any(call.is_divided for call in calls):
        why = f"of {num_checked:,} removed documents, none is similar only to text of later periods"
        yield Finding("ok", "near copies", why)


def _tokenizer(stream: StreamFolder) -> Finding:
    """Train the tokenizer again on the first mega-batch, and compare its file."""
    description, quantity = stream.description, "tokenizer"
    kind, file = description["tokenizer"]["kind"], stream.path / description["tokenizer"]["file"]
    if kind not in TOKENIZERS:
        why = "it was given by --tokenizer: alma-prep does not know the text on which it was trained"
        return Finding("unknown", quantity, why)
    if grown := [t for one in description.get("grown_from", []) for t in one["learned_from"] if t > 1]:
        why = f"symbols were learned from mega-batch {max(grown)}: train on this stream from there on (grow-vocab)"
        return Finding("looks ahead", quantity, why)
    if "masked" in description["splits"]["mega_batch_1"]:
        return Finding("unknown", quantity, _FORGOTTEN)
    settings, tokenizer = description["settings"], TOKENIZERS[kind]
    most = min(settings["tokenizer_words"], tokenizer.max_training_words or settings["tokenizer_words"])
    if stream.counts("mega_batch_1")["words"] > most:
        why = f"trained on a sample of {most:,} words, which is not repeated here"
        return Finding("unknown" if settings.get("causal") else "looks ahead", quantity, why)
    texts = texts_of(stream, "mega_batch_1", load_tokenizer(file))
    if tokenizer is ByteBPE:
        content = ByteBPE.train_on_counts(iter(sorted(count_words(texts).items())), settings["vocab_size"])
    else:
        content = tokenizer.train(texts, settings["vocab_size"])
    if content == file.read_bytes():
        return Finding("ok", quantity, "trained on the first mega-batch (compared: trained again)")
    then, now = read_manifest(stream.path).get("versions", {}), versions()
    name = "tokenizers" if tokenizer is ByteBPE else "sentencepiece"
    if then.get(name) != now.get(name):
        why = f"another version of {name} made it ({then.get(name)}), so it cannot be compared: install this version"
        return Finding("unknown", quantity, why)
    return Finding(
        "looks ahead", quantity, "the first mega-batch gives another tokenizer: this one was trained on other text"
    )


def _from_outside(description: Mapping) -> Iterator[Finding]:
    """Name what comes from outside the stream. alma-prep cannot know what this depends on."""
    settings = description["settings"]
    if settings.get("filters"):
        yield Finding("unknown", "filters", f"--filter {settings['filters']} is your own code")
    if settings.get("decontaminate_against"):
        yield Finding("unknown", "decontamination", "the files of --decontaminate-against are your own")

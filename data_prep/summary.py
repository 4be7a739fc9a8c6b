"""Format the tables that alma-prep prints when it has finished."""

from data_prep.leakage.measure import HELD_OUT
from data_prep.sources import NOT_READ
from data_prep.tokenization.losses import losses_summary

_DROPPED_SHOWN = 100
_SHORT_WORDS, _SHORT_DOCUMENTS = 20, 100
"""If at least this many documents of `text:` have fewer words than this on average, they may be the lines of books."""
SKIPPED_SHOWN = 10
"""For each source, the summary prints at most this many messages about content that was skipped."""


def summary(stream: dict) -> str:
    """Return a text with three tables: the splits of a finished stream, the removed documents, and the skipped files.

    Args:
        stream: the content of stream.json. If alma-prep --extend has added mega-batches to the stream, the tables of
            removed documents and of skipped files show only those of the last call of alma-prep --extend.
    """
    lines = [f"{'split':<16}{'documents':>12}{'passages':>12}{'words':>16}{'tokens':>16}{'bytes/token':>13}"]
    for name, split in stream["splits"].items():
        counts = f"{split['documents']:>12,}{split['passages']:>12,}{split['words']:>16,}{split['tokens']:>16,}"
        # How well the tokenizer fits this text: with a tokenizer of old text, it falls from period to period.
        ratio = f"{split['bytes'] / split['tokens']:>13.2f}" if "bytes" in split else f"{'':>13}"
        lines.append(f"{name:<16}{counts}{ratio}{_dates_of(stream, name)}")
    lines += losses_summary(stream["splits"])
    extensions = stream.get("extensions", [])
    last = extensions[-1] if extensions else stream
    if last.get("cleaning"):
        lines += ["", *_removed(last["cleaning"]), ""]
    if "leakage" in last:
        leakage = [_leakage_of_extension(last["leakage"])] if extensions else _leakage(last["leakage"])
        lines += [*([""] if lines[-1] else []), *leakage, ""]
    for source in last["sources"]:
        name = ":".join(filter(None, (source["kind"], source["path"])))
        dropped = source.get("dropped", {})
        num_ignored = sum(count for why, count in dropped.items() if why.startswith(NOT_READ))
        lines.append(
            f"{name}: {source['documents']:,} documents, {source['words']:,} words in {source['files']:,} files, "
            f"{num_ignored:,} files ignored, "
            f"{len({entry['name'] for entry in source['skipped']}):,} files completely or partly skipped"
        )
        lines += [f"  left out {count:,} {why}" for why, count in list(dropped.items())[:_DROPPED_SHOWN]]
        lines += [f"  skipped {entry['name']}: {entry['reason']}" for entry in source["skipped"][:SKIPPED_SHOWN]]
        if len(source["skipped"]) > SKIPPED_SHOWN:
            lines.append(f"  and {len(source['skipped']) - SKIPPED_SHOWN:,} more (stream.json lists all of them)")
        num_words = source["words"] / max(1, source["documents"])
        if source["kind"] == "text" and num_words < _SHORT_WORDS and source["documents"] >= _SHORT_DOCUMENTS:
            lines.append(
                f"  the documents have {num_words:.0f} words on average. Of .txt files, each line is a document; if "
                f"each file is one, give books:{source['path']}"
            )
    return "\n".join(lines)


def _dates_of(stream: dict, split: str) -> str:
    """Return text with the first and the last date of a mega-batch of a chronological stream; else an empty text."""
    for t, period in enumerate(stream.get("periods", []), start=1):
        if split == f"mega_batch_{t}":
            return f"  {period['first_date']} to {period['last_date']}"
    return ""


def _removed(cleaning: list[dict]) -> list[str]:
    """Return the lines of the table of removed and changed documents."""
    lines = [f"{'removed or changed':<36}{'documents':>12}{'words':>16}  source"]
    for row in cleaning:
        documents = f"{row['documents']:,}" if "documents" in row else ""
        lines.append(f"{row['step']:<36}{documents:>12}{row['words']:>16,}  {row['source']}")
    return lines


def _leakage(report: dict) -> list[str]:
    """Return lines about the overlap of the held-out text of a new stream with its mega-batches."""
    lines = []
    for name in HELD_OUT:
        counts = report[name]
        overlapping, documents = counts["overlapping_documents"], counts["documents"]
        words = counts["overlapping_words"] / max(1, counts["words"])
        sample = f" (measured on every {counts['every']}th passage)" if counts["every"] > 1 else ""
        lines.append(
            f"{overlapping:,} of {documents:,} documents in {name} have {report['ngram_words']} words in a row in "
            f"common with a mega-batch; {words:.2%} of its words are in such overlaps{sample}"
        )
    return lines


def _leakage_of_extension(report: dict) -> str:
    """Return a line about the overlap of all held-out text with the mega-batches of an extension."""
    counts = [each for each in report.values() if isinstance(each, dict)]
    overlapping, texts = (sum(each[key] for each in counts) for key in ("overlapping_documents", "documents"))
    return (
        f"{overlapping:,} of {texts:,} held-out texts have {report['ngram_words']} words in a row in common with the "
        'new mega-batches (see "leakage" of the last extension in stream.json)'
    )

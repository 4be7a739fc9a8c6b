"""Format the tables that alma-prep prints when it has finished."""

from data_prep.sources import NOT_READ
from data_prep.tokenization.losses import losses_summary

_DROPPED_SHOWN = 100
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
        lines += [*([""] if lines[-1] else []), *_leakage(last["leakage"], bool(extensions)), ""]
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


def _leakage(report: dict, is_extension: bool) -> list[str]:
    """Return lines about the overlap of held-out text with the mega-batches."""
    compared = "the new mega-batches" if is_extension else "a mega-batch"
    of_periods = {
        f"{when}_{name}": f"{name} of the periods that were added {'before' if when == 'added' else 'now'}"
        for when in ("added", "new")
        for name in ("valid", "test")
    }
    lines = []
    for name in ("valid", "test", *of_periods):
        if (counts := report.get(name)) is None:
            continue
        texts = "passages" if is_extension and not name.startswith("new_") else "documents"
        split = of_periods.get(name, name)
        documents = counts["overlapping_documents"] / max(1, counts["documents"])
        words = counts["overlapping_words"] / max(1, counts["words"])
        sample = f" (measured on every {counts['every']}th passage)" if counts["every"] > 1 else ""
        lines.append(
            f"{documents:.2%} of the {texts} in {split} have {report['ngram_words']} words in a row in common with "
            f"{compared}; {words:.2%} of its words are in such overlaps{sample}"
        )
    return lines

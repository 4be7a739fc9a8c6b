"""Count what a task reads, removes, changes and skips, as the accounts of the stream need it (see `accounts`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.cleaning.cleaner import TOO_SLOW, UNREADABLE
from data_prep.sources import Document, Part, Skipped

_UNDATED_SHOWN = 3
"""Number of documents without a date that the result of a task names."""


@dataclass
class Counts:
    """Counts of documents, words and bytes of text. The fields are entries of the result of a task (`spool.SpoolTask`).

    What was read is what was written and removed, and what changes took away.
    """

    files: dict[str, list[int]] = field(default_factory=dict)
    """Name of each input file -> the numbers of documents, words and bytes that were read from it."""
    removed: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> the same numbers for what was removed."""
    changed: dict[str, list[int]] = field(default_factory=dict)
    """What changed text -> the number of documents that were changed, and of the words and bytes that they lost."""
    skipped: list[Skipped] = field(default_factory=list)
    undated: list[list[str]] = field(default_factory=list)
    """Id and date of some of the documents that were removed because of their date."""
    with_fields: list[int] = field(default_factory=lambda: [0, 0])
    """Number of documents with an id and with a date of their own. Otherwise, the id is the file name with a position,
    and the date is that of the file."""

    def read(self, part: Part, document: Document, num_words: int, num_bytes: int) -> None:
        """Count a document that was read from a part of a file."""
        _add(self.files, part.name, 1, num_words, num_bytes)
        self.with_fields[0] += not document.id.startswith(f"{part.name}:")
        self.with_fields[1] += document.date != ""

    def remove(self, part: Part, document: Document, reason: str, num_words: int, num_bytes: int) -> None:
        """Count a document that is removed."""
        _add(self.removed, reason, 1, num_words, num_bytes)
        if reason in (UNREADABLE, TOO_SLOW):
            name = document.id or part.name
            self.skipped.append(Skipped(part.name, reason, 1, unit="document", damaged=False, found=name))

    def remove_undated(self, part: Part, document: Document) -> None:
        """Remember a document that is removed because of its date."""
        if len(self.undated) < _UNDATED_SHOWN:
            self.undated.append([document.id or part.name, document.date])

    def change(self, changes: Iterable[tuple[str, int, int]]) -> None:
        """Count what changed the text of a document, with the words and bytes that it lost."""
        for change, *fewer in changes:
            _add(self.changed, change, 1, *fewer)


def _add(counts: dict[str, list[int]], key: str, *more: int) -> None:
    """Add numbers to those of a key, in place."""
    counts[key] = [count + added for count, added in zip(counts.get(key, [0] * len(more)), more, strict=True)]


def added(counted: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of the numbers in several mappings, by key."""
    totals: dict[str, list[int]] = {}
    for counts in counted:
        for key, numbers in counts.items():
            before = totals.get(key, [0] * len(numbers))
            totals[key] = [one + more for one, more in zip(before, numbers, strict=True)]
    return totals

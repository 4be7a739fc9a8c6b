"""Which snapshot a file is of, for streams that drift: one mega-batch a snapshot."""

import re
from collections.abc import Mapping, Sequence
from datetime import date

from data_prep.errors import PrepError
from data_prep.sources import Source, SourceFile

# CC-MAIN-2019-13: the year and the ISO week of a crawl. Its files carry the second in which each was written as well.
_CRAWL = re.compile(r"CC-MAIN-(\d{4})-(\d{2})(?!\d)")
_DATE = re.compile(r"(?<!\d)((?:19|20)\d{2})-?(0[1-9]|1[0-2])(?:-?(0[1-9]|[12]\d|3[01]))?(?!\d)")


def snapshot_of(name: str) -> str | None:
    """The date in a path, as 2019-03-25 or 2019-03; a crawl's is the Monday of its week. None: there is none."""
    crawl = _CRAWL.search(name)
    if crawl:
        try:
            return date.fromisocalendar(int(crawl[1]), int(crawl[2]), 1).isoformat()
        except ValueError:
            return None
    found = _DATE.search(name)
    return "-".join(filter(None, found.groups())) if found else None


def groups_of(
    partition: str, files: Mapping[Source, Sequence[SourceFile]]
) -> tuple[dict[Source, list[int]], list[str] | None]:
    """The mega-batch (from 0) that each file is for, and the snapshots by name; all 0 and None unless it drifts.

    Raises:
        PrepError: by date, and a path has none.
    """
    if partition == "as-given":
        return {source: [number] * len(found) for number, (source, found) in enumerate(files.items())}, [
            source.name for source in files
        ]
    if partition != "by-date":
        return {source: [0] * len(found) for source, found in files.items()}, None
    # The file's own name first: a folder above may have been dated by whoever made it.
    dates = {
        source: [snapshot_of(file.path.name) or snapshot_of(str(file.path)) for file in found]
        for source, found in files.items()
    }
    undated = [
        file.name
        for source, found in files.items()
        for file, day in zip(found, dates[source], strict=True)
        if day is None
    ]
    if undated:
        raise PrepError(
            f"--partition by-date wants a date in every path (CC-MAIN-2019-13, 20190325 or 2019-03), and {undated[0]} "
            f"has none ({len(undated):,} files in all). Put each snapshot into a folder named by its date, or give "
            "each as a --source of its own with --partition as-given."
        )
    snapshots = sorted({day for days in dates.values() for day in days if day})
    number_of = {day: number for number, day in enumerate(snapshots)}
    return {source: [number_of[day] for day in days if day] for source, days in dates.items()}, snapshots

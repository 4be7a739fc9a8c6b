"""The snapshot of each file, for streams that drift: one mega-batch per snapshot."""

import re
from datetime import date

from data_prep.errors import PrepError
from data_prep.sources import Files, Source

# CC-MAIN-2019-13: the year and the ISO week of a crawl. The names of its files also hold the second of writing.
_CRAWL = re.compile(r"CC-MAIN-(\d{4})-(\d{2})(?!\d)")
_DATE = re.compile(r"(?<!\d)((?:19|20)\d{2})-?(0[1-9]|1[0-2])(?:-?(0[1-9]|[12]\d|3[01]))?(?!\d)")


def snapshot_of(name: str) -> str | None:
    """Return the date in a path, as 2019-03-25 or 2019-03, or None. The date of a crawl is the Monday of its week."""
    crawl = _CRAWL.search(name)
    if crawl:
        try:
            return date.fromisocalendar(int(crawl[1]), int(crawl[2]), 1).isoformat()
        except ValueError:
            return None
    found = _DATE.search(name)
    return "-".join(filter(None, found.groups())) if found else None


def groups_of(partition: str, files: Files) -> tuple[dict[Source, list[int]], list[str] | None]:
    """Return the group of each file, and the names of the groups.

    A group is a snapshot: group 0 becomes mega-batch 1. Without drift all files are of group 0, and there are no names.

    Args:
        partition: the setting of this name: equal, by-date or as-given.
        files: the files of each source.

    Raises:
        PrepError: `partition` is by-date, and a path has no date.
    """
    if partition == "as-given":
        return {source: [number] * len(found) for number, (source, found) in enumerate(files.items())}, [
            source.name for source in files
        ]
    if partition != "by-date":
        return {source: [0] * len(found) for source, found in files.items()}, None
    # The name of the file comes first: the date of a folder may be the day on which somebody made it.
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
            f"--partition by-date needs a date in every path (CC-MAIN-2019-13, 20190325 or 2019-03), and {undated[0]} "
            f"has none ({len(undated):,} files in all). Put each snapshot into a folder named by its date, or give "
            "each as a --source of its own with --partition as-given."
        )
    snapshots = sorted({day for days in dates.values() for day in days if day})
    number_of = {day: number for number, day in enumerate(snapshots)}
    return {source: [number_of[day] for day in days if day] for source, days in dates.items()}, snapshots

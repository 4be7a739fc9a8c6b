"""Find the snapshot that each file belongs to. Snapshots are used in streams that drift.

In a stream that drifts, the text changes from one mega-batch to the next. A snapshot is the text of one point in time,
for example one Common Crawl dump. Each snapshot becomes one mega-batch. With partition="by-date", a snapshot consists
of all files with the same date in their path. With partition="as-given", a snapshot consists of the files of one
source.
"""

import re
from datetime import date
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.sources import Files, Source

# _CRAWL matches a crawl name such as CC-MAIN-2019-13, which contains the year and ISO week of the crawl. _DATE matches
# dates such as 20190325, 2019-03-25 and 2019-03. Neither matches the 14 digits in the names of the files of a crawl,
# because these digits are the time at which the file was written.
_CRAWL = re.compile(r"CC-MAIN-(\d{4})-(\d{2})(?!\d)")
_DATE = re.compile(r"(?<!\d)((?:19|20)\d{2})-?(0[1-9]|1[0-2])(?:-?(0[1-9]|[12]\d|3[01]))?(?!\d)")


def snapshot_of(name: str) -> str | None:
    """Return the date in a path, in the form 2019-03-25 or 2019-03, or None if the path contains no date.

    For a crawl name such as CC-MAIN-2019-13, return the Monday of that ISO week.
    """
    crawl = _CRAWL.search(name)
    if crawl:
        try:
            return date.fromisocalendar(int(crawl[1]), int(crawl[2]), 1).isoformat()
        except ValueError:
            return None
    found = _DATE.search(name)
    return "-".join(filter(None, found.groups())) if found else None


def groups_of(partition: str, files: Files) -> tuple[dict[Source, list[int]], list[str] | None]:
    """Return the snapshot index of each file, and the names of the snapshots.

    The snapshot with index 0 becomes mega-batch 1. With partition="equal", there are no snapshots. Then the index of
    every file is 0, and None is returned in place of the names.

    Args:
        partition: the setting `partition`: equal, by-date or as-given.
        files: the files of each source.

    Returns:
        Two values. First, for each source, the snapshot index of each of its files. Second, the names of the snapshots.

    Raises:
        PrepError: if `partition` is by-date, and a path contains no date.
    """
    if partition == "as-given":
        return {source: [number] * len(found) for number, (source, found) in enumerate(files.items())}, [
            source.name for source in files
        ]
    if partition != "by-date":
        return {source: [0] * len(found) for source, found in files.items()}, None
    # Prefer the date in the file name. A date in the folder name may only be the day the folder was created.
    dates = {
        source: [snapshot_of(Path(file.path).name) or snapshot_of(str(file.path)) for file in found]
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
            f"--partition by-date needs a date in every path (such as CC-MAIN-2019-13, 20190325 or 2019-03), but "
            f"{undated[0]} has none ({len(undated):,} files in all). Put each snapshot into a folder named after its "
            "date, or give each snapshot as a separate --source with --partition as-given."
        )
    snapshots = sorted({day for days in dates.values() for day in days if day})
    number_of = {day: number for number, day in enumerate(snapshots)}
    return {source: [number_of[day] for day in days if day] for source, days in dates.items()}, snapshots

"""Read the dates of documents and of files, write them as text, and group files by snapshot.

A date is stored as one number, YYYYMMDDhhmmss in UTC, in which missing parts are 0: 18630000000000 is the year 1863.
Sorting the numbers sorts the dates, and a year comes before its months and days. 0 means that there is no date. Years
from 1000 to 9999 are read.
"""

import re
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np

from data_prep.errors import PrepError, Unworkable
from data_prep.sources import Files, Source
from fairseq_alma.core.errors import SettingError

UNDATED = 0
"""The number that stands for a missing date."""

_YEAR_OR_MONTH = re.compile(r"([1-9]\d{3})(?:-?(0[1-9]|1[0-2]))?")
# Dates of digits only, as in web archives, which write 14 digits. The number of digits says which parts there are.
_DIGITS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
# In the name of a file: 1863-11-19, 18631119 or 1863-11. Six digits count as a month only from 1900 to 2099 (see
# `snapshot_of`): other numbers with six digits, such as those of parts of a corpus, are more frequent than dates.
_DAY_IN_NAME = r"(?<!\d)([1-9]\d{3})(-?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])(?!\d)"
_MONTH_IN_NAME = r"(?<!\d)([1-9]\d{3}-(?:0[1-9]|1[0-2]))(?![-\d])"
_IN_NAME = re.compile(f"{_DAY_IN_NAME}|{_MONTH_IN_NAME}")
# A year by itself, such as 1863 in 1863_speech.txt, but not the numbers of parts, such as those in 1024-of-2048.txt.
_YEAR_IN_NAME = re.compile(r"(?<!\d)(?<![-_]of[-_])(1\d{3}|20\d{2})(?!\d|[-_]of[-_]\d)")


def parse_date(text: str) -> int:
    """Return the number of a date (see the module), or UNDATED if the text is not a date that can be read.

    ISO 8601 dates of any precision are read: 1863, 1863-11, 1863-11-19, 1863-11-19T15:00:00Z, with any time zone. Times
    without a time zone are UTC. Dates of 6, 8, 12 or 14 digits are read too, for example those in web archives.
    """
    text = text.strip()
    if short := _YEAR_OR_MONTH.fullmatch(text):
        return int(short[1]) * 10**10 + int(short[2] or 0) * 10**8
    try:
        if text.isdecimal() and text.isascii():
            moment = datetime.strptime(text, _DIGITS[len(text)])
        else:
            moment = datetime.fromisoformat(re.sub(r" ?(?:UTC|GMT)$", "Z", text))
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC)
    except (KeyError, ValueError, OverflowError):
        return UNDATED
    return int(f"{moment:%Y%m%d%H%M%S}") if moment.year >= 1000 else UNDATED


def date_text(number: int) -> str:
    """Return a date as ISO 8601 text, such as 1863, 1863-11, 1863-11-19 or 1863-11-19T15:00:00Z.

    A time of exactly 0 o'clock is left out, because the number does not say whether the source gave it.

    Args:
        number: what `parse_date` returned. For UNDATED, the text is empty.
    """
    if number == UNDATED:
        return ""
    digits = f"{number:014d}"
    year, month, day, time = digits[:4], digits[4:6], digits[6:8], digits[8:]
    if time != "000000":
        return f"{year}-{month}-{day}T{time[:2]}:{time[2:4]}:{time[4:]}Z"
    return "-".join([year, *(part for part in (month, day) if part != "00")])


_CALENDAR = {"year": (10**10, 0), "month": (10**8, 10**2)}
"""For each calendar period: by what to divide the number of a date to get the number of its period, and by what this
must not be divisible, because then the date is less precise than the period."""


def check_period(period: str) -> None:
    """Raise SettingError if a value of the setting `period` is not year, month, or dates in ascending order."""
    if period in _CALENDAR:
        return
    limits = [parse_date(text) for text in period.split(",")]
    if UNDATED in limits or sorted(set(limits)) != limits:
        raise SettingError(
            f"--period {period} is neither year nor month, nor dates in ascending order: give for example --period "
            "month or --period 1900,1950-06"
        )


def period_of(period: str, dates: np.ndarray) -> np.ndarray:
    """Return a number for the period of each date, int64 [n]. Later periods have larger numbers.

    Args:
        period: the setting `period`, see `check_period`.
        dates: int64 [n], the numbers of dates.

    Raises:
        Unworkable: if a date is less precise than the period, so that it cannot be said in which period it is.
    """
    if period not in _CALENDAR:
        limits = np.array([parse_date(text) for text in period.split(",")], np.int64)
        return np.searchsorted(limits, dates, side="right")
    divisor, whole = _CALENDAR[period]
    numbers = dates // divisor
    if whole and (is_vague := numbers % whole == 0).any():
        raise Unworkable(
            f"documents whose date has no month: {int(is_vague.sum()):,}, for example one of "
            f"{date_text(int(dates[is_vague][0]))}. Give --period year, or correct the dates."
        )
    return numbers


def date_in_path(name: str, path: str) -> int:
    """Return the number of the date that the path of a file contains, or UNDATED if there is none.

    The first of these that exists is used: a crawl name (CC-MAIN-2019-13, the Monday of that week), a day or a month in
    the file name, a year from 1000 to 2099 in the file name, a crawl name, day or month in the complete path.

    Args:
        name: the name of the file, without folders.
        path: the complete path of the file.
    """
    year = _YEAR_IN_NAME.search(name)
    return _crawl_or_day(name) or parse_date(year[1] if year else "") or _crawl_or_day(path)


def _crawl_or_day(text: str) -> int:
    """Return the number of a crawl's date, or of a day or month, in a text; UNDATED if there is none."""
    if "CC-MAIN-" not in text:
        for found in _IN_NAME.finditer(text):
            number = parse_date(found[5] or f"{found[1]}-{found[3]}-{found[4]}")
            if number:
                return number
    return parse_date(snapshot_of(text) or "")


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

    The snapshot with index 0 becomes mega-batch 1.

    Args:
        partition: the setting `partition`: equal, by-date or as-given.
        files: the files of each source.

    Returns:
        Two values. First, for each source, the snapshot index of each of its files. Second, the names of the snapshots;
        None if there are no snapshots. Then the index of every file is 0.

    Raises:
        PrepError: if `partition` is by-date, and a path contains no date.
    """
    if partition == "as-given":
        numbers = {source: [number] * len(found) for number, (source, found) in enumerate(files.items())}
        return numbers, [source.name for source in files]
    if partition != "by-date":
        return {source: [0] * len(found) for source, found in files.items()}, None
    # Prefer the date in the file name. A date in the folder name may only be the day the folder was created.
    dates = {
        source: [snapshot_of(Path(file.path).name) or snapshot_of(str(file.path)) for file in found]
        for source, found in files.items()
    }
    days = [day for days in dates.values() for day in days]
    names = [file.name for found in files.values() for file in found]
    if undated := [name for name, day in zip(names, days, strict=True) if day is None]:
        raise PrepError(
            f"--partition by-date needs a date in every path (such as CC-MAIN-2019-13, 20190325 or 2019-03), but "
            f"{undated[0]} has none ({len(undated):,} files in all). Put each snapshot into a folder named after its "
            "date, or give each snapshot as a separate --source with --partition as-given."
        )
    snapshots = sorted(filter(None, set(days)))
    number_of = {day: number for number, day in enumerate(snapshots)}
    return {source: [number_of[day] for day in days if day] for source, days in dates.items()}, snapshots

"""Dates of documents and of files."""

import datetime
import math
from types import SimpleNamespace

import pytest

from data_prep.sources.dates import UNDATED, date_in_path, date_text, parse_date
from data_prep.sources.text import date_field


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("1863", "1863"),
        ("1863-11", "1863-11"),
        ("1863-11-19", "1863-11-19"),
        ("18631119", "1863-11-19"),
        ("20190325090211", "2019-03-25T09:02:11Z"),  # web archives
        ("2019-03-25T09:02:11Z", "2019-03-25T09:02:11Z"),
        ("2019-03-25T23:02:11.123456789-05:00", "2019-03-26T04:02:11Z"),
        ("2019-03-25 09:02:11 UTC", "2019-03-25T09:02:11Z"),
        ("2019-03-25T09:02", "2019-03-25T09:02:00Z"),
        ("2019-03-25T00:00:00Z", "2019-03-25"),
        ("2019-W13", "2019-03-25"),
        (" 1000-01-01 ", "1000-01-01"),
        ("9999-12-31T23:59:59", "9999-12-31T23:59:59Z"),
        *(
            (text, "")
            for text in ("", "March 3, 2019", "0999-01-01", "2019-02-30", "2019-13", "20191350", "1553504531")
        ),
        ("9999-12-31T23:59:59-05:00", ""),
    ],
)
def test_dates_of_any_precision_are_read(text, iso):
    assert date_text(parse_date(text)) == iso


def test_the_numbers_sort_as_the_dates():
    dates = ["1000", "1790", "1790-01", "1790-01-08", "1790-01-08T00:00:01Z", "1790-01-09", "1790-02", "2026-11-23"]
    assert sorted(map(parse_date, dates)) == [parse_date(date) for date in dates]
    assert sorted(dates) == dates  # so the texts can be compared, too


@pytest.mark.parametrize(
    ("path", "iso"),
    [
        ("crawl/CC-MAIN-2019-13/CC-MAIN-20190318132220-20190318154220-00000.warc.gz", "2019-03-25"),
        ("wiki/dump-20190325.xml.bz2", "2019-03-25"),
        ("1863/speech_1863-11-19.txt", "1863-11-19"),
        ("2024-01/18631119.txt", "1863-11-19"),  # the file name before the folder
        ("2024-01/1790-Washington-1.txt", "1790"),
        ("1863-11/speech.txt", "1863-11"),
        ("x/news-201903.jsonl", "2019-03"),
        ("x/part_123456.txt", ""),
        ("x/2701-0.txt", ""),
        ("x/train-1024-of-2048.jsonl", ""),
        ("x/1790_train-1024-of-2048.jsonl", "1790"),
        ("1863/speech.txt", ""),  # a year by itself counts only in the file name
    ],
)
def test_the_date_of_a_file(path, iso):
    assert date_text(date_in_path(path.rpartition("/")[2], path)) == iso


@pytest.mark.parametrize(
    ("value", "text", "is_read"),
    [
        (1863, "1863", True),
        (1863.0, "1863", True),  # pandas writes a column of integers with gaps so
        (datetime.date(1863, 11, 19), "1863-11-19", True),
        ("unknown", "unknown", False),
        (-3352406400.5, "-3352406400.5", False),
        ({"$date": "1863-11-19"}, "{'$date': '1863-11-19'}", False),
        (True, "True", False),
        (None, "", False),  # then the date of the file is taken
        (math.nan, "", False),
    ],
)
def test_a_date_that_cannot_be_read_is_not_taken_for_a_missing_one(value, text, is_read):
    found = date_field({"date": value}, SimpleNamespace(option=lambda _: "date"))
    assert (found, parse_date(found) != UNDATED) == (text, is_read)

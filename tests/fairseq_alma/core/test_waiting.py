"""The settings `wait` and `wait_ratio`: when a stage is due."""

import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import StreamSettings
from fairseq_alma.core.waiting import arrivals_of_stages, num_missing
from tests.fairseq_alma.core.tiny_learner import tiny_run


@pytest.mark.parametrize(
    ("wait", "ratio", "trains_last", "expected"),
    [
        (1, 0.5, True, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, 0.5, True, [4, 8, 10]),
        (4, 0.5, False, [4, 8]),
        ("geometric", 0.5, True, [1, 2, 3, 5, 8, 10]),  # 12 would be the next one after 8
        ("geometric", 0.5, False, [1, 2, 3, 5, 8]),
        ("geometric", 1.0, False, [1, 2, 4, 8]),
        ("geometric", 0.01, False, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_the_arrivals_of_stages(wait, ratio, trains_last, expected):
    assert arrivals_of_stages(10, wait, ratio, trains_last) == expected


def test_a_run_trains_its_stages_at_these_arrivals(tmp_path):
    rows = tiny_run(tmp_path, 10, wait="geometric")
    assert [row.t for row in rows if row.updated] == [1, 2, 3, 5, 8, 10]
    assert StreamSettings(10, "geometric").num_stages == 6


def test_the_arrivals_of_wait_auto_are_an_estimate_whose_first_is_certain():
    assert StreamSettings(10, "auto").arrivals_of_stages == [1, 2, 3, 5, 8, 10]
    assert StreamSettings(4, "auto", replay="uniform").arrivals_of_stages == [1, 2, 3, 4]


def test_how_many_mega_batches_are_missing():
    assert num_missing(1, 4, 3) == 2
    assert num_missing(2, 8, "geometric", 0.5) == 2  # a stage after 8 mega-batches needs 4


@pytest.mark.parametrize(
    ("wait", "ratio", "message"),
    [
        (0, None, "wait=0 must be an integer of at least 1, geometric or auto"),
        (5, None, "wait=5 must lie between 1 and 4"),
        (True, None, "wait=True must be an integer of at least 1"),
        ("long", None, "wait='long' must be an integer of at least 1"),
        ("auto", 0.5, "wait_ratio=0.5 is for wait=geometric, but wait=auto"),
        (2, 0.5, "wait_ratio=0.5 is for wait=geometric, but wait=2"),
        ("geometric", 0.0, "wait_ratio=0.0 must be above 0"),
        ("geometric", float("nan"), "wait_ratio=nan must be above 0"),
    ],
)
def test_other_waits_are_refused(wait, ratio, message):
    with pytest.raises(SettingError, match=message):
        StreamSettings(4, wait, wait_ratio=ratio)

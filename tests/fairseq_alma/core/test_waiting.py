"""The setting `wait`: when a stage is due."""

import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import StreamSettings
from fairseq_alma.core.waiting import arrivals_of_stages, check_wait, group_is_complete, num_missing
from tests.fairseq_alma.core.tiny_learner import tiny_run


@pytest.mark.parametrize(
    ("wait", "trains_last", "expected"),
    [
        (1, True, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, True, [4, 8, 10]),
        (4, False, [4, 8]),
        ("geometric", True, [1, 2, 3, 5, 8, 10]),  # 12 would be the next one after 8
        ("geometric", False, [1, 2, 3, 5, 8]),
        ("geometric:1", False, [1, 2, 4, 8]),
        ("geometric:0.01", False, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([1, 3, 4], False, [1, 3, 4]),
        ([1, 3, 4], True, [1, 3, 4, 10]),  # the last group, of 6 mega-batches
    ],
)
def test_the_arrivals_of_stages(wait, trains_last, expected):
    assert arrivals_of_stages(10, wait, trains_last_group=trains_last) == expected


def test_the_arrivals_of_stages_after_known_mega_batches():
    """The waits that grow count them as mega-batches of earlier stages."""
    for wait, trains_last, expected in ((2, False, [6, 8, 10]), ("geometric", True, [6, 9, 10]), ([2, 7], False, [7])):
        assert arrivals_of_stages(10, wait, None, trains_last, num_known=4) == expected
        assert StreamSettings(10, wait, num_known=4).arrivals_of_stages[:1] == expected[:1]


def test_a_run_trains_its_stages_at_these_arrivals(tmp_path):
    rows = tiny_run(tmp_path, 10, wait="geometric")
    assert [row.t for row in rows if row.updated] == [1, 2, 3, 5, 8, 10]
    assert StreamSettings(10, "geometric").num_stages == 6


def test_a_list_gives_the_arrivals_of_the_stages_also_after_a_skipped_mega_batch(tmp_path):
    rows = tiny_run(tmp_path / "list", 5, wait=[1, 3], last_group="wait")
    assert [row.t for row in rows if row.updated] == [1, 3]
    rows = tiny_run(tmp_path / "skip", 5, wait=[1, 3], last_group="wait", skip=(2,))
    assert [row.t for row in rows if row.updated] == [1, 3]
    assert group_is_complete(num_gathered=1, num_past=1, wait=[3], t=3)


def test_the_arrivals_of_wait_auto_are_an_estimate_whose_first_is_certain():
    assert StreamSettings(10, "auto").arrivals_of_stages == [1, 2, 3, 5, 8, 10]
    assert StreamSettings(4, "auto", replay="uniform").arrivals_of_stages == [1, 2, 3, 4]


def test_how_many_mega_batches_are_missing():
    assert num_missing(1, 4, 3) == 2
    assert num_missing(2, 8, "geometric:1") == 6
    assert num_missing(2, 8, "geometric") == 2  # a stage after 8 mega-batches needs 4
    assert num_missing(1, 3, [3, 6]) == 2
    assert num_missing(1, 6, [3, 6]) is None
    assert num_missing(1, 6, "auto") is None
    # Mega-batch 2 was skipped.
    assert num_missing(1, 1, [1, 4], t=3) == 1 and num_missing(1, 1, "geometric:2", t=3) == 1
    assert num_missing(1, 1000, "geometric:1e12") == 10**15 - 1  # at once, not by counting


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (0, "wait=0 must be an integer of at least 1, geometric, geometric:RATIO"),
        (5, "wait=5 must lie between 1 and 4"),
        (True, "wait=True must be an integer of at least 1"),
        ("long", "wait='long' must be an integer of at least 1"),
        ("auto:0.5", "wait='auto:0.5' must be"),
        ("geometric:0", "wait='geometric:0' must be .* with a ratio above 0"),
        ("geometric:", "wait='geometric:' must be .* with a ratio above 0"),
        ("geometric:inf", "wait='geometric:inf' must be .* with a ratio above 0"),
        ("geometric: 0.3", "wait='geometric: 0.3' must be .* with a ratio above 0"),
        ("geometric:nan", "wait='geometric:nan' must be"),
        ("geometric:x", "wait='geometric:x' must be"),
        (5, "wait=5 must lie between 1 and 4 mega-batches"),
        ([1, 5], r"wait=\[1, 5\] has arrivals after the last of 4 mega-batches"),
        ([], r"wait=\[\] must be a list of arrivals from 1 on in ascending order"),
        ([3, 1], r"wait=\[3, 1\] must be a list"),
        ([1, 1], r"wait=\[1, 1\] must be a list"),
        ([0, 1], r"wait=\[0, 1\] must be a list"),
        ([True], r"wait=\[True\] must be a list"),
        (["1"], r"wait=\['1'\] must be a list"),
    ],
)
def test_other_waits_are_refused(wait, message):
    with pytest.raises(SettingError, match=message):
        check_wait(wait, num_mega_batches=4)


@pytest.mark.parametrize("wait", [5, [1, 5]])
def test_a_stream_that_will_grow_may_be_shorter_than_the_wait(wait):
    assert StreamSettings(4, wait, last_group="wait").arrivals_of_stages == ([1] if wait == [1, 5] else [])
    assert StreamSettings(4, wait, last_group="train").arrivals_of_stages == ([1, 4] if wait == [1, 5] else [4])

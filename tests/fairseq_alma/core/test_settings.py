"""Settings check the type of each value, are made from flat keys, and carry their documentation."""

from dataclasses import dataclass
from typing import Literal

import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, NonNegative, Settings, defaults_of, describe, nearest_key


@dataclass(frozen=True)
class OuterSettings(Settings):
    name: str
    """The name."""
    count: Count = 3
    """How many,
    at least one."""
    start: NonNegative | None = None
    kind: Literal["a", "b"] = "a"
    level: Literal[0, 1] = 1
    flag: bool = False
    rate: float = 0.5
    """Learning rate."""


def made(**values):
    return OuterSettings.from_mapping({"name": "x", **values})


def test_each_setting_is_described_by_the_docstring_below_it():
    found = {one.name: one.text for one in describe(OuterSettings)}
    assert list(found) == ["name", "count", "start", "kind", "level", "flag", "rate"]
    assert found["rate"] == "Learning rate."
    assert found["count"] == "How many,\nat least one."
    assert found["start"] == ""


def test_a_setting_without_a_default_has_none():
    assert "name" not in defaults_of(OuterSettings)
    assert defaults_of(OuterSettings)["rate"] == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count=0 must be an integer of at least 1"),
        ({"count": True}, "count=True must be an integer of at least 1"),
        ({"count": None}, "count=None must be an integer of at least 1"),
        ({"count": 2.0}, "count=2.0 must be an integer of at least 1"),
        ({"start": -1}, "start=-1 must be an integer of at least 0"),
        ({"kind": "c"}, "kind='c' is not one of a, b"),
        ({"level": True}, "level=True is not one of 0, 1"),
        ({"level": 2}, "level=2 is not one of 0, 1"),
        ({"flag": 1}, "flag=1 must be true or false"),
        ({"rate": "fast"}, "rate='fast' must be a number"),
        ({"rate": True}, "rate=True must be a number"),
        ({"name": None}, "name=None must be a string"),
        ({"cout": 1}, "unknown settings cout: did you mean count? --help lists all settings"),
        ({"zzz": 1}, "unknown settings zzz: the settings are count"),
    ],
)
def test_wrong_values_and_keys_are_refused(values, message):
    with pytest.raises(SettingError) as error:
        made(**values)
    assert message in str(error.value)


def test_none_is_accepted_where_the_type_says_so_and_an_integer_is_a_number():
    assert made(start=None).start is None
    assert made(rate=1).rate == 1


def test_the_nearest_key_is_found_or_none():
    known = ["epochs", "learner", "wait"]
    assert nearest_key("lerner", known) == "learner"
    assert nearest_key("epoch", known) == "epochs"
    assert nearest_key("qqq", known) is None

"""Values that were read from JSON, and what is said of those that do not have the declared type."""

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, sealed, write_json
from fairseq_alma.core.json_types import Fraction, Loss, value_of
from fairseq_alma.core.settings import NonNegative


class Part(TypedDict):
    path: str
    count: NotRequired[NonNegative]


class Whole(TypedDict, total=False):
    parts: list[Part]
    share: Fraction
    loss: Loss
    kind: Literal["a", "b"]
    name: str | None
    pair: tuple[int, bool]
    others: dict[str, list[int]]


@pytest.mark.parametrize(
    "value",
    [{}, {"parts": []}, {"parts": [{"path": "x", "later": 1}]}, {"share": 1, "loss": float("nan")}, {"kind": "b"},
     {"name": None}, {"pair": [3, True]}, {"others": {"x": [1]}}, {"unknown": 1}],
)  # fmt: skip
def test_values_of_the_declared_type_are_returned(value):
    assert value_of(value, Whole) is value


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], "the content is [], expected an object"),
        (None, "the content is None, expected an object"),
        ({"parts": {}}, "parts is {}, expected a list"),
        ({"parts": [{}]}, "parts[0].path is missing"),
        ({"parts": [{"path": "x"}, {"path": 3}]}, "parts[1].path is 3, expected a string"),
        ({"parts": [{"path": "x", "count": -1}]}, "parts[0].count is -1, expected an integer of at least 0"),
        ({"parts": [{"path": "x", "count": True}]}, "parts[0].count is True, expected an integer of at least 0"),
        ({"share": 1.5}, "share is 1.5, expected a number of at least 0 and at most 1"),
        ({"share": float("nan")}, "share is nan, expected a finite number"),
        ({"loss": "low"}, "loss is 'low', expected a number of at least 0"),
        ({"kind": "c"}, "kind is 'c', expected one of a, b"),
        ({"name": 3}, "name is 3, expected a string or null"),
        ({"pair": [3]}, "pair is [3], expected a list of 2 values"),
        ({"pair": [3, 1]}, "pair[1] is 1, expected true or false"),
        ({"others": {"x": ["y"]}}, "others.x[0] is 'y', expected an integer"),
    ],
)
def test_the_fault_is_named_with_its_place(value, fault):
    with pytest.raises(ValueError) as error:
        value_of(value, Whole)
    assert str(error.value) == fault


@dataclass(frozen=True)
class Cost:
    flops: NonNegative
    seconds: float = 0.0


def test_a_dataclass_is_made_of_its_fields():
    assert value_of({"flops": 3, "later": 1}, Cost) == Cost(3)
    with pytest.raises(ValueError, match="flops is missing"):
        value_of({"seconds": 1.0}, Cost)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is not valid JSON"), ("[" * 100_000, "nested too deeply"), ('{"a": 1, "a": 2}', "an object has a key twice"),
     ("\0\0", "is not valid JSON"), ('{"flops": null}', r"damaged \(flops is None, expected an integer")],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, text, message):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(RunError, match=rf"cost\.json.*{message}.*: restore the file or remove it"):
        read_json(path, Cost)


def test_a_sealed_file_is_refused_if_a_value_has_changed(tmp_path):
    path = tmp_path / "cost.json"
    value: dict[str, Any] = {"flops": 3, "names": {"2": "ö", "10": "\udc80"}}
    write_json(path, sealed(value))
    assert read_json(path) == value
    path.write_text(path.read_text().replace('"flops": 3', '"flops": 4'))
    with pytest.raises(RunError, match=r"cost\.json is damaged \(sha256_of_this_file is"):
        read_json(path)

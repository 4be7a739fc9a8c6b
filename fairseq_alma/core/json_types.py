"""Check values that were read from JSON against a declared type, so that damaged and foreign files are refused.

A declared type is one that a type checker knows, too: int, float, str, bool, None, Any, Literal, list, dict, unions, a
TypedDict or a dataclass. `Annotated` adds bounds. NaN and infinity are refused, except with MAY_DIVERGE. Keys that are
not declared are ignored, because a later version may have written them.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from fairseq_alma.core.settings import AtLeast

Fault = tuple[str, Any, str]
"""What is wrong with a value: the place of the wrong part, such as ".checkpoints[0].path", the part itself (MISSING if
it is missing), and what was expected."""
Check = Callable[[Any], Fault | None]


@dataclass(frozen=True)
class AtMost:
    """Maximum value of a number, for use in `typing.Annotated`."""

    maximum: float


MAY_DIVERGE = "may diverge"
"""Used in `typing.Annotated` for scores, which are NaN or infinite if the training has diverged."""
Amount = Annotated[float, AtLeast(0)]
"""Type of a quantity that is measured, such as a time."""
Fraction = Annotated[float, AtLeast(0), AtMost(1)]
Loss = Annotated[float, AtLeast(0), MAY_DIVERGE]
Perplexity = Annotated[float, AtLeast(1), MAY_DIVERGE]

_NAMES: dict[Any, str] = {int: "an integer", str: "a text", bool: "true or false", NoneType: "null"}


def value_of(value: Any, kind: Any) -> Any:
    """Return a value that was read from JSON; an object of `kind` if this declared type is a dataclass.

    Raises:
        ValueError: if the value does not have the declared type.
    """
    if fault := fault_in(value, kind):
        raise ValueError(fault)
    if not is_dataclass(kind):
        return value
    return kind(**{one.name: value[one.name] for one in fields(kind) if one.name in value})  # type: ignore[operator]


def fault_in(value: Any, kind: Any) -> str | None:
    """Return what is wrong with a JSON value, as a part of an error message; None if it has the declared type."""
    found = _check_of(kind)(value)
    if found is None:
        return None
    place, part, expected = found[0].lstrip("."), *found[1:]
    if part is MISSING:
        return f"{place} is missing"
    shown = repr(part)
    return f"{place or 'the content'} is {shown if len(shown) <= 60 else f'{shown[:57]}...'}, expected {expected}"


@cache
def _check_of(kind: Any) -> Check:
    """Return a function that checks whether a value has the declared type. It returns what is wrong, or None."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return _check_of(args[0])
    if origin in (Union, UnionType):
        return _check_of_any([_check_of(one) for one in args])
    if origin is Literal:
        expected = f"one of {', '.join(map(str, args))}"
        return lambda value: None if type(value) is str and value in args else ("", value, expected)
    if kind is float or origin is Annotated:
        return _check_of_number(args[0] if args else float, args[1:])
    if kind in _NAMES:
        return lambda value: None if type(value) is kind else ("", value, _NAMES[kind])
    if origin is list:
        return _check_of_list(_check_of(args[0]))
    if origin is tuple:
        return _check_of_tuple([_check_of(one) for one in args])
    if origin is dict:
        return _check_of_mapping(_check_of(args[1]))
    if is_typeddict(kind) or is_dataclass(kind):
        return _check_of_object(kind)
    return lambda value: None


def _check_of_any(checks: list[Check]) -> Check:
    def check(value: Any) -> Fault | None:
        faults: list[Fault] = []
        for one in checks:
            if (found := one(value)) is None:
                return None
            faults.append(found)
        inner = [fault for fault in faults if fault[0]]
        return inner[0] if inner else ("", value, " or ".join(expected for _, _, expected in faults))

    return check


def _check_of_number(kind: type, bounds: tuple[Any, ...]) -> Check:
    lowest = next((one.minimum for one in bounds if isinstance(one, AtLeast)), -inf)
    highest = next((one.maximum for one in bounds if isinstance(one, AtMost)), inf)
    expected = "an integer" if kind is int else "a number"
    expected += f" of at least {lowest}" * (lowest > -inf) + f" and at most {highest}" * (highest < inf)
    kinds, may_diverge = (int,) if kind is int else (int, float), MAY_DIVERGE in bounds

    def check(value: Any) -> Fault | None:
        if type(value) is float and not isfinite(value):
            return None if may_diverge else ("", value, "a finite number")
        return None if type(value) in kinds and lowest <= value <= highest else ("", value, expected)

    return check


def _check_of_list(check_part: Check) -> Check:
    def check(value: Any) -> Fault | None:
        if type(value) is not list:
            return "", value, "a list"
        for number, part in enumerate(value):
            if (found := check_part(part)) is not None:
                return f"[{number}]{found[0]}", found[1], found[2]
        return None

    return check


def _check_of_tuple(checks: list[Check]) -> Check:
    """Check a list with a fixed number of parts, each with its own type. JSON has no tuples."""

    def check(value: Any) -> Fault | None:
        if type(value) is not list or len(value) != len(checks):
            return "", value, f"a list of {len(checks)} values"
        for number, (part, check_part) in enumerate(zip(value, checks, strict=True)):
            if (found := check_part(part)) is not None:
                return f"[{number}]{found[0]}", found[1], found[2]
        return None

    return check


def _check_of_mapping(check_part: Check) -> Check:
    def check(value: Any) -> Fault | None:
        if type(value) is not dict:
            return "", value, "an object"
        for name, part in value.items():
            if (found := check_part(part)) is not None:
                return f".{name}{found[0]}", found[1], found[2]
        return None

    return check


def _check_of_object(kind: Any) -> Check:
    if is_dataclass(kind):
        required = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
        names = {one.name for one in fields(kind)}
    else:
        required, names = kind.__required_keys__, kind.__annotations__.keys() | kind.__required_keys__
    hints = get_type_hints(kind, include_extras=True)
    checks = [(name, _check_of(hints[name]), name in required) for name in hints if name in names]

    def check(value: Any) -> Fault | None:
        if type(value) is not dict:
            return "", value, "an object"
        for name, check_part, is_required in checks:
            if name in value:
                if (found := check_part(value[name])) is not None:
                    return f".{name}{found[0]}", found[1], found[2]
            elif is_required:
                return f".{name}", MISSING, ""
        return None

    return check

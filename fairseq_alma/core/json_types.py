"""Check values against a declared type: values that were read from JSON, so that damaged and foreign files are refused,
and those of settings.

A declared type is one that a type checker knows, too: int, float, str, bool, None, Any, Literal, list, dict, unions, a
TypedDict or a dataclass. `Annotated` adds bounds. NaN and infinity are refused, except with MAY_DIVERGE. Keys that are
not declared are ignored, because a later version may have written them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import count, repeat
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

Fault = tuple[str, Any, str]
"""What is wrong with a value: the place of the wrong part, such as ".checkpoints[0].path", the part itself (MISSING if
it is missing), and what was expected."""
Check = Callable[[Any], Fault | None]


@dataclass(frozen=True)
class AtLeast:
    """Minimum value of a number, for use in `typing.Annotated`."""

    minimum: int


@dataclass(frozen=True)
class AtMost:
    """Maximum value of a number, for use in `typing.Annotated`."""

    maximum: float


MAY_DIVERGE = "may diverge"
"""Used in `typing.Annotated` for scores, which are NaN or infinite if the training has diverged."""
Count = Annotated[int, AtLeast(1)]
NonNegative = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]
"""Type of a quantity that is measured, such as a time."""
Fraction = Annotated[float, AtLeast(0), AtMost(1)]
Loss = Annotated[float, AtLeast(0), MAY_DIVERGE]
Perplexity = Annotated[float, AtLeast(1), MAY_DIVERGE]

_NAMES: dict[Any, str] = {int: "an integer", str: "a string", bool: "true or false", NoneType: "null"}


def value_of(value: Any, kind: Any) -> Any:
    """Return a value that was read from JSON; an object of `kind` if this declared type is a dataclass.

    Raise ValueError if the value does not have the declared type.
    """
    if fault := fault_in(value, kind):
        raise ValueError(fault)
    if not is_dataclass(kind):
        return value
    return kind(**{name: value[name] for name in _names_of(kind) if name in value})  # type: ignore[operator,arg-type]


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass. Ledgers have thousands of rows, so they are listed once."""
    return tuple(one.name for one in fields(kind))


def expected_instead_of(value: Any, kind: Any) -> str | None:
    """Return what was expected, such as "an integer of at least 1", if the value does not have the declared type."""
    found = _check_of(kind)(value)
    return None if found is None else found[2]


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
        is_bool = isinstance(args[0], bool)
        return lambda value: None if value in args and isinstance(value, bool) == is_bool else ("", value, expected)
    if kind is float or origin is Annotated:
        return _check_of_number(args[0] if args else float, args[1:])
    if kind in _NAMES:
        return lambda value: None if _is_of(value, kind) else ("", value, _NAMES[kind])
    if origin is list:
        check_part = _check_of(args[0])
        return _check_of_parts(list, "a list", lambda value: zip(count(), value, repeat(check_part)))
    if origin is tuple:  # a list with a fixed number of parts, each with its own type
        checks = [_check_of(one) for one in args]
        expected = f"a list of {len(checks)} values"
        return _check_of_parts(list, expected, lambda value: zip(count(), value, checks, strict=False), len(checks))
    if origin is dict:
        check_part = _check_of(args[1])
        return _check_of_parts(dict, "an object", lambda value: zip(value, value.values(), repeat(check_part)))
    if is_typeddict(kind) or is_dataclass(kind):
        return _check_of_object(kind)
    return lambda value: None


def _is_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return type(value) is kinds or (isinstance(value, kinds) and not isinstance(value, bool))


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
        if isinstance(value, float) and not isfinite(value):
            return None if may_diverge else ("", value, "a finite number")
        is_number = type(value) in kinds or _is_of(value, kinds)  # the first is faster
        return None if is_number and lowest <= value <= highest else ("", value, expected)

    return check


def _check_of_parts(
    container: type[list] | type[dict],
    expected: str,
    parts: Callable[[Any], Iterable[tuple[Any, Any, Check]]],
    size: int | None = None,
) -> Check:
    """Check a container, and each of its parts: `parts` returns their places in it, values and checks."""

    def check(value: Any) -> Fault | None:
        if type(value) is not container or (size is not None and len(value) != size):
            return "", value, expected
        for key, part, check_part in parts(value):
            if (found := check_part(part)) is not None:
                return f"[{key}]{found[0]}" if container is list else f".{key}{found[0]}", found[1], found[2]
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

    def parts(value: dict[str, Any]) -> Iterator[tuple[str, Any, Check]]:
        for name, check_part, is_required in checks:
            if name in value:
                yield name, value[name], check_part
            elif is_required:
                yield name, MISSING, lambda missing: ("", missing, "")

    return _check_of_parts(dict, "an object", parts)

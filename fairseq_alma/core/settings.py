"""Base class for settings: frozen dataclasses that are created from flat `key=value` pairs and check their values."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.json_types import MAY_DIVERGE, expected_instead_of
from fairseq_alma.core.json_types import Count as Count
from fairseq_alma.core.json_types import NonNegative as NonNegative

MAX_SEED = 1_000_000
"""Seeds must be smaller than this number. It is smaller than MEMBER_SEED_STRIDE, a multiple of which alma-lm adds to
the seed of the run for each member, so members of runs with different seeds never have the same seed."""


@dataclass(frozen=True)
class Flags:
    """What a setting is, beside its type and its default. `setting` declares it at the field."""

    free: bool = False
    """Whether it may change when a run is continued, such as a file location or a device. It does not affect the
    result of a stage."""
    forkable: bool = False
    """Whether it may change at a fork of a run (see SeedRecord): it controls how a stage is trained, but not the model
    or the data."""
    seed: bool = False
    """Whether it selects random seeds. Runs that differ only in such settings repeat the same experiment."""
    size: bool = False
    """Whether it determines the size of a learner (its number of parameters)."""
    growth: bool = False
    """Whether it determines how often or by how much a learner grows. Suitable values depend on the number of stages,
    so runs with different values of `wait` usually also differ in these settings."""
    with_wait: bool = False
    """Whether it is `wait`, or is usually changed together with it. To show the effect of `wait`, a report compares two
    runs that differ only in these settings."""
    off: Any = ...
    """For a setting that switches something on that the paper does not have: the value that switches it off. It may be
    None, so for all other settings it is Ellipsis."""


def setting(default: Any = MISSING, **flags: Any) -> Any:
    """Return a dataclass field for a setting, with a default value and with the fields of `Flags`."""
    return field(default=default, metadata={"flags": Flags(**flags)})


class SettingErrors:
    """Collects the errors of several checks of settings, so that one message reports all of them.

    `errors`, name of a setting -> message, are known already.
    """

    def __init__(self, errors: Mapping[str, str] | None = None):
        self._names = set(errors or {})
        self.messages = list((errors or {}).values())

    def collect(self, check: Callable[[], Any]) -> None:
        """Call `check`. If it raises a SettingError, keep the message.

        A message about a setting that has an error already is not kept. A check may fail in other ways because of an
        earlier error, for example of a value with the wrong type. Then its error is ignored.
        """
        try:
            check()
        except SettingError as error:
            messages = error.messages if isinstance(error, ManySettingsError) else [str(error)]
            self.messages += [one for one in messages if one.partition("=")[0] not in self._names]
        except (TypeError, ValueError, AttributeError, AssertionError):
            if not self.messages:
                raise

    def raise_all(self) -> None:
        """Raise one SettingError with all messages. Do nothing if there are none."""
        messages = list(dict.fromkeys(self.messages))
        if len(messages) == 1:
            raise SettingError(messages[0])
        if messages:
            raise ManySettingsError(messages)


class ManySettingsError(SettingError):
    """Several settings are invalid. The message has a line for each error."""

    def __init__(self, messages: Sequence[str]):
        super().__init__("\n- ".join([f"{len(messages)} errors:", *messages]))
        self.messages = tuple(messages)


class Settings:
    """Base class for all settings. Subclasses are frozen dataclasses.

    When an object is created, each value is checked against the type of its field. The types `Count`, `NonNegative`,
    `float`, `bool`, `str` and `Literal[...]` are checked, also in combination with `| None`. All errors are reported
    together.
    """

    if_missing: ClassVar[Mapping[str, str]] = {}
    """Name of a required setting -> message if its value is None or empty."""

    def __post_init__(self) -> None:
        SettingErrors(self.type_errors()).raise_all()

    def type_errors(self) -> dict[str, str]:
        """Check each value against the type of its field. Return name -> message for each invalid value."""
        errors = {}
        for name, hint in _types_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value in (None, "") and name in self.if_missing:
                errors[name] = self.if_missing[name]
                continue
            try:
                _check(name, value, hint)
            except SettingError as error:
                errors[name] = str(error)
        return errors

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings for a mapping of names to values. Raise SettingError if a name or a value is invalid."""
        errors = SettingErrors()
        known = [one.name for one in describe(cls)]
        errors.collect(lambda: refuse_unknown_keys(values, known))
        settings: list[Self] = []
        errors.collect(lambda: settings.append(cls(**{name: values[name] for name in known if name in values})))
        errors.raise_all()
        return settings[0]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of setting names to values."""
        return {one.name: getattr(self, one.name) for one in describe(type(self))}


@dataclass(frozen=True)
class SettingDescription:
    """Name, default and documentation of a setting."""

    name: str
    default: Any
    """The default value; `dataclasses.MISSING` if the setting must be given."""
    text: str
    """Meaning of the setting. It is the docstring of the field."""
    is_text: bool
    """Whether the value may be any text, and nothing else but None."""
    flags: Flags


def describe(cls: type[Settings]) -> list[SettingDescription]:
    """Return a description of each setting of a class, in the order of declaration."""
    found: list[SettingDescription] = []
    for one in _fields(cls):
        if one.metadata.get("is_setting", True):
            hint = _types_of(cls)[one.name]  # type: ignore[arg-type]
            is_text = {*_alternatives(hint)} - {NoneType} == {str}
            flags = one.metadata.get("flags", Flags())
            found.append(SettingDescription(one.name, one.default, _docstring(cls, one.name), is_text, flags))
    return found


def defaults_of(cls: type[Settings]) -> dict[str, Any]:
    """Return a dictionary from name to default value, for all settings of a class that have a default value."""
    return {one.name: one.default for one in describe(cls) if one.default is not MISSING}


def refuse_unknown_keys(keys: Iterable[str], known: Sequence[str]) -> None:
    """Raise SettingError if one of `keys` is not in `known`.

    The message suggests the most similar known key; otherwise it lists all known keys.
    """
    unknown = sorted(set(keys) - set(known))
    if not unknown:
        return
    near = {key: nearest_key(key, known) for key in unknown}
    hints = [f"did you mean {found}?" if len(unknown) == 1 else f"for {key}, did you mean {found}?"
             for key, found in near.items() if found]  # fmt: skip
    if None in near.values():
        hints.append(f"the settings are {', '.join(sorted(known))}")
    else:
        hints.append("--help lists all settings")
    raise SettingError(f"unknown settings {', '.join(unknown)}: {' '.join(hints)}")


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most similar to the mistyped key `key`; None if no known key is similar."""
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), None)


def _fields(cls: type[Settings]) -> tuple[Field[Any], ...]:
    return fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass


@cache
def _types_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise SettingError if `value` does not match the type `hint` of the setting `name`.

    A union of several types, for example `int | str`, is not checked here, but by the class that has the setting.
    """
    alternatives = list(_alternatives(hint))
    kinds = [one for one in alternatives if one is not NoneType]
    if len(kinds) > 1 or is_dataclass(kinds[0]) or (value is None and NoneType in alternatives):
        return
    # Classes check themselves whether their numbers are finite.
    kind = Annotated[float, MAY_DIVERGE] if kinds[0] is float else kinds[0]
    if expected := expected_instead_of(value, kind):
        raise SettingError(f"{name}={value!r} {'is not' if get_origin(kind) is Literal else 'must be'} {expected}")


def _alternatives(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _alternatives(one)
    else:
        yield hint


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Return a mapping from the name of each field of a class to the docstring of the field."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        # Without source code, for example if the class is defined in an interactive session, there are no docstrings.
        return {}
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for declared, following in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[declared.target.id] = inspect.cleandoc(str(following.value.value))
    return found


def _docstring(cls: type, name: str) -> str:
    """Return the docstring of the field `name` of `cls`. The field may be declared in a base class."""
    return next((text for base in cls.__mro__ if (text := _docstrings(base).get(name))), "")

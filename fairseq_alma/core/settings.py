"""What every class of settings shares: made from a mapping, checked value by value."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Self

from fairseq_alma.core.errors import SettingError

MAX_SEED = 1_000_000


class Settings:
    """To be a frozen dataclass, which checks its values when it is made."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From resolved configuration values.

        Raises:
            SettingError: a key that is no setting, or a value out of range.
        """
        if isinstance(values.get("preset"), Mapping):
            raise SettingError(
                "the file of preset= sets nothing: it must begin with the line '# @package _global_', before any other "
                "comment, for its keys to be settings"
            )
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(values.keys() - known)
        if unknown:
            raise SettingError(f"unknown settings {', '.join(unknown)}: there are {', '.join(sorted(known))}")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    def check_whole(self, *names: str, least: int) -> None:
        """Raises SettingError: one of them is no whole number, or below `least`. None is left alone."""
        for name in names:
            value = getattr(self, name)
            if value is None and self._may_be_none(name):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SettingError(f"{name}={value!r} must be a whole number of at least {least}")

    def check_number(self, *names: str) -> None:
        """Raises SettingError: one of them is no number."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise SettingError(f"{name}={value!r} must be a number")

    def _may_be_none(self, name: str) -> bool:
        return any(f.name == name and f.default is None for f in fields(self))  # type: ignore[arg-type]

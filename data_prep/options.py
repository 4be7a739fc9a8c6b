"""How a settings dataclass declares its command-line options: once, beside each field.

The parser, the command line that a stream records, and the identity of a stream are derived from these declarations.
"""

import argparse
import dataclasses
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """The command-line option of one setting, and what the setting affects."""

    flag: str
    group: str
    """Heading of --help under which the option is listed."""
    help: str
    """What the setting does. argparse replaces %(default)s by the default."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    """The smallest value that is accepted."""
    shapes_stream: bool = True
    """True if the bytes of the stream depend on it. All runs of one stream folder must agree on such a setting."""
    in_command: bool = True
    """True if the recorded command line names it when it differs from the default."""
    always_in_command: bool = False
    """True if the recorded command line names it even when it has its default."""
    fixed_by_stream: bool = False
    """True if an extension takes it from the stream that it extends, so that it must not be given."""


def setting(default: Any, flag: str, group: str, help: str, **more: Any) -> Any:
    """Return a dataclass field with a default and an `Option`. See `Option` for the other arguments."""
    return dataclasses.field(default=default, metadata={"option": Option(flag, group, help, **more)})


def options_of(settings: Any) -> dict[str, Option]:
    """Return the options of a settings dataclass, or of an instance of one, by the name of their field."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(settings)}
    return {name: option for name, option in found.items() if option is not None}


def add_options(parser: argparse.ArgumentParser, groups: dict[str, Any], settings: type) -> None:
    """Add the options of a settings dataclass to a parser.

    Args:
        parser: the parser. The parsed value of a field has the name of the option: `slurm_time` for --slurm-time.
        groups: the argument groups that exist already, by heading. New ones are added.
        settings: the dataclass.
    """
    types, defaults = typing.get_type_hints(settings), defaults_of(settings)
    for name, option in options_of(settings).items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        if types[name] is bool:
            groups[option.group].add_argument(option.flag, action="store_true", help=option.help)
            continue
        types_of_values = [each for each in typing.get_args(types[name]) or (types[name],) if each is not type(None)]
        groups[option.group].add_argument(
            option.flag,
            type=types_of_values[0],
            default=defaults[name],
            metavar=option.metavar,
            choices=option.choices or None,
            help=option.help,
        )


def parsed_settings(parsed: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the values that a parser found for the options of a settings dataclass, by the name of their field."""
    return {
        name: getattr(parsed, option.flag.removeprefix("--").replace("-", "_"))
        for name, option in options_of(settings).items()
    }


def defaults_of(settings: Any) -> dict[str, Any]:
    """Return the default of each field of a settings dataclass that has an option."""
    return {field.name: field.default for field in dataclasses.fields(settings) if "option" in field.metadata}

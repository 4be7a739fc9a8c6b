"""Declare command-line options. Each option is declared in the field of a settings dataclass that stores its value.

Three things are generated from these declarations: the argument parser, the command line recorded in a stream, and the
list of settings that must be equal in all calls of alma-prep with the same stream folder.
"""

import argparse
import dataclasses
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """The command-line option of one setting, and how a stream depends on the setting."""

    flag: str
    group: str
    """Name of the section of --help that lists the option."""
    help: str
    """Help text. argparse replaces %(default)s with the default."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    """Smallest value that is accepted; None: no limit."""
    shapes_stream: bool = True
    """Whether the bytes of the stream depend on the option. If so, every alma-prep command that continues or extends
    a stream folder must give the same value."""
    in_command: bool = True
    """Whether the option can be part of the command line in stream.json, with which the stream can be made again.

    If True, the command line contains the option when its value is not the default. If False, it never does."""
    always_in_command: bool = False
    """If True, the command line in the stream.json of a new stream contains the option even if its value is the
    default."""
    fixed_by_stream: bool = False
    """Whether alma-prep --extend, which adds mega-batches to a stream, takes the value from the existing stream. If so,
    the option must not be given together with --extend."""

    reads: bool = False
    """Whether it depends on the option which documents are read and pass the cleaning.

    If so, an interrupted run cannot continue with another value, because the text would have to be read again."""
    inherited: bool | None = None
    """Whether alma-prep --extend takes the value from the existing stream if the option is not given. None: if `reads`
    is True."""

    @property
    def is_inherited(self) -> bool:
        """Whether alma-prep --extend takes the value from the existing stream if the option is not given."""
        return self.reads if self.inherited is None else self.inherited


def setting(default: Any, flag: str, group: str, help: str, **more: Any) -> Any:
    """Return a dataclass field with a default value and an `Option`. The other arguments are fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(flag, group, help, **more)})


def options_of(settings: Any) -> dict[str, Option]:
    """Return a dict that maps field names to options. `settings` is a settings dataclass or an instance of one."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(settings)}
    return {name: option for name, option in found.items() if option is not None}


def add_options(parser: argparse.ArgumentParser, groups: dict[str, Any], settings: type) -> None:
    """Add the options of a settings dataclass to a parser.

    Args:
        parser: the parser. Its method `parse_args` stores each value under the name of the option, for example
            `slurm_time` for --slurm-time. The name of the field can be different.
        groups: the argument groups of the parser, by the section name in --help. Missing groups are added to this
            dict and to the parser.
        settings: the settings dataclass.
    """
    types, defaults = typing.get_type_hints(settings), defaults_of(settings)
    for name, option in options_of(settings).items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        if types[name] is bool:
            groups[option.group].add_argument(option.flag, action="store_true", help=option.help)
            continue
        if isinstance(defaults[name], tuple):
            groups[option.group].add_argument(option.flag, action="append", metavar=option.metavar, help=option.help)
            continue
        types_of_values = [each for each in typing.get_args(types[name]) or (types[name],) if each is not type(None)]
        groups[option.group].add_argument(
            option.flag,
            action=_StoreGiven,
            type=types_of_values[0],
            default=defaults[name],
            metavar=option.metavar,
            choices=option.choices or None,
            help=option.help,
        )


class _StoreGiven(argparse.Action):
    """Store the value of an option, and add the option to the list `given` of the namespace.

    The list shows which options the user has given, also if their values are the defaults.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = [*getattr(namespace, "given", []), self.dest]


def given_settings(parsed: argparse.Namespace, settings: type) -> tuple[str, ...]:
    """Return the names of the fields of `settings` whose options were given on the command line."""
    given = getattr(parsed, "given", [])
    return tuple(name for name, option in options_of(settings).items() if _destination(option) in given)


def _destination(option: Option) -> str:
    """Return the name under which argparse stores the value of an option."""
    return option.flag.removeprefix("--").replace("-", "_")


def parsed_settings(parsed: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return a dict that maps the name of each field of `settings` that has an option to its parsed value."""
    found = {name: getattr(parsed, _destination(option)) for name, option in options_of(settings).items()}
    # An option that can be given several times has a tuple of values. argparse stores a list, or None.
    defaults = defaults_of(settings)
    return {name: tuple(value or ()) if isinstance(defaults[name], tuple) else value for name, value in found.items()}


def defaults_of(settings: Any) -> dict[str, Any]:
    """Return a dict that maps the name of each field of `settings` that has an option to its default value."""
    return {field.name: field.default for field in dataclasses.fields(settings) if "option" in field.metadata}

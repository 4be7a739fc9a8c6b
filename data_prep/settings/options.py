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

    default: Any
    flag: str
    group: str
    """Name of the section of --help that lists the option."""
    help: str
    """Help text, in which %(default)s stands for the default."""
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

    @property
    def destination(self) -> str:
        """The name under which argparse stores the value."""
        return self.flag.removeprefix("--").replace("-", "_")


def with_option(default: Any, flag: str, group: str, help: str, **more: Any) -> Any:
    """Return a dataclass field with a default value and an `Option`. The other arguments are fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, flag, group, help, **more)})


def options_of(settings: Any) -> dict[str, Option]:
    """Return a dict that maps field names to options. `settings` is a settings dataclass or an instance of one."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(settings)}
    return {name: option for name, option in found.items() if option is not None}


def add_options(parser: argparse.ArgumentParser, groups: dict[str, Any], settings: type) -> None:
    """Add the options of a settings dataclass to a parser. It stores only the values of options that are given.

    Args:
        parser: the parser.
        groups: the argument groups of the parser, by the section name in --help. Missing groups are added to this
            dict and to the parser.
        settings: the settings dataclass.
    """
    types = typing.get_type_hints(settings)
    for name, option in options_of(settings).items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        if types[name] is bool:
            more: dict[str, Any] = {"action": "store_true"}
        elif isinstance(option.default, tuple):
            more = {"action": "append", "metavar": option.metavar}
        else:
            kind, *_ = (each for each in typing.get_args(types[name]) or (types[name],) if each is not type(None))
            more = {"type": kind, "metavar": option.metavar, "choices": option.choices or None}
        text = option.help.replace("%(default)s", str(option.default))
        groups[option.group].add_argument(option.flag, default=argparse.SUPPRESS, help=text, **more)


def parsed_settings(parsed: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the values of the options of `settings` that were given on the command line, by field name."""
    values = vars(parsed)
    found = {name: option.destination for name, option in options_of(settings).items() if option.destination in values}
    # An option that can be given several times has a tuple of values. argparse stores a list.
    return {name: tuple(values[key]) if isinstance(values[key], list) else values[key] for name, key in found.items()}

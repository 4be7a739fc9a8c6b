"""The text of `--help`, and the settings reference (the list of all settings of a command).

Both are generated from the settings classes.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from fairseq_alma.core.catalogue import RunSettings, learners
from fairseq_alma.core.settings import SettingDescription, Settings, describe

_WIDTH = 100


@dataclass(frozen=True)
class SettingHelp:
    """Entry of one setting in the settings reference."""

    name: str
    default: str
    """Default value, written as on the command line; "required" if there is no default."""
    text: str
    """Description of the setting."""
    learners: tuple[str, ...]
    """Names of the learners that have this setting; empty if every run has the setting."""


def settings_reference(cls: type[RunSettings]) -> list[SettingHelp]:
    """Return one entry for every setting of a command, whose settings have the class `cls`.

    First come the settings that every run has, then the settings that only some learners have. If several learners have
    a setting with the same name and the same default, there is only one entry for all these learners.
    """
    found = [SettingHelp(one.name, _default(one), _one_line(one), ()) for one in describe(cls)]
    own: dict[tuple[str, str], list[str]] = {}
    texts: dict[tuple[str, str], str] = {}
    for entry in learners(cls.program):
        kind = entry.settings(cls.program)
        for one in describe(kind) if kind is not None else []:
            key = (one.name, _typed(one.default))
            own.setdefault(key, []).append(entry.name)
            texts.setdefault(key, _one_line(one))
    found += [SettingHelp(name, default, texts[name, default], tuple(own[name, default])) for name, default in own]
    return found


def group_reference(name: str, cls: type[Settings]) -> list[SettingHelp]:
    """Return one entry for every setting of a group, for example "launch", with which its names begin."""
    return [SettingHelp(f"{name}.{one.name}", _typed(one.default), _one_line(one), ()) for one in describe(cls)]


def help_text(
    introduction: str,
    cls: type[RunSettings],
    presets: list[str],
    groups: Mapping[str, type[Settings]] | None = None,
) -> str:
    """Return the text of `--help`, which lists the usage, learners, presets and settings of a command.

    Args:
        introduction: description and usage of the command.
        cls: class of the command's settings.
        presets: names of the presets.
        groups: name of a group of settings -> class of these settings.
    """
    lines = [introduction.strip(), "", "Learners (learner=NAME):"]
    for entry in learners(cls.program):
        lines += _entry(entry.name, f"{entry.label}. {entry.summary}")
    lines += ["", "Presets (preset=NAME):", *textwrap.wrap(", ".join(presets), _WIDTH, initial_indent="  ",
                                                           subsequent_indent="  ")]  # fmt: skip
    reference = settings_reference(cls)
    lines += ["", "Settings of every run (name=value; the default is in brackets):"]
    for one in reference:
        if not one.learners:
            lines += _entry(one.name, f"{one.text} [{one.default}]")
    lines += ["", "Settings of single learners:"]
    for one in reference:
        if one.learners:
            lines += _entry(one.name, f"{', '.join(one.learners)}: {one.text} [{one.default}]")
    for name, group in (groups or {}).items():
        lines += ["", f"Settings of {name}=slurm:"]
        for one in group_reference(name, group):
            lines += _entry(one.name, f"{one.text} [{one.default}]")
    lines += ["", "Hydra's own flags (-m for sweeps, --cfg job, --config-dir ...): --hydra-help"]
    return "\n".join(lines) + "\n"


def _entry(name: str, text: str) -> Iterator[str]:
    indent = " " * 26
    first = f"  {name:<23} "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=indent)


def _typed(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else "''"


def _default(one: SettingDescription) -> str:
    # The command chooses a folder if the user gives none (see `arguments.default_out`).
    return "runs/DATA/SETTINGS" if one.name == "out" else _typed(one.default)


def _one_line(one: SettingDescription) -> str:
    return " ".join(f"{one.text}{' It may change at a fork.' if one.flags.forkable else ''}".split())

"""The text of `--help`, and the table of settings in the documentation, both made from the settings classes."""

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Any

from fairseq_alma.core.catalogue import RunSettings, learners
from fairseq_alma.core.settings import describe

_WIDTH = 100


@dataclass(frozen=True)
class SettingHelp:
    """One line of the settings reference."""

    name: str
    default: str
    """The default as it is typed on the command line; "required" if there is none."""
    text: str
    """What the setting means."""
    learners: tuple[str, ...]
    """Names of the learners that take it; empty if every run takes it."""


def settings_reference(cls: type[RunSettings]) -> list[SettingHelp]:
    """Return every setting of a command: first those of every run, then those of single learners.

    A setting that several learners take with the same default and meaning appears once.
    """
    found = [SettingHelp(one.name, _typed(one.default), _one_line(one.text), ()) for one in describe(cls)]
    own: dict[tuple[str, str], list[str]] = {}
    texts: dict[tuple[str, str], str] = {}
    for entry in learners(cls.half):
        kind = entry.settings(cls.half)
        for one in describe(kind) if kind is not None else []:
            key = (one.name, _typed(one.default))
            own.setdefault(key, []).append(entry.name)
            texts.setdefault(key, _one_line(one.text))
    found += [SettingHelp(name, default, texts[name, default], tuple(own[name, default])) for name, default in own]
    return found


def help_text(introduction: str, cls: type[RunSettings], presets: list[str]) -> str:
    """Return the text of `--help`: usage, learners, presets, and each setting with its default and its learners.

    Args:
        introduction: what the command does and how it is called.
        cls: the settings of the command.
        presets: names of the presets.
    """
    lines = [introduction.strip(), "", "Learners (learner=NAME):"]
    for entry in learners(cls.half):
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


def _one_line(text: str) -> str:
    return " ".join(text.split())

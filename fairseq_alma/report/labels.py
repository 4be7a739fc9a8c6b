"""Names and sort order of settings and groups of runs in tables, in figures and on the page."""

from collections.abc import Sequence
from typing import Any

from fairseq_alma.core import catalogue
from fairseq_alma.report.runs import RunGroup

MAX_CHARACTERS = 60
"""Maximum length of a setting's value in a label, in characters. A longer value is cut."""


def group_label(group: RunGroup, varied_settings: Sequence[str]) -> str:
    """Return a label such as `gMoE, wait 10, width 32`: the learner, and the settings that differ between the groups.

    Args:
        group: the group to name.
        varied_settings: names of the settings that differ between groups, in label order (Comparison.varied_settings).
    """
    words = [catalogue.label_of(group.learner)]
    for name in varied_settings:
        value = group.settings.get(name)
        if name == "learner" or value is None:
            continue
        if name == "replay":
            if value:
                words.append("replay" if value == "all" else f"replay {value}")
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name} {_short_text(value)}")
    if group.repeat:
        words.append(f"again ({group.repeat + 1})")
    return printable(", ".join(words))


def learner_position(name: str) -> int:
    """Return the index of a learner in the order in which the paper lists them. Learners of plugins come last."""
    names = [entry.name for entry in catalogue.learners()]
    return names.index(name) if name in names else len(names)


def sort_key(group: RunGroup) -> tuple:
    """Return the sort key of a group: learner (in the paper's order), size, wait, replay, then the other settings."""
    size = tuple(_sortable(group.settings.get(name)) for name in catalogue.SIZE_SETTINGS)
    others = [(name, repr(value)) for name, value in sorted(group.settings.items())]
    position = learner_position(group.learner)
    return (position, group.learner, size, group.wait, bool(group.replay), repr(group.replay), others, group.repeat)


def printable(text: str) -> str:
    """Return the text with lone surrogates replaced by escapes such as `\\udcff`, so that it can be encoded as UTF-8.

    Python uses lone surrogates to represent the bytes of a path that is not valid UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sortable(value: Any) -> tuple:
    # Sort numbers first, by value, and then all other values, by their text.
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def _short_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        text = "+".join(map(_short_text, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."

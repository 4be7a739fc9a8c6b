"""Labels and order of the groups of runs in tables, in figures and on the page."""

from collections.abc import Sequence
from typing import Any

from fairseq_alma.core import catalogue
from fairseq_alma.core.printing import printable
from fairseq_alma.report.runs import RunGroup, has_effect

MAX_CHARACTERS = 60
"""Maximum length of a setting's value in a label, in characters. A longer value is cut."""


def group_label(group: RunGroup, varied_settings: Sequence[str]) -> str:
    """Return the label of a group of runs, such as `gMoE, wait 10, width 32`.

    The label contains the learner, and the settings that differ between the groups of the comparison. Settings that
    have no effect, or switch nothing on, are left out.

    Args:
        group: the group whose label is returned.
        varied_settings: names of the settings that the label contains, in this order; usually
            Comparison.varied_settings.
    """
    words = [catalogue.label_of(group.learner)]
    for name in varied_settings:
        value = group.settings.get(name)
        is_off = catalogue.OPTIONS[group.half].get(name) == value
        if name == "learner" or value is None or is_off or not has_effect(group.settings, name):
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


def options_of(group: RunGroup) -> list[str]:
    """Return the names of the settings of catalogue.OPTIONS that are on in a group of runs."""
    off = catalogue.OPTIONS[group.half]
    return [name for name in off if group.settings.get(name) not in (None, off[name])]


def learner_position(name: str) -> int:
    """Return the position of a learner in the paper's list of learners. Learners that plugins add come last."""
    names = [entry.name for entry in catalogue.learners()]
    return names.index(name) if name in names else len(names)


def sort_key(group: RunGroup) -> tuple:
    """Return the sort key of a group: learner in the paper's order, then size, wait, replay and the other settings."""
    size = tuple(_sortable(group.settings.get(name)) for name in catalogue.SIZE_SETTINGS)
    others = [(name, repr(value)) for name, value in sorted(group.settings.items())]
    position = learner_position(group.learner)
    return (position, group.learner, size, group.wait, bool(group.replay), repr(group.replay), others, group.repeat)


def _sortable(value: Any) -> tuple:
    # Sort numbers first, by value, and then all other values, by their text. Without these tuples, Python would fail to
    # compare a number with a text.
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def _short_text(value: Any) -> str:
    """Return the value of a setting as text with at most MAX_CHARACTERS characters."""
    if isinstance(value, list | tuple):
        text = "+".join(map(_short_text, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."

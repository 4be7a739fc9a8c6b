"""A MkDocs hook that writes the tables of docs/settings.md from the settings classes and the options of alma-prep.

In the page, a line `<!-- settings: alma-vision -->` becomes the tables of that command.
"""

import argparse
import re
import sys
from pathlib import Path

from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))  # the source of these pages, whatever is installed

from data_prep.cli import _parser as alma_prep_parser
from fairseq_alma.app.help import SettingHelp, group_reference, settings_reference
from fairseq_alma.core.catalogue import RunSettings, learners
from fairseq_alma.lm.settings import LanguageModelSettings
from launch.slurm import SlurmSettings
from vision.settings import VisionSettings

COMMANDS: dict[str, type[RunSettings]] = {"alma-lm": LanguageModelSettings, "alma-vision": VisionSettings}
MARKER = re.compile(r"^<!-- settings: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace the markers of a page by tables."""
    return MARKER.sub(lambda match: tables_of(match[1]), markdown)


def tables_of(command: str) -> str:
    """Return the tables of a command as Markdown."""
    if command == "alma-prep":
        return _option_tables(alma_prep_parser())
    cls = COMMANDS[command]
    reference = settings_reference(cls)
    lines = ["### Settings of every run", "", *_table([one for one in reference if not one.learners], False)]
    names = ", ".join(f"`{entry.name}`" for entry in learners(cls.program))
    lines += ["", f"`learner=` is one of {names}.", "", "### Settings of single learners", ""]
    lines += _table([one for one in reference if one.learners], True)
    if command == "alma-lm":
        lines += [
            "",
            "### Settings of launch=slurm, also of alma-vision",
            "",
            *_table(group_reference("launch", SlurmSettings), False),
        ]
    return "\n".join(lines)


def _table(settings: list[SettingHelp], with_learners: bool) -> list[str]:
    head = ["setting", "default", "what it means", *(["learners"] if with_learners else [])]
    lines = [_row(head), _row([":---"] * len(head))]
    for one in settings:
        cells = [f"`{one.name}=`", f"`{one.default}`" if one.default != "required" else "required", one.text]
        lines.append(_row([*cells, *([", ".join(f"`{name}`" for name in one.learners)] if with_learners else [])]))
    return lines


def _option_tables(parser: argparse.ArgumentParser) -> str:
    lines, formatter = [], parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help and "-h" not in action.option_strings]
        if not actions:
            continue
        title = (group.title or "").capitalize()
        lines += [f"### {'Arguments' if title == 'Positional arguments' else title}", ""]
        lines += [_row(["option", "default", "what it means"]), _row([":---"] * 3)]
        for action in actions:
            name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
            value = str(action.metavar or "").replace("|", " or ") if action.option_strings else ""
            if action.choices:
                value = " or ".join(map(str, action.choices))
            default = "" if action.default in (None, "") or action.default is False else f"`{action.default}`"
            default = "required" if action.required else default
            text = " ".join(formatter._expand_help(action).split())
            text = (
                re.sub(r";? default: [^.;)]*$", "", text)
                .replace("*.", "\\*.")
                .replace("<", "&lt;")
                .replace("][", "]\\[")
            )
            lines.append(_row([f"`{name} {value}`".replace(" `", "`"), default, text]))
        lines.append("")
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

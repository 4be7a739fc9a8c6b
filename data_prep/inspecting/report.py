"""Format the report of `alma-prep inspect` as text and as an HTML page."""

import html
from collections.abc import Sequence
from typing import NamedTuple

_BAR_CHARACTERS = 40
"""Length of the longest bar of a histogram in characters."""
_TEXT_CHARACTERS = 600
"""Number of characters of each sample in the text form. The page contains the complete samples."""


class Table(NamedTuple):
    """A table, whose rows have a name and further cells. Numbers are written with commas."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, Sequence[int | str]]]
    bars: bool = False
    """Whether to draw a bar for the second cell of each row, as in a histogram."""


class Report(NamedTuple):
    """What is known about a stream."""

    title: str
    tables: list[Table]
    samples: list[tuple[str, str]]
    """A heading and the text of each sample."""


def as_text(report: Report) -> str:
    """Return the report as text for a terminal."""
    lines = [report.title]
    for table in report.tables:
        cells = [table.header, *((name, *map(_cell, rest)) for name, rest in table.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
        lines += ["", table.title]
        for number, row in enumerate(cells):
            padded = [row[0].ljust(widths[0])]
            for width, text, first in zip(widths[1:], row[1:], cells[-1][1:], strict=True):
                padded.append(text.rjust(width) if first[-1:].isdigit() else text.ljust(width))
            share = _share(table, number - 1)
            bar = "#" * max(1, round(share * _BAR_CHARACTERS)) if share else ""
            lines.append(f"  {'  '.join(padded)}  {bar}".rstrip())
    for heading, text in report.samples:
        more = f" ... ({len(text):,} characters)" if len(text) > _TEXT_CHARACTERS else ""
        shown = text[:_TEXT_CHARACTERS].rstrip().replace("\n", "\n  ")
        lines += ["", f"{heading}:", f"  {shown}{more}"]
    # Control characters of the text could change the settings of a terminal.
    return "".join(one if one.isprintable() or one == "\n" else "�" for one in "\n".join(lines))


def as_html(report: Report) -> str:
    """Return the report as an HTML page that needs no other file."""
    parts = [_HEAD.format(title=html.escape(report.title))]
    for table in report.tables:
        header = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
        parts.append(f"<h2>{html.escape(table.title)}</h2>\n<table><tr>{header}</tr>")
        for number, (name, rest) in enumerate(table.rows):
            cells = "".join(
                f"<td class={'n' if isinstance(one, int) else 't'}>{html.escape(_cell(one))}</td>" for one in rest
            )
            width = 20 * _share(table, number)
            bar = f'<td><div class=bar style="width:{width:.2f}em"></div></td>' if table.bars else ""
            parts.append(f"<tr><td>{html.escape(name)}</td>{cells}{bar}</tr>")
        parts.append("</table>")
    parts.append("<h2>Samples</h2>")
    for heading, text in report.samples:
        parts.append(f"<h3>{html.escape(heading)}</h3>\n<pre>{html.escape(text)}</pre>")
    return "\n".join([*parts, "</body></html>", ""])


def _cell(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _share(table: Table, row: int) -> float:
    """Return the length of the bar of a row as a fraction of the longest bar; 0.0 for the header, or without bars."""
    if not table.bars or row < 0:
        return 0.0
    values = [rest[0] for _, rest in table.rows if isinstance(rest[0], int)]
    value = table.rows[row][1][0]
    return value / max(*values, 1) if isinstance(value, int) else 0.0


_HEAD = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
.bar {{ background: #4a7ebb; height: .9em; }}
pre {{ white-space: pre-wrap; background: #f6f6f6; padding: .8em; }}
</style></head><body>
<h1>{title}</h1>"""

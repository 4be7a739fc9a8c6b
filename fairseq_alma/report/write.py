"""A report on disk: index.html, figures/COMPARISON/NAME.png and .pdf, tables/COMPARISON/NAME.csv, .md and .tex."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_whole
from fairseq_alma.report.figures import figures_or_faults
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import page
from fairseq_alma.report.runs import Found
from fairseq_alma.report.tables import Table, tables_of


def write_report(found: Found, out: Path, page_only: bool = False, reload_seconds: float | None = None) -> int:
    """All files, each whole or not at all. Returns how many.

    A figure that cannot be drawn (a damaged routing file) is left out, and told in `found.faults`.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file: give a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    count = 1
    for comparison in found.comparisons:
        numbers = all_numbers(comparison)
        if page_only:
            continue
        for table in tables_of(comparison, numbers):
            write_table(table, out / "tables" / comparison.slug)
            count += 3
        for name, figure in figures_or_faults(comparison, numbers):
            if isinstance(figure, RunError):
                found.faults.append(str(figure))
                continue
            save(figure, out / "figures" / comparison.slug / name)
            count += 2
    # Last: it tells what the rest came to.
    write_whole(out / "index.html", _spelled(page(found, reload_seconds)), durable=False)
    return count


def _spelled(text: str) -> str:
    """A path whose bytes are not UTF-8 reaches us with lone surrogates: they are spelled as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_table(table: Table, folder: Path) -> None:
    """As CSV, Markdown, LaTeX."""
    for ending, text in (("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())):
        write_whole(folder / f"{table.name}.{ending}", _spelled(text), durable=False)


def save(figure: Figure, path: Path) -> None:
    """PATH.png and PATH.pdf; without the time they were made, so that the same runs give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Figure.savefig draws everything twice, and looks for the layout each time: that is most of the time it takes.
    with _whole(path.with_suffix(".png")) as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
    figure.set_layout_engine("none")
    with _whole(path.with_suffix(".pdf")) as temporary:
        FigureCanvasPdf(figure).print_pdf(temporary, metadata={"CreationDate": None, "Producer": None})


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which then is `path`."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

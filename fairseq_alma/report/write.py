"""Write the files of a report into a folder:

index.html                         the page
figures/COMPARISON/NAME.*          each figure as .png and .pdf
tables/COMPARISON/NAME.*           each table as .csv, .md and .tex
"""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_whole, written_aside
from fairseq_alma.core.printing import printable
from fairseq_alma.report.figures import figures_or_errors
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import page
from fairseq_alma.report.runs import ReportData
from fairseq_alma.report.tables import Table, tables_of


def write_report(data: ReportData, out: Path, page_only: bool = False, reload_seconds: float | None = None) -> int:
    """Write the files of a report.

    Each file is replaced atomically, so a program that reads it gets either the complete old or the complete new file.

    Args:
        data: the runs that were read. If the data file of a figure (routing.npz) is damaged, the figure is left out and
            an error message is appended to `data.errors`.
        out: folder that the report is written to.
        page_only: if True, write index.html only.
        reload_seconds: time in seconds after which the browser loads index.html again; None: it never does.

    Returns:
        The number of files written.

    Raises:
        RunError: if `out` is a file.
        OSError: if the disk is full or `out` is not writable.
    """
    if (out.exists() or out.is_symlink()) and not out.is_dir():
        raise RunError(f"{out} is a file, or a link to a missing folder: give a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    count = 1
    figures: dict[str, list[str]] = {}
    for comparison in [] if page_only else data.comparisons:
        numbers = all_numbers(comparison)
        for table in tables_of(comparison, numbers):
            write_table(table, out / "tables" / comparison.slug)
            count += 3
        for name, figure in figures_or_errors(comparison, numbers):
            if isinstance(figure, RunError):
                data.errors.append(str(figure))
                continue
            save(figure, out / "figures" / comparison.slug / name)
            figures.setdefault(comparison.slug, []).append(name)
            count += 2
    # Write the page last, because it links to the figures, and shows the errors of those that could not be drawn.
    write_whole(out / "index.html", printable(page(data, reload_seconds, figures)), durable=False)
    return count


def write_table(table: Table, folder: Path) -> None:
    """Write a table as CSV, Markdown and LaTeX."""
    for suffix, text in (("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())):
        write_whole(folder / f"{table.name}.{suffix}", printable(text), durable=False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PATH.png and PATH.pdf.

    The two files contain no date, so a report on the same runs always has identical files.
    """
    # Do not use Figure.savefig. It is slow, because it draws the figure twice and computes the layout each time.
    with written_aside(path.with_suffix(".png"), durable=False) as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
    # The layout has been computed for the PNG file. Use the same layout for the PDF file.
    figure.set_layout_engine("none")
    with written_aside(path.with_suffix(".pdf"), durable=False) as temporary:
        FigureCanvasPdf(figure).print_pdf(temporary, metadata={"CreationDate": None, "Producer": None})

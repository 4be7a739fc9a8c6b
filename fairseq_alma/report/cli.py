"""alma-report makes the paper's figures and tables, and a page that shows the best run, from run folders.

alma-report runs/mnist --out report                   report on all runs in a folder, at any depth
alma-report RUN RUN ... --out report --watch          repeat while the runs are running; open report/index.html
alma-report decide runs/paths --price 10              compare policies that decide when to train (decide --help)
tensorboard --logdir RUN                              the numbers of a run while it is running
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from fairseq_alma.core.errors import AlmaError, RunError
from fairseq_alma.core.files import write_whole, written_aside
from fairseq_alma.core.printing import printable, say
from fairseq_alma.core.program import Parser, command
from fairseq_alma.report import decide
from fairseq_alma.report.arrivals import last_arrivals
from fairseq_alma.report.figures import figures_or_errors
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import page
from fairseq_alma.report.policies import FAMILIES
from fairseq_alma.report.reading import is_any_run_held, read_runs
from fairseq_alma.report.runs import ReportData
from fairseq_alma.report.tables import Table, tables_of

MAX_IDLE_POLLS = 3
"""With --watch, the command ends after this many reports in a row during which no process was working on a run. There
may be a pause between two runs of a sweep."""


@command("alma-report")
def main() -> int:
    """Run the command alma-report and return its exit status."""
    if sys.argv[1:2] == ["decide"]:
        compare_policies(sys.argv[2:])
    else:
        _make_report()
    return 0


def _make_report() -> None:
    """Execute alma-report without a subcommand."""
    parser = Parser(prog="alma-report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or folder with run folders at any depth")
    parser.add_argument("--out", required=True, type=Path, metavar="REPORT", help="folder to write the report to")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=30.0, metavar="SECONDS",
        help="write the report again every SECONDS (default: 30) while runs are running; the page reloads itself",
    )  # fmt: skip
    parser.add_argument("--page-only", action="store_true", help="write index.html only, without figures and tables")
    arguments = parser.parse_args()
    # Write `not watch >= 1` instead of `watch < 1`, so that NaN is rejected too. Every comparison with NaN is False.
    if arguments.watch is not None and not arguments.watch >= 1:
        parser.error(f"--watch {arguments.watch:g}: give at least 1 second")
    _refuse_run_folder(arguments.runs, arguments.out)
    if arguments.watch is None:
        make(arguments.runs, arguments.out, page_only=arguments.page_only)
    else:
        watch(arguments.runs, arguments.out, arguments.watch, arguments.page_only)


def compare_policies(arguments: list[str]) -> None:
    """Execute `alma-report decide` with these arguments."""
    parser = Parser(
        prog="alma-report decide",
        description="Compare policies that decide at each arrival whether to train or to wait, on the ledgers of "
        "finished runs of one learner that trained at different arrivals (wait=[1,3,4]).",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or folder with run folders at any depth")
    parser.add_argument("--out", type=Path, metavar="REPORT", help="folder in which the folder `tables` is written")
    parser.add_argument(
        "--price", type=float, default=0.0, metavar="ERROR",
        help="what 1e12 training FLOPs cost, in units of the summed error rate or perplexity (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", default=[], metavar="POLICY",
        help="a further policy: a value of wait= (4, geometric:0.3), one of the policies that are chosen, with its "
        f"number ({', '.join(FAMILIES)}; for example upf:0.5), or MODULE:FUNCTION, a function of yours; repeatable",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if not 0 <= given.price < math.inf:
        parser.error(f"--price {given.price:g}: give a number of at least 0")
    if given.out is not None:
        _refuse_run_folder(given.runs, given.out)
    data = read_runs(given.runs)
    compared = decide.compare(data, given.price, given.policy)
    found = decide.tables(compared) | ({"all": decide.over_streams(compared)} if len(compared) > 1 else {})
    for slug, table in found.items():
        say(table.markdown())
        if given.out is not None:
            write_table(table, given.out / "tables" / slug)
    for message in [*(f"skipped: {error}" for error in data.errors), *data.notes]:
        say(f"alma-report: {message}", sys.stderr)


def make(runs: list[str], out: Path, page_only: bool = False, reload_seconds: float | None = None) -> ReportData:
    """Read the runs and write the report once. Print the numbers of runs and files, and which runs were skipped.

    For `page_only` and `reload_seconds`, see `write_report`. Return what was read.

    Raises:
        RunError: if there is no run to report on, or `out` is a file.
    """
    start = time.monotonic()
    data = read_runs(runs)
    num_files = write_report(data, out, page_only, reload_seconds)
    for error in data.errors:
        say(f"alma-report: skipped: {error}", sys.stderr)
    for note in data.notes:
        say(f"alma-report: {note}", sys.stderr)
    num_groups = sum(len(comparison.groups) for comparison in data.comparisons)
    seconds = time.monotonic() - start
    comparisons = f"{_count(len(data.comparisons), 'comparison')} of runs on the same stream"
    print(f"{_count(num_groups, 'run')} in {comparisons}, {seconds:.1f} s; several seeds of a setting count as one run")
    for comparison in data.comparisons:
        num_finished = len(comparison.finished_groups)
        say(f"  {comparison.name}: {_count(len(comparison.groups), 'run')}, {num_finished} finished")
    say(f"wrote {_count(num_files, 'file')}: open {out / 'index.html'} in a browser")
    return data


def write_report(data: ReportData, out: Path, page_only: bool = False, reload_seconds: float | None = None) -> int:
    """Write index.html, and for each comparison figures (.png and .pdf) and tables (.csv, .md and .tex).

    Each file is replaced atomically. Return the number of files written.

    Args:
        data: the runs that were read. If the data file of a figure (routing.npz) is damaged, the figure is left out and
            an error message is appended to `data.errors`.
        out: folder that the report is written to.
        page_only: if True, write index.html only.
        reload_seconds: time in seconds after which the browser loads index.html again; None: it never does.

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
        for table in filter(None, (*tables_of(comparison, numbers), last_arrivals(comparison))):
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
    """Write a figure as PATH.png and PATH.pdf, without dates: reports on the same runs have identical files."""
    # Do not use Figure.savefig. It is slow, because it draws the figure twice and computes the layout each time.
    with written_aside(path.with_suffix(".png"), durable=False) as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
    # The layout has been computed for the PNG file. Use the same layout for the PDF file.
    figure.set_layout_engine("none")
    with written_aside(path.with_suffix(".pdf"), durable=False) as temporary:
        FigureCanvasPdf(figure).print_pdf(temporary, metadata={"CreationDate": None, "Producer": None})


def _refuse_run_folder(runs: list[str], out: Path) -> None:
    """Raise RunError if the report would be written into a folder that contains the files of a run."""
    is_given = os.path.realpath(out) in map(os.path.realpath, runs)  # Path.resolve raises an error for loops of links
    if is_given or any((out / name).exists() for name in ("settings.json", "ledger.jsonl", "stages", "stream.json")):
        what = "is a folder with runs" if is_given else "is a run folder or a stream folder"
        raise RunError(f"--out {out} {what}: give another folder for the report, for example --out report")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def watch(runs: list[str], out: Path, seconds: float, page_only: bool) -> None:
    """Write the report every `seconds` seconds until no process is working on a run. See `make`.

    As long as a run is running, a browser that shows index.html loads the file again every `seconds` seconds. The last
    version of index.html does not tell the browser to load it again.
    """
    idle_polls = 0
    while True:
        try:
            is_any_running = make(runs, out, page_only, reload_seconds=seconds).is_any_running
        except AlmaError as error:
            # Continue after an error, because it may be temporary. For example, `make` raises an error as long as no
            # run has recorded a result.
            say(f"alma-report: {error}", sys.stderr)
            is_any_running = is_any_run_held(runs)
        idle_polls = 0 if is_any_running else idle_polls + 1
        if idle_polls >= MAX_IDLE_POLLS:
            break
        time.sleep(seconds)
    print("no run is running any more: this is the last report")
    make(runs, out, page_only)


if __name__ == "__main__":
    sys.exit(main())

"""Make all figures and tables in results/ and README.md from the committed ledgers. `make results` runs this script.

.venv/bin/python results/rebuild.py [--out FOLDER] [--tables-only]      default: the repository itself

For each study, the script makes the figures and tables of alma-report for the run folders of the study:
STUDY/COMPARISON/NAME.png and NAME.md. Then it copies tables into README.md and into the README.md of each study. Copies
are placed between the lines `<!-- table: FILE -->` and `<!-- end -->`. If the first line is
`<!-- table: FILE without: WORD -->`, the copy leaves out the columns whose names begin with WORD. If it ends with
`only: A; B -->`, the copy has only the rows whose first cell is A or B.
"""

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from matplotlib.backends.backend_agg import FigureCanvasAgg

from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures import figures_or_errors
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import tables_of

RESULTS = Path(__file__).resolve().parent
STUDIES = ("demo", "books", "mnist", "cifar10")
PAGES = (*STUDIES, "frontier", "policies")
TEXTS = (
    "README.md",
    "docs/recommendations.md",
    "docs/paper/table-2.md",
    *(f"results/{page}/README.md" for page in PAGES),
)
COPY = re.compile(r"(<!-- table: (\S+)(?: without: (\w+))?(?: only: ([^\n]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
DPI = 110
"""Resolution of the committed pictures, in dots per inch."""


def rebuild(out: Path, tables_only: bool = False) -> list[str]:
    """Write all figures, tables and README files into the folder `out`. Return their paths relative to `out`.

    Args:
        out: the folder.
        tables_only: if True, no figures are drawn, which takes most of the time.
    """
    written = []
    for study in STUDIES:
        data = read_runs([RESULTS / study / "ledgers"])
        if data.errors or data.notes:
            sys.exit("\n".join([*data.errors, *data.notes]))
        for comparison in data.comparisons:
            numbers = all_numbers(comparison)
            folder = Path("results") / study / comparison.slug
            (out / folder).mkdir(parents=True, exist_ok=True)
            for table in tables_of(comparison, numbers):
                written.append(_write(out, folder / f"{table.name}.md", table.markdown()))
            for name, figure in () if tables_only else figures_or_errors(comparison, numbers):
                if isinstance(figure, RunError):
                    sys.exit(str(figure))
                figure.set_dpi(DPI)
                FigureCanvasAgg(figure).print_png(out / folder / f"{name}.png", metadata={"Software": None})
                written.append((folder / f"{name}.png").as_posix())
    written.append(_write(out, Path("results/books/claims.md"), _study("books").claims()))
    texts = (
        "books",
        "waits",
        "one_pass",
        "growth",
        "drift",
        "causal",
        "vocabulary",
        "rivals",
        "sizes",
        "replay",
        "arrivals",
        "table2",
    )
    for file in ("mnist", "cifar10", "image_rivals", *texts, "base"):
        for name, text in _study("frontier", file).tables().items():
            written.append(_write(out, Path("results/frontier") / name, text))
    for name, text in _study("policies").tables().items():
        written.append(_write(out, Path("results/policies") / name, text))
    for name in TEXTS:
        text = (RESULTS.parent / name).read_text(encoding="utf-8")
        written.append(_write(out, Path(name), COPY.sub(lambda match: _table_copy(out, match), text)))
    return written


def _study(name: str, file: str = "study") -> ModuleType:
    """Import results/NAME/FILE.py. Several studies have the same file name, so they cannot be imported by name."""
    spec = importlib.util.spec_from_file_location(f"{name}_{file}", RESULTS / name / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table_copy(out: Path, match: re.Match) -> str:
    """Return the lines that replace a copied table in a README: start marker, table rows, end marker.

    Args:
        out: folder that contains the tables.
        match: the current copy with its markers, a match of the pattern COPY.
    """
    # Leave out title and note of the table, because the text around the copy contains them.
    table = (out / match[2]).read_text(encoding="utf-8").split("\n\n")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    if match[4]:
        names = match[4].split("; ")
        if missing := set(names) - {row[0].strip() for row in rows}:
            sys.exit(f"{match[2]} has no row {missing.pop()!r}, which a page copies")
        rows = [*rows[:2], *(row for row in rows[2:] if row[0].strip() in names)]
    kept = [i for i, column in enumerate(rows[0]) if not match[3] or not column.strip().startswith(match[3])]
    lines = [f"|{'|'.join(row[i] for i in kept)}|" for row in rows]
    return "\n".join([match[1].rstrip(), *lines, match[5]])


def _write(out: Path, name: Path, text: str) -> str:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text, encoding="utf-8")
    return name.as_posix()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder to write to (default: the repository)")
    parser.add_argument("--tables-only", action="store_true", help="do not draw the figures again")
    arguments = parser.parse_args()
    print("\n".join(rebuild(arguments.out, arguments.tables_only)))

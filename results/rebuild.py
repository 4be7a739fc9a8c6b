"""Make every figure and table of results/ and README.md from the committed ledgers. `make results` runs this.

.venv/bin/python results/rebuild.py [--out FOLDER]      default: the repository itself

For each study, the output of alma-report on its run folders: STUDY/COMPARISON/NAME.png and NAME.md. The tables in
README.md and in the README.md of each study are copies of these, between `<!-- table: FILE -->` and `<!-- end -->`.
With `without: WORD`, the copy leaves out the columns whose names begin with WORD.
"""

import argparse
import re
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from fairseq_alma.report.figures import all_figures
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import tables_of

RESULTS = Path(__file__).resolve().parent
STUDIES = ("demo", "books", "mnist", "cifar10")
TEXTS = ("README.md", *(f"results/{study}/README.md" for study in STUDIES))
COPY = re.compile(r"(<!-- table: (\S+)(?: without: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
DPI = 110
"""Resolution of the committed pictures, in dots per inch."""


def rebuild(out: Path) -> list[str]:
    """Write all figures, tables and texts into `out`, and return their names relative to it."""
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
            for name, figure in all_figures(comparison, numbers):
                figure.set_dpi(DPI)
                FigureCanvasAgg(figure).print_png(out / folder / f"{name}.png", metadata={"Software": None})
                written.append((folder / f"{name}.png").as_posix())
    sys.path.insert(0, str(RESULTS / "books"))
    from study import claims

    written.append(_write(out, Path("results/books/claims.md"), claims()))
    for name in TEXTS:
        text = (RESULTS.parent / name).read_text(encoding="utf-8")
        written.append(_write(out, Path(name), COPY.sub(lambda match: _table_copy(out, match), text)))
    return written


def _table_copy(out: Path, match: re.Match) -> str:
    """Return the markers of a copied table with the rows of the table between them."""
    # Title and note are left out: the text around the copy has them.
    table = (out / match[2]).read_text(encoding="utf-8").split("\n\n")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    kept = [i for i, column in enumerate(rows[0]) if not match[3] or not column.strip().startswith(match[3])]
    lines = [f"|{'|'.join(row[i] for i in kept)}|" for row in rows]
    return "\n".join([match[1].rstrip(), *lines, match[4]])


def _write(out: Path, name: Path, text: str) -> str:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(text, encoding="utf-8")
    return name.as_posix()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder to write into")
    print("\n".join(rebuild(parser.parse_args().out)))

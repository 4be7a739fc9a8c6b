"""Every figure and table of results/ and README.md, from the committed ledgers: what `make results` runs.

.venv/bin/python results/rebuild.py [--out FOLDER]      here by default

Of each study what alma-report makes of its run folders: STUDY/COMPARISON/NAME.png and NAME.md. The tables in README.md
and in the studies' own README.md are copies of these, between `<!-- table: FILE -->` and `<!-- end -->`; with
`without: WORD` less the columns that begin so.
"""

import argparse
import re
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from fairseq_alma.report.figures import all_figures
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.runs import read_runs
from fairseq_alma.report.tables import tables_of

RESULTS = Path(__file__).resolve().parent
STUDIES = ("demo", "books", "mnist", "cifar10")
TEXTS = ("README.md", *(f"results/{study}/README.md" for study in STUDIES))
COPY = re.compile(r"(<!-- table: (\S+)(?: without: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
DPI = 110
"""Of pictures that are committed."""


def rebuild(out: Path) -> list[str]:
    """Write all of it below `out`; return the names of the files, relative to it."""
    written = []
    for study in STUDIES:
        found = read_runs([RESULTS / study / "ledgers"])
        if found.faults or found.notes:
            sys.exit("\n".join([*found.faults, *found.notes]))
        for comparison in found.comparisons:
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
        written.append(_write(out, Path(name), COPY.sub(lambda match: _copied(out, match), text)))
    return written


def _copied(out: Path, match: re.Match) -> str:
    table = (out / match[2]).read_text(encoding="utf-8").split("\n\n")[1]  # title and note: the text around it
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
    parser.add_argument("--out", type=Path, default=RESULTS.parent)
    print("\n".join(rebuild(parser.parse_args().out)))

"""A grid of alma-vision runs at several widths, and a table of each width that compares them with the best SM.

results/frontier/mnist.py and results/frontier/cifar10.py use this module.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from _grid import Job, Study
from _texts import mean_text

SEEDS = 5


@dataclass(frozen=True, eq=False)  # so that a row is a key of a dictionary
class Row:
    """One row of each table."""

    name: str
    """Name of the run folder, without the width."""
    settings: tuple[str, ...]
    """Arguments of alma-vision besides the width."""
    text: str
    """How the table names the row."""
    widths: Mapping[int, int] | None = None
    """If the networks are wider: for each width at which the row is run, that of its networks."""


@dataclass(frozen=True)
class CerStudy:
    """The runs of one dataset. The ledgers of a row ROW at width W are committed in `folder`/ledgers/ROW_PREFIXW."""

    folder: Path
    dataset: str
    heading: str
    """Name of the dataset in headings."""
    widths: Sequence[int]
    rows: Sequence[Row]
    """The rows, the most telling ones first."""
    prefix: str
    """The letter before the width in names of folders."""
    num_first: int
    """Number of rows that are run at each width before the others are run."""

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs: the first rows at each width, then the others."""
        for rows in (self.rows[: self.num_first], self.rows[self.num_first :]):
            for width, row in product(self.widths, rows):
                if row.widths is None or width in row.widths:
                    settings = [*row.settings, f"width={row.widths[width] if row.widths else width}"]
                    yield Job(f"{row.name}_{self.prefix}{width}", settings, seeds=SEEDS)

    def main(self, description: str) -> None:
        """Read the command line and run every job that has no committed ledger."""
        Study(self.folder, self.dataset, list(self.jobs())).main(description)

    def tables(self) -> dict[str, str]:
        """Return file name -> table of one width as Markdown, with the rows whose ledgers are committed."""
        named = {f"{self.dataset}_{self.prefix}{width}.md": self._table(width) for width in sorted(self.widths)}
        return {name: table for name, table in named.items() if table}

    def _table(self, width: int) -> str:
        found = {row: self._summary(row, width) for row in self.rows}
        bases, notes = {}, []
        for kind, name in {"sm_w": "SM", "ens_w": "Ens"}.items():
            fixed = {row: seeds for row, seeds in found.items() if row.name.startswith(kind) and seeds}
            if fixed:
                best = min(fixed, key=lambda row: _mean(fixed[row], "cer"))
                bases[best.text] = fixed[best]
                waits = ", ".join(str(wait) for wait in sorted(int(row.name.removeprefix(kind)) for row in fixed))
                notes.append(f"The best {name} with a fixed wait is {best.text}, of the waits {waits}.")
        if not bases:
            return ""
        against = " | ".join(f"against {text}, in %" for text in bases)
        lines = [
            f"# {self.heading}, width {width}",
            "",
            f"| learner | CER | {against} | final error | training FLOPs | of {next(iter(bases))} |",
            f"|:---{'|---:' * (len(bases) + 4)}|",
        ]
        for row, seeds in sorted(found.items(), key=lambda one: _mean(one[1], "cer")):
            if seeds:
                lines.append(_line(row.text, seeds, list(bases.values())))
        return "\n".join([*lines, "", *notes, ""])

    def _summary(self, row: Row, width: int) -> list[dict]:
        """Return the summary of each seed of a row, or [] if its ledgers are not committed."""
        path = self.folder / "ledgers" / f"{row.name}_{self.prefix}{width}" / "summary.json"
        if not path.exists():
            return []
        return json.loads(path.read_text())["per_seed"]


def _line(text: str, row: list[dict], bases: list[list[dict]]) -> str:
    """Return a line of the table. Differences are paired over seeds, with their standard error."""
    cers = [one["cer"] for one in row]
    changes = []
    for base in bases:
        percent = [100 * (one["cer"] / other["cer"] - 1) for one, other in zip(row, base, strict=True)]
        changes.append(mean_text(percent, signed=True) if row is not base else "")
    final, flops = _mean(row, "final"), _mean(row, "comp")
    cells = [text, mean_text(cers, 2), *changes, f"{100 * final:.2f}%", f"{flops:.3g}"]
    return f"| {' | '.join(cells)} | {flops / _mean(bases[0], 'comp'):.2f} |"


def _mean(row: list[dict], key: str) -> float:
    return statistics.mean(one[key] for one in row) if row else float("inf")

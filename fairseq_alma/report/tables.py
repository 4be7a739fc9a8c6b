"""The paper's tables, and a summary of all runs, as rows of text; then CSV, Markdown, LaTeX."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fairseq_alma.report import paper
from fairseq_alma.report.choice import Budget, best_within
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import LEARNERS, Comparison, Run, label_of

UNTRAINED = "*"
"""As the paper's tables print it."""
EQUAL_COMPUTE = 0.02
"""In sequence against i.i.d.: training FLOPs may differ by so much, as stages end in parts of batches."""


@dataclass(frozen=True)
class Table:
    """Cells are text, ready to be read."""

    name: str
    """Of its files."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """Below it."""

    def csv(self) -> str:
        """Without the note."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])
        return file.getvalue()

    def markdown(self) -> str:
        """Title, table, note."""
        cells = [[_in_markdown(cell) for cell in row] for row in self.rows]
        columns = [_in_markdown(column) for column in self.columns]
        table = tabulate(cells, columns, tablefmt="pipe", disable_numparse=True, colalign=self._alignment())
        # Padded, a cell that changes would change every line.
        table = re.sub(r" {2,}", " ", re.sub(r"-{4,}", "---", table))
        return f"**{_in_markdown(self.title)}**\n\n{table}\n" + (f"\n{_in_markdown(self.note)}\n" if self.note else "")

    def latex(self) -> str:
        """A tabular of booktabs, with title and note as comments."""
        rows = [[cell.replace("±", r"+-") for cell in row] for row in self.rows]
        table = tabulate(
            rows, self.columns, tablefmt="latex_booktabs", disable_numparse=True, colalign=self._alignment()
        )
        table = table.replace("+-", r"$\pm$")
        notes = [" ".join(text.split()) for text in (self.title, self.note) if text]  # a new line would end the comment
        return "".join(f"% {text}\n" for text in notes) + table + "\n"

    def _alignment(self) -> tuple[str, ...]:
        return tuple(
            "left" if column in ("run", "best", "state", "setting", "experts") else "right" for column in self.columns
        )


def summary(comparison: Comparison, numbers: Sequence[Numbers]) -> Table:
    """All runs: what they came to, and which is best by validation."""
    best = best_within(numbers, Budget())
    is_vision = comparison.is_vision
    quality = (
        ["CER", "final error, %"] if is_vision else ["average perplexity", "after first stage", "final perplexity"]
    )
    columns = ("run", "by validation", "seeds", *quality, "final validation" + (", %" if is_vision else ""),
               "params, last", "Mem", "Comp, TFLOP", "wall time", "state")  # fmt: skip
    rows = []
    scale, digits = (100.0, 2) if is_vision else (1.0, 2)
    for index, (run, one) in enumerate(zip(comparison.runs, numbers, strict=True)):
        cells = [one.quality.text() if one.quality else ""]
        if not is_vision:
            cells.append(one.after_first_stage.text() if one.after_first_stage else "")
        trained = run.counted[0].stage[-1] > 0
        cells.append(one.final.text(digits, scale) if trained else UNTRAINED)
        cells.append(one.final_validation.text(digits, scale) if trained and one.final_validation else "")
        name = label_of(run, comparison.varied)
        rows.append((
            name, "best" if index == best else "", str(len(run.counted)), *cells, f"{one.num_params:,.0f}",
            f"{one.mem:.4g}", f"{one.comp / 1e12:.4g}", duration(one.wall_seconds), state(run),
        ))  # fmt: skip
    note = ""
    if best is not None:
        kind = "summed" if is_vision else "mean"
        name = label_of(comparison.runs[best], comparison.varied)
        note = f"Best by validation ({kind} over the arrivals, never by test): {name}."
    return Table("summary", f"{comparison.name}: all runs", columns, tuple(rows), note)


def table1(comparison: Comparison) -> Table | None:
    """Learning in sequence against learning i.i.d. on the same data with the same compute (the paper's Table 1).

    A pair: one run at wait 1, one at wait k that differs in nothing else, compared at t = k, where the second has been
    trained once, on all of it. None if there is no pair of equal compute.
    """
    scale, unit = (100.0, "error, %") if comparison.is_vision else (1.0, "perplexity")
    columns = (
        "run",
        "k",
        f"{unit} in sequence",
        f"{unit} i.i.d.",
        "in sequence - i.i.d.",
        "paper, base",
        "paper, large",
    )
    rows = []
    for first in comparison.runs:
        if first.wait != 1:
            continue
        for other in comparison.runs:
            k = other.wait
            if k == 1 or k > min(first.last_t, other.last_t) or not _differ_in_wait_alone(first, other):
                continue
            costs = [run.mean("train_flops")[: k + 1].sum() for run in (first, other)]
            if abs(costs[0] - costs[1]) > EQUAL_COMPUTE * max(costs) or not costs[0]:
                continue
            texts = [_at(run, k, scale) for run in (first, other)]
            difference = scale * (first.mean("quality")[k] - other.mean("quality")[k])
            published = [paper.row_of(run) for run in (first, other)]
            beside = ["", ""]
            if published[0] and published[1]:
                for number, size in enumerate(("base", "large")):
                    pair = [getattr(row, size)[k - 1] for row in published]
                    if None not in pair:
                        beside[number] = f"{pair[0]:.2f} against {pair[1]:.2f}"
            rows.append((_label_without_wait(first, comparison), str(k), *texts, f"{difference:+.2f}", *beside))
    if not rows:
        return None
    shown, filled = _without_empty(columns, rows)
    return Table(
        "table1",
        f"{comparison.name}: learning in sequence against i.i.d. (as the paper's Table 1)",
        shown,
        tuple(filled),
        "The same data and training FLOPs; after mega-batch k."
        + (" The paper's values are of its own corpus and models." if "paper, base" in shown else ""),
    )


def table2(comparison: Comparison) -> Table | None:
    """Perplexity after each mega-batch, the paper's beside it where the setting is the same. None for vision."""
    if comparison.is_vision or comparison.num_arrivals > 24:
        return None
    times = range(1, comparison.num_arrivals + 1)
    columns = ("setting", "run", "experts", "params, last", *(f"t = {t}" for t in times), "seeds",
               *(f"paper, {size}" for size in ("base", "large")))  # fmt: skip
    rows = []
    for run in comparison.runs:
        cells = []
        for t in times:
            trained = t <= run.last_t and run.counted[0].stage[t] > 0
            cells.append(_at(run, t, 1.0) if trained else UNTRAINED if t <= run.last_t else "")
        row = paper.row_of(run)
        beside = ["", ""]
        if row:
            beside = [
                ", ".join(UNTRAINED if v is None else f"{v:.2f}" for v in values) for values in (row.base, row.large)
            ]
        experts, members = paper.sizes(run)
        size = ", ".join(map(str, experts))
        if members and members != (1,):
            size += "@" + "..".join(str(members[i]) for i in sorted({0, len(members) - 1}))
        params = f"{run.mean('num_params')[-1] / 1e6:.2f}M"
        steps = run.wait if run.wait > 1 and run.settings.get("updates_per_mega_batch") else 1
        setting = f"{LEARNERS.get(run.learner, run.learner)}_w{run.wait}" + (f" ({steps}x steps)" if steps > 1 else "")
        name = label_of(run, comparison.varied)
        rows.append((setting, name, size, params, *cells, str(len(run.counted)), *beside))
    columns, rows = _without_empty(columns, rows)
    note = f"{UNTRAINED} untrained."
    if "paper, base" in columns:
        note += " The paper's values (t = 1..4) are of its own corpus and models."
    title = f"{comparison.name}: test perplexity after each mega-batch (as the paper's Table 2)"
    return Table("table2", title, columns, tuple(rows), note)


def tables_of(comparison: Comparison, numbers: Sequence[Numbers]) -> list[Table]:
    """All that there is."""
    return [table for table in (summary(comparison, numbers), table1(comparison), table2(comparison)) if table]


def duration(seconds: float | None) -> str:
    """`3 h 05 min`, `4 min 10 s`, `8.2 s`."""
    if seconds is None:
        return ""
    whole, minutes = round(seconds), round(seconds / 60)
    if whole >= 3600:
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.1f} s"


def state(run: Run) -> str:
    """`finished`, `running, 12 of 100`, `stopped, 12 of 100`."""
    if run.is_finished:
        left = len(run.seeds) - len(run.counted)
        return "finished" if not left else f"finished, {left} more seed(s) not"
    return f"{'running' if run.is_running else 'stopped'}, {run.last_t} of {run.num_arrivals}"


def _at(run: Run, t: int, scale: float) -> str:
    values = scale * run.stacked("quality")[:, t]
    text = f"{values.mean():.2f}"
    return text if len(values) < 2 else f"{text} ± {values.std(ddof=1) / len(values) ** 0.5:.2f}"


def _differ_in_wait_alone(a: Run, b: Run) -> bool:
    """Updates may differ as well, and how often it grows: compute is compared by itself."""
    passed = ("wait", "updates", "updates_per_mega_batch", "grow_every")
    names = {*a.settings, *b.settings} - set(passed)
    return all(a.settings.get(name) == b.settings.get(name) for name in names)


def _label_without_wait(run: Run, comparison: Comparison) -> str:
    passed = ("wait", "updates", "updates_per_mega_batch", "grow_every")
    return label_of(run, [name for name in comparison.varied if name not in passed])


def _without_empty(columns: Sequence[str], rows: list[tuple]) -> tuple[tuple[str, ...], list[tuple]]:
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _in_markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ").replace("<", "&lt;")

"""The tables of a report: a summary of all groups, and tables like Tables 1 and 2 of the paper.

All cells are text. Each table can be written as CSV, Markdown and LaTeX. In the tables, the word "run" means a group of
runs that differ only in the seed.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate

from fairseq_alma.core import catalogue
from fairseq_alma.report import paper
from fairseq_alma.report.numbers import Estimate, Numbers, best_of
from fairseq_alma.report.objectives import explanation, score_name, score_scale
from fairseq_alma.report.periods import PARTS, common_periods, has_left_out, period_averages_of, reference_of, regret_of
from fairseq_alma.report.runs import Comparison, RunGroup, group_label

UNTRAINED = "*"
"""Content of a table cell for a learner that is still untrained. The paper's tables use the same sign."""
EQUAL_COMPUTE = 0.02
"""Table 1 compares two groups only if their training FLOPs differ by at most this fraction. On the same data they may
differ slightly, because the last batch of a stage may be incomplete."""
TRANSFER = ("forgetting", "backward transfer", "forward transfer")
"""Metrics of runs with an error matrix (`Numbers.transfer`)."""
MAX_ARRIVALS = 24
"""Table 2 has one column per arrival. It is made only for streams with at most this many arrivals."""


@dataclass(frozen=True)
class Table:
    """A table whose cells are text."""

    name: str
    """File name of the table, without suffix."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """Text below the table."""

    def csv(self) -> str:
        """Return the table as CSV, without title and note."""
        file = io.StringIO()
        rows = [[_without_formula(cell) for cell in row] for row in (self.columns, *self.rows)]
        csv.writer(file, lineterminator="\n").writerows(rows)
        return file.getvalue()

    def markdown(self) -> str:
        """Return the table as Markdown, with its title and note."""
        cells = [[_escape_markdown(cell) for cell in row] for row in self.rows]
        columns = [_escape_markdown(column) for column in self.columns]
        table = tabulate(cells, columns, tablefmt="pipe", disable_numparse=True, colalign=self._alignment())
        # Remove the spaces and dashes that tabulate adds to align the columns. With them, one wider cell would change
        # every line of the table, and git would show all lines as changed.
        table = re.sub(r" {2,}", " ", re.sub(r"-{4,}", "---", table))
        note = f"\n{_escape_markdown(self.note)}\n" if self.note else ""
        return f"**{_escape_markdown(self.title)}**\n\n{table}\n{note}"

    def latex(self) -> str:
        """Return the table as LaTeX code, with title and note as comments. The code needs the package booktabs."""
        # tabulate would put backslashes before the dollar signs of $\pm$. So pass +- to tabulate, and replace +- by
        # $\pm$ afterwards.
        rows = [[cell.replace("±", r"+-") for cell in row] for row in self.rows]
        table = tabulate(
            rows, self.columns, tablefmt="latex_booktabs", disable_numparse=True, colalign=self._alignment()
        )
        table = table.replace("+-", r"$\pm$")
        # Put each comment on one line, because a line break ends a LaTeX comment.
        comments = [" ".join(text.split()) for text in (self.title, self.note) if text]
        return "".join(f"% {text}\n" for text in comments) + table + "\n"

    def _alignment(self) -> tuple[str, ...]:
        """Return the alignment of each column: "left" for columns of words, "right" for the others."""
        words = ("run", "best", "state", "setting", "experts", "policy", "stages at")
        return tuple("left" if column in words else "right" for column in self.columns)


def tables_of(comparison: Comparison, numbers: Sequence[Numbers]) -> list[Table]:
    """Return all tables that can be made for a comparison, given the results of each group (`numbers.all_numbers`)."""
    made = (summary(comparison, numbers), table1(comparison), table2(comparison), by_period(comparison))
    return [table for table in made if table]


def summary(comparison: Comparison, numbers: Sequence[Numbers]) -> Table:
    """Return the table of all groups of runs and their results, one row per group.

    The row of the group with the best score on validation data, under the default objective, contains the word `best`.
    The page shows the same columns. "Average perplexity" is the paper's arithmetic mean. Columns of scores that no run
    has are left out.
    """
    best, scale, percent = best_of(numbers), score_scale(comparison), ", %" if comparison.is_vision else ""
    optional = [f"{name}{percent}" for name in (f"prequential {_quality_name(comparison)}", *TRANSFER)]
    bits = "final bits per byte"
    rows = []
    for index, (group, result) in enumerate(zip(comparison.groups, numbers, strict=True)):
        is_trained = group.counted_runs[0].stage[group.last_t] > 0
        average, after = result.scores["all"].value, result.scores["after"].value
        final = result.final.text(scale=scale) if is_trained else UNTRAINED
        validation = _text(result.final_validation, scale) if is_trained else ""
        estimates = [_text(one, scale) for one in (result.prequential, *map(result.transfer.get, TRANSFER))]
        quality = {"CER": _text(result.quality)}
        if not comparison.is_vision:
            quality = {"geometric mean perplexity": _text(average)}
        rows.append({
            "run": comparison.label_of(group),
            "by validation": "best" if index == best else "",
            "seeds": str(len(group.counted_runs)),
            **quality,
            "error after first stage, %" if comparison.is_vision else "geometric mean after first stage":
                _text(after, scale),
            f"final {_quality_name(comparison)}{percent}": final,
            bits: result.bits_per_byte.text(digits=3) if result.bits_per_byte and is_trained else "",
            **({} if comparison.is_vision else {"average perplexity": _text(result.quality)}),
            f"final validation{percent}": validation,
            **dict(zip(optional, estimates, strict=True)),
            "params, last": f"{result.num_params:,.0f}",
            "Mem": f"{result.mem:.4g}",
            "Comp, TFLOP": f"{result.comp / 1e12:.4g}",
            "wall time": duration(result.wall_seconds),
            "state": state(group),
        })  # fmt: skip
    note = ""
    if best is not None:
        label = comparison.label_of(comparison.groups[best])
        score = f"{(numbers[best].validation_score or 0.0) * scale:.2f}{' %' if comparison.is_vision else ''}"
        note = f"Best by {score_name(comparison)} ({score}), never by test data: {label}. {explanation(comparison)}"
    return table_of_rows("summary", f"{comparison.name}: all runs", rows, note, [*optional, bits])


def _quality_name(comparison: Comparison) -> str:
    return "error" if comparison.is_vision else "perplexity"


def _text(estimate: Estimate | None, scale: float = 1.0) -> str:
    return "" if estimate is None else estimate.text(scale=scale)


def table1(comparison: Comparison) -> Table | None:
    """Return a table like the paper's Table 1. It compares learning in sequence with learning in random order (i.i.d.).

    Each row compares two groups of runs with the same data and compute. The groups differ only in the wait, and in
    settings that users adapt to the wait, such as the number of updates.

    In sequence: the first group has wait 1. It learns one mega-batch after another.
    i.i.d.: the second group has wait k. Its first stage learns the first k mega-batches together, in random order.

    The results are compared after mega-batch k, where the first stage of the second group ends. The result is None if
    the comparison has no such pair of groups.
    """
    scale, unit = (100.0, "error, %") if comparison.is_vision else (1.0, "perplexity")
    rows = []
    for in_sequence in comparison.groups:
        if in_sequence.wait != 1 or not in_sequence.has_fixed_wait:
            continue
        for iid in comparison.groups:
            k, pair = iid.wait, (in_sequence, iid)
            is_possible = iid.has_fixed_wait and 1 < k <= min(in_sequence.last_t, iid.last_t)
            if not is_possible or not _differ_in_wait_only(in_sequence, iid):
                continue
            costs = [group.mean_column("train_flops")[: k + 1].sum() for group in pair]
            if abs(costs[0] - costs[1]) > EQUAL_COMPUTE * max(costs) or not costs[0]:
                continue
            with_wait = catalogue.settings_that_are("with_wait")
            names = [name for name in comparison.varied_settings if name not in with_wait]
            base, large = _paper_pair(in_sequence, iid, k)
            rows.append({
                "run": group_label(in_sequence, names),
                "k": str(k),
                f"{unit} in sequence": _quality_text(in_sequence, k, scale),
                f"{unit} i.i.d.": _quality_text(iid, k, scale),
                "in sequence - i.i.d.": f"{scale * _mean_difference(in_sequence, iid, k):+.2f}",
                "paper, base": base,
                "paper, large": large,
            })  # fmt: skip
    note = "The same data and training FLOPs; after mega-batch k. The difference is that of the seeds that both have."
    if any(row["paper, base"] for row in rows):
        note += " The paper's values are of its own corpus and models."
    title = f"{comparison.name}: learning in sequence against i.i.d. (as the paper's Table 1)"
    return table_of_rows("table1", title, rows, note) if rows else None


def _mean_difference(group: RunGroup, other: RunGroup, t: int) -> float:
    """Return by how much the quality of one group is above that of another at arrival t, on average.

    Only the seeds that both groups have are compared. If there are none, it is the difference of the means.
    """
    values, others = ({run.seed: run.quality[t] for run in one.counted_runs} for one in (group, other))
    if shared := values.keys() & others.keys():
        return float(np.mean([values[seed] - others[seed] for seed in shared]))
    return float(group.mean_column("quality")[t] - other.mean_column("quality")[t])


def _paper_pair(in_sequence: RunGroup, iid: RunGroup, k: int) -> list[str]:
    """Return the paper's perplexities after mega-batch k for the settings of the two groups, such as "24.74 against
    25.18".

    There is one text for the paper's base model and one for its large model; "" if the paper does not report both
    values.
    """
    ours, other = paper.row_of(in_sequence), paper.row_of(iid)
    if not ours or not other:
        return ["", ""]
    pairs = [(ours.base[k - 1], other.base[k - 1]), (ours.large[k - 1], other.large[k - 1])]
    return ["" if None in pair else f"{pair[0]:.2f} against {pair[1]:.2f}" for pair in pairs]


def table2(comparison: Comparison) -> Table | None:
    """Return a table like the paper's Table 2: the test perplexity of each group of runs after each mega-batch.

    If the paper reports values for the settings of a group, its row has them, too. The result is None for vision runs
    and for streams with more than MAX_ARRIVALS arrivals.
    """
    if comparison.is_vision or comparison.num_arrivals > MAX_ARRIVALS:
        return None

    def published(values: Sequence[float | None]) -> str:
        return ", ".join(UNTRAINED if value is None else f"{value:.2f}" for value in values)

    rows = []
    for group in comparison.groups:
        cells = {}
        for t in range(1, comparison.num_arrivals + 1):
            is_trained = t <= group.last_t and group.counted_runs[0].stage[t] > 0
            cells[f"t = {t}"] = _quality_text(group, t) if is_trained else UNTRAINED if t <= group.last_t else ""
        row = paper.row_of(group)
        experts, members = paper.sizes(group)
        # `size` is, for example, `4, 6, 8, 12` for a mixture that grows from 4 to 12 experts, or `4@1..3` for an
        # ensemble that grows from 1 to 3 members with 4 experts each.
        size = ", ".join(map(str, experts))
        if members and members != (1,):
            size += "@" + "..".join(str(members[i]) for i in sorted({0, len(members) - 1}))
        has_more_steps = group.has_fixed_wait and group.settings.get("updates_per_mega_batch")
        steps = group.wait if has_more_steps else 1
        wait = f"w{group.wait}" if group.has_fixed_wait else group.settings["wait"]
        setting = f"{catalogue.label_of(group.learner)}_{wait}" + (f" ({steps}x steps)" if steps > 1 else "")
        rows.append({
            "setting": setting,
            "run": comparison.label_of(group),
            "experts": size,
            "params, last": f"{group.mean_column('num_params')[-1] / 1e6:.2f}M",
            **cells,
            "seeds": str(len(group.counted_runs)),
            "paper, base": published(row.base) if row else "",
            "paper, large": published(row.large) if row else "",
        })  # fmt: skip
    note = f"{UNTRAINED} untrained."
    if any(row["paper, base"] for row in rows):
        note += " The paper's values (t = 1..4) are of its own corpus and models."
    title = f"{comparison.name}: test perplexity after each mega-batch (as the paper's Table 2)"
    return table_of_rows("table2", title, rows, note)


def by_period(comparison: Comparison) -> Table | None:
    """Return the averages over the matrix of perplexities by period, and the regret, of each group that has one."""
    reference, finished = reference_of(comparison), [group for group in comparison.groups if group.is_finished]
    widths = common_periods(finished)
    rows = []
    for index, group in enumerate(comparison.groups):
        averages = [period_averages_of(run, widths) for run in group.counted_runs] if group.is_finished else []
        if not averages or not all(averages):
            continue
        row = {"run": comparison.label_of(group)}
        for name, part in PARTS.items():
            values = [one[name] for one in averages if name in one]
            row[f"{part} perplexity"] = _text(Estimate.of(values)) if len(values) == len(averages) else ""
        regret = regret_of(group, reference, widths) if reference and index != reference.index else {}
        for name, part in PARTS.items():
            row[f"regret, {part}"] = f"{regret[name]:+.3f}" if name in regret else ""
        rows.append({**row, "seeds": str(len(group.counted_runs))})
    if not rows:
        return None
    note = (
        "Geometric means over the arrivals: backward, periods before the last one that arrived; in-distribution, the "
        "period that has just arrived; forward, periods that arrive later."
    )
    if has_left_out(finished, widths):
        note += " Periods that a run did not know yet at an arrival do not count for any run at this arrival."
    if reference:
        name = comparison.label_of(comparison.groups[reference.index])
        note += f" Regret: mean loss in nats minus that of {name}, trained once on all periods."
    return table_of_rows("periods", f"{comparison.name}: test perplexity by period", rows, note)


def duration(seconds: float | None) -> str:
    """Return a duration as text, such as `3 h 05 min`, `4 min 10 s` or `8.2 s`. For None, return ""."""
    if seconds is None:
        return ""
    whole, minutes = round(seconds), round(seconds / 60)
    if whole >= 3600:
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.1f} s"


def state(group: RunGroup) -> str:
    """Return the progress of a group of runs, such as `finished`, `running, 12 of 100` or `stopped, 12 of 100`."""
    if group.is_finished:
        num_unfinished = len(group.runs) - len(group.counted_runs)
        return f"finished, {num_unfinished} more seed(s) not" if num_unfinished else "finished"
    return f"{'running' if group.is_running else 'stopped'}, {group.last_t} of {group.num_arrivals}"


def _quality_text(group: RunGroup, t: int, scale: float = 1.0) -> str:
    """Return the mean test error rate or perplexity at arrival t as text, multiplied by `scale`."""
    return _text(Estimate.of((scale * group.column("quality")[:, t]).tolist()))


def _differ_in_wait_only(a: RunGroup, b: RunGroup) -> bool:
    """Return True if groups `a` and `b` differ only in the wait and in what is changed with it, such as the updates."""
    names = {*a.settings, *b.settings} - set(catalogue.settings_that_are("with_wait"))
    return all(a.settings.get(name) == b.settings.get(name) for name in names)


def table_of_rows(
    name: str, title: str, rows: Sequence[Mapping[str, str]], note: str, optional: Sequence[str] | None = None
) -> Table:
    """Return a table from rows of cells: column -> text. Of the columns `optional`, empty ones are left out.

    By default, all empty columns are left out.
    """
    names = list(rows[0])
    optional = names if optional is None else optional
    kept = [column for column in names if column not in optional or any(row[column] for row in rows)]
    return Table(name, title, tuple(kept), tuple(tuple(row[column] for column in kept) for row in rows), note)


def _without_formula(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula. Text from a foreign run could open files and addresses."""
    is_number = re.fullmatch(r"[+-][\d.,]+(e[+-]?\d+)?( ± [\d.,]+)?", cell)
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not is_number else cell


def _escape_markdown(text: str) -> str:
    # Without "[", the text cannot contain a link or an image.
    return text.replace("|", r"\|").replace("[", r"\[").replace("\n", " ").replace("<", "&lt;")

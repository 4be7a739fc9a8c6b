"""Format a ledger as a table, and create the console that prints tables and progress on the terminal."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from fairseq_alma.core.deployments import deployed_last
from fairseq_alma.core.ledger import Ledger, LedgerRow, Prequential, Spent, deployed_stage
from fairseq_alma.core.metrics import excess_losses, perplexity_of, unusual_arrivals
from fairseq_alma.core.presets import ANYTIME, is_anytime
from fairseq_alma.core.printing import perplexity_text, printable
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.waiting import Wait, num_missing

NOTHING_TO_DO = "nothing was left to do: the run had been finished before"
"""What is printed if a command finds a finished run."""

FLOPS_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
"""Units of training cost, the largest first."""


class SafeConsole(Console):
    """A console that prints foreign text without the characters that a terminal interprets."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def wide_console(stream: TextIO | None = None) -> Console:
    """Return a console of the library rich that never breaks a long path into two lines.

    Square brackets are printed unchanged; by default, rich interprets them as formatting. If the output is not a
    terminal, the console is wide enough for all table columns.
    """
    output = stream or sys.stdout
    is_terminal = Console(file=output).is_terminal
    return SafeConsole(file=output, highlight=False, markup=False, soft_wrap=True, width=None if is_terminal else 120)


def progress_bar(text: str) -> Progress:
    """Return a progress bar on standard error. It disappears at the end, and is shown only on a terminal.

    `text`, which follows the bar, is a format with fields of a task, such as "{task.completed}/{task.total}".
    """
    console = SafeConsole(file=sys.stderr, highlight=False, markup=False)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn(text), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def title_of(folder: Path | str, settings: Mapping[str, Any]) -> str:
    """Return the title of the table of a run: its folder, and the settings that say most about it.

    A run with exactly the settings of preset=anytime is called anytime.
    """
    if is_anytime("vision" if "dataset" in settings else "language model", settings):
        return f"{folder}: {ANYTIME}"
    preset = f" preset={settings['preset']}" if settings.get("preset") else ""
    return f"{folder}: learner={settings['learner']} wait={settings['wait']}{preset}"


def seed_text(run: Path) -> str:
    """Return "seed N  " for the run folder of one of several seeds, otherwise "", for the start of a progress line."""
    return f"seed {run.name[5:]}  " if RunFolder(run).is_of_one_of_several_seeds else ""


def rows_in(out: Path) -> dict[Path, list[LedgerRow]]:
    """Return run folder -> rows of its ledger, for each run in the folder `out`."""
    return {folder: Ledger(folder / "ledger.jsonl").rows() for folder in find_runs(out)}


def flops_unit(flops: Sequence[float]) -> tuple[str, float]:
    """Return the unit in which the largest of some numbers of FLOPs is at least 1: its name, and its FLOPs."""
    largest = max(flops, default=0)
    return next((unit for unit in FLOPS_UNITS if largest >= unit[1]), FLOPS_UNITS[-1])


def ledger_table(rows: Sequence[LedgerRow], title: str, at_most: int | None = None) -> Table:
    """Return a table of the ledger with one line per arrival. For an untrained learner, * is shown in place of scores.

    Args:
        rows: all rows of the ledger.
        title: title of the table.
        at_most: approximate maximum number of lines. If the ledger has more rows, the table shows only the untrained
            learner, every n-th stage and the last arrival. By default, all arrivals are shown.
    """
    is_vision = bool(rows) and rows[0].scores.error_rate is not None
    # Scores on a sample of the test set have none.
    bits = ["bits/byte"] if any(row.scores.bits_per_byte is not None for row in rows) else []
    quality = ["error rate", "validation"] if is_vision else ["perplexity", "per word", *bits, "validation"]
    caption = "* untrained" if any(row.stage == 0 for row in rows) else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    shown = rows
    if at_most is not None and len(rows) > at_most + 1:
        # Show only arrivals at which a stage was trained, because scores do not change at the other arrivals.
        changed = [row for row in rows[1:] if row.updated]
        apart = -(-len(changed) // at_most)
        shown = [rows[0], *changed[apart - 1 :: max(1, apart)]]
        if shown[-1] is not rows[-1]:
            shown = [*shown, rows[-1]]
    # Some arrivals are not shown. Their cost is added to the next line that is shown, so that the columns still sum to
    # the total cost.
    starts = [0, *(row.t + 1 for row in shown)]
    costs = [
        sum((one.spent for one in rows[start : row.t + 1]), Spent()) for start, row in zip(starts, shown, strict=False)
    ]
    unit, flops_of_unit = flops_unit([cost.train_flops for cost in costs])
    times = ["seconds"] if is_vision else ["train s", "score s"]
    for name in ("t", "stage", *quality, "params", "updates", f"train {unit}", *times):
        table.add_column(name, justify="right")
    for start, row, cost in zip(starts, shown, costs, strict=False):
        scores, trained = row.scores, row.stage > 0
        if is_vision:
            numbers = [f"{scores.error_rate:.2%}", f"{scores.validation_error_rate or 0:.2%}"]
        else:
            validation = scores.validation_perplexity
            per_byte = [f"{scores.bits_per_byte or 0:.3f}"] if bits else []
            per_word = perplexity_text(scores.word_perplexity or 0, 1)
            numbers = [f"{scores.perplexity:.2f}", per_word, *per_byte, f"{validation:.2f}"]
        table.add_row(
            str(row.t),
            str(row.stage),
            *(numbers if trained else ["*"] * len(numbers)),
            f"{scores.num_params:,}" if is_vision else f"{scores.num_params / 1e6:.2f}M",
            f"{cost.num_updates:,}",
            f"{cost.train_flops / flops_of_unit:,.4g}",
            f"{cost.train_seconds:,.1f}" if is_vision else f"{cost.train_seconds:,.0f}",
            *([] if is_vision else [_score_seconds(rows[start : row.t + 1])]),
        )
    return table


def _score_seconds(rows: Sequence[LedgerRow]) -> str:
    """Return the time in which these rows were scored. Rows of arrivals without a stage repeat the scores of others."""
    known = [row.scores.score_seconds for row in rows if row.updated or not row.t]
    return "" if None in known else f"{sum(one or 0 for one in known):,.0f}"


def waiting_message(rows: Sequence[LedgerRow], wait: Wait, num_known: int = 0) -> str | None:
    """Return a sentence about the last mega-batches if no stage has trained on them yet, or None if there are none.

    `num_known` is the number of mega-batches on which the initial model was trained.
    """
    last_stage = max((row.t for row in rows if row.updated), default=num_known)
    waiting = [row.t for row in rows[last_stage + 1 :] if not row.is_skipped]
    if not (count := len(waiting)):
        return None
    which = f"mega-batch {waiting[0]} waits" if count == 1 else f"mega-batches {waiting[0]} to {waiting[-1]} wait"
    num_skipped = sum(row.is_skipped for row in rows[: last_stage + 1])
    missing = num_missing(count, last_stage - num_skipped, wait, rows[-1].t)
    more = "later ones" if missing is None else f"{missing} more"
    return f"{which} for {more} (wait={wait}); to train now, give last_group=train"


def new_text_message(rows: Sequence[LedgerRow], t: int, score: Prequential) -> str:
    """Return a sentence about how hard a new mega-batch is for the model from before, with a warning if it is unusual.

    Args:
        rows: the rows of the ledger before arrival t.
        t: the arrival.
        score: the score of a language model on the new mega-batch.
    """
    row = LedgerRow(t, rows[-1].stage, False, rows[-1].scores, prequential=score)
    excess = excess_losses([*rows, row])
    before = [
        f"{one.t}: {perplexity_text(perplexity_of(one.prequential.loss), 1)}"
        for one in rows
        if one.prequential and one.t in excess
    ]
    earlier = f"; earlier mega-batches: {', '.join(before[-6:])}" if before else ""
    validation = perplexity_of(rows[-1].scores.validation_loss or 0.0)
    text = (
        f"mega-batch {t}, before training on it: perplexity {perplexity_text(perplexity_of(score.loss), 1)} "
        f"(validation set {validation:,.1f}){earlier}"
    )
    if t in unusual_arrivals(excess):
        text += f"\nwarning: this is unusual compared with earlier mega-batches. Look at the text of mega-batch {t}"
    return text


def deployed_message(run: Path, rows: Sequence[LedgerRow]) -> str | None:
    """Return what is deployed now, with its validation perplexity and that before; None if nothing is (or images)."""
    validation = {row.stage: f"{row.scores.validation_perplexity or 0:.2f}" for row in rows if row.updated}
    # A predictor of images is deployed as it is saved, in any stage.
    if not (stage := deployed_stage(rows)) or rows[0].scores.error_rate is not None:
        return None
    if (last := deployed_last(run, rows)) and last["stage"] != stage:
        return (
            f"predictor: stage {stage}, validation {validation[stage]}; deployed in {last['to']}: stage "
            f"{last['stage']}, validation {validation[last['stage']]}"
        )
    is_used = last is not None or any(row.scores.gate for row in rows)  # otherwise nothing deploys it
    text = f"{'deployed' if is_used else 'predictor'}: stage {stage}, validation {validation[stage]}"
    if is_refused(rows):
        return f"{text} (stage {rows[-1].stage} was refused: {validation[rows[-1].stage]})"
    before = deployed_stage([row for row in rows if row.stage < stage])
    return f"{text} (before: {validation[before]})" if before else text


def is_refused(rows: Sequence[LedgerRow]) -> bool:
    """Return whether the predictor of the last stage did not pass the gate."""
    gate = rows[-1].scores.gate if rows else None
    return gate is not None and not gate["passed"]

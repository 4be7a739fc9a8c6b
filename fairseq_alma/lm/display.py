"""Display of a running stage: the progress, losses and speed of each member (network).

The values come from the log lines that the training process of each member writes.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.core.protocol import Stage

LOG_RECORD = re.compile(r"\| INFO \| (train_inner|valid) \| (\{.*\})")

SECONDS_BETWEEN_LINES = 15
"""If the output is not a terminal, the minimum time in seconds between two printed lines about the same member."""


class StageDisplay:
    """Displays the progress of one stage. On a terminal, each member has one line, which is updated continuously.

    If the output is not a terminal (for example a file), a printed line cannot be updated, so new lines are printed:
    at most one line for each member in SECONDS_BETWEEN_LINES seconds.

    Args:
        stage: the running stage.
        updates: number of optimizer updates of each member in this stage, by member number.
        num_mega_batches: number of mega-batches in the stream, B.
        console: where to print. By default standard error.
        scalars: if given, this object writes the training and validation perplexities to TensorBoard files.
    """

    def __init__(
        self,
        stage: Stage,
        updates: Mapping[int, int],
        num_mega_batches: int,
        console: Console | None = None,
        scalars: RunScalars | None = None,
    ):
        console = console or Console(file=sys.stderr, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("update {task.completed}/{task.total}  {task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        title = f"mega-batch {stage.new[-1].t}/{num_mega_batches}  stage {stage.index}"
        self._members = {}
        for number, total in updates.items():
            name = title if set(updates) == {1} else f"{title}  member {number}"
            record = None
            if scalars:
                suffix = "" if set(updates) == {1} else f"_member_{number}"
                record = partial(_record_scalar, scalars, stage.index, suffix)
            self._members[number] = _MemberDisplay(name, total, self._progress, console, record)

    def __enter__(self) -> "StageDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def member(self, number: int) -> Callable[[str], None]:
        """Return a function for member `number`. The caller passes each log line of this member to the function."""
        return self._members[number]


def _record_scalar(
    scalars: RunScalars, stage_index: int, suffix: str, name: str, value: float, progress: float
) -> None:
    """Write one perplexity to TensorBoard, at the point `progress` (a fraction) of the stage."""
    scalars.during_stage(f"{name}{suffix}", value, stage_index, progress)


class _MemberDisplay:
    """Displays the progress of one member. The caller calls this object like a function, with each new log line.

    Args:
        title: text at the beginning of the progress line.
        updates: number of optimizer updates in the stage.
        progress: the display that a terminal shows, with one line for each member.
        console: where to print progress lines if the output is not a terminal.
        record: function that is called for each training or validation perplexity in the log, with the name of the
            perplexity, its value and the completed fraction of the stage. By default, no function is called.
    """

    def __init__(
        self,
        title: str,
        updates: int,
        progress: Progress,
        console: Console,
        record: Callable[[str, float, float], None] | None = None,
    ):
        self._record = record
        self._title, self._updates, self._progress, self._console = title, updates, progress, console
        self._loss = self._perplexity = self._validation = self._tokens_per_second = "-"
        # The time in seconds and the update number of the first log line are used to estimate the remaining time.
        self._first_update: tuple[float, int] | None = None
        self._next_line_seconds = 0.0
        self._task = progress.add_task(title, total=updates, state="starting")

    def __call__(self, line: str) -> None:
        match = LOG_RECORD.search(line)
        if not match:
            return
        try:
            kind, values = match[1], json.loads(match[2])
        except ValueError:  # skip an invalid line, because two processes may write to one line at the same time
            return
        if kind == "valid":
            name, perplexity = "validation_perplexity", float(values["valid_ppl"])
            self._validation = f"{perplexity:.2f}"
            update = int(values["valid_num_updates"])
        else:
            self._loss = f"{float(values['nll_loss']):.3f}"
            name, perplexity = "training_perplexity", float(values["ppl"])
            self._perplexity = f"{perplexity:.2f}"
            self._tokens_per_second = f"{float(values.get('wps', 0)):,.0f}"
            update = int(values["num_updates"])
        if self._record:
            self._record(name, perplexity, update / self._updates)
        self._show(update)

    def _show(self, update: int) -> None:
        """Display the latest values, which belong to optimizer update number `update`."""
        state = (
            f"loss {self._loss} bits  ppl {self._perplexity}  valid ppl {self._validation}  "
            f"{self._tokens_per_second} tokens/s"
        )
        self._progress.update(self._task, completed=update, state=state)
        now = time.monotonic()
        if self._first_update is None:
            self._first_update = (now, update)
        if not self._console.is_terminal and now >= self._next_line_seconds:
            self._next_line_seconds = now + SECONDS_BETWEEN_LINES
            start, first = self._first_update
            left_text = ""
            if update > first:
                left_text = f"{(now - start) / (update - first) * (self._updates - update):.0f} s left"
            self._console.print(f"{self._title}  update {update}/{self._updates}  {state}  {left_text}", soft_wrap=True)

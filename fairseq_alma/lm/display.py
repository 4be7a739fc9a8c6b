"""What a person sees of a stage while it runs."""

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


class StageDisplay:
    """Follows the log lines of fairseq-train processes: a live line each on a terminal, a line now and then elsewhere.

    Args:
        stage: that is run.
        updates: optimizer updates that each member takes, by its number.
        num_mega_batches: B.
        scalars: takes the perplexities too.
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
            tell = None
            if scalars:
                suffix = "" if set(updates) == {1} else f"_member_{number}"
                tell = partial(_tell, scalars, stage.index, suffix)
            self._members[number] = _MemberDisplay(name, total, self._progress, console, tell)

    def __enter__(self) -> "StageDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def member(self, number: int) -> Callable[[str], None]:
        """Takes the log of member m, line by line."""
        return self._members[number]


def _tell(scalars: RunScalars, stage_index: int, suffix: str, name: str, value: float, progress: float) -> None:
    scalars.during_stage(f"{name}{suffix}", value, stage_index, progress)


class _MemberDisplay:
    def __init__(
        self,
        title: str,
        updates: int,
        progress: Progress,
        console: Console,
        tell: Callable[[str, float, float], None] | None = None,
    ):
        self._tell = tell
        self._title, self._updates, self._progress, self._console = title, updates, progress, console
        self._loss = self._perplexity = self._validation = self._tokens_per_second = "-"
        self._first_update, self._next_plain_line = None, 0.0
        self._task = progress.add_task(title, total=updates, state="starting")

    def __call__(self, line: str) -> None:
        match = LOG_RECORD.search(line)
        if not match:
            return
        try:
            kind, values = match[1], json.loads(match[2])
        except ValueError:  # two ranks wrote into one line: no reason to end training
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
        if self._tell:
            self._tell(name, perplexity, update / self._updates)
        self._show(update)

    def _show(self, update: int) -> None:
        state = (
            f"loss {self._loss} bits  ppl {self._perplexity}  valid ppl {self._validation}  "
            f"{self._tokens_per_second} tokens/s"
        )
        self._progress.update(self._task, completed=update, state=state)
        now = time.monotonic()
        if self._first_update is None:
            self._first_update = (now, update)
        if not self._console.is_terminal and now >= self._next_plain_line:
            self._next_plain_line = now + 15
            since, first = self._first_update
            left = (now - since) / (update - first) * (self._updates - update) if update > first else None
            left_text = f"{left:.0f} s left" if left is not None else ""
            self._console.print(f"{self._title}  update {update}/{self._updates}  {state}  {left_text}", soft_wrap=True)

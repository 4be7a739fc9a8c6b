"""What a person sees of a run while it goes on: one live line on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fairseq_alma.app.scalars import RunScalars
from vision.training import Watcher

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_REFRESHES = 0.25
SECONDS_BETWEEN_SCALARS = 2.0


class RunDisplay(Watcher):
    """Mega-batch, stage, epoch, validation error, time left.

    Told of every epoch, and shows few of them: an epoch may take less than a millisecond.

    Args:
        title: of the run.
        num_mega_batches: B.
        wait: w.
        epochs: of a stage.
        scalars: of each seed; they take the validation error now and then.
    """

    def __init__(
        self,
        title: str,
        num_mega_batches: int,
        wait: int,
        epochs: int,
        console: Console | None = None,
        scalars: Sequence[RunScalars] = (),
    ):
        self._scalars, self._next_scalars = scalars, 0.0
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._title, self._num_mega_batches, self._wait, self._epochs = title, num_mega_batches, wait, epochs
        self._num_stages = -(-num_mega_batches // wait)
        self._stage, self._first_epoch, self._began = 0, 0, time.monotonic()
        self._next = self._began + SECONDS_BETWEEN_REFRESHES
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=self._num_stages * epochs, state="")

    def __enter__(self) -> "RunDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def begin_stage(self, index: int) -> None:
        """Stage `index` trains from now on."""
        if not self._stage:  # what an earlier process has done took this one no time
            self._first_epoch = (index - 1) * self._epochs
        self._stage = index

    def epoch(self, epoch: int, error: Callable[[], Tensor]) -> None:
        now = time.monotonic()
        if self._scalars and now >= self._next_scalars:
            if self._next_scalars:  # not at once: most stages are over in less
                of_seeds = error().view(len(self._scalars), -1).mean(dim=1).tolist()  # units lie seed after seed
                for scalars, value in zip(self._scalars, of_seeds, strict=True):
                    scalars.during_stage("validation_error_rate", value, self._stage, epoch / self._epochs)
            self._next_scalars = now + SECONDS_BETWEEN_SCALARS
        if now < self._next:
            return
        is_terminal = self._console.is_terminal
        self._next = now + (SECONDS_BETWEEN_REFRESHES if is_terminal else SECONDS_BETWEEN_LINES)
        done = (self._stage - 1) * self._epochs + epoch
        arrived = min(self._stage * self._wait, self._num_mega_batches)
        state = (
            f"mega-batch {arrived}/{self._num_mega_batches}  stage {self._stage}/{self._num_stages}  "
            f"epoch {epoch}/{self._epochs}  validation error {error().mean().item():.2%}"
        )
        self._progress.update(self._task, completed=done, state=state)
        if not is_terminal and done > self._first_epoch:
            left = (now - self._began) / (done - self._first_epoch) * (self._num_stages * self._epochs - done)
            self._console.print(f"{self._title}  {state}  {left:.0f} s left", soft_wrap=True)

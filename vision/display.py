"""Show the progress of training.

On a terminal, one line shows the progress and is updated in place. If the output is not a terminal, for example a log
file, a new line is printed every few seconds.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import progress_bar
from vision.training import Watcher

SECONDS_BETWEEN_LINES = 15.0
"""Minimum number of seconds between two printed lines if the output is not a terminal."""
SECONDS_BETWEEN_REFRESHES = 0.25
"""Minimum number of seconds between two updates of the progress line on a terminal."""
SECONDS_BETWEEN_SCALARS = 2.0
"""Minimum number of seconds between two points of a validation error curve in TensorBoard."""


class RunDisplay(Watcher):
    """Shows the current mega-batch, stage, epoch and validation error, and the remaining time, in a `with` block.

    Only some epochs are shown, because an epoch can take less than a millisecond.

    Args:
        title: text at the start of the progress line, for example the learner and its width.
        epochs: number of epochs of each stage that is planned, for the estimate of the remaining time.
        is_exact: whether the run will have exactly these stages. With wait=auto, they are an estimate.
        scalars: one TensorBoard writer per seed. Each writer gets the validation error of its seed every few seconds.
    """

    def __init__(
        self,
        title: str,
        num_mega_batches: int,
        epochs: Sequence[int],
        is_exact: bool = True,
        scalars: Sequence[RunScalars] = (),
    ):
        self._scalars, self._next_scalars = scalars, 0.0
        self._title, self._num_mega_batches, self._epochs, self._is_exact = title, num_mega_batches, epochs, is_exact
        self._index = self._arrival = self._num_epochs = 0
        """Stage that is trained now, the arrival at which it is trained, and its number of epochs."""
        self._epochs_before = [0, *accumulate(epochs)]
        """Number of epochs before each stage, and of all stages."""
        self._stage, self._first_epoch, self._began = 0, 0, time.monotonic()
        self._next = self._began + SECONDS_BETWEEN_REFRESHES
        self._progress = progress_bar("{task.fields[state]}")
        self._console = self._progress.console
        self._task = self._progress.add_task(title, total=self._epochs_before[-1], state="")

    def __enter__(self) -> "RunDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin_stage(self, index: int, arrival: int, num_epochs: int) -> None:
        self._index, self._arrival, self._num_epochs = index, arrival, num_epochs
        if not self._stage:
            # The epochs of stages that an earlier process has trained took no time in this process.
            self._first_epoch = self._epochs_before[min(index, len(self._epochs)) - 1]
        # A run can have more stages than planned: with wait=auto, or if an earlier call has trained a group that was
        # not complete, because it was the last one at that time.
        self._stage = min(index, len(self._epochs))

    def epoch(self, epoch: int, error: Callable[[], Tensor]) -> None:
        now = time.monotonic()
        if self._scalars and now >= self._next_scalars:
            if self._next_scalars:  # the first call only sets the time
                # error() returns the error rates of all networks, those of the first seed first. (For UMix it returns
                # one error rate per seed.) Average over the networks of each seed, because each seed has one curve.
                error_rates = error().view(len(self._scalars), -1).mean(dim=1).tolist()
                for scalars, error_rate in zip(self._scalars, error_rates, strict=True):
                    scalars.during_stage("validation_error_rate", error_rate, self._index, epoch / self._num_epochs)
            self._next_scalars = now + SECONDS_BETWEEN_SCALARS
        if now < self._next:
            return
        is_terminal = self._console.is_terminal
        self._next = now + (SECONDS_BETWEEN_REFRESHES if is_terminal else SECONDS_BETWEEN_LINES)
        done = self._epochs_before[self._stage - 1] + epoch
        num_stages = f"/{max(self._index, len(self._epochs))}" if self._is_exact else ""
        state = (
            f"mega-batch {self._arrival}/{self._num_mega_batches}  stage {self._index}{num_stages}  "
            f"epoch {epoch}/{self._num_epochs}  validation error {error().mean().item():.2%}"
        )
        self._progress.update(self._task, completed=done, state=state)
        if not is_terminal and done > self._first_epoch:
            left = (now - self._began) / (done - self._first_epoch) * (self._epochs_before[-1] - done)
            self._console.print(f"{self._title}  {state}  {left:.0f} s left", soft_wrap=True)

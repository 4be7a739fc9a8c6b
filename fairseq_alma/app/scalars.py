"""Writes the TensorBoard scalars (named numbers) of a run to the folder RUN/tensorboard during the run.

With the setting `wandb=PROJECT`, they are also sent to Weights & Biases: those of each arrival over the axis "arrival",
those of stages over the axis "during_stage/step".

Language models and vision use the same names. For most scalars, the TensorBoard step is the arrival t:

test/error_rate or test/perplexity, test/bits_per_byte, validation/...    scores after the arrival
stream/cer or stream/average_perplexity                metric of the stream up to this arrival
cost/train_tflops, cost/updates, cost/train_seconds    total cost up to this arrival
model/parameters, model/experts, model/members         number of parameters, of experts, and of members (networks)
model/overflow                                         share of the tokens that found their expert full

For the scalars during_stage/..., 1000 TensorBoard steps are one stage.

If a run is continued, it deletes the folder RUN/tensorboard with its first scalar, and writes all scalars again: those
of the arrivals from the ledger, and in alma-lm those of the stages from the logs of the members. In alma-vision, the
scalars during_stage/... of finished stages are lost.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.app.tracking import Tracker
from fairseq_alma.core.files import remove
from fairseq_alma.core.ledger import LedgerRow, Spent

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"
_FLUSH_SECONDS = 5
"""Time in seconds after which the scalars in memory are written to the TensorBoard file."""


class RunScalars:
    """Writes the TensorBoard scalars of one run. The TensorBoard file is created when the first scalar is written.

    If the file cannot be written, for example because the disk is full, a warning is logged and no further scalars are
    written, because the run does not need them.

    Args:
        folder: the run folder.
        cer_from: first arrival whose error rate is added to CER, 0 or 1.
        at_first: called with this object when the file is created. It writes the scalars of earlier processes again,
            other than those of rows.
        tracker: where to send the scalars, too; None for nowhere.
    """

    def __init__(
        self,
        folder: str | Path,
        cer_from: int = 1,
        at_first: "Callable[[RunScalars], None] | None" = None,
        tracker: Tracker | None = None,
    ):
        self.tracker = tracker
        self._at_first = at_first
        self._folder, self._is_on = Path(folder) / FOLDER, True
        """Where the file is, and whether it can be written."""
        self._writer: Any = None
        self._flushed = time.monotonic()
        self._num_seen = 0
        self._cer_from = cer_from
        # Over the arrivals so far: the sum of error rates or perplexities, and the costs.
        self._quality, self._spent = 0.0, Spent()
        self._unwritten: LedgerRow | None = None

    def rows(self, rows: Sequence[LedgerRow]) -> None:
        """Write the scalars of the rows that were added to the ledger since the last call. `rows` are all rows so far.

        If no stage was trained at an arrival, its scalars are skipped, because the model has not changed. But the
        scalars of the untrained learner (t = 0) and of the last arrival are always written, the latter by `close`.
        """
        for row in rows[self._num_seen :]:
            if row.t >= self._cer_from:
                self._quality += row.scores.error_rate or row.scores.perplexity or 0.0
            self._spent += row.spent
            if self.tracker:
                self.tracker.log("arrival", row.t, self._values_at(row) | {"stage": row.stage})
            if self._is_on:
                self._unwritten = row
                if row.t == 0 or row.updated:
                    self._write_row()
        self._num_seen = len(rows)

    def during_stage(self, name: str, value: float, stage_index: int, progress: float) -> None:
        """Write the scalar during_stage/NAME at TensorBoard step 1000 * (stage_index - 1 + progress).

        `stage_index` is counted from 1. `progress` is the finished fraction of the stage, between 0 and 1.
        """
        values, step = {f"during_stage/{name}": value}, round(1000 * (stage_index - 1 + progress))
        if self._is_on:
            self._write(values, step)
        if self.tracker:
            self.tracker.log("during_stage/step", step, values)

    def close(self) -> None:
        """Write the scalars of the last arrival, if they are not written yet. Then close the TensorBoard file."""
        self._write_row()
        if self.tracker:
            self.tracker.close()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)

    def _write_row(self) -> None:
        if self._unwritten is not None:
            self._write(self._values_at(self._unwritten), self._unwritten.t)
            self._unwritten = None

    def _values_at(self, row: LedgerRow) -> dict[str, float]:
        return values_at(row, self._quality, self._spent)

    def _write(self, values: dict[str, float], step: int) -> None:
        if not self._is_on:
            return
        # Do not use tensorboardX.SummaryWriter. It writes in a thread, which ends with a traceback if the disk is full.
        # Then close() would wait for this thread forever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            if self._writer is None:
                # Delete the TensorBoard file of an earlier process, because this process writes the same scalars again.
                # With both files, TensorBoard would show each scalar twice.
                remove(self._folder)
                self._folder.mkdir(parents=True)
                self._writer = EventsWriter(str(self._folder / "events"))
                if self._at_first:
                    self._at_first(self)
                    if self._writer is None:  # the disk is full
                        return
            for name, value in values.items():
                self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Log a warning, and write no further scalars."""
        logger.warning("no further TensorBoard scalars are written to %s: %s", self._folder, error)
        self._is_on, self._writer, self._unwritten = False, None, None


def values_at(row: LedgerRow, quality: float, spent: Spent) -> dict[str, float]:
    """Return the scalars of one arrival, name -> value.

    `quality` is the sum of error rates or perplexities, and `spent` that of the costs, over all arrivals so far.
    """
    scores = row.scores
    values: dict[str, float | None] = {
        "test/error_rate": scores.error_rate,
        "test/perplexity": scores.perplexity,
        "test/word_perplexity": scores.word_perplexity,
        "test/bits_per_byte": scores.bits_per_byte,
        "validation/loss": scores.validation_loss,
        "validation/error_rate": scores.validation_error_rate,
        "validation/perplexity": scores.validation_perplexity,
        "validation/prequential_error_rate": row.prequential.error_rate if row.prequential else None,
        "cost/train_tflops": spent.train_flops / 1e12,
        "cost/updates": spent.num_updates,
        "cost/train_seconds": spent.train_seconds,
        "model/parameters": scores.num_params,
        "model/experts": scores.num_experts,
        "model/members": scores.num_members,
        "model/overflow": scores.overflow,
    }
    if row.t >= 1:
        is_vision = scores.error_rate is not None
        values["stream/cer" if is_vision else "stream/average_perplexity"] = quality / (1 if is_vision else row.t)
    return {name: float(value) for name, value in values.items() if value is not None}

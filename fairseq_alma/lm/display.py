"""Display of a running stage: the progress, losses and speed of each member (network).

The values come from the log lines that the training process of each member writes.
"""

import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import progress_bar, seed_text
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.lm.member_config import read_config

LOG_RECORD = re.compile(r"\| INFO \| (train_inner|valid) \| (\{[^{}]*\})")

RESUMED = re.compile(r"checkpoint_last\.pt \(epoch \d{1,20} @ (\d{1,20}) updates\)")
"""Matches a part of the line that fairseq logs when it resumes from a checkpoint. Group 1 is the update."""

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
        scalars: if given, this object writes the training and validation perplexities to TensorBoard files.
    """

    def __init__(
        self,
        stage: Stage,
        updates: Mapping[int, int],
        num_mega_batches: int,
        scalars: RunScalars | None = None,
    ):
        self._progress = progress_bar("update {task.completed}/{task.total}  {task.fields[state]}")
        seed = seed_text(stage.folder.parents[1])
        title = f"{seed}mega-batch {stage.new[-1].t}/{num_mega_batches}  stage {stage.index}"
        self._members = {}
        for number, total in updates.items():
            name = title if set(updates) == {1} else f"{title}  member {number}"
            record = None
            if scalars:
                record = partial(_record, scalars, stage.index, total, number, _suffix(updates, number))
            log = stage.folder / f"member_{number}" / "log.txt"
            self._members[number] = _MemberDisplay(name, total, self._progress, log, record)

    def __enter__(self) -> "StageDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def member(self, number: int) -> Callable[[str], None]:
        """Return a function for member `number`. The caller passes each log line of this member to the function."""
        return self._members[number]


def record_trained_members(run: RunFolder, scalars: RunScalars) -> None:
    """Write the perplexities in the logs of all members whose training has ended to TensorBoard files.

    A run that is continued writes its TensorBoard files again from the beginning.
    """
    for stage in run.stage_folders():
        logs = {int(path.parent.name.removeprefix("member_")): path for path in stage.glob("member_*/log.txt")}
        for number, log in sorted(logs.items()):
            points = _points_in(log)
            last = max((point.update for point in points), default=0)
            try:
                updates = read_config(log.parent).optimization.max_update
            except RunError:  # none in the folder of a member that was copied from another run (setting reuse_from=)
                updates = last
            if last >= updates:
                for point in points:
                    _record(scalars, index_of_stage(stage), updates, number, _suffix(logs, number), point)


def _suffix(members: Collection[int], number: int) -> str:
    """Return the end of the names of a member's scalars. It is empty if the stage trains only member 1."""
    return "" if set(members) == {1} else f"_member_{number}"


class _Point(NamedTuple):
    """A perplexity in a log."""

    name: str
    """Name of the TensorBoard scalar, without the member."""
    update: int
    perplexity: float
    values: dict[str, Any]
    """All values in the line of the log."""


def _point_in(line: str) -> _Point | None:
    """Return the perplexity in a line of a log; None if there is none."""
    match = LOG_RECORD.search(line)
    try:
        values = json.loads(match[2]) if match else None
    except ValueError:  # two processes may write to one line at the same time
        return None
    if match is None or values is None:
        return None
    if match[1] == "valid":
        return _Point("validation_perplexity", int(values["valid_num_updates"]), float(values["valid_ppl"]), values)
    return _Point("training_perplexity", int(values["num_updates"]), float(values["ppl"]), values)


def _points_in(log: Path) -> list[_Point]:
    """Return the perplexities in a log. If an update was repeated after a crash, return only its last perplexity."""
    points = map(_point_in, log.read_text(encoding="utf-8", errors="replace").splitlines())
    return list({(point.name, point.update): point for point in points if point is not None}.values())


def _record(scalars: RunScalars, stage_index: int, updates: int, member: int, suffix: str, point: _Point) -> None:
    """Write a perplexity of a stage with `updates` updates to TensorBoard, and send the loss to W&B."""
    scalars.during_stage(f"{point.name}{suffix}", point.perplexity, stage_index, point.update / updates)
    if scalars.tracker:
        place = f"stage_{stage_index}/member_{member}"
        values = {f"{place}/{point.name.removesuffix('perplexity')}loss": math.log(point.perplexity)}
        if "lr" in point.values:
            values[f"{place}/learning_rate"] = float(point.values["lr"])
        scalars.tracker.log(f"{place}/update", point.update, values)


class _MemberDisplay:
    """Displays the progress of one member. The caller calls this object like a function, with each new log line.

    Args:
        title: text at the beginning of the progress line.
        updates: number of optimizer updates in the stage.
        progress: the display of the stage, with one line for each member.
        log: log file of the member.
        record: function that is called for each perplexity in the log.
    """

    def __init__(
        self, title: str, updates: int, progress: Progress, log: Path, record: Callable[[_Point], None] | None
    ):
        self._title, self._updates, self._progress, self._log, self._record = title, updates, progress, log, record
        self._training = self._validation = self._speed = ""  # until they are known
        # The time in seconds and the update number of the first log line are used to estimate the remaining time.
        self._first_update: tuple[float, int] | None = None
        self._next_line_seconds = 0.0
        self._task = progress.add_task(title, total=updates, state="starting")

    def __call__(self, line: str) -> None:
        if self._record and "Loaded checkpoint " in line and (resumed := RESUMED.search(line)):
            for point in _points_in(self._log):
                if point.update <= int(resumed[1]):
                    self._record(point)
        if (found := _point_in(line)) is None:
            return
        if found.name == "validation_perplexity":
            self._validation = f"valid ppl {found.perplexity:.2f}"
        else:
            # A criterion of the user may log only "loss".
            loss = float(found.values["nll_loss" if "nll_loss" in found.values else "loss"])
            self._training = f"loss {loss:.3f} bits  ppl {found.perplexity:.2f}"
        if self._record:
            self._record(found)
        self._show(found.update, found.values)

    def _show(self, update: int, values: Mapping[str, Any]) -> None:
        """Display the latest values, which belong to optimizer update number `update`. Unknown ones are left out."""
        now = time.monotonic()
        if self._first_update is None:
            self._first_update = (now, update)
        start, first = self._first_update
        # fairseq measures the speed only from the 10th update of a process on, which a short stage may not reach.
        speed = float(values.get("wps", 0))
        if not speed and update > first:
            speed = float(values.get("wpb", 0)) * (update - first) / (now - start)
        if speed:
            self._speed = f"{speed:,.0f} tokens/s"
        state = "  ".join(filter(None, (self._training, self._validation, self._speed)))
        self._progress.update(self._task, completed=update, state=state)
        console = self._progress.console
        if not console.is_terminal and now >= self._next_line_seconds:
            self._next_line_seconds = now + SECONDS_BETWEEN_LINES
            left_text = ""
            if update > first:
                left_text = f"{(now - start) / (update - first) * (self._updates - update):.0f} s left"
            console.print(f"{self._title}  update {update}/{self._updates}  {state}  {left_text}", soft_wrap=True)

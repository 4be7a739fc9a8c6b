"""Algorithm 1 of the paper, and what stands around it: any learner, any environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import Scores, Spent
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream

Replay = Literal[False, "all"] | float


@dataclass(frozen=True)
class StreamSettings:
    """How a learner meets the stream. All counts are in mega-batches."""

    num_mega_batches: int
    """B: how many arrive in all."""
    wait: int = 1
    """w: how many the learner gathers before a stage."""
    replay: Replay = False
    """False; "all": a stage trains on everything that has arrived, so its cost may grow with history; or
    a share in (0, 1): that part of every batch comes from the past, the number of steps unchanged."""

    def __post_init__(self):
        if not 1 <= self.wait <= self.num_mega_batches:
            raise SettingError(f"wait={self.wait} must lie between 1 and {self.num_mega_batches} mega-batches")
        share = isinstance(self.replay, int | float) and not isinstance(self.replay, bool) and 0 < self.replay < 1
        if not (self.replay is False or self.replay == "all" or share):
            raise SettingError(f"replay={self.replay!r} must be false, all, or a share between 0 and 1")


@dataclass(frozen=True)
class Stage:
    """One training round, on the mega-batches gathered since the last."""

    index: int
    """k, counted from 1."""
    new: tuple[MegaBatch, ...]
    """Gathered since the last stage: w of them, fewer at the end of the stream."""
    past: tuple[MegaBatch, ...]
    """What earlier stages trained on; a stage uses it as `replay` says."""
    replay: Replay
    folder: Path
    """Where the stage leaves logs, checkpoints and done marks."""


class Learner(Protocol):
    """What trains, predicts and grows. It sees training and validation data, never the test set."""

    def grow(self, stage: Stage) -> Spent:
        """Add capacity before the stage (from the second on), ranked on the validation data of the stage before."""

    def train(self, stage: Stage) -> Spent:
        """Train on the stage; keep its best-validation epoch or checkpoint."""

    def save(self, folder: Path) -> None:
        """Leave in `folder` all that `load` needs to go on from here."""

    def load(self, folder: Path) -> None:
        """Become what was saved in `folder`."""


class Evaluator(Protocol):
    """The environment's: it alone holds the test set."""

    def __call__(self, learner: Learner) -> Scores: ...


class StackedLearner(Protocol):
    """A learner of several seeds at once: what it spends is a list, one entry a seed."""

    def grow(self, stage: Stage) -> list[Spent]: ...
    def train(self, stage: Stage) -> list[Spent]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class Record(Protocol):
    """What a run leaves behind: a RunRecord, or a StackRecord for several seeds at once."""

    def stage_folder(self, k: int) -> Path: ...
    def step(self, k: int, name: str, learner: Any, do: Callable[[], Any]) -> Any: ...
    def decision(self, t: int, due: bool) -> bool: ...
    def arrival(self, t: int, stage: int, updated: bool, scores: Any, spent: list[Any]) -> None: ...
    def rows(self) -> list[Any]: ...


def stage_is_due(gathered: Sequence[MegaBatch], settings: StreamSettings, stream_ends: bool) -> bool:
    """Whether to train now or wait for more: the one place that decides, from what has arrived.

    Algorithm 1's `while t < B` would pass over the last mega-batch at w = 1, and a last group smaller
    than w: we train on both.
    """
    return len(gathered) == settings.wait or stream_ends


def run_stream(
    stream: MegaBatchStream,
    learner: Learner | StackedLearner,
    evaluate: Callable[[Any], Scores | list[Scores]],
    settings: StreamSettings,
    record: Record,
) -> list[Any]:
    """Algorithm 1: anytime learning over a stream of mega-batches. Returns the ledger, t = 0..B.

    Every step goes through `record.step`, which passes over what an earlier process has finished:
    running it again after a kill continues. A learner that computes several seeds at once answers with
    a list, one entry a seed; its StackRecord keeps a ledger each, and they are what is returned.
    """
    scores = record.step(0, "evaluate", learner, partial(evaluate, learner))
    record.arrival(0, 0, False, scores, [])
    gathered: list[MegaBatch] = []
    past: list[MegaBatch] = []
    k = 0
    for mega_batch in stream:
        gathered.append(mega_batch)
        due = record.decision(mega_batch.t, stage_is_due(gathered, settings, mega_batch.t == len(stream)))
        spent = []
        if due:
            k += 1
            stage = Stage(k, tuple(gathered), tuple(past), settings.replay, record.stage_folder(k))
            if k > 1:  # as in Algorithm 1, before training; Algorithm 2 grows after it, which is the same from here
                spent.append(record.step(k, "grow", learner, partial(learner.grow, stage)))
            spent.append(record.step(k, "train", learner, partial(learner.train, stage)))
            scores = record.step(k, "evaluate", learner, partial(evaluate, learner))
            past += gathered
            gathered = []
        # Between stages the model has not changed: the last value is charged again.
        record.arrival(mega_batch.t, k, due, scores, spent)
    return record.rows()

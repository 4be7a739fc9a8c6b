"""Algorithm 1 of the paper, and the types of everything that takes part in it: learner, evaluator and record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream

Replay = Literal[False, "all"] | float

Cost = Spent | list[Spent]
"""What a step cost: a learner that computes several seeds at once returns a list, one entry for each seed."""


@dataclass(frozen=True)
class StreamSettings:
    """How a learner meets the stream. All counts are in mega-batches."""

    num_mega_batches: int
    """Number of mega-batches that arrive in all, B."""
    wait: int = 1
    """Number of mega-batches that the learner gathers before a stage, w."""
    replay: Replay = False
    """False: a stage does not use earlier mega-batches. "all": it trains on everything that has arrived, so its cost
    grows with history. A number between 0 and 1: this share of every batch comes from the past, and the number of
    steps does not change."""

    def __post_init__(self) -> None:
        if not 1 <= self.wait <= self.num_mega_batches:
            raise SettingError(f"wait={self.wait} must lie between 1 and {self.num_mega_batches} mega-batches")
        is_number = isinstance(self.replay, int | float) and not isinstance(self.replay, bool)
        is_share = is_number and 0 < float(self.replay) < 1
        if not (self.replay is False or self.replay == "all" or is_share):
            raise SettingError(f"replay={self.replay!r} must be false, all, or a share between 0 and 1")


@dataclass(frozen=True)
class Stage:
    """One training round, on the mega-batches gathered since the last one."""

    index: int
    """Number of the stage, k, counted from 1."""
    new: tuple[MegaBatch, ...]
    """Mega-batches gathered since the last stage: w of them, or fewer at the end of the stream."""
    past: tuple[MegaBatch, ...]
    """Mega-batches that earlier stages trained on. A stage uses them as `replay` says."""
    replay: Replay
    folder: Path
    """Folder for the stage's logs, checkpoints and done marks."""


class Stored(Protocol):
    """Something that can be saved to a folder and restored from it."""

    def save(self, folder: Path) -> None:
        """Write to `folder` everything that `load` needs."""

    def load(self, folder: Path) -> None:
        """Restore the state that was saved to `folder`."""


class Learner(Stored, Protocol):
    """Trains, predicts and grows. A learner sees training and validation data, never the test set."""

    def grow(self, stage: Stage) -> Cost:
        """Add capacity before a stage, from the second stage on. Return the cost.

        What grows is ranked on the validation data of the stage before.
        """

    def train(self, stage: Stage) -> Cost:
        """Train on a stage and keep its best epoch or checkpoint by validation. Return the cost."""


LearnerT = TypeVar("LearnerT", bound=Learner)
LearnerT_contra = TypeVar("LearnerT_contra", bound=Learner, contravariant=True)
ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
ScoresT_contra = TypeVar("ScoresT_contra", contravariant=True)
RowsT = TypeVar("RowsT")
RowsT_co = TypeVar("RowsT_co", covariant=True)
T = TypeVar("T")


class Evaluator(Protocol[LearnerT_contra, ScoresT_co]):
    """Scores the predictor of a learner. It belongs to the environment: only it has the test set.

    Its type parameters are the kind of learner that it can score, and what it returns: `Scores`, or a list of them
    for a learner that computes several seeds at once.
    """

    def __call__(self, learner: LearnerT_contra) -> ScoresT_co:
        """Return the scores of the learner's present predictor."""


class Record(Protocol[ScoresT_contra, RowsT_co]):
    """Stores the progress of a run: a `RunRecord`, or a `StackRecord` for several seeds at once."""

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k; k = 0 is the untrained learner."""

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Do a step of stage k, or skip it and return its stored result if it is done."""

    def decision(self, t: int, due: bool) -> bool:
        """Record whether a stage was due at arrival t. Return the recorded decision, which may be an earlier one."""

    def arrival(self, t: int, stage: int, updated: bool, scores: ScoresT_contra, spent: Sequence[Cost]) -> None:
        """Add the row of arrival t to the ledger."""

    def rows(self) -> RowsT_co:
        """Return the ledger so far; of several seeds, a list of ledgers."""


def stage_is_due(gathered: Sequence[MegaBatch], settings: StreamSettings, stream_ends: bool) -> bool:
    """Return True to train now, False to wait for more. This is the only place that decides, from what has arrived.

    Algorithm 1's `while t < B` would skip the last mega-batch at w = 1, and a last group smaller than w. We train on
    both.
    """
    return len(gathered) == settings.wait or stream_ends


def run_stream(
    stream: MegaBatchStream,
    learner: LearnerT,
    evaluate: Evaluator[LearnerT, ScoresT],
    settings: StreamSettings,
    record: Record[ScoresT, RowsT],
) -> RowsT:
    """Run Algorithm 1: anytime learning over a stream of mega-batches. Return the ledger, t = 0..B.

    Every step goes through `record.step`, which skips steps that an earlier process has finished. So a second call
    after a kill continues the run. For a learner that computes several seeds at once, every step returns a list with
    one entry for each seed, and its StackRecord keeps one ledger for each seed.
    """
    scores = record.step(0, "evaluate", learner, partial(evaluate, learner))
    record.arrival(0, 0, False, scores, [])
    gathered: list[MegaBatch] = []
    past: list[MegaBatch] = []
    k = 0
    for mega_batch in stream:
        gathered.append(mega_batch)
        due = record.decision(mega_batch.t, stage_is_due(gathered, settings, mega_batch.t == len(stream)))
        spent: list[Cost] = []
        if due:
            k += 1
            stage = Stage(k, tuple(gathered), tuple(past), settings.replay, record.stage_folder(k))
            if k > 1:  # before training, as in Algorithm 1; Algorithm 2 grows after it, which is the same from here on
                spent.append(record.step(k, "grow", learner, partial(learner.grow, stage)))
            spent.append(record.step(k, "train", learner, partial(learner.train, stage)))
            scores = record.step(k, "evaluate", learner, partial(evaluate, learner))
            past += gathered
            gathered = []
        # Between stages the model does not change: the last scores count again.
        record.arrival(mega_batch.t, k, due, scores, spent)
    return record.rows()

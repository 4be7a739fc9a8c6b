"""Algorithm 1 of the paper (`run_stream`), and the interfaces that it uses: learner, evaluator and record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream

Replay = Literal[False, "all"] | float
"""Type of the setting `replay`; see StreamSettings."""

Cost = Spent | list[Spent]
"""Cost of a step (growing or training). It is a list with one entry per seed if several seeds are trained at once."""


@dataclass(frozen=True)
class StreamSettings:
    """Settings for the stream: its length, when a stage starts, and which data a stage uses."""

    num_mega_batches: int
    """Total number of mega-batches that arrive, B."""
    wait: int = 1
    """Number of mega-batches that the learner gathers before a stage, w."""
    replay: Replay = False
    """How a stage uses earlier mega-batches. False: the stage does not use them. "all": the stage trains on all
    mega-batches that have arrived, so later stages cost more. A number between 0 and 1: this share of every batch comes
    from earlier mega-batches, and the number of updates does not change."""

    def __post_init__(self) -> None:
        if not 1 <= self.wait <= self.num_mega_batches:
            raise SettingError(f"wait={self.wait} must lie between 1 and {self.num_mega_batches} mega-batches")
        is_number = isinstance(self.replay, int | float) and not isinstance(self.replay, bool)
        is_share = is_number and 0 < float(self.replay) < 1
        if not (self.replay is False or self.replay == "all" or is_share):
            raise SettingError(f"replay={self.replay!r} must be false, all, or a share between 0 and 1")


@dataclass(frozen=True)
class Stage:
    """One training round. It trains on the mega-batches that arrived since the previous stage."""

    index: int
    """Index of the stage, k, counted from 1."""
    new: tuple[MegaBatch, ...]
    """Mega-batches that arrived since the previous stage. Their number is `wait`, or less at the end of the stream."""
    past: tuple[MegaBatch, ...]
    """Mega-batches of the earlier stages. `replay` determines whether this stage also trains on them."""
    replay: Replay
    """How the stage uses `past`; see StreamSettings."""
    folder: Path
    """Folder for the logs and checkpoints of the stage, and for the marks of its finished steps."""


class Stored(Protocol):
    """Object with a state that can be saved to a folder and restored from this folder."""

    def save(self, folder: Path) -> None:
        """Write the state to `folder`, so that `load` can restore it."""

    def load(self, folder: Path) -> None:
        """Restore the state that was saved to `folder`."""


class Learner(Stored, Protocol):
    """Model or ensemble that trains, predicts and grows. It has access to training and validation data, but not to the
    test set."""

    def grow(self, stage: Stage) -> Cost:
        """Add capacity before `stage` and return the cost. Called before every stage except the first.

        A mixture ranks its experts by their loss on the validation data of the previous stage.
        """

    def train(self, stage: Stage) -> Cost:
        """Train on the data of `stage`, keep the epoch or checkpoint with the best validation score, and return the
        cost."""


LearnerT = TypeVar("LearnerT", bound=Learner)
LearnerT_contra = TypeVar("LearnerT_contra", bound=Learner, contravariant=True)
ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
ScoresT_contra = TypeVar("ScoresT_contra", contravariant=True)
RowsT = TypeVar("RowsT")
RowsT_co = TypeVar("RowsT_co", covariant=True)
T = TypeVar("T")


class Evaluator(Protocol[LearnerT_contra, ScoresT_co]):
    """Function that scores the predictor of a learner, which is the network or ensemble that makes its predictions.

    Only the evaluator has access to the test set.

    The type parameters are the type of learner that the evaluator can score, and its return type. The return type is
    `Scores`, or `list[Scores]` for a learner that trains several seeds at once.
    """

    def __call__(self, learner: LearnerT_contra) -> ScoresT_co:
        """Return the scores of the learner's current predictor."""


class Record(Protocol[ScoresT_contra, RowsT_co]):
    """Interface for storing the progress of a run. `RunRecord` stores one seed, `StackRecord` several seeds at once."""

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k. The folder for k = 0 belongs to the untrained learner."""

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Call `do`, which runs the step `name` (grow, train or evaluate) of stage k; store and return its result.

        If the step is done already, do not run it again, but restore the learner and return the stored result.
        """

    def decision(self, t: int, due: bool) -> bool:
        """Store and return whether a stage starts at arrival t.

        If a decision for t is already stored, return the stored decision instead. So a continued run trains its stages
        at the same arrivals, even if the stream has become longer.
        """

    def arrival(self, t: int, stage: int, updated: bool, scores: ScoresT_contra, spent: Sequence[Cost]) -> None:
        """Add the row of arrival t to the ledger."""

    def rows(self) -> RowsT_co:
        """Return the rows of the ledger so far, or a list with the rows of each seed if there are several seeds."""


def stage_is_due(gathered: Sequence[MegaBatch], settings: StreamSettings, stream_ends: bool) -> bool:
    """Return True if a stage must start now, False if the learner waits for more mega-batches.

    The loop condition `while t < B` of Algorithm 1 would skip the last mega-batch if the wait w is 1, and also the last
    mega-batches of the stream if they are fewer than w. We train on these mega-batches too.

    Args:
        gathered: mega-batches that have arrived since the previous stage.
        settings: the stream settings, which contain the wait.
        stream_ends: whether the last mega-batch of the stream has arrived.
    """
    return len(gathered) == settings.wait or stream_ends


def run_stream(
    stream: MegaBatchStream,
    learner: LearnerT,
    evaluate: Evaluator[LearnerT, ScoresT],
    settings: StreamSettings,
    record: Record[ScoresT, RowsT],
) -> RowsT:
    """Run Algorithm 1, anytime learning over a stream of mega-batches. Return the ledger rows for t = 0..B.

    Every step goes through `record.step`, which skips the steps that an earlier process has finished. Therefore, if the
    process is killed, a second call continues the run. For a learner that trains several seeds at once, every step
    returns a list with one entry per seed, and `record` must be a StackRecord, which stores one ledger per seed.

    Args:
        stream: the mega-batches in order.
        learner: the untrained learner. It is trained in place.
        evaluate: function that returns the scores of the learner on the test set.
        settings: the stream settings.
        record: stores the progress and the ledger.
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
            # Grow before training, as in Algorithm 1. Algorithm 2 grows after training, which gives the same result.
            if k > 1:
                spent.append(record.step(k, "grow", learner, partial(learner.grow, stage)))
            spent.append(record.step(k, "train", learner, partial(learner.train, stage)))
            scores = record.step(k, "evaluate", learner, partial(evaluate, learner))
            past += gathered
            gathered = []
        # If no stage was trained, the model has not changed, so its latest scores are recorded again.
        record.arrival(mega_batch.t, k, due, scores, spent)
    return record.rows()

"""Algorithm 1 of the paper (`run_stream`), and the interfaces that it uses: learner and evaluator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from fairseq_alma.core.arrivals import Decision
from fairseq_alma.core.error_curve import ErrorCurve, auto_ratio, known_error
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.run_record import RunRecord, SavedLearner
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream
from fairseq_alma.core.waiting import Wait, arrivals_of_stages, check_wait, group_is_complete, ratio_of

LastGroup = Literal["train", "wait"]
"""Type of the setting `last_group`. `StreamSettings.last_group` describes the meaning."""


@dataclass(frozen=True)
class StreamSettings:
    """Settings for the stream: number of mega-batches, when a stage starts, and which data a stage trains on."""

    num_mega_batches: int
    """Total number of mega-batches that arrive (B in Algorithm 1)."""
    wait: Wait = 1
    """Number of mega-batches that the learner gathers before it trains a stage (w in Algorithm 1), or a rule that
    chooses it, or the arrivals of the stages (see `fairseq_alma.core.waiting`)."""
    replay: Replay = False
    """How a stage uses the mega-batches of earlier stages.

    False: it does not use them.
    "all": it trains on all mega-batches that have arrived. So each stage costs more than the previous one.
    A number between 0 and 1: this fraction of every batch comes from the mega-batches of earlier stages. The number of
    updates is the same as without replay.
    "uniform": as with a number, but the fraction is the number of earlier mega-batches divided by that of all
    mega-batches that have arrived. So mega-batches of equal size make up equal parts of every batch. If sizes differ,
    the fraction is the same, and each earlier example is equally likely to be read.
    "auto": as with a number, which the learner chooses for each stage. Only language models do."""
    last_group: LastGroup = "train"
    """What happens to mega-batches at the end of the stream if they are fewer than `wait`. "train": a stage trains on
    them. "wait": they wait for the mega-batches that will arrive later."""
    skip: tuple[int, ...] = ()
    """Mega-batches that no stage trains on, now or as replay."""
    num_known: int = 0
    """Number of mega-batches at the start on which the initial model was trained. No stage waits for them or trains on
    them as new data, but all stages can replay them."""

    def ratio(self, curve: ErrorCurve) -> tuple[float, str | None]:
        """Return the ratio of waits that grow, and with wait="auto" the reason for it, given the known errors."""
        if self.wait == "auto":
            return auto_ratio(curve, self.replay, ratio_of(self.wait))
        return ratio_of(self.wait), None

    @property
    def arrivals_of_stages(self) -> list[int]:
        """The arrivals t at which stages are trained, until the last mega-batch has arrived.

        With wait="auto", the run decides that. Then these are the arrivals if no error were ever known; only the first
        one is certain.
        """
        ratio, _ = self.ratio(ErrorCurve())
        return arrivals_of_stages(self.num_mega_batches, self.wait, ratio, self.last_group == "train", self.num_known)

    @property
    def num_stages(self) -> int:
        """Number of stages until the last mega-batch has arrived. With wait="auto", an estimate."""
        return len(self.arrivals_of_stages)

    def __post_init__(self) -> None:
        check_wait(self.wait)
        if self.num_known > self.num_mega_batches:
            raise SettingError(
                f"known_mega_batches={self.num_known} is more than the {self.num_mega_batches} mega-batches that arrive"
            )
        is_number = isinstance(self.replay, int | float) and not isinstance(self.replay, bool)
        is_share = is_number and 0 < float(self.replay) < 1
        if not (self.replay is False or self.replay in ("all", "uniform", "auto") or is_share):
            raise SettingError(
                f"replay={self.replay!r} must be false, all, uniform, a share between 0 and 1, or for text auto"
            )


@dataclass(frozen=True)
class Stage:
    """One training round. It trains on the mega-batches that arrived since the previous stage.

    With replay, it also trains on mega-batches of earlier stages.
    """

    index: int
    """Index of the stage (k), counted from 1."""
    new: tuple[MegaBatch, ...]
    """Mega-batches that arrived since the previous stage. Their number is `wait`; it may be less at the end of the
    stream (see `StreamSettings.last_group`)."""
    past: tuple[MegaBatch, ...]
    """All mega-batches of earlier stages. The field `replay` determines whether this stage also trains on them."""
    replay: Replay
    """How the stage uses the mega-batches in `past`; see `StreamSettings.replay`."""
    folder: Path
    """Folder of the stage, for logs, checkpoints and done marks (files that say which steps are finished)."""

    @property
    def past_share(self) -> float:
        """Fraction of every batch that comes from the mega-batches in `past`, at constant numbers of updates.

        It is 0 if there are none, without replay, and with replay="all", which trains on them in addition. With
        replay="auto", the learner chooses the fraction (see `auto_share`), and this property raises ValueError.
        """
        if not self.past or self.replay in (False, "all"):
            return 0.0
        return len(self.past) / (len(self.past) + len(self.new)) if self.replay == "uniform" else float(self.replay)


class Learner(SavedLearner, Protocol):
    """Interface of a model or ensemble that trains, predicts and grows (adds capacity).

    A learner has access to the training and validation data, but not to the test set. It trains one model or ensemble
    for each seed of the run, and returns one cost for each seed. If it has an attribute `can_grow` that is False, its
    method `grow` is not called.
    """

    def grow(self, stage: Stage) -> list[Spent]:
        """Add capacity before `stage` and return the cost. This method is called before every stage except the first.

        A growing mixture of experts copies or splits some of its experts. It selects these experts with the validation
        data of the previous stage.
        """

    def train(self, stage: Stage) -> list[Spent]:
        """Train on the data of `stage` and return the cost.

        After the training, the learner has the parameters of the epoch or checkpoint with the best validation score.
        """


LearnerT = TypeVar("LearnerT", bound=Learner)

Evaluate = Callable[[LearnerT], list[Scores]]
"""Function that scores the predictor of a learner, for each seed, on the test set, to which nothing else has access."""

PrequentialEvaluate = Callable[[LearnerT, MegaBatch], Sequence[Prequential | None]]
"""Function that scores the predictor of a learner, for each seed, on the validation data of a mega-batch that the
learner has not trained on yet. Like `Evaluate`, it belongs to the environment and not to the learner."""

Complete = Callable[[LearnerT, list[Scores]], list[Scores]]
"""Function that adds to the latest scores of a learner what they lack, because the stream was extended since then."""


def stage_is_due(
    gathered: Sequence[MegaBatch],
    past: Sequence[MegaBatch],
    settings: StreamSettings,
    t: int,
    stream_ends: bool,
    curve: ErrorCurve,
) -> Decision:
    """Return whether a stage must start now, or the learner waits for more mega-batches.

    A stage starts when w mega-batches have been gathered; w is the wait (see `group_is_complete`). With
    last_group="train", a stage also starts at the end of the stream, so that the learner trains on all mega-batches.
    Algorithm 1 of the paper leaves some out: with w = 1, its loop condition `while t < B` skips the last mega-batch,
    and with a larger w, it skips the last mega-batches if they are fewer than w.

    Args:
        gathered: mega-batches that have arrived since the previous stage.
        past: mega-batches of all earlier stages.
        settings: the stream settings, which contain the wait.
        t: the arrival.
        stream_ends: whether the last mega-batch of the stream has arrived.
        curve: the errors that are known so far.
    """
    ratio, reason = settings.ratio(curve)
    is_complete = group_is_complete(len(gathered), len(past), settings.wait, ratio, t)
    if stream_ends and settings.last_group == "train" and not is_complete:
        return Decision(True, reason and "the stream ends")
    return Decision(is_complete, reason and f"{len(gathered)} new after {len(past)}: {reason}")


def run_stream(
    stream: MegaBatchStream,
    learner: LearnerT,
    evaluate: Evaluate[LearnerT],
    settings: StreamSettings,
    record: RunRecord,
    prequential: PrequentialEvaluate[LearnerT] | None = None,
    complete_scores: Complete[LearnerT] | None = None,
) -> list[list[LedgerRow]]:
    """Run Algorithm 1 of the paper: train a learner on a stream. Return the ledger rows for t = 0..B, for each seed.

    If the process is killed, a second call continues the run, because `record` skips the steps that are finished.

    Args:
        stream: the mega-batches in order.
        learner: the untrained learner. It is trained in place.
        evaluate: function that returns the scores of the learner on the test set.
        settings: the stream settings.
        record: object that stores the progress and the ledger.
        prequential: function that scores the learner on a mega-batch before the learner trains on it. By default, there
            are no such scores.
        complete_scores: function that completes the latest scores at an arrival without a stage. By default, they lack
            nothing.
    """
    scores = record.scores(0, partial(evaluate, learner))
    record.arrival(0, 0, False, scores, [])
    gathered: list[MegaBatch] = []
    past: list[MegaBatch] = []
    curve = ErrorCurve()
    k = 0
    for mega_batch in stream:
        # First test, then train. Between stages the predictor does not change, but the mega-batches do, so it is scored
        # at every arrival. The score belongs to the row of this arrival, so a row is final when it is written.
        prequential_scores, is_known = None, mega_batch.t <= settings.num_known
        if prequential is not None and not is_known:
            prequential_scores = record.prequential(mega_batch.t, partial(prequential, learner, mega_batch))
        is_skipped = record.is_skipped(mega_batch.t, mega_batch.t in settings.skip)
        if not is_skipped:
            (past if is_known else gathered).append(mega_batch)
        # A continued run reads these errors from its folder, so the decisions are the same as without an interruption.
        if not is_known:  # the errors of the initial model say nothing about the mega-batches on which it was trained
            curve.add(len(past), known_error(prequential_scores, scores))
        stream_ends = mega_batch.t == len(stream)
        decided = Decision(False)
        if gathered:
            decided = stage_is_due(gathered, past, settings, mega_batch.t, stream_ends, curve)
        due = record.decision(mega_batch.t, replace(decided, is_skipped=is_skipped)).due
        spent: list[list[Spent]] = []
        if due:
            k += 1
            folder = record.stage_folder(k)
            stage = Stage(k, tuple(gathered), tuple(past), settings.replay, folder)
            spent = _train_stage(stage, learner, record)
            scores = record.scores(mega_batch.t, partial(evaluate, learner))
            past += gathered
            gathered = []
        elif complete_scores is not None:
            scores = record.scores(mega_batch.t, partial(complete_scores, learner, scores))
        # If no stage was trained at this arrival, the model has not changed, and its latest scores are recorded again.
        record.arrival(mega_batch.t, k, due, scores, spent, prequential_scores)
    return record.rows()


def _train_stage(stage: Stage, learner: Learner, record: RunRecord) -> list[list[Spent]]:
    """Let the learner grow and train at a stage. Return the cost of each step."""
    spent = []
    # Do not grow before the first stage, because growth extends a trained model. In all later stages, grow before
    # training, as in Algorithm 1 of the paper. Algorithm 2 grows after training, which gives the same result. A learner
    # that never grows needs no step, whose files would only repeat those of the stage before.
    if stage.index > 1 and getattr(learner, "can_grow", True):
        spent.append(record.do_unless_done(stage.index, "grow", learner, partial(learner.grow, stage)))
    spent.append(record.do_unless_done(stage.index, "train", learner, partial(learner.train, stage)))
    return spent

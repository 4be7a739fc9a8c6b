"""The file task_scores.jsonl of a run: results of lm-evaluation-harness after some stages, written by `alma-eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fairseq_alma.core.files import sha256_once
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.predictors import read_predictor
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import NonNegative


class TaskScore(TypedDict):
    """The results of a run on one task after one stage: a line of the file."""

    stage: NonNegative
    checkpoints: list[str]
    """SHA-256 digest of each checkpoint that predicted."""
    task: str
    """Name of the task in lm-evaluation-harness."""
    metrics: dict[str, float]
    """Name of each metric, such as "acc", -> its value. The main metric is the first."""
    stderr: dict[str, float]
    """Name of each metric -> its standard error over the examples, if it has one."""
    num_examples: NonNegative
    num_fewshot: NonNegative
    limit: NotRequired[float]
    """The option --limit, if only the first examples were scored."""
    lm_eval: str
    """Version of lm-evaluation-harness."""


def digests_of(run: Path, stage: int | None) -> list[str]:
    """Return the SHA-256 digest of each checkpoint that predicts after a stage; None: after the last one.

    Raise RunError if a file of the run is damaged.
    """
    checkpoints = read_predictor(run, stage)["checkpoints"]
    return [one.get("sha256") or sha256_once(run / one["path"]) for one in checkpoints]


def record_task_scores(
    run: Path, stage: int, checkpoints: Sequence[str], scores: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add results of a predictor of a run to its file, and return them with `stage` and `checkpoints`.

    Args:
        run: the run folder.
        stage: the stage.
        checkpoints: what `digests_of` returned for the stage before the evaluation.
        scores: the results, see TaskScore.
    """
    found = [{"stage": stage, "checkpoints": [*checkpoints], **score} for score in scores]
    JsonLines(RunFolder(run).task_scores).append(*found)
    return found


def read_task_scores(run: Path) -> list[TaskScore]:
    """Return the last result for each stage and task, of all examples of the task.

    Results of a stage that was trained again since are left out.

    Raise RunError if a file is damaged.
    """
    folder = RunFolder(run)
    last: dict[tuple[int, str], Any] = {}
    for score in JsonLines(folder.task_scores).values(TaskScore):
        if "limit" in score:  # a trial
            continue
        path = folder.predictor(score["stage"])
        if path.is_file():
            predictor = read_predictor(run, score["stage"])["checkpoints"]
            if score["checkpoints"] != [one.get("sha256") for one in predictor]:
                continue
        last[score["stage"], score["task"]] = score
    return list(last.values())

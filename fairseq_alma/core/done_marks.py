"""Done marks: files with the results of finished steps, such as RUN/stages/stage_001/train.done.json.

A step grows, trains or evaluates the learner in one stage. If several seeds are trained together, the result is a list
with one entry per seed. Then the mark may also contain a log: ledger rows and decisions that must be written to the
files of each seed (see `fairseq_alma.core.stack_record`).
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypedDict

from fairseq_alma.core.arrivals import decision_of
from fairseq_alma.core.declarations import value_of
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, sync_unsynced, write_json
from fairseq_alma.core.ledger import LedgerRow, Scores, Spent

Log = list[dict[str, Any]]
"""For each seed: "rows", lines of ledger.jsonl, and "decisions", lines of decisions.jsonl."""

RESULT_OF_STEP = {"grow": Spent, "train": Spent, "evaluate": Scores}


class _LogOfSeed(TypedDict):
    rows: list[dict[str, Any]]
    decisions: list[dict[str, Any]]


class _WithLog(TypedDict):
    """The content of a done mark with a log."""

    result: list[Any]
    log: list[_LogOfSeed]


def mark_of(folder: Path, name: str) -> Path:
    """Return the path of the done mark of the step `name` ("grow", "train" or "evaluate") in the folder of a stage."""
    return folder / f"{name}.done.json"


def write_mark(path: Path, result: Any, log: Log | None = None) -> None:
    """Write a done mark, after the disk has stored all files that it vouches for."""
    sync_unsynced()
    value = [asdict(part) for part in result] if isinstance(result, list) else asdict(result)
    write_json(path, value if log is None else {"result": value, "log": log})


def read_mark(path: Path, num_seeds: int | None = None) -> tuple[Any, Log]:
    """Return the result of a finished step, and the log, which may be empty.

    Args:
        path: the done mark.
        num_seeds: number of seeds that are trained together, if the result is a list.

    Raises:
        RunError: if the done mark is damaged or was written by an incompatible version of ALMA.
    """
    kind: Any = RESULT_OF_STEP[path.name.partition(".")[0]]
    try:
        value, log = read_json(path), []
        if num_seeds is None:
            return _result(value, kind), []
        if isinstance(value, dict):
            log = value_of(value, _WithLog)["log"]
            value = value["result"]
        if {len(value_of(value, list[Any])), len(log) or num_seeds} != {num_seeds}:
            raise ValueError(f"it does not have the results of {num_seeds} seeds")
        for seed in log:
            [*map(LedgerRow.from_json, seed["rows"]), *map(decision_of, seed["decisions"])]
        return [_result(part, kind) for part in value], log
    except (ValueError, RunError) as error:
        raise RunError(
            f"{path} is not a valid done mark (result of a finished step) of this version of ALMA ({error}): "
            f"restore the file from a backup, or start a new run. If you delete the file, alma-vision continues from "
            f"the save before"
        ) from error


def _result(value: Any, kind: Any) -> Any:
    """Return the result of a step for one seed. Unknown keys are refused: an incompatible version wrote them."""
    result = value_of(value, kind)
    if unknown := value.keys() - {one.name for one in fields(kind)}:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
    return result

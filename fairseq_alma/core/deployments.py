"""Where the predictors of a run are deployed: the folders to which alma-deploy has copied them.

alma-deploy writes RUN/deployments.json, with an entry for each folder TO. The entry of the folder that has changed last
is at the end. The gate compares a new predictor with the one that is in use there, and alma-forget finds the copies.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from fairseq_alma.core.files import read_json, sealed, write_json
from fairseq_alma.core.ledger import LedgerRow, deployed_stage
from fairseq_alma.core.predictors import read_predictor
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import NonNegative

FILE = "deployments.json"


class Deployment(TypedDict):
    """A folder TO in which the link `current` points to a predictor of the run."""

    to: str
    """Absolute path of TO."""
    stage: NonNegative
    """The stage whose predictor is in use."""
    content: list[str]
    """SHA-256 digests of its checkpoints."""


class _Record(TypedDict):
    """The content of deployments.json."""

    deployments: list[Deployment]


def deployments(run: Path) -> list[Deployment]:
    """Return where the predictors of a run are deployed, the newest deployment last.

    Raise RunError if the file is damaged.
    """
    path = run / FILE
    return read_json(path, _Record, advice=f"remove {path}")["deployments"] if path.exists() else []


def note_deployment(run: Path, new: Deployment) -> None:
    """Record in the folder of a run that another of its predictors is in use in a folder."""
    others = [one for one in deployments(run) if one["to"] != new["to"]]
    write_json(run / FILE, sealed({"deployments": [*others, new]}))


def deployed_last(run: Path, rows: Sequence[LedgerRow]) -> Deployment | None:
    """Return the last deployment of a run whose predictor is still that of a stage; None if there is none.

    After the stage was taken back or trained again, there is no such predictor in the run. A stage without a row is
    not scored yet.
    """
    scored = {row.stage for row in rows if row.updated}
    for one in reversed(deployments(run)):
        if one["stage"] in scored and RunFolder(run).predictor(one["stage"]).is_file():
            checkpoints = read_predictor(run, one["stage"])["checkpoints"]
            if [checkpoint.get("sha256") for checkpoint in checkpoints] == one["content"]:
                return one
    return None


def stage_in_use(run: Path, rows: Sequence[LedgerRow]) -> int:
    """Return the stage whose predictor is deployed: by alma-deploy, or else, by predictor.json; 0 if there is none."""
    last = deployed_last(run, rows)
    return last["stage"] if last else deployed_stage(rows)

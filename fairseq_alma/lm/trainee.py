"""The checkpoint TRAINED of a member, from which the next stage continues if it is not the one that predicts.

TRAINED is kept if the predictor is an average, or if the state of the optimizer is kept.
"""

from pathlib import Path

from fairseq_alma.checkpoints import AVERAGE, BEST, LAST, TRAINED, link, require_checkpoint, write_checkpoint
from fairseq_alma.core.averaging import AverageSettings


def finish_stage(folder: Path, average: AverageSettings, keeps_optimizer: bool) -> None:
    """Write the checkpoints TRAINED and BEST of a finished training, from its last checkpoint.

    TRAINED has the weights after the last update. The next stage continues from it. BEST is the predictor; with
    predict_with=average, it has the averaged weights.

    Args:
        folder: the folder of the member.
        average: whether and how weights are averaged.
        keeps_optimizer: whether TRAINED has the state of the optimizer.
    """
    last = require_checkpoint(folder / LAST)
    if average.averages:
        entry = last["extra_state"].pop(AVERAGE)
        optimizer = last.pop("last_optimizer_state")
        write_checkpoint({**last, "model": {**last["model"], **entry["model"]}}, folder / BEST)
        last["extra_state"][AVERAGE] = entry
        if keeps_optimizer:
            last["last_optimizer_state"] = optimizer
        write_checkpoint(last, folder / TRAINED)
    elif keeps_optimizer:
        link(folder / LAST, folder / TRAINED)


def remove_old_trainees(stages: Path, stage_index: int) -> None:
    """Remove the checkpoints TRAINED of all stages before a finished stage, because only the newest are needed.

    A killed or forked run continues at its first unfinished stage, and therefore from the TRAINED of the last finished
    stage.

    Args:
        stages: the folder RUN/stages.
        stage_index: index of the last finished stage.
    """
    for path in stages.glob(f"stage_*/member_*/{TRAINED}"):
        if int(path.parents[1].name.removeprefix("stage_")) < stage_index:
            path.unlink(missing_ok=True)

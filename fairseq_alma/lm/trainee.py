"""The checkpoint TRAINED of a member, from which the next stage continues if it is not the one that predicts.

It is kept if the predictor is an average, if the state of the optimizer is kept, or with schedule=wsd. In the first
two cases, it is the model after the last update of the stage. With schedule=wsd, it is the model before the cooldown,
and the training process writes it when the cooldown begins.
"""

import logging
from pathlib import Path

from fairseq_alma.checkpoints import (
    AVERAGE,
    BEST,
    LAST,
    TRAINED,
    drop_optimizer_state,
    link,
    num_updates,
    read_checkpoint,
    repair_stage_folder,
    require_checkpoint,
    write_checkpoint,
)
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import remove
from fairseq_alma.lm.settings import LanguageModelSettings

logger = logging.getLogger(__name__)


def finish_stage(folder: Path, settings: LanguageModelSettings) -> None:
    """Write the checkpoints TRAINED and BEST of a finished training, from its last checkpoint.

    If this function is interrupted, it can be called again.

    Args:
        folder: the folder of the member.
        settings: settings of the run. With predict_with=average, BEST gets the averaged weights. Without
            optimizer_state=keep, TRAINED has no state of the optimizer.

    Raises:
        StageError: with predict_with=average, if the last checkpoint has no average.
    """
    cools_down = settings.schedule == "wsd"
    if settings.average.averages:
        last = require_checkpoint(folder / LAST)
        entry = last["extra_state"].pop(AVERAGE, None)
        if entry is None:
            raise StageError(
                f"{folder / LAST} has no average of the weights, because an earlier version of ALMA has trained it "
                f"without one (with launch=slurm): remove {folder}, and run the same command again to restart the stage"
            )
        optimizer = last.pop("last_optimizer_state")
        write_checkpoint({**last, "model": {**last["model"], **entry["model"]}}, folder / BEST)
        if not cools_down:
            last["extra_state"][AVERAGE] = entry
            if settings.keeps_optimizer:
                last["last_optimizer_state"] = optimizer
            write_checkpoint(last, folder / TRAINED)
    elif settings.keeps_optimizer and not cools_down:
        link(folder / LAST, folder / TRAINED)
    if cools_down and not settings.keeps_optimizer:
        drop_optimizer_state(folder / TRAINED)


def repair_member(folder: Path, settings: LanguageModelSettings, updates: int) -> None:
    """Repair the checkpoints of a member whose training was interrupted, so that it can be resumed.

    No other process may be training the member.

    Args:
        folder: the folder of the member.
        settings: settings of the run.
        updates: number of updates of the stage.
    """
    repair_stage_folder(folder, needs_best=not settings.average.averages)
    restart_if_trainee_is_lost(folder, settings.updates_before_cooldown(updates))


def restart_if_trainee_is_lost(folder: Path, updates_before_cooldown: int | None) -> None:
    """Remove the checkpoints of a training in its cooldown if TRAINED is missing, so that the stage starts again.

    TRAINED is written before the cooldown begins, so it is missing only if it was damaged or removed.

    Args:
        folder: the folder of the member.
        updates_before_cooldown: number of updates before the cooldown; None if there is no cooldown.
    """
    last = read_checkpoint(folder / LAST)
    if updates_before_cooldown is None or last is None or (folder / TRAINED).exists():
        return
    if num_updates(last) > updates_before_cooldown:
        logger.warning(
            "%s: the checkpoint from before the cooldown (%s) is lost. The stage starts again", folder, TRAINED
        )
        for path in folder.glob("checkpoint*.pt"):
            remove(path)


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
            remove(path)

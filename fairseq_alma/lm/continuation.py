"""The checkpoint CONTINUATION of a member, from which the next stage continues if it is not the one that predicts.

It is kept if the predictor is an average, or if the state of the optimizer is kept. It is the model after the last
update of the stage.
"""

from pathlib import Path

from fairseq_alma.checkpoints import AVERAGE, BEST, CONTINUATION, LAST, link, require_checkpoint, write_checkpoint
from fairseq_alma.core.files import remove
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.lm.settings import LanguageModelSettings


def finish_stage(folder: Path, settings: LanguageModelSettings) -> None:
    """Write the checkpoints CONTINUATION and BEST of a finished training, from its last checkpoint.

    If this function is interrupted, it can be called again.

    Args:
        folder: the folder of the member.
        settings: settings of the run. With `average`, BEST gets the averaged weights. Without optimizer_state=keep,
            CONTINUATION has no state of the optimizer.
    """
    if settings.average is not None:
        last = require_checkpoint(folder / LAST)
        average = last["extra_state"][AVERAGE]
        optimizer = last.pop("last_optimizer_state")
        without = {name: value for name, value in last["extra_state"].items() if name != AVERAGE}
        write_checkpoint(
            {**last, "extra_state": without, "model": {**last["model"], **average["model"]}}, folder / BEST
        )
        if settings.keeps_optimizer:
            last["last_optimizer_state"] = optimizer
        write_checkpoint(last, folder / CONTINUATION)
    elif settings.keeps_optimizer:
        link(folder / LAST, folder / CONTINUATION)


def remove_old_continuations(run: RunFolder, stage_index: int) -> None:
    """Remove the checkpoints CONTINUATION of all stages before a finished stage: only the newest are needed.

    A killed or forked run continues at its first unfinished stage, and therefore from the CONTINUATION of the last
    finished stage.

    Args:
        run: the run folder.
        stage_index: index of the last finished stage.
    """
    for folder in run.stage_folders():
        for path in folder.glob(f"member_*/{CONTINUATION}") if index_of_stage(folder) < stage_index else ():
            remove(path)

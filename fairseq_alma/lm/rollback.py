"""Take a run of a language model back to an earlier stage (`alma-lm rollback RUN --to-stage K`).

Nothing is deleted. What belongs to later stages is set aside in RUN/set_aside/NUMBER, which has the paths of a run
folder: folders of stages, their predictors, and copies of the files that are shortened in the run folder.

RUN/rollback.json says what is to be done. It is written first, and moved to RUN/set_aside/NUMBER last. Every step in
between can be repeated. Each command that changes the run calls `finish_rollback`, which finishes a killed rollback.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from fairseq_alma.app.slurm_jobs import refuse_queued
from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.fence import fence_of
from fairseq_alma.core.files import read_json, remove, sync_folder, write_json, write_whole, written_aside
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Ledger, LedgerRow, deployed_stage
from fairseq_alma.core.metrics import read_summary, summarize
from fairseq_alma.core.predictors import Checkpoint, checked_file, read_learner_state
from fairseq_alma.core.printing import say
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.core.settings import Count, NonNegative


class Rollback(TypedDict):
    """The content of rollback.json."""

    to_stage: NonNegative
    arrival: NonNegative
    """The arrival at which this stage was trained. Later ones are taken back, also those that only waited."""
    number: Count
    """Number of the folder in RUN/set_aside."""
    to_forget: NotRequired[bool]
    """Whether alma-forget has taken the run back, to train it again at once."""


def stage_before(run: Path, t: int) -> int:
    """Return the last stage of a run that has not used mega-batch t; 0 if the first stage used it."""
    rows = Ledger(RunFolder(run).ledger).rows()
    return max((row.stage for row in rows if row.updated and row.t < t), default=0)


def roll_back_runs(folder: Path, to_stage: int) -> int:
    """Take the run in a folder, or the runs of all its seeds, back to a stage. Print this, and return the exit status.

    For the errors, see `roll_back`. If one of the runs cannot be taken back, none is.
    """
    one = RunFolder(folder)
    runs = [one.path] if one.settings.exists() else [seed.path for seed in one.of_seeds()] or [folder]
    for run in runs:
        if RunFolder(run).settings.exists():
            check_rollback(run, Ledger(RunFolder(run).ledger).rows(), to_stage)
    for run in runs:
        refuse_queued(run)
        before = Ledger(RunFolder(run).ledger).rows()
        aside = roll_back(run, to_stage)
        what = "nothing came after it" if aside is None else f"what came after it was set aside in {aside}"
        t = len(Ledger(RunFolder(run).ledger).rows())
        skipped = ",".join(str(row.t) for row in before[t:] if row.is_skipped)
        again = f". With skip_mega_batches=[{skipped}], it skips again what was skipped before" if skipped else ""
        say(
            f"{run} is at stage {to_stage}: {what}. The next training command, also that of a scheduled job, continues "
            f"with mega-batch {t}, unless it has skip_mega_batches=[{t}] or `alma-prep --drop-last` has removed it"
            f"{again}. What alma-deploy has deployed stays until its next call"
        )
    if runs != [one.path]:
        remove(one.summary)  # of the means over the seeds, which the training command writes again
    return 0


def roll_back(run: Path, to_stage: int, to_forget: bool = False) -> Path | None:
    """Take a run back to the end of a stage; 0 is the untrained learner. The next `alma-lm` continues from there.

    If an earlier rollback was interrupted, it is finished first. Return the folder in which later stages were set
    aside; None if nothing came after this stage.

    Args:
        run: the run folder of one seed.
        to_stage: index of the stage.
        to_forget: whether alma-forget does this.

    Raises:
        RunError: if the run has no such stage, if another process is at work on it, or if a checkpoint from which the
            next stage continues was not kept or has changed. Then nothing is changed.
    """
    paths = RunFolder(run)
    if not paths.settings.exists():
        raise RunError(f"{run} is not a run folder, because it has no settings.json: give the folder of a run")
    with Lease(run):
        finish_rollback(run)
        rows = Ledger(paths.ledger).rows()
        check_rollback(run, rows, to_stage)
        arrival = _arrival_of(rows, to_stage)
        if len(rows) == arrival + 1 == len(read_arrivals(run)["digests"]) + 1 and not _later(paths, to_stage):
            return None
        numbers = [int(path.name) for path in paths.set_aside(0).parent.glob("*") if path.name.isdecimal()]
        number = max(numbers, default=0) + 1
        write_json(paths.rollback, Rollback(to_stage=to_stage, arrival=arrival, number=number, to_forget=to_forget))
        finish_rollback(run)
        return paths.set_aside(number)


def check_rollback(run: Path, rows: Sequence[LedgerRow], to_stage: int) -> None:
    """Raise RunError if a run with these rows cannot be taken back to a stage. See `roll_back`."""
    if "stream" not in read_settings(run):
        raise RunError(f"{run} is a run of alma-vision, but only runs of language models can be taken back")
    stages = [row.stage for row in rows if row.updated]
    if not 0 <= to_stage <= max(stages, default=0):
        raise RunError(f"{run} has finished stages 1 to {max(stages, default=0)}, so there is no stage {to_stage}")
    if missing := _missing(run, to_stage):
        possible = [str(k) for k in [0, *stages] if not _missing(run, k)]
        raise RunError(
            f"{missing[0]} is missing, from which the stage after stage {to_stage} continues. This run can be taken "
            f"back to stages {', '.join(possible)}; keep_states= says for how many stages such checkpoints are kept"
        )
    for checkpoint in _needed(run, to_stage):
        checked_file(run, checkpoint)


def can_return_to(run: Path, stage: int) -> bool:
    """Return True if the checkpoints from which the stage after `stage` continues were kept."""
    return not _missing(run, stage)


def finish_rollback(run: Path) -> None:
    """Finish a rollback that was interrupted, if there is one. The caller must hold the lease of the run folder."""
    paths = RunFolder(run)
    if not paths.rollback.exists():
        return
    todo = read_json(paths.rollback, Rollback, advice="restore the file from a backup")
    k, t, aside = todo["to_stage"], todo["arrival"], paths.set_aside(todo["number"])
    changed = (paths.settings, paths.ledger, paths.decisions, paths.arrivals, paths.summary, paths.task_scores,
               paths.predictor())  # fmt: skip
    for path in changed:
        if path.exists() and not (copy := aside / path.name).exists():
            with written_aside(copy) as temporary:
                shutil.copyfile(path, temporary)
    # First what readers use: the predictor and the ledger never name files that were moved.
    if k:
        deployed = deployed_stage([row for row in Ledger(paths.ledger).rows() if row.t <= t])
        write_whole(paths.predictor(), paths.predictor(deployed).read_text(encoding="utf-8"))
    else:
        remove(paths.predictor())
    JsonLines(paths.ledger).keep_if(lambda row: row["t"] <= t)
    JsonLines(paths.task_scores).keep_if(lambda score: score["stage"] <= k)
    JsonLines(paths.decisions).keep_if(lambda decision: decision["t"] <= t)
    write_json(paths.arrivals, {"digests": read_arrivals(run)["digests"][:t]})
    settings = read_settings(run)
    if forks := settings.get("forks"):
        for stage in sorted(map(int, forks), reverse=True):
            if stage > k:  # the settings are again those from before this fork
                settings |= {name: old for name, (old, _) in forks.pop(str(stage)).items()}
        write_json(paths.settings, settings)
    if paths.summary.exists():
        seconds = read_summary(run).get("wall_seconds")
        if t:
            write_json(paths.summary, {**summarize(Ledger(paths.ledger).rows()), "wall_seconds": seconds})
        else:
            remove(paths.summary)
    for path in _later(paths, k):
        _move(path, aside / path.relative_to(run))
    _move(paths.rollback, aside / paths.rollback.name)


def _arrival_of(rows: Sequence[LedgerRow], stage: int) -> int:
    """Return the arrival at which a stage was trained; 0 for stage 0."""
    return next((row.t for row in rows if row.updated and row.stage == stage), 0)


def _later(paths: RunFolder, stage: int) -> list[Path]:
    """Return the folders of the stages after `stage`, finished or not, and the files of the predictors after them."""
    found = [*paths.stage_folders(), *map(paths.predictor, paths.stages_with_predictor())]
    return [path for path in found if index_of_stage(path) > stage]


def _needed(run: Path, stage: int) -> list[Checkpoint]:
    """Return the checkpoints that predict after a stage, and those from which the next stage continues."""
    if not stage:
        return []  # an untrained checkpoint that is missing is written again
    state = read_learner_state(RunFolder(run).mark(stage, "train").parent / "train")
    return [*state["predictor"], *state["continuations"]]


def _missing(run: Path, stage: int) -> list[Path]:
    return [path for one in _needed(run, stage) if not (path := run / one["path"]).is_file()]


def _move(source: Path, target: Path) -> None:
    """Move a file or folder within the run folder, in one step. The disk has stored the move when this returns."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if fence := fence_of(source):
        fence.check()
    source.rename(target)
    for folder in (target.parent, source.parent):
        sync_folder(folder)

"""The runs that have used masked text: what it costs to train them again, and the training.

A run is taken back to the last stage that has not used the text, and continues with its own settings. The validation
set chooses the checkpoints of all stages, so if its text was masked, a run starts from the beginning. Nothing
learns from the test set: if only its text was masked, nothing is trained again, and later scores are those on the
remaining text.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.deployments import deployments
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import remove, write_json
from fairseq_alma.core.lease import Lease, holder_of_run
from fairseq_alma.core.ledger import Ledger, LedgerRow, Spent
from fairseq_alma.core.metrics import write_mean
from fairseq_alma.core.provenance import read_provenance
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.seed_record import is_finished
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.core.waiting import arrivals_of_stages
from fairseq_alma.deploy import withdraw
from fairseq_alma.forget.mask import Certificate, path_of
from fairseq_alma.forget.traces import digests_of_stages, forgotten_checkpoints
from fairseq_alma.lm.rollback import can_return_to, roll_back, stage_before
from fairseq_alma.lm.run import run_seeds
from fairseq_alma.lm.settings import LanguageModelSettings

NO_SETTINGS = ("plugin_digest", "evaluated_on", "dictionary", "forks")
"""Keys of settings.json that are no settings."""


class Price(NamedTuple):
    """What it costs to train a run again."""

    run: Path
    to_stage: int
    """The stage from which the run continues; 0 if it starts from the beginning."""
    wanted_stage: int
    """The last stage that has not used the text. If no training state of it is left, `to_stage` is an earlier one."""
    stages: list[int]
    """The finished stages that are trained again."""
    spent: Spent
    """What these stages cost. Training them again costs the same."""
    score_seconds: float
    """Time that their scores took, in seconds."""
    mega_batches: list[int]
    """The masked mega-batches that the run has used."""
    held_out: list[str]
    """"valid" and "test", if text in these splits was masked that the run was chosen by or scored on."""
    num_arrivals: int
    """How many mega-batches have arrived in the run. No more are used, although the stream may have more now."""
    last_group: str
    """What happened to the last mega-batches if they were fewer than the wait (see the setting `last_group`)."""
    skipped: list[int]
    """The mega-batches that no stage trains on."""
    steps: list[tuple[int, dict[str, Any]]]
    """The commands that train the run again: the last arrival of each, and the settings that it changes (a fork)."""


def price_of(run: Path, masked: Mapping[str, Sequence[str]]) -> Price | None:
    """Return what it costs to train a run again; None if it has not used the masked text.

    Args:
        run: the run folder.
        masked: for each masked split, the SHA-256 digests that its file had before it was masked.

    Raises:
        RunError: if a file of the run is damaged, or another process is at work on it.
    """
    settings, paths = read_settings(run), RunFolder(run)
    if "stream" not in settings or not paths.arrivals.exists():
        return None  # of alma-vision, or not begun
    digests = read_arrivals(run)["digests"]
    used = [t for t, digest in enumerate(digests, start=1) if digest in masked.get(f"mega_batch_{t}", ())]
    evaluated_on = dict(zip(("valid", "test"), settings.get("evaluated_on", ()), strict=False))
    held_out = [split for split, digest in evaluated_on.items() if digest in masked.get(split, ())]
    if not used and not held_out:
        return None
    if holder := holder_of_run(run):
        raise RunError(f"{run} is in use by {holder}: stop it, or wait for it, and run alma-forget again")
    rows = Ledger(paths.ledger).rows()
    last = max((row.stage for row in rows), default=0)
    wanted = 0 if "valid" in held_out else stage_before(run, used[0]) if used else last
    to_stage = next((k for k in range(wanted, 0, -1) if can_return_to(run, k)), 0)
    again = [row for row in rows if row.updated and row.stage > to_stage]
    spent = sum((row.spent for row in again), Spent())
    score_seconds = sum(row.scores.score_seconds or 0.0 for row in again)
    last_group = "wait" if len(rows) > 1 and not rows[-1].updated else "train"
    stages = [row.stage for row in again]
    skipped = [row.t for row in rows if row.is_skipped]
    steps = _steps(settings, rows, to_stage, len(digests), last_group)
    price = (run, to_stage, wanted, stages, spent, score_seconds, used, held_out, len(digests), last_group)
    return Price(*price, skipped, steps)


def _steps(
    settings: Mapping[str, Any], rows: Sequence[LedgerRow], to_stage: int, num_arrivals: int, last_group: str
) -> list[tuple[int, dict[str, Any]]]:
    """Return `Price.steps`.

    One command is enough if the run has trained where its wait says, with the same settings. Otherwise, it was
    continued after its last mega-batches had been trained on, or with other settings. Then each stage is a step.
    """
    forks = {int(stage): changes for stage, changes in settings.get("forks", {}).items() if int(stage) > to_stage}
    changes = {stage: {name: new for name, (_, new) in one.items()} for stage, one in forks.items()}
    wait, num_known = settings["wait"], settings.get("known_mega_batches", 0)
    expected = arrivals_of_stages(num_arrivals, wait, None, last_group == "train", num_known)
    trained = [row for row in rows if row.updated]
    is_as_planned = wait == "auto" or any(row.is_skipped for row in rows) or [row.t for row in trained] == expected
    again = [] if is_as_planned and not forks else [row for row in trained if row.stage > to_stage]
    steps = [(row.t, changes.pop(row.stage, {})) for row in again]
    pending = {name: new for one in changes.values() for name, new in one.items()}  # of a stage that is not finished
    return steps if steps and steps[-1][0] == num_arrivals and not pending else [*steps, (num_arrivals, pending)]


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders in some folders, at any depth. Raise RunError if a folder contains none."""
    found: dict[Path, None] = {}
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            raise RunError(f"there is no run in {folder}: give run folders, or folders that contain some")
        found |= dict.fromkeys(run.resolve() for run in runs)
    return list(found)


def train_again(run: Path, price: Price | None, stream: StreamFolder, certificate: Certificate) -> None:
    """Take a run back, and train it again on the masked stream. The certificate records each step before it begins.

    If an earlier call was killed, `certificate` says what it did. This call does the rest, and `price` may be None.
    A run whose stages are Slurm jobs is only taken back; its own command trains it.
    """
    paths, entry = RunFolder(run), certificate["runs"].get(str(run))
    if entry is None or entry["state"] == "trained again":
        assert price is not None
        entry = certificate["runs"][str(run)] = {
            "state": "taking back",
            "to_stage": price.to_stage,
            "last_stage_without_the_text": price.wanted_stage,
            "stages": price.stages,
            "mega_batches": price.mega_batches,
            "held_out": price.held_out,
            "arrivals": price.num_arrivals,
            "last_group": price.last_group,
            "skipped": price.skipped,
            "steps": price.steps,
            "ends": {name: read_settings(run).get(name) for name in ("mega_batches", "last_group")},
            "predicted_train_flops": price.spent.train_flops,
            "kept": digests_of_stages(run, 1, price.to_stage),
            "before": digests_of_stages(run, price.to_stage + 1),
        }
    place = path_of(stream.path, certificate)
    if entry["state"] == "taking back":
        write_json(place, certificate)
        has_learned = bool(entry["mega_batches"]) or "valid" in entry["held_out"]
        aside = roll_back(run, entry["to_stage"], to_forget=True) if has_learned else None
        if has_learned and aside is None and paths.set_aside(0).parent.is_dir():  # an earlier call was killed after it
            aside = max(paths.set_aside(0).parent.iterdir(), key=lambda path: int(path.name))
        with Lease(run):
            if "valid" in entry["held_out"]:  # the score of the untrained model is measured again, too
                for path in (paths.ledger, paths.decisions, paths.arrivals, paths.summary):
                    remove(path)
            settings = read_settings(run)
            settings["evaluated_on"] = [stream.digest(split) for split in ("valid", "test")]
            write_json(paths.settings, settings)
        entry |= {"state": "training", "set_aside": str(aside) if aside else None}
        write_json(place, certificate)
    if entry["state"] == "training":
        if command := _slurm_command(run):
            if not is_finished(run) or not _is_current(run, stream):
                entry["command"] = command
                write_json(place, certificate)
                return
        else:
            recorded = read_settings(run)
            values = {name: value for name, value in recorded.items() if name not in NO_SETTINGS}
            values |= {"stream": str(stream.path), "out": str(run)}
            if entry["skipped"]:
                values["skip_mega_batches"] = entry["skipped"]
            for arrival, changes in entry["steps"]:
                is_last = arrival == entry["arrivals"]
                values |= changes | entry["ends"]
                if not is_last or arrival < stream.num_mega_batches:
                    last_group = (values["last_group"] or entry["last_group"]) if is_last else "train"
                    values |= {"mega_batches": arrival, "last_group": last_group}
                if is_last or arrival >= len(Ledger(paths.ledger).rows()):  # otherwise an earlier call has done this
                    run_seeds(LanguageModelSettings.from_mapping({**values, "fork": bool(changes)}))
        rows = Ledger(paths.ledger).rows()
        again = [row for row in rows if row.updated and row.stage > entry["to_stage"]]
        spent = sum((row.spent for row in again), Spent())
        entry |= {
            "stages": [row.stage for row in again],
            "state": "trained again",
            "train_flops": spent.train_flops,
            "train_seconds": round(spent.train_seconds, 3),
            "after": digests_of_stages(run, entry["to_stage"] + 1),
            # Training states of these stages are removed by later stages (setting keep_states).
            "kept_unchanged": digests_of_stages(run, 1, entry["to_stage"]).items() <= entry["kept"].items(),
        }
        if paths.is_of_one_of_several_seeds and RunFolder(run.parent).summary.exists():
            write_mean(run.parent, [seed.path for seed in RunFolder(run.parent).of_seeds()])
        write_json(place, certificate)


def withdraw_deployed(certificate: Certificate, runs: Sequence[Path]) -> list[Path]:
    """Mark the deployed copies of models that have learned from the text, so that alma-deploy does not use them again.

    Return their folders. Copies in folders that alma-deploy has not recorded in the run are not known.
    """
    folders = []
    for run in runs:
        if str(run) in certificate["runs"]:
            forgotten = forgotten_checkpoints(run, certificate)
            known = [Path(one["to"]) for one in deployments(run)]
            folders += [folder for to in known if to.is_dir() for folder in withdraw(to, forgotten)]
    return folders


def _is_current(run: Path, stream: StreamFolder) -> bool:
    """Return True if a run has used the stream as it is now."""
    digests = read_arrivals(run)["digests"]
    return digests == [stream.digest(f"mega_batch_{t}") for t in range(1, len(digests) + 1)]


def _slurm_command(run: Path) -> str | None:
    """Return the command of a run whose stages are Slurm jobs; None if it is trained where the command runs."""
    command = read_provenance(run)["command"]
    return shlex.join(command) if "launch=slurm" in command else None

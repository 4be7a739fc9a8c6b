"""The runs that have used masked text: what it costs to train them again, and the training.

A run is taken back to the last stage that has not used the text, and continues with its own settings. The validation
set chooses the checkpoints of all stages, so if its text was masked, a run starts from the beginning. Nothing
learns from the test set: if only its text was masked, nothing is trained again, and later scores are those on the
remaining text.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.deployments import deployments
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import remove, sha256_of, write_json
from fairseq_alma.core.lease import Lease, holder_of_run
from fairseq_alma.core.ledger import Ledger, Spent
from fairseq_alma.core.metrics import write_mean
from fairseq_alma.core.provenance import read_provenance
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs, index_of_stage
from fairseq_alma.core.seed_record import is_finished
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.deploy import withdraw
from fairseq_alma.forget.mask import Certificate, path_of
from fairseq_alma.forget.traces import aside_has_learned
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
    return Price(run, to_stage, wanted, stages, spent, score_seconds, used, held_out, len(digests), last_group)


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
            "predicted_train_flops": price.spent.train_flops,
            "kept": _digests(run, 1, price.to_stage),
            "before": _digests(run, price.to_stage + 1),
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
            if entry["arrivals"] < stream.num_mega_batches:
                values["mega_batches"] = entry["arrivals"]
                values["last_group"] = values.get("last_group") or entry["last_group"]
            run_seeds(LanguageModelSettings.from_mapping(values))
        rows = Ledger(paths.ledger).rows()
        again = [row for row in rows if row.updated and row.stage > entry["to_stage"]]
        spent = sum((row.spent for row in again if row.stage in entry["stages"]), Spent())
        entry |= {
            "state": "trained again",
            "train_flops": spent.train_flops,
            "train_seconds": round(spent.train_seconds, 3),
            "after": _digests(run, entry["to_stage"] + 1),
            # Training states of these stages are removed by later stages (setting keep_states).
            "kept_unchanged": _digests(run, 1, entry["to_stage"]).items() <= entry["kept"].items(),
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
            forgotten = _forgotten(run, certificate)
            known = [Path(one["to"]) for one in deployments(run)]
            folders += [folder for to in known if to.is_dir() for folder in withdraw(to, forgotten)]
    return folders


def _forgotten(run: Path, certificate: Certificate) -> set[str]:
    """Return the SHA-256 digests of the checkpoints that have learned from the text, also of those set aside."""
    entry, splits = certificate["runs"][str(run)], certificate["splits"]
    first = entry["last_stage_without_the_text"] + 1
    stages = {path: index_of_stage(Path(Path(path).parts[1])) for path in entry["before"]}
    found = {digest for path, digest in entry["before"].items() if stages[path] >= first}
    before = {name: one["before"] for name, one in splits.items()}
    for aside in (run / "set_aside").glob("*"):
        if aside_has_learned(aside, before):
            found |= set(_digests(aside, first).values())
    # A member that has not read the text is the same after it was trained again.
    return found - set(entry.get("after", {}).values())


def _is_current(run: Path, stream: StreamFolder) -> bool:
    """Return True if a run has used the stream as it is now."""
    digests = read_arrivals(run)["digests"]
    return digests == [stream.digest(f"mega_batch_{t}") for t in range(1, len(digests) + 1)]


def _digests(run: Path, first: int, last: int | None = None) -> dict[str, str]:
    """Return the SHA-256 digest of each checkpoint of the stages from `first` to `last`, by its path in the run."""
    folders = [RunFolder(run).stage(k) for k in range(first, (last if last is not None else 999) + 1)]
    return {
        path.relative_to(run).as_posix(): sha256_of(path)
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.rglob("*.pt"))
    }


def _slurm_command(run: Path) -> str | None:
    """Return the command of a run whose stages are Slurm jobs; None if it is trained where the command runs."""
    command = read_provenance(run)["command"]
    return shlex.join(command) if "launch=slurm" in command else None

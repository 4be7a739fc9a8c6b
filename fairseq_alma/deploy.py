"""alma-deploy: copy the predictor of a run, or an exported model, to the folder from which it is used.

alma-deploy RUN TO                the current predictor of the run
alma-deploy RUN TO --stage 2      the predictor after stage 2
alma-deploy EXPORT TO             a folder that alma-export wrote
alma-deploy OTHER/current TO      the predictor that is deployed in OTHER
alma-deploy --back TO             return to the previous predictor
alma-deploy --list TO             list the predictors in TO

TO/current is a symbolic link to the folder of the deployed predictor, such as TO/stage_003. The link is replaced
atomically, after the copy is complete and its digests are verified, so that it always points to a complete folder.
RUN/deployments.json records which predictor of the run is in use.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fairseq_alma.core.deployments import Deployment, deployments, note_deployment
from fairseq_alma.core.errors import AlmaError, RunError, SettingError, StageError, StreamError, message_of
from fairseq_alma.core.files import read_json, remove, sealed, sha256_of, sha256_once, write_json, written_aside
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.predictors import checked_file, read_predictor
from fairseq_alma.core.printing import say
from fairseq_alma.core.program import Parser, command
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import DEPLOYED, EXPORTED, RunFolder
from fairseq_alma.core.settings import Count, NonNegative
from fairseq_alma.core.stream_description import read_description
from fairseq_alma.core.stream_folder import check_tokenizer_files
from fairseq_alma.huggingface.export import Record as ExportRecord

EDITABLE = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of an exported model that its user may edit, for example to add a chat template."""
RECORD = DEPLOYED
"""File in a deployed folder that says what was deployed, with digests of its files."""
CURRENT = "current"
"""The link to the deployed folder."""


@dataclass(frozen=True)
class Deployed:
    """A predictor in TO."""

    source: str
    """What was copied, for the user."""
    run: str
    """Absolute path of the run; "" for an exported model."""
    stage: NonNegative
    """Stage of the run; 0 for an exported model."""
    since: str
    """Time at which it was deployed last, in ISO format."""
    number: Count
    """Position in the order in which the predictors were deployed, from 1."""
    is_taken_back: bool
    """Whether `alma-deploy --back` has taken it back. Then it is deployed again only with --stage."""
    is_withdrawn: bool
    """Whether it has learned from text that alma-forget has removed. Then it is never deployed again."""
    content: list[str]
    """SHA-256 digests of what predicts. Two predictors with equal content are the same."""
    files: dict[str, str]
    """SHA-256 digest of each file, by the path in the folder."""
    name: str
    """Name of the folder. A copy that the user has made has another name, and is left alone."""
    folder: Path = Path()
    """The folder itself, which is not recorded."""

    @classmethod
    def read(cls, folder: Path) -> "Deployed":
        """Return the predictor in a folder. Raise RunError if its record is damaged."""
        record = read_json(folder / RECORD, cls, advice=f"remove {folder} and deploy it again")
        return replace(record, folder=folder)

    def write(self) -> None:
        """Write deployed.json."""
        record = {name: value for name, value in vars(self).items() if name != "folder"}
        write_json(self.folder / RECORD, sealed(record))

    def check(self) -> None:
        """Raise RunError if a file is missing or has changed."""
        for name, digest in self.files.items():
            path = self.folder / name
            if not path.is_file() or sha256_of(path) != digest:
                raise RunError(f"{path} is missing or has changed: remove {self.folder} and deploy it again")


@dataclass(frozen=True)
class _Copy:
    """What is to be copied."""

    source: str
    run: str
    stage: int
    name: str
    """Name of the folder in TO, if it is free."""
    content: list[str]
    files: dict[str, tuple[Path, str]]
    """Path in the copy -> the file, and its SHA-256 digest."""
    predictor: dict[str, Any] | None = None
    """The content of the new predictor.json; None for an exported model."""


def deploy(
    source: str | Path,
    to: str | Path,
    stage: int | None = None,
    keep: int = 3,
    stream: str | Path | None = None,
) -> tuple[Path, bool]:
    """Copy a predictor to `to`, and point the link `to`/current to it.

    The copy needs neither the run nor the stream: `fairseq_alma.load` and `vision.load` take the folder `to`/current.
    If `to` already contains the same predictor, only the link changes. If `go_back` has taken this predictor back and
    `stage` is None, nothing changes, so that a scheduled command does not deploy it again.

    Args:
        source: run folder of alma-lm or alma-vision with one seed, a folder that alma-export wrote, or the folder
            `current` of deployed predictors.
        to: the folder with the deployed predictors. It is created if it does not exist.
        stage: the stage of the run; by default, the current predictor is copied.
        keep: number of predictors to keep, including the new one. Older ones are removed.
        stream: the stream folder of a run of alma-lm, if it was moved. By default the one that the run recorded.

    Returns:
        The folder to which `to`/current points now, and whether it contains the predictor of `source`.

    Raises:
        AlmaError: if there is no such predictor, if a file has changed, or if another process is at work in `to`.
    """
    source, to = Path(source), Path(to)
    if keep < 1:
        raise SettingError(f"keep={keep}: give the number of predictors to keep, 1 or more")
    copy = _copy_of(source, stage, None if stream is None else Path(stream))
    others = ("predictor.json", "settings.json", EXPORTED, RECORD, "stream.json")
    if any((to / name).exists() for name in others) or next(to.glob("*/ledger.jsonl"), None):
        raise SettingError(
            f"{to} is a run, a model or a stream, or contains runs: give another folder for the deployed predictors"
        )
    with Lease(to):
        found, current = all_deployed(to), current_of(to)
        one = next((one for one in found if one.content == copy.content), None)
        if one is not None:
            one.check()
            if one.is_withdrawn:
                raise RunError(
                    f"{copy.source} has learned from text that alma-forget has removed: deploy another stage"
                )
            is_usable = any(old.folder == current and not old.is_withdrawn for old in found)
            if one.is_taken_back and stage is None and current is not None and is_usable:
                return current, False
        number = found[-1].number + 1 if found else 1
        if one is None:
            one = _write(copy, to, number)
        elif one.folder != current or one.is_taken_back:
            one = replace(one, number=number, since=_now(), is_taken_back=False)
            one.write()
        _lead_to(to, one)
        # While what was taken back is still the predictor of the run, its folder says not to deploy it again.
        newest = copy.content if stage is None else _content_of(source)
        found = sorted(
            all_deployed(to),
            key=lambda old: (old.folder != one.folder, old.content != newest, old.is_taken_back, -old.number),
        )
        kept = [old.folder for old in found if not old.is_withdrawn][:keep]
        for old in found:
            if old.folder not in kept:
                remove(old.folder)
    return one.folder, True


def go_back(to: str | Path) -> Path:
    """Point `to`/current to the previously deployed predictor, and return its folder.

    The current predictor is kept, but `deploy` does not deploy it again unless its stage is given.

    Raises:
        RunError: if there is no previous predictor, if one of its files has changed, or if another process is at work
            in `to`.
    """
    to = Path(to)
    if current_of(to) is None:
        raise RunError(f"{to} has no link {CURRENT}: deploy a predictor first (alma-deploy RUN {to})")
    with Lease(to):
        found, current = all_deployed(to), current_of(to)
        now = next((one for one in found if one.folder == current), None)
        older = [one for one in found if not one.is_taken_back and now is not None and one.number < now.number]
        before = [one for one in older if not one.is_withdrawn]
        if now is None or not before:
            why = f" ({older[-1].folder.name} has learned from text that alma-forget has removed)" if older else ""
            how = f"alma-deploy {now.run} {to} --stage K" if now and now.run else f"alma-deploy EXPORT {to}"
            raise RunError(f"{to} has no predictor from before {current}{why}: {how} deploys another one")
        before[-1].check()
        # If this process is killed before the link is changed, the same command goes back to the same folder.
        replace(now, is_taken_back=True).write()
        _lead_to(to, before[-1])
        return before[-1].folder


def withdraw(to: Path, digests: Collection[str]) -> list[Path]:
    """Mark the predictors in `to` that consist of forgotten checkpoints, so that none of them is deployed again.

    The next `deploy` removes their folders.

    Args:
        to: the folder with the deployed predictors.
        digests: SHA-256 digests of checkpoints that have learned from text that alma-forget has removed.

    Returns:
        The folders of these predictors, also of those that were marked before.

    Raises:
        RunError: if a record is damaged, or if another process is at work in `to`.
    """
    if not any(set(digests) & {*one.content} for one in all_deployed(to)):
        return []
    with Lease(to):
        found = [one for one in all_deployed(to) if set(digests) & {*one.content}]
        for one in found:
            if not one.is_withdrawn:
                replace(one, is_withdrawn=True).write()
    return [one.folder for one in found]


def all_deployed(to: Path) -> list[Deployed]:
    """Return the predictors in a folder, in the order in which they were deployed."""
    folders = [path.parent for path in to.glob(f"*/{RECORD}") if not path.parent.is_symlink()]
    found = [one for one in map(Deployed.read, folders) if one.name == one.folder.name]
    return sorted(found, key=lambda one: one.number)


def current_of(to: Path) -> Path | None:
    """Return the folder to which `to`/current points; None if there is no link. Raise RunError if it is not a link."""
    link = to / CURRENT
    if not link.is_symlink():
        if link.exists():
            raise RunError(f"{link} is not a symbolic link: move it away, or give another folder")
        return None
    return to / os.readlink(link)  # noqa: PTH115 (the path as it was given, not resolved)


def _copy_of(source: Path, stage: int | None, stream: Path | None) -> _Copy:
    """Return what to copy from a run, an exported model or a deployed predictor. For the errors, see `deploy`."""
    is_run = (source / "settings.json").is_file() and not (source / RECORD).is_file()
    if stream is not None and not (is_run and "stream" in read_settings(source)):
        raise SettingError(f"--stream is for a run of alma-lm, which {source} is not: leave it out")
    if (source / RECORD).is_file():
        if stage is not None:
            raise SettingError(f"{source} is a deployed predictor, not a run: leave out --stage")
        one = Deployed.read(source.resolve())
        if one.is_withdrawn:
            raise RunError(f"{source} has learned from text that alma-forget has removed: deploy another predictor")
        files = _listed_files(source / RECORD, one.files)
        return _Copy(one.source, _confirmed_run(one), one.stage, one.folder.name, one.content, files)
    if (source / EXPORTED).is_file():
        if stage is not None:
            raise SettingError(f"{source} is an exported model, not a run: leave out --stage")
        record = read_json(source / EXPORTED, ExportRecord)
        files = _listed_files(source / EXPORTED, record["files"])
        for name, (path, digest) in files.items():
            if not path.is_file():
                raise RunError(f"{path} is missing: export the model again")
            if (now := sha256_once(path)) != digest and path.name not in EDITABLE:
                raise RunError(f"{path} is not what alma-export has written: export the model again")
            files[name] = (path, now)
        content = sorted(digest for _, digest in files.values())
        for name in (EXPORTED, "README.md"):
            if (source / name).is_file():
                files[name] = (source / name, sha256_of(source / name))
        name = source.resolve().name
        name = f"model_{name}" if name.startswith(".") or name == CURRENT else name
        return _Copy(f"the exported model {source}", "", 0, name, content, files)
    run = RunFolder(source)
    if (source / CURRENT).is_symlink():
        raise SettingError(f"{source} contains deployed predictors: give the run first, alma-deploy RUN {source}")
    description, settings = read_predictor(source, stage), read_settings(source)
    files, entries = {"settings.json": (run.settings, sha256_of(run.settings))}, []
    for number, entry in enumerate(description["checkpoints"], start=1):
        path, name = checked_file(source, entry), f"member_{number}{Path(entry['path']).suffix}"
        if not path.is_file():
            raise StageError(f"{path} is missing: run the command of the run again")
        files[name] = (path, entry.get("sha256") or sha256_of(path))
        entries.append({**entry, "path": name, "sha256": files[name][1]})
    if "stream" in settings:
        files |= _tokenizer_files(stream or Path(settings["stream"]), settings.get("dictionary"))
    elif not (source / "inputs.json").is_file():
        raise RunError(f"{source / 'inputs.json'} is missing: run the command of the run again, which writes the file")
    else:
        files["inputs.json"] = (source / "inputs.json", sha256_of(source / "inputs.json"))
    stage = _newest_stage(source) if stage is None else stage
    content = [files[str(entry["path"])][1] for entry in entries]
    return _Copy(
        f"stage {stage} of {source}", str(source.resolve()), stage, f"stage_{stage:03d}", content, files,
        {**description, "checkpoints": entries},
    )  # fmt: skip


def _confirmed_run(one: Deployed) -> str:
    """Return the run of a deployed predictor, if the run says so, too; else "".

    The record may be somebody else's, and what is deployed is noted in the folder of the run.
    """
    run = Path(one.run)
    if not one.run or not RunFolder(run).predictor().is_file():
        return ""
    is_noted = any(Path(each["to"]) == one.folder.parent for each in deployments(run))
    is_current = RunFolder(run).predictor(one.stage).is_file() and one.content == [
        entry.get("sha256") for entry in read_predictor(run, one.stage)["checkpoints"]
    ]
    return one.run if is_noted or is_current else ""


def _listed_files(record: Path, digests: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Return the files that a record lists, by their paths in its folder. Raise RunError if one is outside of it."""
    for name in digests:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RunError(f"{record} names a file outside its folder ({name}): export or deploy it again")
    return {name: (record.parent / name, digest) for name, digest in digests.items()}


def _content_of(run: Path) -> list[str]:
    """Return the SHA-256 digests of the checkpoints of the current predictor of a run."""
    return [entry.get("sha256") or sha256_of(run / entry["path"]) for entry in read_predictor(run)["checkpoints"]]


def _newest_stage(run: Path) -> int:
    """Return the last stage in which a checkpoint of the current predictor of a run was trained."""
    paths = [entry["path"] for entry in read_predictor(run)["checkpoints"]]
    parts = [part.removeprefix("stage_") for path in paths for part in Path(path).parts if part.startswith("stage_")]
    return max((int(part) for part in parts if part.isdecimal()), default=0)


def _tokenizer_files(stream: Path, dictionary: str | None) -> dict[str, tuple[Path, str]]:
    """Return the files of the tokenizer of a stream. Raise AlmaError if they are not those of the run."""
    try:
        description = read_description(stream)
        check_tokenizer_files(stream, description)
    except StreamError as error:
        raise StreamError(f"{error}; if the stream was moved, give --stream") from error
    tokenizer = description["tokenizer"]
    if dictionary not in (None, tokenizer["dict_sha256"]):
        raise RunError(f"the dictionary of {stream} is not that of the run: restore the stream of the run")
    return {name: (stream / name, sha256_of(stream / name)) for name in ("dict.txt", tokenizer["file"])}


def _write(copy: _Copy, to: Path, number: int) -> Deployed:
    """Copy the files to a new folder, verify their digests, and return the predictor in it."""
    names = (copy.name, *(f"{copy.name}_{count}" for count in range(2, 10**6)))
    target = next(to / name for name in names if not os.path.lexists(to / name))
    with written_aside(target) as folder:
        for name, (path, digest) in copy.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
            if sha256_of(folder / name) != digest:
                raise RunError(f"{path} has changed while it was copied, or the disk is damaged: run the command again")
        if copy.predictor is not None:
            write_json(folder / "predictor.json", copy.predictor, durable=False)
        files = {
            path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
        }
        origin = copy.source, copy.run, copy.stage
        Deployed(*origin, _now(), number, False, False, copy.content, files, target.name, folder).write()
    return Deployed.read(target)


def _now() -> str:
    return datetime.now().isoformat(" ", "seconds")


def _lead_to(to: Path, one: Deployed) -> None:
    """Point `to`/current to a predictor in `to`, atomically, and record this in the folder of its run."""
    # The link is changed last: if this process is killed before, the same command does the same again. With the new
    # link, `alma-deploy --back` would go back by one more.
    if one.run and Path(one.run).is_dir():
        try:
            note_deployment(Path(one.run), Deployment(to=str(to.resolve()), stage=one.stage, content=one.content))
        except (AlmaError, OSError) as error:
            say(f"alma-deploy: warning: {one.run} does not know what is deployed: {message_of(error)}", sys.stderr)
    with written_aside(to / CURRENT, durable=False) as link:
        link.symlink_to(one.folder.name)


def _print_list(to: Path) -> None:
    """Print the predictors in a folder, the one that was deployed last first."""
    found, current = all_deployed(to), current_of(to)
    if not found:
        raise RunError(f"{to} contains no deployed predictor: alma-deploy RUN {to} deploys one")
    width = max(len(one.folder.name) for one in found)
    for one in reversed(found):
        states = {
            "current": one.folder == current,
            "taken back": one.is_taken_back,
            "has learned from text that was removed": one.is_withdrawn,
        }
        state = ", ".join(name for name, holds in states.items() if holds)
        say(f"{one.folder.name:{width}}  {one.since[:-3]}  {one.source}" + (f"  ({state})" if state else ""))


@command("alma-deploy")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-deploy and return its exit status."""
    parser = Parser(prog="alma-deploy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", nargs="?", type=Path, metavar="SOURCE", help="a run, a folder of alma-export, or OTHER/current"
    )
    parser.add_argument("to", type=Path, metavar="TO", help="the folder with the deployed predictors")
    parser.add_argument("--stage", type=int, metavar="K", help="the predictor of RUN after stage K (default: current)")
    parser.add_argument(
        "--keep", type=int, metavar="N",
        help="number of predictors to keep in TO, including the new one (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--stream", type=Path, help="the stream folder, if it was moved (default: the stream of the run)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--back", action="store_true", help="return to the predictor that was deployed before")
    what.add_argument("--list", action="store_true", help="list the predictors in TO")
    arguments = parser.parse_args(argv)
    source, to = arguments.source, arguments.to
    if (source is None) != (arguments.back or arguments.list):
        raise SettingError("give RUN and TO to deploy, and only TO with --back or --list")
    if source is None and (arguments.stage, arguments.keep, arguments.stream) != (None, None, None):
        raise SettingError(
            "--stage, --keep and --stream are for a deployment: `alma-deploy RUN TO --stage K` returns to stage K"
        )
    if arguments.list:
        _print_list(to)
    elif arguments.back:
        before = current_of(to)
        folder = go_back(to)
        say(f"deployed: {folder}; the next alma-deploy deploys a newer predictor, but not {before} again")
    else:
        before = current_of(to)
        keep = 3 if arguments.keep is None else arguments.keep
        folder, is_source = deploy(source, to, arguments.stage, keep, arguments.stream)
        is_run = not any((source / name).is_file() for name in (EXPORTED, RECORD))
        how = "--stage K deploys it again" if is_run else f"to deploy it again, remove its folder in {to}"
        note = "" if is_source else f" (the predictor of {source} was taken back; {how})"
        if is_source and is_run:
            stage = _newest_stage(source) if arguments.stage is None else arguments.stage
            if stage not in [row.stage for row in Ledger(RunFolder(source).ledger).rows()]:
                note = f" (stage {stage} is not scored yet: run the command of {source} again)"
        say(f"{'already ' if folder == before else ''}deployed: {folder}{note}")
        if arguments.stage is not None and arguments.stage != (newest := _newest_stage(source)):
            content = _content_of(source)
            is_taken_back = any(one.is_taken_back and one.content == content for one in all_deployed(to))
            say(
                f"stage {newest} was taken back: the next alma-deploy without --stage waits for a later stage"
                if is_taken_back
                else f"the next alma-deploy without --stage deploys stage {newest} again; `alma-lm rollback` takes "
                f"a run of alma-lm back to an earlier stage"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

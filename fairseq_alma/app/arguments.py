"""Check and complete the command line of `alma-lm` or `alma-vision` before Hydra reads it."""

import hashlib
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from fairseq_alma.core.catalogue import FREE_SETTINGS, RunSettings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import defaults_of

DEFAULT_PARENT = "runs"
"""Folder of all runs for which the user gave no `out=`."""
MAX_NAME = 150
"""Maximum length of the name of a default run folder, in characters. Most file systems allow 255."""


def name_and_value(argument: str) -> tuple[str, str] | None:
    """Return the name and the value of an argument such as `wait=1`, `+wait=1` or `++wait=1`; None for other words.

    Also return them for names with dots, such as `launch.time=10`.
    """
    found = re.fullmatch(r"\+{0,2}~?([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    return (found[1], found[2]) if found else None


def is_sweep(arguments: Collection[str]) -> bool:
    """Return True if the command line starts a sweep, which is one command for many combinations of settings."""
    return bool({"-m", "--multirun"} & set(arguments))


def version_text(command: str) -> str:
    """Return the text of `--version`: the version of ALMA, and that of Hydra, which reads the command line."""
    return f"{command} {metadata.version('fairseq-alma')} (Hydra {metadata.version('hydra-core')})"


def default_out(arguments: Sequence[str], settings: type[RunSettings], data: str, not_named: Collection[str]) -> str:
    """Return the run folder that is used if the user gives no `out=`: runs/DATA/SETTINGS.

    DATA is the last part of the dataset's name or of the path of the stream. SETTINGS are the other settings on the
    command line in alphabetical order, such as `learner=ens,wait=10`; "default" if there are none. Settings that may
    change when a run is continued are left out. So the same command always continues the same run. For a sweep,
    SETTINGS is "sweep".

    Args:
        arguments: the command line.
        settings: class of the command's settings.
        data: name of the setting that names the data, "dataset" or "stream".
        not_named: further names that do not become part of SETTINGS.
    """
    values = dict(pair for argument in arguments if (pair := name_and_value(argument)))
    named = values.pop(data, None) or str(defaults_of(settings).get(data, data))
    left_out = {*FREE_SETTINGS[settings.half], *not_named, "hydra"} - {"preset", "seeds"}
    kept = {name: value for name, value in values.items() if name.partition(".")[0] not in left_out}
    name = ",".join(f"{key}={_plain(value)}" for key, value in sorted(kept.items())) or "default"
    if is_sweep(arguments):
        name = "sweep"
    if len(name) > MAX_NAME:
        name = f"{name[:MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return str(Path(DEFAULT_PARENT) / (_plain(Path(named.strip("'\"")).name) or data) / name)


def _plain(value: str) -> str:
    """Return the value of a setting as part of a file name, without characters that a shell or Hydra interprets."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")


def checked_out(value: str, example: str) -> str:
    """Return the value of `out=` without quotes, after a check that the folder can be created.

    Raises:
        SettingError: if it is empty, or if the path or one of its parents is a file or cannot be created.
    """
    plain = value.strip().strip("'\"")
    if plain in ("", "null"):
        raise SettingError(f"out= is empty: give the folder of the run, e.g. out={example}")
    for path in (Path(plain), *Path(plain).parents):
        if path.is_file():
            raise SettingError(f"out={plain}: {path} is a file: give a folder, e.g. out={example}")
    if "${" not in plain:  # otherwise Hydra replaces a part of the path later
        missing = missing_folders(Path(plain))
        try:
            Path(plain).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"out={plain} cannot be created ({error.strerror}): give a folder in which you may write, e.g. "
                f"out={example}"
            ) from error
        finally:
            remove_empty(missing)
    return plain


def quoted(argument: str, name: str, plain: str, arguments: Sequence[str]) -> str:
    """Return the argument NAME=PATH, with quotes around PATH if Hydra needs them.

    Args:
        argument: the argument as the user typed it.
        name: its name, `out`.
        plain: PATH without quotes.
        arguments: the command line.
    """
    # Add quotes if the PATH in out=PATH contains characters that are special in Hydra, such as "=" and ",". Inside
    # quotes, these characters are not special. For example, folders that a sweep created have such names. Do not
    # add quotes in two cases: in a sweep, because commas in PATH may separate several values; and if PATH contains
    # ${...}, because Hydra must replace ${...} by the value of a setting.
    value = argument.partition("=")[2].strip()
    if value == plain and not is_sweep(arguments) and re.search(r"[=,(){}\[\]]", plain) and "${" not in plain:
        return f"{name}='{plain}'"
    return argument


def job_arguments(overrides: Sequence[str], out: Path) -> list[str]:
    """Return the arguments of the command that repeats one job of a sweep.

    Args:
        overrides: the arguments with the values of this job.
        out: folder of the job.
    """
    folder = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    return [*(one for one in overrides if not one.startswith("out=")), f"out={folder}"]


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders that exist and are empty, in the given order."""
    for folder in folders:
        with suppress(OSError):  # it does not exist, or is not empty
            folder.rmdir()

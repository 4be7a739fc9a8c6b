"""Check and complete the command line of `alma-lm` or `alma-vision` before Hydra reads it."""

import hashlib
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString, Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fairseq_alma.core.catalogue import RunSettings, settings_that_are
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import defaults_of

DEFAULT_PARENT = "runs"
"""Folder of all runs for which the user gave no `out=`."""
MAX_NAME = 150
"""Maximum length of the name of a default run folder, in bytes. Most file systems allow 255."""


def name_and_value(argument: str) -> tuple[str, str] | None:
    """Return the name and the value of an argument such as `wait=1`, `+wait=1` or `launch.time=10`; otherwise None."""
    found = re.fullmatch(r"\+{0,2}~?([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    return (found[1], found[2]) if found else None


def is_sweep(arguments: Collection[str]) -> bool:
    """Return True if the command line starts a sweep, which is one command for many combinations of settings."""
    return bool({"-m", "--multirun"} & set(arguments))


def default_out(arguments: Sequence[str], settings: type[RunSettings], data: str, not_named: Collection[str]) -> str:
    """Return the run folder that is used if the user gives no `out=`: runs/DATA/SETTINGS.

    DATA is the last part of the dataset's name or of the path of the stream. SETTINGS are the other settings on the
    command line in alphabetical order, such as `learner=ens,wait=10`; "default" if there are none; "sweep" for a sweep.
    Settings that may change when a run is continued are left out. So the same command always continues the same run.

    Args:
        arguments: the command line.
        settings: class of the command's settings.
        data: name of the setting that names the data, "dataset" or "stream".
        not_named: further names that do not become part of SETTINGS.
    """
    values = dict(pair for argument in arguments if (pair := name_and_value(argument)))
    named = values.pop(data, None) or str(defaults_of(settings).get(data, data))
    left_out = {*settings_that_are("free", settings.program), *not_named, "hydra"} - {"preset", "seeds"}
    kept = {name: value for name, value in values.items() if name.partition(".")[0] not in left_out}
    name = ",".join(f"{key}={_plain(value)}" for key, value in sorted(kept.items())) or "default"
    if is_sweep(arguments):
        name = "sweep"
    if len(name.encode()) > MAX_NAME:
        name = _cut(name)
    return str(Path(DEFAULT_PARENT) / (_plain(Path(named.strip("'\"")).name) or data) / name)


def job_folder(name: str) -> str:
    """Return the folder of a job of a sweep, inside that of the sweep.

    Args:
        name: the settings of the job, as Hydra's `override_dirname` lists them. A slash in a value makes a
            nested folder.
    """
    parts = name.split("/")
    if ".." in parts or max(len(part.encode()) for part in parts) > MAX_NAME:
        return _cut(name)
    return name


def _cut(name: str) -> str:
    """Return a name without slashes, and so short that a file can have it, for a name that has or is neither."""
    start = name.replace("/", "_").encode()[:MAX_NAME].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _plain(value: str) -> str:
    """Return the value of a setting as part of a file name, without characters that a shell or Hydra interprets."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folders with YAML files that `--config-dir` adds."""
    return [
        Path(argument.partition("=")[2] or following)
        for argument, following in zip(arguments, [*arguments, ""][1:], strict=True)
        if argument.partition("=")[0] in ("--config-dir", "-cd")
    ]


def check_out(plain: str, example: str) -> None:
    """Check that the folder in `out=`, a path without quotes, can be created. `example` is a value for messages.

    Raises:
        SettingError: if the path is empty, or if the folder cannot be created, for example because a file has its name.
    """
    if not plain.strip():
        raise SettingError(f"out= is empty: give the folder of the run, e.g. out={example}")
    missing: list[Path] = []
    try:
        for path in (Path(plain), *Path(plain).parents):
            if path.is_file():
                raise SettingError(f"out={plain}: {path} is a file: give a folder, e.g. out={example}")
            if path.is_symlink() and not path.exists():
                raise SettingError(
                    f"out={plain}: {path} is a link to {path.readlink()}, which does not exist: remove the link, or "
                    f"create the folder to which it points"
                )
        missing = missing_folders(Path(plain))
        Path(plain).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"out={plain} cannot be created ({error.strerror}): give a folder in which you may write, e.g. "
            f"out={example}"
        ) from error
    finally:
        remove_empty(missing)


_PARSER = OverridesParser.create()
_UNREADABLE = object()
"""What `_read` returns for a value that Hydra refuses."""
_PART = re.compile(r"""(\s*'(?:\\.|[^'\\])*'\s*(?=,)|\s*"(?:\\.|[^"\\])*"\s*(?=,)|[^,]*),""", re.DOTALL)
"""A value of a sweep, with the comma that ends it. A comma in quotes does not end it."""


@dataclass(frozen=True)
class TextSettings:
    """The settings of a command whose value may be any text, for example a path, and how Hydra is given such a text.

    Outside quotes, Hydra accepts only letters of ASCII, and gives a meaning to many other characters. Users need not
    know this: what they type after "=" is the text, with three exceptions. If it is in quotes, the text is what the
    quotes enclose. In a sweep, commas that are not in quotes separate several texts (but not in launch.NAME). And
    `${NAME}` is replaced by the value of another setting or, for example in `${oc.env:HOME}`, by the result of a
    function of OmegaConf.
    """

    names: Collection[str]
    """Names of the settings. In names with a dot, such as launch.setup, nothing is replaced."""
    known: Collection[str]
    """Names of all settings, which `${NAME}` may refer to."""

    def for_hydra(self, argument: str, in_sweep: bool) -> str:
        """Return an argument NAME=VALUE, with quotes and escapes if Hydra needs them to read VALUE as a text.

        Arguments that are no settings with a text are returned unchanged. In a sweep, VALUE may contain several texts.
        """
        name, head, value = _parts(argument)
        if name not in self.names:
            return argument
        if not in_sweep or name.startswith("launch."):  # all jobs of a sweep ask for the same
            return head + self._quoted(name, value)
        read = _read(value)
        if isinstance(read, Sweep) and not getattr(read, "simple_form", False):
            return argument  # choice(...), glob(...) and other functions of Hydra that return several values
        return head + ",".join(self._quoted(name, one) for one in _PART.findall(f"{value},"))

    def _quoted(self, name: str, text: str) -> str:
        read = _read(text)
        if read is None or isinstance(read, QuotedString):
            return text
        escaped = _INTERPOLATION.sub(lambda found: self._escape(name, *found.groups()), text)
        return text if read == text == escaped else QuotedString(escaped, Quote.single).with_quotes()

    def _escape(self, name: str, backslashes: str, inner: str) -> str:
        return f"{backslashes}${{" if self._is_reference(name, inner) else f"{2 * backslashes}\\${{"

    def _is_reference(self, name: str, inner: str) -> bool:
        """Return True if OmegaConf must replace `${...}` in the value of the setting `name`; `inner` follows "${"."""
        resolver, colon, _ = inner.partition(":")
        is_known = OmegaConf.has_resolver(resolver) if colon else inner[:-1] in self.known
        return is_known and inner.endswith("}") and "." not in name

    def texts(self, argument: str) -> list[str]:
        """Return the texts in an argument that `for_hydra` returned. Those with references to settings are left out."""
        name, _, value = _parts(argument)
        return [text for one in values_in(value) if (text := self._unescaped(name, one)) is not None]

    def _unescaped(self, name: str, text: str) -> str | None:
        """Return the text without the backslashes of `_escape`; None if it contains a reference."""
        if any(len(found[1]) % 2 == 0 for found in _INTERPOLATION.finditer(text)):
            return None
        return _INTERPOLATION.sub(lambda found: f"{found[1][: len(found[1]) // 2]}${{", text)

    def as_typed(self, argument: str) -> str:
        """Return an argument that Hydra can read with as few quotes and escapes as the user may type."""
        name, head, value = _parts(argument)
        read = _read(value) if name in self.names else None
        text = read.text if isinstance(read, QuotedString) else read
        if not isinstance(text, str):
            return argument
        plain = self._unescaped(name, text)
        typed = f"{head}{text if plain is None else plain}"
        is_same = values_in(_parts(self.for_hydra(typed, in_sweep=False))[2]) == [text]
        return typed if is_same else argument


_INTERPOLATION = re.compile(r"(\\*)\$\{(?=([^{}]*\}?))")
"""The beginning of `${...}`: the backslashes before it, and what follows "${"."""


def values_in(value: str) -> list[str]:
    """Return the texts that Hydra reads in a value, several in a sweep. Numbers and other values are left out."""
    read = _read(value)
    found = read.list if isinstance(read, ChoiceSweep) else [read]
    texts = [one.text if isinstance(one, QuotedString) else one for one in found]
    return [one for one in texts if isinstance(one, str)]


def is_readable(value: str) -> bool:
    """Return True if Hydra can read a value."""
    return _read(value) is not _UNREADABLE


def _read(value: str) -> Any:
    """Return what Hydra reads in a value of the command line; _UNREADABLE if it refuses the value."""
    try:
        return _PARSER.parse_override(f"x={value}")._value
    except HydraException:
        return _UNREADABLE


def _parts(argument: str) -> tuple[str, str, str]:
    """Return the name of the setting in an argument, the argument up to "=", and the value; "" if there are none."""
    name, value = name_and_value(argument) or ("", "")
    return name, argument[: len(argument) - len(value)], value


def job_arguments(overrides: Sequence[str], out: Path) -> list[str]:
    """Return the arguments of the command that repeats one job of a sweep, in the folder `out`."""
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


def plugin_named_by(arguments: Sequence[str]) -> str | None:
    """Return the name of the plugin that a command line selects; None if it selects no plugin.

    The argument `plugin=MODULE` selects a plugin. Without it, the preset file of `preset=NAME` can do so, with the key
    `plugin`, if it is in the folder given by `--config-dir`.
    """
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument and argument[0] != "-")
    if "plugin" in values:
        return None if values["plugin"] in ("", "null") else values["plugin"]
    for folder in config_folders(arguments):
        path = folder / "preset" / f"{values.get('preset', '')}.yaml"
        if not path.is_file():
            continue
        try:
            preset = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            # The preset file cannot be parsed. Skip the file without an error, because Hydra reads it later and reports
            # the error.
            continue
        if isinstance(preset, dict) and isinstance(preset.get("plugin"), str):
            return preset["plugin"]
    return None

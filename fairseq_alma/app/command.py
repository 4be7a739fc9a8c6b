"""Common code of the commands `alma-lm` and `alma-vision`: Hydra setup, error messages, `--help` and `status`."""

import math
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fairseq_alma.app.arguments import (
    TextSettings,
    check_out,
    config_folders,
    default_out,
    is_readable,
    is_sweep,
    job_arguments,
    job_folder,
    missing_folders,
    name_and_value,
    plugin_named_by,
    remove_empty,
    values_in,
)
from fairseq_alma.app.help import help_text
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.app.run_commands import cancel_runs, follow_logs, status
from fairseq_alma.app.slurm_jobs import in_job
from fairseq_alma.core.catalogue import RunSettings, learners, own_settings
from fairseq_alma.core.errors import ADVICE, AlmaError, SettingError, message_of
from fairseq_alma.core.printing import say
from fairseq_alma.core.program import Parser, stopped
from fairseq_alma.core.provenance import version_of
from fairseq_alma.core.settings import SettingErrors, describe, nearest_key, refuse_unknown_keys
from fairseq_alma.core.signals import stopped_by_signals
from launch.slurm import LAUNCH, SlurmSettings

OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)

FLAGS_WITHOUT_RUN = {"--hydra-help", "--info", "-i", "--cfg", "-c"}
"""Hydra flags that print something and start no run. With these flags, out= is not needed."""
FLAGS_WITH_VALUE = {
    "--cfg", "-c", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--info", "-i", "--package",
    "-p",
}  # fmt: skip
"""Hydra flags that are followed by a value."""
CONFIG_GROUPS = ("preset", "arch", "launch")
"""Settings whose value is the name of a YAML file, or of a registered configuration, with further settings."""
GROUPS = {"launch": SlurmSettings}
"""Groups of settings whose names begin with the name of the group."""
_RUN = "RUN is a run folder, or a folder that contains run folders at any depth."


@dataclass(frozen=True)
class Subcommand:
    """A subcommand such as `status`."""

    do: Callable[..., int]
    """Function that gets a folder and the values of the options, and returns the exit status."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of each option -> the arguments of argparse's `add_argument`."""


SUBCOMMANDS = {
    "status": Subcommand(status, {"--json": {"action": "store_true"}}),
    "logs": Subcommand(follow_logs),
    "cancel": Subcommand(cancel_runs),
}
"""The subcommands of both commands."""


class _Arguments(Parser):
    """Reads the arguments of a subcommand, whose `prog` is its line of usage."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"usage: {self.prog} ({self.with_nearest(message)}). {_RUN}")


class Command:
    """The command alma-lm or the command alma-vision. A command uses Hydra to read its settings.

    Args:
        name: name of the command, for messages. With underscores, it is also the name of its main YAML file.
        introduction: description and usage of the command, for `--help`.
        settings: class of the command's settings.
        configs: folder with the YAML files of the command.
        example_out: an example value for `out=`, for messages.
        other_keys: keys in the YAML files that are not settings, but from which the values of settings are computed.
        when_stopped: what the command does before it ends, if it is stopped by Ctrl-C or by a scheduler; "" if nothing.
        data_setting: name of the setting that names the data. The default of `out=` contains its value.
        subcommands: further subcommands of this command.
        other_choices: by the name of a config group, a function that returns choices for which there is no YAML file,
            each with its content. It is called only if the user gives a choice without a file.
        presets: names of the presets that are registered with Hydra and have no YAML file.
    """

    def __init__(
        self,
        name: str,
        introduction: str,
        settings: type[RunSettings],
        configs: Path,
        example_out: str,
        other_keys: Sequence[str] = (),
        when_stopped: str = "",
        data_setting: str = "dataset",
        other_choices: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
        subcommands: Mapping[str, Subcommand] | None = None,
        presets: Sequence[str] = (),
    ):
        self.name, self.introduction, self.settings, self.configs = name, introduction, settings, configs
        self._example_out, self._other_keys, self._when_stopped = example_out, other_keys, when_stopped
        self._data_setting, self._other_choices = data_setting, other_choices or {}
        self._registered = {"preset": presets, "launch": LAUNCH}
        self._subcommands = {**SUBCOMMANDS, **(subcommands or {})}
        self._signals: Sequence[int] = ()
        self._failed: list[str] = []
        self.exit_status = 0
        """Exit status of the command if nothing fails."""
        self._folder: Path | None = None
        """Folder of a sweep, between two of its jobs."""

    def main(self, hydra_main: Callable[[], Any]) -> None:
        """Run the command with the arguments in sys.argv. On a user error, print a message and exit with status 2.

        `hydra_main`, the function decorated with `hydra.main`, runs the command. After Ctrl-C, the exit status is 130;
        after another signal that stops the command, it is 128 and its number.
        """
        self._signals = ()
        try:
            self._main(hydra_main)
        except KeyboardInterrupt:
            sys.exit(stopped(self.name, number=next(iter(self._signals), signal.SIGINT)))

    def _main(self, hydra_main: Callable[[], Any]) -> None:
        # provenance.json records sys.argv. Without this line, argv[0] would be run.py for a command that was started
        # with `python -m` or by the demo.
        sys.argv[0] = self.name
        self._failed.clear()
        self._folder, self.exit_status = None, 0
        arguments = sys.argv[1:]
        with print_errors(self.name):
            if arguments and arguments[0] in self._subcommands:
                sys.exit(self._run_subcommand(*arguments))
            is_word = bool(arguments) and arguments[0].isalpha()
            if is_word and (near := nearest_key(arguments[0], list(self._subcommands))):
                raise SettingError(f"there is no subcommand {arguments[0]}: did you mean {self.name} {near}?")
            if plugin := plugin_named_by(arguments):
                load_plugin(plugin)
                store_settings(self.settings)
            if {"--help", "-h"} & set(arguments):
                presets = self._choices("preset", self.configs)
                print(help_text(self.introduction, self.settings, presets, GROUPS), end="")
                return
            if "--version" in arguments:
                versions = [version_of(package) or "not installed" for package in ("fairseq-alma", "hydra-core")]
                print(f"{self.name} {versions[0]} (Hydra {versions[1]})")  # Hydra reads the command line
                return
            self._check_arguments(arguments)
        with stopped_by_signals(self.name, self._when_stopped) as self._signals:
            try:
                hydra_main()
            except KeyboardInterrupt:
                if self._folder is not None:
                    with suppress(KeyboardInterrupt), in_job(self._folder, self._signals):
                        raise
                raise
        if self._failed:
            say(f"{self.name}: failed, with a message above: {'; '.join(self._failed)}", sys.stderr)
            sys.exit(1)
        if self.exit_status:
            sys.exit(self.exit_status)

    def _run_subcommand(self, name: str, *arguments: str) -> int:
        """Run a subcommand, or print what it does. Return the exit status."""
        (line,) = [one for one in self.introduction.splitlines() if one.startswith(f"{self.name} {name} RUN")]
        usage, _, text = line.partition("  ")
        if {"--help", "-h"} & {*arguments}:
            print(f"usage: {usage}\n\n{text.strip()}\n\n{_RUN}")
            return 0
        parser = _Arguments(usage, add_help=False, allow_abbrev=False)
        parser.add_argument("RUN", type=Path)
        for option, keywords in self._subcommands[name].options.items():
            parser.add_argument(option, **keywords)
        given = vars(parser.parse_args(arguments))
        return self._subcommands[name].do(given.pop("RUN"), **given)

    @property
    def _texts(self) -> TextSettings:
        kinds = [self.settings, *(entry.settings(self.settings.program) for entry in learners(self.settings.program))]
        names = {one.name for kind in kinds if kind is not None for one in describe(kind) if one.is_text}
        for group, cls in GROUPS.items():
            names |= {f"{group}.{one.name}" for one in describe(cls) if one.is_text}
        return TextSettings(names, self._known())

    def _check_arguments(self, arguments: Sequence[str]) -> None:
        """Check the names of the settings and the path in `out=`. Add `out=` if it is missing, and quotes for Hydra.

        The checked command line replaces sys.argv. If there are errors, the values of the settings are checked too, so
        that all errors are reported together. If there are none, the values are checked when Hydra has read them.
        """
        errors, texts, in_sweep = SettingErrors(), self._texts, is_sweep(arguments)
        errors.collect(lambda: self._refuse_unknown(arguments))
        has_out = any(argument.startswith(("out=", "hydra.sweep.dir=")) for argument in arguments)
        needs_out = not has_out and not FLAGS_WITHOUT_RUN & set(arguments)
        out = f"out={default_out(arguments, self.settings, self._data_setting, GROUPS)}"
        words = [texts.for_hydra(one, in_sweep) for one in [*arguments, *([out] if needs_out else [])]]
        for word in words:
            if word.startswith("out="):
                is_empty = word.partition("=")[2].strip("'\" ") in ("", "null")
                for path in [""] if is_empty else texts.texts(word):
                    errors.collect(partial(check_out, path, self._example_out))
            errors.collect(partial(self._check_value, word, words))
        if "${" in str(Path.cwd()) or (in_sweep and any(re.match(r"[^.]*=.*\\\$\{", word) for word in words)):
            errors.messages.append(
                "Hydra cannot use ${ in the name of the current folder, or of the folder of a job of a sweep: give the "
                "file or folder another name"
            )
        if errors.messages and not in_sweep:
            errors.collect(lambda: self._check_values(words))
        errors.raise_all()
        sys.argv[1:] = words
        if needs_out:
            say(f"{self.name}: no out= is given: using {out}", sys.stderr)

    def _check_value(self, word: str, words: Sequence[str]) -> None:
        """Raise SettingError if Hydra cannot read the value in an argument, or if the value is an unknown file."""
        name, value = name_and_value(word) or ("", "")
        if not is_readable(value):
            raise SettingError(
                f"{name}={value} cannot be read: give a number, a word, true, false, null, or a list such as [2,2,4]"
            )
        searches_elsewhere = any(one.lstrip("+").startswith("hydra.searchpath") for one in words)
        if name not in self._config_groups() or searches_elsewhere:
            return
        known = self._choices(name, self.configs, *config_folders(words))
        for one in values_in(value):
            if one.removesuffix(".yaml") not in known:
                others = self._other_choices[name]() if name in self._other_choices else {}
                if one in others:
                    ConfigStore.instance().store(group=name, name=one, node=others[one], package="_global_")
                    continue
                known = list(dict.fromkeys([*known, *others]))
                hint = f"did you mean {near}? They are" if (near := nearest_key(one, known)) else "it must be one of"
                raise SettingError(f"{name}={one} does not exist: {hint} {', '.join(known)}")

    def _choices(self, group: str, *folders: Path) -> list[str]:
        """Return the choices of a config group: registered ones, and the YAML files in its folder in `folders`.

        A file may be at any depth. Its choice is its path in the folder of the group, without the ending.
        """
        groups = [folder / group for folder in folders]
        found = {path.relative_to(one).with_suffix("").as_posix() for one in groups for path in one.rglob("*.yaml")}
        return sorted({*found, *self._registered.get(group, ())})

    def _config_groups(self) -> list[str]:
        return [name for name in CONFIG_GROUPS if name in self._registered or (self.configs / name).is_dir()]

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Raise SettingError if an argument names an unknown setting, or is no setting."""
        named = {pair[0] for argument in arguments if (pair := name_and_value(argument))}
        for group, cls in GROUPS.items():
            dotted = sorted(name for name in named if name.startswith(f"{group}."))
            refuse_unknown_keys(dotted, [f"{group}.{one.name}" for one in describe(cls)])
            if dotted and f"{group}=slurm" not in arguments:
                raise SettingError(f"{dotted[0]}= needs {group}=slurm: add it, or leave out {dotted[0]}=")
        refuse_unknown_keys([name for name in named if "." not in name], self._known())
        for before, word in zip(["", *arguments], arguments, strict=False):
            if "=" not in word and not word.startswith(("-", "~")) and before not in FLAGS_WITH_VALUE:
                raise SettingError(
                    f"{word!r} is no setting: settings are written NAME=VALUE. If it belongs to a value with a space, "
                    f"put the whole setting in quotes. `{self.name} --help` lists the settings and subcommands"
                )

    def _known(self) -> list[str]:
        """Return all names that may stand before "=" on the command line, without dots."""
        return list(dict.fromkeys([*all_keys(self.settings), *self._config_groups(), *self._other_keys]))

    def _check_values(self, arguments: Sequence[str]) -> None:
        """Check the values of the known settings on the command line, like those of a run. For the error, see
        `from_mapping`.
        """
        known, valid = self._known(), []
        for one in arguments:
            if pair := name_and_value(one):
                # A mistyped name counts as the one that was meant. Otherwise, that one would be reported as missing.
                is_typo = pair[0].isidentifier() and pair[0] not in known
                meant = nearest_key(pair[0], known) if is_typo else pair[0]
                if meant in known and meant != "out":
                    valid.append(f"{meant}={pair[1]}" if is_typo else one)
        try:
            with initialize_config_dir(version_base="1.1", config_dir=str(self.configs.resolve())):
                config = compose(self.name.replace("-", "_"), overrides=[*valid, "out=unknown"])
                values = setting_values(config, self._other_keys)
        except (HydraException, OmegaConfBaseException):
            return  # Hydra reports it after the other errors have been corrected
        self.settings.from_mapping(values, {pair[0] for one in valid if (pair := name_and_value(one))})

    def run_job(self, config: DictConfig, run: Callable[[dict[str, Any], Collection[str]], float]) -> float:
        """Run one Hydra job and return the result of `run`.

        A job trains one combination of settings, with one seed or several seeds. A sweep has one job for each
        combination. If such a job fails, for example because its settings are invalid, the error is printed, the result
        is infinity, and the sweep continues with the next job. Only an error that would stop the other jobs too, such
        as a full disk, ends a sweep. With launch=slurm, `run` submits Slurm jobs.

        Args:
            config: configuration of the job.
            run: function that does the work of the job. Its arguments are a mapping of all settings, and the names of
                the settings that the user typed. It returns a number, which is lower for a better result.
        """
        with print_errors(self.name):
            hydra = HydraConfig.get()
            typed = {re.split(r"[=@]", override.lstrip("+~"))[0] for override in hydra.overrides.task}
            values = setting_values(config, self._other_keys)
            if hydra.mode == RunMode.MULTIRUN:
                # Hydra has chosen and created a separate folder inside out= for each job.
                out = Path(hydra.runtime.output_dir)
                words = job_arguments(hydra.overrides.task, out)
            else:
                out, words = Path(str(values["out"])).absolute(), sys.argv[1:]
            # For provenance.json: the command of this job alone. It can be given again as it is.
            sys.argv = [self.name, *map(self._texts.as_typed, words)]
            missing = missing_folders(out)
            folder = Path(hydra.sweep.dir) if hydra.mode == RunMode.MULTIRUN else out
            self._folder = None
            try:
                score = math.nan  # if other jobs continue the run
                with in_job(folder, self._signals):
                    score = run({**values, "out": str(out)}, typed)
                self._folder = folder
                return score
            except Exception as error:
                remove_empty(missing)
                is_of_system = isinstance(error, OSError) and error.errno in ADVICE
                if hydra.mode != RunMode.MULTIRUN or is_of_system:
                    raise
                if not isinstance(error, AlmaError | OSError):
                    traceback.print_exc()
                say(f"{self.name}: {message_of(error)}", sys.stderr)
                self._failed.append(str(out.relative_to(folder) if out.is_relative_to(folder) else out))
                self._folder = folder
                return math.inf


def all_keys(cls: type[RunSettings]) -> list[str]:
    """Return the names of all settings that a command accepts, including those that only some learners have."""
    own = [name for entry in learners(cls.program) for name in own_settings(entry.name, cls.program)]
    return list(dict.fromkeys([*(one.name for one in describe(cls)), *own]))


def store_settings(cls: type[RunSettings]) -> None:
    """Register the names and default values of all settings of a command with Hydra, and the choices of `launch`.

    They are registered as a Hydra configuration, to which our YAML files refer by name. Settings that only some
    learners have are registered with the value null, because their default value depends on the learner.
    """
    node = dict.fromkeys(all_keys(cls))
    node |= {one.name: None if one.default is MISSING else one.default for one in describe(cls)}
    for name in CONFIG_GROUPS:
        node.pop(name, None)
    ConfigStore.instance().store(name=f"{cls.program.replace(' ', '_')}_settings", node=node)
    for choice, values in LAUNCH.items():
        ConfigStore.instance().store(group="launch", name=choice, node=dict(values), package="launch")


def composed(configs: Path, name: str, overrides: Sequence[str], values: Mapping[str, Any]) -> DictConfig:
    """Return the Hydra configuration of a command outside of the command, with these overrides of config groups.

    `values` are settings from which a preset may compute others. Raise SettingError if there is no such choice.
    """
    # The program may itself be an application of Hydra, whose state must not change.
    hydra_of_program, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(configs), version_base="1.1"):
            config = compose(name, overrides=list(overrides))
    except MissingConfigException as error:
        raise SettingError(str(error).splitlines()[0]) from error
    finally:
        GlobalHydra.instance().hydra = hydra_of_program
    with open_dict(config):
        config.update({key: value for key, value in values.items() if value is not None})
        config.pop("out", None)
    return config


def setting_values(config: DictConfig, other_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return setting name -> value for a Hydra configuration, without `other_keys` and with references resolved."""
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items() if key not in ("hydra", *GROUPS, *other_keys)}


def slurm_settings(config: DictConfig) -> SlurmSettings | None:
    """Return what the Slurm jobs of a run ask for; None with launch=local. Raise SettingError if a value is invalid."""
    values = {str(key): value for key, value in config.launch.items()}
    return SlurmSettings(**values) if values.pop("name") == "slurm" else None


@contextmanager
def print_errors(command: str) -> Iterator[None]:
    """Context manager that handles errors that the user can fix. It prints the message and exits with status 2.

    No traceback is printed. The handled errors are AlmaError, and those of the operating system that name a file or for
    which there is an advice, for example that of a full disk. All other errors are raised as usual.
    """
    try:
        yield
    except BrokenPipeError:
        # The program that reads the output, for example `head`, has ended. Without this line, Python would write to the
        # closed pipe when it exits, and would print an error.
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(1)
    except (AlmaError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno not in ADVICE:
            raise
        say(f"{command}: {message_of(error)}", sys.stderr)
        sys.exit(2)

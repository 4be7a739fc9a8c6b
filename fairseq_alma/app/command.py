"""What `alma-lm` and `alma-vision` share: Hydra with our settings, errors as one line, `--help` and `status`."""

import errno
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app.help import help_text
from fairseq_alma.app.plugins import load_plugin, plugin_named_by
from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.catalogue import RunSettings, learners, own_settings
from fairseq_alma.core.errors import AlmaError, RunError, SettingError, StageError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.run_record import find_runs
from fairseq_alma.core.settings import describe, refuse_unknown_keys

FLAGS_WITHOUT_RUN = {"--hydra-help", "--info", "-i", "--cfg", "-c", "--version"}
CONFIG_GROUPS = ("preset", "arch")
"""Settings that name a YAML file: Hydra sets them when it reads the file."""


class Command:
    """A command that is a Hydra app.

    Args:
        name: the name of the command.
        introduction: what it does and how it is called, for `--help`.
        settings: the class of its settings.
        configs: the folder with its YAML files.
        hydra_main: the function decorated by `hydra.main`.
        example_out: an example of `out=`, for messages.
        other_keys: keys of the YAML files that are no settings: other keys are computed from them.
    """

    def __init__(
        self,
        name: str,
        introduction: str,
        settings: type[RunSettings],
        configs: Path,
        hydra_main: Callable[[], Any],
        example_out: str,
        other_keys: Sequence[str] = (),
    ):
        self.name, self.introduction, self.settings, self.configs = name, introduction, settings, configs
        self._hydra_main, self._example_out, self._other_keys = hydra_main, example_out, other_keys

    def main(self) -> None:
        """Run the command with the arguments of the process. Errors of the user end it with a message and status 2."""
        arguments = sys.argv[1:]
        with print_errors(self.name):
            if arguments[:1] == ["status"]:
                if len(arguments) != 2:
                    sys.exit(f"{self.name}: usage: {self.name} status RUN")
                sys.exit(status(Path(arguments[1])))
            if plugin := plugin_named_by(arguments):
                load_plugin(plugin)
                store_settings(self.settings)
            if {"--help", "-h"} & set(arguments):
                print(help_text(self.introduction, self.settings, self._presets()), end="")
                return
            self._check_arguments(arguments)
        try:
            self._hydra_main()
        except KeyboardInterrupt:
            sys.exit(f"{self.name}: stopped; the same command continues the run")

    def _presets(self) -> list[str]:
        folder = self.configs / "preset"
        return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))

    def _check_arguments(self, arguments: Sequence[str]) -> None:
        """Raise SettingError for unknown keys and an unusable `out=`, and quote `out=`, before Hydra reads them."""
        groups = [name for name in CONFIG_GROUPS if (self.configs / name).is_dir()]
        known = dict.fromkeys([*all_keys(self.settings), *groups, *self._other_keys])
        plain_keys = [found[1] for argument in arguments if (found := re.match(r"([A-Za-z_]\w*)=", argument))]
        refuse_unknown_keys(plain_keys, list(known))
        # Hydra makes the folder of a job before the job can check it.
        has_out = any(argument.startswith(("out=", "hydra.sweep.dir=")) for argument in arguments)
        if not has_out and not FLAGS_WITHOUT_RUN & set(arguments):
            raise SettingError(
                f"out= is missing: the folder of the run, e.g. out={self._example_out}\n\n{self.introduction}"
            )
        is_sweep = bool({"-m", "--multirun"} & set(arguments))
        for number, argument in enumerate(arguments, start=1):
            if argument.startswith("out="):
                sys.argv[number] = self._quoted_out(argument, is_sweep)

    def _quoted_out(self, argument: str, is_sweep: bool) -> str:
        """Return `out=PATH` in quotes if Hydra needs them.

        Raises:
            SettingError: PATH cannot be a folder.
        """
        value = argument.removeprefix("out=").strip()
        plain = value.strip("'\"")
        if plain in ("", "null"):
            raise SettingError(f"out= names no folder: give one, e.g. out={self._example_out}")
        for path in (Path(plain), *Path(plain).parents):
            if path.is_file():
                raise SettingError(f"out={plain}: {path} is a file: give a folder, e.g. out={self._example_out}")
        # Folders of a sweep contain characters with a meaning for Hydra. In a sweep, commas separate values.
        if value == plain and not is_sweep and re.search(r"[=,(){}\[\]]", plain) and "${" not in plain:
            return f"out='{plain}'"
        return argument


def all_keys(cls: type[RunSettings]) -> list[str]:
    """Return every key of the command line: settings of every run, and of every learner in the catalogue."""
    own = [name for entry in learners(cls.half) for name in own_settings(entry.name, cls.half)]
    return list(dict.fromkeys([*(one.name for one in describe(cls)), *own]))


def store_settings(cls: type[RunSettings]) -> None:
    """Give Hydra the keys and defaults of all settings, under the name that the YAML files refer to.

    A learner's own settings are stored as null, which means: the learner's default.
    """
    node = dict.fromkeys(all_keys(cls))
    node |= {one.name: None if one.default is MISSING else one.default for one in describe(cls)}
    for name in CONFIG_GROUPS:
        node.pop(name, None)
    ConfigStore.instance().store(name=f"{cls.half.replace(' ', '_')}_settings", node=node)


def setting_values(config: DictConfig, other_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings in a composed configuration, with every reference resolved.

    Args:
        config: the configuration of a job.
        other_keys: keys that are no settings.
    """
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items() if key not in ("hydra", *other_keys)}


def run_job(
    command: str,
    config: DictConfig,
    run: Callable[[dict[str, Any], Collection[str]], float],
    other_keys: Sequence[str] = (),
) -> float:
    """Run one job of Hydra: a run, or one run of a sweep. Return the number by which a sweep orders its runs.

    Args:
        command: the name of the command, for messages.
        config: the configuration of the job.
        run: the function that runs it. It takes all settings, and the keys that the user typed.
        other_keys: keys of the configuration that are no settings.
    """
    with print_errors(command):
        hydra = HydraConfig.get()
        typed = {re.split(r"[=@]", override.lstrip("+~"))[0] for override in hydra.overrides.task}
        try:
            # In a sweep, each job has its own folder below out=.
            return run({**setting_values(config, other_keys), "out": str(Path(hydra.runtime.output_dir))}, typed)
        except (StageError, SettingError) as error:
            if hydra.mode != RunMode.MULTIRUN:
                raise
            print(f"{command}: {error}", file=sys.stderr)
            return float("inf")  # the other runs of the sweep continue


@contextmanager
def print_errors(command: str) -> Iterator[None]:
    """Print errors that the user can fix as one message, without a traceback, and exit with status 2."""
    try:
        yield
    except AlmaError as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(
            f"{command}: {error}: free space or give access, then run the same command: it continues", file=sys.stderr
        )
        sys.exit(2)


def status(folder: Path) -> int:
    """Print the ledger of each run at or below a folder, and how many mega-batches are left. Return the exit status.

    Raises:
        RunError: there is no run.
    """
    console = wide_console()
    runs = [folder] if (folder / "settings.json").exists() else find_runs(folder)
    if not runs:
        raise RunError(f"no run at {folder} (settings.json is missing)")
    for run in runs:
        settings = read_json(run / "settings.json")
        digests = read_json(run / "arrivals.json")["digests"]
        rows = Ledger(run / "ledger.jsonl").rows()
        title = f"{run}: learner={settings['learner']} wait={settings['wait']}"
        console.print(ledger_table(rows, title, at_most=20))
        left = len(digests) - (len(rows) - 1)
        console.print("finished" if left <= 0 else f"{left} of {len(digests)} mega-batches are left: run it again")
    return 0

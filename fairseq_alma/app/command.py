"""A command that is a Hydra app: bad input told in a line, Ctrl-C taken, `status` told apart from settings."""

import errno
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.errors import AlmaError, RunError, SettingError, StageError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.run_record import find_runs

FLAGS_WITHOUT_RUN = {"--help", "-h", "--hydra-help", "--info", "-i", "--cfg", "-c", "--version"}


def setting_values(config: DictConfig, no_settings: Sequence[str] = ()) -> dict[str, Any]:
    """What a composed configuration says of the settings, every reference resolved.

    Args:
        config: of the job.
        no_settings: keys that only other keys are made from.
    """
    resolved = OmegaConf.to_container(config, resolve=True)
    return {key: value for key, value in resolved.items() if key not in ("hydra", *no_settings)}


def run_job(command: str, values: Mapping[str, Any], run: Callable[[dict[str, Any]], float]) -> float:
    """One job of Hydra: a run, or one of a sweep. Returns what a sweep is ordered by.

    Args:
        command: its name, for messages.
        values: the settings; in a sweep each job has a folder of its own below out=.
        run: takes them.
    """
    with errors_told(command):
        try:
            return run({**values, "out": str(Path(HydraConfig.get().runtime.output_dir))})
        except (StageError, SettingError) as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                raise
            print(f"{command}: {error}", file=sys.stderr)
            return float("inf")  # it is told, and must not cost the others: the sweep goes on


@contextmanager
def errors_told(command: str) -> Iterator[None]:
    """What a user can mend ends the process with a message and status 2."""
    try:
        yield
    except AlmaError as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"{command}: {error}: make room or give access, then run the same command: it continues", file=sys.stderr)
        sys.exit(2)


def main(command: str, doc: str, hydra_main: Callable[[], Any], example: str) -> None:
    """Take `status RUN` apart, and have Hydra take the rest.

    Args:
        command: its name.
        doc: what it does, and how it is called.
        hydra_main: the Hydra app.
        example: of an out=.
    """
    arguments = sys.argv[1:]
    if arguments[:1] == ["status"]:
        if len(arguments) != 2:
            sys.exit(f"{command}: usage: {command} status RUN")
        try:
            sys.exit(status(Path(arguments[1])))
        except AlmaError as error:
            sys.exit(f"{command}: {error}")
    # Hydra needs out= to place its job, and without it fails in a way that helps nobody.
    places = any(argument.startswith(("out=", "hydra.sweep.dir=")) for argument in arguments)
    if not places and not FLAGS_WITHOUT_RUN & set(arguments):
        print(f"{command}: out= is missing: the folder of the run, e.g. out={example}\n\n{doc}", file=sys.stderr)
        sys.exit(2)
    for number, argument in enumerate(arguments, start=1):
        if argument.startswith("out="):
            sys.argv[number] = _checked_out(command, argument, example, {"-m", "--multirun"} & set(arguments))
    try:
        hydra_main()
    except KeyboardInterrupt:
        sys.exit(f"{command}: stopped; the same command continues")


def _checked_out(command: str, argument: str, example: str, is_sweep: object) -> str:
    """`out=PATH` as Hydra takes it. Ends the process if there can be no such folder: Hydra makes it before a job."""
    value = argument.removeprefix("out=").strip()
    plain = value.strip("'\"")
    wrong = None
    if plain in ("", "null"):
        wrong = f"out= names no folder: give one, e.g. out={example}"
    for path in (Path(plain), *Path(plain).parents):
        if plain and path.is_file():
            wrong = f"out={plain}: {path} is a file: give a folder, e.g. out={example}"
    if wrong:
        print(f"{command}: {wrong}", file=sys.stderr)
        sys.exit(2)
    # A path may hold what means something to Hydra: the runs of a sweep are called so. In a sweep commas are its own.
    if value == plain and not is_sweep and re.search(r"[=,(){}\[\]]", plain) and "${" not in plain:
        return f"out='{plain}'"
    return argument


def status(folder: Path) -> int:
    """Print where a run stands."""
    console = wide_console()
    runs = [folder] if (folder / "settings.json").exists() else find_runs(folder)
    if not runs:
        raise RunError(f"no run at {folder} (settings.json is missing)")
    for one in runs:
        settings = read_json(one / "settings.json")
        digests = read_json(one / "arrivals.json")["digests"]
        rows = Ledger(one / "ledger.jsonl").rows()
        title = f"{one}: learner={settings['learner']} wait={settings['wait']}"
        console.print(ledger_table(rows, title, at_most=20))
        left = len(digests) - (len(rows) - 1)
        console.print("finished" if left <= 0 else f"{left} of {len(digests)} mega-batches are left: run it again")
    return 0

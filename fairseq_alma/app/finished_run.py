"""What the functions `run` of text and images have in common: their settings, and what a run has written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.metrics import read_summary
from fairseq_alma.core.run_folder import RunFolder

S = TypeVar("S")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, or the runs of several seeds."""

    settings: Any
    """The settings of the run."""
    folder: Path
    """The folder given by `out=`, as an absolute path."""
    ledgers: list[list[LedgerRow]] = field(repr=False)
    """The ledger of each seed: a row for the untrained learner, and a row for each mega-batch."""

    @property
    def folders(self) -> list[Path]:
        """The run folder of each seed. With one seed, it is `folder`."""
        return RunFolder(self.folder).of_each_seed(self.settings.seed, self.settings.seeds)

    @property
    def ledger(self) -> list[LedgerRow]:
        """The ledger of the first seed."""
        return self.ledgers[0]

    @cached_property
    def curves(self) -> dict[str, np.ndarray]:
        """Each number of the ledger as an array, float64 [seeds, arrivals + 1], for example `curves["error_rate"]`.

        Column t is arrival t. Column 0 is the untrained learner. A value that the ledger does not have is NaN.
        """
        rows = [[row.to_json() for row in ledger] for ledger in self.ledgers]
        items = (item for ledger in rows for row in ledger for item in row.items())
        names = dict.fromkeys(name for name, value in items if isinstance(value, int | float) and name != "t")
        return {name: np.array([[row.get(name, np.nan) for row in one] for one in rows], np.float64) for name in names}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: the metrics of the run, such as Mem ("mem") and Comp ("comp").

        With several seeds, it has the keys "mean", "stderr" (standard errors) and "per_seed".
        """
        return read_summary(self.folder)


def chosen_settings(settings: S | None, values: Mapping[str, Any], make: Callable[[dict[str, Any]], S]) -> S:
    """Return the settings of a call of `run`: the given object, or what `make` makes of the values given by name.

    Paths become strings, and NumPy numbers Python numbers. Raise SettingError if both are given.
    """
    if settings is None:
        return make({name: _plain(value) for name, value in values.items()})
    if values:
        raise SettingError(
            f"run() got a settings object and also {', '.join(values)}: give all settings by name, or change the "
            f"settings object with dataclasses.replace"
        )
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if isinstance(value, np.generic) else value

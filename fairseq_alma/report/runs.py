"""The data that a report is made of: Run (one run folder), RunGroup (one setting, several seeds) and Comparison.

In tables, figures and on the page, a row, point or curve labelled as a run is a RunGroup: the mean over its seeds.
`reading.py` makes these objects from run folders, `grouping.py` decides which of them belong together.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.core.catalogue import SIZE_SETTINGS, Half

Array = np.ndarray


@dataclass(frozen=True)
class Run:
    """The content of one run folder: one setting, one seed. Arrays have one entry per arrival, t = 0..last_t."""

    folder: Path
    seed: int | None
    num_arrivals: int
    """How many mega-batches will have arrived when the run is finished."""
    quality: Array
    """Test error rate (a fraction) or test perplexity."""
    validation: Array
    """Validation error rate or perplexity. NaN where the ledger has none, as in vision before the first stage."""
    num_params: Array
    """Number of parameters of the predictor."""
    forward_flops: Array
    """FLOPs of one forward pass on one example, or on one input of tokens_per_sample tokens."""
    train_flops: Array
    """Training FLOPs since the previous arrival, in float64, for curves. `summary` has the exact sum."""
    num_updates: Array
    """Optimizer updates since the previous arrival, of all members together."""
    train_seconds: Array
    """Seconds of training since the previous arrival."""
    stage: Array
    """Number of the last finished stage; 0 while the learner is untrained."""
    num_members: Array
    """Number of members; NaN where the ledger has none."""
    num_experts: Array
    """Number of experts of each member; NaN where the ledger has none."""
    overflow: Array
    """Share of the tokens that an expert dropped because it was full; NaN where the ledger has none."""
    expert_load: Mapping[int, list[list[float]]]
    """t of each update -> for each mixture layer, the share of the validation data that each expert received."""
    summary: Mapping[str, Any]
    """The scalars of the ledger (core.ledger.summarize), and wall_seconds if summary.json has it."""
    settings: Mapping[str, Any]
    """The content of settings.json."""
    provenance: Mapping[str, Any]
    """The content of provenance.json; empty if the file is missing or damaged."""
    is_running: bool
    """True if a process held the run folder when it was read."""

    @property
    def last_t(self) -> int:
        """The last arrival in the ledger; -1 for an empty ledger."""
        return len(self.quality) - 1

    @property
    def is_finished(self) -> bool:
        """True if the ledger has a row for every arrival."""
        return self.last_t >= self.num_arrivals

    def routing_files(self) -> list[tuple[int, Path]]:
        """Return (stage, path of routing.npz) of every stage that wrote one, in the order of the stages."""
        files = []
        for path in sorted((self.folder / "stages").glob("stage_*/routing.npz")):
            if number := re.fullmatch(r"stage_(\d+)", path.parent.name):
                files.append((int(number[1]), path))
        return files


@dataclass(frozen=True)
class RunGroup:
    """The runs of one setting, one for each seed."""

    half: Half
    """The command that made the runs: "vision" is alma-vision, "language model" is alma-lm."""
    num_arrivals: int
    """How many mega-batches arrive in each run."""
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    """The settings that distinguish this group from others: without seeds, paths and devices."""
    repeat: int = 0
    """0, or the number of groups before this one with the same settings and seeds, in other folders."""

    @cached_property
    def is_finished(self) -> bool:
        """True if at least one run is finished."""
        return any(run.is_finished for run in self.runs)

    @cached_property
    def counted_runs(self) -> tuple[Run, ...]:
        """The runs from which numbers and curves are computed: the finished ones, else those that have trained."""
        finished = tuple(run for run in self.runs if run.is_finished)
        return finished or tuple(run for run in self.runs if run.last_t > 0) or self.runs

    @property
    def is_running(self) -> bool:
        """True if a process held one of the run folders when it was read."""
        return any(run.is_running for run in self.runs)

    @property
    def last_t(self) -> int:
        """The last arrival that all counted runs have reached."""
        return min(run.last_t for run in self.counted_runs)

    @property
    def learner(self) -> str:
        """The name of the learner, as in `learner=gmoe`."""
        return str(self.settings.get("learner", "?"))

    @property
    def wait(self) -> int:
        """The number of mega-batches gathered before a stage."""
        wait = self.settings.get("wait", 1)
        return wait if isinstance(wait, int) else 1

    @property
    def replay(self) -> Any:
        """The setting `replay`: False, "all" or a share."""
        return self.settings.get("replay", False)

    @property
    def folder(self) -> Path:
        """The run folder, or for several runs the deepest folder that contains all of them."""
        if len(self.runs) == 1:
            return self.runs[0].folder
        return Path(os.path.commonpath([run.folder for run in self.runs]))

    @property
    def command(self) -> list[str]:
        """The words of the command that made the first run; empty if its provenance has none."""
        command = self.runs[0].provenance.get("command", [])
        return [str(word) for word in command] if isinstance(command, list) else []

    def column(self, name: str) -> Array:
        """Return one ledger column of all counted runs, of shape [counted runs, last_t + 1].

        Args:
            name: an array attribute of `Run`.
        """
        return np.stack([getattr(run, name)[: self.last_t + 1] for run in self.counted_runs])

    def mean_column(self, name: str) -> Array:
        """Return the mean of `column(name)` over the counted runs, of shape [last_t + 1]."""
        return self.column(name).mean(axis=0)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs whose numbers can be compared: they share the command, the stream and B."""

    half: Half
    """The command that made the runs: "vision" is alma-vision, "language model" is alma-lm."""
    name: str
    """The title, such as `mnist, B = 500`."""
    slug: str
    """The title as the name of a folder, such as `mnist_B500`."""
    num_arrivals: int
    groups: tuple[RunGroup, ...]

    @property
    def is_vision(self) -> bool:
        """True for `alma-vision` runs, False for language models."""
        return self.half == "vision"

    @cached_property
    def varied_settings(self) -> list[str]:
        """Names of the settings that differ between groups; learner, wait and the size of the learner come first."""
        names = {name for group in self.groups for name in group.settings}
        first = ["learner", "wait", "replay", *SIZE_SETTINGS]
        ordered = [*first, *sorted(names - set(first))]

        def values(name: str) -> set:
            # A group lacks the settings that its learner does not take: that alone is no difference.
            return {hashable(group.settings[name]) for group in self.groups if name in group.settings}

        return [name for name in ordered if len(values(name)) > 1]

    def follows_from_learner_and_wait(self, name: str) -> bool:
        """Return True if all groups of the same learner and wait have the same value of this setting.

        This is often so for `grow_every`: it counts stages, so that a longer wait usually comes with a smaller value.
        """
        values: dict[tuple, set] = {}
        for group in self.groups:
            values.setdefault((group.learner, group.wait), set()).add(hashable(group.settings.get(name)))
        return all(len(different) == 1 for different in values.values())

    @property
    def finished_groups(self) -> list[RunGroup]:
        """The groups with at least one finished run."""
        return [group for group in self.groups if group.is_finished]


@dataclass
class ReportData:
    """Everything that was read from the run folders of one report."""

    comparisons: list[Comparison] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """One message for each folder or file that could not be read; it names the file, and the line if there is one."""
    notes: list[str] = field(default_factory=list)
    """One message for each run that is left out although nothing is wrong with it: it has no arrival yet."""
    is_any_running: bool = False
    """True if a process held any of the run folders, including those without an arrival."""


def hashable(value: Any) -> Any:
    """Return a JSON value with its lists and objects replaced by tuples, so that it can be compared in a set."""
    if isinstance(value, list | tuple):
        return tuple(hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    return value

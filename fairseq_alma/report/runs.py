"""The data of a report: Run (one run folder), RunGroup (runs that differ in seed), Comparison (groups on one stream).

Tables, figures and the page use the word "run" for a RunGroup: each row, point or curve shows the mean over its seeds.
`reading.py` creates Run objects from run folders; `grouping.py` puts them into groups and comparisons.
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
    """The content of one run folder: the settings, and the results of one seed.

    Arrays have one entry per arrival, t = 0..last_t. Here t counts the mega-batches that have arrived; t = 0 is the
    untrained learner. In a stage, the learner trains on the mega-batches that arrived since the previous stage.
    """

    folder: Path
    seed: int | None
    num_arrivals: int
    """Number of mega-batches that will have arrived when the run is finished."""
    quality: Array
    """Test error rate (as a fraction) in vision, test perplexity of a language model."""
    validation: Array
    """Validation error rate or perplexity; NaN where the ledger has no value, for example in vision before stage 1."""
    num_params: Array
    """Number of parameters of the predictor: all networks that are used for a prediction."""
    forward_flops: Array
    """FLOPs of one forward pass on one example (vision) or one input of tokens_per_sample tokens (text)."""
    train_flops: Array
    """Training FLOPs since the previous arrival, as rounded float64 values for curves. `summary` has the exact sum."""
    num_updates: Array
    """Optimizer updates since the previous arrival, summed over all members of the ensemble."""
    train_seconds: Array
    """Seconds of training since the previous arrival."""
    stage: Array
    """Number of the last finished stage; 0 while the learner is untrained."""
    num_members: Array
    """Number of members: networks whose outputs are combined into one prediction. NaN where the ledger has no value."""
    num_experts: Array
    """Number of experts in each mixture layer; NaN where the ledger has no value."""
    overflow: Array
    """Fraction of the tokens that were dropped because their expert was full; NaN where the ledger has no value."""
    expert_load: Mapping[int, list[list[float]]]
    """Fraction of the validation data that each expert received.

    expert_load[t][layer][expert], for every arrival t at which the learner was updated and every mixture layer.
    """
    summary: Mapping[str, Any]
    """Scalar results that core.ledger.summarize computed from the ledger. Also wall_seconds, if summary.json has it."""
    settings: Mapping[str, Any]
    """The content of settings.json."""
    provenance: Mapping[str, Any]
    """The content of provenance.json, such as the command line of the run; empty if this file is missing or damaged."""
    is_running: bool
    """True if a process was working on the run (held the lease of the folder) when the folder was read."""

    @property
    def last_t(self) -> int:
        """The last arrival in the ledger; -1 for an empty ledger."""
        return len(self.quality) - 1

    @property
    def is_finished(self) -> bool:
        """True if the ledger has a row for every arrival."""
        return self.last_t >= self.num_arrivals

    def routing_files(self) -> list[tuple[int, Path]]:
        """Return (stage, path of routing.npz) for every stage that wrote this file, in the order of the stages."""
        files = []
        for path in sorted((self.folder / "stages").glob("stage_*/routing.npz")):
            if number := re.fullmatch(r"stage_(\d+)", path.parent.name):
                files.append((int(number[1]), path))
        return files


@dataclass(frozen=True)
class RunGroup:
    """Runs with equal settings, one for each seed."""

    half: Half
    """The command that made the runs: "vision" is alma-vision, "language model" is alma-lm."""
    num_arrivals: int
    """Number of mega-batches that arrive in each run."""
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    """The settings that all runs of the group share. Seeds, paths and devices are left out."""
    repeat: int = 0
    """Usually 0. If several folders have runs with the same settings and seeds: 1 for the second, 2 for the third."""

    @cached_property
    def is_finished(self) -> bool:
        """True if at least one run is finished."""
        return any(run.is_finished for run in self.runs)

    @cached_property
    def counted_runs(self) -> tuple[Run, ...]:
        """Runs used to compute numbers and curves.

        These are the finished runs. If no run is finished, they are the runs with at least one arrival after t = 0. If
        no run has such an arrival, they are all runs.
        """
        finished = tuple(run for run in self.runs if run.is_finished)
        return finished or tuple(run for run in self.runs if run.last_t > 0) or self.runs

    @property
    def is_running(self) -> bool:
        """True if a process was working on at least one of the runs when they were read."""
        return any(run.is_running for run in self.runs)

    @property
    def last_t(self) -> int:
        """The last arrival that every run in `counted_runs` has reached."""
        return min(run.last_t for run in self.counted_runs)

    @property
    def learner(self) -> str:
        """The name of the learner, as in `learner=gmoe`."""
        return str(self.settings.get("learner", "?"))

    @property
    def wait(self) -> int:
        """The number of mega-batches that the learner gathers before it trains on them in one stage."""
        wait = self.settings.get("wait", 1)
        return wait if isinstance(wait, int) else 1

    @property
    def replay(self) -> Any:
        """The setting `replay`: False, "all", or the fraction of each batch that comes from earlier mega-batches."""
        return self.settings.get("replay", False)

    @property
    def folder(self) -> Path:
        """The run folder. For several runs, the deepest folder that contains all of them."""
        if len(self.runs) == 1:
            return self.runs[0].folder
        return Path(os.path.commonpath([run.folder for run in self.runs]))

    @property
    def command(self) -> list[str]:
        """The command line of the first run, as a list of words; empty if provenance.json does not contain it."""
        command = self.runs[0].provenance.get("command", [])
        return [str(word) for word in command] if isinstance(command, list) else []

    def column(self, name: str) -> Array:
        """Return one ledger column for all counted runs, as an array [counted runs, last_t + 1].

        Args:
            name: name of an array attribute of `Run`.
        """
        return np.stack([getattr(run, name)[: self.last_t + 1] for run in self.counted_runs])

    def mean_column(self, name: str) -> Array:
        """Return the mean of `column(name)` over the counted runs, as an array [last_t + 1]."""
        return self.column(name).mean(axis=0)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs whose numbers can be compared, because they share the command, stream and number of arrivals."""

    half: Half
    """The command that made the runs: "vision" is alma-vision, "language model" is alma-lm."""
    name: str
    """The title, such as `mnist, B = 500`."""
    slug: str
    """The title in a form that can be a folder name, such as `mnist_B500`."""
    num_arrivals: int
    groups: tuple[RunGroup, ...]

    @property
    def is_vision(self) -> bool:
        """True for `alma-vision` runs, False for language models."""
        return self.half == "vision"

    @cached_property
    def varied_settings(self) -> list[str]:
        """Names of the settings that differ between groups. Learner, wait, replay and the sizes come first."""
        names = {name for group in self.groups for name in group.settings}
        first = ["learner", "wait", "replay", *SIZE_SETTINGS]
        ordered = [*first, *sorted(names - set(first))]

        def values(name: str) -> set:
            # Ignore groups without this setting: their learner does not have it.
            return {hashable(group.settings[name]) for group in self.groups if name in group.settings}

        return [name for name in ordered if len(values(name)) > 1]

    def follows_from_learner_and_wait(self, name: str) -> bool:
        """Return True if all groups of the same learner and wait have the same value of this setting.

        This often holds for `grow_every`. It counts stages, and a longer wait gives fewer stages, so usually both are
        changed together.
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
    """One message for each folder or file that could not be read. It names the file and, if possible, the line."""
    notes: list[str] = field(default_factory=list)
    """One message for each run that is left out because it has not recorded an arrival yet. This is not an error."""
    is_any_running: bool = False
    """True if a process was working on any of the runs, including runs that have no recorded arrival yet."""


def hashable(value: Any) -> Any:
    """Return a JSON value with all lists and objects replaced by tuples, so that a set can contain it."""
    if isinstance(value, list | tuple):
        return tuple(hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    return value

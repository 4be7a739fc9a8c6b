"""The classes that hold the data of a report.

Run           the content of one run folder: one setting and one seed
RunGroup      runs with equal settings that differ only in the seed
Comparison    groups whose results can be compared, because they learn from the same stream

reading.py makes Run objects from run folders. grouping.py puts them into groups and comparisons. `group_label` names a
group.

A reader of tables, figures and the page sees the word "run" where the code says "group": each row, point or curve shows
the mean over the seeds of one group.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.core import catalogue
from fairseq_alma.core.catalogue import Program, settings_that_are
from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.presets import ANYTIME, anytime_settings, is_anytime
from fairseq_alma.core.printing import printable
from fairseq_alma.core.run_folder import RunFolder, index_of_stage

Array = np.ndarray
MAX_CHARACTERS = 60
"""Maximum length of a setting's value in a label, in characters. A longer value is cut."""


@dataclass(frozen=True)
class Run:
    """The content of one run folder: the settings, and the results of one seed.

    Arrays have one entry per arrival t = 0..last_t. At arrival t, t mega-batches have arrived; at t = 0, the learner is
    untrained. A stage is one round of training, on the mega-batches that arrived since the previous stage.
    """

    folder: Path
    seed: int | None
    num_arrivals: int
    """Number of mega-batches that will have arrived when the run is finished."""
    digests: tuple[str, ...]
    """Digests of the mega-batches of the stream; () if arrivals.json is missing or damaged."""
    quality: Array
    """Vision: test error rate, a fraction between 0 and 1. Language models: test perplexity."""
    validation: Array
    """Validation error rate or perplexity; NaN where the ledger has no value, for example in vision before stage 1."""
    prequential: Array
    """Vision: error rate on the validation data of mega-batch t, of the predictor from before its arrival. NaN where
    the ledger has no value, and for language models."""
    bits_per_byte: Array
    """Language models: test loss in bits per byte of text. NaN where the ledger has no value."""
    num_params: Array
    """Number of parameters of the predictor: all networks that are used for a prediction."""
    forward_flops: Array
    """FLOPs of one forward pass on one example (vision) or one input of tokens_per_sample tokens (text)."""
    train_flops: Array
    """Training FLOPs since the previous arrival, as float64. `summary["comp"]` is the exact sum over all arrivals."""
    train_seconds: Array
    """Seconds of training since the previous arrival."""
    stage: Array
    """Number of the stage that finished last; 0 while the learner is untrained."""
    num_members: Array
    """Number of members: networks whose outputs are combined into one prediction. NaN where the ledger has no value."""
    num_experts: Array
    """Number of experts in each mixture layer; NaN where the ledger has no value."""
    overflow: Array
    """Fraction of the tokens that were dropped because their expert was full; NaN where the ledger has no value."""
    expert_load: Mapping[int, list[list[float]]]
    """Fraction of the validation data that each expert received, as expert_load[t][layer][expert], for the arrivals t
    at which the learner was updated. Only mixture layers are counted."""
    period_losses: Mapping[int, list[float]]
    """Chronological streams: loss per token, in nats, on the test text of each period, as period_losses[t][period], for
    the arrivals t from 1 on whose losses were measured."""
    task_scores: Mapping[str, Array]
    """Language models: score on each task of lm-evaluation-harness after each arrival; NaN where it was not measured.
    The key is the task with its metric, such as "arc_easy: acc"."""
    summary: Mapping[str, Any]
    """Results over the stream, such as `mem` and `comp`, which core.metrics.summarize computes from the ledger, and the
    wall time `wall_seconds` of summary.json, if it has one."""
    settings: Mapping[str, Any]
    """All settings of the run: setting name -> value, read from the file settings.json."""
    provenance: Mapping[str, Any]
    """The content of provenance.json, such as the command line of the run; empty if this file is missing or damaged."""
    is_running: bool
    """True if a process was working on the run when the folder was read: it holds the lease of the folder or of its
    parent."""
    notes: tuple[str, ...] = ()
    """One message for each damaged file without which the run could be read."""
    rows: tuple[LedgerRow, ...] = ()
    """The rows of the ledger."""

    @property
    def seeds_of_process(self) -> int:
        """Number of seeds that the process of the run trained together: 1 for language models."""
        seeds = self.settings.get("seeds")
        return seeds if "dataset" in self.settings and isinstance(seeds, int) else 1

    @property
    def last_t(self) -> int:
        """Number t of the last arrival in the ledger; -1 for an empty ledger."""
        return len(self.quality) - 1

    @property
    def is_finished(self) -> bool:
        """True if the ledger has a row for every arrival, and something has arrived."""
        return self.last_t >= max(1, self.num_arrivals)

    def routing_files(self) -> list[tuple[int, Path]]:
        """Return (stage, path of routing.npz) for every stage that wrote this file, in the order of the stages."""
        folders = RunFolder(self.folder).stage_folders()
        return [(index_of_stage(path), path / "routing.npz") for path in folders if (path / "routing.npz").exists()]


CONTINUED = ("arrivals", "mega_batches", "last_group")
"""Names of settings that usually change when a run is continued."""


@dataclass(frozen=True)
class RunGroup:
    """Runs with equal settings that differ only in the seed."""

    program: Program
    """Which command made the runs: "vision" for alma-vision, "language model" for alma-lm."""
    num_arrivals: int
    """Number of mega-batches that a run has received when it is finished."""
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]
    """The settings that affect the results. All runs of the group share them. Seeds, paths and devices are left out."""
    repeat: int = 0
    """Index that tells apart groups with equal settings; usually 0. Of runs with equal settings and equal seeds, the
    first is in the group with 0, the second in that with 1, and so on."""

    @cached_property
    def is_finished(self) -> bool:
        """True if at least one run is finished."""
        return any(run.is_finished for run in self.runs)

    @cached_property
    def counted_runs(self) -> tuple[Run, ...]:
        """The runs from which the results and curves of the group are computed.

        They are the finished runs; if there are none, those that have reached arrival t = 1; otherwise all.
        """
        finished = tuple(run for run in self.runs if run.is_finished)
        return finished or tuple(run for run in self.runs if run.last_t > 0) or self.runs

    @property
    def is_running(self) -> bool:
        """True if a process was working on at least one of the runs when the run folders were read."""
        return any(run.is_running for run in self.runs)

    @property
    def last_t(self) -> int:
        """Number t of the last arrival that every run in `counted_runs` has reached."""
        return min(run.last_t for run in self.counted_runs)

    @property
    def learner(self) -> str:
        """The name of the learner, as in `learner=gmoe`."""
        return str(self.settings.get("learner", "?"))

    @property
    def wait(self) -> int:
        """The setting `wait`: the number of mega-batches that the learner gathers before it trains a stage on them.

        With wait=geometric and wait=auto, the mean number of mega-batches of a stage, rounded.
        """
        wait = self.settings.get("wait", 1)
        if isinstance(wait, int):
            return wait
        num_stages = max((run.summary.get("num_stages") or 1 for run in self.counted_runs), default=1)
        return max(1, round(self.last_t / num_stages))

    @property
    def wait_text(self) -> str:
        """The setting `wait` as text: the number of mega-batches, a rule such as "geometric:0.3", or "auto"."""
        return str(self.settings.get("wait", 1))

    @property
    def has_fixed_wait(self) -> bool:
        """Whether all stages but the last train on equally many mega-batches, so not wait=geometric or wait=auto."""
        return isinstance(self.settings.get("wait", 1), int)

    @property
    def is_trained_together(self) -> bool:
        """Whether one process trained all seeds of the group together, as alma-vision does with seeds=N."""
        folders = [run.folder for run in self.runs]
        is_one_process = len({one.parent for one in folders}) == 1 and RunFolder(folders[0]).is_of_one_of_several_seeds
        return is_one_process and all(run.seeds_of_process > 1 for run in self.runs)

    @cached_property
    def is_anytime(self) -> bool:
        """Whether the runs have the settings of preset=anytime."""
        return is_anytime(self.program, self.settings)

    @property
    def replay(self) -> Any:
        """The setting `replay`: False, "all", or the fraction of each batch that comes from earlier mega-batches."""
        return self.settings.get("replay", False)

    @property
    def folder(self) -> Path:
        """The run folder of the group. If the group has several runs, the deepest folder that contains all of them."""
        if len(self.runs) == 1:
            return self.runs[0].folder
        return Path(os.path.commonpath([run.folder for run in self.runs]))

    @property
    def command(self) -> list[str]:
        """The command line of the first run, as a list of words; empty if provenance.json contains no command.

        If the run was continued with more arrivals, the settings for them have their last values.

        It contains `out=`. The command line of a committed run may lack it. Then it is runs/NAME, where NAME is the
        name of the run folder.
        """
        command = self.runs[0].provenance.get("command", [])
        words = [str(word) for word in command] if isinstance(command, list) else []
        if words and words[0] in ("alma-lm", "alma-vision") and not any(word.startswith("out=") for word in words):
            words.append(f"out=runs/{self.folder.name}")
        if {"-m", "--multirun"} & {*words}:
            return words
        last = {name: value for name, value in self.runs[0].settings.items() if name in CONTINUED}
        words = [word for word in words if last.get(word.partition("=")[0], "") is not None]
        return [f"{name}={last[name]}" if (name := word.partition("=")[0]) in last else word for word in words]

    def column(self, name: str) -> Array:
        """Return a `Run` attribute, such as "quality", of the counted runs up to `last_t`: [runs, last_t + 1]."""
        return np.stack([getattr(run, name)[: self.last_t + 1] for run in self.counted_runs])

    def mean_column(self, name: str) -> Array:
        """Return the mean of a `Run` attribute over the runs in `counted_runs`, as an array [last_t + 1]."""
        return self.column(name).mean(axis=0)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs whose results can be compared: they have the same command, stream and number of arrivals."""

    program: Program
    """Which command made the runs: "vision" for alma-vision, "language model" for alma-lm."""
    name: str
    """Title of the comparison, such as `mnist, B = 500`."""
    slug: str
    """Title of the comparison in a form that can be a folder name, such as `mnist_B500`."""
    num_arrivals: int
    groups: tuple[RunGroup, ...]

    @property
    def is_vision(self) -> bool:
        """True for runs of alma-vision, False for runs of alma-lm."""
        return self.program == "vision"

    @cached_property
    def varied_settings(self) -> list[str]:
        """Names of the settings that differ between groups. Learner, wait, replay and the size settings come first."""
        names = {name for group in self.groups for name in group.settings}
        first = ["learner", "wait", "replay", *settings_that_are("size")]
        ordered = [*first, *sorted(names - set(first))]

        def differs(name: str) -> bool:
            # A setting of some learners only, such as `members`, means something else for each. So it is compared
            # among the groups of one learner, and the learner names the rest of the difference.
            is_own = bool(catalogue.learners_that_take(name, self.program))
            groups = [group for group in self.groups if name in group.settings]
            values = {(group.learner if is_own else None, hashable(group.settings[name])) for group in groups}
            return len(values) > len({learner for learner, _ in values})

        return [name for name in ordered if differs(name)]

    def label_of(self, group: RunGroup) -> str:
        """Return the label of a group: its learner, and the settings in which the groups differ; see `group_label`."""
        return group_label(group, self.varied_settings)

    def follows_from_learner_and_wait(self, name: str) -> bool:
        """Return True if groups with the same learner and the same wait always have the same value of setting `name`.

        This is often true for `grow_every`, the number of stages between two growth steps. With a longer wait there are
        fewer stages, so users usually change `wait` and `grow_every` together.
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
    """The data of a report: the runs that were read, and messages about the folders and runs that were left out."""

    comparisons: list[Comparison] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """One message for each folder or file that could not be read. It names the file and, if possible, the line."""
    notes: list[str] = field(default_factory=list)
    """One message for each run that is left out because its ledger is still empty, and for each file of a run that is
    damaged and not needed."""
    is_any_running: bool = False
    """True if a process was working on any of the runs when they were read. Runs with an empty ledger count too."""


def waits_of(groups: Iterable[RunGroup]) -> list[str]:
    """Return the different values of the setting `wait` in these groups of runs: numbers first, in ascending order."""
    waits = {(not group.has_fixed_wait, group.wait if group.has_fixed_wait else 0, group.wait_text) for group in groups}
    return [text for *_, text in sorted(waits)]


def group_label(group: RunGroup, names: Sequence[str], with_learner: bool = True) -> str:
    """Return the label of a group of runs, such as `gMoE, wait 10, width 32`.

    Settings that switch nothing on are left out. A group with the settings of preset=anytime is called `anytime`. This
    word replaces the learner SM, wait 1 and all settings of the preset. So if such groups differ in a setting that the
    preset does not have, the label is, for example, `anytime, lr 0.001`.

    Args:
        group: the group.
        names: names of the settings that the label contains, in this order; usually Comparison.varied_settings.
        with_learner: if False, the label contains only settings.
    """
    words = [printable(catalogue.label_of(group.learner))] if with_learner else []
    if group.is_anytime:
        recipe = anytime_settings(group.program)
        if with_learner or {*names} & {*recipe} - {"learner", "wait"}:
            words = [ANYTIME]
        names = [name for name in names if name not in recipe]
    return ", ".join([*words, *setting_words(group, names)])


def setting_words(group: RunGroup, names: Sequence[str]) -> list[str]:
    """Return the settings `names` of a group as words, such as ["wait 10", "replay"]; see `group_label`."""
    words = []
    for name in names:
        value = group.settings.get(name)
        is_off = catalogue.options(group.program).get(name) == value
        if name == "learner" or value is None or is_off:
            continue
        if name == "replay":
            if value:
                words.append("replay" if value == "all" else f"replay {value}")
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name} {_short_text(value)}")
    if group.repeat:
        words.append(f"again ({group.repeat + 1})")
    return [printable(word) for word in words]


def _short_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        text = "+".join(map(_short_text, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def options_of(group: RunGroup) -> list[str]:
    """Return the names of the options (`catalogue.options`) that are on in a group of runs."""
    off = catalogue.options(group.program)
    return [name for name in off if group.settings.get(name) not in (None, off[name])]


def learner_position(name: str) -> int:
    """Return the position of a learner in the paper's list of learners. Learners that plugins add come last."""
    names = [entry.name for entry in catalogue.learners()]
    return names.index(name) if name in names else len(names)


def hashable(value: Any) -> Any:
    """Return a JSON value with all lists and objects replaced by tuples, so that a set can contain the value."""
    if isinstance(value, list | tuple):
        return tuple(hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    return value

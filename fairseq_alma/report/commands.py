"""Command lines of runs that the report proposes, because no such run exists.

A proposed command is the command of an existing run with some settings changed. It can be pasted into a shell as it is.
Its run folder (out=) is a new one.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fairseq_alma.core.catalogue import (
    AVERAGE_SETTINGS,
    DENSE_GROWTH,
    GROWTH_INTERVAL,
    MEMBER_SETTINGS,
    NOT_COMPARED,
    OPTIONS,
    REQUIRED_SETTINGS,
    SCALED_SETTING,
    grows,
    takes,
)
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

Change = Literal["wait_longer", "wait_less", "replay", "growth", "same_size", "more_members"]
"""The decision in which two groups of runs differ. alternatives.py describes the decisions."""
CHANGES: tuple[Change, ...] = ("wait_longer", "wait_less", "replay", "growth", "same_size", "more_members")

PROGRAMS = {"vision": "alma-vision", "language model": "alma-lm"}
GROWING = {"sm": "gens", "ens": "gens", "umix": "gens", "moe": "ens_moe"}
"""Learner that does not grow -> growing learner with the same training FLOPs if each of its stages trains as many
networks. In vision only; for language models, a mixture of experts also grows without further FLOPs."""
FIXED = {"ens_moe": "moe"}
"""Growing learner -> learner that does not grow and has the same training FLOPs. See `_fixed_at_equal_cost`."""
COMPOSED = ("stream", "data_root", "mega_batches", "arrivals", "seeds", "seed")
"""Settings that a command needs besides those that affect the results, if provenance.json has no command."""
GIVEN_DATA = "given:"
"""How the setting `dataset` begins if Python code gave the data to vision.run()."""
ABOUT_EQUAL = 1.25
"""Two costs, or two sizes, are about equal if the larger one is at most this many times the smaller one."""
MAX_SIZE = 4096
"""Largest width or number of experts that is proposed."""

Settings = dict[str, Any]
"""Settings of a command that differ from those of an existing run; None removes a setting from the command."""


def proposed_command(change: Change, comparison: Comparison, index: int, numbers: Sequence[Numbers]) -> str:
    """Return a command line for an alternative that was not run; "" if there is none.

    There is none for data that Python code gave to vision.run(); for one network of the same size if no run in the
    comparison shows how many parameters one network has; and instead of growth if no ensemble has about the same cost.

    Args:
        change: the decision in which the alternative differs.
        comparison: the groups of runs.
        index: index of the group to which the alternative is proposed, in `comparison.groups`.
        numbers: the results of each group.
    """
    group, result = comparison.groups[index], numbers[index]
    if str(group.settings.get("dataset")).startswith(GIVEN_DATA):
        return ""
    if change in ("wait_longer", "wait_less"):
        changed = _other_wait(group, comparison, change == "wait_longer")
    elif change == "replay":
        changed = {"replay": "false" if group.replay else "all"}
        if group.settings.get("replay_memory") is not None:
            changed["replay_memory"] = None  # refused without replay
    elif change == "same_size":
        size = size_of_one_network(comparison, group, mean_params(result, group.num_arrivals))
        if size is None:
            return ""
        changed = {"learner": "sm", SCALED_SETTING[group.half]: size}
    elif change == "more_members":
        changed = _more_members(group)
    else:
        changed = _fixed_at_equal_cost(group, result) if grows(group.learner) else _growing_at_equal_cost(group)
        if not changed:
            return ""
    return command_with(group, changed)


def are_about_equal(a: float, b: float) -> bool:
    """Return True if two costs, or two sizes, are about equal."""
    return a > 0 and b > 0 and max(a, b) <= ABOUT_EQUAL * min(a, b)


def mean_params(result: Numbers, num_arrivals: int) -> float:
    """Return the number of parameters of the predictor, averaged over the arrivals t = 0..B."""
    return result.mem / (num_arrivals + 1)


def num_networks(group: RunGroup) -> int:
    """Return the number of networks that each stage of a run trains."""
    number = group.settings.get(MEMBER_SETTINGS.get(group.learner, ""))
    return number if isinstance(number, int) else 1


def command_with(group: RunGroup, changed: Mapping[str, Any]) -> str:
    """Return the command of a group of runs with some settings changed, quoted for a shell.

    If the learner changes, settings that the new learner does not have are left out, and those that it requires are
    added.
    """
    settings = _settings_of_command(group)
    learner = str(changed.get("learner", group.learner))
    settings = {name: value for name, value in settings.items() if takes(group.half, learner, name.lstrip("+"))}
    if learner != group.learner:
        required = REQUIRED_SETTINGS.get((group.half, learner), {})
        settings |= {name: _text(value) for name, value in required.items() if name not in settings}
    settings |= {"learner": learner} | {name: _text(value) for name, value in changed.items()}
    settings["out"] = _new_folder(group, settings.get("out"), changed)
    return shlex.join([PROGRAMS[group.half], *(f"{name}={value}" for name, value in settings.items())])


def _settings_of_command(group: RunGroup) -> dict[str, str]:
    """Return the settings that the command of a group gives, name -> text, in the order of the command.

    A command that starts a sweep (-m) has several values of a setting. They are replaced by the value of this run. If
    provenance.json has no command, the settings of the run are returned.
    """
    run = group.runs[0].settings
    words = [word for word in group.command[1:] if "=" in word and not word.startswith("-")]
    if not words:
        names = [
            name for name in run if name in COMPOSED or (name not in NOT_COMPARED and not name.endswith("_digest"))
        ]
        given = {name: run[name] for name in names if takes(group.half, group.learner, name)}
        return {name: _text(value) for name, value in given.items() if value is not None}
    is_sweep = any(word in ("-m", "--multirun") for word in group.command)
    settings = dict(word.split("=", 1) for word in words)
    settings.pop("fork", None)  # a new run has nothing to fork from
    if is_sweep:
        settings |= {name: _text(run[name]) for name in settings if name in run and name != "out"}
        settings = {name: value for name, value in settings.items() if not name.startswith("hydra.")}
    return settings


def _text(value: Any) -> str:
    """Return the value of a setting as text for the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _new_folder(group: RunGroup, out: str | None, changed: Mapping[str, Any]) -> str:
    """Return a run folder for a proposed command: the name of the existing one, with the changed settings."""
    folder = Path(out) if out else Path("runs", group.folder.name)
    if re.fullmatch(r"seed_\d+", folder.name):
        folder = folder.parent
    suffix = "_".join(f"{name}_{_text(value)}" for name, value in changed.items() if value is not None)
    return f"{folder}_{re.sub(r'[^A-Za-z0-9_.]+', '_', suffix)}"


def _other_wait(group: RunGroup, comparison: Comparison, is_longer: bool) -> Settings:
    """Return the settings of a longer wait, or of wait 1. The number of updates for each mega-batch stays the same."""
    wait = 1
    if is_longer:
        used = sorted({other.wait for other in comparison.groups if other.wait > group.wait})
        wait = min(comparison.num_arrivals, used[0] if used else 2 * group.wait)
    changed: Settings = {"wait": wait}
    if group.settings.get("wait_ratio") is not None:
        changed["wait_ratio"] = None  # only waits that grow take it
    updates = group.settings.get("updates")
    if isinstance(updates, int):
        changed |= {"updates": None, "updates_per_mega_batch": max(1, round(updates / group.wait))}
    interval = group.settings.get(GROWTH_INTERVAL)
    if isinstance(interval, int):
        changed[GROWTH_INTERVAL] = max(1, round(interval * group.wait / wait))
    return changed


def _ensemble(group: RunGroup, number: int) -> Settings:
    """Return the settings of `number` networks that are trained on the same data: SM or Ens."""
    return {"learner": "sm"} if number < 2 else {"learner": "ens", MEMBER_SETTINGS["ens"]: number}


def _more_members(group: RunGroup) -> Settings:
    """Return the settings of an ensemble of more networks: twice as many, or of a first ensemble."""
    setting = MEMBER_SETTINGS.get(group.learner)
    if setting is not None and takes(group.half, group.learner, setting) and setting in group.settings:
        return {setting: 2 * num_networks(group)}
    if group.half == "vision":
        return _ensemble(group, 5)  # the paper's number
    members = group.mean_column("num_members")[-1]
    return _ensemble(group, max(2, round(float(members))) if np.isfinite(members) else 2)


def _growing_at_equal_cost(group: RunGroup) -> Settings:
    """Return the settings of a growing learner with the same training FLOPs as a learner that does not grow."""
    number = num_networks(group)
    if group.half == "vision":
        learner = GROWING.get(group.learner, "gens")
        return {"learner": learner, MEMBER_SETTINGS["gens"]: number} | _without_average(group)
    is_dense = group.settings.get(SCALED_SETTING[group.half]) == 1
    changed: Settings = {"learner": "gmoe", **(DENSE_GROWTH if is_dense else {})}
    if number == 1:
        return changed
    return changed | {
        name: number * updates
        for name in ("updates", "updates_per_mega_batch")
        if isinstance(updates := group.settings.get(name), int)
    }


def _without_average(group: RunGroup) -> Settings:
    """Return the settings that switch off the average of a group; {} if it has none. Some learners refuse averages."""
    if group.settings.get("predict_with") != "average":
        return {}
    used = {name: off for name, off in AVERAGE_SETTINGS.items() if group.settings.get(name, off) != off}
    return {"predict_with": OPTIONS[group.half]["predict_with"]} | used


def _fixed_at_equal_cost(group: RunGroup, result: Numbers) -> Settings:
    """Return the settings of a learner that does not grow, with the training FLOPs of a growing learner.

    Each stage of a growing ensemble costs as much as one of an ensemble of as many networks as it adds. Any other
    learner is compared with what its updates would cost without growth, that is, as much as those of its first stage.
    An ensemble of N networks costs N times as much as one. If none has about the same cost, return {}.
    """
    if group.learner in FIXED:
        return {"learner": FIXED[group.learner]}
    if group.learner in MEMBER_SETTINGS:
        return _ensemble(group, num_networks(group))
    flops, updates = group.mean_column("train_flops"), group.mean_column("num_updates")
    trained = np.flatnonzero(updates)
    if not len(trained):
        return _ensemble(group, 1)
    unchanged = float(flops[trained[0]] / updates[trained[0]] * updates.sum())
    number = max(1, round(result.comp / unchanged))
    return _ensemble(group, number) if are_about_equal(number * unchanged, result.comp) else {}


def _begins_as_plain_networks(group: RunGroup) -> bool:
    """Return True if the learner, before it grows, is one or several networks like that of learner=sm."""
    if group.half == "vision" and group.learner in ("gmoe", "gmoe_flat"):
        return bool(group.mean_column("num_experts")[0] == 1)
    return group.learner in ("sm", "ff", "gmoe", *MEMBER_SETTINGS)


def size_of_one_network(comparison: Comparison, group: RunGroup, params: float) -> int | None:
    """Return the width, or the number of experts, at which one network has about `params` parameters.

    It is computed from the networks of the runs in the comparison: by a polynomial through at most three sizes. If one
    size is known, the parameters of a perceptron and of a mixture are proportional to it, and those of a convolutional
    network to its square.

    Returns:
        The size; None if the comparison has no network whose size is known.
    """
    name = SCALED_SETTING[group.half]
    known: dict[int, float] = {}
    for other in comparison.groups:
        size = other.settings.get(name)
        if not isinstance(size, int) or size in known or not _begins_as_plain_networks(other):
            continue
        is_same_kind = all(other.settings.get(kind) == group.settings.get(kind) for kind in ("arch", "backbone"))
        if is_same_kind:
            members = num_networks(other) if other.learner != "gens" or group.half == "vision" else 1
            known[size] = float(other.counted_runs[0].num_params[0]) / members
    if not known:
        return None
    nearest = sorted(known, key=lambda size: abs(np.log(known[size] / params)))[:3]
    sizes, values = list(nearest), [known[size] for size in nearest]
    degree = len(sizes) - 1
    if group.half == "vision" and len(sizes) < 3:
        sizes, values, degree = [0, *sizes], [0.0, *values], len(sizes)
    if len(nearest) == 1:
        entry = entry_of(str(group.settings.get("dataset")))
        backbone = group.settings.get("backbone") or (entry.backbone if entry else None)
        power = 1 if group.half == "language model" or backbone == "mlp" else 2
        return max(1, min(MAX_SIZE, round(nearest[0] * (params / known[nearest[0]]) ** (1 / power))))
    candidates = np.arange(1, MAX_SIZE + 1)
    found = np.polyval(np.polyfit(sizes, values, degree), candidates)
    return int(candidates[np.abs(found - params).argmin()])

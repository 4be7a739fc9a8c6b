"""Find the alternatives to a group of runs: what another decision would have cost or gained.

An alternative is a finished group that differs from the group in one decision of the user. If no such run exists, the
report proposes a command that runs it, or says why the decision does not apply.

decision     the alternative
wait_longer  a longer wait
wait_less    a shorter wait; with wait 1, the learner does not wait
replay       another value of replay
growth       a learner that grows if this one does not, and the reverse, with about the same number of training FLOPs
same_size    one network that does not grow, with about as many parameters as this run has on average
more_members more networks in an ensemble

In all other settings, the two runs are equal. There are exceptions, because a decision can change several settings:
with the wait, users change the number of updates and the growth interval; other learners have other settings; and to
find runs of equal cost or size, the size settings may differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fairseq_alma.core.catalogue import (
    AVERAGE_SETTINGS,
    GROWTH_SETTINGS,
    MEMBER_SETTINGS,
    SIZE_SETTINGS,
    WAIT_SETTINGS,
    grows,
    learners_that_take,
)
from fairseq_alma.report.commands import CHANGES, Change, are_about_equal, mean_params, num_networks, proposed_command
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

WITHOUT_AVERAGE = ("gens", "ens_moe")
"""Learners that refuse predict_with=average."""


class Alternatives(NamedTuple):
    """The alternatives to a group of runs in one decision."""

    runs: list[int]
    """Indices of the finished groups, in `comparison.groups`."""
    reason: str = ""
    """If the decision does not apply to the group: why."""
    command: str = ""
    """If no such run exists: a command line that runs it."""


def alternatives(comparison: Comparison, numbers: Sequence[Numbers]) -> list[dict[Change, Alternatives]]:
    """Return the alternatives to each group of a comparison, one entry for each decision.

    The report gives an answer only if a run is finished. So there are no alternatives to unfinished groups ({}).

    Args:
        comparison: the groups of runs.
        numbers: the results of each group.
    """
    groups = comparison.groups
    settings = {name for group in groups for name in group.settings}
    # For a setting that all learners have, learners_that_take returns an empty list.
    own = {"learner", *(name for name in settings if learners_that_take(name, comparison.half))}
    free = own | {*SIZE_SETTINGS, *GROWTH_SETTINGS, *WAIT_SETTINGS} - {"wait"}
    may_differ: dict[Change, set[str]] = {
        "wait_longer": set(WAIT_SETTINGS),
        "wait_less": set(WAIT_SETTINGS),
        "replay": {"replay", "replay_memory"},
        "growth": free | {"predict_with", *AVERAGE_SETTINGS},
        "same_size": free,
        "more_members": own,
    }
    keys = {change: [_key_without(group, names) for group in groups] for change, names in may_differ.items()}
    families: dict[Change, dict[tuple, list[int]]] = {change: {} for change in CHANGES}
    for change in CHANGES:
        for index, group in enumerate(groups):
            if group.is_finished:
                families[change].setdefault(keys[change][index], []).append(index)

    def of(index: int, change: Change) -> Alternatives:
        if reason := _reason(change, groups[index], comparison.num_arrivals):
            return Alternatives([], reason)
        group, result, is_alternative = groups[index], numbers[index], IS_ALTERNATIVE[change]
        family = families[change].get(keys[change][index], [])
        found = [i for i in family if i != index and is_alternative(group, result, groups[i], numbers[i])]
        return Alternatives(found, "", "" if found else proposed_command(change, comparison, index, numbers))

    return [
        {change: of(index, change) for change in CHANGES} if group.is_finished else {}
        for index, group in enumerate(groups)
    ]


def is_single_network(learner: str) -> bool:
    """Return True if a learner is one network that does not grow."""
    return not grows(learner) and learner not in MEMBER_SETTINGS


def _reason(change: Change, group: RunGroup, num_arrivals: int) -> str:
    """Return why a decision does not apply to a group of runs; "" if it applies."""
    if change == "wait_longer" and group.wait >= num_arrivals:
        return "this run waits for the whole stream"
    if change == "wait_less" and group.wait == 1 and group.has_fixed_wait:
        return "this run does not wait"
    if change == "same_size" and is_single_network(group.learner):
        return "this run is one network that does not grow"
    if change == "growth" and group.wait >= num_arrivals:
        return "with one stage, nothing grows"
    if change == "replay" and group.wait >= num_arrivals:
        return "with one stage, there is nothing to replay"
    return ""


def _can_predict_alike(group: RunGroup, other: RunGroup) -> bool:
    """Return True if two groups predict with the same average, or one of the learners refuses averages."""
    names = ("predict_with", *AVERAGE_SETTINGS)
    is_equal = all(group.settings.get(name) == other.settings.get(name) for name in names)
    return is_equal or any(one.learner in WITHOUT_AVERAGE for one in (group, other))


def _waits_less(group: RunGroup, other: RunGroup) -> bool:
    """Return True if a group waits less than another one. Waits that grow are longer than 1, even if the mean is 1."""
    is_one = group.wait == 1 and group.has_fixed_wait
    return group.wait < other.wait or (is_one and other.wait == 1 and not other.has_fixed_wait)


def _has_more_members(group: RunGroup, other: RunGroup) -> bool:
    is_ensemble = other.learner in MEMBER_SETTINGS and (other.learner == group.learner or not grows(other.learner))
    return is_ensemble and num_networks(other) > num_networks(group)


IS_ALTERNATIVE: dict[Change, Callable[[RunGroup, Numbers, RunGroup, Numbers], bool]] = {
    "wait_longer": lambda group, _, other, __: other.wait > group.wait,
    "wait_less": lambda group, _, other, __: _waits_less(other, group),
    "replay": lambda group, _, other, __: other.replay != group.replay,
    "growth": lambda group, result, other, its: (
        grows(other.learner) != grows(group.learner)
        and _can_predict_alike(group, other)
        and are_about_equal(result.comp, its.comp)
    ),
    "same_size": lambda group, result, other, its: (
        is_single_network(other.learner)
        and are_about_equal(mean_params(result, group.num_arrivals), mean_params(its, group.num_arrivals))
    ),
    "more_members": lambda group, _, other, __: _has_more_members(group, other),
}
"""Functions that say whether a group is an alternative to another one, if their other settings are equal."""


def _key_without(group: RunGroup, names: set[str]) -> tuple:
    """Return all settings of a group except the settings `names`, as a tuple that can be a dictionary key.

    Groups with equal tuples have equal values of all other settings.
    """
    return tuple(sorted((name, repr(value)) for name, value in group.settings.items() if name not in names))

"""The test perplexities that the paper reports for its language models (arXiv 2106.09563, appendix D, Table 2).

The paper's stream has B = 4 mega-batches of 440M words. A stage on one mega-batch has 120,000 updates. The columns
t0..t3 of the paper's table are the arrivals t = 1..4 here.

The paper reports two values for the large ensemble with wait 4 and four times the updates (Ens_w4, 4x steps): 17.88 in
its Table 1 and 17.84 in its Table 2. This file contains the value of Table 2.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np

from fairseq_alma.core.catalogue import options
from fairseq_alma.report.runs import Array, RunGroup


class Row(NamedTuple):
    """A row of the paper's Table 2."""

    learner: str
    wait: int
    steps: int
    """Number of updates in a stage, divided by 120,000: 3 in the row `SM_w3 (3x steps)`."""
    experts: tuple[int, ...]
    """Number of experts of each member: a single number, or one number for each stage if the learner grows."""
    members: tuple[int, ...]
    """Number of members of the ensemble: a single number, or one number for each stage if the learner grows."""
    base: tuple[float | None, ...]
    """Perplexity of the base model at t = 1..4. None where the paper's table contains no number."""
    large: tuple[float | None, ...]
    """Perplexity of the large model at t = 1..4. None where the paper's table contains no number."""


def _single_value(t: int, value: float) -> tuple[float | None, ...]:
    return tuple(value if arrival == t else None for arrival in range(1, 5))


TABLE2 = (
    Row("sm", 1, 1, (4,), (1,), (28.57, 27.45, 26.91, 26.53), (22.47, 21.62, 20.84, 20.54)),
    Row("sm", 1, 1, (8,), (1,), (26.29, 25.29, 24.74, 24.40), (21.52, 20.38, 19.64, 19.22)),
    Row("sm", 1, 1, (12,), (1,), (25.63, 24.70, 24.17, 23.78), (21.63, 20.26, 19.44, 18.98)),
    Row("sm", 3, 1, (8,), (1,), _single_value(3, 25.18), _single_value(3, 19.29)),
    Row("sm", 3, 3, (8,), (1,), _single_value(3, 24.21), _single_value(3, 18.48)),
    Row("sm", 4, 1, (12,), (1,), _single_value(4, 24.41), _single_value(4, 19.01)),
    Row("sm", 4, 4, (12,), (1,), _single_value(4, 22.87), _single_value(4, 17.70)),
    Row("ens", 1, 1, (4,), (2,), (26.20, 25.12, 24.57, 24.35), (20.32, 19.55, 19.14, 18.92)),
    Row("ens", 1, 1, (4,), (4,), (25.03, 24.03, 23.45, 23.29), (19.27, 18.52, 18.22, 18.07)),
    Row("ens", 3, 1, (4,), (2,), _single_value(3, 25.52), _single_value(3, 19.11)),
    Row("ens", 3, 3, (4,), (2,), _single_value(3, 24.30), _single_value(3, 18.04)),
    Row("ens", 4, 1, (4,), (2,), _single_value(4, 25.49), _single_value(4, 19.03)),
    Row("ens", 4, 4, (4,), (2,), _single_value(4, 24.13), _single_value(4, 17.84)),
    Row("gens", 1, 1, (4,), (1, 2, 3, 4), (28.57, 26.27, 25.41, 25.01), (22.47, 20.25, 19.49, 19.18)),
    Row("gmoe", 1, 1, (4, 6, 8, 12), (1,), (28.57, 26.46, 25.66, 25.28), (22.47, 21.22, 20.39, 20.15)),
)


def row_of(group: RunGroup) -> Row | None:
    """Return the row of the paper's Table 2 that has the settings of this group of runs, or None if no row has them.

    They are the learner, wait, steps, experts and members. Nothing may be on that the paper's learners do not have,
    such as replay or an average. The data may be others. The result is None for vision runs, for waits that change
    during a run, and for a stream that is too short to compare: with fewer than 3 arrivals, or with fewer arrivals than
    the wait.
    """
    is_comparable = group.program == "language model" and not group.replay and group.has_fixed_wait
    if not is_comparable or _departs_from_paper(group) or group.num_arrivals < max(3, group.wait):
        return None
    steps = group.wait if group.settings.get("updates_per_mega_batch") else 1
    num_stages = max(1, -(-group.num_arrivals // group.wait))
    experts, members = sizes(group)
    for row in TABLE2:
        if (row.learner, row.wait, row.steps) != (group.learner, group.wait, steps):
            continue
        if _sizes_match(experts, row.experts, num_stages) and _sizes_match(members, row.members, num_stages):
            return row
    return None


def _departs_from_paper(group: RunGroup) -> bool:
    """Return True if a setting is on that the paper's learners do not have."""
    off = {**options("language model", learners_too=True), "from_scratch": False}
    return any(group.settings.get(name) not in (None, value) for name, value in off.items())


def sizes(group: RunGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two tuples: the numbers of experts per member, and the numbers of members, from the first stage on.

    Each has the number after the first stage, and then every new number after a change. Both are empty without a stage.
    """
    trained = group.mean_column("stage") > 0
    if not trained.any():
        return (), ()
    return _changes(group.mean_column("num_experts")[trained]), _changes(group.mean_column("num_members")[trained])


def _changes(values: Array) -> tuple[int, ...]:
    """Return the values as integers. Leave out NaN, and each value that is equal to the value before it."""
    return tuple(number for number, _ in groupby(round(value) for value in values if not np.isnan(value)))


def _sizes_match(ours: tuple[int, ...], paper: tuple[int, ...], num_stages: int) -> bool:
    """Return True if a group has the experts (or members) of a row at each of its stages. It may have fewer stages."""
    return ours == paper[: max(1, min(num_stages, len(paper)))] if len(paper) > 1 else ours == paper

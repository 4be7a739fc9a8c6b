"""What the paper reports (arXiv 2106.09563, appendix D, Table 2): test perplexity of its language models.

B = 4 mega-batches of 440M words, 120 000 updates a mega-batch. The paper's t0..t3 are our t = 1..4. Of one run
(Ens_w4, 4x steps, large) its Table 1 says 17.88 where Table 2 has 17.84: Table 2's is taken.
"""

from typing import NamedTuple

from fairseq_alma.report.runs import Array, Run


class Row(NamedTuple):
    """A row of Table 2."""

    learner: str
    wait: int
    steps: int
    """Times the updates of one mega-batch: 3 in `SM_w3 (3x steps)`."""
    experts: tuple[int, ...]
    """Of each member, stage by stage where they grow."""
    members: tuple[int, ...]
    base: tuple[float | None, ...]
    """Perplexity at t = 1..4; None where the learner is untrained or the table is blank."""
    large: tuple[float | None, ...]


def _last(t: int, value: float) -> tuple[float | None, ...]:
    return tuple(value if at == t else None for at in range(1, 5))


TABLE2 = (
    Row("sm", 1, 1, (4,), (1,), (28.57, 27.45, 26.91, 26.53), (22.47, 21.62, 20.84, 20.54)),
    Row("sm", 1, 1, (8,), (1,), (26.29, 25.29, 24.74, 24.40), (21.52, 20.38, 19.64, 19.22)),
    Row("sm", 1, 1, (12,), (1,), (25.63, 24.70, 24.17, 23.78), (21.63, 20.26, 19.44, 18.98)),
    Row("sm", 3, 1, (8,), (1,), _last(3, 25.18), _last(3, 19.29)),
    Row("sm", 3, 3, (8,), (1,), _last(3, 24.21), _last(3, 18.48)),
    Row("sm", 4, 1, (12,), (1,), _last(4, 24.41), _last(4, 19.01)),
    Row("sm", 4, 4, (12,), (1,), _last(4, 22.87), _last(4, 17.70)),
    Row("ens", 1, 1, (4,), (2,), (26.20, 25.12, 24.57, 24.35), (20.32, 19.55, 19.14, 18.92)),
    Row("ens", 1, 1, (4,), (4,), (25.03, 24.03, 23.45, 23.29), (19.27, 18.52, 18.22, 18.07)),
    Row("ens", 3, 1, (4,), (2,), _last(3, 25.52), _last(3, 19.11)),
    Row("ens", 3, 3, (4,), (2,), _last(3, 24.30), _last(3, 18.04)),
    Row("ens", 4, 1, (4,), (2,), _last(4, 25.49), _last(4, 19.03)),
    Row("ens", 4, 4, (4,), (2,), _last(4, 24.13), _last(4, 17.84)),
    Row("gens", 1, 1, (4,), (1, 2, 3, 4), (28.57, 26.27, 25.41, 25.01), (22.47, 20.25, 19.49, 19.18)),
    Row("gmoe", 1, 1, (4, 6, 8, 12), (1,), (28.57, 26.46, 25.66, 25.28), (22.47, 21.22, 20.39, 20.15)),
)


def row_of(run: Run) -> Row | None:
    """The row whose setting a run has: learner, wait, steps, experts and members, replay off. Its data may be others.

    Vision runs, and settings that are not in the table, have none.
    """
    if run.kind != "language model" or run.replay or run.num_arrivals < max(3, run.wait):
        return None
    steps = run.wait if run.settings.get("updates_per_mega_batch") else 1
    experts, members = sizes(run)
    for row in TABLE2:
        if (row.learner, row.wait, row.steps) != (run.learner, run.wait, steps):
            continue
        reached = max(1, -(-run.num_arrivals // run.wait))
        if _fits(experts, row.experts, reached) and _fits(members, row.members, reached):
            return row
    return None


def sizes(run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(experts of a member, members), each a number a stage that changed it, of the trained stages."""
    mean_experts, mean_members = run.mean("num_experts"), run.mean("num_members")
    trained = run.mean("stage") > 0
    if not trained.any():
        return (), ()
    return _changes(mean_experts[trained]), _changes(mean_members[trained])


def _changes(values: Array) -> tuple[int, ...]:
    changes: list[int] = []
    for value in values:
        if value == value and (not changes or changes[-1] != round(value)):
            changes.append(round(value))
    return tuple(changes)


def _fits(ours: tuple[int, ...], paper: tuple[int, ...], num_stages: int) -> bool:
    """Whether a run of this many stages had the paper's sizes as far as it went."""
    return ours == paper[: max(1, min(num_stages, len(paper)))] if len(paper) > 1 else ours == paper

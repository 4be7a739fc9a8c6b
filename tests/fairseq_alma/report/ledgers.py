"""Run folders for tests of reports, in the format of real runs, with numbers worked out by hand."""

import json

from fairseq_alma.core.ledger import Ledger, LedgerRow, Prequential, Scores, Spent
from fairseq_alma.report.reading import read_runs

VISION = {
    "dataset": "mnist", "split": "balanced", "learner": "sm", "wait": 1, "replay": False, "mega_batches": 4,
    "arrivals": None, "width": 4, "epochs": 10, "members": 5, "experts": 1, "grow_every": 1, "seed": 0, "out": "runs/x",
}  # fmt: skip
TEXT = {
    "stream": "/data/streams/books", "learner": "sm", "wait": 1, "replay": False, "mega_batches": 4, "experts": 4,
    "members": None, "grow_experts": None, "updates": 100, "updates_per_mega_batch": None, "arch": "switch_lm_base",
    "lr": 0.001, "seed": 0, "out": "runs/y", "evaluated_on": ["a", "b"],
}  # fmt: skip


def vision_rows(
    errors, wait=1, params=10, flops=100, validations=None, experts=None, load=None, prequential=None, last_waits=False
):
    """Return the ledger rows of a vision run that trains at every `wait`-th arrival, and at the last if not last_waits.

    Args:
        errors: error rate at t = 0, 1, ...
        wait: mega-batches gathered before a stage.
        params: number of parameters, or a list with one number per arrival.
        flops: training FLOPs per mega-batch that a stage trains on.
        validations: validation error rate of each arrival; by default equal to `errors`.
        experts: number of experts at each arrival.
        load: expert_load of each arrival.
        prequential: prequential error rate of each arrival, None for none; by default no arrival has one.
    """
    rows, stage, gathered = [], 0, 0
    for t, error in enumerate(errors):
        gathered += t > 0
        updated = t > 0 and (gathered == wait or (t == len(errors) - 1 and not last_waits))
        stage += updated
        validation = None
        if stage:
            validation = error if validations is None else validations[t]
        scores = Scores(
            num_params=_at_arrival(params, t), forward_flops=3, error_rate=error,
            validation_error_rate=validation, num_experts=experts[t] if experts else None, num_members=1,
            expert_load=load[t] if load else None,
        )  # fmt: skip
        spent = Spent(flops * gathered, gathered * 2, 1.5 * gathered) if updated else Spent()
        gathered = 0 if updated else gathered
        ahead = None
        if prequential and prequential[t] is not None:
            ahead = Prequential(prequential[t], loss=1.0)
        rows.append(LedgerRow(t, stage, updated, scores, spent, prequential=ahead))
    return rows


def text_rows(perplexities, wait=1, params=1000, flops=100, validations=None, experts=4, members=1, load=None):
    """Return the ledger rows of a language model. It has a validation perplexity at t = 0 too; see `vision_rows`."""
    rows, stage, gathered = [], 0, 0
    for t, perplexity in enumerate(perplexities):
        gathered += t > 0
        updated = t > 0 and (gathered == wait or t == len(perplexities) - 1)
        stage += updated
        num_experts = _at_arrival(experts, t)
        scores = Scores(
            num_params=_at_arrival(params, t), forward_flops=7, perplexity=perplexity, word_perplexity=2 * perplexity,
            validation_loss=1.0, validation_perplexity=perplexity if validations is None else validations[t],
            num_experts=num_experts, num_members=_at_arrival(members, t), overflow=0.25 if stage else 0.0,
            expert_load=load or [[0.25] * num_experts],
        )  # fmt: skip
        spent = Spent(flops * gathered, 10 * gathered, 2.0 * gathered) if updated else Spent()
        gathered = 0 if updated else gathered
        rows.append(LedgerRow(t, stage, updated, scores, spent))
    return rows


def _at_arrival(value, t):
    """Return the value at arrival t: an entry of a list, or the value itself if it never changes."""
    return value[t] if isinstance(value, list) else value


def write_run(
    folder, rows, command=("alma-vision", "dataset=mnist"), digests=None, wall_seconds=None, written=None, **settings
):
    """Write a run folder and return it. Its settings are VISION or TEXT, whichever fits the rows, and `settings`.

    `written` has further content of summary.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = VISION if rows and rows[0].scores.error_rate is not None else TEXT
    (folder / "settings.json").write_text(json.dumps({**base, **settings}))
    (folder / "provenance.json").write_text(json.dumps({"command": list(command), "commit": "abc123"}))
    if digests is not None:
        (folder / "arrivals.json").write_text(json.dumps({"digests": digests, "decisions": {}}))
    if wall_seconds is not None or written:
        (folder / "summary.json").write_text(json.dumps({"wall_seconds": wall_seconds, **(written or {})}))
    ledger = Ledger(folder / "ledger.jsonl", durable=False)
    for row in rows:
        ledger.append(row)
    return folder


def write_vision(folder, errors, **settings):
    """Write a vision run with these error rates. `settings` may have arguments of vision_rows, and row_experts."""
    row_arguments = {
        name: settings.pop(name)
        for name in ("params", "flops", "validations", "load", "prequential")
        if name in settings
    }
    if "row_experts" in settings:
        row_arguments["experts"] = settings.pop("row_experts")
    last_waits = settings.get("last_group") == "wait"
    rows = vision_rows(errors, wait=_group_size(settings), last_waits=last_waits, **row_arguments)
    return write_run(folder, rows, **{"mega_batches": len(errors) - 1, **settings})


def write_text(folder, perplexities, **settings):
    """Write the run of a language model with these perplexities. See `write_vision`."""
    row_arguments = {
        name: settings.pop(name) for name in ("params", "flops", "validations", "load") if name in settings
    }
    for name in ("experts", "members"):
        if f"row_{name}" in settings:
            row_arguments[name] = settings.pop(f"row_{name}")
    rows = text_rows(perplexities, wait=_group_size(settings), **row_arguments)
    return write_run(folder, rows, **{"mega_batches": len(perplexities) - 1, **settings})


def _group_size(settings):
    """Return the number of mega-batches of a stage: the wait, or 2 for waits that grow."""
    wait = settings.get("wait", 1)
    return wait if isinstance(wait, int) else 2


def only_comparison(*folders):
    """Read folders whose runs form a single comparison, and return it."""
    [comparison] = read_runs(folders).comparisons
    return comparison

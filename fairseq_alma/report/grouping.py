"""Group runs: runs that differ only in the seed form a RunGroup, and groups on the same stream form a Comparison."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_alma.core.catalogue import DEFAULT_MEGA_BATCHES, NOT_COMPARED, SEED_SETTINGS, Half, takes
from fairseq_alma.report.labels import MAX_CHARACTERS, printable, sort_key
from fairseq_alma.report.runs import Comparison, Run, RunGroup, hashable


class Stream(NamedTuple):
    """The properties that runs must have in common so that their numbers can be compared."""

    half: Half
    data: Any
    """Vision: (dataset, first arrival that CER counts). Language models: digests of the validation and test data."""
    split: Any
    """Name of the emnist split; None for all other data."""
    num_mega_batches: int
    """Number of mega-batches in the stream, B."""
    num_arrivals: int
    """Number of mega-batches that a run receives. It is smaller than B for a run on the first part of the stream."""


def group_runs(runs: Sequence[Run]) -> list[Comparison]:
    """Group runs by settings and by stream. The groups of each comparison are sorted by `labels.sort_key`."""
    groups_by_stream: dict[Stream, list[RunGroup]] = {}
    for stream, group in _groups_with_streams(runs):
        groups_by_stream.setdefault(stream, []).append(group)
    comparisons: list[Comparison] = []
    for stream, groups in sorted(groups_by_stream.items(), key=lambda item: repr(tuple(item[0]))):
        name, details = _title_parts(stream, groups[0])
        taken_titles = {comparison.name for comparison in comparisons}
        title, number = f"{name}, {details}", 1
        while title in taken_titles:
            number += 1
            title = f"{name} ({number}), {details}"
        # Append a number if another comparison has this slug. Two titles may differ only in characters that a slug
        # cannot contain.
        taken_slugs = {comparison.slug for comparison in comparisons}
        slug = base = re.sub(r"\W+", "_", title.replace(" = ", "")).strip("_")
        number = 1
        while slug in taken_slugs:
            number += 1
            slug = f"{base}_{number}"
        groups.sort(key=sort_key)
        comparisons.append(Comparison(stream.half, title, slug, stream.num_arrivals, tuple(groups)))
    return comparisons


def first_charged_arrival(settings: Mapping[str, Any]) -> int:
    """Return the first arrival that is included in CER: 0 if `cer_from=0` (as in v1 of the paper), otherwise 1."""
    return 0 if settings.get("cer_from") == 0 else 1


def _groups_with_streams(runs: Sequence[Run]) -> list[tuple[Stream, RunGroup]]:
    """Return every group together with its stream. Runs with equal settings, apart from the seeds, form one group.

    If two run folders have the same settings and also the same seeds, the second run is put into another group, which
    gets `repeat` = 1; a third run gets `repeat` = 2.
    """
    runs_of: dict[tuple, list[Run]] = {}
    streams: dict[tuple, Stream] = {}
    settings_of: dict[tuple, dict[str, Any]] = {}
    shared = _shared_settings(runs)
    for run in runs:
        stream = _stream_of(run)
        filled = {**shared.get((stream, _learner_of(run.settings)), {}), **run.settings}
        compared = _compared_settings(stream.half, filled)
        settings = tuple(sorted((name, hashable(value)) for name, value in compared.items()))
        # Runs that set different seed options (`seed` only, or `seed` and `data_seed`) belong to different groups.
        given = tuple(name for name in SEED_SETTINGS if run.settings.get(name) is not None)
        repeat = 0
        while _seeds_of(run) in map(_seeds_of, runs_of.get((stream, settings, given, repeat), [])):
            repeat += 1
        key = (stream, settings, given, repeat)
        runs_of.setdefault(key, []).append(run)
        streams[key], settings_of[key] = stream, compared
    groups = []
    for key, members in runs_of.items():
        members.sort(key=lambda run: (run.seed is None, run.seed, str(run.folder)))
        stream = streams[key]
        group = RunGroup(stream.half, stream.num_arrivals, tuple(members), settings_of[key], repeat=key[-1])
        groups.append((stream, group))
    return groups


def _shared_settings(runs: Sequence[Run]) -> dict[tuple[Stream, str], dict[str, Any]]:
    """Return the values that complete the settings of runs from older releases.

    Such runs did not record settings that were added later. Without these settings they would not be grouped with
    newer runs that differ only in the seed. A setting is completed for a learner if all runs on the same stream that
    recorded it have the same value. One case is excluded: if no run of this learner recorded the setting, and only
    one learner did, then the setting may belong to that learner alone, for example to a plugin.

    Returns:
        A dictionary (stream, learner) -> name of the setting -> value.
    """
    values: dict[Stream, dict[str, dict[Any, Any]]] = {}
    learners: dict[Stream, dict[str, set[str]]] = {}
    for run in runs:
        stream, learner = _stream_of(run), _learner_of(run.settings)
        for name, value in run.settings.items():
            values.setdefault(stream, {}).setdefault(name, {})[hashable(value)] = value
            learners.setdefault(stream, {}).setdefault(name, set()).add(learner)
    return {
        (stream, learner): {
            name: next(iter(different.values()))
            for name, different in values[stream].items()
            if len(different) == 1 and (len(learners[stream][name]) > 1 or learner in learners[stream][name])
        }
        for stream in values
        for learner in set().union(*learners[stream].values())
    }


def _seeds_of(run: Run) -> tuple:
    return tuple(run.settings.get(name) for name in SEED_SETTINGS)


def _learner_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("learner"))


def _compared_settings(half: Half, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the results, without the seeds and settings that the learner does not have."""
    learner = _learner_of(settings)
    return {
        name: value
        for name, value in settings.items()
        if name not in (*NOT_COMPARED, *SEED_SETTINGS) and takes(half, learner, name)
    }


def _stream_of(run: Run) -> Stream:
    settings, num_arrivals = run.settings, run.num_arrivals
    if "dataset" not in settings:
        evaluated_on = hashable(settings.get("evaluated_on") or Path(str(settings.get("stream", "stream"))).name)
        return Stream("language model", evaluated_on, None, num_arrivals, num_arrivals)
    num_mega_batches = None
    if settings.get("arrivals"):
        num_mega_batches = settings.get("mega_batches")
        if not isinstance(num_mega_batches, int):
            num_mega_batches = DEFAULT_MEGA_BATCHES.get(str(settings["dataset"]), -1)
    split = hashable(settings.get("split")) if settings["dataset"] == "emnist" else None
    data = (hashable(settings["dataset"]), first_charged_arrival(settings))
    return Stream("vision", data, split, num_mega_batches or num_arrivals, num_arrivals)


def _title_parts(stream: Stream, group: RunGroup) -> tuple[str, str]:
    """Return the two parts of a title: name of the data, such as `mnist`, and details, such as `first 2 of B = 500`."""
    count = f"B = {stream.num_arrivals}"
    if stream.num_mega_batches != stream.num_arrivals:
        count = f"first {stream.num_arrivals} of B = {stream.num_mega_batches}"
    if stream.half == "language model":
        path = Path(str(group.runs[0].settings.get("stream", "stream")))
        # Many stream folders are called `stream`, so use the name of the parent folder instead.
        name = path.parent.name if path.name == "stream" and path.parent.name else path.name
    else:
        dataset, first_charged = stream.data
        name = f"{dataset} {stream.split}" if stream.split else str(dataset)
        if first_charged == 0:
            count += ", CER from t = 0"
    return printable(name)[:MAX_CHARACTERS], count

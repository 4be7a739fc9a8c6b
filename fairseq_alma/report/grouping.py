"""Put runs into groups and comparisons.

Runs that differ only in the seed form a RunGroup. Groups on the same stream form a Comparison.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_alma.core.catalogue import Half, not_compared, settings_that_are, takes
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.printing import printable
from fairseq_alma.report.runs import MAX_CHARACTERS, Comparison, Run, RunGroup, hashable, learner_position


class Stream(NamedTuple):
    """Properties of a stream. The results of two runs can be compared only if all these properties are equal."""

    half: Half
    data: Any
    """The data of the stream.

    Vision: (dataset, number of its test set, first arrival that CER includes, setting `order`).
    Language models: digests (hashes) of the validation and test data. If the settings contain no digests, the name of
    the stream folder.
    """
    num_mega_batches: int
    """Number of mega-batches in the stream, B."""
    num_arrivals: int
    """Number of mega-batches that a run receives: B, or fewer if the run uses only the first part of the stream."""


def group_runs(runs: Sequence[Run]) -> list[Comparison]:
    """Put runs into groups, and return one Comparison for each stream: the groups whose runs learn from this stream.

    The groups of a Comparison are sorted by learner in the paper's order, and then by size, wait, replay and other
    settings.
    """
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
        # A slug is a folder name that is made from the title. Characters other than letters and digits are replaced, so
        # two different titles may have the same slug. If the slug is already taken, append a number to it, so that
        # each comparison has a separate folder.
        taken_slugs = {comparison.slug for comparison in comparisons}
        slug = base = re.sub(r"\W+", "_", title.replace(" = ", "")).strip("_")
        number = 1
        while slug in taken_slugs:
            number += 1
            slug = f"{base}_{number}"
        groups.sort(key=_sort_key)
        comparisons.append(Comparison(stream.half, title, slug, stream.num_arrivals, tuple(groups)))
    return comparisons


def _sort_key(group: RunGroup) -> tuple:
    """Return the sort key of a group. Numbers come before texts, because Python cannot compare the two."""
    sizes = [group.settings.get(name) for name in settings_that_are("size")]
    size = tuple((0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for value in sizes)
    others = [(name, repr(value)) for name, value in sorted(group.settings.items())]
    position = learner_position(group.learner)
    return (position, group.learner, size, group.wait, bool(group.replay), repr(group.replay), others, group.repeat)


def with_numbered_test_sets(runs: Sequence[Run]) -> list[Run]:
    """Number the test sets of vision runs (`Run.test_set`), so that only runs with the same one are compared.

    A dataset is identified by its name, for example the path of a file. If the file was replaced between two runs, the
    recorded digests of their test sets differ. Runs with another `image_size` have another digest, too, so digests are
    compared only among runs of one size.
    """
    digests: dict[tuple, list[str]] = {}
    for run in runs:
        if digest := run.settings.get("test_digest"):
            found = digests.setdefault(_images_of(run), [])
            found += [] if digest in found else [digest]
    numbered = []
    for run in runs:
        found, digest = digests.get(_images_of(run), []), run.settings.get("test_digest")
        number = found.index(digest) if digest else len(found) if len(found) > 1 else 0
        numbered.append(replace(run, test_set=number))
    return numbered


def _images_of(run: Run) -> tuple:
    names = ("dataset", "image_size", "order")
    return tuple(hashable(run.settings.get(name)) for name in names)


def first_charged_arrival(settings: Mapping[str, Any]) -> int:
    """Return the first arrival that CER includes: 0 with `cer_from=0`, as in the paper's first version; otherwise 1."""
    return 0 if settings.get("cer_from") == 0 else 1


def _groups_with_streams(runs: Sequence[Run]) -> list[tuple[Stream, RunGroup]]:
    """Put runs into groups, and return each group with its stream. Runs in a group differ only in the seeds.

    If several runs have equal settings and also equal seeds, a group contains only one of them. The first run belongs
    to the group with `repeat` = 0, the second run to the group with `repeat` = 1, and so on.
    """
    runs_of: dict[tuple, list[Run]] = {}
    streams: dict[tuple, Stream] = {}
    settings_of: dict[tuple, dict[str, Any]] = {}
    for run in runs:
        stream = _stream_of(run)
        compared = {**_compared_settings(stream.half, run.settings), "last_group": _last_group(run)}
        settings = tuple(sorted((name, hashable(value)) for name, value in compared.items()))
        repeat = 0
        while any(run.seed == other.seed for other in runs_of.get((stream, settings, repeat), [])):
            repeat += 1
        key = (stream, settings, repeat)
        runs_of.setdefault(key, []).append(run)
        streams[key], settings_of[key] = stream, compared
    groups = []
    for key, members in runs_of.items():
        members.sort(key=lambda run: (run.seed is None, run.seed, str(run.folder)))
        stream = streams[key]
        group = RunGroup(stream.half, stream.num_arrivals, tuple(members), settings_of[key], repeat=key[-1])
        groups.append((stream, group))
    return groups


def _last_group(run: Run) -> str:
    """Return what happened to the last mega-batches: "wait" if no stage has trained on them, otherwise "train".

    The setting of this name may change when a run is continued, and its default depends on the stream.
    """
    last_stage = int((run.stage == run.stage.max()).argmax())  # the arrival at which it was trained; 0 if there is none
    return "wait" if run.is_finished and last_stage < run.num_arrivals else "train"


def _learner_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("learner"))


def _compared_settings(half: Half, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal within a group: those that the learner has and that affect its results.

    The seeds are left out.

    Args:
        half: which command made the run: "vision" for alma-vision, "language model" for alma-lm.
        settings: all settings of the run.
    """
    learner = _learner_of(settings)
    return {name: value for name, value in settings.items() if not not_compared(name) and takes(half, learner, name)}


def _stream_of(run: Run) -> Stream:
    """Return the properties of the stream of a run.

    A run with the setting `dataset` is a vision run, and a run without it is a language model run.
    """
    settings, num_arrivals = run.settings, run.num_arrivals
    if "dataset" not in settings:
        evaluated_on = hashable(settings.get("evaluated_on") or Path(str(settings.get("stream", "stream"))).name)
        return Stream("language model", evaluated_on, run.longest or num_arrivals, num_arrivals)
    num_mega_batches = None
    # With the setting `arrivals`, a run may receive only the first mega-batches of the stream, so `num_arrivals` may
    # differ from the length of the stream. Take the length from the setting `mega_batches` or, if the user did not set
    # it, from the default for the dataset.
    if settings.get("arrivals"):
        num_mega_batches = settings.get("mega_batches")
        if not isinstance(num_mega_batches, int):
            entry = entry_of(str(settings["dataset"]))
            num_mega_batches = (entry.mega_batches if entry else None) or -1
    order = str(settings.get("order", "random"))
    data = (hashable(settings["dataset"]), run.test_set, first_charged_arrival(settings), order)
    return Stream("vision", data, num_mega_batches or run.longest or num_arrivals, num_arrivals)


def runs_to_shorten(runs: Sequence[Run]) -> dict[int, tuple[int, int]]:
    """Find runs on streams that have grown, and the arrivals over which they can be compared with shorter runs.

    Runs on one stream with 6, 7 and 8 mega-batches are compared over the first 6. A run with less than half as many
    arrivals as the longest one is not compared with it, because one short trial must not shorten all other runs.

    Returns:
        For each run that has to be compared with runs of other lengths, by its index in `runs`: the number of arrivals
        that they share, and the number of arrivals of the longest run.
    """
    families: dict[Stream, list[int]] = {}
    for index, run in enumerate(runs):
        if (family := _family_of(run)) is not None:
            families.setdefault(family, []).append(index)
    shortened: dict[int, tuple[int, int]] = {}
    for indices in families.values():
        rest = sorted(indices, key=lambda index: -runs[index].num_arrivals)
        while rest:
            longest = runs[rest[0]].num_arrivals
            together = [index for index in rest if 2 * runs[index].num_arrivals >= longest]
            shared = runs[together[-1]].num_arrivals
            if shared < longest:
                shortened |= dict.fromkeys(together, (shared, longest))
            rest = rest[len(together) :]
    return shortened


def without_beginnings(runs: Sequence[Run], lengths: Mapping[Path, int]) -> tuple[list[Run], list[str]]:
    """Leave out runs that are only the beginning of another run: equal settings and seeds, but fewer mega-batches.

    Args:
        runs: the runs, with the arrivals that they share.
        lengths: run folder -> number of arrivals of the complete run, for runs on streams of several lengths.

    Returns:
        The other runs, and one message for each run that is left out.
    """
    longest: dict[tuple, Run] = {}
    keys: list[tuple] = []
    for run in runs:
        stream = _stream_of(run)
        compared = _compared_settings(stream.half, run.settings)
        settings = tuple(sorted((name, hashable(value)) for name, value in compared.items()))
        keys.append((stream, settings, run.seed))
        before = longest.get(keys[-1])
        if before is None or lengths.get(run.folder, 0) > lengths.get(before.folder, 0):
            longest[keys[-1]] = run
    kept, messages = [], []
    for key, run in zip(keys, runs, strict=True):
        other = longest[key]
        if lengths.get(run.folder, 0) < lengths.get(other.folder, 0):
            messages.append(f"{run.folder} is left out: {other.folder} is the same run over more mega-batches")
        else:
            kept.append(run)
    return kept, messages


def _family_of(run: Run) -> Stream | None:
    """Return the stream of a run without its length, or None if the stream does not grow.

    A stream of text grows by `alma-prep --extend`, which changes neither the mega-batches nor the test set. In vision,
    a stream grows if each folder is a mega-batch. If the user limited the number of mega-batches, the run is compared
    only with runs of the same length.
    """
    grows = run.settings.get("order") == "folders" if "dataset" in run.settings else run.settings.get("evaluated_on")
    if not grows or run.settings.get("mega_batches") or run.settings.get("arrivals"):
        return None
    return _stream_of(run)._replace(num_mega_batches=0, num_arrivals=0)


def _title_parts(stream: Stream, group: RunGroup) -> tuple[str, str]:
    """Return the two parts of the title of a comparison: name of the data and number of arrivals.

    For example, `mnist` and `first 2 of B = 500`.
    """
    count = f"B = {stream.num_arrivals}"
    if stream.num_mega_batches != stream.num_arrivals:
        count = f"first {stream.num_arrivals} of B = {stream.num_mega_batches}"
    if stream.half == "language model":
        path = Path(str(group.runs[0].settings.get("stream", "stream")))
        # Many stream folders have the name `stream`. For these, use the name of the parent folder.
        name = path.parent.name if path.name == "stream" and path.parent.name else path.name
    else:
        dataset, _, first_charged, order = stream.data
        name = str(dataset)
        if order != "random":
            name += f" in order of {order}"
        if first_charged == 0:
            count += ", CER from t = 0"
    return printable(name)[:MAX_CHARACTERS], count

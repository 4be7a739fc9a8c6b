"""Put runs into groups and comparisons.

Runs that differ only in the seed form a RunGroup. Groups on the same stream form a Comparison.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_alma.core.catalogue import Program, not_compared, settings_that_are, takes
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.printing import printable
from fairseq_alma.core.waiting import arrivals_of_stages
from fairseq_alma.report.runs import MAX_CHARACTERS, Comparison, Run, RunGroup, hashable, learner_position


class Stream(NamedTuple):
    """Properties of a stream. The results of two runs can be compared only if all these properties are equal."""

    program: Program
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
    comparisons: list[Comparison] = []
    for stream, groups in sorted(_groups_of_streams(runs).items(), key=lambda item: repr(tuple(item[0]))):
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
        comparisons.append(Comparison(stream.program, title, slug, stream.num_arrivals, tuple(groups)))
    return comparisons


def _sort_key(group: RunGroup) -> tuple:
    """Return the sort key of a group. Numbers come before texts, because Python cannot compare the two."""
    sizes = [group.settings.get(name) for name in settings_that_are("size")]
    size = tuple((0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for value in sizes)
    others = [(name, repr(value)) for name, value in sorted(group.settings.items())]
    position = learner_position(group.learner)
    return (position, group.learner, size, group.wait, bool(group.replay), repr(group.replay), others, group.repeat)


def _test_sets(runs: Sequence[Run]) -> dict[tuple, list[str]]:
    """Return the digests of the test sets of vision runs: properties of the images (`_images_of`) -> digests.

    If the file of a dataset was replaced between two runs, their recorded digests differ. Runs with another
    `image_size` have another digest, too, so digests are compared only among runs of one size.
    """
    digests: dict[tuple, list[str]] = {}
    for run in runs:
        if digest := run.settings.get("test_digest"):
            found = digests.setdefault(_images_of(run), [])
            found += [] if digest in found else [digest]
    return digests


def _images_of(run: Run) -> tuple:
    names = ("dataset", "image_size", "order")
    return tuple(hashable(run.settings.get(name)) for name in names)


def first_charged_arrival(settings: Mapping[str, Any]) -> int:
    """Return the first arrival that CER includes: 0 with `cer_from=0`, as in the paper's first version; otherwise 1."""
    return 0 if settings.get("cer_from") == 0 else 1


def _groups_of_streams(runs: Sequence[Run]) -> dict[Stream, list[RunGroup]]:
    """Put runs into groups, and return the groups of each stream. Runs in a group differ only in the seeds."""
    runs_of: dict[tuple, list[Run]] = {}
    settings_of: dict[tuple, dict[str, Any]] = {}
    test_sets, trained_on = _test_sets(runs), _trained_on(runs)
    for run in runs:
        stream, learner = _stream_of(run, test_sets), str(run.settings.get("learner"))
        compared = {
            name: value
            for name, value in {**run.settings, "last_group": _last_group(run)}.items()
            if name == "last_group" or (not not_compared(name) and takes(stream.program, learner, name))
        }
        compared |= _other_path(run, compared["last_group"]) | trained_on.get(run.folder, {})
        repeat = 0
        while any(run.seed == other.seed for other in runs_of.get((stream, hashable(compared), repeat), [])):
            repeat += 1
        key = (stream, hashable(compared), repeat)
        runs_of.setdefault(key, []).append(run)
        settings_of[key] = compared
    # So that labels show the difference from groups without these names.
    added = {"skip_mega_batches", "stages_at", "stream"}
    for name in added & {name for settings in settings_of.values() for name in settings}:
        for settings in settings_of.values():
            settings.setdefault(name, None)
    groups: dict[Stream, list[RunGroup]] = {}
    for key, members in runs_of.items():
        members.sort(key=lambda run: (run.seed is None, run.seed, str(run.folder)))
        stream = key[0]
        group = RunGroup(stream.program, stream.num_arrivals, tuple(members), settings_of[key], repeat=key[-1])
        groups.setdefault(stream, []).append(group)
    return groups


def _trained_on(runs: Sequence[Run]) -> dict[Path, dict[str, Any]]:
    """Return for each run folder which stream its language model learns from, if others differ only in training text.

    For example, a stream and its copy without some documents have the same held-out text. Runs that do not say on what
    they were trained are left out.
    """
    of_stream: dict[tuple, dict[tuple[str, ...], list[Run]]] = {}
    for run in runs:
        if run.digests and "dataset" not in run.settings:
            of_stream.setdefault(tuple(_stream_of(run, {})), {}).setdefault(run.digests, []).append(run)
    found: dict[Path, dict[str, Any]] = {}
    for alike in (one for one in of_stream.values() if len(one) > 1):
        names: list[str] = []
        for members in alike.values():
            names.append(_stream_name(members[0].settings))
            again = names.count(names[-1])
            name = names[-1] if again == 1 else f"{names[-1]} ({again})"
            found |= {run.folder: {"stream": name} for run in members}
    return found


def _stream_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the stream folder of a language model. If it is `stream`, that of the folder above it."""
    path = Path(str(settings.get("stream", "stream")))
    return path.parent.name if path.name == "stream" and path.parent.name else path.name


def _other_path(run: Run, last_group: str) -> dict[str, Any]:
    """Return which mega-batches a run has skipped, and at which arrivals its stages were trained if not as it waits.

    A run is trained at other arrivals if it was continued after its last mega-batches had been trained on.
    """
    if skipped := [row.t for row in run.rows if row.is_skipped]:
        return {"skip_mega_batches": skipped}
    wait, num_known = run.settings.get("wait", 1), run.settings.get("known_mega_batches") or 0
    trained = [row.t for row in run.rows if row.updated]
    expected = arrivals_of_stages(run.num_arrivals, wait, None, last_group == "train", num_known)
    return {} if wait == "auto" or not run.is_finished or trained == expected else {"stages_at": trained}


def _last_group(run: Run) -> str:
    """Return what happened to the last mega-batches: "wait" if no stage has trained on them, otherwise "train".

    The setting of this name may change when a run is continued, and its default depends on the stream. An unfinished
    run counts like its finished seeds if the setting is given.
    """
    if not run.is_finished and run.settings.get("last_group") == "wait":
        wait, num_known = run.settings.get("wait", 1), run.settings.get("known_mega_batches") or 0
        stages = [] if wait == "auto" else arrivals_of_stages(run.num_arrivals, wait, None, False, num_known)
        return "wait" if stages[-1:] != [run.num_arrivals] else "train"
    last_stage = int((run.stage == run.stage.max()).argmax())  # the arrival at which it was trained; 0 if there is none
    return "wait" if run.is_finished and last_stage < run.num_arrivals else "train"


def _stream_of(run: Run, test_sets: Mapping[tuple, Sequence[str]]) -> Stream:
    """Return the properties of the stream of a run. For `test_sets`, see `_test_sets`.

    A run with the setting `dataset` is a vision run, and a run without it is a language model run.
    """
    settings, num_arrivals = run.settings, run.num_arrivals
    if "dataset" not in settings:
        evaluated_on = hashable(settings.get("evaluated_on") or Path(str(settings.get("stream", "stream"))).name)
        return Stream("language model", evaluated_on, num_arrivals, num_arrivals)
    # With the setting `arrivals`, a run may receive only the first mega-batches of the stream, so `num_arrivals` may
    # differ from the length of the stream. Take the length from the setting `mega_batches` or, if the user did not set
    # it, from the default for the dataset.
    num_mega_batches = num_arrivals
    if settings.get("arrivals"):
        entry, given = entry_of(str(settings["dataset"])), settings.get("mega_batches")
        num_mega_batches = given if isinstance(given, int) else (entry.mega_batches if entry else None) or -1
    # A run without a digest is compared with the others if these have only one.
    digests, digest = test_sets.get(_images_of(run), []), settings.get("test_digest")
    test_set = digests.index(digest) if digest else len(digests) if len(digests) > 1 else 0
    data = (
        hashable(settings["dataset"]),
        test_set,
        first_charged_arrival(settings),
        str(settings.get("order", "random")),
    )
    return Stream("vision", data, num_mega_batches, num_arrivals)


def _title_parts(stream: Stream, group: RunGroup) -> tuple[str, str]:
    """Return the two parts of the title of a comparison, for example `mnist` and `first 2 of B = 500`."""
    count = f"B = {stream.num_arrivals}"
    if stream.num_mega_batches != stream.num_arrivals:
        count = f"first {stream.num_arrivals} of B = {stream.num_mega_batches}"
    if stream.program == "language model":
        name = _stream_name(group.runs[0].settings)
    else:
        dataset, _, first_charged, order = stream.data
        name = str(dataset)
        if order != "random":
            name += f" in order of {order}"
        if first_charged == 0:
            count += ", CER from t = 0"
    return printable(name)[:MAX_CHARACTERS], count

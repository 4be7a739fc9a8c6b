"""Run folders as they lie on disk, read once: one Run a setting, with its seeds; one Comparison a stream.

Nothing here trusts a file: a run may be written at this moment, killed long ago, damaged, or of another release.
"""

import multiprocessing
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.lease import is_held
from fairseq_alma.core.ledger import Ledger, LedgerRow, summarize
from fairseq_alma.core.run_record import find_runs

Kind = Literal["vision", "language model"]
Array = np.ndarray

SEED_SETTINGS = ("seed", "data_seed", "initialisation_seed", "order_seed")
PLACE_SETTINGS = (
    "out", "stream", "data_root", "device", "threads", "parallel", "share", "routing_examples", "keep_stages", "preset",
    "seeds", "stacked_from", "evaluated_on", "dictionary", "mega_batches", "arrivals", "tensorboard", "cer_from",
)  # fmt: skip
"""Where a run lies, on which machine and how far it goes: not what is computed. B and the stream are compared apart."""


MANY = 200
"""Run folders from which on they are read side by side."""


@dataclass(frozen=True)
class Seed:
    """One run folder: the curve of one seed. Arrays have an entry an arrival, t = 0..last."""

    folder: Path
    seed: int | None
    quality: Array
    """Test error rate (a fraction) or test perplexity."""
    validation: Array
    """Validation error rate or perplexity; NaN before the first stage where there is none."""
    num_params: Array
    forward_flops: Array
    train_flops: Array
    """Since the arrival before; float64, for curves: sums that must be exact are in `summary`."""
    num_updates: Array
    train_seconds: Array
    stage: Array
    num_members: Array
    num_experts: Array
    """Of each member; NaN where there are none."""
    overflow: Array
    loads: Mapping[int, list[list[float]]]
    """t of an update -> share of the validation examples or tokens that each expert got, layer by layer."""
    summary: Mapping[str, Any]
    """The scalars of the ledger (core.ledger.summarize), and wall_seconds if the run noted it."""
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    is_running: bool

    @property
    def last_t(self) -> int:
        return len(self.quality) - 1

    def routings(self) -> list[tuple[int, Path]]:
        """(stage, routing.npz) of the stages that wrote one, in order."""
        found = []
        for path in sorted((self.folder / "stages").glob("stage_*/routing.npz")):
            if number := re.fullmatch(r"stage_(\d+)", path.parent.name):
                found.append((int(number[1]), path))
        return found


@dataclass(frozen=True)
class Run:
    """One setting and its seeds."""

    kind: Kind
    num_arrivals: int
    """B, or how many of the B were asked for."""
    seeds: tuple[Seed, ...]
    settings: Mapping[str, Any]
    """What makes it this run and no other: without seeds, places and devices."""
    repeat: int = 0
    """Above 0: the same settings and seed were found in another folder too."""

    @cached_property
    def is_finished(self) -> bool:
        return any(seed.last_t >= self.num_arrivals for seed in self.seeds)

    @cached_property
    def counted(self) -> tuple[Seed, ...]:
        """The seeds that numbers and curves are of: those that are finished; where none is, all that have begun."""
        finished = tuple(seed for seed in self.seeds if seed.last_t >= self.num_arrivals)
        return finished or tuple(seed for seed in self.seeds if seed.last_t > 0) or self.seeds

    @property
    def is_running(self) -> bool:
        return any(seed.is_running for seed in self.seeds)

    @property
    def last_t(self) -> int:
        """The last arrival of all counted seeds."""
        return min(seed.last_t for seed in self.counted)

    @property
    def learner(self) -> str:
        return str(self.settings.get("learner", "?"))

    @property
    def wait(self) -> int:
        wait = self.settings.get("wait", 1)
        return wait if isinstance(wait, int) else 1

    @property
    def replay(self) -> Any:
        return self.settings.get("replay", False)

    @property
    def folder(self) -> Path:
        """Of all seeds."""
        if len(self.seeds) == 1:
            return self.seeds[0].folder
        return Path(os.path.commonpath([seed.folder for seed in self.seeds]))

    @property
    def command(self) -> list[str]:
        """That makes it again, as it was typed."""
        command = self.seeds[0].provenance.get("command", [])
        return [str(word) for word in command] if isinstance(command, list) else []

    def mean(self, name: str) -> Array:
        """A column of the ledger, mean over the counted seeds, t = 0..last_t."""
        return self.stacked(name).mean(axis=0)

    def stacked(self, name: str) -> Array:
        """[counted seeds, last_t + 1]."""
        return np.stack([getattr(seed, name)[: self.last_t + 1] for seed in self.counted])


@dataclass(frozen=True)
class Comparison:
    """Runs whose numbers may stand side by side: one kind of learner, one stream, one B."""

    kind: Kind
    name: str
    """`mnist, B = 500`."""
    slug: str
    """The same, as the name of a folder."""
    num_arrivals: int
    runs: tuple[Run, ...]

    @property
    def is_vision(self) -> bool:
        return self.kind == "vision"

    @cached_property
    def varied(self) -> list[str]:
        """Settings that are not the same in all runs, learner and wait first."""
        names = {name for run in self.runs for name in run.settings}
        first = ["learner", "wait", "replay", "width", "arch", "experts", "members"]
        ordered = [*first, *sorted(names - set(first))]

        def values(name: str) -> set:
            # A setting that a learner does not take is not there: that is no difference to those that take it.
            return {_hashable(run.settings[name]) for run in self.runs if name in run.settings}

        return [name for name in ordered if len(values(name)) > 1]

    def is_told_by_wait(self, name: str) -> bool:
        """Whether learner and wait fix this setting: how often a mixture grows goes with the wait, mostly."""
        values: dict[tuple, set] = {}
        for run in self.runs:
            values.setdefault((run.learner, run.wait), set()).add(_hashable(run.settings.get(name)))
        return all(len(found) == 1 for found in values.values())

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.is_finished]


@dataclass
class Found:
    """All that was read."""

    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What could not be read, with file and line."""
    notes: list[str] = field(default_factory=list)
    """What was left out for a good reason."""

    is_going_on: bool = False
    """Whether a process holds any of the run folders, those without an arrival among them."""


def read_runs(folders: Iterable[str | Path]) -> Found:
    """All runs at or below `folders`.

    Raises:
        RunError: a folder is missing, or there is no run in any of them.
    """
    found = Found()
    paths: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise RunError(f"{folder} is no folder: give run folders (or folders of them), as alma-lm out= made them")
        below = find_runs(folder)
        if not below:
            found.faults.append(f"{folder} holds no run: no settings.json is at or below it")
        paths.update(dict.fromkeys(path.resolve() for path in below))
    found.is_going_on = any(_is_held(path) for path in paths)
    seeds: list[tuple[Seed, int]] = []
    for path, seed in zip(paths, _read_all(list(paths)), strict=True):
        if isinstance(seed, str):
            found.faults.append(seed)
        elif seed.last_t < 0:
            found.notes.append(f"{path} has no arrival yet")
        else:
            seeds.append((seed, _num_arrivals(seed)))
    if not seeds:
        said = "".join(f"\n  {one}" for one in [*found.faults, *found.notes])
        raise RunError(f"nothing to report on:{said}")
    found.comparisons = _compare(_gather(seeds))
    return found


def _read_all(folders: Sequence[Path]) -> list[Seed | str]:
    """Each of them, or why it cannot be read; many of them on all cores."""
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(folders) < MANY or num_processes < 2:
        return [_read_or_say_why(folder) for folder in folders]
    # Fresh processes: what is imported here may have threads.
    with ProcessPoolExecutor(min(num_processes, 16), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_read_or_say_why, folders, chunksize=16))


def _read_or_say_why(folder: Path) -> Seed | str:
    try:
        return read_seed(folder)
    except (RunError, OSError) as error:
        return str(error)
    except Exception as error:  # whatever else may stand in a file: one run must not cost the others
        return f"{folder} cannot be read ({error!r}): restore its files"


def read_seed(folder: Path) -> Seed:
    """One run folder.

    Raises:
        RunError: settings or ledger are damaged: file and line.
    """
    settings = read_json(folder / "settings.json")
    if not isinstance(settings, dict):
        raise RunError(f"{folder / 'settings.json'} holds no settings: restore it or remove {folder}")
    if not isinstance(settings.get("learner", ""), str):
        raise RunError(f"{folder / 'settings.json'}: learner is {settings['learner']!r}, a name was wanted")
    path = folder / "ledger.jsonl"
    ledger = Ledger(path if path.exists() or not path.with_name("ledger.jsonl.gz").exists() else f"{path}.gz")
    rows = ledger.rows()
    quality = "error_rate"
    if rows and rows[0].scores.error_rate is None:
        quality = "perplexity"
    columns = _columns(ledger.path, rows, quality)
    summary = dict(summarize(rows, _cer_from(settings))) if len(rows) > 1 else {}
    wall_seconds = _noted(folder / "summary.json").get("wall_seconds")
    if isinstance(wall_seconds, int | float) and isfinite(wall_seconds):
        summary["wall_seconds"] = wall_seconds
    return Seed(
        folder=folder,
        seed=settings.get("seed") if isinstance(settings.get("seed"), int) else None,
        loads=_loads(ledger.path, rows),
        summary=summary,
        settings=settings,
        provenance=_noted(folder / "provenance.json"),
        is_running=_is_held(folder),
        **columns,
    )


def _is_held(folder: Path) -> bool:
    # Several seeds are held by one lease, of the folder above.
    return is_held(folder) or (folder.name.startswith("seed_") and is_held(folder.parent))


def is_anyone_at_work(folders: Iterable[str | Path]) -> bool:
    """Whether a process holds a run folder at or below these."""
    return any(_is_held(path.resolve()) for folder in folders for path in find_runs(Path(folder)))


def _noted(path: Path) -> dict[str, Any]:
    """What a file says that a report can do without: nothing, if it is damaged."""
    try:
        value = read_json(path)
    except (RunError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _loads(path: Path, rows: Sequence[LedgerRow]) -> dict[int, list[list[float]]]:
    """Raises RunError: they are no lists of numbers, layer by layer."""
    loads = {row.t: row.scores.expert_load for row in rows if row.updated and row.scores.expert_load}
    for t, layers in loads.items():
        for layer in layers if isinstance(layers, list) else [None]:
            if not isinstance(layer, list) or not layer or not set(map(type, layer)) <= {int, float}:
                raise RunError(f"{path}, line {t + 1}: expert_load holds {layer!r}, a list of numbers was wanted")
    return {t: layers for t, layers in loads.items() if layers is not None}


def _columns(path: Path, rows: Sequence[LedgerRow], quality: str) -> dict[str, Array]:
    """Each a float64 array over arrivals. Raises RunError: a value that is no number, with file and line."""
    wanted = {
        "quality": ("scores", quality), "validation": ("scores", f"validation_{quality}"),
        "num_params": ("scores", "num_params"), "forward_flops": ("scores", "forward_flops"),
        "num_members": ("scores", "num_members"), "num_experts": ("scores", "num_experts"),
        "overflow": ("scores", "overflow"), "train_flops": ("spent", "train_flops"),
        "num_updates": ("spent", "num_updates"), "train_seconds": ("spent", "train_seconds"),
    }  # fmt: skip
    may_lack = ("validation", "num_members", "num_experts", "overflow")
    columns = {"stage": np.array([row.stage for row in rows])}
    scores, spent, nan = [row.scores for row in rows], [row.spent for row in rows], float("nan")
    for column, (part, name) in wanted.items():
        of_part = attrgetter(name)
        values = [of_part(one) for one in (scores if part == "scores" else spent)]
        if not set(map(type, values)) <= {int, float}:
            for t, value in enumerate(values):
                if value is None and column in may_lack:
                    values[t] = nan
                elif type(value) not in (int, float):
                    raise RunError(f"{path}, line {t + 1}: {name} is {value!r}, a number was wanted: restore the file")
        try:
            columns[column] = np.array(values, np.float64)
        except OverflowError as error:
            raise RunError(f"{path}: {name} holds a number of hundreds of digits: restore the file") from error
        if column not in ("quality", *may_lack) and not np.isfinite(columns[column]).all():
            line = int(np.flatnonzero(~np.isfinite(columns[column]))[0]) + 1
            raise RunError(f"{path}, line {line}: {name} is no finite number: restore the file")
    return columns


def _num_arrivals(seed: Seed) -> int:
    """How many arrivals this run is to have: of arrivals.json where it is, of the settings, of the ledger."""
    path = seed.folder / "arrivals.json"
    if path.exists():
        try:
            return max(len(read_json(path)["digests"]), seed.last_t)
        except (RunError, KeyError, TypeError):
            pass  # it is being written, or of another release
    for name in ("arrivals", "mega_batches"):
        if isinstance(value := seed.settings.get(name), int) and value >= seed.last_t:
            return value
    return seed.last_t


def _gather(seeds: Iterable[tuple[Seed, int]]) -> list[tuple[tuple, Run]]:
    """(identity of the stream, Run) of each setting."""
    gathered: dict[tuple, list[Seed]] = {}
    streams: dict[tuple, tuple] = {}
    identities: dict[tuple, dict[str, Any]] = {}
    seeds = list(seeds)
    missing = _settings_of_other_releases(seeds)
    for seed, num_arrivals in seeds:
        stream = _stream_of(seed, num_arrivals)
        identity = _identity({**missing.get(stream, {}), **seed.settings})
        which = tuple(seed.settings.get(name) for name in SEED_SETTINGS)
        given = tuple(name for name, value in zip(SEED_SETTINGS, which, strict=True) if value is not None)
        settings = tuple(sorted((name, _hashable(value)) for name, value in identity.items()))
        repeat = 0
        while which in [_seeds_of(other) for other in gathered.get((stream, settings, given, repeat), [])]:
            repeat += 1
        key = (stream, settings, given, repeat)
        gathered.setdefault(key, []).append(seed)
        streams[key] = stream
        identities[key] = identity
    runs = []
    for key, members in gathered.items():
        members.sort(key=lambda seed: (seed.seed is None, seed.seed, str(seed.folder)))
        stream = streams[key]
        run = Run(stream[0], stream[-1], tuple(members), identities[key], repeat=key[-1])
        runs.append((stream, run))
    return runs


def _cer_from(settings: Mapping[str, Any]) -> int:
    """The first arrival that CER charges: 0 in the paper's first version."""
    return 0 if settings.get("cer_from") == 0 else 1


def _settings_of_other_releases(seeds: Sequence[tuple[Seed, int]]) -> dict[tuple, dict[str, Any]]:
    """Stream -> settings that all runs have that have them at all.

    A run of a release that did not have such a setting yet is taken to be as the others: else it would stand apart from
    its own further seeds.
    """
    values: dict[tuple, dict[str, dict[Any, Any]]] = {}
    for seed, num_arrivals in seeds:
        of_stream = values.setdefault(_stream_of(seed, num_arrivals), {})
        for name, value in seed.settings.items():
            of_stream.setdefault(name, {})[_hashable(value)] = value
    return {
        stream: {name: next(iter(found.values())) for name, found in of_stream.items() if len(found) == 1}
        for stream, of_stream in values.items()
    }


def _seeds_of(seed: Seed) -> tuple:
    return tuple(seed.settings.get(name) for name in SEED_SETTINGS)


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if name not in (*PLACE_SETTINGS, *SEED_SETTINGS) and _is_used(name, settings)
    }


def _is_used(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a learner takes this setting; one that is not known takes all."""
    learner = settings.get("learner")
    if name == "experts" and "dataset" not in settings:  # every language model is a mixture
        return True
    return learner not in LEARNERS or name not in TAKEN_BY or learner in TAKEN_BY[name]


def _stream_of(seed: Seed, num_arrivals: int) -> tuple:
    """What runs must share to be compared: kind, data, B, arrivals."""
    settings = seed.settings
    if "dataset" in settings:
        whole = settings.get("mega_batches")
        if not settings.get("arrivals"):
            whole = None
        elif not isinstance(whole, int):
            whole = MEGA_BATCHES.get(str(settings["dataset"]), -1)
        split = _hashable(settings.get("split")) if settings["dataset"] == "emnist" else None
        data = (settings["dataset"], _cer_from(settings))
        return ("vision", _hashable(data), split, whole or num_arrivals, num_arrivals)
    evaluated_on = _hashable(settings.get("evaluated_on") or Path(str(settings.get("stream", "stream"))).name)
    return ("language model", evaluated_on, None, num_arrivals, num_arrivals)


def _compare(runs: Iterable[tuple[tuple, Run]]) -> list[Comparison]:
    grouped: dict[tuple, list[Run]] = {}
    for stream, run in runs:
        grouped.setdefault(stream, []).append(run)
    comparisons: list[Comparison] = []
    for stream, members in sorted(grouped.items(), key=lambda item: repr(item[0])):
        kind, data, split, whole, num_arrivals = stream
        name = str(data[0]) if kind == "vision" else _name_of_stream(members[0])
        name = f"{name} {split}" if split else name
        count = f"B = {num_arrivals}" if whole == num_arrivals else f"first {num_arrivals} of B = {whole}"
        name = _printable(name)[:MOST_CHARACTERS]
        if kind == "vision" and data[1] == 0:
            count += ", CER from t = 0"
        taken = {one.name for one in comparisons}
        number, title = 1, f"{name}, {count}"
        while title in taken:
            number += 1
            title = f"{name} ({number}), {count}"
        members.sort(key=order)
        slug = plain = re.sub(r"\W+", "_", title.replace(" = ", "")).strip("_")
        again = 1
        while slug in {one.slug for one in comparisons}:
            again += 1
            slug = f"{plain}_{again}"
        comparisons.append(Comparison(kind, title, slug, num_arrivals, tuple(members)))
    return comparisons


def _name_of_stream(run: Run) -> str:
    """Of the folder; of the one above where it is called `stream` itself."""
    path = Path(str(run.seeds[0].settings.get("stream", "stream")))
    return path.parent.name if path.name == "stream" and path.parent.name else path.name


MEGA_BATCHES = {"digits": 20, "mnist": 500, "emnist": 500, "cifar10": 100, "cifar100": 100}
"""B where a run has none in its settings."""
MOST_CHARACTERS = 60
"""Of a setting in a label."""
LEARNERS = {
    "sm": "SM", "ens": "Ens", "umix": "UMix", "gens": "gEns", "gmoe": "gMoE", "ff": "FF",
    "moe": "MoE", "gmoe_flat": "gMoE (flat gate)", "ens_moe": "Ens of MoEs",
}  # fmt: skip
"""As the paper writes them."""
TAKEN_BY: dict[str, tuple[str, ...]] = {
    "members": ("ens", "umix"), "combine": ("ens",), "bagging": ("ens",), "umix": ("umix",),
    "new_members": ("gens", "ens_moe"), "new_members_from": ("gens", "ens_moe"), "gens_combine": ("gens", "ens_moe"),
    "experts": ("gmoe", "gmoe_flat", "moe", "ens_moe"), "hard_gates": ("gmoe", "gmoe_flat", "moe", "ens_moe"),
    "split_by": ("gmoe", "gmoe_flat"), "grow_every": ("gmoe", "gmoe_flat", "ff"), "grow_experts": ("gmoe",),
    "grow_router": ("gmoe",), "grow_noise": ("gmoe",), "candidates": ("ff",), "grow_ratio": ("ff",),
    "grow_by": ("ff",), "grow_depth": ("ff",),
}  # fmt: skip
"""Settings that only these learners take; the others have them at a default that means nothing."""
GROWING = ("gens", "gmoe", "ff", "gmoe_flat", "ens_moe")


def order(run: Run) -> tuple:
    """Learners as in the paper, then size, wait, and the rest."""
    names = list(LEARNERS)
    place = names.index(run.learner) if run.learner in names else len(names)
    size = tuple(_sortable(run.settings.get(name)) for name in ("arch", "width", "experts", "members"))
    rest = [(name, repr(value)) for name, value in sorted(run.settings.items())]
    return (place, run.learner, size, run.wait, bool(run.replay), repr(run.replay), rest, run.repeat)


def _sortable(value: Any) -> tuple:
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(one) for one in value)
    if isinstance(value, Mapping):
        return tuple(sorted((name, _hashable(one)) for name, one in value.items()))
    return value


def label_of(run: Run, varied: Sequence[str]) -> str:
    """`gMoE, wait 10, width 32`: the learner, and what else differs between the runs beside it."""
    words = [LEARNERS.get(run.learner, run.learner)]
    for name in varied:
        value = run.settings.get(name)
        if name == "learner" or value is None:
            continue
        if name == "replay":
            if value:
                words.append("replay" if value == "all" else f"replay {value}")
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name} {_short(value)}")
    if run.repeat:
        words.append(f"again ({run.repeat + 1})")
    return _printable(", ".join(words))


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        text = "+".join(map(_short, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


def _printable(text: str) -> str:
    """A path whose bytes are not UTF-8 reaches us with lone surrogates: they are spelled as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

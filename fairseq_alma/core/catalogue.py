"""The catalogue of learners: name, label, and the settings that each of them takes.

Commands, reports, documentation and tests read this file; a learner of a plugin adds its own entry. The classes
that implement the learners are in `vision/learners` and `fairseq_alma/lm/learners.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import (
    EnsembleOfMixturesSettings,
    EnsembleSettings,
    FireflySettings,
    GrowingEnsembleSettings,
    GrowingMixtureSettings,
    LanguageModelEnsembleSettings,
    LanguageModelGrowingMixtureSettings,
    LearnerSettings,
    MixtureSettings,
    UnionMixSettings,
)
from fairseq_alma.core.settings import Settings, defaults_of, describe, refuse_unknown_keys

Half = Literal["vision", "language model"]
"""The two halves of the project: `alma-vision` and `alma-lm`."""

DEFAULT_MEGA_BATCHES = {"digits": 20, "mnist": 500, "emnist": 500, "cifar10": 100, "cifar100": 100}
"""Dataset -> B, the number of mega-batches if `mega_batches=` is not given."""

FREE_SETTINGS: Mapping[Half, tuple[str, ...]] = {
    "vision": ("data_root", "out", "preset", "device", "threads", "routing_examples", "keep_stages", "arrivals",
               "tensorboard"),
    "language model": ("stream", "out", "mega_batches", "preset", "seeds", "parallel", "share", "tensorboard"),
}  # fmt: skip
"""Settings that may change when a run is continued: where files are and how far to go, not what is computed."""

SEED_SETTINGS = ("seed", "data_seed", "initialisation_seed", "order_seed")
"""Settings in which the runs of one group of seeds differ."""

SIZE_SETTINGS = ("arch", "width", "experts", "members")
"""Settings that say how large a learner is."""

GROWTH_SETTINGS = ("grow_every", "grow_experts")
"""Settings that say how often and by how much a learner grows. Their values usually follow from the wait."""

WAIT_SETTINGS = ("wait", "updates", "updates_per_mega_batch", "grow_every")
"""The wait, and the settings that change with it when two runs are compared at different waits."""

NOT_COMPARED = (
    *dict.fromkeys(name for names in FREE_SETTINGS.values() for name in names),
    "stacked_from", "evaluated_on", "dictionary", "cer_from",
)  # fmt: skip
"""Keys of settings.json that do not distinguish the runs of one comparison. A report compares streams separately."""


@dataclass(frozen=True)
class LearnerEntry:
    """What the project knows about a learner, apart from its implementation."""

    name: str
    """The value of `learner=`."""
    label: str
    """Its name in figures and tables, as the paper writes it."""
    summary: str
    """One sentence that says what the learner is."""
    grows: bool = False
    """Whether it adds capacity between stages."""
    independent_members: bool = True
    """Whether its members train without one another, so that separate processes can train them."""
    vision: type[LearnerSettings] | None = None
    """Its settings in alma-vision; None if alma-vision does not have it."""
    language_model: type[LearnerSettings] | None = None
    """Its settings in alma-lm; None if alma-lm does not have it."""

    def settings(self, half: Half) -> type[LearnerSettings] | None:
        """Return the class of its settings in one half; None if that half does not have the learner."""
        return self.vision if half == "vision" else self.language_model


_ENTRIES: dict[str, LearnerEntry] = {}


def add_learner(entry: LearnerEntry) -> None:
    """Add a learner to the catalogue. An entry of the same name is replaced."""
    _ENTRIES[entry.name] = entry
    own_settings.cache_clear()
    learners_that_take.cache_clear()


def remove_learner(name: str) -> None:
    """Remove a learner from the catalogue. Does nothing if it is not there."""
    _ENTRIES.pop(name, None)
    own_settings.cache_clear()
    learners_that_take.cache_clear()


def learners(half: Half | None = None) -> list[LearnerEntry]:
    """Return all learners, or those of one half, in the order in which the paper lists them."""
    return [entry for entry in _ENTRIES.values() if half is None or entry.settings(half) is not None]


def find_learner(name: str, half: Half) -> LearnerEntry:
    """Return the learner of this name.

    Raises:
        SettingError: this half has no such learner.
    """
    known = {entry.name: entry for entry in learners(half)}
    if not isinstance(name, str):
        raise SettingError(f"learner={name!r} must be text")
    if name not in known:
        raise SettingError(f"learner={name!r} is not one of {', '.join(known)}")
    return known[name]


def label_of(name: str) -> str:
    """Return the label of a learner; of one that is not in the catalogue, its name."""
    return _ENTRIES[name].label if name in _ENTRIES else name


def grows(name: str) -> bool:
    """Return True if the learner of this name is in the catalogue and grows."""
    return name in _ENTRIES and _ENTRIES[name].grows


@cache
def learners_that_take(setting: str, half: Half) -> list[str]:
    """Return the names of the learners that have this setting of their own; empty for a setting of every run."""
    return [entry.name for entry in learners(half) if setting in own_settings(entry.name, half)]


@cache
def own_settings(name: str, half: Half) -> list[str]:
    """Return the keys of the settings that a learner has of its own; empty for an unknown learner."""
    settings = _ENTRIES[name].settings(half) if name in _ENTRIES else None
    return [one.name for one in describe(settings)] if settings is not None else []


def takes(half: Half, learner: str, setting: str) -> bool:
    """Return True if a setting has a meaning for a learner: it is a setting of every run, or the learner's own.

    A learner that is not in the catalogue (a plugin that is not imported) takes every setting.
    """
    if learner not in _ENTRIES or _ENTRIES[learner].settings(half) is None:
        return True
    takers = learners_that_take(setting, half)
    return not takers or learner in takers


class RunSettings(Settings):
    """Base class of the settings of a whole run: those of every run, and those of its learner in the field `own`."""

    half: ClassVar[Half]
    learner: str
    own: LearnerSettings | None

    def _settle_own(self) -> None:
        """Give `own` its default if it is missing, and check it against the run. Subclasses call this last."""
        kind = find_learner(self.learner, self.half).settings(self.half)
        assert kind is not None  # find_learner knows only learners of this half
        if self.own is None:
            object.__setattr__(self, "own", kind())
        if not isinstance(self.own, kind):
            raise SettingError(f"own={self.own!r} are not settings of learner={self.learner}")
        self.own.check_run(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], given: Collection[str] | None = None) -> Self:
        """Return settings made from flat keys and their values.

        Args:
            values: key -> value. A learner's own setting that is None keeps its default.
            given: the keys that the user typed; all of them by default. A setting of another learner is refused if
                it was typed, and ignored if it comes from a preset.

        Raises:
            SettingError: a key is unknown or belongs to another learner, or a value is out of range.
        """
        if isinstance(values.get("preset"), Mapping):
            raise SettingError(
                "the file of preset= sets nothing: its first line must be '# @package _global_', before any other "
                "comment, so that its keys become settings"
            )
        common = [one.name for one in describe(cls)]
        learner = values.get("learner", defaults_of(cls)["learner"])
        kind = find_learner(learner, cls.half).settings(cls.half)
        assert kind is not None  # find_learner knows only learners of this half
        own = own_settings(learner, cls.half)
        of_others = {name for entry in learners(cls.half) for name in own_settings(entry.name, cls.half)} - set(own)
        refuse_unknown_keys(values, [*common, *own, *of_others])
        for name in sorted(of_others & values.keys()):
            if values[name] is not None and (given is None or name in given):
                takers = ", ".join(learners_that_take(name, cls.half))
                raise SettingError(f"{name}={values[name]} is for learner={takers}, not for learner={learner}")
        arguments = cls._arguments({name: values[name] for name in common if name in values})
        arguments["own"] = kind(**{name: values[name] for name in own if values.get(name) is not None})
        return cls(**arguments)

    @classmethod
    def defaults_for(cls, learner: str) -> dict[str, Any]:
        """Return key -> default of every setting that a run of this learner has."""
        kind = find_learner(learner, cls.half).settings(cls.half)
        return defaults_of(cls) | (defaults_of(kind) if kind is not None else {})

    @classmethod
    def not_identity(cls, learner: str) -> list[str]:
        """Return the keys that may differ when a run is continued.

        These are the free settings, and the settings of other learners: a run folder of an earlier version has them.
        """
        others = [name for entry in learners(cls.half) for name in own_settings(entry.name, cls.half)]
        return [*FREE_SETTINGS[cls.half], *(name for name in others if not takes(cls.half, learner, name))]


for _entry in (
    LearnerEntry(
        "sm", "SM", "One network that every stage trains further.",
        vision=LearnerSettings, language_model=LearnerSettings,
    ),
    LearnerEntry(
        "ens", "Ens", "N networks with different seeds, trained on the same data; their probabilities are averaged.",
        vision=EnsembleSettings, language_model=LanguageModelEnsembleSettings,
    ),
    LearnerEntry(
        "umix", "UMix", "N networks trained as one network; their logits are averaged.",
        independent_members=False, vision=UnionMixSettings,
    ),
    LearnerEntry(
        "gens", "gEns", "An ensemble to which each stage adds new networks and trains only these.",
        grows=True, vision=GrowingEnsembleSettings, language_model=LearnerSettings,
    ),
    LearnerEntry(
        "gmoe", "gMoE", "A mixture of experts in which the experts with the largest loss are copied before a stage.",
        grows=True, vision=GrowingMixtureSettings, language_model=LanguageModelGrowingMixtureSettings,
    ),
    LearnerEntry(
        "ff", "FF", "One network whose layers grow where the loss falls fastest (Firefly).",
        grows=True, vision=FireflySettings,
    ),
    LearnerEntry("moe", "MoE", "A mixture of experts that does not grow.", vision=MixtureSettings),
    LearnerEntry(
        "gmoe_flat", "gMoE (flat gate)",
        "A growing mixture with one softmax over all experts instead of a tree of gates.",
        grows=True, vision=GrowingMixtureSettings,
    ),
    LearnerEntry(
        "ens_moe", "Ens of MoEs", "An ensemble to which each stage adds a new mixture of experts.",
        grows=True, vision=EnsembleOfMixturesSettings,
    ),
):  # fmt: skip
    add_learner(_entry)

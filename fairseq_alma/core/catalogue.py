"""The catalogue of learners. It lists the name, the label and the settings of each learner.

Commands, reports, documentation and tests read the catalogue. The classes that implement the learners are in
`vision/learners` and `fairseq_alma/lm/learners.py`.

A plugin (a Python module that the user wrote) can define further learners. It adds a catalogue entry for each of
these learners.
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
    LanguageModelGrowingEnsembleSettings,
    LanguageModelGrowingMixtureSettings,
    LearnerSettings,
    MixtureSettings,
    UnionMixSettings,
)
from fairseq_alma.core.settings import SettingErrors, Settings, defaults_of, describe, nearest_key, refuse_unknown_keys

Half = Literal["vision", "language model"]
"""Name of one half of the project: "vision" (command `alma-vision`) or "language model" (command `alma-lm`)."""

FREE_SETTINGS: Mapping[Half, tuple[str, ...]] = {
    "vision": ("data_root", "out", "preset", "device", "threads", "routing_examples", "keep_stages", "arrivals",
               "last_group", "tensorboard", "error_matrix", "cuda_graphs"),
    "language model": ("stream", "out", "mega_batches", "last_group", "preset", "seeds", "parallel", "share",
                       "tensorboard", "checkpoint_minutes", "untrained_tokens", "fork", "expert_parallel"),
}  # fmt: skip
"""For each half of the project: names of the settings that may change when a run is continued, such as file locations,
devices and the number of mega-batches that arrive. They do not affect the result of a stage."""

FORK_SETTINGS: Mapping[Half, tuple[str, ...]] = {
    "vision": (),
    "language model": ("lr", "warmup_updates", "clip_norm", "dropout", "weight_decay", "batch_size",
                       "sequences_per_update", "updates", "updates_per_mega_batch", "extra_updates", "cooldown_share",
                       "validations", "precision", "fairseq"),
}  # fmt: skip
"""For each half of the project: names of the settings that may change at a fork of a run (see SeedRecord). They control
how a stage is trained, but not the model or the data."""

SEED_SETTINGS = ("seed", "data_seed", "initialisation_seed", "order_seed")
"""Names of the settings that select random seeds. Runs that differ only in these repeat the same experiment."""

SIZE_SETTINGS = ("arch", "width", "experts", "members")
"""Names of the settings that determine the size of a learner (its number of parameters)."""

GROWTH_SETTINGS = ("grow_every", "grow_experts", "grow_layers")
"""Names of the settings that determine how often and by how much a learner grows. Suitable values depend on the number
of stages, so runs with different values of `wait` usually also differ in these settings."""

WAIT_SETTINGS = ("wait", "wait_ratio", "updates", "updates_per_mega_batch", "grow_every")
"""The setting `wait`, and the settings that are usually changed together with `wait`. To show the effect of `wait`, a
report compares two runs that differ only in these settings."""

OPTIONS: Mapping[Half, Mapping[str, Any]] = {
    "vision": {
        "predict_with": "last", "select_by": "validation_loss", "extra_epochs": 0, "schedule": "constant",
        "label_smoothing": 0.0, "last_group": "train",
    },
    "language model": {
        "predict_with": "last", "optimizer_state": "reset", "schedule": "per_stage", "extra_updates": 0,
        "weight_decay": 0.0, "last_group": "train",
    },
}  # fmt: skip
"""For each half of the project: names of settings that switch something on that the paper does not have, each with the
value that switches it off. The label of a run names such a setting only if it is on."""

GROWTH_OPTIONS: Mapping[str, Any] = {
    "grow_router": "copy",
    "split_by": "validation_loss",
    "grow_drop": 0.0,
    "grow_layers": 0,
}
"""Language models: names of the settings that determine what is copied and how, each with the paper's value."""

AVERAGE_SETTINGS: Mapping[str, Any] = {
    "average_every": "stage",
    "average_window": None,
    "average_decay": None,
    "average_power": 0.0,
}
"""Names of the settings of predict_with=average, each with its default, which is the only value without an average."""

PARTS_OF_OPTIONS: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(AVERAGE_SETTINGS, ("predict_with", "average")),
    "cooldown_share": ("schedule", "wsd"),
}
"""Names of settings that have an effect only if another setting has a certain value -> this setting and this value."""

UNRECORDED: Mapping[Half, Mapping[str, Any]] = {
    "vision": {
        **OPTIONS["vision"],
        **AVERAGE_SETTINGS,
        **dict.fromkeys(("replay_memory", "wait_ratio", "patience", "backbone", "transform", "image_size", "plugin")),
        "from_scratch": False, "split_by": "validation_loss", "patience_delta": 0.0, "order": "random",
        "drift_overlap": 0.0,
    },
    "language model": {
        **OPTIONS["language model"],
        **AVERAGE_SETTINGS,
        **dict.fromkeys(("replay_memory", "wait_ratio", "cooldown_share")),
        "from_scratch": False, "precision": "float32", "split_by": "validation_loss", "grow_drop": 0.0, "grow_layers": 0
    },
}  # fmt: skip
"""For each half of the project: names of settings that were added later, each with the value that corresponds to what
ALMA did before. A run whose settings.json does not have the setting is compared as if it had this value."""

NOT_COMPARED = (
    *dict.fromkeys(name for names in FREE_SETTINGS.values() for name in names),
    "stacked_from", "evaluated_on", "dictionary", "cer_from", "test_digest", "pixels",
)  # fmt: skip
"""Keys of settings.json that a report ignores when it checks whether two runs have the same settings.

Some of these keys identify the stream, for example `dictionary`. They can be ignored here, because a report compares
two runs only if their streams are the same."""


@dataclass(frozen=True)
class LearnerEntry:
    """Catalogue entry of a learner: name, label, properties and settings classes.

    The entry does not contain the class that implements the learner.
    """

    name: str
    """Name of the learner, as given in `learner=`."""
    label: str
    """Name of the learner in figures and tables, for example "gMoE". This is the name that the paper uses."""
    summary: str
    """Description of the learner in one sentence, for `--help`."""
    grows: bool = False
    """Whether the learner adds capacity (members, experts or units) between stages."""
    independent_members: bool = True
    """Whether the members (networks) of the learner are trained independently of each other. If so, separate processes
    can train them."""
    vision: type[LearnerSettings] | None = None
    """Class of the learner's settings in alma-vision; None if alma-vision does not have this learner."""
    language_model: type[LearnerSettings] | None = None
    """Class of the learner's settings in alma-lm; None if alma-lm does not have this learner."""

    def settings(self, half: Half) -> type[LearnerSettings] | None:
        """Return the learner's settings class for `half`, which is "vision" or "language model".

        Return None if the learner does not exist for `half`.
        """
        return self.vision if half == "vision" else self.language_model


_ENTRIES: dict[str, LearnerEntry] = {}


def add_learner(entry: LearnerEntry) -> None:
    """Add a learner to the catalogue. If the catalogue has a learner with the same name, replace its entry."""
    _ENTRIES[entry.name] = entry
    own_settings.cache_clear()
    learners_that_take.cache_clear()


def remove_learner(name: str) -> None:
    """Remove a learner from the catalogue. Do nothing if the catalogue does not contain it."""
    _ENTRIES.pop(name, None)
    own_settings.cache_clear()
    learners_that_take.cache_clear()


def learners(half: Half | None = None) -> list[LearnerEntry]:
    """Return the catalogue entries of all learners, or only of the learners in one half of the project.

    The learners of the paper come first, in the order of the paper. The learners of plugins come last.

    Args:
        half: "vision" or "language model". By default, the learners of both halves are returned.
    """
    return [entry for entry in _ENTRIES.values() if half is None or entry.settings(half) is not None]


def find_learner(name: str, half: Half) -> LearnerEntry:
    """Return the catalogue entry of the learner `name`.

    Raises:
        SettingError: if `half` of the project ("vision" or "language model") has no learner with this name.
    """
    known = {entry.name: entry for entry in learners(half)}
    if not isinstance(name, str):
        raise SettingError(f"learner={name!r} must be a string")
    if name not in known:
        near = nearest_key(name, list(known))
        meant = f" (did you mean {near}?)" if near else ""
        plugin = "; for a learner of a plugin, also give plugin=MODULE" if half == "vision" else ""
        raise SettingError(f"learner={name!r} is not one of {', '.join(known)}{meant}{plugin}")
    return known[name]


def label_of(name: str) -> str:
    """Return the label of the learner `name`, which is its name in figures and tables.

    If the catalogue does not contain the learner, return `name` itself.
    """
    return _ENTRIES[name].label if name in _ENTRIES else name


@cache
def learners_that_take(setting: str, half: Half) -> list[str]:
    """Return the names of the learners that have the additional setting `setting`; [] if every run has the setting."""
    return [entry.name for entry in learners(half) if setting in own_settings(entry.name, half)]


@cache
def own_settings(name: str, half: Half) -> list[str]:
    """Return the names of the additional settings of the learner `name`, without the settings that every run has.

    The list is empty if the catalogue does not contain the learner.
    """
    settings = _ENTRIES[name].settings(half) if name in _ENTRIES else None
    return [one.name for one in describe(settings)] if settings is not None else []


def takes(half: Half, learner: str, setting: str) -> bool:
    """Return True if a run of `learner` has the setting `setting`.

    This is the case if every run has the setting, or if the setting is one of the additional settings of `learner`. For
    a learner that is not in the catalogue, return True for every setting. Its settings are not known here, because it
    may come from a plugin that is not imported.
    """
    if learner not in _ENTRIES or _ENTRIES[learner].settings(half) is None:
        return True
    takers = learners_that_take(setting, half)
    return not takers or learner in takers


class RunSettings(Settings):
    """Base class for the object with all settings of a run.

    The field `own` contains the additional settings of the learner. All other fields are settings that every run has.
    """

    half: ClassVar[Half]
    learner: str
    own: LearnerSettings | None

    def _complete_and_check_own(self) -> None:
        """Check `own`, the additional settings of the learner. If `own` is None, first set it to the default settings.

        Subclasses call this method at the end of `__post_init__`. The check compares `own` with the other settings, so
        the other settings must have been checked before.
        """
        kind = find_learner(self.learner, self.half).settings(self.half)
        # `kind` cannot be None, because find_learner accepts only learners with a settings class for `half`. The
        # assert is for the type checker.
        assert kind is not None
        if self.own is None:
            object.__setattr__(self, "own", kind())
        if not isinstance(self.own, kind):
            raise SettingError(
                f"own={self.own!r} must be an object of the class {kind.__name__}, which contains the additional "
                f"settings of learner={self.learner}"
            )
        self.own.check_run(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], given: Collection[str] | None = None) -> Self:
        """Return the settings object for a flat mapping of setting names to values.

        Args:
            values: setting name -> value. If the value of an additional setting of the learner is None, the setting
                gets its default value.
            given: names of the settings that the user typed; by default all names in `values`. If `values` contains a
                setting that only other learners have, there are two cases. If the user typed the setting, an error is
                raised. If not, the setting comes from a preset and is ignored.

        Raises:
            SettingError: if a name is unknown, if the user typed a setting that only other learners have, or if a value
                is invalid.
        """
        if isinstance(values.get("preset"), Mapping):
            raise SettingError(
                "the preset file has no effect: its first line must be '# @package _global_', before any other "
                "comment, because otherwise Hydra does not read its keys as settings"
            )
        errors = SettingErrors()
        learner = values.get("learner", defaults_of(cls)["learner"])
        errors.collect(lambda: find_learner(learner, cls.half))
        kind = None if errors.messages else find_learner(learner, cls.half).settings(cls.half)
        common, own = [one.name for one in describe(cls)], own_settings(learner, cls.half) if kind else []
        of_others = {name for entry in learners(cls.half) for name in own_settings(entry.name, cls.half)} - set(own)
        errors.collect(lambda: refuse_unknown_keys(values, [*common, *own, *of_others]))
        for name in sorted(of_others & values.keys()) if kind else []:
            if values[name] is not None and (given is None or name in given):
                takers = ", ".join(learners_that_take(name, cls.half))
                errors.messages.append(
                    f"{name}={values[name]} is for learner={takers}, not for learner={learner}: leave out {name}, or "
                    f"choose another learner"
                )
        arguments = cls._arguments({name: values[name] for name in common if name in values}, errors)
        if kind is None:
            # Check the other settings with the default learner, because the settings of this one are not known.
            arguments.pop("learner", None)
        else:
            errors.collect(
                lambda: arguments.update(
                    own=kind(**{name: values[name] for name in own if values.get(name) is not None})
                )
            )
        settings: list[Self] = []
        errors.collect(lambda: settings.append(cls(**arguments)))
        errors.raise_all()
        return settings[0]

    @classmethod
    def defaults_for(cls, learner: str) -> dict[str, Any]:
        """Return a dictionary from name to default value, for all settings of `learner` that have a default value."""
        kind = find_learner(learner, cls.half).settings(cls.half)
        return defaults_of(cls) | (defaults_of(kind) if kind is not None else {})

    @classmethod
    def not_identity(cls, learner: str) -> list[str]:
        """Return the names of the settings that may differ when a run of `learner` is continued.

        These are the FREE_SETTINGS, such as file locations, and the settings that only other learners have. The latter
        have no effect on the run, but run folders that were written by earlier versions of ALMA contain them.
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
        grows=True, vision=GrowingEnsembleSettings, language_model=LanguageModelGrowingEnsembleSettings,
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

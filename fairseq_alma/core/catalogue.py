"""The catalogue of learners. It lists the name, the label and the settings of each learner.

Commands, reports, documentation and tests read the catalogue. The classes that implement the learners are in
`vision/learners` and `fairseq_alma/lm/learners.py`. A plugin, a Python module of the user, adds its learners.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal, Self, TypeVar

from fairseq_alma.core.averaging import AverageWeights
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
from fairseq_alma.core.settings import (
    SettingDescription,
    SettingErrors,
    Settings,
    defaults_of,
    describe,
    nearest_key,
    refuse_unknown_keys,
)

Program = Literal["vision", "language model"]
"""One of the two programs: "vision" (command `alma-vision`) or "language model" (command `alma-lm`)."""

_SETTINGS: Mapping[Program, str] = {
    "vision": "vision.settings:VisionSettings",
    "language model": "fairseq_alma.lm.settings:LanguageModelSettings",
}
"""The class with the settings of each program's runs, as MODULE:CLASS. It is imported when it is needed, so that this
package imports no other."""

_IDENTITY = ("stacked_from", "evaluated_on", "dictionary", "cer_from", "test_digest", "pixels")
"""Keys of settings.json that describe the stream, or the other runs that were trained together."""


@dataclass(frozen=True)
class LearnerEntry:
    """Catalogue entry of a learner: name, label and settings classes, but not the class that implements the learner."""

    name: str
    """Name of the learner, as given in `learner=`."""
    label: str
    """Name of the learner in figures and tables, for example "gMoE". This is the name that the paper uses."""
    summary: str
    """Description of the learner in one sentence, for `--help`."""
    vision: type[LearnerSettings] | None = None
    """Class of the learner's settings in alma-vision; None if alma-vision does not have this learner."""
    language_model: type[LearnerSettings] | None = None
    """Class of the learner's settings in alma-lm; None if alma-lm does not have this learner."""

    def settings(self, program: Program) -> type[LearnerSettings] | None:
        """Return the learner's settings class for `program`; None if the learner does not exist there."""
        return self.vision if program == "vision" else self.language_model


_ENTRIES: dict[str, LearnerEntry] = {}


def add_learner(entry: LearnerEntry) -> None:
    """Add a learner to the catalogue. If the catalogue has a learner with the same name, replace its entry."""
    _ENTRIES[entry.name] = entry
    _clear_caches()


Learner = TypeVar("Learner", bound=type)


def register_learner(
    program: Program,
    classes: dict[str, Any],
    name: str,
    *,
    label: str | None = None,
    summary: str = "",
    settings: type[LearnerSettings] | None = None,
) -> Callable[[Learner], Learner]:
    """Return a class decorator that makes a learner available as `learner=NAME`.

    `vision.learners.register_learner` and `fairseq_alma.lm.learners.register_learner` are this function with the first
    two arguments given.

    Args:
        program: the program that gets the learner.
        classes: the classes of the program's learners, by name. The learner is added.
        name: the value of `learner=`.
        label: name of the learner in figures and tables. By default it is `name`, or the label in the catalogue if the
            learner is listed there.
        summary: one sentence for `--help`. By default it is the first line of the learner class's docstring.
        settings: class of the settings that only this learner has. By default there are no such settings.

    Raises:
        ValueError: if a setting of the learner has the same name as a setting that all runs have, or if there is a
            built-in learner with this name.
    """
    own = settings or LearnerSettings
    run_settings = _settings_class(program)
    if taken := {one.name for one in describe(own)} & {one.name for one in describe(run_settings)}:
        raise ValueError(
            f"learner {name!r} declares settings with names that every run already has: {', '.join(sorted(taken))}. "
            f"Give these settings other names in the learner"
        )

    def register(cls: Learner) -> Learner:
        package = run_settings.__module__.partition(".")[0]
        if name in classes and classes[name].__module__.startswith(f"{package}.") and cls is not classes[name]:
            # A run of the built-in learner would continue with this one.
            raise ValueError(f"there is a built-in learner {name!r}: give your learner another name")
        classes[name] = cls
        known = _ENTRIES.get(name)
        if known is None or known.settings(program) is None or label is not None or settings is not None:
            entry = known or LearnerEntry(name, name, summary or (cls.__doc__ or "").strip().partition("\n")[0])
            entry = replace(entry, label=label or entry.label)
            add_learner(replace(entry, vision=own) if program == "vision" else replace(entry, language_model=own))
        return cls

    return register


def remove_learner(name: str) -> None:
    """Remove a learner from the catalogue. Do nothing if the catalogue does not contain it."""
    _ENTRIES.pop(name, None)
    _clear_caches()


def _clear_caches() -> None:
    for cached in (own_settings, learners_that_take, all_settings, settings_that_are):
        cached.cache_clear()


def learners(program: Program | None = None) -> list[LearnerEntry]:
    """Return the catalogue entries of all learners, or only of those in one of the two programs.

    The learners of the paper come first, in the order of the paper. The learners of plugins come last.
    """
    return [entry for entry in _ENTRIES.values() if program is None or entry.settings(program) is not None]


def find_learner(name: str, program: Program) -> LearnerEntry:
    """Return the catalogue entry of a learner. Raise SettingError if `program` has no learner with this name."""
    known = {entry.name: entry for entry in learners(program)}
    if not isinstance(name, str):
        raise SettingError(f"learner={name!r} must be a string")
    if name not in known:
        near = nearest_key(name, list(known))
        meant = f" (did you mean {near}?)" if near else ""
        raise SettingError(
            f"learner={name!r} is not one of {', '.join(known)}{meant}; for a learner of a plugin, also give "
            f"plugin=MODULE"
        )
    return known[name]


def label_of(name: str) -> str:
    """Return the label of a learner, which is its name in figures and tables; `name` itself for an unknown learner."""
    return _ENTRIES[name].label if name in _ENTRIES else name


@cache
def learners_that_take(setting: str, program: Program) -> list[str]:
    """Return the names of the learners that have the additional setting `setting`; [] if every run has the setting."""
    return [entry.name for entry in learners(program) if setting in own_settings(entry.name, program)]


@cache
def own_settings(name: str, program: Program) -> list[str]:
    """Return the names of the settings that a learner has beside those of every run; [] for an unknown learner."""
    settings = _ENTRIES[name].settings(program) if name in _ENTRIES else None
    return [one.name for one in describe(settings)] if settings is not None else []


@cache
def all_settings(program: Program) -> tuple[SettingDescription, ...]:
    """Return the settings of every run in a program, and then those that only some learners have.

    A setting that several learners declare occurs several times.
    """
    kinds = [_settings_class(program), *(entry.settings(program) for entry in learners(program))]
    return tuple(one for kind in kinds if kind is not None for one in describe(kind))


def _settings_class(program: Program) -> type[Settings]:
    """Return the class with the settings of each run in a program."""
    module, _, name = _SETTINGS[program].partition(":")
    return getattr(import_module(module), name)


@cache
def settings_that_are(flag: str, program: Program | None = None) -> tuple[str, ...]:
    """Return the names of the settings that are declared with a flag, in the order of declaration.

    Args:
        flag: name of one of the fields of `Flags` that are true or false, for example "free".
        program: the program. By default, the settings of both programs are returned.
    """
    programs: tuple[Program, ...] = tuple(_SETTINGS) if program is None else (program,)
    found = [(one.name, each) for each in programs for one in all_settings(each) if getattr(one.flags, flag)]
    # The settings of every run come first, also if they are those of the other program.
    return tuple(dict.fromkeys(name for name, _ in sorted(found, key=lambda one: bool(learners_that_take(*one)))))


def options(program: Program, learners_too: bool = False) -> dict[str, Any]:
    """Return the settings that switch something on that the paper does not have, each with the value that is off.

    With `learners_too`, those that only some learners have are included.
    """
    found = {one.name: one.flags.off for one in all_settings(program) if one.flags.off is not ...}
    return {name: off for name, off in found.items() if learners_too or not learners_that_take(name, program)}


def not_compared(name: str) -> bool:
    """Return True if a report ignores this key of settings.json when it checks if two runs have the same settings."""
    return name in settings_that_are("free") or name in settings_that_are("seed") or name in _IDENTITY


def takes(program: Program, learner: str, setting: str) -> bool:
    """Return True if a run of `learner` has the setting `setting`.

    For an unknown learner, perhaps one of a plugin that is not imported, it is True for every setting.
    """
    if learner not in _ENTRIES or _ENTRIES[learner].settings(program) is None:
        return True
    takers = learners_that_take(setting, program)
    return not takers or learner in takers


class RunSettings(Settings):
    """Base class for all settings of a run. `learner_settings` has the additional settings of the learner."""

    program: ClassVar[Program]
    learner: str
    learner_settings: LearnerSettings | None
    average: str | None

    @property
    def average_weights(self) -> AverageWeights | None:
        """The weights of the average that predicts, as the setting `average` says; None without an average."""
        return None if self.average is None else AverageWeights.parse(self.average)

    def _complete_and_check_learner_settings(self) -> None:
        """Check the additional settings of the learner. If they are None, first set them to the default settings.

        Subclasses call this at the end of `__post_init__`, because the check compares them with the other settings.
        """
        kind = find_learner(self.learner, self.program).settings(self.program)
        # `kind` cannot be None, because find_learner accepts only learners with a settings class for `program`. The
        # assert is for the type checker.
        assert kind is not None
        if self.learner_settings is None:
            object.__setattr__(self, "learner_settings", kind())
        if not isinstance(self.learner_settings, kind):
            raise SettingError(
                f"learner_settings={self.learner_settings!r} must be an object of the class {kind.__name__}, which "
                f"contains the additional settings of learner={self.learner}"
            )
        self.learner_settings.check_run(self)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of setting names to values, with the additional settings of the learner."""
        return super().to_json() | (self.learner_settings.to_json() if self.learner_settings is not None else {})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], given: Collection[str] | None = None) -> Self:
        """Return the settings object for a mapping of setting names to values.

        Args:
            values: setting name -> value. If the value of an additional setting of the learner is None, the setting
                gets its default value.
            given: names of the settings that the user typed; by default all. Other settings come from a preset. Then
                those that only other learners have are ignored.

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
        errors.collect(lambda: find_learner(learner, cls.program))
        kind = None if errors.messages else find_learner(learner, cls.program).settings(cls.program)
        common, own = [one.name for one in describe(cls)], own_settings(learner, cls.program) if kind else []
        of_others = {name for entry in learners(cls.program) for name in own_settings(entry.name, cls.program)} - set(
            own
        )
        errors.collect(lambda: refuse_unknown_keys(values, [*common, *own, *of_others]))
        for name in sorted(of_others & values.keys()) if kind else []:
            if values[name] is not None and (given is None or name in given):
                takers = ", ".join(learners_that_take(name, cls.program))
                errors.messages.append(
                    f"{name}={values[name]} is for learner={takers}, not for learner={learner}: leave out {name}, or "
                    f"choose another learner"
                )
        arguments = {name: values[name] for name in common if name in values}
        if kind is None:
            # Check the other settings with the default learner, because the settings of this one are not known.
            arguments.pop("learner", None)
        else:
            errors.collect(
                lambda: arguments.update(
                    learner_settings=kind(**{name: values[name] for name in own if values.get(name) is not None})
                )
            )
        settings: list[Self] = []
        errors.collect(lambda: settings.append(cls(**arguments)))
        errors.raise_all()
        return settings[0]


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
        vision=UnionMixSettings,
    ),
    LearnerEntry(
        "gens", "gEns", "An ensemble to which each stage adds new networks and trains only these.",
        vision=GrowingEnsembleSettings, language_model=LanguageModelGrowingEnsembleSettings,
    ),
    LearnerEntry(
        "gmoe", "gMoE", "A mixture of experts in which the experts with the largest loss are copied before a stage.",
        vision=GrowingMixtureSettings, language_model=LanguageModelGrowingMixtureSettings,
    ),
    LearnerEntry(
        "ff", "FF", "One network whose layers grow where the loss falls fastest (Firefly).",
        vision=FireflySettings,
    ),
    LearnerEntry("moe", "MoE", "A mixture of experts that does not grow.", vision=MixtureSettings),
    LearnerEntry(
        "gmoe_flat", "gMoE (flat gate)",
        "A growing mixture with one softmax over all experts instead of a tree of gates.",
        vision=GrowingMixtureSettings,
    ),
    LearnerEntry(
        "ens_moe", "Ens of MoEs", "An ensemble to which each stage adds a new mixture of experts.",
        vision=EnsembleOfMixturesSettings,
    ),
):  # fmt: skip
    add_learner(_entry)

"""The registry of the vision learners: the class of each learner, by name."""

from collections.abc import Callable

from fairseq_alma.core.catalogue import LearnerEntry, add_learner, learners
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.settings import describe
from vision.learners.base import VisionLearner
from vision.settings import VisionSettings

LEARNERS: dict[str, type[VisionLearner]] = {}
"""The class of each vision learner, by name of the learner. `register_learner` adds entries."""


def register_learner(
    name: str,
    *,
    label: str | None = None,
    summary: str = "",
    settings: type[LearnerSettings] | None = None,
    grows: bool = False,
) -> Callable[[type[VisionLearner]], type[VisionLearner]]:
    """Return a class decorator that makes a learner available as `learner=NAME`.

    Args:
        name: the value of `learner=`.
        label: name of the learner in figures and tables. By default it is `name`, or the label in
            `fairseq_alma.core.catalogue` if the learner is listed there.
        summary: one sentence for `--help`. By default it is the first line of the learner class's docstring.
        settings: class of the settings that only this learner has. By default there are no such settings.
        grows: whether the learner adds capacity between stages.

    Raises:
        ValueError: if a setting of the learner has the same name as a setting that all runs have, or if there is a
            built-in learner with this name.
    """
    in_catalogue = name in {entry.name for entry in learners("vision")}
    has_new_entry = not in_catalogue or label is not None or settings is not None
    own = settings or LearnerSettings
    if taken := {one.name for one in describe(own)} & {one.name for one in describe(VisionSettings)}:
        raise ValueError(
            f"learner {name!r} declares settings with names that alma-vision already uses: "
            f"{', '.join(sorted(taken))}. Give these settings other names in the learner"
        )

    def register(cls: type[VisionLearner]) -> type[VisionLearner]:
        if name in LEARNERS and LEARNERS[name].__module__.startswith("vision.") and cls is not LEARNERS[name]:
            # A run of the built-in learner would continue with this one.
            raise ValueError(f"there is a built-in learner {name!r}: give your learner another name")
        LEARNERS[name] = cls
        if has_new_entry:
            first_line = (cls.__doc__ or "").strip().partition("\n")[0]
            add_learner(LearnerEntry(name, label or name, summary or first_line, grows, vision=own))
        return cls

    return register

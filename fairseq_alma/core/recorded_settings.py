"""Compare the settings of a command with those that a run folder has recorded in settings.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.settings import Count, NonNegative
from fairseq_alma.core.waiting import check_wait

DATA = {
    "test_digest": "test set", "pixels": "normalisation of the images", "dictionary": "dictionary of the stream",
    "evaluated_on": "validation or test text of the stream",
}  # fmt: skip
"""Keys that describe data, and what is different if they differ."""
CODE = ("plugin", "learner", "dataset", "transform", "backbone")
"""What the user can write. settings.json has a digest of its source code, with the key NAME_digest."""


class RecordedSettings(TypedDict, total=False):
    """The keys of settings.json that are used without the command that wrote them."""

    learner: str
    seed: NonNegative
    seeds: Count
    wait: Count | str | list[Count]
    preset: str | None
    arrivals: Count | None
    mega_batches: Count | None
    cer_from: NonNegative
    dataset: str
    plugin: str | None
    backbone: str | None
    backbone_digest: str
    stream: str
    evaluated_on: list[str]
    fairseq: str
    precision: Literal["auto", "float32", "tf32", "bfloat16"]
    batch_size: Count | None
    forks: dict[str, dict[str, list[Any]]]


def read_settings(folder: str | Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of settings.json in a run folder.

    Raise RunError if the file is damaged, or if it lacks one of the settings in `required`.
    """
    path = Path(folder) / "settings.json"
    advice = "restore the file from a backup, or choose another out= for a new run"
    found = dict(read_json(path, RecordedSettings, advice=advice))
    try:
        check_wait(found.get("wait", 1))
    except SettingError as error:
        raise RunError(f"{path} is damaged ({error}): {advice}") from error
    if missing := [name for name in required if name not in found]:
        raise RunError(f"{path} is damaged ({', '.join(missing)} is missing): {advice}")
    return found


def differing_settings(folder: Path, settings: Mapping[str, Any], free: Sequence[str]) -> list[str]:
    """Return one line for each setting whose value differs from that in settings.json of a run folder, if it exists.

    For `settings` and `free`, see SeedRecord.
    """
    if not (folder / "settings.json").exists():
        return []
    before = _flat(read_settings(folder))
    now = _flat(settings)
    differing = [
        key for key in sorted(before.keys() | now.keys())
        if key.split(".")[0] not in free and before.get(key) != now.get(key)
    ]  # fmt: skip
    if not DATA.keys().isdisjoint(differing) and before.get("stream") != now.get("stream"):
        differing.insert(0, "stream")  # the path may change, but not what is there
    return [f"{key}: was {_value(before, key)}, is {_value(now, key)}{_hint(key)}" for key in differing]


def other_settings_message(folder: Path, differing: Sequence[str], fork_at: int | None) -> str:
    """Return the error message for a run folder that contains a run with other settings, the lines `differing`.

    `fork_at` is the first stage that would use the new settings; None if the run cannot be forked.
    """
    advice = "Use the same settings to continue this run, or choose another out= for a new run."
    if fork_at is not None:
        advice += f" To continue this run with the new settings from stage {fork_at} on, add fork=true."
    return f"{folder} contains a run with other settings:\n  " + "\n  ".join(differing) + f"\n{advice}"


def _value(settings: Mapping[str, Any], key: str) -> str:
    """Return a value for a message. Of a list of digests, the beginnings are enough."""
    value = settings.get(key, "not set")
    return repr([one[:12] for one in value] if key == "evaluated_on" and isinstance(value, list) else value)


def _hint(key: str) -> str:
    """Return an explanation of a key that is no setting."""
    if key in DATA:
        return f" (the {DATA[key]} has changed)"
    what = key.removesuffix("_digest")
    return f" (the source code of the {what} has changed)" if what in CODE and what != key else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat mapping with dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat

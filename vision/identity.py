"""What identifies a run besides its settings and its mega-batches: the user's code, the test set, the normalisation."""

from collections.abc import Callable
from typing import Any

from fairseq_alma.app.plugins import load_function, plugin_digest, source_digest
from fairseq_alma.core.datasets import entry_of
from vision.dataset_names import kind_of
from vision.datasets import Dataset
from vision.learners import LEARNERS
from vision.networks.architectures import find_architecture
from vision.settings import VisionSettings
from vision.stream import digest_of


def identity_of(settings: VisionSettings, dataset: Dataset) -> dict[str, Any]:
    """Return what identifies a run besides its settings and its mega-batches, for settings.json.

    These are digests of the user's code and of the test set, and the normalisation of the pixels.
    """
    pixels = [dataset.pixels.largest, dataset.pixels.mean, dataset.pixels.deviation]
    identity: dict[str, Any] = {
        "test_digest": digest_of(dataset.test),
        "pixels": [_rounded(value) for value in pixels],
    }
    if settings.plugin:
        identity["plugin_digest"] = plugin_digest(settings.plugin)
    for name, code in _code_of_user(settings).items():
        if code.__module__.partition(".")[0] != __name__.partition(".")[0]:
            identity[f"{name}_digest"] = source_digest(code, name, str(getattr(settings, name)))
    return identity


def _rounded(value: float | tuple[float, ...]) -> float | list[float]:
    """Return numbers with seven digits, as a JSON value."""
    if isinstance(value, tuple):
        return [float(f"{one:.7g}") for one in value]
    return float(f"{value:.7g}")


def _code_of_user(settings: VisionSettings) -> dict[str, Callable[..., Any]]:
    """Return the functions and classes that settings name, by name of the setting. Some of them may be ours."""
    code: dict[str, Callable[..., Any]] = {"learner": LEARNERS[settings.learner]}
    entry = entry_of(settings.dataset)
    if kind_of(settings.dataset) == "function":
        code["dataset"] = load_function("dataset", settings.dataset)
    elif entry is not None and not isinstance(entry.load, str):
        code["dataset"] = entry.load
    if settings.transform:
        code["transform"] = load_function("transform", settings.transform)
    if settings.network != "mlp":
        code["backbone"] = find_architecture(settings.network).function
    return code

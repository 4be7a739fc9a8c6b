"""The commands for text as Python functions: prepare a stream, extend it, train on it, use the model.

import fairseq_alma as alma

if __name__ == "__main__":
    alma.prepare("streams/news", "text:january.jsonl", partition="chronological", period="month", causal=True)
    alma.extend("streams/news", "text:february.jsonl")
    run = alma.run(stream="streams/news", out="runs/news", preset="anytime", updates=300)
    print(run.curves["perplexity"], run.predictor.score("Some text."))

`fairseq_alma.deploy.deploy` and `go_back` do what alma-deploy does; `data_prep.prepare.drop_last` takes a month back.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.prepare import prepare as prepare_stream
from data_prep.settings import PrepSettings
from data_prep.settings.options import options_of
from data_prep.sources import Source
from fairseq_alma.api import LanguagePredictor, load
from fairseq_alma.app.command import composed, setting_values
from fairseq_alma.app.finished_run import FinishedRun, chosen_settings
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.run import CONFIGS, OTHER_KEYS, other_architectures, refuse_other_layout, run_seeds
from fairseq_alma.lm.settings import LanguageModelSettings


class Run(FinishedRun):
    """A finished run of a language model, or the runs of several seeds."""

    settings: LanguageModelSettings

    @cached_property
    def predictor(self) -> LanguagePredictor:
        """The deployed predictor of the first seed: `run.predictor.score(texts)`, `run.predictor.generate(prompts)`."""
        return load(self.folders[0], arch=self.settings.arch)


def prepare(out: str | Path, sources: str | Collection[str], **options: Any) -> StreamFolder:
    """Make a stream, as the command `alma-prep OUT --source ...` does, or check a finished one.

    A script must call this function under `if __name__ == "__main__":`, because its worker processes import the script.

    Args:
        out: the stream folder.
        sources: where the text is, as after `--source`: KIND:PATH, or several of them.
        **options: the options of `alma-prep --help`, with underscores: `mega_batches=4`, `vocab_size=8000`.

    Raises:
        AlmaError: if an option is unknown or invalid, or if the stream cannot be made.
    """
    names = {option.destination: name for name, option in options_of(PrepSettings).items()}
    if unknown := sorted(options.keys() - names.keys()):
        raise SettingError(f"{unknown[0]}= is not an option of alma-prep: use one of {', '.join(sorted(names))}")
    given: dict[str, Any] = {
        names[key]: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    sources = [sources] if isinstance(sources, str) else sources
    prepare_stream(PrepSettings(Path(out), tuple(map(Source.parse, sources)), given=tuple(given), **given))
    return StreamFolder.open(out)


def extend(out: str | Path, sources: str | Collection[str], **options: Any) -> StreamFolder:
    """Add mega-batches to a stream, as `alma-prep --extend OUT --source ...` does. See `prepare`."""
    return prepare(out, sources, extend=True, **options)


def run(settings: LanguageModelSettings | None = None, /, **values: Any) -> Run:
    """Train and evaluate a learner on a stream of mega-batches, as the command `alma-lm` does.

    The settings have the same names as on the command line: `run(stream="streams/news", out="runs/sm", updates=300)`.
    If the folder `out` contains an interrupted run with the same settings, or if the stream has grown, the run is
    continued. A finished run is returned at once. If a gate refuses a new predictor, `run.predictor` is the
    previous one, and `run.ledger[-1].scores.gate` says why.

    Args:
        settings: all settings, as an object. With this, no setting can be given by name.
        **values: the settings (see `alma-lm --help`), also `preset` and `arch`.

    Raises:
        AlmaError: if the settings are invalid, if the stream is missing or damaged, if a stage fails, or if `out`
            contains a run with other settings.
    """
    settings = chosen_settings(settings, values, _settings_from)
    refuse_other_layout(settings)
    run_seeds(settings)
    result = Run(settings, Path(settings.out).absolute(), [])
    result.ledgers.extend(Ledger(RunFolder(folder).ledger).rows() for folder in result.folders)
    return result


def _settings_from(given: Mapping[str, Any]) -> LanguageModelSettings:
    """Return the settings that `alma-lm` has if the given values are on its command line."""
    if plugin := given.get("plugin"):
        load_plugin(str(plugin))
    overrides, own = [f"preset={given.get('preset', 'paper')}"], {}
    if "arch" in given:
        if (CONFIGS / "arch" / f"{given['arch']}.yaml").is_file():
            overrides.append(f"arch={given['arch']}")
        elif (own := other_architectures().get(str(given["arch"]), {})) == {}:
            raise SettingError(f"arch={given['arch']!r} is not an architecture of a language model: see alma-lm --help")
    config = composed(CONFIGS, "alma_lm", overrides, own)
    values = {"stream": "", "out": "", **setting_values(config, OTHER_KEYS), **given}
    for name in ("stream", "out"):
        if not values[name]:
            raise SettingError(f"{name}= is missing: give a folder")
    return LanguageModelSettings.from_mapping({**values, "out": str(Path(values["out"]).absolute())}, given)

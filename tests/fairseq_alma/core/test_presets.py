import pytest
import yaml

from fairseq_alma.app.tables import title_of
from fairseq_alma.core.presets import anytime_settings, is_anytime
from tests.commands import ROOT

FILES = {
    "vision": "vision/configs/preset/anytime.yaml",
    "language model": "fairseq_alma/lm/configs/preset/anytime.yaml",
}


@pytest.mark.parametrize("half", FILES)
def test_the_settings_of_the_recipe_are_those_of_its_preset(half):
    preset = yaml.safe_load((ROOT / FILES[half]).read_text())
    own = {name: value for name, value in preset.items() if name not in ("defaults", "preset")}
    assert own and anytime_settings(half) == {"learner": "sm", "wait": 1, **own}


def test_the_title_of_a_ledger_says_anytime_only_if_no_setting_of_the_recipe_was_changed():
    settings = {**anytime_settings("language model"), "preset": "anytime", "lr": 0.5}
    assert is_anytime("language model", settings)
    assert title_of("runs/a", settings) == "runs/a: anytime"
    assert title_of("runs/a", settings | {"wait": 2}) == "runs/a: learner=sm wait=2 preset=anytime"
    assert title_of("runs/a", {"dataset": "mnist", "learner": "sm", "wait": 1}) == "runs/a: learner=sm wait=1"

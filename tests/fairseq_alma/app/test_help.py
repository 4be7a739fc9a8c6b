"""`--help` says of each setting what it means, its default, and which learners take it."""

import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.app.help import help_text, settings_reference
from fairseq_alma.core.catalogue import learners
from fairseq_alma.lm.settings import LanguageModelSettings
from vision.settings import VisionSettings


def test_a_setting_of_every_run_has_no_learners():
    reference = {one.name: one for one in settings_reference(VisionSettings)}
    assert reference["out"].default == "runs/DATA/SETTINGS"
    assert reference["epochs"].default == "100"
    assert reference["replay"].default == "false"
    assert reference["epochs"].learners == ()
    assert reference["epochs"].text == "Number of epochs in each stage."


def test_a_setting_of_several_learners_appears_once_with_all_of_them():
    reference = [one for one in settings_reference(VisionSettings) if one.name == "members"]
    assert [(one.default, one.learners) for one in reference] == [("5", ("ens", "umix")), ("1", ("gens", "ens_moe"))]


def test_the_text_has_every_learner_preset_and_setting():
    text = help_text("What it does.", LanguageModelSettings, ["paper", "quickstart"])
    assert text.startswith("What it does.")
    assert "paper, quickstart" in text
    for entry in learners("language model"):
        assert f"  {entry.name} " in text
    for one in settings_reference(LanguageModelSettings):
        assert f"  {one.name} " in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", ["alma-vision", "alma-lm"])
def test_the_commands_print_it(command):
    result = subprocess.run([str(Path(sys.executable).with_name(command)), "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Settings of single learners:" in result.stdout
    assert "Number of experts" in result.stdout

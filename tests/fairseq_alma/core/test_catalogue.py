"""The catalogue is the one place that says which learners there are and which settings each of them takes."""

import ast
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fairseq_alma.core.catalogue import (
    LearnerEntry,
    add_learner,
    find_learner,
    label_of,
    learners,
    learners_that_take,
    options,
    own_settings,
    remove_learner,
    settings_that_are,
    takes,
)
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LearnerSettings
from fairseq_alma.core.settings import describe
from fairseq_alma.lm.learners import LEARNERS as LANGUAGE_MODEL_LEARNERS
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import ROOT
from vision.learners import LEARNERS as VISION_LEARNERS
from vision.settings import VisionSettings

PROGRAMS = {
    "vision": (VISION_LEARNERS, VisionSettings),
    "language model": (LANGUAGE_MODEL_LEARNERS, LanguageModelSettings),
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_every_entry_is_implemented_and_documented(program):
    implemented, settings = PROGRAMS[program]
    common = {one.name for one in describe(settings)}
    assert {entry.name for entry in learners(program)} == set(implemented)
    for entry in learners(program):
        assert entry.label and entry.summary.endswith(".")
        for one in describe(entry.settings(program)):
            assert one.text, f"{one.name} of {entry.name} has no documentation"
            assert one.name not in common
    for one in describe(settings):
        assert one.text, f"{one.name} has no documentation"


def test_learners_are_listed_as_the_paper_lists_them():
    assert [entry.label for entry in learners("language model")] == ["SM", "Ens", "gEns", "gMoE"]
    assert [entry.label for entry in learners()][:6] == ["SM", "Ens", "UMix", "gEns", "gMoE", "FF"]


def test_a_learner_takes_common_settings_and_its_own():
    assert takes("vision", "sm", "wait")
    assert takes("vision", "gmoe", "experts")
    assert not takes("vision", "sm", "experts")
    assert takes("language model", "sm", "experts")  # every language model is a mixture
    assert takes("vision", "a plugin that is not imported", "anything")
    assert learners_that_take("members", "vision") == ["ens", "umix", "gens", "ens_moe"]
    assert learners_that_take("wait", "vision") == []
    assert own_settings("gens", "language model") == ["members"]
    assert own_settings("sm", "language model") == []


def test_what_a_setting_is_is_declared_at_its_field():
    assert settings_that_are("seed") == ("seed",)
    assert settings_that_are("size") == ("width", "arch", "experts", "members")
    assert settings_that_are("forkable", "vision") == ()
    assert "lr" in settings_that_are("forkable", "language model")
    assert options("vision")["average"] is None
    assert "grow_router" not in options("language model")
    assert options("language model", learners_too=True)["grow_router"] == "copy"


def test_labels():
    assert [label_of(name) for name in ("gmoe_flat", "ens_moe", "unknown")] == [
        "gMoE (flat gate)",
        "Ens of MoEs",
        "unknown",
    ]


def test_a_learner_of_the_other_half_is_refused():
    with pytest.raises(SettingError, match=r"learner='ff' is not one of sm, ens, gens, gmoe"):
        find_learner("ff", "language model")


def test_an_entry_can_be_added_and_removed():
    add_learner(LearnerEntry("extra", "Extra", "A test.", vision=LearnerSettings))
    assert find_learner("extra", "vision").label == "Extra"
    remove_learner("extra")
    with pytest.raises(SettingError, match="learner='extra' is not one of"):
        find_learner("extra", "vision")


# ---- No other file names a label, or a setting of a learner, as a fact of its own.

THE_CATALOGUE = {"fairseq_alma/core/catalogue.py", "fairseq_alma/core/learner_settings.py"}
MAY_NAME = {
    "fairseq_alma/core/settings.py": {"split_by"},  # alma-lm has another setting instead
    "fairseq_alma/huggingface/card.py": {"experts"},  # a setting of all language models
    "fairseq_alma/huggingface/modeling_alma.py": {"members"},  # a name of transformers' weights
    "fairseq_alma/lm/learners.py": {"combine"},  # a key of predictor.json
    "fairseq_alma/lm/table2.py": {"experts", "grow_experts", "members"},  # presets, which set them
    "vision/learners/base.py": {"combine"},  # a key of predictor.json
    "vision/predictor.py": {"combine"},  # the same
    "fairseq_alma/report/tables.py": {"experts"},  # a column of the paper's tables
}
"""File -> words that happen to be the name of a setting, and why they are there."""


def strings_of(path: Path) -> set[str]:
    """Every string of a source file that is no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation)
    return {node.value for node in constants if isinstance(node.value, str)}


def source_files():
    for package in ("fairseq_alma", "vision", "launch", "data_prep"):
        yield from sorted((ROOT / package).rglob("*.py"))


def test_no_other_source_file_names_a_label_or_the_settings_of_a_learner():
    labels = {entry.label for entry in learners()}
    settings = {
        name for program in PROGRAMS for entry in learners(program) for name in own_settings(entry.name, program)
    }
    settings -= {entry.name for entry in learners()}
    found = {}
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        if name not in THE_CATALOGUE and (named := strings_of(path) & (labels | settings) - MAY_NAME.get(name, set())):
            found[name] = named
    assert found == {}


@pytest.mark.parametrize(
    ("program", "config"),
    [("vision", "vision/configs/alma_vision.yaml"), ("language model", "fairseq_alma/lm/configs/alma_lm.yaml")],
)
def test_the_folders_of_a_sweep_are_not_named_after_settings_that_may_change(program, config):
    """So the sweep continues with another value. Those that change the ledger may be what is swept."""
    excluded = OmegaConf.load(ROOT / config).hydra.job.config.override_dirname.exclude_keys
    assert set(settings_that_are("free", program)) - {*excluded} == {"preset", "last_group"} | (
        {"arrivals"} if program == "vision" else {"seeds", "mega_batches"}
    )

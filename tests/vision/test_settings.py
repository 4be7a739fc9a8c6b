"""Settings are checked when they are made; the YAML's defaults are theirs; presets say what the paper says."""

from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from fairseq_alma.app.command import setting_values
from fairseq_alma.core.catalogue import learners, own_settings
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import EnsembleSettings, GrowingEnsembleSettings, UnionMixSettings
from fairseq_alma.core.settings import MAX_SEED, defaults_of
from vision.cli import CONFIGS, settings_of
from vision.settings import VALIDATION_SHARE, VisionSettings


def made(**values) -> VisionSettings:
    return VisionSettings.from_mapping({"out": "x", **values})


def composed(*overrides: str) -> dict:
    """What `alma-vision overrides` is made of."""
    with initialize_config_dir(version_base="1.1", config_dir=str(CONFIGS)):
        return setting_values(compose("alma_vision", overrides=[*overrides]))


@cache
def preset(name: str, *more: str) -> VisionSettings:
    """The settings of `alma-vision preset=name ...`. What the preset gives to other learners does not count."""
    return settings_of(composed(f"preset={name}", *more, "out=somewhere"), given=[])


def changed(name: str) -> dict:
    """The settings that a preset gives in another way than the paper's preset, over all learners."""
    found = {}
    for entry in learners("vision"):
        experts = ["experts=2"] if "moe" in entry.name else []
        paper, other = (preset(one, f"learner={entry.name}", *experts).to_json() for one in ("paper", name))
        found |= {key: value for key, value in other.items() if value != paper[key] and key != "preset"}
    return found


def test_the_defaults_of_the_command_are_those_of_the_settings():
    values = composed()
    assert (values.pop("out"), values.pop("plugin")) == (None, None)
    common = {key: value for key, value in defaults_of(VisionSettings).items() if key != "plugin"}
    own = {name for entry in learners("vision") for name in own_settings(entry.name, "vision")}
    assert values == {**common, **dict.fromkeys(own)}  # null: the learner's own default


def test_the_paper_appendix_b():
    paper = preset("paper")
    assert (paper.optimizer, paper.lr, paper.batch_size, paper.epochs) == ("adadelta", 1.0, 128, 100)
    assert (paper.select_by, VALIDATION_SHARE, paper.cer_from) == ("validation_loss", 0.1, 1)
    assert preset("paper", "learner=ens").learner_settings == EnsembleSettings(5, "probability", bagging=False)
    assert preset("paper", "learner=umix").learner_settings == UnionMixSettings(5, "logit")
    assert preset("paper", "learner=gens").learner_settings == GrowingEnsembleSettings(1, "random", "probability")
    mixture = preset("paper", "learner=gmoe").learner_settings
    assert (mixture.split_by, mixture.grow_every, mixture.hard_gates) == ("validation_loss", 1, False)


def test_the_first_version_of_the_paper():
    assert changed("paper_v1") == {
        "mega_batches": 50, "grow_every": 5, "hard_gates": True, "cer_from": 0,
    }  # fmt: skip


def test_the_original_code():
    assert changed("original_code") == {
        "select_by": "validation_accuracy", "new_members_from": "copy", "combine": "logit",
        "split_by": "gate_mass", "grow_by": "width", "grow_ratio": 0.6,
        "crop_border": -1.9,
    }  # fmt: skip


def test_cifar_has_a_recipe_of_its_own():
    paper = preset("paper", "dataset=cifar10")
    assert (paper.optimizer, paper.lr, paper.weight_decay) == ("sgd", 0.01, 1e-4)
    assert (paper.epochs, paper.batch_size, paper.crop_padding) == (100, 128, 4)
    v1 = preset("paper_v1", "dataset=cifar100", "learner=gmoe")
    assert (v1.learner_settings.hard_gates, v1.learner_settings.experts) == (False, 2)
    assert (v1.epochs, v1.num_mega_batches, v1.cer_from) == (200, 100, 0)
    mnist = preset("paper_v1", "dataset=mnist", "learner=gmoe")
    assert (mnist.learner_settings.hard_gates, mnist.learner_settings.experts) == (True, 2)
    assert (mnist.epochs, mnist.num_mega_batches, mnist.optimizer) == (100, 50, "adadelta")
    # Another optimizer has defaults of its own.
    assert made(dataset="cifar10", optimizer="adadelta").lr == 1.0
    assert made(dataset="mnist", optimizer="sgd").lr == 0.01


def test_quickstart_is_the_paper_on_digits():
    assert changed("quickstart") == {}
    assert preset("quickstart").dataset == "digits"


def test_what_is_given_overrules_a_preset():
    settings = preset("paper_v1", "learner=gmoe", "grow_every=1")
    assert (settings.learner_settings.grow_every, settings.mega_batches) == (1, 50)


@pytest.mark.parametrize(
    ("dataset", "num_mega_batches"),
    [("digits", 20), ("mnist", 500), ("emnist", 500), ("cifar10", 100), ("cifar100", 100)],
)
def test_b_is_the_datasets_own_where_none_is_given(dataset, num_mega_batches):
    assert made(dataset=dataset).num_mega_batches == num_mega_batches
    assert made(dataset=dataset, mega_batches=7).num_mega_batches == 7
    assert made(dataset=dataset, mega_batches=7, arrivals=3).stream_settings().num_mega_batches == 3


def test_each_seed_has_a_folder_of_its_own():
    several = made(out="x", seed=3, seeds=2)
    assert several.seed_folders == [Path("x/seed_3"), Path("x/seed_4")]
    assert (several.of_one_seed(1).seed, several.of_one_seed(1).seed_folders) == (4, [Path("x/seed_4")])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"out": ""}, "out= is missing"),
        ({"out": None}, "out= is missing"),
        ({"dataset": "cifar"}, "dataset='cifar' is not one of digits, mnist, emnist"),
        ({"dataset": ["mnist"]}, "dataset=['mnist'] must be a string"),
        ({"data_root": None}, "data_root=None must be a string"),
        ({"learner": "nobody"}, "learner='nobody' is not one of sm, ens, umix, gens, gmoe"),
        ({"learner": ["sm", "ens"]}, "learner=['sm', 'ens'] must be a string"),
        ({"wait": 0}, "wait=0 must be an integer of at least 1"),
        ({"wait": 1.5}, "wait=1.5 must be an integer"),
        ({"wait": 21}, "wait=21 must lie between 1 and 20 mega-batches"),
        ({"wait": 4, "arrivals": 3}, "wait=4 must lie between 1 and 3 mega-batches"),
        ({"arrivals": 21}, "arrivals=21 must be at most mega_batches=20"),
        ({"arrivals": 0}, "arrivals=0 must be an integer of at least 1"),
        ({"replay": 2}, "replay=2 must be false, all, uniform, a share between 0 and 1, or for text auto"),
        ({"replay": "auto"}, "replay=auto is for text only: give false, all, uniform, or a share between 0 and 1"),
        ({"replay": True}, "replay=True must be false"),
        ({"mega_batches": 0}, "mega_batches=0 must be an integer of at least 1"),
        ({"width": 0}, "width=0 must be an integer of at least 1"),
        ({"width": True}, "width=True must be an integer"),
        ({"epochs": "many"}, "epochs='many' must be an integer"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learner": "ens", "members": 0}, "members=0"),
        ({"learner": "gens", "members": 0}, "members=0"),
        ({"learner": "gmoe", "experts": 0}, "experts=0"),
        ({"learner": "gmoe", "grow_every": 0}, "grow_every=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"seed": -1}, "seed=-1 must be an integer of at least 0"),
        ({"seed": MAX_SEED}, f"seed={MAX_SEED} with seeds=1: all seeds must be below {MAX_SEED}"),
        ({"seed": MAX_SEED - 2, "seeds": 3}, "with seeds=3: all seeds must be below"),
        ({"lr": float("inf")}, "lr=inf must be a finite number above 0"),
        ({"weight_decay": float("nan"), "optimizer": "sgd"}, "weight_decay=nan must be a finite number, and not neg"),
        ({"learner": "ff", "grow_ratio": float("inf")}, "grow_ratio=inf must be a finite number above 0"),
        ({"lr": 0}, "lr=0 must be a finite number above 0"),
        ({"lr": float("nan")}, "lr=nan must be a finite number above 0"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"optimizer": "lamb"}, "optimizer='lamb' is not one of adadelta, sgd, nesterov, adam"),
        ({"optimizer": "sgd", "weight_decay": -0.1}, "weight_decay=-0.1 must be a finite number, and not negative"),
        ({"momentum": 0.9}, "unknown settings momentum"),
        ({"weight_decay": 0.1}, "weight_decay cannot be used with optimizer=adadelta"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
        ({"schedule": "wavy"}, "schedule='wavy' is not one of constant, cosine"),
        ({"precision": "tf32"}, "precision=tf32 cannot be used with backbone=mlp"),
        ({"cuda_graphs": True}, "cuda_graphs=true cannot be used with backbone=mlp"),
        ({"select_by": "luck"}, "select_by='luck' is not one of validation_loss, validation_accuracy"),
        ({"learner": "ens", "combine": "sum"}, "combine='sum' is not one of probability, logit, vote"),
        ({"learner": "gens", "combine": "sum"}, "combine='sum'"),
        ({"learner": "umix", "combine": "vote"}, "combine='vote' is not one of logit, logit_sum"),
        ({"learner": "gens", "new_members_from": "best"}, "new_members_from='best' is not one of random, copy"),
        ({"learner": "gmoe", "split_by": "size"}, "split_by='size' is not one of validation_loss, gate_mass"),
        ({"cer_from": 2}, "cer_from=2 is not one of 0, 1"),
        ({"learner": "gmoe", "hard_gates": 1}, "hard_gates=1 must be true or false"),
        ({"keep_stages": "no"}, "keep_stages='no' must be true or false"),
        ({"learner": "moe"}, "experts=1 must be at least 2, because learner=moe"),
        ({"learner": "ens_moe", "experts": 1}, "experts=1 must be at least 2, because learner=ens_moe"),
        (
            {"learner": "gens", "from_scratch": True},
            "from_scratch=true has no effect with learner=gens, whose stages train new networks",
        ),
        (
            {"learner": "ens_moe", "experts": 4, "from_scratch": True},
            "from_scratch=true has no effect with learner=ens_moe",
        ),
        ({"learner": "umix", "bagging": True}, "bagging=True is for learner=ens, not for learner=umix"),
        ({"learner": "sm", "members": 9}, "members=9 is for learner=ens, umix, gens, ens_moe, not for learner=sm"),
        ({"hard_gates": True}, "hard_gates=True is for learner=gmoe, moe, gmoe_flat, ens_moe, not for learner=sm"),
        ({"colour": "red"}, "unknown settings colour: the settings are arrivals, average,"),
        ({"epoch": 3}, "unknown settings epoch: did you mean epochs? --help lists all settings"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(SettingError) as error:
        VisionSettings.from_mapping({"out": "x", **values})
    assert message in str(error.value)


def test_a_missing_plugin_is_named():
    with pytest.raises(SettingError, match=r"plugin=no_such_module_of_mine: No module named .* Modules are searched"):
        settings_of({"out": "x", "plugin": "no_such_module_of_mine"})


def test_with_last_group_the_wait_may_be_longer_than_the_stream_is_now():
    assert (
        VisionSettings(dataset="digits", out="x", wait=21, last_group="wait").stream_settings().arrivals_of_stages == []
    )

"""Settings are checked when they are made; the YAML's defaults are theirs; presets say what the paper says."""

import pytest
from hydra import compose, initialize_config_dir

from fairseq_alma.app.command import setting_values
from fairseq_alma.core.errors import SettingError
from vision.run import CONFIGS, settings_of
from vision.settings import DEFAULTS, MAX_SEED, VisionSettings


def composed(*overrides: str) -> dict:
    """What `alma-vision overrides` is made of."""
    with initialize_config_dir(version_base="1.1", config_dir=str(CONFIGS)):
        return setting_values(compose("alma_vision", overrides=[*overrides]))


def preset(name: str, *more: str) -> VisionSettings:
    return settings_of(composed(f"preset={name}", *more, "out=somewhere"))


def changed(name: str) -> dict:
    """In what a preset differs from the paper's."""
    paper, other = preset("paper").to_json(), preset(name).to_json()
    return {key: value for key, value in other.items() if value != paper[key] and key != "preset"}


def test_the_defaults_of_the_command_are_those_of_the_settings():
    values = composed()
    assert (values.pop("out"), values.pop("plugin")) == (None, None)
    assert values == DEFAULTS


def test_the_paper_appendix_b():
    paper = preset("paper")
    assert (paper.optimizer, paper.lr, paper.batch_size, paper.epochs) == ("adadelta", 1.0, 128, 100)
    assert (paper.select_by, paper.validation_share, paper.cer_from) == ("validation_loss", 0.1, 1)
    assert (paper.members, paper.combine, paper.umix) == (5, "probability", "mean")
    assert (paper.new_members, paper.new_members_from, paper.gens_combine) == (1, "random", "probability")
    assert (paper.split_by, paper.grow_every, paper.hard_gates) == ("validation_loss", 1, False)


def test_the_first_version_of_the_paper():
    assert changed("paper_v1") == {
        "mega_batches": 50, "experts": 2, "grow_every": 5, "hard_gates": True, "cer_from": 0,
    }  # fmt: skip


def test_the_original_code():
    assert changed("original_code") == {
        "select_by": "validation_accuracy", "umix": "sum", "new_members_from": "copy", "gens_combine": "logit",
        "experts": 2, "split_by": "gate_mass", "grow_by": "width", "grow_ratio": 0.6,
        "crop_border": -1.9,
    }  # fmt: skip


def test_cifar_has_a_recipe_of_its_own():
    paper, v1 = preset("paper", "dataset=cifar10"), preset("paper_v1", "dataset=cifar100")
    assert (paper.optimizer, paper.lr, paper.momentum, paper.weight_decay) == ("sgd", 0.01, 0.9, 1e-4)
    assert (paper.epochs, paper.batch_size, paper.crop_padding, paper.nesterov) == (100, 128, 4, False)
    assert (v1.epochs, v1.hard_gates, v1.num_mega_batches, v1.experts, v1.cer_from) == (200, False, 100, 2, 0)
    mnist = preset("paper_v1", "dataset=mnist")
    assert (mnist.epochs, mnist.hard_gates, mnist.num_mega_batches, mnist.optimizer) == (100, True, 50, "adadelta")
    # With another optimizer its own defaults.
    assert VisionSettings("x", dataset="cifar10", optimizer="adadelta").lr == 1.0
    assert VisionSettings("x", dataset="mnist", optimizer="sgd").momentum == 0.9


def test_quickstart_is_the_paper_on_digits():
    assert changed("quickstart") == {}
    assert preset("quickstart").dataset == "digits"


def test_what_is_given_overrules_a_preset():
    settings = settings_of(composed("preset=paper_v1", "grow_every=1", "out=x"))
    assert (settings.grow_every, settings.mega_batches) == (1, 50)


@pytest.mark.parametrize(
    ("dataset", "num_mega_batches"),
    [("digits", 20), ("mnist", 500), ("emnist", 500), ("cifar10", 100), ("cifar100", 100)],
)
def test_b_is_the_datasets_own_where_none_is_given(dataset, num_mega_batches):
    assert VisionSettings("x", dataset=dataset).num_mega_batches == num_mega_batches
    assert VisionSettings("x", dataset=dataset, mega_batches=7).num_mega_batches == 7
    assert VisionSettings("x", dataset=dataset, mega_batches=7, arrivals=3).stream_settings().num_mega_batches == 3


def test_seeds_are_one_unless_they_are_given_apart():
    settings = VisionSettings("x", seed=3, data_seed=0, order_seed=7)
    purposes = ("data", "initialisation", "growth", "order", "gates")
    assert [settings.seed_of(purpose) for purpose in purposes] == [0, 3, 3, 7, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"out": ""}, "out= is missing"),
        ({"out": None}, "out= is missing"),
        ({"dataset": "cifar"}, "dataset='cifar' is not one of digits, mnist, emnist"),
        ({"dataset": ["mnist"]}, "dataset=['mnist'] must be text"),
        ({"data_root": None}, "data_root=None must be text"),
        ({"learner": "nobody"}, "learner='nobody' is not one of sm, ens, umix, gens, gmoe"),
        ({"learner": ["sm", "ens"]}, "learner=['sm', 'ens'] must be text"),
        ({"wait": 0}, "wait=0 must be a whole number of at least 1"),
        ({"wait": 1.5}, "wait=1.5 must be a whole number"),
        ({"wait": 21}, "wait=21 must lie between 1 and 20 mega-batches"),
        ({"wait": 4, "arrivals": 3}, "wait=4 must lie between 1 and 3 mega-batches"),
        ({"arrivals": 21}, "arrivals=21 must be at most mega_batches=20"),
        ({"arrivals": 0}, "arrivals=0 must be a whole number of at least 1"),
        ({"replay": 2}, "replay=2 must be false, all, or a share between 0 and 1"),
        ({"replay": True}, "replay=True must be false"),
        ({"mega_batches": 0}, "mega_batches=0 must be a whole number of at least 1"),
        ({"width": 0}, "width=0 must be a whole number of at least 1"),
        ({"width": True}, "width=True must be a whole number"),
        ({"epochs": "many"}, "epochs='many' must be a whole number"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"members": 0}, "members=0"),
        ({"new_members": 0}, "new_members=0"),
        ({"experts": 0}, "experts=0"),
        ({"grow_every": 0}, "grow_every=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"threads": 0}, "threads=0"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"data_seed": -1}, "data_seed=-1"),
        ({"seed": MAX_SEED}, f"seed={MAX_SEED} and 1 seeds from there on must lie below {MAX_SEED}"),
        ({"order_seed": MAX_SEED - 2, "seeds": 3}, "and 3 seeds from there on"),
        ({"lr": 0}, "lr=0 must be above 0"),
        ({"lr": float("nan")}, "lr=nan must be above 0"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"optimizer": "adam"}, "optimizer='adam' is not one of adadelta, sgd"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum=1.0 must lie in [0, 1)"),
        ({"optimizer": "sgd", "weight_decay": -0.1}, "weight_decay=-0.1 not below 0"),
        ({"momentum": 0.9}, "momentum, nesterov and weight_decay are for optimizer=sgd"),
        ({"validation_share": 0}, "validation_share=0 must lie between 0 and 1"),
        ({"validation_share": 1}, "validation_share=1 must lie between 0 and 1"),
        ({"select_by": "luck"}, "select_by='luck' is not one of validation_loss, validation_accuracy"),
        ({"combine": "sum"}, "combine='sum' is not one of probability, logit, vote"),
        ({"gens_combine": "sum"}, "gens_combine='sum'"),
        ({"umix": "max"}, "umix='max' is not one of mean, sum"),
        ({"new_members_from": "best"}, "new_members_from='best' is not one of random, copy"),
        ({"split_by": "size"}, "split_by='size' is not one of validation_loss, gate_mass"),
        ({"cer_from": 2}, "cer_from=2 must be 0 or 1"),
        ({"routing_examples": 5001}, "routing_examples=5001 must be at most 5000"),
        ({"hard_gates": 1}, "hard_gates=1 must be true or false"),
        ({"keep_stages": "no"}, "keep_stages='no' must be true or false"),
        ({"learner": "moe"}, "learner=moe needs experts=, at least 2"),
        ({"learner": "ens_moe", "experts": 1}, "learner=ens_moe needs experts=, at least 2"),
        (
            {"learner": "gens", "from_scratch": True, "new_members_from": "copy"},
            "from_scratch=true draws every network",
        ),
        ({"learner": "umix", "bagging": True}, "bagging is for learner=ens, not for learner=umix"),
        ({"colour": "red"}, "unknown settings colour: there are arrivals, bagging"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(SettingError) as error:
        VisionSettings.from_mapping({"out": "x", **values})
    assert message in str(error.value)


def test_a_plugin_that_is_not_there_is_told():
    with pytest.raises(SettingError, match=r"plugin=no_such_module_of_mine: No module named .* it is looked for here"):
        settings_of({"out": "x", "plugin": "no_such_module_of_mine"})

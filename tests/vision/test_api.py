"""`vision.run`: the same as the command alma-vision, for Python programs and notebooks."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import vision
from fairseq_alma.core.errors import RunError, SettingError
from tests.vision.tiny_runs import SMALL, as_arguments, ledger, small_settings, summary

DIGITS = load_digits()


def own_digits():
    """Return a dataset as a notebook's user would."""
    names = [f"digit {number}" for number in range(10)]
    return vision.dataset_from_arrays("my digits", DIGITS.images.astype("uint8"), DIGITS.target, class_names=names)


class OwnNetwork(nn.Sequential):
    """A network as a notebook's user would write one."""

    def __init__(self, image_shape, num_classes, width):
        channels, height, width_of_image = image_shape
        super().__init__(
            nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * (height - 2) * (width_of_image - 2), num_classes),
        )  # fmt: skip


OWN = {"mega_batches": 3, "epochs": 2, "width": 3, "device": "cpu", "batch_size": 64}


@pytest.fixture(autouse=True)
def same_process_settings():
    """Check that a test does not change the settings of the process."""
    names = ("torch threads", "dtype", "random state", "path")

    def found():
        return torch.get_num_threads(), torch.get_default_dtype(), torch.random.get_rng_state().tolist(), sys.path[:]

    before = found()
    yield
    for name, old, new in zip(names, before, found(), strict=True):
        assert old == new, name


def test_run_is_the_command(tmp_path, alma_vision):
    alma_vision(*as_arguments(learner="ens", members=2, seeds=2), f"out={tmp_path / 'command'}")
    values = {**SMALL, "learner": "ens", "members": 2, "seeds": 2}
    run = vision.run(out=str(tmp_path / "python"), **values)
    for seed in ("seed_0", "seed_1"):
        assert ledger(tmp_path / "python" / seed) == ledger(tmp_path / "command" / seed)
    assert run.folders == [tmp_path / "python/seed_0", tmp_path / "python/seed_1"]
    assert run.summary["mean"]["cer"] == summary(tmp_path / "command")["mean"]["cer"]
    # The command continues a run of Python, because all settings are equal.
    alma_vision(*as_arguments(learner="ens", members=2, seeds=2), f"out={tmp_path / 'python'}")


def test_a_finished_run_is_returned_at_once(tmp_path, monkeypatch):
    first = vision.run(small_settings(tmp_path))
    monkeypatch.setattr("vision.learners.base.train_stage", None)  # training would raise an error
    again = vision.run(small_settings(tmp_path))
    assert again.ledgers == first.ledgers


def test_curves_are_arrays_of_the_ledger(tmp_path):
    run = vision.run(small_settings(tmp_path, seeds=2, wait=2))
    assert run.curves["error_rate"].shape == (2, SMALL["mega_batches"] + 1)
    expected = [[row.scores.error_rate for row in rows] for rows in run.ledgers]
    assert run.curves["error_rate"].tolist() == expected
    assert run.curves["num_updates"][0].tolist() == [row.spent.num_updates for row in run.ledger]
    assert np.isnan(run.curves["validation_loss"][:, :2]).all()  # no stage before arrival 2
    assert run.curves["updated"][0].tolist() == [0, 0, 1, 0, 1]
    assert "t" not in run.curves


def test_presets(tmp_path):
    run = vision.run(preset="paper_v1", out=str(tmp_path), learner="gmoe", **{**SMALL, "wait": 2})
    assert (run.settings.own.grow_every, run.settings.own.hard_gates, run.settings.cer_from) == (5, True, 0)
    assert run.settings.recipe.epochs == SMALL["epochs"]  # what is given wins
    with pytest.raises(SettingError, match=r"preset='papr' is not one of original_code, paper"):
        vision.run(preset="papr", out=str(tmp_path))


def test_a_function_and_a_module_of_ones_own(tmp_path):
    run = vision.run(dataset=own_digits, backbone=OwnNetwork, learner="ens", members=2, out=str(tmp_path), **OWN)
    assert run.settings.dataset == "tests.vision.test_api:own_digits"
    assert run.settings.backbone == "tests.vision.test_api:OwnNetwork"
    recorded = json.loads((tmp_path / "settings.json").read_text())
    assert recorded["dataset_digest"] and recorded["backbone_digest"]
    test = own_digits().test
    probabilities = run.predictor(test.images)
    assert float((probabilities.argmax(1) != test.labels.numpy()).mean()) == run.ledger[-1].scores.error_rate
    assert run.predictor.class_names[3] == "digit 3"


def test_a_dataset_object(tmp_path):
    run = vision.run(dataset=own_digits(), backbone="mlp", out=str(tmp_path), **OWN)
    assert run.settings.dataset == "given:my digits"
    assert vision.run(dataset=own_digits(), backbone="mlp", out=str(tmp_path), **OWN).ledgers == run.ledgers
    with pytest.raises(SettingError, match=r"given to vision.run as a Dataset object"):
        vision.run(dataset="given:my digits", backbone="mlp", out=str(tmp_path), **OWN)
    changed = own_digits()
    changed.training.images[0] += 1
    with pytest.raises(RunError, match=r"used another stream: mega-batch . differs"):
        vision.run(dataset=changed, backbone="mlp", out=str(tmp_path), **OWN)


def test_a_dataset_object_with_the_name_of_a_known_dataset_gets_its_defaults(tmp_path):
    run = vision.run(dataset=vision.load_dataset("digits"), out=str(tmp_path), epochs=1, device="cpu")
    assert (run.settings.dataset, run.settings.network, run.settings.num_mega_batches) == ("digits", "mlp", 20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backbone": lambda: None}, r"backbone: .*<lambda>.* cannot be found again by its name"),
        ({"dataset": lambda: None}, r"dataset: .*<lambda>.* cannot be found again by its name"),
        ({"dataset": own_digits}, "backbone= is missing"),
        ({"dataset": own_digits, "backbone": "mlp"}, "mega_batches= is missing"),
        ({"membrs": 3}, "membrs"),
        ({"learner": "sm", "members": 3}, "members=3 is for learner="),
    ],
    ids=["lambda", "lambda data", "no backbone", "no mega-batches", "unknown", "other learner"],
)
def test_what_cannot_be_run(tmp_path, values, message):
    with pytest.raises(SettingError, match=message):
        vision.run(out=str(tmp_path), **values)
    assert not list(tmp_path.iterdir())


def test_settings_are_given_once(tmp_path):
    with pytest.raises(SettingError, match=r"settings object and also epochs, backbone: give all settings by name"):
        vision.run(small_settings(tmp_path), epochs=3, backbone="mlp")
    with pytest.raises(SettingError, match="out= is missing"):
        vision.run(dataset="digits")


def test_functions_of_a_script(tmp_path):
    """A script is as a notebook: its functions are in the module __main__."""
    script = """
import sys, vision
from sklearn.datasets import load_digits
def data():
    digits = load_digits()
    return vision.dataset_from_arrays("digits here", digits.images.astype("uint8"), digits.target)
def network(num_classes):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
print(vision.run(dataset=data, backbone=network, mega_batches=2, epochs=1, out=sys.argv[1]).summary["cer"])
"""
    path = tmp_path / "script.py"

    def output(text):
        path.write_text(text)
        done = subprocess.run([sys.executable, path, tmp_path / "run"], capture_output=True, text=True, check=False)
        return done.stdout or done.stderr

    first = output(script)
    assert float(first) > 0
    assert output(f"# a comment elsewhere\n{script}") == first
    assert "backbone_digest" in output(script.replace("Flatten(),", "Flatten(), nn.Linear(64, 64),"))
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "other"], capture_output=True, text=True, check=False
    )
    assert "the source code of the function cannot be read" in done.stderr
    with pytest.raises(SettingError, match=r"has no function network. Define it in this notebook or script first"):
        vision.load_predictor(tmp_path / "run")


def test_names_of_the_package():
    for name in vision.__all__:
        assert getattr(vision, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'rum'"):
        vision.rum  # noqa: B018

"""`vision.run`: the same as the command alma-vision, for Python programs and notebooks."""

import json
import linecache
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from sklearn.datasets import load_digits
from torch import nn

import vision
import vision.datasets
from fairseq_alma.core.errors import RunError, SettingError
from tests.commands import run_module
from tests.vision.test_killed import Child
from tests.vision.tiny_runs import SMALL, as_arguments, ledger, small_settings, summary
from vision.learners import SingleModel, register_learner
from vision.networks.architectures import register_backbone

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
    assert (
        run.settings.learner_settings.grow_every,
        run.settings.learner_settings.hard_gates,
        run.settings.cer_from,
    ) == (5, True, 0)
    assert run.settings.epochs == SMALL["epochs"]  # what is given wins
    with pytest.raises(
        SettingError, match=r"preset='papr' is not one of anytime, original_code, paper, paper_v1, quickstart"
    ):
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


class Output(NamedTuple):
    """What a process has printed."""

    out: str
    err: str


def output_of(code: Callable[[], object], folder: Path) -> Output:
    """Run code in a fork of this process, which saves the seconds that a new process needs to import torch."""

    def redirected():
        for number in (1, 2):
            os.dup2(os.open(folder / f"output_{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # Python's own streams may be those of pytest.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        code()

    child = Child(redirected)
    while not child.is_over():
        time.sleep(0.002)
    return Output(*((folder / f"output_{number}").read_text() for number in (1, 2)))


def run_as_main(text: str, *arguments: object) -> None:
    """Run a program that has no file, as `python -c` does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c", *map(str, arguments)]
    exec(compile(text, "<string>", "exec"), main.__dict__)


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

    def run_script():
        sys.argv = [str(path), str(tmp_path / "run")]
        runpy.run_path(str(path), run_name="__main__")

    def output_of_script(text):
        path.write_text(text)
        linecache.clearcache()
        return output_of(run_script, tmp_path)

    path.write_text(script)
    first = run_module("script", tmp_path / "run", folder=tmp_path)
    assert float(first.stdout) > 0
    assert output_of_script(f"# a comment elsewhere\n{script}").out == first.stdout
    changed = output_of_script(script.replace("Flatten(),", "Flatten(), nn.Linear(64, 64),"))
    assert "backbone_digest" in changed.err and not changed.out
    unreadable = output_of(lambda: run_as_main(script, tmp_path / "other"), tmp_path)
    assert "dataset=__main__:data: the source code cannot be read" in unreadable.err
    with pytest.raises(SettingError, match=r"has no function network. Define it in this notebook or script first"):
        vision.load(tmp_path / "run", backbone="__main__:network")


@pytest.mark.slow
def test_an_edit_of_what_a_function_of_a_script_uses_is_noticed(tmp_path):
    script = """
import sys, vision
from torch import nn
UNITS = 9
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.head = nn.Linear(64, UNITS), nn.Linear(UNITS, num_classes)
    def forward(self, x):
        return self.head(act(self.first(x.flatten(1))))
def act(x):
    return x.relu()
def network(num_classes):
    return Net(num_classes)
@vision.register_backbone("registered here")
def registered(num_classes):
    return Net(num_classes)
backbone = network if sys.argv[2] == "given" else "registered here"
vision.run(backbone=backbone, mega_batches=2, epochs=1, out=sys.argv[1])
"""
    path = tmp_path / "script.py"

    def errors(text, how):
        path.write_text(text)
        command = [sys.executable, path, tmp_path / how, how]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    for how, old, new in (("given", "relu()", "tanh()"), ("registered", "UNITS = 9", "UNITS = 8")):
        assert "Error" not in errors(script, how)
        assert "the source code of the backbone has changed" in errors(script.replace(old, new), how)


def test_another_test_set_or_normalisation_is_noticed(tmp_path):
    dataset = own_digits()
    vision.run(dataset=dataset, backbone="mlp", out=str(tmp_path), **OWN)
    other_test = replace(dataset, test=vision.datasets.Examples(dataset.test.images, dataset.test.labels.flip(0)))
    with pytest.raises(RunError, match="the test set has changed"):
        vision.run(dataset=other_test, backbone="mlp", out=str(tmp_path), **OWN)
    other_pixels = replace(dataset, pixels=replace(dataset.pixels, largest=16.0))
    with pytest.raises(RunError, match="the normalisation of the images has changed"):
        vision.run(dataset=other_pixels, backbone="mlp", out=str(tmp_path), **OWN)


def test_image_size_is_that_of_a_given_dataset(tmp_path):
    with pytest.raises(SettingError, match=r"image_size=16 does not fit the Dataset .* \(1, 8, 8\)"):
        vision.run(dataset=own_digits(), backbone="mlp", image_size=16, out=str(tmp_path), **OWN)
    resized = vision.load_dataset("digits", image_size=4)
    run = vision.run(dataset=resized, image_size=4, epochs=1, mega_batches=2, out=str(tmp_path), device="cpu")
    assert run.predictor.image_format.image_shape == (1, 4, 4)


def test_values_of_python_and_numpy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = vision.run(out=Path("here"), epochs=np.int64(1), mega_batches=2, device="cpu")
    assert run.settings.epochs == 1 and "LedgerRow" not in repr(run)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.summary["num_stages"] == 2
    with pytest.raises(SettingError, match="dataset= is of type tuple, but must be a text, a Dataset or a function"):
        vision.run(dataset=(DIGITS.images, DIGITS.target), out="x")


def test_inside_an_application_of_hydra(tmp_path):
    with initialize_config_dir(str(tmp_path), version_base="1.1"):
        vision.run(out=str(tmp_path / "run"), epochs=1, mega_batches=2, device="cpu")
        assert GlobalHydra.instance().is_initialized()


def test_a_plugin_of_a_settings_object_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin_of_settings.py").write_text(
        "import vision\n@vision.register_backbone('of the plugin')\ndef make(num_classes):\n"
        "    from torch import nn\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    settings = small_settings(tmp_path / "run", plugin="plugin_of_settings", backbone="of the plugin")
    vision.run(settings)
    recorded = json.loads((tmp_path / "run/settings.json").read_text())
    assert recorded["plugin_digest"] and recorded["backbone_digest"] == recorded["plugin_digest"]


def test_names_of_the_package():
    for name in vision.__all__:
        assert getattr(vision, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'rum'"):
        vision.rum  # noqa: B018


def test_built_in_names_cannot_be_taken():
    """A run of the built-in learner or network would continue with other code."""
    with pytest.raises(ValueError, match="there is a built-in learner 'sm'"):
        register_learner("sm")(type("Mine", (SingleModel,), {"__module__": "mine"}))
    for name in ("mlp", "resnet20"):
        with pytest.raises(ValueError, match=f"there is a built-in backbone '{name}'"):
            register_backbone(name)(lambda: None)

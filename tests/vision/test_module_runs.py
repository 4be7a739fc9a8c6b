"""Runs with a network of torchvision: killed in the middle, and all learners that take any network."""

import time

import pytest

import vision
import vision.runs
from fairseq_alma.core.errors import SettingError
from tests.vision.test_api import OwnNetwork
from tests.vision.test_killed import Child, same_run
from tests.vision.test_vgg_runs import tiny_dataset
from tests.vision.tiny_runs import ledger, taken

RESNET = {"backbone": "torchvision.models:resnet18", "learner": "ens", "members": 2, "epochs": 1, "device": "cpu"}


def killed_between_the_stages(out, do):
    """Start a run of two stages, and kill it after the first stage and within the second one. Then finish it."""
    for mark in ("stages/stage_001/train.done.json", "stages/stage_002"):
        child = Child(do)
        while not (out / mark).exists():
            assert not child.is_over(), "the run has ended before it could be killed"
            time.sleep(0.01)
        assert child.kill()
    Child(do).finish()


def compare(tmp_path, **settings):
    """Check that a killed run has the files of one that was not killed."""

    def run(name):
        return lambda: vision.run(out=str(tmp_path / name), **RESNET, **settings)

    Child(run("whole")).finish()
    killed_between_the_stages(tmp_path / "killed", run("killed"))
    same_run(tmp_path / "whole", tmp_path / "killed")
    assert len(ledger(tmp_path / "killed")) == 3


@pytest.fixture
def saved_after_each_stage(monkeypatch):
    """On a fast machine, the first stage would end too early to be saved."""
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_each_stage")
def test_a_killed_resnet_18_ends_as_it_would_have(tmp_path):
    compare(tmp_path, dataset=tiny_dataset(), mega_batches=2, batch_size=16)


@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_each_stage")
def test_a_killed_resnet_18_on_cifar10_ends_as_it_would_have(tmp_path, alma_data):
    compare(tmp_path, dataset="cifar10", data_root=str(alma_data), mega_batches=50, arrivals=2)


@pytest.mark.parametrize("learner", ["sm", "ens", "umix", "gens"])
def test_learners_without_a_structure_of_their_own_train_any_network(tmp_path, learner):
    settings = {"backbone": OwnNetwork, "width": 3, "epochs": 1, "device": "cpu", **taken(learner, members=2)}
    dataset = tiny_dataset()
    run = vision.run(out=str(tmp_path), dataset=dataset, mega_batches=2, batch_size=16, **settings)
    wrong = run.predictor(dataset.test.images).argmax(1) != dataset.test.labels.numpy()
    assert run.ledger[-1].scores.error_rate == float(wrong.mean())
    size = run.ledger[0].scores.num_params
    assert size == (3 * 28 + 10 * 2701) * (1 if learner == "sm" else 2)
    assert run.ledger[-1].scores.num_params == (2 * size if learner == "gens" else size)


class Double(OwnNetwork):
    def __init__(self, image_shape, num_classes, width):
        super().__init__(image_shape, num_classes, width)
        self.double()

    def forward(self, x):
        return super().forward(x.double()).float()


def test_a_network_with_parameters_of_another_precision_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"has parameters of torch.float64, but they must be torch.float32"):
        vision.run(dataset=tiny_dataset(), backbone=Double, mega_batches=2, epochs=1, width=2, out=str(tmp_path))

"""Runs with transform=MODULE:FUNCTION: resumed and stacked runs are equal, and the run knows the function's source."""

import sys

import pytest

from fairseq_alma.core.errors import RunError, SettingError
from tests.vision.tiny_runs import ledger, small_run

SOURCE = """
import torch
from torchvision.transforms import v2

calls, stop_after = 0, None

def shifted(image_shape):
    assert image_shape == (1, 8, 8)
    erase = v2.RandomErasing(p=0.5)
    def transform(image):
        global calls
        calls += 1
        if calls == stop_after:
            raise KeyboardInterrupt
        return erase(image)
    return transform
"""
HOW = {"transform": "own_transform:shifted", "epochs": 2, "mega_batches": 2}


@pytest.fixture
def own_transform(tmp_path, monkeypatch):
    """Write the module own_transform.py into the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_transform.py").write_text(SOURCE)
    yield
    sys.modules.pop("own_transform", None)


def test_a_resumed_stage_equals_an_uninterrupted_one(tmp_path, own_transform):
    small_run(tmp_path / "whole", **HOW)
    small_run(tmp_path / "plain", **{**HOW, "transform": None})
    assert ledger(tmp_path / "whole") != ledger(tmp_path / "plain")
    module = sys.modules["own_transform"]
    assert module.calls == 2 * 2 * 648  # 2 stages of 2 epochs; 72 of 719 images (71 of the second) validate
    module.calls, module.stop_after = 0, 3 * 648 + 100  # in the second epoch of the second stage
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "resumed", **HOW)
    module.stop_after = None
    small_run(tmp_path / "resumed", **HOW)
    assert ledger(tmp_path / "resumed") == ledger(tmp_path / "whole")


def test_two_seeds_together_equal_each_alone(tmp_path, own_transform):
    _, together = small_run(tmp_path / "both", **HOW, seeds=2)
    (alone,) = small_run(tmp_path / "second", **HOW, seed=1)
    for row, other in zip(together[1:], alone[1:], strict=True):
        # A stack rounds differently.
        assert row.scores.validation_loss == pytest.approx(other.scores.validation_loss, abs=1e-5)


def test_a_run_is_refused_when_the_source_of_its_transform_has_changed(tmp_path, own_transform):
    small_run(tmp_path / "run", **HOW)
    (tmp_path / "own_transform.py").write_text(SOURCE.replace("p=0.5", "p=0.25"))
    with pytest.raises(SettingError, match="the module own_transform has changed since it was imported"):
        small_run(tmp_path / "other", **HOW)
    del sys.modules["own_transform"]  # as in a new process
    with pytest.raises(RunError, match="transform_digest"):
        small_run(tmp_path / "run", **HOW)


def test_a_function_that_does_not_exist_is_refused(tmp_path, own_transform):
    with pytest.raises(SettingError, match="transform=own_transform:rotated: the module own_transform has no function"):
        small_run(tmp_path / "run", **{**HOW, "transform": "own_transform:rotated"})


def test_an_error_in_the_function_is_told_with_its_line(tmp_path, own_transform):
    (tmp_path / "own_transform.py").write_text("def shifted(image_shape):\n    return lambda image: image / None\n")
    with pytest.raises(SettingError, match=r"transform: <lambda> failed with TypeError.*line 2 of .*own_transform"):
        small_run(tmp_path / "run", **HOW)

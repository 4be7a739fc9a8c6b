"""The setting `average`: the averaged networks predict, are evaluated and deployed; the training is unaveraged."""

import shutil

import numpy as np
import pytest
import torch

import vision
import vision.runs
from fairseq_alma.core import run_record
from fairseq_alma.core.errors import SettingError
from tests.vision.tiny_runs import FORWARD, UPDATES, flat, ledger, networks, small_run, small_settings
from vision.checkpoints import read_checkpoint
from vision.datasets import load_dataset
from vision.evaluator import ErrorRateEvaluator
from vision.learners import LEARNERS
from vision.predictor import load

KEPT = {"keep_stages": True}


def predictor(out, stage):
    """Return the averaged networks that a stage wrote, as one flat tensor."""
    return flat(read_checkpoint(out / "stages" / f"stage_{stage:03d}" / "train" / "predictor.pt", torch.device("cpu")))


@pytest.mark.parametrize(
    ("average", "weights"),
    [("power:0", [0.25, 0.25, 0.25, 0.25]), ("decay:0.6", [0.18, 0.18, 0.24, 0.4])],
)
def test_the_predictor_is_the_average_of_the_networks_after_each_stage(tmp_path, average, weights):
    small_run(tmp_path / "run", average=average, **KEPT)
    expected = sum(w * flat(networks(tmp_path / "run", k)) for k, w in enumerate(weights, start=1))
    torch.testing.assert_close(predictor(tmp_path / "run", 4), expected)
    small_run(tmp_path / "last", **KEPT)
    for stage in range(1, 5):  # the training itself does not change
        assert torch.equal(flat(networks(tmp_path / "run", stage)), flat(networks(tmp_path / "last", stage)))


def test_the_averaged_networks_are_evaluated_and_deployed(tmp_path):
    (rows,) = small_run(tmp_path / "run", average="power:0")
    predict, dataset = load(tmp_path / "run"), load_dataset("digits", ".")
    wrong = predict(dataset.test.images).argmax(-1) != dataset.test.labels.numpy()
    assert rows[-1].scores.error_rate == pytest.approx(float(np.mean(wrong)), abs=1e-6)
    (of_last,) = small_run(tmp_path / "last")
    assert rows[1].scores == of_last[1].scores  # the average of one stage
    assert [row.scores.error_rate for row in rows[2:]] != [row.scores.error_rate for row in of_last[2:]]
    assert [row.spent.train_flops for row in rows] == [row.spent.train_flops for row in of_last]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learner": "ens", "members": 2, "seeds": 2, "average": "decay:0.5"},
        {"learner": "gmoe", "grow_every": 2, "replay": "uniform"},
    ],
)
def test_a_run_that_is_stopped_after_each_step_is_the_same(tmp_path, changes, monkeypatch):
    changes = {"average": "power:0", **changes}
    whole = small_run(tmp_path / "whole", **changes)
    calls = []

    def stopping(self, learner):
        calls.append(learner.stage_index)
        if calls.count(learner.stage_index) == 1:
            raise KeyboardInterrupt
        return evaluate(self, learner)

    evaluate = ErrorRateEvaluator.__call__
    monkeypatch.setattr(ErrorRateEvaluator, "__call__", stopping)
    rows = None
    while rows is None:
        try:
            rows = small_run(tmp_path / "stopped", **changes)
        except KeyboardInterrupt:
            continue
    assert sorted(set(calls)) == [0, 1, 2, 3, 4]
    folders = [""] if len(whole) == 1 else ["seed_0", "seed_1"]
    assert [ledger(tmp_path / "stopped" / one) for one in folders] == [
        ledger(tmp_path / "whole" / one) for one in folders
    ]
    assert torch.equal(predictor(tmp_path / "stopped", 4), predictor(tmp_path / "whole", 4))


def test_a_network_that_grows_begins_a_new_average(tmp_path):
    small_run(tmp_path, learner="gmoe", grow_every=2, average="power:0", **KEPT)
    # Growth is before stage 3, so the average is over stages 3 and 4.
    expected = (flat(networks(tmp_path, 3)) + flat(networks(tmp_path, 4))) / 2
    torch.testing.assert_close(predictor(tmp_path, 4), expected)


def test_old_files_are_deleted(tmp_path):
    small_run(tmp_path, average="power:0")
    assert sorted(path.stem for path in tmp_path.rglob("*.pt")) == ["networks", "predictor"]


def test_statistics_of_batch_normalisation_are_computed_again(tmp_path):
    settings = {"dataset": "digits", "backbone": "resnet20", "width": 2, "epochs": 1, "mega_batches": 2}
    (rows,) = small_run(tmp_path / "run", average="power:0", **{**settings, "crop_padding": 0}, **KEPT)
    stack = read_checkpoint(tmp_path / "run/stages/stage_002/train/predictor.pt", torch.device("cpu"))
    trained = networks(tmp_path / "run", 2)
    assert stack.statistics is not None
    assert not torch.equal(stack.statistics.flat, trained.statistics.flat)
    (of_last,) = small_run(tmp_path / "last", **{**settings, "crop_padding": 0})
    # The average of one stage has the parameters of the last network, so only the statistics differ.
    assert rows[1].scores.error_rate == pytest.approx(of_last[1].scores.error_rate, abs=0.1)
    extra = rows[2].spent.train_flops - of_last[2].spent.train_flops
    assert extra == stack.flops.forward * 648  # one pass over the training examples of the mega-batch


def test_the_last_epoch_can_be_selected(tmp_path):
    (rows,) = small_run(tmp_path / "run", select_by="last", lr=0.1)
    (all_rows,) = small_run(tmp_path / "loss", lr=0.1)
    assert [row.spent.num_updates for row in rows] == [0, UPDATES, UPDATES, UPDATES, UPDATES]
    assert [row.spent.train_flops for row in rows] == [row.spent.train_flops for row in all_rows]
    assert [row.spent.validation_flops for row in rows] == [0, 36 * FORWARD, 36 * FORWARD, 35 * FORWARD, 35 * FORWARD]


def test_early_stages_can_have_more_epochs(tmp_path):
    (rows,) = small_run(tmp_path, epochs=1, extra_epochs=6)
    # 1 + 6 / t epochs of 6 updates
    assert [row.spent.num_updates for row in rows] == [0, 42, 24, 18, 18]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner": "gens", "average": "power:8"}, "average=power:8 cannot be used with learner=gens"),
        ({"from_scratch": True, "average": "power:8"}, "with from_scratch=true each stage has a new network"),
        ({"average": "power"}, "average=power must be power:P with a number P"),
        ({"select_by": "last", "patience": 2}, "patience=2 needs the validation score of each epoch"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        small_settings(tmp_path, **settings)


def test_every_learner_of_one_network_takes_an_average(tmp_path):
    for name in LEARNERS:
        if name not in ("gens", "ens_moe") and ":" not in name:
            experts = {"experts": 2} if name == "moe" else {}
            small_run(tmp_path / name, learner=name, average="power:0", mega_batches=2, epochs=1, **experts)
            load(tmp_path / name)
            shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("changes", [{}, {"learner": "gmoe", "grow_every": 2}])
def test_a_run_that_is_killed_before_a_done_mark_is_the_same(tmp_path, changes, monkeypatch):
    """The learner of stage 3 has been saved, but the stage is not marked as done."""
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0)
    small_run(tmp_path / "whole", average="power:0", **changes)
    write = run_record.write_json

    def killed(path, *values, **more):
        if str(path).endswith("stage_003/train.done.json"):
            monkeypatch.setattr(run_record, "write_json", write)
            raise KeyboardInterrupt
        return write(path, *values, **more)

    monkeypatch.setattr(run_record, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "killed", average="power:0", **changes)
    small_run(tmp_path / "killed", average="power:0", **changes)
    assert ledger(tmp_path / "killed") == ledger(tmp_path / "whole")


def test_a_stage_that_diverges_does_not_stay_in_the_average(tmp_path):
    settings = {"average": "power:0", "optimizer": "sgd", "lr": 1e18, **KEPT}
    small_run(tmp_path, mega_batches=2, **settings)
    assert torch.equal(predictor(tmp_path, 2), flat(networks(tmp_path, 2)))
    assert bool(predictor(tmp_path, 2).isfinite().all())


class Scaled(torch.nn.Module):
    """A network with a parameter that is one number."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(64, num_classes), torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.linear(x.flatten(1)) * self.scale


def test_a_network_with_a_parameter_of_one_number_is_averaged(tmp_path):
    run = vision.run(
        dataset="digits", backbone=Scaled, mega_batches=2, epochs=1, average="power:0", out=str(tmp_path), device="cpu"
    )
    assert [row.stage for row in run.ledger] == [0, 1, 2]
    assert all(0 < row.scores.error_rate < 1 for row in run.ledger)


class Dropping(torch.nn.Module):
    """A network without statistics that behaves otherwise in training."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Dropout(0.5),
            torch.nn.Linear(32, num_classes),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def test_an_averaged_network_is_evaluated_without_dropout(tmp_path):
    run = vision.run(
        dataset="digits", backbone=Dropping, mega_batches=3, epochs=3, average="power:0", keep_stages=True,
        out=str(tmp_path), device="cpu",
    )  # fmt: skip
    test = load_dataset("digits").test
    for row in run.ledger[1:]:
        wrong = load(tmp_path, row.stage, backbone=Dropping)(test.images).argmax(-1) != test.labels.numpy()
        assert row.scores.error_rate == pytest.approx(float(np.mean(wrong)), abs=1e-6)

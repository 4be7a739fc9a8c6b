"""`vision.load`: predict with the networks of a run."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vision
from fairseq_alma.core.errors import RunError, SettingError, StageError
from fairseq_alma.core.learner_settings import Combine
from tests.vision.test_vgg_runs import small_run as small_vgg_run
from tests.vision.test_vgg_runs import tiny_dataset
from tests.vision.tiny_runs import small_run, taken
from vision.voting import sum_members

TEST = vision.load_dataset("digits").test
IMAGES = TEST.images.view(-1, 8, 8).numpy()
LEARNERS = [
    ("sm", {}),
    *(("ens", {"combine": combine}) for combine in Combine.__args__),
    ("umix", {"combine": "logit"}),
    ("umix", {"combine": "logit_sum"}),
    ("gens", {"combine": "logit"}),
    ("moe", {"experts": 2}),
    ("gmoe", {"hard_gates": True}),
    ("gmoe", {}),
    ("gmoe_flat", {}),
    ("ens_moe", {"experts": 2}),
    ("ff", {}),
]


@pytest.mark.parametrize(("learner", "own"), LEARNERS)
def test_it_predicts_as_the_evaluator_does(tmp_path, learner, own):
    ledgers = small_run(tmp_path, seeds=2, epochs=2, **taken(learner, members=3, grow_every=1, **own))
    for seed, rows in enumerate(ledgers):
        probabilities = vision.load(tmp_path / f"seed_{seed}")(IMAGES)
        assert probabilities.shape == (len(TEST), 10) and probabilities.dtype == np.float32
        np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
        assert float((probabilities.argmax(1) != TEST.labels.numpy()).mean()) == rows[-1].scores.error_rate


@pytest.mark.parametrize(("learner", "keep"), [("sm", True), ("gens", True), ("gmoe", True), ("sm", False)])
def test_the_predictor_of_each_stage_can_be_loaded_if_stages_are_kept(tmp_path, learner, keep):
    ledgers = small_run(tmp_path, seeds=2, epochs=2, keep_stages=keep, **taken(learner, grow_every=1))
    for seed, rows in enumerate(ledgers):
        run = tmp_path / f"seed_{seed}"
        if not keep:
            with pytest.raises(RunError, match=r"no predictor of stage 2: no earlier predictor is stored.*keep_stages"):
                vision.load(run, stage=2)
            continue
        for row in rows[1:]:
            probabilities = vision.load(run, stage=row.stage)(IMAGES)
            assert float((probabilities.argmax(1) != TEST.labels.numpy()).mean()) == row.scores.error_rate
        with pytest.raises(
            RunError, match="no predictor of stage 9: predictors of these stages are stored: 1, 2, 3, 4"
        ):
            vision.load(run, stage=9)


@pytest.mark.parametrize(
    "learner", ["gmoe", "ff", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sm", "gens"))]
)
def test_networks_for_images(tmp_path, learner):
    more = {"candidates": 5} if learner == "ff" else {}
    (rows,) = small_vgg_run(tmp_path, learner, seeds=1, **more)
    test = tiny_dataset().test
    images = test.images.view(-1, 3, 32, 32).movedim(1, -1)
    probabilities = vision.load(tmp_path)(images)
    assert float((probabilities.argmax(1) != test.labels.numpy()).mean()) == rows[-1].scores.error_rate
    np.testing.assert_array_equal(vision.load(tmp_path)(test.images), probabilities)


@pytest.mark.parametrize("combine", Combine.__args__)
def test_probabilities_by_hand(combine):
    logits_Mb = torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]], [[0.0, 1.5, 0.0]]])
    shares = logits_Mb.double().softmax(-1).mean(0)
    expected = {
        "probability": shares,
        "logit": logits_Mb.double().mean(0).softmax(-1),
        "vote": (torch.tensor([1.0, 2.0, 0.0]) + shares / 2) / 3.5,
    }[combine]
    torch.testing.assert_close(sum_members(logits_Mb, 1, combine).probabilities()[0], expected.float())


def test_shapes_and_types_of_images(tmp_path):
    small_run(tmp_path, epochs=1)
    predictor = vision.load(tmp_path)
    expected = predictor(IMAGES)
    for same in (IMAGES[..., None], IMAGES[:, None], IMAGES.reshape(-1, 64), torch.from_numpy(IMAGES), list(IMAGES)):
        np.testing.assert_array_equal(predictor(same), expected)
    for one in (IMAGES[0], IMAGES[0, :, :, None], IMAGES[:1], IMAGES[0].flatten(), Image.fromarray(IMAGES[0])):
        np.testing.assert_allclose(predictor(one), expected[:1], atol=1e-6)
    with pytest.raises(
        SettingError, match=r"images have the shape \[359, 8, 8, 3\], but the network needs \[n, h, w, c\]"
    ):
        predictor(IMAGES[..., None].repeat(3, -1))
    with pytest.raises(SettingError, match=r"with 1 channel\(s\), 8 x 8 pixels \(width x height\) as in training"):
        predictor(np.zeros((2, 9, 9), np.uint8))
    with pytest.raises(
        SettingError, match=r"have the type float64, but the images in training were bytes \(uint8, 0 to 16\)"
    ):
        predictor(IMAGES / 16)
    with pytest.raises(SettingError, match="images have pixels from 0 to 255, but must have pixels from 0 to 16"):
        predictor(Image.new("L", (8, 8), 255).crop((1, 0, 9, 8)))


def test_images_of_floats(tmp_path):
    x = IMAGES / 16
    dataset = vision.dataset_from_arrays("floats", x, TEST.labels.numpy())
    run = vision.run(dataset=dataset, backbone="mlp", mega_batches=2, epochs=1, out=str(tmp_path), device="cpu")
    wrong = run.predictor(dataset.test.images).argmax(1) != dataset.test.labels.numpy()
    assert float(wrong.mean()) == run.ledger[-1].scores.error_rate
    with pytest.raises(SettingError, match="type uint8, but the images in training were floats"):
        run.predictor(IMAGES)
    with pytest.raises(SettingError, match="images are floats from nan to nan, but must be finite"):
        run.predictor(np.full((1, 8, 8), np.nan))


def test_networks_in_bfloat16(tmp_path):
    (rows,) = small_vgg_run(tmp_path, "ens", seeds=1, precision="bfloat16")
    test = tiny_dataset().test
    probabilities = vision.load(tmp_path)(test.images)
    assert float((probabilities.argmax(1) != test.labels.numpy()).mean()) == rows[-1].scores.error_rate


def test_changed_source_of_the_network_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "network_of_a_test.py"
    path.write_text("from torch import nn\ndef make(num_classes):\n"
                    "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n")  # fmt: skip
    small_run(tmp_path / "run", backbone="network_of_a_test:make", epochs=1)
    own = {"backbone": "network_of_a_test:make"}
    vision.load(tmp_path / "run", **own)
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(SettingError, match="the module network_of_a_test has changed since it was imported"):
        vision.load(tmp_path / "run", **own)
    del sys.modules["network_of_a_test"]  # as in a new process
    with pytest.raises(RunError, match="the source code of backbone=network_of_a_test:make has changed since"):
        vision.load(tmp_path / "run", **own)


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(RunError, match=r"has no predictor\.json, so it is not a run"):
        vision.load(tmp_path)
    small_run(tmp_path, seeds=2, epochs=1)
    with pytest.raises(RunError, match=r"several runs. Give one of them: .*seed_0, .*seed_1"):
        vision.load(tmp_path)
    folder = tmp_path / "seed_0"
    (folder / "inputs.json").unlink()
    with pytest.raises(RunError, match=r"inputs.json is missing: run the command of the run again"):
        vision.load(folder)
    small_run(tmp_path, seeds=2, epochs=1)  # as the message says
    vision.load(folder)
    checkpoint = json.loads((folder / "predictor.json").read_text())["checkpoints"][0]["path"]
    (folder / checkpoint).write_bytes(b"damaged")
    with pytest.raises(RunError, match="has changed since"):
        vision.load(folder)
    (folder / checkpoint).unlink()
    with pytest.raises(StageError, match="is missing"):
        vision.load(folder)

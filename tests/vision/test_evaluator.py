"""The environment's side: exact error rates, each frozen member asked once, and how mixtures route."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_alma.core.run_folder import RunFolder
from tests.fairseq_alma.core.test_protocol import reachable_from
from tests.vision.tiny_runs import SMALL, TESTED_ON, TRAINED_ON, B, networks, small_run, taken
from vision import evaluator
from vision.datasets import Dataset, Examples, Pixels, load_dataset
from vision.evaluator import ErrorRateEvaluator
from vision.inputs import Vectors
from vision.learners import LEARNERS
from vision.networks import MixtureStack
from vision.stream import partition

CPU = torch.device("cpu")


@pytest.fixture
def met(monkeypatch):
    """Run a learner; get hold of it, and of how many examples each of its passes was over."""

    def meet(out: Path, given: Dataset | None = None, **changes):
        kind = LEARNERS[changes.get("learner", "sm")]
        learners = []

        class Kept(kind):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self.passes = []
                learners.append(self)

            def member_outputs(self, x, stack):
                self.passes.append(x.shape[1])
                return super().member_outputs(x, stack)

        with monkeypatch.context() as patch:
            patch.setitem(LEARNERS, changes.get("learner", "sm"), Kept)
            ledgers = small_run(out, given, **changes)
        return learners[0], ledgers

    return meet


def arrays_of(things) -> list[torch.Tensor]:
    """Every tensor and array among them, as tensors."""
    arrays = [thing for thing in things if isinstance(thing, torch.Tensor)]
    return arrays + [torch.from_numpy(t) for t in things if isinstance(t, np.ndarray) and t.dtype.kind in "fiu"]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def secrets_of(learner, dataset: Dataset, evaluate: ErrorRateEvaluator | None = None) -> list[torch.Tensor]:
    """What can be reached from a learner that shares memory with the test set, or holds the same numbers."""
    secret = [dataset.test.images, dataset.test.labels, dataset.pixels.normalise(dataset.test.images)]
    secret += [] if evaluate is None else arrays_of(reachable_from(evaluate))
    places = {storage(tensor) for tensor in secret if tensor.numel()}
    found = []
    for tensor in arrays_of(reachable_from(learner)):
        same = any(t.numel() == tensor.numel() and torch.equal(t.flatten(), tensor.flatten()) for t in secret[:3])
        if tensor.numel() and (storage(tensor) in places or same):
            found.append(tensor)
    return found


@pytest.mark.parametrize("learner", ["sm", "gens", "gmoe", "ens_moe"])
def test_no_reference_leads_from_a_learner_to_the_test_set(met, tmp_path, learner):
    dataset = load_dataset("digits", ".")
    learner, _ = met(tmp_path, dataset, **taken(learner, experts=2), replay="all")
    # The walk goes through what it has kept to train on, all of the past:
    kept = [tensor.numel() for tensor in arrays_of(reachable_from(learner)) if tensor.dtype == torch.float]
    assert max(kept) >= B * TRAINED_ON * 64
    assert secrets_of(learner, dataset) == []


def test_the_walk_would_find_a_learner_that_cheats(met, tmp_path):
    dataset = load_dataset("digits", ".")
    evaluate = ErrorRateEvaluator(dataset, Vectors(dataset.pixels), CPU, [RunFolder(tmp_path)], 1)
    for cheat in (
        dataset.test.images[3:4],  # a view
        dataset.pixels.normalise(dataset.test.images),  # a copy
        {"deep": [dataset.test.labels.numpy()]},
        lambda: evaluate,
        gc,
    ):
        learner, _ = met(tmp_path / f"{id(cheat)}", dataset, epochs=1, mega_batches=2)
        learner.teacher = cheat
        assert bool(secrets_of(learner, dataset, evaluate)) == (cheat is not gc)


def test_the_error_rate_is_that_of_a_plain_network(met, tmp_path):
    dataset = load_dataset("digits", ".")
    learner, (rows,) = met(tmp_path, dataset)
    x = (dataset.test.images.float() / 16 - 0.3058) / 0.3764
    wrong = int((learner.stack.to_module(0)(x).argmax(-1) != dataset.test.labels).sum())
    assert rows[-1].scores.error_rate == wrong / TESTED_ON
    assert learner.passes.count(TESTED_ON) == 1 + B  # untrained, and after every stage


@pytest.mark.parametrize("learner", ["gens", "ens_moe"])
def test_frozen_members_are_asked_once_and_their_sums_are_kept(met, tmp_path, learner):
    dataset = load_dataset("digits", ".")
    learner, (rows,) = met(tmp_path, dataset, **taken(learner, experts=2))
    # Untrained; then each stage's new member alone: 1 + 1 + 1 + 1 + 1, and not 1 + 1 + 2 + 3 + 4.
    assert learner.passes.count(TESTED_ON) == 1 + B
    (anew,) = ErrorRateEvaluator(dataset, Vectors(dataset.pixels), CPU, [RunFolder(tmp_path)], B)(learner)
    assert learner.passes.count(TESTED_ON) == 1 + B + B
    # This evaluator has no validation data of the mega-batches.
    assert anew == replace(rows[-1].scores, validation_loss=None, validation_error_rate=None)


def test_an_ensemble_of_mixtures_has_the_load_of_each_member_on_its_own_stage(tmp_path):
    ledgers = small_run(tmp_path, learner="ens_moe", experts=3, members=2, seeds=2)
    dataset = load_dataset("digits", ".")
    for seed, rows in enumerate(ledgers):
        arrivals = partition(dataset, B, 0.1, seed=seed)
        expected = []
        for k in range(1, B + 1):
            stack = networks(tmp_path, k)
            assert isinstance(stack, MixtureStack)
            stack.logits(dataset.pixels.normalise(arrivals[k - 1].validation.images)[None].expand(4, -1, -1))
            # A stack has two members of each of the two seeds, with two mixtures each.
            for member in (2 * seed, 2 * seed + 1):
                expected += [weights_MbE[member].mean(0).tolist() for weights_MbE in stack.expert_weights]
            load = rows[k].scores.expert_load
            assert len(load) == 2 * 2 * k
            np.testing.assert_allclose(load, expected, atol=1e-5)


def test_a_learner_that_trains_on_is_asked_anew_after_every_stage(met, tmp_path):
    dataset = load_dataset("digits", ".")
    learner, (rows,) = met(tmp_path, dataset, learner="ens", members=2)
    assert learner.passes.count(TESTED_ON) == 1 + B
    assert [row.scores.num_members for row in rows] == [2] * 5


def test_a_test_set_of_any_size_is_asked_in_parts(met, tmp_path):
    """4001 examples are three passes; how many are wrong is that of one pass over all."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 17, (4001, 64), generator=drawn, dtype=torch.uint8)
    labels = torch.randint(0, 10, (4001,), generator=drawn)
    digits = load_dataset("digits", ".")
    dataset = Dataset("digits", (1, 8, 8), 10, Pixels(16, 0, 1), digits.training, Examples(images, labels))
    learner, (rows,) = met(tmp_path, dataset, mega_batches=1, epochs=1)
    # Of the 1438 training images, 143 are validation data, which are asked before the stage (prequential).
    assert learner.passes == [2000, 2000, 1, 143, 2000, 2000, 1]
    wrong = int((learner.stack.to_module(0)(images.float() / 16).argmax(-1) != labels).sum())
    assert rows[-1].scores.error_rate == wrong / 4001


def test_routing_is_written_after_a_growth_and_at_the_end(met, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "ROUTING_EXAMPLES", 20)
    dataset = load_dataset("digits", ".")
    learner, (rows,) = met(tmp_path, dataset, learner="gmoe", grow_every=2)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz"))
    # One expert at stages 1 and 2, two at 3 and 4.
    assert written == [f"stages/stage_{k:03d}/routing.npz" for k in (1, 3, 4)]
    routing = np.load(tmp_path / "stages/stage_004/routing.npz")
    assert set(routing.files) == {"images", "label", "expert", "weights", "root", "splits"}
    assert np.array_equal(routing["images"], dataset.test.images[:20].view(20, 8, 8).numpy())
    assert routing["label"].tolist() == dataset.test.labels[:20].tolist()
    assert (routing["root"].item(), routing["splits"].tolist()) == (0, [0])  # the only expert was halved
    plain = learner.stack.to_module(0)
    weights = plain.layers[0].weights(dataset.pixels.normalise(dataset.test.images[:20])).detach().numpy()
    assert np.allclose(routing["weights"], weights, atol=2e-3)  # it holds half precision
    assert routing["expert"].tolist() == weights.argmax(-1).tolist()
    assert all(np.isclose(sum(layer), 1, atol=1e-5) for layer in rows[-1].scores.expert_load)


def test_routing_of_several_seeds_lies_with_each_and_only_mixtures_have_one(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "ROUTING_EXAMPLES", 20)
    small_run(tmp_path / "two", learner="moe", experts=3, seeds=2, epochs=1, wait=2)
    routings = [np.load(tmp_path / f"two/seed_{seed}/stages/stage_002/routing.npz") for seed in (0, 1)]
    assert [routing["weights"].shape for routing in routings] == [(20, 3), (20, 3)]
    assert not np.array_equal(routings[0]["weights"], routings[1]["weights"])
    assert [routing["root"].item() for routing in routings] == [3, 3]
    small_run(tmp_path / "sm", **{**SMALL, "epochs": 1}, wait=B)
    assert not [*(tmp_path / "sm").rglob("*.npz")]


def test_routing_of_an_ensemble_of_mixtures_is_the_newest_ones(met, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "ROUTING_EXAMPLES", 20)
    dataset = load_dataset("digits", ".")
    learner, _ = met(tmp_path, dataset, learner="ens_moe", experts=3, members=2)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz"))
    assert written == [f"stages/stage_{k:03d}/routing.npz" for k in (1, 4)]
    routing = np.load(tmp_path / "stages/stage_004/routing.npz")
    x = dataset.pixels.normalise(dataset.test.images[:20])
    newest = learner.stack.to_module(0).layers[0].weights(x).detach().numpy()
    assert np.allclose(routing["weights"], newest, atol=2e-3)


def test_a_continued_run_writes_no_routing_that_the_whole_run_would_not(tmp_path):
    small_run(tmp_path / "run", learner="gmoe", grow_every=2, arrivals=2, epochs=1)
    small_run(tmp_path / "run", learner="gmoe", grow_every=2, arrivals=B, epochs=1)
    written = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.npz"))
    # 2, because the first run ended there; 3 after a growth; 4 because the second one ended.
    assert written == [f"stages/stage_{k:03d}/routing.npz" for k in (1, 2, 3, 4)]
    small_run(tmp_path / "fixed", learner="moe", experts=2, arrivals=1, epochs=1)
    small_run(tmp_path / "fixed", learner="moe", experts=2, arrivals=B, epochs=1)
    written = sorted(str(path.relative_to(tmp_path / "fixed")) for path in (tmp_path / "fixed").rglob("*.npz"))
    assert written == [f"stages/stage_{k:03d}/routing.npz" for k in (1, 4)]

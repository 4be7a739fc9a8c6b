"""Scores on the validation data of mega-batches: by hand, and of real runs computed again with plain networks."""

import json

import numpy as np
import pytest
import torch

from fairseq_alma.core.error_matrix import TRANSFER_METRICS, read_errors, transfer_metrics
from fairseq_alma.core.ledger import Prequential
from fairseq_alma.core.metrics import prequential_error_rate
from tests.vision.rows import UNCHANGED
from tests.vision.test_evaluator import met  # noqa: F401 (a fixture)
from tests.vision.tiny_runs import TESTED_ON, VALIDATED_ON, B, flat, ledger, networks, small_run, summary, taken
from vision import held_out
from vision.datasets import Examples, load_dataset
from vision.held_out import HeldOutEvaluator, error_by_class
from vision.stream import Arrival, partition, stacked_stream
from vision.voting import MemberOutputs

CPU = torch.device("cpu")


def examples(*classes):
    """Return examples whose only pixel is their class."""
    labels = torch.tensor(classes)
    return Examples(labels[:, None].to(torch.uint8), labels)


class Constant:
    """A learner whose stacks give class c the logit that they hold for c. All seeds predict alike.

    `passes` has the name of the stack and the number of examples of each call.
    """

    def __init__(self, num_seeds, **logits):
        self.num_seeds, self.passes = num_seeds, []
        self.stacks = {name: torch.tensor(values) for name, values in logits.items()}

    @property
    def members(self):
        return [(None if name == "training" else name, Named(name)) for name in self.stacks]

    def member_outputs(self, x, stack):
        self.passes.append((stack.name, x.shape[1]))
        summed = self.stacks[stack.name].expand(self.num_seeds, x.shape[1], -1)
        return MemberOutputs("logit", summed, None, 1)


class Named:
    examples_at_once = 2000

    def __init__(self, name):
        self.name = name


def streams():
    """Two seeds, and three mega-batches with 2, 2 and 1 validation examples of three classes."""
    first = [examples(0, 1), examples(2, 2), examples(1)]
    second = [examples(1, 1), examples(0, 1), examples(0)]
    return [[Arrival(examples(0), part) for part in parts] for parts in (first, second)]


def test_error_rates_and_losses_of_a_mega_batch_by_hand():
    evaluate, stream = HeldOutEvaluator(streams(), 3, UNCHANGED, CPU), stacked_stream(streams())
    learner = Constant(2, training=[0.0, float(np.log(2)), 0.0])  # probabilities 1/4, 1/2, 1/4: it predicts class 1
    scores = [evaluate.prequential(learner, mega_batch) for mega_batch in stream]
    log = np.log
    expected = [
        [Prequential(1 / 2, (log(4) + log(2)) / 2), Prequential(0, log(2))],
        [Prequential(1, log(4)), Prequential(1 / 2, (log(4) + log(2)) / 2)],
        [Prequential(0, log(2)), Prequential(1, log(4))],
    ]
    for of_seeds, wanted in zip(scores, expected, strict=True):
        assert [one.error_rate for one in of_seeds] == [one.error_rate for one in wanted]
        assert [one.loss for one in of_seeds] == pytest.approx([one.loss for one in wanted])
    assert evaluate.error_by_mega_batch(learner) == [[1 / 2, 1, 0], [0, 1 / 2, 1]]


def test_unchanging_networks_are_asked_once_for_each_block_of_mega_batches(monkeypatch):
    monkeypatch.setattr(held_out, "EXAMPLES_PER_BLOCK", 4)  # mega-batches 1 and 2, and mega-batch 3
    evaluate, (first, second, third) = HeldOutEvaluator(streams(), 3, UNCHANGED, CPU), stacked_stream(streams())
    learner = Constant(2, old=[3.0, 0.0, 0.0])
    assert [one.error_rate for one in evaluate.prequential(learner, first)] == [1 / 2, 1]
    learner.stacks["new"] = torch.tensor([0.0, 0.0, 4.0])
    learner.stacks["training"] = torch.tensor([0.0, 5.0, 0.0])
    assert [one.error_rate for one in evaluate.prequential(learner, second)] == [1, 1 / 2]
    assert [one.error_rate for one in evaluate.prequential(learner, third)] == [0, 1]
    assert learner.passes == [("old", 4), ("new", 4), ("training", 2), ("old", 1), ("new", 1), ("training", 1)]


def test_errors_by_class_by_hand():
    # Class 0: one of two is wrong. Class 1: right. Class 2 does not occur.
    outputs = MemberOutputs("logit", torch.tensor([[[1.0, 0, 0], [0, 0, 1], [0, 1, 0]]]), None, 1)
    assert error_by_class(outputs, torch.tensor([[0, 0, 1]]), 3) == [[1 / 2, 0, None]]


# ---- Real runs


def wrong_share(stack, arrival, dataset, number=0):
    """Return the error rate of one network of a stack on the validation data of a mega-batch, by plain modules."""
    x = dataset.pixels.normalise(arrival.validation.images)
    return int((stack.to_module(number)(x).argmax(-1) != arrival.validation.labels).sum()) / len(x)


def ahead(rows):
    return [row.prequential and row.prequential.error_rate for row in rows]


@pytest.mark.parametrize("wait", [1, 2, 4])
def test_the_prequential_errors_of_a_run_are_those_of_its_networks_on_the_next_mega_batch(tmp_path, wait):
    (rows,) = small_run(tmp_path / "run", wait=wait, keep_stages=True)
    dataset = load_dataset("digits", ".")
    arrivals = partition(dataset, B, 0.1, seed=0)
    assert tuple(len(arrival.validation) for arrival in arrivals) == VALIDATED_ON
    (untrained,) = small_run(tmp_path / "untrained", wait=B)  # its row t scores the untrained network on mega-batch t
    for t in range(1, B + 1):
        stage = (t - 1) // wait  # the last stage before arrival t
        if not stage:
            assert rows[t].prequential == untrained[t].prequential
            assert rows[t].prequential.error_rate > 0.5
        else:
            assert rows[t].prequential.error_rate == wrong_share(
                networks(tmp_path / "run", stage), arrivals[t - 1], dataset
            )
    assert rows[0].prequential is None
    mean = sum(ahead(rows)[2:]) / (B - 1)
    assert summary(tmp_path / "run")["prequential_error_rate"] == prequential_error_rate(rows) == pytest.approx(mean)


def test_the_prequential_error_of_a_growing_ensemble_is_that_of_all_its_networks(tmp_path):
    (rows,) = small_run(tmp_path, learner="gens", combine="logit")
    dataset = load_dataset("digits", ".")
    arrivals = partition(dataset, B, 0.1, seed=0)
    for t in range(2, B + 1):
        part = arrivals[t - 1].validation
        x = dataset.pixels.normalise(part.images)
        logits = sum(networks(tmp_path, stage).to_module(0)(x) for stage in range(1, t))
        assert rows[t].prequential.error_rate == int((logits.argmax(-1) != part.labels).sum()) / len(x)


@pytest.mark.parametrize(("replay", "wait"), [(False, 1), (False, 2), ("all", 1)])
def test_the_validation_scores_of_a_growing_ensemble_are_those_of_all_its_networks(tmp_path, replay, wait):
    (rows,) = small_run(tmp_path, learner="gens", combine="probability", replay=replay, wait=wait)
    dataset = load_dataset("digits", ".")
    arrivals = partition(dataset, B, 0.1, seed=0)
    for k in range(1, B // wait + 1):
        parts = [arrival.validation for arrival in arrivals[0 if replay else (k - 1) * wait : k * wait]]
        x = dataset.pixels.normalise(torch.cat([part.images for part in parts]))
        y = torch.cat([part.labels for part in parts])
        shares = sum(networks(tmp_path, stage).to_module(0)(x).softmax(-1) for stage in range(1, k + 1)) / k
        scores = rows[k * wait].scores
        assert scores.validation_error_rate == int((shares.argmax(-1) != y).sum()) / len(y)
        expected = shares.double().gather(1, y[:, None]).log().neg().mean().item()
        assert scores.validation_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("replay", [False, "all"])
def test_the_networks_of_a_growing_ensemble_are_asked_once_for_validation(met, tmp_path, replay):  # noqa: F811
    learner, _ = met(tmp_path, learner="gens", replay=replay)
    # All validation data are one block. The untrained network is asked at arrival 1. Then each network is asked once
    # for all 142, and once for the 359 test images (as is the untrained one).
    assert sorted(learner.passes) == sorted([VALIDATED_ON[0], *[sum(VALIDATED_ON)] * B, *[TESTED_ON] * (B + 1)])


@pytest.mark.parametrize("learner", ["sm", "gens", "gmoe", "ff"])
def test_seeds_have_the_scores_that_they_have_alone(tmp_path, learner):
    settings = taken(learner, experts=2, candidates=50)
    together = small_run(tmp_path / "stack", **settings, seeds=2)
    for seed in (0, 1):
        (alone,) = small_run(tmp_path / str(seed), **settings, seed=seed)
        for t in range(1, B + 1):
            assert abs(ahead(together[seed])[t] - ahead(alone)[t]) <= 2.01 / 35
    assert ahead(together[0]) != ahead(together[1])


@pytest.mark.parametrize("learner", ["sm", "gens"])
def test_rows_stay_as_they_are_when_more_mega_batches_arrive(tmp_path, learner):
    (first,) = small_run(tmp_path / "extended", learner=learner, arrivals=2)
    (extended,) = small_run(tmp_path / "extended", learner=learner, arrivals=B)
    assert extended[:3] == first
    assert summary(tmp_path / "extended")["prequential_error_rate"] == sum(ahead(extended)[2:]) / 3
    small_run(tmp_path / "whole", learner=learner)
    assert ledger(tmp_path / "extended") == ledger(tmp_path / "whole")
    assert torch.equal(flat(networks(tmp_path / "extended", B)), flat(networks(tmp_path / "whole", B)))


def test_mega_batches_wait_for_those_that_have_not_arrived(tmp_path):
    """B = 4 at wait 2: when three have arrived, the third one waits, so that the run is the one over all four."""
    assert [row.stage for row in small_run(tmp_path / "grown", wait=2, arrivals=3)[0]] == [0, 0, 1, 1]
    small_run(tmp_path / "grown", wait=2, arrivals=B)
    small_run(tmp_path / "whole", wait=2)
    assert ledger(tmp_path / "grown") == ledger(tmp_path / "whole")
    (now,) = small_run(tmp_path / "now", wait=2, arrivals=3, last_group="train")
    assert now[-1].stage == 2


def test_no_call_scores_the_predictor_on_data_that_it_was_trained_on(met, tmp_path):  # noqa: F811
    learner, (rows,) = met(tmp_path, wait=B, learner="sm")
    # Before each arrival the untrained network is asked: then the stage validates on all 142, once an epoch and once
    # at its end.
    before = learner.passes[1 : 1 + B]
    assert before == list(VALIDATED_ON)
    assert len(set(ahead(rows)[1:])) > 1  # the predictor is the same, the data are not


# ---- The error matrix


def lines_of(folder):
    return [json.loads(line) for line in (folder / "errors.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("wait", [1, 3])
def test_the_error_matrix_of_a_run_is_that_of_its_networks(tmp_path, wait):
    (rows,) = small_run(tmp_path, wait=wait, keep_stages=True, order="classes")
    dataset = load_dataset("digits", ".")
    arrivals = partition(dataset, B, 0.1, seed=0, order="classes")
    lines = lines_of(tmp_path)
    assert [line["stage"] for line in lines] == list(range(rows[-1].stage + 1))
    x = dataset.pixels.normalise(dataset.test.images)
    for line in lines[1:]:
        stack = networks(tmp_path, line["stage"])
        assert line["by_mega_batch"] == [round(wrong_share(stack, arrival, dataset), 6) for arrival in arrivals]
        is_wrong = stack.to_module(0)(x).argmax(-1) != dataset.test.labels
        rates = [is_wrong[dataset.test.labels == label].double().mean().item() for label in range(10)]
        assert line["by_class"] == pytest.approx(rates, abs=1e-6)
    matrix = read_errors(tmp_path, [row.stage for row in rows])
    for row in rows[1:]:  # the prequential score is in the matrix: the row before, the column of this mega-batch
        assert row.prequential.error_rate == pytest.approx(matrix.by_mega_batch[row.t - 1][row.t - 1], abs=1e-6)
    found = summary(tmp_path)
    assert {name: found[name] for name in TRANSFER_METRICS} == transfer_metrics(matrix)


def test_seeds_have_matrices_of_their_own_and_by_default_there_is_none(tmp_path):
    small_run(tmp_path / "two", learner="gens", seeds=2, order="classes")
    first, second = (lines_of(tmp_path / f"two/seed_{seed}") for seed in (0, 1))
    assert len(first) == len(second) == B + 1 and first != second
    (alone,) = [small_run(tmp_path / "one", learner="gens", order="classes") and lines_of(tmp_path / "one")]
    for a, b in zip(first, alone, strict=True):
        assert a["by_mega_batch"] == pytest.approx(b["by_mega_batch"], abs=2.01 / 35)
    small_run(tmp_path / "none")
    assert not [*(tmp_path / "none").rglob("errors.jsonl")]
    assert not {*TRANSFER_METRICS} & summary(tmp_path / "none").keys()


def test_columns_are_added_when_more_mega_batches_arrive(tmp_path):
    small_run(tmp_path, arrivals=2, order="classes")
    before = lines_of(tmp_path)
    (rows,) = small_run(tmp_path, arrivals=B, order="classes")
    lines = lines_of(tmp_path)
    assert lines[:3] == before
    assert [len(line["by_mega_batch"]) for line in lines] == [2, 2, 2, B, B]
    matrix = read_errors(tmp_path, [row.stage for row in rows])
    assert np.isnan(matrix.by_mega_batch).sum(axis=1).tolist() == [2, 2, 2, 0, 0]
    assert {*TRANSFER_METRICS} <= summary(tmp_path).keys()

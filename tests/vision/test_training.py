"""Training in one stage: the epoch that is kept, the counts, and that a seed trains the same in a stack and alone."""

import copy
from math import isnan

import pytest
import torch
from torch.nn import functional as F

from tests.vision.rows import rows_of
from vision.batches import Batches, StageData
from vision.networks import MixtureStack, MLPStack
from vision.optimizers import SGD, AdaDelta
from vision.seeds import generator
from vision.training import JointLoss, OwnLoss, TrainingCounts, Watcher, train_stage

CPU = torch.device("cpu")
SIZES = (6, 5, 4, 3)


class Recorder(Watcher):
    """A watcher that records the parameters and the validation errors after each epoch."""

    def __init__(self, stack):
        self.stack, self.parameters, self.errors = stack, [], []

    def epoch(self, epoch, error):
        assert epoch == len(self.parameters) + 1
        self.parameters.append(self.stack.parameters.copy())
        self.errors.append(error().tolist())

    def losses(self, rows, networks_per_seed, joint=False):
        """Return the validation loss of each unit after each epoch, [epochs][U], computed by torch modules."""
        found, stack = [], copy.copy(self.stack)
        for parameters in self.parameters:
            stack.parameters = parameters
            logits = torch.stack(
                [
                    stack.to_module(number)(rows.examples[number // networks_per_seed]).detach()
                    for number in range(len(stack))
                ]
            )
            if joint:
                logits = logits.unflatten(0, (-1, networks_per_seed)).mean(1)
            y = rows.labels if joint else rows.labels.repeat_interleave(networks_per_seed, 0)
            found.append([float(F.cross_entropy(*pair)) for pair in zip(logits, y, strict=True)])
        return found


def stage_of(num_seeds, num_training=60, num_validation=40, first_seed=0, validated_against=()):
    """Return data with a rule that can be learned, another for each seed.

    The validation labels of the seeds in `validated_against` contradict the rule.
    """
    x, y = [], []
    for seed in range(first_seed, first_seed + num_seeds):
        g = generator(seed, "data")
        rule = torch.randn(SIZES[0], SIZES[-1], generator=g)
        x.append(torch.randn(num_training + num_validation, SIZES[0], generator=g))
        y.append((x[-1] @ rule).argmax(-1))
        if seed in validated_against:
            y[-1][num_training:] = (y[-1][num_training:] + 1) % SIZES[-1]
    x, y = torch.stack(x), torch.stack(y)
    training = rows_of(x[:, :num_training], y[:, :num_training], SIZES[-1])
    return StageData(training, 0, rows_of(x[:, num_training:], y[:, num_training:], SIZES[-1]))


def generators(purpose, num_seeds, count=1, first_seed=0):
    seeds = range(first_seed, first_seed + num_seeds)
    return [generator(seed, purpose, number) for seed in seeds for number in range(count)]


def stage(
    data,
    networks_per_seed=1,
    joint=False,
    epochs=5,
    select_by="validation_loss",
    first_seed=0,
    kind=MLPStack,
    lr=1.0,
    patience=None,
    rates=None,
):
    """Train a new stack. Return the stack, its recorder and the counts of the stage."""
    num_seeds = data.training.num_seeds
    initialisers = generators("initialisation", num_seeds, networks_per_seed, first_seed)
    if kind is MLPStack:
        stack = MLPStack.initialised(SIZES, initialisers, CPU)
    else:
        stack = MixtureStack.initialised(SIZES, 2, kind == "hard", initialisers, CPU)
        noise = generators("gates", num_seeds, networks_per_seed, first_seed)
        stack.set_gate_noise(lambda shape: torch.stack([torch.rand(shape, generator=g) for g in noise]))
    loss = JointLoss(num_seeds, networks_per_seed, mean=True) if joint else OwnLoss(num_seeds, networks_per_seed)
    orders = generators("order", num_seeds, loss.num_orders // num_seeds, first_seed)
    batches, recorder = Batches(data, orders, batch_size=16), Recorder(stack)
    optimizer = AdaDelta(stack.parameters.flat, lr)
    counts = train_stage(stack, batches, data.validation, loss, optimizer, epochs, select_by, recorder, patience, rates)
    return stack, recorder, counts


def kept_epochs(stack, recorder):
    """Return for each network the epochs, from 1, after which all its tensors were as they are now."""
    kept = []
    for number in range(len(stack)):
        same = [
            all(torch.equal(stack.parameters[name][number], then[name][number]) for name in stack.parameters.shapes)
            for then in recorder.parameters
        ]
        kept.append([epoch for epoch, equal in enumerate(same, start=1) if equal])
    return kept


def argmin(losses_by_epoch, unit):
    """Return the first epoch with the smallest loss of a unit, from 1."""
    unit_losses = [losses[unit] for losses in losses_by_epoch]
    return unit_losses.index(min(unit_losses)) + 1


# ---- The best epoch.


def test_seeds_are_selected_on_their_own():
    # Seed 0 gets better with every epoch. Seed 1 gets worse, because its validation labels contradict its training.
    data = stage_of(num_seeds=2, validated_against=[1])
    stack, recorder, _ = stage(data, epochs=6, lr=2.0)
    losses = recorder.losses(data.validation, 1)
    assert [argmin(losses, unit) for unit in (0, 1)] == [6, 1]
    assert kept_epochs(stack, recorder) == [[6], [1]]


@pytest.mark.parametrize("kind", [MLPStack, "soft"])
def test_each_network_of_a_seed_keeps_its_own_best_epoch(kind):
    # With few examples and large steps the losses go up and down, in each network at other epochs.
    data = stage_of(2, num_training=24, validated_against=[1])
    stack, recorder, _ = stage(data, networks_per_seed=3, epochs=20, lr=20.0, kind=kind)
    losses = recorder.losses(data.validation, 3)
    best = [argmin(losses, unit) for unit in range(6)]
    assert len(set(best)) >= 3
    assert kept_epochs(stack, recorder) == [[epoch] for epoch in best]


def test_networks_trained_as_one_are_selected_as_one():
    data = stage_of(2, num_training=24, validated_against=[1])
    stack, recorder, _ = stage(data, networks_per_seed=3, joint=True, epochs=20, lr=20.0)
    losses = recorder.losses(data.validation, 3, joint=True)
    first, second = (argmin(losses, unit) for unit in range(2))
    assert first != second
    assert kept_epochs(stack, recorder) == [[first]] * 3 + [[second]] * 3


def easy(num_seeds=1):
    """Return data whose labels are all 0: after one epoch the error rate is 0, while the loss still decreases."""
    data = stage_of(num_seeds)
    parts = [
        rows_of(rows.examples, torch.zeros_like(rows.labels), SIZES[-1]) for rows in (data.training, data.validation)
    ]
    return StageData(parts[0], 0, parts[1])


def test_by_accuracy_the_first_of_equal_epochs_is_kept():
    stack, recorder, _ = stage(easy(), epochs=4, select_by="validation_accuracy", lr=20.0)
    assert recorder.errors == [[0.0]] * 4
    assert kept_epochs(stack, recorder) == [[1]]


def test_by_loss_the_same_stage_keeps_its_last():
    stack, recorder, _ = stage(easy(), epochs=4, lr=20.0)
    assert kept_epochs(stack, recorder) == [[4]]


def test_by_accuracy_a_better_epoch_is_kept():
    data = stage_of(3)
    stack, recorder, _ = stage(data, epochs=12, select_by="validation_accuracy", lr=5.0)
    kept = kept_epochs(stack, recorder)
    for unit in range(3):
        errors = [epoch_errors[unit] for epoch_errors in recorder.errors]
        assert kept[unit] == [errors.index(min(errors)) + 1]
        assert min(errors) < errors[0]


# ---- Losses that are NaN.


def overflowing(head, label):
    """Return a stack, batches, validation data and an optimizer whose loss is NaN after the first epoch only.

    The network 1-2-1-2 is trained on the input 0, from which it learns nothing, and validated on 2e38. Weight decay
    halves its weights at each update, and an epoch is one update. The weights of the first layer are 4, then 2, then
    1. The largest float is 3.4e38, so that 2 x 2e38 is infinite and 1 x 2e38 is not.
    """
    stack = MLPStack.initialised((1, 2, 1, 2), [generator(0)], CPU)
    stack.parameters.flat.zero_()
    stack.parameters["weight_1"][0] = torch.tensor([[4.0], [4.0]])
    stack.parameters["weight_2"][0] = torch.tensor([[1.0, -1.0]])
    stack.parameters["weight_3"][0] = torch.tensor(head)[:, None]
    y = torch.tensor([[label]])
    training, validation = (rows_of(torch.tensor([[[x]]]), y, 2) for x in (0.0, 2e38))
    batches = Batches(StageData(training, 0, validation), [generator(1)], batch_size=1)
    return stack, batches, validation, SGD(stack.parameters.flat, lr=1.0, weight_decay=0.5)


@pytest.mark.parametrize("select_by", ["validation_loss", "validation_accuracy"])
@pytest.mark.parametrize("label", [0, 1])
def test_an_epoch_whose_loss_is_nan_is_never_the_best(select_by, label):
    # The logits are infinity minus infinity. argmax returns class 0 if both are NaN, which may be the right class.
    stack, batches, validation, optimizer = overflowing(head=[1.0, 1.0], label=label)
    recorder = Recorder(stack)
    train_stage(stack, batches, validation, OwnLoss(1, 1), optimizer, 2, select_by, recorder)
    first, second = recorder.losses(validation, 1)
    assert isnan(first[0])
    assert second[0] < 1
    assert kept_epochs(stack, recorder) == [[2]]


def test_a_network_that_diverges_keeps_its_last_good_epoch():
    # The same network with weights that double at each update: those of the first layer are 1, then 2.
    stack, batches, validation, _ = overflowing(head=[1.0, 1.0], label=1)
    stack.parameters["weight_1"].fill_(0.5)
    stack.parameters["weight_2"].mul_(0.25)
    recorder, growing = Recorder(stack), SGD(stack.parameters.flat, lr=1.0, weight_decay=-1.0)
    train_stage(stack, batches, validation, OwnLoss(1, 1), growing, 3, "validation_loss", recorder)
    first, second, third = recorder.losses(validation, 1)
    assert first[0] < 1
    assert isnan(second[0])
    assert isnan(third[0])
    assert kept_epochs(stack, recorder) == [[1]]


def test_a_network_that_diverges_does_not_change_the_others_of_its_stack():
    data = stage_of(2)
    expected, _, _ = stage(data, epochs=3)
    data.training.examples[0, 5] = torch.nan
    stack, recorder, _ = stage(data, epochs=3)
    assert recorder.parameters[0]["weight_1"][0].isnan().any()
    for name in stack.parameters.shapes:
        assert torch.equal(stack.parameters[name][1], expected.parameters[name][1])


def test_if_every_loss_is_nan_the_parameters_are_those_before_the_stage():
    data = stage_of(1)
    untrained, _, _ = stage(data, epochs=0)
    data.validation.examples[0, 0] = torch.nan
    for select_by in ("validation_loss", "validation_accuracy"):
        stack, _, _ = stage(data, epochs=3, select_by=select_by)
        assert torch.equal(stack.parameters.flat, untrained.parameters.flat)


# ---- Early stopping, and learning rates.


def test_a_unit_stops_when_its_score_has_not_improved_for_some_epochs():
    """Seed 0 gets better with every epoch. Seed 1 gets worse, so it stops after the first epoch and two more."""
    data = stage_of(num_seeds=2, validated_against=[1])
    stack, recorder, counts = stage(data, epochs=6, lr=2.0, patience=2)
    assert counts.epochs_U == [6, 3]
    assert kept_epochs(stack, recorder) == [[6], [1]]
    assert len(recorder.parameters) == 6  # seed 1 is computed on, but its epochs are not counted
    _, recorder, counts = stage(
        stage_of(1, first_seed=1, validated_against=[1]), first_seed=1, epochs=6, lr=2.0, patience=2
    )
    assert (counts.epochs_U, len(recorder.parameters)) == ([3], 3)  # nothing is left to train


def test_a_late_improvement_after_the_end_changes_nothing(monkeypatch):
    """The unit that has ended is not given better parameters later, although it is computed on."""
    scores = iter([[1.0, 9.0], [2.0, 8.0], [3.0, 7.0], [0.1, 6.0], [0.1, 5.0]])
    monkeypatch.setattr("vision.training._cross_entropy", lambda *_: torch.tensor(next(scores)))
    stack, recorder, counts = stage(stage_of(2), epochs=5, patience=2)
    assert counts.epochs_U == [3, 5]
    assert kept_epochs(stack, recorder) == [[1], [5]]


def test_the_learning_rate_of_each_update_is_the_given_one():
    data = stage_of(1)
    untrained, _, _ = stage(data, epochs=0)
    only_first_epoch = [1.0] * 4 + [0.0] * 8
    _, recorder, _ = stage(data, epochs=3, rates=only_first_epoch)
    assert not torch.equal(recorder.parameters[0].flat, untrained.parameters.flat)
    assert torch.equal(recorder.parameters[0].flat, recorder.parameters[2].flat)


# ---- Seeds in a stack, repetition, and counts.


@pytest.mark.parametrize(
    ("kind", "networks_per_seed", "joint"),
    [(MLPStack, 1, False), (MLPStack, 2, False), (MLPStack, 2, True), ("soft", 1, False), ("hard", 1, False)],
)
def test_a_seed_trains_the_same_in_a_stack_and_alone(kind, networks_per_seed, joint):
    how = {"networks_per_seed": networks_per_seed, "joint": joint, "kind": kind, "epochs": 6}
    together, recorder, _ = stage(stage_of(3), **how)
    kept = kept_epochs(together, recorder)
    for seed in range(3):
        alone, alone_recorder, _ = stage(stage_of(1, first_seed=seed), first_seed=seed, **how)
        networks = slice(seed * networks_per_seed, (seed + 1) * networks_per_seed)
        assert kept_epochs(alone, alone_recorder) == kept[networks]
        for name in alone.parameters.shapes:
            # Sums over a batch may be added in another order, which gives some rounding errors after 24 updates.
            torch.testing.assert_close(
                alone.parameters[name], together.parameters[name][networks], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("kind", [MLPStack, "soft", "hard"])
def test_a_repeated_stage_is_equal_bit_for_bit(kind):
    first, _, _ = stage(stage_of(2), networks_per_seed=2, kind=kind)
    second, _, _ = stage(stage_of(2), networks_per_seed=2, kind=kind)
    assert torch.equal(first.parameters.flat, second.parameters.flat)


@pytest.mark.parametrize("joint", [False, True])
def test_the_counts_of_a_stage(joint):
    # 60 examples in batches of 16 are four updates per epoch, the last with 12 examples.
    _, _, counts = stage(stage_of(2), networks_per_seed=3, joint=joint, epochs=5)
    assert counts == TrainingCounts([5] * (2 if joint else 6), 4, 60, 40)


def test_a_watcher_receives_the_error_rate_of_each_unit():
    data = stage_of(2)
    stack, recorder, _ = stage(data, networks_per_seed=2, epochs=1)
    expected = []
    for number in range(4):
        predicted = stack.to_module(number)(data.validation.examples[number // 2]).argmax(-1)
        expected.append(float((predicted != data.validation.labels[number // 2]).float().mean()))
    assert recorder.errors == [pytest.approx(expected)]


# ---- Losses worked out by hand.


def test_the_gradient_of_an_own_loss_by_hand():
    # Two networks, two examples, two classes. The softmax of (0, ln 3) is (1/4, 3/4). It is divided by 2 examples.
    logits = torch.tensor([[[0.0, 3.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 3.0]]]).clamp_min(1).log()
    one_hot = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    gradient = OwnLoss(1, 2).gradient(logits, one_hot)
    expected = [[[-0.375, 0.375], [-0.25, 0.25]], [[0.25, -0.25], [0.125, -0.125]]]
    torch.testing.assert_close(gradient, torch.tensor(expected))


@pytest.mark.parametrize("joint", [False, True])
def test_label_smoothing_is_that_of_torch(joint):
    # Three networks: each of its own, or their mean trained as one.
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    y = torch.tensor([0, 4, 2, 2])
    loss = JointLoss(1, 3, mean=True, label_smoothing=0.1) if joint else OwnLoss(1, 3, label_smoothing=0.1)
    one_hot = F.one_hot(y, 5).double().expand(loss.num_orders, 4, 5)
    (F.cross_entropy(logits.mean(0), y, label_smoothing=0.1) if joint else sum(
        F.cross_entropy(of_network, y, label_smoothing=0.1) for of_network in logits
    )).backward()  # fmt: skip
    torch.testing.assert_close(loss.gradient(logits.detach(), one_hot), logits.grad)


@pytest.mark.parametrize(("mean", "unit_logits", "factor"), [(True, [1.5, 0.5], 0.5), (False, [3.0, 1.0], 1.0)])
def test_networks_trained_as_one_get_the_same_gradient(mean, unit_logits, factor):
    loss = JointLoss(1, 2, mean)
    logits = torch.tensor([[[1.0, 2.0]], [[2.0, -1.0]]])
    assert loss.unit_logits(logits).tolist() == [[unit_logits]]
    p = torch.tensor(unit_logits).softmax(-1)
    gradient = loss.gradient(logits, torch.tensor([[[0.0, 1.0]]]))
    expected = torch.tensor([float(p[0]), float(p[1]) - 1]) * factor
    torch.testing.assert_close(gradient, expected.expand(2, 1, 2))


def test_orders_units_and_networks():
    own, joint = OwnLoss(2, 3), JointLoss(2, 3, mean=True)
    assert (own.num_orders, joint.num_orders) == (6, 2)
    y = torch.tensor([[1, 2], [3, 4]])
    assert own.unit_labels(y).tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    assert joint.unit_labels(y).tolist() == [[1, 2], [3, 4]]
    assert own.repeat_for_networks(torch.tensor([True, False] * 3)).tolist() == [True, False] * 3
    assert joint.repeat_for_networks(torch.tensor([True, False])).tolist() == [True] * 3 + [False] * 3

"""Every learner: what it is made of after each stage, what grows when, which networks predict, and what it spends."""

from math import log

import pytest
import torch

import vision.runs
from tests.vision.rows import numbered
from tests.vision.tiny_runs import (
    EPOCHS,
    FORWARD,
    PARAMS,
    TRAINED_ON,
    TRAINING,
    UPDATES,
    VALIDATED_ON,
    B,
    flat,
    mixture_params,
    mixture_training_flops,
    networks,
    small_run,
    small_settings,
    taken,
)
from vision.backbones import Backbone
from vision.batches import Batches, Memory
from vision.datasets import load_dataset
from vision.inputs import Vectors
from vision.learners import LEARNERS, worst_experts
from vision.learners.firefly import _chain_batches
from vision.networks import MixtureStack, MLPStack
from vision.predictor import load
from vision.seeds import generator
from vision.stream import partition

CPU = torch.device("cpu")
SIZES = (64, 8, 8, 10)
STAND_STILL = {"optimizer": "sgd", "lr": 1e-12}
"""Training changes nothing: what a stage starts from is what it ends with."""


def scores(rows, name):
    return [getattr(row.scores, name) for row in rows]


def spent(rows, name):
    return [getattr(row.spent, name) for row in rows]


def test_data():
    dataset = load_dataset("digits", ".")
    return dataset.pixels.normalise(dataset.test.images), dataset.test.labels


test_data.__test__ = False


def mega_batch(t: int, seed: int = 0):
    return partition(load_dataset("digits", "."), B, 0.1, seed)[t - 1]


def normalise(examples):
    return load_dataset("digits", ".").pixels.normalise(examples.images)


@pytest.mark.parametrize(
    ("settings", "params", "members", "experts", "updates"),
    [
        ({"learner": "sm"}, [PARAMS] * 5, [None] * 5, [None] * 5, [UPDATES] * B),
        ({"learner": "ens"}, [5 * PARAMS] * 5, [5] * 5, [None] * 5, [5 * UPDATES] * B),
        ({"learner": "umix", "members": 3}, [3 * PARAMS] * 5, [3] * 5, [None] * 5, [UPDATES] * B),
        ({"learner": "gens"}, [n * PARAMS for n in (1, 1, 2, 3, 4)], [None, None, 2, 3, 4], [None] * 5, [UPDATES] * B),
        (
            {"learner": "gens", "members": 2},
            [n * PARAMS for n in (2, 2, 4, 6, 8)],
            [2, 2, 4, 6, 8],
            [None] * 5,
            [2 * UPDATES] * B,
        ),
        # A tree that begins with one expert has no root; each split adds a node of two branches.
        (
            {"learner": "gmoe"},
            [mixture_params(e, 2 * (e - 1)) for e in (1, 1, 2, 3, 4)],
            [None] * 5,
            [1, 1, 2, 3, 4],
            [UPDATES] * B,
        ),
        (
            {"learner": "gmoe", "experts": 3, "grow_every": 2},
            [mixture_params(e, k) for e, k in ((3, 3), (3, 3), (3, 3), (4, 5), (4, 5))],
            [None] * 5,
            [3, 3, 3, 4, 4],
            [UPDATES] * B,
        ),
        # A flat gate has a branch for each expert, and none where there is one.
        (
            {"learner": "gmoe_flat"},
            [mixture_params(e, k) for e, k in ((1, 0), (1, 0), (2, 2), (3, 3), (4, 4))],
            [None] * 5,
            [1, 1, 2, 3, 4],
            [UPDATES] * B,
        ),
        ({"learner": "moe", "experts": 3}, [mixture_params(3, 3)] * 5, [None] * 5, [3] * 5, [UPDATES] * B),
        (
            {"learner": "ens_moe", "experts": 2},
            [n * mixture_params(2, 2) for n in (1, 1, 2, 3, 4)],
            [None, None, 2, 3, 4],
            [2] * 5,
            [UPDATES] * B,
        ),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_a_learner_is_made_of(tmp_path, settings, params, members, experts, updates):
    (rows,) = small_run(tmp_path, **settings)
    assert scores(rows, "num_params") == params
    assert scores(rows, "num_members") == members
    assert scores(rows, "num_experts") == experts
    assert spent(rows, "num_updates") == [0, *updates]
    assert all(0 <= rate <= 1 for rate in scores(rows, "error_rate"))
    assert rows[-1].scores.error_rate < rows[0].scores.error_rate  # it learns


@pytest.mark.parametrize(
    ("settings", "training_flops"),
    [
        ({"learner": "sm"}, [TRAINING] * B),
        ({"learner": "ens", "members": 3}, [3 * TRAINING] * B),
        ({"learner": "umix", "members": 3}, [3 * TRAINING] * B),
        ({"learner": "gens", "members": 2}, [2 * TRAINING] * B),  # the frozen ones cost nothing
        ({"learner": "gmoe"}, [mixture_training_flops(e, 2 * (e - 1)) for e in (1, 2, 3, 4)]),
        ({"learner": "gmoe_flat", "experts": 2}, [mixture_training_flops(e, e) for e in (2, 3, 4, 5)]),
        ({"learner": "ens_moe", "experts": 2}, [mixture_training_flops(2, 2)] * B),
    ],
    ids=lambda value: value["learner"] if isinstance(value, dict) else "",
)
def test_a_stage_costs_flops_x_examples_x_epochs_x_members(tmp_path, settings, training_flops):
    (rows,) = small_run(tmp_path, **settings)
    assert spent(rows, "train_flops") == [0, *(flops * TRAINED_ON * EPOCHS for flops in training_flops)]


def test_what_ranking_experts_cost_is_told_beside_validation(tmp_path):
    (rows,) = small_run(tmp_path, learner="gmoe", experts=2)

    def forward(num_experts, num_branches):
        return 2 * (64 + 8) * (8 * num_experts + num_branches) + 2 * 80

    costs = [forward(2, 2), forward(3, 4), forward(4, 6), forward(5, 8)]
    validated = [EPOCHS * cost * n for cost, n in zip(costs, VALIDATED_ON, strict=True)]
    ranked = [0, *(cost * n for cost, n in zip(costs[:-1], VALIDATED_ON[:-1], strict=True))]
    assert spent(rows, "validation_flops") == [0, *(a + b for a, b in zip(validated, ranked, strict=True))]


def test_with_a_wait_of_3_the_learner_stands_still_until_then(tmp_path):
    (rows,) = small_run(tmp_path, learner="gens", wait=3)
    assert scores(rows, "num_members") == [None, None, None, None, 2]
    assert [row.stage for row in rows] == [0, 0, 0, 1, 2]
    assert len(set(scores(rows, "error_rate")[:3])) == 1
    # 3 x 324 = 972 examples are 16 batches of 64; the last mega-batch alone 6.
    assert spent(rows, "num_updates") == [0, 0, 0, 16 * EPOCHS, 6 * EPOCHS]


# ---- SM, Ens and UMix


def test_a_stage_goes_on_from_the_last_unless_from_scratch(tmp_path):
    generators = LEARNERS["sm"](small_settings(tmp_path), Backbone(SIZES), None, CPU).generators

    def drawn(stage):
        return flat(MLPStack.initialised(SIZES, generators("initialisation", stage), CPU))

    for name, scratch in (("on", False), ("anew", True)):
        small_run(tmp_path / name, **STAND_STILL, from_scratch=scratch, keep_stages=True)
    assert torch.allclose(flat(networks(tmp_path / "on", B)), drawn(1), atol=1e-9)
    for stage in range(1, B + 1):
        assert torch.allclose(flat(networks(tmp_path / "anew", stage)), drawn(stage), atol=1e-9)
    assert not torch.allclose(drawn(1), drawn(2), atol=1e-2)


def test_a_mixture_from_scratch_keeps_the_structure_it_has_grown(tmp_path):
    (rows,) = small_run(tmp_path, learner="gmoe", from_scratch=True)
    assert scores(rows, "num_experts") == [1, 1, 2, 3, 4]


def test_the_members_of_ens_differ_and_the_first_is_sm(tmp_path):
    small_run(tmp_path / "sm")
    small_run(tmp_path / "ens", learner="ens", members=3)
    members = [flat_of_network(networks(tmp_path / "ens", B), number) for number in range(3)]
    assert torch.allclose(members[0], flat(networks(tmp_path / "sm", B)), atol=1e-4)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (members[a] - members[b]).abs().mean() > 0.05


def flat_of_network(stack, number):
    return torch.cat([stack.parameters[name][number].flatten() for name in stack.parameters.shapes])


@pytest.mark.parametrize("combine", ["probability", "logit", "vote"])
@pytest.mark.parametrize("learner", ["ens", "gens"])
def test_members_predict_together_as_combine_says(tmp_path, learner, combine):
    (rows,) = small_run(tmp_path, learner=learner, members=4 if learner == "ens" else 1, combine=combine)
    if learner == "ens":
        members = [networks(tmp_path, B).to_module(number) for number in range(4)]
    else:
        members = [networks(tmp_path, stage).to_module(0) for stage in range(1, B + 1)]
    x, y = test_data()
    logits = torch.stack([member(x) for member in members]).detach()
    probability = logits.softmax(-1)
    summed = {
        "probability": probability.sum(0),
        "logit": logits.sum(0),
        # The majority; of equally many votes the mean probability decides, which is below one vote.
        "vote": torch.nn.functional.one_hot(logits.argmax(-1), 10).sum(0) + 0.5 * probability.mean(0),
    }[combine]
    assert rows[-1].scores.error_rate == int((summed.argmax(-1) != y).sum()) / len(y)


@pytest.mark.parametrize("how", ["logit", "logit_sum"])
def test_umix_is_one_predictor_of_its_members_logits(tmp_path, how):
    (rows,) = small_run(tmp_path, learner="umix", members=3, combine=how)
    members = [networks(tmp_path, B).to_module(number) for number in range(3)]
    x, y = test_data()
    joint = sum(member(x) for member in members)
    assert rows[-1].scores.error_rate == int((joint.argmax(-1) != y).sum()) / len(y)
    valid = mega_batch(B).validation
    logits = sum(member(normalise(valid)) for member in members)
    error = int((logits.argmax(-1) != valid.labels).sum()) / len(valid)
    assert rows[-1].scores.validation_error_rate == error


def test_umix_trains_its_members_on_one_order_and_one_gradient(tmp_path):
    """Two equal members of a mean stay equal, and are an SM: half its gradient at twice its lr."""
    dataset = load_dataset("digits", ".")
    memory = Memory(Vectors(dataset.pixels), 10, 1, CPU)
    plain_sgd = {"optimizer": "sgd", "weight_decay": 0.0}
    settings = small_settings(tmp_path, learner="umix", members=2, **plain_sgd, lr=0.2, epochs=2)
    learner = LEARNERS["umix"](settings, Backbone(SIZES), memory, CPU)
    stack = learner.stack
    for name in stack.parameters.shapes:
        stack.parameters[name][1] = stack.parameters[name][0]
    single = LEARNERS["sm"](small_settings(tmp_path, **plain_sgd, lr=0.1, epochs=2), Backbone(SIZES), memory, CPU)
    assert torch.equal(flat_of_network(stack, 0), flat(single.stack))
    stage = stage_one(tmp_path)
    learner.train(stage)
    single.train(stage)
    assert torch.allclose(flat_of_network(learner.stack, 0), flat_of_network(learner.stack, 1), atol=1e-6)
    assert torch.allclose(flat_of_network(learner.stack, 0), flat(single.stack), atol=1e-5)


def stage_one(folder):
    from fairseq_alma.core.protocol import Stage
    from vision.stream import stacked_stream

    stream = stacked_stream([partition(load_dataset("digits", "."), B, 0.1, 0)])
    return Stage(1, (next(iter(stream)),), (), False, folder)


@pytest.mark.parametrize("learner", [
    "sm", "ens", "gmoe", "ff",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("umix", "gens", "moe", "gmoe_flat", "ens_moe")),
])  # fmt: skip
def test_with_label_smoothing_every_learner_predicts_with_less_confidence(tmp_path, learner):
    test, confidence = load_dataset("digits").test.images.view(-1, 8, 8).numpy(), []
    for smoothing in (0.0, 0.5):
        out = tmp_path / str(smoothing)
        own = taken(learner, members=2, experts=2, grow_every=1)
        small_run(out, epochs=20, arrivals=2, label_smoothing=smoothing, **own)
        confidence.append(load(out)(test).max(1).mean())
    assert confidence[1] < 0.85 * confidence[0]


def test_firefly_ranks_its_candidates_by_the_smoothed_loss():
    batches = Batches(numbered(1, 6), [generator(0)], batch_size=6)
    ((x, labels),) = _chain_batches(batches, 0.3)
    expected = 0.7 * torch.nn.functional.one_hot(x[:, 0].long() % 3, 3) + 0.1
    torch.testing.assert_close(labels, expected)
    ((x, labels),) = _chain_batches(batches, 0.0)
    assert torch.equal(labels, x[:, 0].long() % 3)


def test_bagging_gives_members_other_examples_and_as_many(tmp_path):
    plain, bagged = (
        small_run(tmp_path / str(bagging), learner="ens", members=2, bagging=bagging, keep_stages=True)[0]
        for bagging in (False, True)
    )
    assert spent(plain, "num_updates") == spent(bagged, "num_updates")
    assert spent(plain, "train_flops") == spent(bagged, "train_flops")
    drift = flat(networks(tmp_path / "True", 1)) - flat(networks(tmp_path / "False", 1))
    assert drift.abs().max() > 0.01


def test_replay_of_all_trains_on_everything_and_by_share_on_no_more_than_without(tmp_path):
    (every,) = small_run(tmp_path / "all", replay="all")
    # 324, 648, 972 and 1296 examples are 6, 11, 16 and 21 batches of 64.
    assert spent(every, "num_updates") == [0, 6 * EPOCHS, 11 * EPOCHS, 16 * EPOCHS, 21 * EPOCHS]
    assert spent(every, "train_flops") == [0, *(k * TRAINED_ON * EPOCHS * TRAINING for k in (1, 2, 3, 4))]
    # It validates on all of them, too: 36, 72, 107 and 142 examples, each in every epoch.
    assert spent(every, "validation_flops") == [0, *(n * EPOCHS * FORWARD for n in (36, 72, 107, 142))]
    (share,) = small_run(tmp_path / "share", replay=0.5)
    (none,) = small_run(tmp_path / "none")
    assert spent(share, "num_updates") == spent(none, "num_updates") == [0, *[UPDATES] * B]
    assert spent(share, "train_flops") == spent(none, "train_flops")
    assert scores(share, "error_rate")[:2] == scores(none, "error_rate")[:2]  # there is no past yet
    assert not torch.equal(flat(networks(tmp_path / "share", 2 + 2)), flat(networks(tmp_path / "none", 2 + 2)))


# ---- gEns


def test_frozen_members_stay_as_they_are_to_the_bit(tmp_path):
    small_run(tmp_path / "short", learner="gens", arrivals=1)
    small_run(tmp_path / "long", learner="gens")
    first = [(tmp_path / name / "stages/stage_001/train/networks.pt").read_bytes() for name in ("short", "long")]
    assert first[0] == first[1]
    # The first member is the single model of the first stage: the same draw, the same order.
    small_run(tmp_path / "sm", arrivals=1)
    assert torch.equal(flat(networks(tmp_path / "sm", 1)), flat(networks(tmp_path / "long", 1)))


def test_a_new_member_learns_from_its_own_stage_alone(tmp_path):
    """So the second member is the same whatever the first one was trained for."""
    small_run(tmp_path / "a", learner="gens", arrivals=2)
    small_run(tmp_path / "b", learner="gens", arrivals=2, combine="vote")
    assert torch.equal(flat(networks(tmp_path / "a", 2)), flat(networks(tmp_path / "b", 2)))
    assert (flat(networks(tmp_path / "a", 1)) - flat(networks(tmp_path / "a", 2))).abs().mean() > 0.05


@pytest.mark.parametrize("learner", ["gens", "ens_moe"])
def test_new_members_are_drawn_at_random_or_copied_from_the_last(tmp_path, learner):
    for origin in ("random", "copy"):
        settings = taken(learner, experts=2, new_members_from=origin)
        small_run(tmp_path / origin, **settings, arrivals=2, **STAND_STILL)
    first, copied = (flat(networks(tmp_path / "copy", stage)) for stage in (1, 2))
    assert torch.allclose(first, copied, atol=1e-9)
    assert (flat(networks(tmp_path / "random", 2)) - first).abs().mean() > 0.02


def test_two_new_members_of_a_stage_differ(tmp_path):
    small_run(tmp_path, learner="gens", members=2, arrivals=2)
    for stage in (1, 2):
        stack = networks(tmp_path, stage)
        assert len(stack) == 2
        assert (flat_of_network(stack, 0) - flat_of_network(stack, 1)).abs().mean() > 0.05


# ---- gMoE


def routed(p_a: float, p_b: float, hard: bool = False) -> MixtureStack:
    """Two experts a layer that pass on what comes: A = (1, 0) and B = (0, 1). The first layer's gate gives A's weight
    p_a and B's weight p_b to expert 0; the second layer's gives them to expert 1. The head says class 0 with 0.9."""
    stack = MixtureStack.initialised((2, 2, 2, 2), 2, hard, [torch.Generator()], CPU)
    gate = [[log(p_a), log(p_b)], [log(1 - p_a), log(1 - p_b)]]
    identity = [[1.0, 0.0], [0.0, 1.0]]
    for layer, rows in ((1, gate), (2, gate[::-1])):
        stack.parameters[f"weight_{layer}"][0] = torch.tensor([*identity, *identity, *rows])
        stack.parameters[f"bias_{layer}"].zero_()
    stack.parameters["weight_3"].zero_()
    stack.parameters["bias_3"][0] = torch.tensor([log(9), 0.0])
    return stack


def examples(num_a: int, num_b: int):
    """A's of class 0, each of loss -ln 0.9 = 0.105; B's of class 1, each of loss -ln 0.1 = 2.303."""
    x = torch.tensor([[1.0, 0.0]] * num_a + [[0.0, 1.0]] * num_b)[None]
    return x.split(2000, dim=1), torch.tensor([[0] * num_a + [1] * num_b])


@pytest.mark.parametrize(
    ("stack", "num_a", "split_by", "charged"),
    [
        # Losses 3 x 0.105 = 0.316 of A's, 2.303 of B: expert 0 is charged 0.75 and 0.25 of them: 0.81 against 1.81.
        (routed(0.75, 0.25), 3, "validation_loss", 1),
        # Weights alone: 3 x 0.75 + 0.25 = 2.5 against 1.5.
        (routed(0.75, 0.25), 3, "gate_mass", 0),
        # Losses 15 x 0.105 = 1.58 and 2.303: 0.9 x 1.58 + 0.45 x 2.303 = 2.46 against 1.43.
        (routed(0.9, 0.45), 15, "validation_loss", 0),
        # The same with hard gates: A's go to expert 0 alone, B to expert 1: 1.58 against 2.303.
        (routed(0.9, 0.45, hard=True), 15, "validation_loss", 1),
        # How many go where: 15 against 1.
        (routed(0.9, 0.45, hard=True), 15, "gate_mass", 0),
    ],
    ids=["soft", "gate-mass", "soft-far", "hard", "hard-mass"],
)
def test_the_expert_that_is_charged_most(stack, num_a, split_by, charged):
    assert worst_experts(stack, *examples(num_a, 1), split_by) == [[charged], [1 - charged]]


def test_charges_are_summed_over_any_number_of_examples():
    """In parts of 2000: 6000 A's of loss 632 in all, 300 B's of loss 691, at the end of the last part."""
    assert worst_experts(routed(0.9, 0.1), *examples(6000, 300), "validation_loss") == [[1], [0]]
    assert worst_experts(routed(0.9, 0.1), *examples(6000, 250), "validation_loss") == [[0], [1]]


def charged_by_hand(plain, x, y):
    """Example after example, expert after expert: the loss times the weight."""
    charges = []
    loss_n = -plain(x).log_softmax(-1)[torch.arange(len(y)), y]
    for layer in plain.layers:
        charges.append(int((loss_n[:, None] * layer.weights(x)).sum(0).argmax()))
        x = layer(x)
    return charges


@pytest.mark.parametrize("hard", [False, True])
def test_a_stage_begins_by_splitting_what_the_stage_before_lost_most_by(tmp_path, hard):
    small_run(tmp_path, learner="gmoe", experts=3, keep_stages=True, hard_gates=hard)
    splits = [[], []]
    for stage in range(2, B + 1):
        valid = mega_batch(stage - 1).validation
        charged = charged_by_hand(networks(tmp_path, stage - 1).to_module(0), normalise(valid), valid.labels)
        splits = [[*one, expert] for one, expert in zip(splits, charged, strict=True)]
        assert [gates.splits[0] for gates in networks(tmp_path, stage).gates] == splits


def test_with_replay_experts_are_charged_for_all_validation_data_of_the_past(tmp_path):
    small_run(tmp_path, learner="gmoe", experts=3, keep_stages=True, replay="all", arrivals=3)
    parts = [mega_batch(t).validation for t in (1, 2)]
    x, y = torch.cat([normalise(part) for part in parts]), torch.cat([part.labels for part in parts])
    charged = charged_by_hand(networks(tmp_path, 2).to_module(0), x, y)
    assert [gates.splits[0][-1] for gates in networks(tmp_path, 3).gates] == charged


def test_a_stage_cut_short_by_the_end_of_its_arrivals_is_ranked_on_itself(tmp_path):
    """Stages of 2 and 1 mega-batches, then two more arrive: the third stage ranks on mega-batch 3 alone."""
    changes = {"learner": "gmoe", "experts": 4, "wait": 2, "keep_stages": True, "mega_batches": 5}
    small_run(tmp_path / "run", **changes, arrivals=3, last_group="train")
    (rows,) = small_run(tmp_path / "run", **changes)
    assert [row.stage for row in rows] == [0, 0, 1, 2, 2, 3]
    ranked_on = rows[5].spent.validation_flops
    # 1438 / 5: 288, 288, 288, 287, 287; 28 of each are validated on. Costs are those of 5 experts, then 6.
    five, six = (2 * (64 + 8) * (8 * e + 4 + 2 * (e - 4)) + 160 for e in (5, 6))
    assert ranked_on == EPOCHS * 2 * 28 * six + 28 * five


def test_growth_under_a_tree_leaves_what_the_mixture_computes(tmp_path):
    """With training that stands still nothing has changed after three growths; under a flat gate it has."""
    x, _ = test_data()
    for learner in ("gmoe", "gmoe_flat"):
        small_run(tmp_path / learner, learner=learner, experts=2, keep_stages=True, **STAND_STILL)
    before, after = (networks(tmp_path / "gmoe", stage).to_module(0)(x) for stage in (1, B))
    assert torch.allclose(before, after, atol=1e-5)
    before, after = (networks(tmp_path / "gmoe_flat", stage).to_module(0)(x) for stage in (1, B))
    assert not torch.allclose(before, after, atol=1e-2)


def test_a_mixture_of_the_same_seed_trains_alike_however_many_seeds_are_beside_it(tmp_path):
    small_run(tmp_path / "two", learner="gmoe", experts=2, seeds=2, hard_gates=True)
    small_run(tmp_path / "one", learner="gmoe", experts=2, seed=1, hard_gates=True)
    together, alone = networks(tmp_path / "two", B), networks(tmp_path / "one", B)
    assert [gates.splits[1] for gates in together.gates] == [gates.splits[0] for gates in alone.gates]
    assert torch.allclose(flat_of_network(together, 1), flat(alone), atol=1e-3)


def test_old_networks_are_removed_unless_they_are_kept_or_predict(tmp_path):
    def kept(name, **changes):
        small_run(tmp_path / name, epochs=1, **changes)
        found = (tmp_path / name).glob("stages/*/*/networks.pt")
        return sorted(f"{path.parent.parent.name[-1]}{path.parent.name}" for path in found)

    assert kept("sm") == ["4train"]
    assert kept("all", keep_stages=True) == ["1train", "2train", "3train", "4train"]
    # If a run continues without keep_stages, the networks that it stored with it are not deleted.
    assert kept("some", arrivals=2, keep_stages=True) == ["1train", "2train"]
    assert kept("some", arrivals=4) == ["1train", "2train", "4train"]
    assert kept("gmoe", learner="gmoe") == ["4train"]
    assert kept("gens", learner="gens") == ["1train", "2train", "3train", "4train"]


def test_only_learners_that_grow_record_growth_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0)
    for learner in ("sm", "gmoe"):
        small_run(tmp_path / learner, **taken(learner, grow_every=2), epochs=1)
    assert not [*(tmp_path / "sm").rglob("grow*")]
    assert [path.parent.name for path in (tmp_path / "gmoe").rglob("grow.done.json")] == ["stage_003", "stage_004"]

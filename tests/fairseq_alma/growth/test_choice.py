"""Which experts are copied: by loss, by gradient or at random."""

import copy

import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.expert_utility import measure_utilities
from fairseq_alma.evaluation.flops import count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.growth.experts import EXPERT_WEIGHTS, grow_experts
from tests.fairseq_alma.growth.test_experts import FIRST, SECOND, make, state_of

MIXTURES = [f"decoder.layers.{layer}.mixture." for layer in (1, 3)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured(trained, stream):
    return measure_utilities(trained, stream, CPU)


def parents_of(before, after, prefix) -> list[int]:
    """Return the expert of which each new expert is a copy."""
    old, new = before[prefix + "fc1_weight"], after[prefix + "fc1_weight"]
    return [next(e for e in range(len(old)) if torch.equal(old[e], weight)) for weight in new[len(old) :]]


def test_each_choice_copies_its_own_experts():
    torch.manual_seed(0)
    state = state_of(make(3), {FIRST: [1.0, 9.0, 4.0], SECOND: [6.0, 0.5, 7.0]})
    utilities = {FIRST: torch.tensor([5.0, 1.0, 2.0]), SECOND: torch.tensor([0.0, 3.0, 0.0])}
    by_loss, by_gradient = (
        grow_experts(state, 2, copy_experts_by=kind, utilities=utilities) for kind in ("validation_loss", "gradient")
    )
    assert [parents_of(state, by_loss, prefix) for prefix in (FIRST, SECOND)] == [[1, 2], [2, 0]]
    assert [parents_of(state, by_gradient, prefix) for prefix in (FIRST, SECOND)] == [[0, 2], [1, 0]]


def test_a_random_choice_depends_on_the_seed_and_takes_every_pair_equally_often():
    torch.manual_seed(0)
    state = state_of(make(3), {FIRST: [1.0, 9.0, 4.0], SECOND: [6.0, 0.5, 7.0]})
    chosen = [parents_of(state, grow_experts(state, 2, copy_experts_by="random", seed=s), FIRST) for s in range(300)]
    again = parents_of(state, grow_experts(state, 2, copy_experts_by="random", seed=7), FIRST)
    assert again == chosen[7]
    assert all(len(set(pair)) == 2 for pair in chosen)
    # Each of the 6 ordered pairs is expected 50 times, with a standard deviation of 6.5.
    counts = {pair: chosen.count(list(pair)) for pair in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))}
    assert all(25 <= count <= 75 for count in counts.values()), counts


def gradient_of(model, task, mixture, expert) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean validation loss with respect to each tensor of an expert, block by block."""
    model.zero_grad()
    task.load_dataset("valid")
    dataset, num_tokens = task.dataset("valid"), 0
    for index in range(len(dataset)):
        batch = dataset.collater([dataset[index]])
        scores, _ = model(batch["net_input"]["src_tokens"])
        target_T = batch["target"].flatten()
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), target_T, reduction="sum").backward()
        num_tokens += len(target_T)
    return {name: getattr(mixture, name).grad[expert] / num_tokens for name in EXPERT_WEIGHTS}


def test_the_utility_is_the_squared_norm_of_the_gradient_of_the_validation_loss(trained, stream, measured):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    for prefix, mixture in zip(MIXTURES, model.mixtures, strict=True):
        utility_E = measured.utilities[prefix]
        assert (utility_E.shape, utility_E.dtype) == ((4,), torch.float64)
        for expert in range(4):
            gradient = gradient_of(model, task, mixture, expert)
            norm = sum(float(tensor.double().square().sum()) for tensor in gradient.values())
            assert utility_E[expert].item() == pytest.approx(norm, rel=1e-3, abs=1e-12)
    # A small step against the gradient of an expert lowers the loss by step * utility. This is tested in the last
    # mixture, because a step in an earlier one also changes the routing in later ones.
    last = measured.utilities[MIXTURES[1]]
    expert = int(last.argmax())
    gradient, utility = gradient_of(model, task, model.mixtures[1], expert), float(last[expert])
    losses = []
    for step in (0.0005 / utility, -0.0005 / utility):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, tensor in gradient.items():
                getattr(moved.mixtures[1], name)[expert] -= step * tensor
        losses.append(-score_tokens(moved, task, "valid").log_probability_T.astype("float64").mean())
    assert losses[1] - losses[0] == pytest.approx(0.001, rel=0.05)


def test_the_cost_is_a_forward_and_a_backward_pass_over_the_validation_set(trained, stream, measured):
    model, _ = load_member(trained, StreamFolder.open(stream), CPU)
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    rest = tokens % 32  # blocks have 32 tokens, and the last one has the rest
    assert measured.flops == count_training_flops(model).total(tokens, (tokens - rest) * 32 + rest**2)


def test_an_expert_without_tokens_has_no_utility(trained, stream, tmp_path):
    checkpoint = read_checkpoint(trained)
    # A row of zeros has the logit 0, and rows in the direction of the mean input have larger logits.
    rows_ED = checkpoint["model"][MIXTURES[0] + "router.weight"].clone()
    mean_D = checkpoint["model"][MIXTURES[0] + "valid_input_ED"].sum(0)
    rows_ED[:] = mean_D / mean_D.norm()
    rows_ED[2] = -rows_ED[2]
    checkpoint["model"][MIXTURES[0] + "router.weight"] = rows_ED
    torch.save(checkpoint, tmp_path / "starved.pt")
    utility_E = measure_utilities(tmp_path / "starved.pt", stream, CPU).utilities[MIXTURES[0]]
    assert utility_E[2] == 0
    assert utility_E.max() > 0


def test_the_command_copies_the_experts_with_the_largest_gradient(trained, stream, measured, tmp_path, capsys):
    target, expected = tmp_path / "grown.pt", tmp_path / "expected.pt"
    arguments = [str(trained), str(target), "--experts", "2", "--copy-experts-by", "gradient"]
    assert alma_grow([*arguments, "--stream", str(stream)]) == 0
    grow_checkpoint(trained, expected, 2, seed=4, copy_experts_by="gradient", utilities=measured.utilities)
    before, after, same = (read_checkpoint(path)["model"] for path in (trained, target, expected))
    for prefix in MIXTURES:
        assert parents_of(before, after, prefix) == measured.utilities[prefix].topk(2).indices.tolist()
    assert all(torch.equal(after[name], same[name]) for name in after)
    capsys.readouterr()
    for more, message in [
        (["--experts", "1", "--copy-experts-by", "gradient"], "needs the validation set"),
        (["--experts", "1", "--stream", str(stream)], "has no effect with --copy-experts-by validation_loss"),
        (["--experts", "1", "--copy-experts-by", "gradient", "--stream", str(tmp_path / "none")], "none"),
        (["--layers", "2", "--copy-experts-by", "random"], "--copy-experts-by is for growth by experts"),
    ]:
        assert alma_grow([str(trained), str(tmp_path / "other.pt"), *more]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other.pt").exists()


def test_missing_or_infinite_utilities_are_refused(trained, stream, tmp_path):
    state = read_checkpoint(trained)["model"]
    unusable = [torch.ones(3), torch.full((4,), torch.nan)]
    for utilities in (None, {}, *(dict.fromkeys(MIXTURES, utility_E) for utility_E in unusable)):
        with pytest.raises(SettingError, match="the choice by gradient needs the utility of each of the 4 experts"):
            grow_experts(state, 1, copy_experts_by="gradient", utilities=utilities)
    with pytest.raises(SettingError, match="'size' is not one of validation_loss, gradient, random"):
        grow_experts(state, 1, copy_experts_by="size")
    with pytest.raises(StreamError, match="no complete checkpoint"):
        measure_utilities(tmp_path / "none.pt", stream, CPU)


@pytest.mark.parametrize("copy_experts_by", ["gradient", "random"])
def test_other_choices_divide_the_tokens_as_evenly(stream, trained, measured, copy_experts_by):
    """Of 100 seeds, at least 95 leave both twins with 20% to 80% of the tokens of the parent, in both mixtures."""
    state = read_checkpoint(trained)["model"]
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    inputs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {prefix: [] for prefix in MIXTURES}
    for prefix, mixture in zip(MIXTURES, model.mixtures, strict=True):
        mixture.router.register_forward_hook(
            lambda _, x, routing, prefix=prefix: inputs[prefix].append((x[0], routing.expert_T))
        )
    score_tokens(model, task, "valid")
    balanced = 0
    for seed in range(100):
        grown = grow_experts(
            state, 1, router="tree", seed=seed, copy_experts_by=copy_experts_by, utilities=measured.utilities
        )
        shares = []
        for prefix in MIXTURES:
            parent = int(grown[prefix + "router.split_E"][-1])
            x_TD = torch.cat([x[expert == parent] for x, expert in inputs[prefix]])
            shares.append(float((x_TD @ grown[prefix + "router.weight"][-1] > 0).float().mean()))
        balanced += all(0.2 <= share <= 0.8 for share in shares)
    assert balanced >= 95

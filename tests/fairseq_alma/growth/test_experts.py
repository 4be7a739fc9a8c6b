"""Growing a mixture: who is copied, what the copies are, what a growth keeps of the model."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_alma.core.errors import SettingError
from fairseq_alma.growth.experts import (
    EXPERT_WEIGHTS,
    experts_with_largest_loss,
    grow_experts,
    mixture_prefixes,
    num_params_of_expert,
)
from fairseq_alma.models.switch_lm import SwitchLanguageModel, SwitchLanguageModelConfig

FIRST, SECOND = "decoder.layers.1.mixture.", "decoder.layers.3.mixture."
WORDS, B, L = 60, 16, 16


def make(num_experts: int, **sizes) -> SwitchLanguageModel:
    dictionary = Dictionary()
    for i in range(WORDS - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    small = {"decoder_layers": 4, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2}
    options = {"learned_positions": L, "tokens_per_sample": L, "dropout": 0.0, "capacity_factor": 0.0}
    cfg = SwitchLanguageModelConfig(num_experts=num_experts, **{**small, **options, **sizes})
    return SwitchLanguageModel.build_model(cfg, Namespace(source_dictionary=dictionary))


@pytest.fixture
def model() -> SwitchLanguageModel:
    """Three experts in each of two mixtures; biases and norms as a trained model has them, not all 0 or 1."""
    torch.manual_seed(0)
    model = make(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    return model


@pytest.fixture
def words() -> torch.Tensor:
    return torch.randint(4, WORDS, (B, L), generator=torch.Generator().manual_seed(1))


def state_of(model: SwitchLanguageModel, losses: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    """Its state dict, as a validation that charged these losses would have left it."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for prefix, loss_E in losses.items():
        state[prefix + "valid_loss_E"] = torch.tensor(loss_E, dtype=torch.float64)
        state[prefix + "valid_tokens_E"] = torch.tensor([2.0 * loss for loss in loss_E], dtype=torch.float64)
    return state


def grown_by(model: SwitchLanguageModel, losses: dict[str, list[float]], num_new: int, **options):
    """A model with more experts, grown from `model`."""
    state = grow_experts(state_of(model, losses), num_new, **options)
    grown = make(len(state[FIRST + "valid_loss_E"]))
    grown.load_state_dict(state)
    return grown.train(model.training)


def load_of(model: SwitchLanguageModel, words: torch.Tensor) -> dict[str, list[float]]:
    """How many tokens each expert gets: who gets most is to be copied in these tests, so that twins share many."""
    with torch.no_grad():
        mixtures = model(words)[1]["mixtures"]
    loads = [mixture.plan.load_E.double().tolist() for mixture in mixtures]
    return dict(zip((FIRST, SECOND), loads, strict=True))


@pytest.mark.parametrize(
    ("loss_E", "num_new", "expected"),
    [
        ([1.0, 5.0, 3.0, 4.0], 2, [1, 3]),  # largest first
        ([1.0, 5.0, 3.0, 4.0], 4, [1, 3, 2, 0]),
        ([2.0, 7.0, 7.0, 7.0], 2, [1, 2]),  # of equals the first
        ([0.0, 3.0, 0.0, 3.0], 3, [1, 3, 0]),
        ([1.0, 2.0], 0, []),
    ],
)
def test_the_experts_that_lose_most_are_ranked_by_hand(loss_E, num_new, expected):
    assert experts_with_largest_loss(torch.tensor(loss_E, dtype=torch.float64), num_new) == expected


def test_more_than_there_are_cannot_be_copied():
    with pytest.raises(SettingError, match="cannot copy 5 of 4 experts"):
        experts_with_largest_loss(torch.tensor([1.0, 5.0, 3.0, 4.0]), 5)


def test_experts_that_were_charged_nothing_cannot_be_ranked():
    with pytest.raises(SettingError, match="saved after a validation"):
        experts_with_largest_loss(torch.zeros(4), 1)


@pytest.mark.parametrize("router", ["copy", "tree"])
def test_in_each_mixture_its_own_losing_experts_get_a_twin_and_all_else_stays(model, router):
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0], SECOND: [6.0, 0.5, 7.0]})
    before = {name: value.clone() for name, value in state.items()}
    grown = grow_experts(state, 2, router=router)
    parents = {FIRST: [1, 2], SECOND: [2, 0]}
    touched = set()
    for prefix, parents_K in parents.items():
        for name in EXPERT_WEIGHTS:
            weight = grown[prefix + name]
            assert weight.shape == (5, *before[prefix + name].shape[1:])
            assert torch.equal(weight[:3], before[prefix + name])
            assert torch.equal(weight[3:], before[prefix + name][parents_K])
        assert torch.equal(grown[prefix + "router.weight"][:3], before[prefix + "router.weight"])
        split = [float(p) for p in parents_K] if router == "tree" else [-1.0, -1.0]
        assert grown[prefix + "router.split_E"].tolist() == [-1.0, -1.0, -1.0, *split]
        for name in ("valid_loss_E", "valid_tokens_E"):  # they ranked other experts
            assert grown[prefix + name].tolist() == [0.0] * 5
            assert grown[prefix + name].dtype == torch.float64
        touched |= {prefix + name for name in (*EXPERT_WEIGHTS, "router.weight", "router.split_E")}
        touched |= {prefix + name for name in ("valid_loss_E", "valid_tokens_E")}
    assert list(grown) == list(before)
    for name in before.keys() - touched:
        assert torch.equal(grown[name], before[name]), name
    assert all(torch.equal(state[name], before[name]) for name in before)  # what was handed in is as it was


def test_new_rows_are_the_parents_plus_noise_or_noise_alone(model):
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0], SECOND: [6.0, 0.5, 7.0]})
    copy, tree = (grow_experts(state, 2, router=router, noise=0.02, seed=3) for router in ("copy", "tree"))
    for prefix, parents in ((FIRST, [1, 2]), (SECOND, [2, 0])):
        rows = state[prefix + "router.weight"]
        noise = tree[prefix + "router.weight"][3:]
        assert noise.abs().max() < 0.2 * rows.abs().max()
        torch.testing.assert_close(copy[prefix + "router.weight"][3:], rows[parents] + noise)


def rows_of_noise(state, noise=0.01, seed=0) -> list[torch.Tensor]:
    grown = grow_experts(state, 1, router="tree", noise=noise, seed=seed)
    return [grown[prefix + "router.weight"][-1] for prefix in (FIRST, SECOND)]


def test_noise_is_what_its_seed_makes_it(model):
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0], SECOND: [1.0, 9.0, 4.0]})
    first, again, other = (rows_of_noise(state, seed=seed) for seed in (5, 5, 6))
    for layer in (0, 1):
        assert torch.equal(first[layer], again[layer])
        assert not torch.allclose(first[layer], other[layer])
    # The generator of torch at large is neither used nor moved.
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    rows_of_noise(state)
    assert torch.equal(torch.rand(1), expected)


def test_noise_is_relative_to_the_size_of_the_rows():
    torch.manual_seed(0)
    model = make(4, decoder_embed_dim=512)
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0, 2.0], SECOND: [1.0, 9.0, 4.0, 2.0]})
    for prefix, size in ((FIRST, 0.5), (SECOND, 20.0)):
        rows = state[prefix + "router.weight"]
        state[prefix + "router.weight"] = size * rows / rows.square().mean(dim=1, keepdim=True).sqrt()
    for noise in (0.01, 0.1):
        for row, size in zip(rows_of_noise(state, noise), (0.5, 20.0), strict=True):
            # 512 draws: their standard deviation is known to 3%.
            assert row.square().mean().sqrt().item() == pytest.approx(noise * size, rel=0.15)
    # Mixtures draw one after the other: not the same numbers.
    first, second = rows_of_noise(state)
    assert not torch.allclose(first / 0.5, second / 20.0, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_new": 1, "noise": 0.0}, "noise=0.0 must be above 0"),
        ({"num_new": 1, "noise": -0.1}, "noise=-0.1 must be above 0"),
        ({"num_new": 1, "noise": float("nan")}, "noise=nan must be above 0"),
        ({"num_new": -1}, "growth adds experts, it never removes any"),
        ({"num_new": 1, "router": "forest"}, "router='forest' is not one of copy, tree"),
        ({"num_new": 4}, "cannot copy 4 of 3 experts"),
    ],
)
def test_what_makes_no_sense_is_refused(model, arguments, message):
    with pytest.raises(SettingError, match=message):
        grow_experts(state_of(model, {FIRST: [1.0, 2.0, 3.0], SECOND: [1.0, 2.0, 3.0]}), **arguments)


def test_a_model_without_mixtures_or_without_a_validation_is_refused(model):
    with pytest.raises(SettingError, match="has no mixture"):
        grow_experts({"decoder.embed_tokens.weight": torch.zeros(3, 2)}, 1)
    with pytest.raises(SettingError, match="saved after a validation"):
        grow_experts(model.state_dict(), 1)
    with pytest.raises(SettingError, match="saved after a validation"):  # one mixture of two is not enough
        grow_experts(state_of(model, {FIRST: [1.0, 2.0, 3.0]}), 1)


@pytest.mark.parametrize("copied", [0, 1, 3])
def test_a_tree_is_not_grown_without_it(model, copied):
    """Expert 3 was split off expert 1. A copy of either would take tokens that the other had."""
    everyone = [1.0, 9.0, 4.0]
    grown = grow_experts(state_of(model, {FIRST: everyone, SECOND: everyone}), 1, router="tree")
    for prefix in (FIRST, SECOND):
        grown[prefix + "valid_loss_E"] = torch.eye(4)[copied]
    with pytest.raises(SettingError, match="router=tree again"):
        grow_experts(grown, 1, router="copy")


def test_no_new_expert_changes_nothing(model):
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0], SECOND: [6.0, 0.5, 7.0]})
    grown = grow_experts(state, 0)
    assert grown is not state
    assert list(grown) == list(state)
    assert all(torch.equal(grown[name], state[name]) for name in state)


def test_mixtures_are_found_from_the_first_layer_to_the_last():
    with torch.device("meta"):
        state = make(2, decoder_layers=24).state_dict()
    assert mixture_prefixes(state) == [f"decoder.layers.{i}.mixture." for i in range(1, 24, 2)]  # 9 before 11


def test_parameters_of_the_tiny_arch_as_it_grows():
    """4, 6, 8, 12 experts: the grown state fits the model that is built with so many."""
    tiny = {"decoder_embed_dim": 128, "decoder_ffn_embed_dim": 512, "decoder_attention_heads": 4}
    per_expert = 2 * 128 * 512 + 512 + 128 + 128
    assert num_params_of_expert(128, 512) == per_expert == 131_840
    model = make(4, **tiny)
    for num_new in (2, 2, 4):
        before = len(model.mixtures[0].valid_loss_E)
        loss_E = torch.rand(before).add(0.1).tolist()
        state = grow_experts(state_of(model, {FIRST: loss_E, SECOND: loss_E}), num_new)
        grown = make(before + num_new, **tiny)
        added = sum(p.numel() for p in grown.parameters()) - sum(p.numel() for p in model.parameters())
        assert added == per_expert * num_new * 2
        assert added == sum(state[name].numel() - p.numel() for name, p in model.named_parameters())
        grown.load_state_dict(state)
        model = grown
    assert model.mixtures[0].num_experts == 12


def check_tokens_stay_below_their_old_expert(before, after, splits: dict[int, int], shared: list[tuple[int, int]]):
    """Each token's expert is its old one or one split off it; each pair in `shared` shares its tokens out."""
    for old, new in zip(before, after, strict=True):
        old_T, new_T = old.routing.expert_T, new.routing.expert_T
        parent_T = torch.tensor([splits.get(e, e) for e in range(int(new_T.max()) + 1)])[new_T]
        assert torch.equal(parent_T, old_T)
        for pair in shared:
            assert all((new_T == e).sum() > 0 for e in pair)


@pytest.mark.parametrize("training", [False, True])
def test_a_tree_keeps_logits_loss_and_routing_and_so_does_the_next(model, words, training):
    model.train(training)
    target = words.roll(-1, dims=1)
    with torch.no_grad():
        logits, extra = model(words)
        nll, _ = model(words, nll_of=target)
    current, before = model, extra["mixtures"]
    # The second growth splits expert 3, which the first has split off, and its parent once more. Each seed is one
    # whose noise leaves tokens of every pair on both sides: a split is a half space, tokens of one expert are alike.
    for losses, num_new, splits, seed in (
        ([1.0, 9.0, 1.0], 1, {3: 1}, 17),
        ([1.0, 8.0, 1.0, 9.0], 2, {4: 3, 5: 1}, 33),
    ):
        current = grown_by(current, {FIRST: losses, SECOND: losses}, num_new, router="tree", seed=seed)
        assert current.mixtures[0].router.split_E.tolist()[-num_new:] == list(splits.values())
        with torch.no_grad():
            grown_logits, grown_extra = current(words)
            grown_nll, _ = current(words, nll_of=target)
        after = grown_extra["mixtures"]
        torch.testing.assert_close(grown_logits, logits, atol=1e-6, rtol=1e-6)
        assert grown_nll.item() == pytest.approx(nll.item(), rel=1e-6)
        check_tokens_stay_below_their_old_expert(before, after, splits, list(splits.items()))
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new.routing.probability_T, old.routing.probability_T)
            assert new.routing.z_loss.item() == pytest.approx(old.routing.z_loss.item(), rel=1e-5)
        before = after
    assert current.mixtures[0].num_experts == 6


def test_the_nodes_of_a_tree_learn_and_twins_part(model, words):
    losses = load_of(model, words)
    grown = grown_by(model, losses, 1, router="tree").train()
    nll, _ = grown(words, nll_of=words.roll(-1, dims=1))
    nll.backward()  # without the balance loss: the language model's loss alone must reach the node
    for mixture, loss_E in zip(grown.mixtures, losses.values(), strict=True):
        parent = loss_E.index(max(loss_E))
        assert mixture.router.weight.grad[3].abs().sum() > 0
        assert mixture.router.weight.grad[parent].abs().sum() > 0
        # Of the same weights, but other tokens: their gradients differ, and so will they.
        assert not torch.allclose(mixture.fc1_weight.grad[3], mixture.fc1_weight.grad[parent])


@pytest.mark.parametrize("training", [False, True])
def test_a_copy_keeps_the_routing_and_lowers_each_gate_by_what_was_copied(model, words, training):
    model.train(training)
    losses = load_of(model, words)
    target = words.roll(-1, dims=1)
    # So little noise that it decides between twins only.
    grown = grown_by(model, losses, 2, router="copy", noise=1e-6)
    with torch.no_grad():
        inputs = []
        hook = model.mixtures[0].register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
        before, after = model(words)[1]["mixtures"], grown(words)[1]["mixtures"]
        hook.remove()
        nll, grown_nll = model(words, nll_of=target)[0], grown(words, nll_of=target)[0]
    # The first mixture alone gets the same inputs: what it puts out has changed.
    parents = experts_with_largest_loss(torch.tensor(losses[FIRST]), 2)
    splits = {3: parents[0], 4: parents[1]}
    check_tokens_stay_below_their_old_expert(before[:1], after[:1], splits, [(3, parents[0])])
    p_TE = (inputs[0] @ model.mixtures[0].router.weight.t()).softmax(dim=-1)
    p_T, q_T = p_TE.max(dim=-1).values, p_TE[:, parents].sum(dim=-1)
    assert q_T.min() < 0.9 < q_T.max()  # so that it is told from a constant
    torch.testing.assert_close(after[0].routing.probability_T, p_T / (1 + q_T), rtol=1e-4, atol=1e-5)
    assert (after[0].y_TD - before[0].y_TD).abs().max() > 0.01
    assert abs(grown_nll - nll) / nll > 1e-3


def test_the_noise_of_a_copy_moves_few_tokens_to_another_pair(model, words):
    losses = load_of(model, words)
    grown = grown_by(model.eval(), losses, 1, router="copy", noise=0.01)
    with torch.no_grad():
        old, new = (m(words)[1]["mixtures"][0].routing.expert_T for m in (model, grown))
    parent = losses[FIRST].index(max(losses[FIRST]))
    moved = torch.where(new == 3, parent, new) != old
    assert moved.float().mean() < 0.02
    # Shared out, not evenly: a row with a little noise is a half space, but x is not symmetric.
    shares = [int((new == e).sum()) for e in (parent, 3)]
    assert min(shares) > 0.1 * sum(shares)


def test_a_twin_with_the_same_row_never_gets_a_token():
    """Why there is noise. Whole numbers, so that the logits of equal rows are equal to the last bit."""
    torch.manual_seed(0)
    model = make(3)
    router = model.mixtures[0].router
    with torch.no_grad():
        router.weight.copy_(torch.randint(-3, 4, router.weight.shape))
    x_TD = torch.randint(-2, 3, (400, 16)).float()
    state = state_of(model, {FIRST: [9.0, 1.0, 1.0], SECOND: [9.0, 1.0, 1.0]})
    grown = make(4)
    grown.load_state_dict(grow_experts(state, 1, router="copy"))
    twin = grown.mixtures[0].router
    assert (twin(x_TD).expert_T == 3).sum() > 0
    with torch.no_grad():
        twin.weight[3] = twin.weight[0]
    expert_T = twin(x_TD).expert_T
    assert (expert_T == 0).sum() > 50
    assert (expert_T == 3).sum() == 0

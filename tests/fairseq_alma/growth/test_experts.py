"""Growth of a mixture: which experts are copied, what the copies are, and what growth keeps of the model."""

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
    """A model with three experts in each of two mixtures. Its biases and norms are random, as in a trained model.

    The seed is not chosen: of the seeds 0 to 11, only 5 fails a test of this file: copies then change the loss of
    the untrained model by less than the 0.1% that the test asks for.
    """
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
    """Return its state dict as after a validation that charged these losses to the experts."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for prefix, loss_E in losses.items():
        state[prefix + "valid_loss_E"] = torch.tensor(loss_E, dtype=torch.float64)
        state[prefix + "valid_tokens_E"] = torch.tensor([2.0 * loss for loss in loss_E], dtype=torch.float64)
    return state


def grown_by(model: SwitchLanguageModel, losses: dict[str, list[float]], num_new: int, **options):
    """Return a model with more experts, grown from `model`."""
    state = grow_experts(state_of(model, losses), num_new, **options)
    grown = make(len(state[FIRST + "valid_loss_E"]))
    grown.load_state_dict(state)
    return grown.train(model.training)


def load_of(model: SwitchLanguageModel, words: torch.Tensor) -> dict[str, list[float]]:
    """Return how many tokens each expert gets. As losses, they let growth copy the expert with the most tokens."""
    with torch.no_grad():
        mixtures = model(words)[1]["mixtures"]
    loads = [mixture.plan.load_E.double().tolist() for mixture in mixtures]
    return dict(zip((FIRST, SECOND), loads, strict=True))


@pytest.mark.parametrize(
    ("loss_E", "num_new", "expected"),
    [
        ([1.0, 5.0, 3.0, 4.0], 2, [1, 3]),  # largest first
        ([1.0, 5.0, 3.0, 4.0], 4, [1, 3, 2, 0]),
        ([2.0, 7.0, 7.0, 7.0], 2, [1, 2]),  # of equal losses the first
        ([0.0, 3.0, 0.0, 3.0], 3, [1, 3, 0]),
        ([1.0, 2.0], 0, []),
    ],
)
def test_the_experts_with_the_largest_loss_by_hand(loss_E, num_new, expected):
    assert experts_with_largest_loss(torch.tensor(loss_E, dtype=torch.float64), num_new) == expected


def test_more_than_there_are_cannot_be_copied():
    with pytest.raises(SettingError, match="cannot copy 5 of 4 experts"):
        experts_with_largest_loss(torch.tensor([1.0, 5.0, 3.0, 4.0]), 5)


def test_experts_that_were_charged_nothing_cannot_be_ranked():
    with pytest.raises(SettingError, match="saved after a validation"):
        experts_with_largest_loss(torch.zeros(4), 1)


@pytest.mark.parametrize("router", ["copy", "tree"])
def test_in_each_mixture_the_experts_with_the_largest_loss_are_copied_and_all_else_stays(model, router):
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
        for name in ("valid_loss_E", "valid_tokens_E"):  # they belong to the experts before growth
            assert grown[prefix + name].tolist() == [0.0] * 5
            assert grown[prefix + name].dtype == torch.float64
        touched |= {prefix + name for name in (*EXPERT_WEIGHTS, "router.weight", "router.split_E")}
        assert grown[prefix + "valid_input_ED"].shape == (5, before[prefix + "router.weight"].shape[1])
        touched |= {prefix + name for name in ("valid_loss_E", "valid_tokens_E", "valid_input_ED")}
    assert list(grown) == list(before)
    for name in before.keys() - touched:
        assert torch.equal(grown[name], before[name]), name
    assert all(torch.equal(state[name], before[name]) for name in before)  # the argument is not changed


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


def test_noise_depends_on_its_seed_only(model):
    state = state_of(model, {FIRST: [1.0, 9.0, 4.0], SECOND: [1.0, 9.0, 4.0]})
    first, again, other = (rows_of_noise(state, seed=seed) for seed in (5, 5, 6))
    for layer in (0, 1):
        assert torch.equal(first[layer], again[layer])
        assert not torch.allclose(first[layer], other[layer])
    # torch's global generator is neither used nor changed.
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
    # The mixtures draw one after the other, so their noise differs.
    first, second = rows_of_noise(state)
    assert not torch.allclose(first / 0.5, second / 20.0, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_new": 1, "noise": 0.0}, "noise=0.0 must be finite and above 0"),
        ({"num_new": 1, "noise": -0.1}, "noise=-0.1 must be finite and above 0"),
        ({"num_new": 1, "noise": float("nan")}, "noise=nan must be finite and above 0"),
        ({"num_new": -1}, "cannot add -1 experts: give 0 or more"),
        ({"num_new": 1, "router": "forest"}, "router='forest' is not one of copy, tree"),
        ({"num_new": 4}, "cannot copy 4 of 3 experts"),
    ],
)
def test_impossible_growths_are_refused(model, arguments, message):
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
def test_a_tree_is_not_grown_by_copies(model, copied):
    """Expert 3 was split off expert 1. A copy of either would take tokens from the other."""
    losses = [1.0, 9.0, 4.0]
    grown = grow_experts(state_of(model, {FIRST: losses, SECOND: losses}), 1, router="tree")
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
    """4, 6, 8, 12 experts: the grown state dict fits a model built with that number of experts."""
    tiny = {"decoder_embed_dim": 128, "decoder_ffn_embed_dim": 512, "decoder_attention_heads": 4}
    per_expert = 2 * 128 * 512 + 512 + 128 + 128
    assert per_expert == 131_840
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


def check_tokens_stay_below_their_old_expert(before, after, splits: dict[int, int]):
    """Assert that each token is sent to its old expert or to one split off it."""
    for old, new in zip(before, after, strict=True):
        new_T = new.routing.expert_T
        parent_T = torch.tensor([splits.get(e, e) for e in range(int(new_T.max()) + 1)])[new_T]
        assert torch.equal(parent_T, old.routing.expert_T)


def all_get_tokens(mixtures, experts) -> bool:
    """Return True if each of these experts gets a token in every mixture."""
    return all((mixture.routing.expert_T == e).any() for mixture in mixtures for e in experts)


@pytest.mark.parametrize("training", [False, True])
def test_a_tree_keeps_logits_loss_and_routing_and_so_does_the_next(model, words, training):
    model.train(training)
    target = words.roll(-1, dims=1)
    with torch.no_grad():
        logits, extra = model(words)
        nll, _ = model(words, nll_of=target)
    current, before = model, extra["mixtures"]
    # The second growth splits expert 3, which the first has split off, and its parent once more. All must hold for
    # every seed. The next growth starts from the first seed whose noise leaves tokens on both sides of each split: a
    # split is a half space, and the tokens of one expert are similar.
    for losses, num_new, splits in (([1.0, 9.0, 1.0], 1, {3: 1}), ([1.0, 8.0, 1.0, 9.0], 2, {4: 3, 5: 1})):
        for seed in range(100):
            grown = grown_by(current, {FIRST: losses, SECOND: losses}, num_new, router="tree", seed=seed)
            assert grown.mixtures[0].router.split_E.tolist()[-num_new:] == list(splits.values())
            with torch.no_grad():
                grown_logits, grown_extra = grown(words)
                grown_nll, _ = grown(words, nll_of=target)
            after = grown_extra["mixtures"]
            torch.testing.assert_close(grown_logits, logits, atol=1e-6, rtol=1e-6)
            assert grown_nll.item() == pytest.approx(nll.item(), rel=1e-6)
            check_tokens_stay_below_their_old_expert(before, after, splits)
            for old, new in zip(before, after, strict=True):
                torch.testing.assert_close(new.routing.probability_T, old.routing.probability_T)
                assert new.routing.z_loss.item() == pytest.approx(old.routing.z_loss.item(), rel=1e-5)
            if all_get_tokens(after, [*splits, *splits.values()]):
                break
        assert all_get_tokens(after, [*splits, *splits.values()])
        current, before = grown, after
    assert current.mixtures[0].num_experts == 6


def test_the_nodes_of_a_tree_learn_and_copies_become_different(model, words):
    losses = load_of(model, words)
    grown = grown_by(model, losses, 1, router="tree").train()
    nll, _ = grown(words, nll_of=words.roll(-1, dims=1))
    nll.backward()  # without the balance loss: the gradient of the cross entropy alone must reach the node
    for mixture, loss_E in zip(grown.mixtures, losses.values(), strict=True):
        parent = loss_E.index(max(loss_E))
        assert mixture.router.weight.grad[3].abs().sum() > 0
        assert mixture.router.weight.grad[parent].abs().sum() > 0
        # The copy has the same weights but other tokens, so the gradients differ.
        assert not torch.allclose(mixture.fc1_weight.grad[3], mixture.fc1_weight.grad[parent])


@pytest.mark.parametrize("training", [False, True])
def test_a_copy_keeps_the_routing_and_lowers_each_gate_by_what_was_copied(model, words, training):
    model.train(training)
    losses = load_of(model, words)
    target = words.roll(-1, dims=1)
    # With so little noise, it decides only between an expert and its copy.
    grown = grown_by(model, losses, 2, router="copy", noise=1e-6)
    with torch.no_grad():
        inputs = []
        hook = model.mixtures[0].register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
        before, after = model(words)[1]["mixtures"], grown(words)[1]["mixtures"]
        hook.remove()
        nll, grown_nll = model(words, nll_of=target)[0], grown(words, nll_of=target)[0]
    # Only the first mixture gets the same inputs, because its output has changed.
    parents = experts_with_largest_loss(torch.tensor(losses[FIRST]), 2)
    splits = {3: parents[0], 4: parents[1]}
    check_tokens_stay_below_their_old_expert(before[:1], after[:1], splits)
    assert all_get_tokens(after[:1], [3, parents[0]])
    p_TE = (inputs[0] @ model.mixtures[0].router.weight.t()).softmax(dim=-1)
    p_T, q_T = p_TE.max(dim=-1).values, p_TE[:, parents].sum(dim=-1)
    assert q_T.min() < 0.9 < q_T.max()  # so that it differs from a constant
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
    # Both get tokens, but not equally many: a split is a half space, and the distribution of x is not symmetric.
    shares = [int((new == e).sum()) for e in (parent, 3)]
    assert min(shares) > 0.1 * sum(shares)


def test_a_copy_with_the_same_row_never_gets_a_token():
    """This is why growth adds noise. With whole numbers, the logits of equal rows are equal to the last bit."""
    torch.manual_seed(0)
    model = make(3)
    router = model.mixtures[0].router
    with torch.no_grad():
        router.weight.copy_(torch.randint(-3, 4, router.weight.shape))
    x_TD = torch.randint(-2, 3, (400, 16)).float()
    state = state_of(model, {FIRST: [9.0, 1.0, 1.0], SECOND: [9.0, 1.0, 1.0]})
    grown = make(4)
    grown.load_state_dict(grow_experts(state, 1, router="copy"))
    copied_router = grown.mixtures[0].router
    assert (copied_router(x_TD).expert_T == 3).sum() > 0
    with torch.no_grad():
        copied_router.weight[3] = copied_router.weight[0]
    expert_T = copied_router(x_TD).expert_T
    assert (expert_T == 0).sum() > 50
    assert (expert_T == 3).sum() == 0

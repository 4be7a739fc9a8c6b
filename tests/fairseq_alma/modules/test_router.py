import math

import pytest
import torch

from fairseq_alma.modules import router as router_module
from fairseq_alma.modules.router import Router, balance_loss, expert_capacity


def test_balance_loss_of_an_even_load_is_one():
    probability_TE = torch.full((4, 2), 0.5)
    assert balance_loss(probability_TE, torch.tensor([0, 1, 0, 1])).item() == pytest.approx(1.0)


def test_balance_loss_by_hand():
    # Shares 3/4 and 1/4, mean probabilities 0.6 and 0.4: 2 * (0.75 * 0.6 + 0.25 * 0.4) = 1.1.
    probability_TE = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.6, 0.4], [0.4, 0.6]])
    assert balance_loss(probability_TE, torch.tensor([0, 0, 0, 1])).item() == pytest.approx(1.1)


def test_balance_loss_of_no_tokens_is_zero():
    assert balance_loss(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).item() == 0


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "capacity"), [(10, 4, 1.0, 3), (8, 4, 1.0, 2), (8, 4, 1.25, 3), (8, 4, 0, None)]
)
def test_capacity_is_an_even_share_times_the_factor_rounded_up(tokens, experts, factor, capacity):
    assert expert_capacity(tokens, experts, factor) == capacity


def test_routing_by_hand():
    router = Router(model_dim=2, num_experts=2)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    routing = router(torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(4.0)]]))
    assert routing.expert_T.tolist() == [0, 1]
    assert routing.probability_T.tolist() == pytest.approx([0.75, 0.8])
    # log-partitions log(3 + 1) and log(1 + 4)
    assert routing.z_loss.item() == pytest.approx((math.log(4) ** 2 + math.log(5) ** 2) / 2)


def test_jitter_changes_routing_in_training_only():
    torch.manual_seed(0)
    router, x_TD = Router(model_dim=4, num_experts=2, jitter=0.1), torch.randn(5, 4)
    assert not torch.equal(router(x_TD).probability_T, router(x_TD).probability_T)
    router.eval()
    assert torch.equal(router(x_TD).probability_T, router(x_TD).probability_T)


def test_routing_is_float32_in_a_bf16_model():
    router = Router(model_dim=4, num_experts=2).bfloat16()
    assert router(torch.randn(3, 4, dtype=torch.bfloat16)).probability_T.dtype == torch.float32


def make_router(rows, split_E, jitter=0.0) -> Router:
    router = Router(len(rows[0]), len(rows), jitter)
    router.load_state_dict({"weight": torch.tensor(rows), "split_E": torch.tensor(split_E, dtype=torch.float32)})
    return router


def leaf_probabilities(router: Router, x_TD: torch.Tensor, monkeypatch) -> torch.Tensor:
    """Return the probability of every expert [T, E] from which the balance loss is computed."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(router_module, "balance_loss", lambda p_TE, _: seen.append(p_TE) or p_TE.sum())
        router(x_TD)
    return seen[0].detach()


def test_a_new_router_is_flat_a_plain_softmax():
    torch.manual_seed(0)
    router, x_TD = Router(model_dim=6, num_experts=4), torch.randn(50, 6)
    assert router.split_E.tolist() == [-1.0] * 4
    assert router.splits() == []
    logits_TE = x_TD @ router.weight.t()
    probability_TE = logits_TE.softmax(dim=1)
    routing = router(x_TD)
    assert torch.equal(routing.expert_T, probability_TE.argmax(dim=1))
    torch.testing.assert_close(routing.probability_T, probability_TE.max(dim=1).values)
    torch.testing.assert_close(routing.balance_loss, balance_loss(probability_TE, routing.expert_T))
    torch.testing.assert_close(routing.z_loss, logits_TE.logsumexp(dim=1).square().mean())


# Experts 0 and 1 share a softmax, expert 2 was split off 0, expert 3 off 2: each has an input feature of its own.
TREE = (torch.eye(4).tolist(), [-1, -1, 0, 2])
LN3, LN4, LN9 = math.log(3.0), math.log(4.0), math.log(9.0)


@pytest.mark.parametrize(
    ("x", "expert", "probability", "leaves"),
    [
        # The softmax says 3/4 and 1/4, the node of expert 2 moves 4/5 on, and the node of expert 3 then 9/10.
        ((LN3, 0, LN4, LN9), 3, 0.75, [0.75 * 0.2, 0.25, 0.75 * 0.8 * 0.1, 0.75 * 0.8 * 0.9]),
        ((LN3, 0, LN4, -LN9), 2, 0.75, [0.75 * 0.2, 0.25, 0.75 * 0.8 * 0.9, 0.75 * 0.8 * 0.1]),
        # It stops at expert 0, so the node below expert 2 does not matter.
        ((LN3, 0, -LN4, LN9), 0, 0.75, [0.75 * 0.8, 0.25, 0.75 * 0.2 * 0.1, 0.75 * 0.2 * 0.9]),
        ((0, LN3, LN4, LN9), 1, 0.75, [0.25 * 0.2, 0.75, 0.25 * 0.8 * 0.1, 0.25 * 0.8 * 0.9]),
        # At a probability of 1/2 the token stays.
        ((LN3, 0, 0, LN9), 0, 0.75, [0.75 * 0.5, 0.25, 0.75 * 0.5 * 0.1, 0.75 * 0.5 * 0.9]),
    ],
)
def test_a_token_goes_down_the_tree_by_hand(monkeypatch, x, expert, probability, leaves):
    router = make_router(*TREE)
    x_TD = torch.tensor([x])
    routing = router(x_TD)
    assert routing.expert_T.tolist() == [expert]
    assert routing.probability_T.item() == pytest.approx(probability)  # that of the softmax, whatever the nodes decide
    assert leaf_probabilities(router, x_TD, monkeypatch)[0].tolist() == pytest.approx(leaves)
    assert routing.z_loss.item() == pytest.approx(LN4**2)  # of the two logits of the softmax
    assert routing.balance_loss.item() == pytest.approx(4 * leaves[expert])


def test_leaves_sum_to_one_and_each_pair_to_what_its_parent_had(monkeypatch):
    torch.manual_seed(0)
    x_TD, rows = torch.randn(100, 8), torch.randn(6, 8)
    split_E = [-1, -1, -1, 1, 0, 1]  # expert 1 is split twice: 5 below what the node of 3 left there
    grown = [leaf_probabilities(make_router(rows[:e].tolist(), split_E[:e]), x_TD, monkeypatch) for e in (3, 4, 5, 6)]
    for before, after, parent in zip(grown[:-1], grown[1:], split_E[3:], strict=True):
        torch.testing.assert_close(after.sum(dim=1), torch.ones(100))
        torch.testing.assert_close(after[:, parent] + after[:, -1], before[:, parent])
        others = [e for e in range(before.size(1)) if e != parent]
        torch.testing.assert_close(after[:, others], before[:, others])


def test_a_node_learns_as_from_the_logarithm_of_its_gate():
    # d(p g / stop_gradient(g)) = p d(log g): p (1 - g) x where the token moves on, -p g x where it stays.
    router = make_router([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [-1, -1, 0])
    flat = make_router([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [-1, -1])
    for x, expected in (
        ((LN3, 0.0, LN4), [0.75 * 0.2 * value for value in (LN3, 0.0, LN4)]),
        ((LN3, 0.0, -LN4), [-0.75 * 0.2 * value for value in (LN3, 0.0, -LN4)]),
        ((0.0, LN3, LN4), [0.0, 0.0, 0.0]),  # it went to expert 1
    ):
        x_TD = torch.tensor([x])
        (gradient,) = torch.autograd.grad(router(x_TD).probability_T.sum(), router.weight)
        assert gradient[2].tolist() == pytest.approx(expected)
        (of_flat,) = torch.autograd.grad(flat(x_TD).probability_T.sum(), flat.weight)
        torch.testing.assert_close(gradient[:2], of_flat)


def test_the_balance_loss_reaches_a_node_no_token_went_to():
    router = make_router(*TREE)
    x_TD = torch.tensor([(LN3, 0.0, -LN4, 1.0)] * 3)
    assert (router(x_TD).expert_T == 0).all()
    router(x_TD).balance_loss.backward()
    assert router.weight.grad[2].abs().sum() > 0


def test_a_loaded_tree_replaces_the_one_in_use():
    x_TD = torch.tensor([(LN3, 0.0, LN4, LN9)])
    router = make_router(TREE[0], [-1] * 4)
    assert router(x_TD).expert_T.tolist() == [3]  # the largest of four logits
    assert router(x_TD).probability_T.item() == pytest.approx(9 / (3 + 1 + 4 + 9))
    router.load_state_dict(make_router(*TREE).state_dict())
    assert router(x_TD).probability_T.item() == pytest.approx(0.75)
    router.load_state_dict(make_router(TREE[0], [-1] * 4).state_dict())
    assert router(x_TD).probability_T.item() == pytest.approx(9 / 17)


def test_a_tree_stays_the_same_in_bf16_and_in_an_average_of_weights():
    router = make_router(*TREE)
    router.split_E = 0.9999 * router.split_E + 0.0001 * router.split_E  # as fairseq's --store-ema does
    assert router.bfloat16().splits() == [(0, 2), (2, 3)]
    routing = router(torch.tensor([(LN3, 0.0, LN4, LN9)]).bfloat16())
    assert routing.expert_T.tolist() == [3]
    assert routing.probability_T.dtype == torch.float32


def test_jitter_moves_the_tokens_of_a_tree_in_training_only():
    router = make_router(*TREE, jitter=0.5)
    x_TD = torch.ones(200, 4)
    assert len(set(router(x_TD).probability_T.tolist())) > 100
    router.eval()
    assert len(set(router(x_TD).probability_T.tolist())) == 1


def test_a_token_far_from_a_node_leaves_its_gradients_finite():
    # sigmoid(17) is 1 in float32, so that the other branch's probability is 0: no token here takes it.
    router = Router(3, 3)
    with torch.no_grad():
        router.weight.copy_(torch.eye(3))
        router.split_E.copy_(torch.tensor([-1.0, -1.0, 0.0]))
    router._splits = None
    for logits in ([0.0, 3.0, 17.0], [0.0, 3.0, 200.0], [3.0, 0.0, -200.0], [3.0, 0.0, 200.0]):
        router.weight.grad = None
        routing = router(torch.tensor([logits]))
        (routing.probability_T.sum() + routing.balance_loss).backward()
        assert router.weight.grad.isfinite().all(), logits

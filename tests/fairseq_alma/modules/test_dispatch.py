import torch

from fairseq_alma.modules.dispatch import apply_experts, plan_dispatch


def test_tokens_are_sorted_by_expert_in_their_order_of_arrival():
    plan = plan_dispatch(torch.tensor([2, 0, 2, 1, 0]), num_experts=4, capacity=None)
    assert plan.token_K.tolist() == [1, 4, 3, 0, 2]
    assert list(plan.count_E) == [2, 1, 2, 0]
    assert plan.load_E.tolist() == [2, 1, 2, 0]


def test_a_full_expert_keeps_its_first_tokens():
    plan = plan_dispatch(torch.tensor([0, 0, 1, 0, 1]), num_experts=2, capacity=2)
    assert plan.token_K.tolist() == [0, 1, 2, 4]  # token 3 finds expert 0 full
    assert list(plan.count_E) == [2, 2]
    assert plan.load_E.tolist() == [3, 2]


def test_a_capacity_that_no_expert_reaches_drops_no_token():
    plan = plan_dispatch(torch.tensor([0, 1, 1]), num_experts=2, capacity=2)
    assert plan.token_K.tolist() == [0, 1, 2]


def test_dropped_tokens_get_zero():
    plan = plan_dispatch(torch.tensor([1, 1, 0]), num_experts=2, capacity=1)
    x_TD = torch.tensor([[1.0], [2.0], [3.0]])
    y_TD = apply_experts(x_TD, torch.tensor([0.5, 0.5, 1.0]), plan, [lambda x: 10 * x, lambda x: 100 * x])
    assert y_TD.tolist() == [[50.0], [0.0], [30.0]]


def test_no_token_at_all():
    plan = plan_dispatch(torch.zeros(0, dtype=torch.long), num_experts=2, capacity=0)
    assert apply_experts(torch.zeros(0, 3), torch.zeros(0), plan, [torch.relu, torch.relu]).shape == (0, 3)

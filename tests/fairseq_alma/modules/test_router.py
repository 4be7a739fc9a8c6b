import math

import pytest
import torch

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

import torch

from fairseq_alma.evaluation.flops import count_forward_flops, count_training_flops
from tests.fairseq_alma.models.test_switch_lm import make


def closed_form(layers, d, num_words, num_experts):
    """FLOPs of a row by hand, (a, b) of a L + b L^2: 2 for each multiply-add."""
    attention, feed_forward = 4 * d * d, 2 * d * 4 * d
    router = d * num_experts
    per_token = 2 * (layers * (attention + feed_forward) + layers // 2 * router + d * num_words)
    return per_token, layers * 2 * (d + d)  # scores and their use, all pairs


def test_forward_flops_by_hand():
    flops = count_forward_flops(make(num_experts=4))
    assert (flops.per_token, flops.per_token_pair) == closed_form(4, 128, 40, 4)


def test_a_model_with_few_positions_is_counted_with_short_rows():
    flops = count_forward_flops(make(num_experts=4, learned_positions=9, tokens_per_sample=9))
    assert (flops.per_token, flops.per_token_pair) == closed_form(4, 128, 40, 4)


def test_training_is_forward_and_twice_as_much_backward():
    forward, training = count_forward_flops(make()), count_training_flops(make())
    assert training.per_token == 3 * forward.per_token
    assert training.per_token_pair == 3 * forward.per_token_pair


def test_another_row_length_and_several_rows():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = make(capacity_factor=0.0)
    flops = count_training_flops(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.train()(torch.randint(4, 40, (3, 13)))[0].sum().backward()
    assert counter.get_total_flops() == 3 * flops.of_row(13) == flops.total(3 * 13, 3 * 13 * 13)


def test_counting_leaves_the_model_as_it_was():
    model = make(capacity_factor=1.0).train()
    count_forward_flops(model)
    count_training_flops(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert [m.capacity_factor for m in model.mixtures] == [1.0, 1.0]


def test_flops_do_not_depend_on_the_number_of_experts_but_for_the_router():
    few, many = (count_forward_flops(make(num_experts=e)).per_token for e in (2, 6))
    assert many - few == 2 * 2 * 128 * 4  # 2 mixtures, 2 for a multiply-add, d, 4 more experts

import pytest
import torch

from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward

T, D, F = 24, 6, 10


def make(num_experts, **options):
    torch.manual_seed(num_experts)
    layer = SwitchFeedForward(D, F, num_experts, **options)
    for bias in (layer.fc1_bias, layer.fc2_bias):
        torch.nn.init.normal_(bias)
    return layer


def slow_loop(layer, x_TD, capacity):
    """Return the output of a mixture, computed token by token as the Switch paper describes it."""
    taken, y = [0] * layer.num_experts, []
    for x in x_TD:
        probability_E = (layer.router.weight @ x).softmax(dim=0)
        e = int(probability_E.argmax())
        taken[e] += 1
        if capacity is not None and taken[e] > capacity:
            y.append(torch.zeros(D))
            continue
        h = torch.relu(layer.fc1_weight[e] @ x + layer.fc1_bias[e])
        y.append(probability_E[e] * (layer.fc2_weight[e] @ h + layer.fc2_bias[e]))
    return torch.stack(y)


def test_one_expert_is_a_dense_layer():
    layer, x_TD = make(1), torch.randn(T, D)
    dense = torch.relu(x_TD @ layer.fc1_weight[0].t() + layer.fc1_bias[0]) @ layer.fc2_weight[0].t()
    torch.testing.assert_close(layer(x_TD).y_TD, dense + layer.fc2_bias[0])


@pytest.mark.parametrize(
    ("num_experts", "capacity_factor", "capacity"), [(2, 0.0, None), (4, 1.0, 6), (8, 1.0, 3), (12, 0.5, 1)]
)
def test_many_experts_equal_a_slow_loop_over_tokens_in_outputs_and_gradients(num_experts, capacity_factor, capacity):
    layer = make(num_experts, capacity_factor=capacity_factor)
    x_TD = torch.randn(T, D, requires_grad=True)
    output = layer(x_TD)
    expected = slow_loop(layer, x_TD, capacity)
    torch.testing.assert_close(output.y_TD, expected)
    if capacity is not None:
        assert output.num_dropped > 0
        assert output.num_dropped == int((~output.plan.kept_T).sum()) == int((expected == 0).all(dim=1).sum())
    weights = [x_TD, layer.router.weight, layer.fc1_weight, layer.fc1_bias, layer.fc2_weight, layer.fc2_bias]
    direction = torch.randn(T, D)
    fast = torch.autograd.grad((output.y_TD * direction).sum(), weights)
    slow = torch.autograd.grad((expected * direction).sum(), weights)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_predictions_of_few_tokens_have_no_capacity_limit_and_are_those_of_many(num_tokens):
    layer, x_TD = make(4, eval_capacity_factor=0.25).eval(), torch.randn(num_tokens, D)
    expected = slow_loop(layer, x_TD, None)
    torch.testing.assert_close(layer.predict(x_TD), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.predict(x_TD)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_an_expert_that_gets_no_token_gets_no_gradient_and_changes_no_other():
    layer = make(3, capacity_factor=0.0)
    with torch.no_grad():
        layer.router.weight[2] = -100 * layer.router.weight[:2].mean(dim=0)
        x_TD = torch.randn(T, D).abs() * layer.router.weight[:2].mean(dim=0).sign()
    output = layer(x_TD)
    assert output.plan.load_E[2] == 0
    torch.testing.assert_close(output.y_TD, slow_loop(layer, x_TD, None))
    output.y_TD.sum().backward()
    assert layer.fc1_weight.grad[2].abs().sum() == 0
    assert layer.fc1_weight.grad[:2].abs().sum() > 0


def test_evaluation_has_its_own_capacity():
    layer, x_TD = make(4, capacity_factor=0.25, eval_capacity_factor=0.0), torch.randn(T, D)
    assert layer(x_TD).num_dropped > 0
    assert layer.eval()(x_TD).num_dropped == 0


def test_each_token_is_charged_to_the_expert_it_used_and_dropped_tokens_to_none():
    layer = make(2, eval_capacity_factor=1.0).eval()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2, D))
    x_TD = torch.zeros(4, D)
    x_TD[:3, 0], x_TD[3, 1] = 1.0, 1.0  # three tokens for expert 0, which takes two, and one for expert 1
    output = layer(x_TD)
    layer.charge_validation_loss(output, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    layer.charge_validation_loss(output, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert layer.valid_loss_E.tolist() == [6.0, 16.0]
    assert layer.valid_tokens_E.tolist() == [4, 2]
    layer.reset_validation_loss()
    assert layer.valid_loss_E.tolist() == [0.0, 0.0]
    assert layer.valid_tokens_E.tolist() == [0, 0]


def test_the_sums_stay_float64_in_a_bf16_model():
    layer = make(2).bfloat16()
    layer.reset_validation_loss()
    assert layer.valid_loss_E.dtype == torch.float64


@pytest.mark.parametrize("options", [{"num_experts": 0}, {"num_experts": 2, "capacity_factor": -1}])
def test_impossible_sizes_are_refused(options):
    with pytest.raises(ValueError, match=r"at least one expert|capacity"):
        SwitchFeedForward(D, F, **options)

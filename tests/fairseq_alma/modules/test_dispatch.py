import pytest
import torch

from fairseq_alma.modules import dispatch
from fairseq_alma.modules.dispatch import WAYS, choose_way, count_tokens, from_rows, plan_dispatch, to_rows
from fairseq_alma.modules.experts import ExpertWeights, run_experts
from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward

D, F = 8, 16


def through(plan, x_TD, functions):
    """Return the outputs of the tokens if expert e computes functions[e]."""
    rows = to_rows(x_TD, plan).split(plan.counts or plan.load_E.tolist())
    return from_rows(torch.cat([function(row) for function, row in zip(functions, rows, strict=True)]), plan)


def test_tokens_are_sorted_by_expert_in_their_order_of_arrival():
    plan = plan_dispatch(torch.tensor([2, 0, 2, 1, 0]), num_experts=4, capacity=None)
    assert plan.token_S.tolist() == [1, 4, 3, 0, 2]
    assert plan.row_T.tolist() == [3, 0, 4, 2, 1]
    assert plan.counts == (2, 1, 2, 0)
    assert plan.load_E.tolist() == [2, 1, 2, 0]
    assert plan.kept_T is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_experts", [1, 4, 12, 64])
def test_counting_and_sorting_give_the_same_plan(monkeypatch, way, num_experts):
    for num_tokens, capacity in ((0, None), (1, 1), (301, None), (301, 301 // num_experts + 1), (301, 1)):
        expert_T = torch.randint(0, num_experts, (num_tokens,)) // 2  # the upper half of the experts is empty
        plans = []
        for limit in (64, 0):
            monkeypatch.setattr(dispatch, "MAX_COUNTED", limit)
            plans.append(vars(plan_dispatch(expert_T, num_experts, capacity, way)))
        for name, counted in plans[0].items():
            sorted_one = plans[1][name]
            same = torch.equal(counted, sorted_one) if torch.is_tensor(counted) else counted == sorted_one
            assert same, (name, num_tokens, capacity)


@pytest.mark.parametrize("way", WAYS)
def test_a_full_expert_keeps_its_first_tokens(way):
    plan = plan_dispatch(torch.tensor([0, 0, 1, 0, 1]), num_experts=2, capacity=2, way=way)
    assert plan.kept_T.tolist() == [True, True, True, False, True]  # token 3 finds expert 0 full
    assert plan.load_E.tolist() == [3, 2]
    assert plan.dropped_E.tolist() == [1, 0]
    assert plan.dropped_E.sum() == 1
    used_S = torch.ones(len(plan.token_S), dtype=torch.bool) if plan.used_S is None else plan.used_S
    assert plan.token_S[used_S].tolist() == [0, 1, 2, 4]


def test_slots_of_an_expert_without_enough_tokens_stay_empty():
    plan = plan_dispatch(torch.tensor([1, 1, 1, 0]), num_experts=3, capacity=2, way="slots")
    assert plan.used_S.tolist() == [True, False, True, True, False, False]
    assert plan.token_S[plan.used_S].tolist() == [3, 0, 1]
    assert plan.counts == (2, 2, 2)


@pytest.mark.parametrize("way", WAYS)
def test_dropped_tokens_get_zero(way):
    plan = plan_dispatch(torch.tensor([1, 1, 0]), num_experts=2, capacity=1, way=way)
    x_TD = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    y_TD = through(plan, x_TD, [lambda x: 10 * x, lambda x: 100 * x])
    assert y_TD.tolist() == [[100.0], [0.0], [30.0]]
    y_TD.sum().backward()
    assert x_TD.grad.tolist() == [[100.0], [0.0], [10.0]]


@pytest.mark.parametrize("way", WAYS)
def test_the_output_of_an_empty_slot_is_not_used(way):
    # Expert 1 gets no token. Its slots are filled with some token, whose output is not used.
    plan = plan_dispatch(torch.tensor([0, 2, 2]), num_experts=3, capacity=2, way=way)
    x_TD = torch.tensor([[1.0], [2.0], [3.0]])
    y_TD = through(plan, x_TD, [lambda x: 2 * x, lambda x: x * torch.nan, lambda x: 5 * x])
    assert y_TD.tolist() == [[2.0], [10.0], [15.0]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("capacity", [0, None])
def test_no_token_at_all(way, capacity):
    plan = plan_dispatch(torch.zeros(0, dtype=torch.long), num_experts=2, capacity=capacity, way=way)
    weights = ExpertWeights(torch.ones(2, F, D), torch.ones(2, F), torch.ones(2, D, F), torch.ones(2, D))
    assert from_rows(run_experts(to_rows(torch.zeros(0, D), plan), plan, weights), plan).shape == (0, D)
    assert plan.dropped_E.sum() == 0


def test_tokens_are_counted_without_a_wait():
    expert_T = torch.randint(0, 5, (1000,))
    assert count_tokens(expert_T, 7).tolist() == torch.bincount(expert_T, minlength=7).tolist()


def outputs_and_gradients(way, layer, x_TD, direction_TD):
    layer.way = way
    layer.zero_grad(set_to_none=True)
    x_TD = x_TD.clone().requires_grad_()
    output = layer(x_TD)
    torch.autograd.backward([output.y_TD, output.routing.balance_loss], [direction_TD, x_TD.new_full((), 0.1)])
    result = {name: p.grad for name, p in layer.named_parameters()} | {"x": x_TD.grad, "y": output.y_TD.detach()}
    return {name: value.float().clone() for name, value in result.items()}, output


# 3 tokens for 8 experts: most experts are empty. Factor 0.5 drops many tokens, 8 leaves most slots empty.
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 8.0])
@pytest.mark.parametrize(("num_experts", "num_tokens"), [(1, 17), (4, 64), (8, 3), (12, 101)])
def test_all_ways_give_the_same_outputs_and_gradients(num_experts, num_tokens, factor, precision):
    layer = SwitchFeedForward(D, F, num_experts, capacity_factor=factor)
    # No hidden unit comes close to 0. Otherwise a rounding in bfloat16 would decide whether the ReLU passes it.
    with torch.no_grad():
        layer.fc1_bias.copy_(torch.where(torch.rand(num_experts, F) < 0.5, -5.0, 5.0))
    torch.nn.init.normal_(layer.fc2_bias)
    x_TD, direction_TD = torch.randn(2, num_tokens, D)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        kind = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
        expected, split = outputs_and_gradients("split", layer, x_TD, direction_TD.to(kind))
        for way in ("slots", "grouped"):
            found, output = outputs_and_gradients(way, layer, x_TD, direction_TD.to(kind))
            assert output.y_TD.dtype == split.y_TD.dtype == kind
            assert output.num_dropped == split.num_dropped
            assert output.plan.load_E.tolist() == split.plan.load_E.tolist()
            # The gradient of a token's gate is a sum over the width, whose terms nearly cancel for some random inputs.
            # Its error follows the size of the terms, and with it the errors of the router's weights and of x.
            terms = float((direction_TD * expected["y"]).norm(dim=1).max())
            sizes = {"router.weight": terms * x_TD.abs().max(), "x": terms * layer.router.weight.abs().max()}
            for name, value in expected.items():
                size = max(float(value.abs().max()), float(sizes.get(name, 0.0)))
                tolerance = (2e-2 if precision == torch.bfloat16 else 1e-5) * size
                torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance + 1e-7, msg=f"{way} {name}")


def test_dropout_applies_in_training_only_and_in_every_way():
    layer = SwitchFeedForward(D, F, 2, activation_dropout=0.9)
    x_TD = torch.randn(40, D)
    for way in WAYS:
        layer.way = way
        first, second = layer.train()(x_TD).y_TD, layer(x_TD).y_TD
        assert not torch.equal(first, second)
        torch.testing.assert_close(layer.eval()(x_TD).y_TD, layer(x_TD).y_TD)


def test_a_cpu_splits():
    for capacity in (None, 4):
        assert choose_way(torch.device("cpu"), torch.bfloat16, capacity) == "split"


def test_rows_that_grouped_products_refuse_are_split(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert choose_way(device, torch.bfloat16, None, (64, 256)) == "grouped"
    assert choose_way(device, torch.bfloat16, None, (100, 256)) == "split"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert choose_way(device, torch.bfloat16, None, (64, 256)) == "split"
    with pytest.raises(RuntimeError, match="16 bytes"):  # why: the rows of a layer of width 20
        torch.nn.functional.grouped_mm(
            torch.randn(4, 20, dtype=torch.bfloat16), torch.randn(2, 20, 24, dtype=torch.bfloat16),
            offs=torch.tensor([2, 4], dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu")
@pytest.mark.parametrize("num_experts", [1, 4, 64])
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_on_cuda_a_layer_equals_the_cpu_and_the_host_never_waits(num_experts, factor):
    layer = SwitchFeedForward(64, 128, num_experts, capacity_factor=factor)
    with torch.no_grad():  # see above
        layer.fc1_bias.copy_(torch.where(torch.rand(num_experts, 128) < 0.5, -8.0, 8.0))
    x_TD, direction_TD = torch.randn(2, 512, 64)
    expected, on_cpu = outputs_and_gradients("split", layer, x_TD, direction_TD)
    layer, x_TD, direction_TD = layer.cuda(), x_TD.cuda(), direction_TD.cuda()
    for kind, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
            outputs_and_gradients(None, layer, x_TD, direction_TD.to(kind))  # the first call may load kernels
            way = choose_way(x_TD.device, kind, None if factor == 0 else 1)
            torch.cuda.set_sync_debug_mode("default" if way == "split" else "error")
            try:
                found, output = outputs_and_gradients(None, layer, x_TD, direction_TD.to(kind))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert output.plan.way == way
        assert output.num_dropped.item() == on_cpu.num_dropped.item()
        for name, value in expected.items():
            error = (found[name].cpu() - value).abs().max()
            assert error <= tolerance * float(value.abs().max()) + 1e-6, name

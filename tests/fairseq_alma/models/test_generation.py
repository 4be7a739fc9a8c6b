"""The decoder with a cache of keys and values computes what it computes without, alone and in a padded batch."""

import pytest
import torch

from tests.fairseq_alma.models.test_switch_lm import make

NEW = 3
"""Number of tokens that follow a prompt, one by one."""


def rows_of(model, batch, prompt):
    """Return the scores [B, L, V] of a batch: those of the first `prompt` tokens at once, then token by token."""
    state: dict = {}
    parts = [model(batch[:, :end], incremental_state=state)[0] for end in range(prompt, batch.size(1) + 1)]
    return torch.cat(parts, dim=1)


def decisive(model):
    """Make the routers decide clearly, so that rounding sends no token to another expert. Return the model."""
    with torch.no_grad():
        for mixture in model.mixtures:
            mixture.router.weight.mul_(10)
    return model.eval()


def check(arch: str, precision: str, prompts: tuple[int, ...], experts: int) -> None:
    model = decisive(make(arch, 200, num_experts=experts, precision=precision))
    for length in prompts:
        row = torch.randint(4, 200, (1, length + NEW))
        batch = torch.full((2, length + 9 + NEW), model.decoder.pad)
        batch[0, 9:], batch[1] = row[0], torch.randint(4, 200, (1, batch.size(1)))
        expected = model(row)[0][0].float()
        found = {
            "cached": rows_of(model, row, length)[0],
            "padded": model(batch)[0][0, 9:],
            "padded and cached": rows_of(model, batch, length + 9)[0, 9:],
        }
        for name, scores in found.items():
            if precision == "float32":
                assert (scores - expected).abs().max() < 1e-5, (name, length)
            else:  # a score of 10 in bfloat16 is a multiple of 1/16
                assert (scores.float() - expected).norm() < 2e-2 * expected.norm(), (name, length)


@pytest.mark.parametrize("experts", [1, 2, 12])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_scores_with_a_cache_and_with_padding_on_the_left_are_those_of_the_sequence_alone(precision, experts):
    check("switch_lm_tiny", precision, (1, 2, 33, 200), experts)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2, 12])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_so_are_those_of_the_base_model_and_of_long_prompts(precision, experts):
    check("switch_lm_base", precision, (1, 100, 512), experts)


@torch.no_grad()
def test_several_tokens_may_follow_those_in_the_cache():
    model, state, row = make().eval(), {}, torch.randint(4, 40, (1, 90))
    parts = [model(row[:, :end], incremental_state=state)[0] for end in (1, 4, 70, 71, 90)]
    assert [part.size(1) for part in parts] == [1, 3, 66, 1, 19]
    torch.testing.assert_close(torch.cat(parts, 1), model(row)[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_cache_is_reordered_and_divided_as_beams_are():
    model, state, batch = make().eval(), {}, torch.randint(4, 40, (3, 70))
    batch[1, :5] = model.decoder.pad
    model(batch[:, :60], incremental_state=state)
    for order in ([2, 1, 1, 0], [0, 1, 2, 3], [1, 3]):
        batch = batch[order]
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
    parts = [model(batch[:, :end], incremental_state=state)[0] for end in range(61, 71)]
    expected = model(batch)[0][:, 60:]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(expected[0], expected[1])


@torch.no_grad()
def test_with_a_cache_experts_have_no_limit():
    model, other = (make(eval_capacity_factor=factor).eval() for factor in (0.25, 0.0))
    batch = torch.randint(4, 40, (2, 20))
    assert not torch.allclose(model(batch)[0], other(batch)[0])
    torch.testing.assert_close(rows_of(model, batch, 5), other(batch)[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_no_token_of_a_padded_batch_sees_what_comes_after_it():
    model, batch = make().eval(), torch.randint(4, 40, (1, 16))
    batch[0, :3] = model.decoder.pad
    changed = batch.clone()
    changed[0, 9] = 4 + (changed[0, 9] - 4 + 1) % 36
    before, after = model(batch)[0], model(changed)[0]
    torch.testing.assert_close(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:])


@torch.no_grad()
def test_a_memory_that_grows_copies_each_value_about_once():
    from fairseq_alma.modules.key_value_cache import LayerCache

    cache, copied, k = LayerCache(), 0, torch.randn(1, 2, 1, 4)
    for _ in range(1000):
        before = cache._stored
        keys, values = cache.extend(torch.stack([k, -k]))
        copied += 0 if cache._stored is before else before.size(3)
    assert copied < 2000
    assert torch.equal(keys, k.expand(1, 2, 1000, 4)) and torch.equal(values, -keys)


@torch.no_grad()
def test_weights_that_are_stored_for_single_tokens_are_the_same_weights():
    model, row = make().eval(), torch.randint(4, 40, (2, 30))
    before, expected = {name: value.clone() for name, value in model.state_dict().items()}, model(row)[0]
    model.decoder.store_for_single_tokens()
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    torch.testing.assert_close(model(row)[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rows_of(model, row, 20), expected, atol=1e-5, rtol=0)


def test_scores_with_a_cache_do_not_depend_on_who_computes_single_tokens():
    """NumPy computes them for flat routers and without gradients, torch for all others."""
    row = torch.randint(4, 40, (2, 30))
    row[1, :6] = make().decoder.pad
    for grown in (False, True):
        model = decisive(make(num_experts=3))
        if grown:
            for mixture in model.mixtures:
                mixture.router.split_E[2] = 0
                mixture.router._splits = None
        with torch.no_grad():
            expected = model(row)[0]
            without_gradients, state = rows_of(model, row, 20), {}
            model(row[:, :20], incremental_state=state)
            model(row[:, :21], incremental_state=state)
            assert (model.decoder._cache(state).step is None) == grown
        torch.testing.assert_close(without_gradients[0], expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(without_gradients[1, 6:], expected[1, 6:], atol=1e-5, rtol=0)
        torch.testing.assert_close(rows_of(model, row, 20)[0], expected[0], atol=1e-5, rtol=0)

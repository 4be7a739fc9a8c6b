"""The fused Adam against fairseq's own, and its state in checkpoints."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.adam import FairseqAdam

from fairseq_alma.core.errors import SettingError
from fairseq_alma.optim.fused_adam import FusedAdam


def options(**more):
    values = {"lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "tpu": False}
    return SimpleNamespace(**{**values, "fp16_adam_stats": False, "use_old_adam": False, **more})


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 32), (32,), (4, 8, 8))]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_computes_what_fairseqs_adam_computes(weight_decay):
    ours, theirs = parameters(), parameters()
    fused = FusedAdam(options(weight_decay=weight_decay), ours)
    plain = FairseqAdam(options(weight_decay=weight_decay), theirs)
    for update in range(20):
        for optimizer, params in ((fused, ours), (plain, theirs)):
            optimizer.set_lr(0.01 * (update + 1) / 20)  # as in a warm-up
            set_gradients(params, update)
            optimizer.step()
    for one, other, start in zip(ours, theirs, parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert (one - start).abs().max() > 0.01


def test_it_continues_from_its_state_and_takes_the_options_of_the_new_process():
    whole = parameters()
    optimizer = FusedAdam(options(), whole)
    for update in range(3):
        set_gradients(whole, update)
        optimizer.step()
    saved = copy.deepcopy((whole, optimizer.state_dict()))
    set_gradients(whole, 3)
    optimizer.step()
    resumed = FusedAdam(options(lr=[0.5]), saved[0])
    resumed.load_state_dict(saved[1], {"lr": 0.01})
    set_gradients(saved[0], 3)
    resumed.step()
    for one, other in zip(whole, saved[0], strict=True):
        assert torch.equal(one, other)


def test_betas_that_are_no_pair_are_refused():
    with pytest.raises(SettingError, match="is not a pair of numbers"):
        FusedAdam(options(adam_betas="0.9"), parameters())

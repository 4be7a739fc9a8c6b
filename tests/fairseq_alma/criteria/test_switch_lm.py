import math

import pytest
import torch
from fairseq.logging import metrics

from fairseq_alma.core.errors import SettingError
from fairseq_alma.criteria.switch_lm import SwitchLanguageModelCriterion, _entropy_bits, _perplexity
from tests.fairseq_alma.models.test_switch_lm import make


class Task:
    def __init__(self, model):
        self.target_dictionary = model.decoder.dictionary


def make_sample(pad):
    torch.manual_seed(1)
    source, target = torch.randint(4, 40, (3, 8)), torch.randint(4, 40, (3, 8))
    source[2, 5:] = target[2, 5:] = pad
    return {"net_input": {"src_tokens": source}, "target": target, "ntokens": 21}


def make_criterion(model, balance=0.01, z=0.0):
    return SwitchLanguageModelCriterion(Task(model), balance, z)


def test_the_loss_is_nll_plus_weighted_balance_and_z_losses():
    model = make().train()
    sample = make_sample(model.decoder.pad)
    loss, sample_size, log = make_criterion(model, balance=0.5, z=0.25)(model, sample)
    scores, extra = model(**sample["net_input"])
    log_probability = scores.log_softmax(-1)
    nll = -sum(
        log_probability[b, t, sample["target"][b, t]]
        for b in range(3)
        for t in range(8)
        if sample["target"][b, t] != model.decoder.pad
    )
    extra_loss = sum(0.5 * m.routing.balance_loss + 0.25 * m.routing.z_loss for m in extra["mixtures"])
    torch.testing.assert_close(loss, nll + 21 * extra_loss)
    torch.testing.assert_close(log["nll_loss"], nll)
    assert sample_size == 21
    assert log["routed"] == 2 * 21


def test_validation_charges_every_token_to_an_expert_in_each_layer():
    model = make().eval()
    criterion = make_criterion(model).eval()
    _, _, log = criterion(model, make_sample(model.decoder.pad))
    for mixture in model.mixtures:
        assert mixture.valid_loss_E.sum().item() == pytest.approx(log["nll_loss"].item(), rel=1e-5)
        assert mixture.valid_tokens_E.sum().item() == 21


def test_training_charges_no_expert():
    model = make().train()
    make_criterion(model).train()(model, make_sample(model.decoder.pad))
    assert all(mixture.valid_tokens_E.sum() == 0 for mixture in model.mixtures)


def test_perplexity_is_of_the_nll_alone_and_not_rounded():
    logs = [
        {"nll_loss": 4 * math.log(8), "loss": 100.0, "ntokens": 4, "sample_size": 4},
        {"nll_loss": 2 * math.log(2), "loss": 100.0, "ntokens": 2, "sample_size": 2},
    ]
    with metrics.aggregate() as aggregate:
        SwitchLanguageModelCriterion.reduce_metrics(logs)
    values = aggregate.get_smoothed_values()
    assert values["nll_loss"] == pytest.approx((4 * 3 + 2 * 1) / 6)  # bits
    assert values["ppl"] == pytest.approx(2 ** (14 / 6), rel=1e-12)
    assert "overflow_percent" not in values  # a model without mixtures


def test_overflow_and_entropy_by_hand():
    assert _entropy_bits(torch.tensor([1, 1, 1, 1])).item() == pytest.approx(2.0)
    assert _entropy_bits(torch.tensor([7, 0])).item() == 0.0
    assert _perplexity(3.0) == 8.0
    assert _perplexity(5000.0) == math.inf
    logs = [{"nll_loss": 1.0, "loss": 1.0, "ntokens": 1, "routed": 40, "overflow": 10, "balance_loss": 1.0,
             "router_z_loss": 1.0, "load_entropy": 2.0}]  # fmt: skip
    with metrics.aggregate() as aggregate:
        SwitchLanguageModelCriterion.reduce_metrics(logs)
    assert aggregate.get_smoothed_values()["overflow_percent"] == 25.0


def test_negative_weights_are_refused():
    with pytest.raises(SettingError, match="must not be negative"):
        make_criterion(make(), balance=-1)

import re
from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_alma.core.errors import SettingError
from fairseq_alma.models import switch_lm
from fairseq_alma.models.switch_lm import SwitchDecoder, SwitchLanguageModel, SwitchLanguageModelConfig


def make(arch="switch_lm_tiny", num_words=40, **options) -> SwitchLanguageModel:
    dictionary = Dictionary()
    for i in range(num_words - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    sizes = Namespace()
    getattr(switch_lm, arch)(sizes)
    options = {"dropout": 0.0, "tokens_per_sample": 16, **options}
    torch.manual_seed(0)
    cfg = SwitchLanguageModelConfig(**vars(sizes), **options)
    return SwitchLanguageModel.build_model(cfg, Namespace(source_dictionary=dictionary))


def num_params(model) -> int:
    return sum(p.numel() for p in model.parameters())


def closed_form(layers, d, num_words, num_experts, positions=1024) -> int:
    expert = (d * 4 * d + 4 * d) + (4 * d * d + d)  # two linear maps with their biases
    attention = 4 * (d * d + d)
    mixtures = layers // 2
    norms = 2 * d * (2 * layers + 1)
    shared = (num_words + positions) * d + layers * attention + norms + (layers - mixtures) * expert
    return shared + num_experts * mixtures * (expert + d)  # d: the router's row


def test_parameters_of_the_tiny_arch():
    assert num_params(make(num_experts=3)) == closed_form(4, 128, 40, 3)


@pytest.mark.parametrize(
    ("arch", "layers", "d", "shared_millions", "expert_millions"),
    [("switch_lm_base", 6, 512, 38.9, 6.30), ("switch_lm_large", 12, 768, 96.1, 28.34)],
)
def test_parameters_of_the_papers_sizes(arch, layers, d, shared_millions, expert_millions):
    with torch.device("meta"):
        one, two = (num_params(make(arch, 50264, num_experts=e)) for e in (1, 2))
    assert one == closed_form(layers, d, 50264, 1)
    assert (two - one) / 1e6 == pytest.approx(expert_millions, abs=0.005)
    assert (one - (two - one)) / 1e6 == pytest.approx(shared_millions, abs=0.05)


@pytest.mark.parametrize("training", [False, True])
def test_no_token_sees_what_comes_after_it(training):
    # In training too: whether a token finds its expert full depends on earlier tokens of the sequence only.
    model = make(capacity_factor=0.5).train(training)
    tokens = torch.randint(4, 40, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = 4 + (changed[0, 9] - 4 + 1) % 36
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:])


def test_padding_changes_nothing_and_uses_no_capacity():
    model = make().eval()
    row = torch.randint(4, 40, (1, 10))
    pad = model.decoder.pad
    padded = torch.cat([row, torch.full((1, 6), pad)], dim=1)
    batch = torch.cat([padded, torch.randint(4, 40, (1, 16))])
    scores, extra = model(batch)
    torch.testing.assert_close(scores[0, :10], model(row)[0][0])
    assert [len(m.routing.expert_T) for m in extra["mixtures"]] == [26, 26]


@pytest.mark.parametrize("training", [False, True])
def test_masked_text_is_as_if_it_were_not_there(training):
    """Padding between tokens, at the start and at the end: the others get the features of the text without it."""
    model = make(capacity_factor=1.0).train(training)
    tokens = torch.randint(4, 40, (1, 9))
    masked = torch.full((1, 14), model.decoder.pad)
    places = torch.tensor([2, 3, 5, 6, 7, 8, 9, 11, 12])
    masked[0, places] = tokens
    expected, extra = model(tokens, features_only=True)
    found, with_padding = model(masked, features_only=True)
    torch.testing.assert_close(found[0, places], expected[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(extra["mixtures"], with_padding["mixtures"], strict=True):
        assert one.plan.load_E.tolist() == other.plan.load_E.tolist()


def test_a_batch_of_masked_text_alone_changes_nothing():
    model = make().train()
    masked = torch.full((2, 8), model.decoder.pad)
    loss, extra = model(masked, nll_of=masked, has_padding=True)
    balance = sum(mixture.routing.balance_loss + mixture.routing.z_loss for mixture in extra["mixtures"])
    (loss + balance).backward()
    assert float(loss) == float(balance) == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_every_other_layer_is_a_mixture():
    model = make()
    assert [layer.mixture is not None for layer in model.decoder.layers] == [False, True, False, True]
    assert len(model.mixtures) == 2


def test_recomputed_activations_give_the_same_gradients():
    tokens = torch.randint(4, 40, (2, 16))
    gradients = []
    for recompute in (False, True):
        model = make(checkpoint_activations=recompute).train()
        model(tokens)[0].logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_features_only_leaves_out_the_words():
    model = make().eval()
    tokens = torch.randint(4, 40, (1, 8))
    features, _ = model(tokens, features_only=True)
    assert features.shape == (1, 8, 128)
    torch.testing.assert_close(model.decoder.output_layer(features), model(tokens)[0])


def test_inputs_longer_than_the_positions_are_refused():
    with pytest.raises(SettingError, match="--tokens-per-sample 32 is longer than --learned-positions 16"):
        make(tokens_per_sample=32, learned_positions=16)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(SettingError, match="multiple of"):
        SwitchLanguageModel.build_model(
            SwitchLanguageModelConfig(decoder_embed_dim=10, decoder_attention_heads=3, tokens_per_sample=8),
            Namespace(source_dictionary=Dictionary()),
        )


def test_checkpoints_carry_the_version_of_their_layout():
    assert make().state_dict()["decoder.version"].tolist() == [1.0]
    assert make(num_experts=3).state_dict()["decoder.layers.1.mixture.fc1_weight"].shape == (3, 512, 128)


def test_the_decoder_is_a_decoder_of_fairseq():
    from fairseq.models import FairseqDecoder

    assert isinstance(make().decoder, FairseqDecoder)
    assert SwitchDecoder.max_positions(make().decoder) == 1024


@pytest.mark.parametrize(
    ("there", "here", "advice"),
    [
        (4, 6, "give --num-experts 4, or add 2 with alma-grow first"),
        (4, 3, "give --num-experts 4; experts cannot be removed"),
    ],
)
def test_a_checkpoint_with_other_experts_is_refused_with_advice(there, here, advice):
    model = make(num_experts=here)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SettingError) as caught:
        model.load_state_dict(make(num_experts=there).state_dict())
    assert (
        str(caught.value) == f"the checkpoint has {there} experts in each mixture, but this model has {here}: {advice}"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"decoder_embed_dim": 64}, r"\[40, 64\] in the checkpoint, \[40, 128\] in this model"),
        ({"num_words": 44}, r"embed_tokens.weight has shape \[44, 128\] in the checkpoint, \[40, 128\] in this model"),
        ({"decoder_layers": 6}, r"decoder.layers.4.* is only in the checkpoint"),
        ({"decoder_layers": 2}, r"decoder.layers.2.* is only in this model"),
        ({"decoder_ffn_embed_dim": 256}, r"fc1.* has shape \[256.* in the checkpoint, \[512.* in this model"),
        # The number of experts differs too, but growth would not help.
        ({"num_words": 44, "num_experts": 3}, r"embed_tokens.weight has shape \[44, 128\] in the checkpoint"),
    ],
)
def test_a_checkpoint_of_other_sizes_is_refused_in_one_line(other, named):
    sizes = Namespace(**{key: value for key, value in other.items() if key.startswith("decoder")})
    options = {key: value for key, value in other.items() if not key.startswith("decoder")}
    with pytest.raises(SettingError, match="the checkpoint belongs to a model with other sizes") as caught:
        make().load_state_dict(make_with(sizes, **options).state_dict())
    message = str(caught.value)
    assert re.search(named, message)
    assert message.endswith("give the --arch and the sizes with which the checkpoint was trained")
    assert len(message) < 400  # not every tensor is listed


def make_with(sizes: Namespace, num_words=40, num_experts=4) -> SwitchLanguageModel:
    """Return the tiny model with some of its sizes changed."""
    switch_lm.switch_lm_tiny(sizes)
    dictionary = make(num_words=num_words).decoder.dictionary
    cfg = SwitchLanguageModelConfig(**vars(sizes), num_experts=num_experts, tokens_per_sample=16)
    return SwitchLanguageModel.build_model(cfg, Namespace(source_dictionary=dictionary))


def test_a_tree_is_saved_and_loaded_as_part_of_the_model():
    tokens = torch.randint(4, 40, (2, 16))
    flat, tree = make().eval(), make().eval()
    for mixture in tree.mixtures:
        state = mixture.router.state_dict()
        mixture.router.load_state_dict({**state, "split_E": torch.tensor([-1.0, -1.0, -1.0, 0.0])})
    assert not torch.allclose(flat(tokens)[0], tree(tokens)[0])
    flat.load_state_dict(tree.state_dict())
    assert torch.equal(flat(tokens)[0], tree(tokens)[0])


@pytest.mark.parametrize("num_experts", [1, 4])
def test_in_bfloat16_scores_loss_and_gradients_are_those_of_float32_up_to_rounding(num_experts):
    # One expert for each token in both precisions: with a limit or a close decision, rounding would move tokens.
    options = {"num_experts": num_experts, "capacity_factor": 0.0, "num_words": 500}
    exact, rounded = make(**options), make(**options, precision="bfloat16")
    for model in (exact, rounded):
        for mixture in model.mixtures:
            with torch.no_grad():
                mixture.router.weight.mul_(10)
    tokens, target = torch.randint(4, 500, (4, 16)), torch.randint(4, 500, (4, 16))
    losses, gradients = [], []
    for model in (exact, rounded):
        loss, _ = model(tokens, nll_of=target)
        loss.backward()
        assert loss.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()  # rounding adds up over four layers
    scores = [model.eval()(tokens)[0].float() for model in (exact, rounded)]
    assert (scores[0] - scores[1]).norm() < 0.02 * scores[0].norm()


def test_what_the_host_knows_about_padding_changes_no_score():
    model = make(num_experts=3).eval()
    tokens = torch.randint(4, 40, (2, 16))
    torch.testing.assert_close(model(tokens)[0], model(tokens, has_padding=False)[0])
    torch.testing.assert_close(model(tokens)[0], model(tokens, has_padding=True)[0])
    tokens[1, 5:] = model.decoder.pad
    torch.testing.assert_close(model(tokens)[0], model(tokens, has_padding=True)[0])
    _, extra = model(tokens, has_padding=True)
    assert extra["token_mask"].sum() == 16 + 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_of_each_token_is_that_of_its_score_in_float32(precision):
    model = make(precision=precision).eval()
    tokens, target = torch.randint(4, 40, (2, 3, 16))
    target[2, 9:] = model.decoder.pad
    with torch.no_grad():
        nll_T, _ = model(tokens, nll_of=target, per_token=True)
    scores = model(tokens)[0].float()
    expected = -scores.log_softmax(-1).gather(2, target.unsqueeze(2)).squeeze(2) * target.ne(model.decoder.pad)
    assert nll_T.dtype == torch.float32
    torch.testing.assert_close(nll_T, expected.flatten())
    torch.testing.assert_close(model(tokens, nll_of=target)[0], expected.sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_training_step_on_cuda_never_makes_the_host_wait(precision):
    model = make(precision=precision, capacity_factor=1.0).cuda().train()
    tokens, target = torch.randint(4, 40, (2, 3, 16)).cuda()
    for mode in ("default", "error"):  # the first step may load kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss, extra = model(tokens, nll_of=target, has_padding=False)
            (loss + sum(m.routing.balance_loss + m.routing.z_loss for m in extra["mixtures"])).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)

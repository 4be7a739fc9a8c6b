"""Growth in depth: which layers are copied, and that the output does not change but every new weight learns."""

import pytest
import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.growth.layers import grow_layers
from tests.fairseq_alma.growth.test_experts import WORDS, B, L, make


def numbered(num_layers: int) -> dict[str, torch.Tensor]:
    """Return the state dict of a model in which every tensor of layer i contains only the number i + 1."""
    state = make(2, decoder_layers=num_layers).state_dict()
    for name, value in state.items():
        if name.startswith("decoder.layers."):
            state[name] = torch.full_like(value, int(name.split(".")[2]) + 1)
    return state


@pytest.mark.parametrize(
    ("num_layers", "num_new", "expected"),
    [
        (4, 2, [1, 2, 3, 4, 3, 4]),  # the last pair
        (4, 4, [1, 2, 1, 2, 3, 4, 3, 4]),
        (8, 4, [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 7, 8]),  # every second pair
        (6, 4, [1, 2, 3, 4, 3, 4, 5, 6, 5, 6]),
        (5, 2, [1, 2, 3, 4, 3, 4, 5]),  # an odd last layer is in no pair
        (4, 0, [1, 2, 3, 4]),
    ],
)
def test_pairs_of_layers_are_copied_evenly_over_the_depth(num_layers, num_new, expected):
    grown = grow_layers(numbered(num_layers), num_new)
    assert grown.keys() == make(2, decoder_layers=len(expected)).state_dict().keys()
    for layer, number in enumerate(expected):
        assert grown[f"decoder.layers.{layer}.self_attn.qkv_proj.weight"].unique().tolist() == [number]
        is_copy = number in expected[:layer]
        outputs = ["self_attn.out_proj.weight", "self_attn.out_proj.bias"]
        outputs += ["mixture.fc2_weight", "mixture.fc2_bias"] if layer % 2 else ["fc2.weight", "fc2.bias"]
        for name in outputs:
            assert grown[f"decoder.layers.{layer}.{name}"].unique().tolist() == [0 if is_copy else number]


@pytest.mark.parametrize("training", [False, True])
def test_new_layers_keep_the_output_and_learn(training):
    torch.manual_seed(0)
    model = make(3).train(training)
    words = torch.randint(4, WORDS, (B, L), generator=torch.Generator().manual_seed(1))
    grown = make(3, decoder_layers=8).train(training)
    grown.load_state_dict(grow_layers(model.state_dict(), 4))
    with torch.no_grad():
        torch.testing.assert_close(grown(words)[0], model(words)[0], atol=1e-6, rtol=1e-6)
    nll, _ = grown(words, nll_of=words.roll(-1, dims=1))
    nll.backward()
    for layer in (2, 3, 6, 7):  # the copies
        block = grown.decoder.layers[layer]
        weights = [block.self_attn.out_proj.weight, block.fc2.weight if layer % 2 == 0 else block.mixture.fc2_weight]
        assert all(weight.grad.abs().sum() > 0 for weight in weights)


def test_the_result_needs_a_validation_before_experts_are_ranked():
    state = make(3).state_dict()
    for layer in (1, 3):
        state[f"decoder.layers.{layer}.mixture.valid_loss_E"] = torch.tensor([1.0, 2.0, 3.0])
    grown = grow_layers(state, 2)
    assert grown["decoder.layers.3.mixture.valid_loss_E"].tolist() == [1.0, 2.0, 3.0]
    assert grown["decoder.layers.5.mixture.valid_loss_E"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("num_new", "message"),
    [
        (1, "cannot add 1 layers: give an even number"),
        (-2, "cannot add -2 layers: give an even number of 0 or more"),
        (6, "cannot add 6 layers to 4, because each pair of layers is copied at most once: give at most 4"),
    ],
)
def test_impossible_numbers_of_layers_are_refused(num_new, message):
    with pytest.raises(SettingError, match=message):
        grow_layers(make(2).state_dict(), num_new)

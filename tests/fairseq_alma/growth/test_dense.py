"""Growth from a dense model (one expert in each mixture): exact copies keep the loss, and dropped units change it."""

from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.growth.experts import EXPERT_WEIGHTS, grow_experts, reinitialize_units
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import STAGE
from tests.fairseq_alma.growth.test_experts import FIRST, SECOND, make, state_of
from tests.fairseq_alma.lm.test_learners import fairseq_train_in_a_fork, settings_of
from tests.fairseq_alma.processes import NoProcesses

LOSS = {FIRST: [1.0], SECOND: [1.0]}


@pytest.fixture(scope="module")
def dense(stream, tmp_path_factory) -> Path:
    """checkpoint_best.pt of a model with one expert in each mixture, after 20 updates."""
    folder = tmp_path_factory.mktemp("dense")
    options = [*STAGE, "--mega-batches", "1", "--max-update", 20, "--save-dir", folder, "--num-experts", 1]
    status = fairseq_train_in_a_fork([stream, *options], folder / "log.txt")
    assert status == 0, (folder / "log.txt").read_text()[-3000:]
    return folder / "checkpoint_best.pt"


def loss_of(checkpoint: Path, stream: Path) -> tuple[float, list[list[float]]]:
    """Return the loss of a checkpoint on the validation set, and the load of its experts."""
    model, task = load_member(checkpoint, StreamFolder.open(stream), torch.device("cpu"))
    scores = score_tokens(model, task, "valid")
    return combine([scores.log_probability_T], num_words=1).loss, scores.load


def test_the_command_makes_a_mixture_of_exact_copies_with_the_loss_of_the_dense_model(dense, stream, tmp_path):
    target = tmp_path / "mixture.pt"
    assert alma_grow([str(dense), str(target), "--experts", "3"]) == 0
    before, after = (read_checkpoint(path) for path in (dense, target))
    assert (before["cfg"]["model"]["num_experts"], after["cfg"]["model"]["num_experts"]) == (1, 4)
    for prefix in (FIRST, SECOND):
        for name in EXPERT_WEIGHTS:
            weight = before["model"][prefix + name]
            assert torch.equal(after["model"][prefix + name], weight.expand(4, *weight.shape[1:]))
        # Two rounds: expert 0 is copied, then experts 0 and 1.
        assert after["model"][prefix + "router.split_E"].tolist() == [-1, 0, 0, 1]
    (old, _), (new, load) = loss_of(dense, stream), loss_of(target, stream)
    assert new == pytest.approx(old, rel=1e-6)
    assert all(share > 0.02 for layer in load for share in layer), load


def test_dropped_units_change_the_loss_and_exact_copies_do_not(dense, stream, tmp_path):
    old, _ = loss_of(dense, stream)
    losses = {}
    for drop in (0.0, 0.5, 1.0):
        grow_checkpoint(dense, tmp_path / f"{drop}.pt", 3, router="tree", seed=1, drop=drop)
        losses[drop], _ = loss_of(tmp_path / f"{drop}.pt", stream)
    assert losses[0.0] == pytest.approx(old, rel=1e-4)
    # The loss may also fall: this model has learned little.
    assert abs(losses[0.5] / old - 1) > 1e-3
    assert abs(losses[1.0] / losses[0.5] - 1) > 1e-3


def test_the_share_of_units_and_their_statistics_by_hand():
    num_experts, dim, units = 3, 50, 400
    generator = torch.Generator().manual_seed(0)
    mixture = {
        "fc1_weight": 0.3 + 2 * torch.randn(1, units, dim, generator=generator).expand(num_experts, -1, -1),
        "fc1_bias": 5 + torch.randn(1, units, generator=generator).expand(num_experts, -1),
        "fc2_weight": 0.1 * torch.randn(1, dim, units, generator=generator).expand(num_experts, -1, -1),
    }
    before = {name: value.clone() for name, value in mixture.items()}
    fresh = reinitialize_units(mixture, 0.25, torch.Generator().manual_seed(1))
    assert all(torch.equal(mixture[name], before[name]) for name in mixture)  # the argument is not changed
    assert {name: value.shape for name, value in fresh.items()} == {name: v.shape for name, v in before.items()}
    changed_EF = fresh["fc1_bias"] != before["fc1_bias"]
    assert changed_EF.sum(1).tolist() == [100, 100, 100]
    assert not torch.equal(changed_EF[0], changed_EF[1])  # each expert has units of its own
    changed_rows = (fresh["fc1_weight"] != before["fc1_weight"]).any(2)
    changed_columns = (fresh["fc2_weight"] != before["fc2_weight"]).any(1)
    assert torch.equal(changed_rows, changed_EF)  # the same units in both layers
    assert torch.equal(changed_columns, changed_EF)
    drawn = fresh["fc1_weight"][changed_EF]
    assert (drawn.mean().item(), drawn.std().item()) == pytest.approx((0.3, 2.0), rel=0.1)
    assert fresh["fc1_bias"][changed_EF].mean().item() == pytest.approx(5, rel=0.1)
    assert fresh["fc2_weight"].transpose(1, 2)[changed_EF].std().item() == pytest.approx(0.1, rel=0.1)
    none = reinitialize_units(mixture, 0.0, torch.Generator())
    assert all(torch.equal(none[name], before[name]) for name in none)
    every = reinitialize_units(mixture, 1.0, torch.Generator())
    assert (every["fc1_bias"] != before["fc1_bias"]).all()


def test_a_dense_model_learns_different_experts():
    torch.manual_seed(0)
    model = make(1)
    grown = make(4)
    grown.load_state_dict(grow_experts(state_of(model, LOSS), 3, router="tree", noise=1.0))
    words = torch.randint(4, 60, (16, 16), generator=torch.Generator().manual_seed(1))
    nll, _ = grown(words, nll_of=words.roll(-1, dims=1))
    nll.backward()
    for mixture in grown.mixtures:
        loaded = [e for e in range(4) if mixture.fc1_weight.grad[e].abs().sum() > 0]
        assert len(loaded) >= 2
        a, b = (mixture.fc1_weight.grad[e] for e in loaded[:2])
        assert not torch.allclose(a, b)


@pytest.mark.parametrize(
    ("num_experts", "arguments", "message"),
    [
        (1, {"num_new": 3}, "router=copy would divide the output of the only expert by about 4: use router=tree"),
        (3, {"num_new": 1, "drop": 0.5}, "drop=0.5 is for a dense model, .* but this model has 3: leave it out"),
        (1, {"num_new": 1, "router": "tree", "drop": 1.5}, "drop=1.5 must be a share between 0 and 1"),
    ],
)
def test_growth_that_only_fits_the_other_kind_of_model_is_refused(num_experts, arguments, message):
    torch.manual_seed(0)
    losses = {FIRST: [1.0] * num_experts, SECOND: [1.0] * num_experts}
    with pytest.raises(SettingError, match=message):
        grow_experts(state_of(make(num_experts), losses), **arguments)


def test_a_dense_model_that_was_not_validated_is_refused():
    with pytest.raises(SettingError, match="saved after a validation"):
        grow_experts(make(1).state_dict(), 3, router="tree")


# ---- As stages of a run: learner=gmoe with experts=1.

DENSE = {"experts": 1, "grow_experts": [3, 2], "grow_router": "tree", "grow_drop": 0.25, "copy_experts_by": "gradient"}


def test_the_learner_grows_a_dense_model_and_charges_the_choice_by_gradient(dense, trained, stream, tmp_path):
    learner = make_learner(
        settings_of(stream, tmp_path, "gmoe", **DENSE), StreamFolder.open(stream).without_test(), NoProcesses()
    )
    assert [learner.num_experts(k) for k in (1, 2, 3)] == [1, 4, 6]
    arrivals = tuple(StreamFolder.open(stream).stream())
    # The first growth copies the only expert, so nothing is chosen and nothing is charged.
    learner._continuations = {1: dense}
    (spent,) = learner.grow(Stage(2, arrivals[1:2], arrivals[:1], False, tmp_path / "stages" / "stage_002"))
    assert (spent.train_flops, spent.train_seconds) == (0, 0.0)
    state = read_checkpoint(learner._continuations[1])["model"]
    assert state[FIRST + "fc1_bias"].shape[0] == 4
    kept_EF = state[FIRST + "fc1_bias"] == read_checkpoint(dense)["model"][FIRST + "fc1_bias"]
    assert kept_EF.sum(1).tolist() == [384] * 4  # a quarter of 512 units is new in each expert
    # The second one chooses 2 of 4 experts (here of another model), and no unit is dropped.
    learner._continuations = {1: trained}
    (spent,) = learner.grow(Stage(3, arrivals[2:3], arrivals[:2], False, tmp_path / "stages" / "stage_003"))
    assert spent.train_flops > 0
    assert spent.train_seconds > 0
    assert (spent.num_updates, spent.validation_flops) == (0, 0)
    before, after = read_checkpoint(trained)["model"], read_checkpoint(learner._continuations[1])["model"]
    assert torch.equal(after[FIRST + "fc1_weight"][:4], before[FIRST + "fc1_weight"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grow_router": "copy"}, "growth 1 would add 3 experts to a mixture of one expert.* Set grow_router=tree"),
        ({"grow_drop": -0.5}, "grow_drop=-0.5 must be a share between 0 and 1"),
        ({"experts": 4}, "grow_drop=0.25 is for growth from a dense model.* has 4 experts .* set experts=1"),
        ({"grow_experts": [3, 5]}, "growth 2 would add 5 experts to the 4 experts"),
        ({"copy_experts_by": "size"}, "copy_experts_by='size' is not one of validation_loss, gradient, random"),
    ],
)
def test_settings_that_do_not_fit_a_dense_model_are_refused(stream, tmp_path, changed, message):
    with pytest.raises(SettingError, match=message):
        settings_of(stream, tmp_path, "gmoe", **(DENSE | changed))


def test_from_scratch_no_router_is_copied_so_any_number_of_experts_can_be_added():
    values = {"stream": "s", "out": "o", "updates": 1, "learner": "gmoe", "grow_experts": 3, "from_scratch": True}
    assert LanguageModelSettings.from_mapping({**values, "experts": 1}).learner_settings.grow_experts == 3
    with pytest.raises(SettingError, match="Set grow_router=tree"):
        LanguageModelSettings.from_mapping({**values, "experts": 1, "from_scratch": False})

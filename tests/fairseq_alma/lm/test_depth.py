"""gMoE that also adds layers: what each stage trains, what it costs, and which numbers are refused."""

import shutil
from pathlib import Path

import pytest

from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.growth.checkpoint import main as alma_grow
from fairseq_alma.lm.learners import make_learner
from tests.fairseq_alma.lm.test_learners import best, load, rows_of, run, same_models, settings, settings_of
from tests.fairseq_alma.models.test_switch_lm import closed_form
from tests.fairseq_alma.processes import NoProcesses

LAYERS, EXPERTS = [4, 6, 8], [4, 4, 5]
GROWTH = {"grow_experts": [0, 1], "grow_layers": 2}
OPTIONS = {"updates": 8, "validations": 1, **GROWTH}


@pytest.fixture(scope="module")
def deeper(stream, tmp_path_factory) -> Path:
    """A run with 4, 6 and 8 layers; the last growth adds an expert too."""
    out = tmp_path_factory.mktemp("deeper") / "run"
    run(settings_of(stream, out, "gmoe", **OPTIONS))
    return out


def grown(out: Path, stage: int) -> Path:
    return out / f"stages/stage_{stage:03d}/grow/member_1/checkpoint_grown.pt"


def test_each_stage_trains_the_deeper_model(deeper):
    rows = rows_of(deeper)
    sizes = [closed_form(layers, 128, 24, experts) for layers, experts in zip(LAYERS, EXPERTS, strict=True)]
    assert [row.scores.num_params for row in rows] == [sizes[0], *sizes]
    assert [row.scores.num_experts for row in rows] == [4, *EXPERTS]
    for stage, layers in enumerate(LAYERS, start=1):
        assert read_checkpoint(best(deeper, stage, 1))["cfg"]["model"]["decoder_layers"] == layers
    # Stages with equal updates cost more the more layers the model has. The embeddings have a part that stays.
    costs = [row.spent.train_flops for row in rows[1:]]
    assert costs[0] * 1.3 < costs[1] < costs[0] * 1.5
    assert costs[1] * 1.2 < costs[2] < costs[1] * 1.4
    assert rows[-1].scores.perplexity < 0.8 * rows[1].scores.perplexity


def test_new_layers_do_not_change_the_perplexity(deeper, stream):
    scored = [
        combine([score_tokens(*load(path, stream), "test").log_probability_T], num_words=1).perplexity
        for path in (best(deeper, 1, 1), grown(deeper, 2))
    ]
    assert scored[1] == pytest.approx(scored[0], rel=1e-5)


def test_alma_grow_makes_the_same_checkpoints(deeper, tmp_path):
    for stage, experts in ((2, ()), (3, ("--experts", "1"))):
        target = tmp_path / f"{stage}.pt"
        arguments = [*experts, "--layers", "2", "--seed", "0", "--stage", str(stage)]
        assert alma_grow([str(best(deeper, stage - 1, 1)), str(target), *arguments]) == 0
        same_models(target, grown(deeper, stage))


@pytest.mark.slow  # test_learners.py has the same for a mixture that adds experts
def test_a_run_that_lost_a_grown_stage_computes_the_same_again(deeper, stream, tmp_path):
    out = shutil.copytree(deeper, tmp_path / "run")
    shutil.rmtree(out / "stages/stage_003")
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:3]))
    assert run(settings_of(stream, out, "gmoe", **OPTIONS)) == [best(out, 3, 1)]
    assert rows_of(out)[-1].scores == rows_of(deeper)[-1].scores
    same_models(best(out, 3, 1), best(deeper, 3, 1))


@pytest.mark.slow
def test_from_scratch_each_stage_initialises_a_deeper_model(deeper, stream, tmp_path):
    run(settings_of(stream, tmp_path / "run", "gmoe", **OPTIONS, from_scratch=True))
    rows, others = rows_of(tmp_path / "run"), rows_of(deeper)
    assert [row.scores.num_params for row in rows] == [row.scores.num_params for row in others]
    assert [row.spent.train_flops for row in rows] == [row.spent.train_flops for row in others]
    assert not list((tmp_path / "run").rglob("checkpoint_grown.pt"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grow_layers": 1}, "grow_layers=1 must be even and not negative"),
        ({"grow_layers": [2, -2]}, "grow_layers=[2, -2] must be even and not negative"),
        ({"grow_layers": []}, "grow_layers=[] must be an integer or a list of integers"),
        ({"grow_layers": True}, "grow_layers=True must be an integer or a list of integers"),
        (
            {"grow_layers": 2, "copy_experts_by": "random", "grow_router": "tree"},
            "grow_router=tree copy_experts_by=random has no effect with grow_experts=0, which copies no experts",
        ),
        ({"grow_layers": 2, "learner": "sm"}, "grow_layers=2 is for learner=gmoe, not for learner=sm"),
    ],
)
def test_settings_with_which_no_layers_can_be_added_are_refused(values, message):
    with pytest.raises(SettingError) as caught:
        settings(**{"learner": "gmoe", **({} if "learner" in values else {"grow_experts": 0}), **values})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grow_layers": 6}, "growth 1 would add 6 layers to the 4 layers of the model"),
        ({"grow_layers": [2, 8]}, "growth 2 would add 8 layers to the 6 layers of the model"),
        ({"grow_layers": 4, "fairseq": "--decoder-layers 3"}, "Set the number for growth 1 to at most 2"),
        (
            {"grow_experts": [0, 1], "fairseq": "--decoder-layers 1"},
            "grow_experts=[0, 1] needs a mixture, which every second layer has, but the model has 1 layer",
        ),
    ],
)
def test_more_than_the_model_has_is_refused_before_anything_is_written(stream, tmp_path, values, message):
    view, out = StreamFolder.open(stream).without_test(), tmp_path / "run"
    with pytest.raises(SettingError) as caught:
        make_learner(settings_of(stream, out, "gmoe", **{"grow_experts": 0, **values}), view, NoProcesses())
    assert message in str(caught.value)
    assert not out.exists()

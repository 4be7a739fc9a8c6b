"""Networks, learners, criteria and optimizers that alma-lm does not bring along. docs/extending.md has two more."""

import json
import textwrap

import pytest
import torch

from fairseq_alma.checkpoints import require_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.flops import count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.models.any_network import with_targets
from fairseq_alma.models.stored import stored_options
from tests.commands import ROOT, run_command

CPU = torch.device("cpu")
SMALL = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2"
SETTINGS = (
    "precision=float32", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8", "lr=0.005", "updates=4",
    "mega_batches=2", "validations=1",
)  # fmt: skip


def alma_lm(stream, out, *settings, folder=ROOT):
    return run_command("alma-lm", f"stream={stream}", f"out={out}", *SETTINGS, *settings, folder=folder)


@pytest.fixture(scope="module")
def transformer(stream, tmp_path_factory):
    """A run of two of fairseq's transformers, in one stage."""
    out = tmp_path_factory.mktemp("runs") / "transformer"
    result = alma_lm(stream, out, "arch=transformer_lm_gpt", "learner=ens", "members=2", "wait=2", f"fairseq={SMALL}")
    assert result.returncode == 0, result.stderr[-3000:]
    return out


def test_a_network_of_fairseq_is_scored_as_fairseq_scores_it(transformer, stream):
    (checkpoint, _) = sorted(transformer.glob("stages/stage_001/*/checkpoint_best.pt"))
    ours = run_command("alma-eval", checkpoint, "--stream", stream, "--arch", "transformer_lm_gpt", "--json")
    assert ours.returncode == 0, ours.stderr
    result = run_command(
        "fairseq-eval-lm", stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--path", checkpoint,
        "--gen-subset", "test", "--tokens-per-sample", 32, "--batch-size", 8,
    )  # fmt: skip
    perplexity = float((result.stdout + result.stderr).rsplit("Perplexity: ", 1)[1].split()[0])
    assert json.loads(ours.stdout)["perplexity"] == pytest.approx(perplexity, abs=0.01)


def test_the_cost_of_a_network_of_fairseq_is_counted(transformer, stream):
    row = json.loads((transformer / "ledger.jsonl").read_text().splitlines()[2])
    (checkpoint, _) = sorted(transformer.glob("stages/stage_001/*/checkpoint_best.pt"))
    model, _ = load_member(checkpoint, StreamFolder.open(stream), CPU, "transformer_lm_gpt")
    processed = require_checkpoint(checkpoint)["extra_state"]["AlmaLanguageModelingTask"]["processed"]["training"]
    flops = count_training_flops(model).total(processed["tokens"], processed["token_pairs"])
    assert processed["tokens"] == 4 * 8 * 32
    assert row["train_flops"] == 2 * flops


def test_the_score_of_a_network_of_fairseq_does_not_depend_on_the_batch(transformer, stream):
    (checkpoint, _) = sorted(transformer.glob("stages/stage_001/*/checkpoint_best.pt"))
    model, task = load_member(checkpoint, StreamFolder.open(stream), CPU, "transformer_lm_gpt")
    few, many = (score_tokens(model, task, "test", tokens_per_batch=n).log_probability_T for n in (32, 2048))
    torch.testing.assert_close(torch.tensor(few), torch.tensor(many), atol=1e-5, rtol=1e-5)
    assert with_targets(model) is model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("learner=gmoe", "grow_experts=1"), "learner=gmoe needs a switch_lm model"),
        pytest.param(("compile=true",), "compile=true needs a switch_lm model", marks=pytest.mark.slow),
        pytest.param(("expert_parallel=2",), "expert_parallel=2 needs", marks=pytest.mark.slow),
        pytest.param(("fairseq=--adaptive-softmax-cutoff 5,10",), "adaptive softmax", marks=pytest.mark.slow),
        (("fairseq=--optimizer adagrad",), "the chosen optimizer has no dataclass of options"),
        (("fairseq=--lr-scheduler cosine", "schedule=constant"), "schedule=constant is for our learning rates"),
    ],
)
def test_what_a_network_of_fairseq_cannot_do_is_refused(stream, tmp_path, settings, message):
    out = tmp_path / "run"
    result = alma_lm(stream, out, "arch=transformer_lm_gpt", *settings)
    assert result.returncode == 2
    assert message in result.stderr, result.stderr


def test_an_unknown_architecture_is_refused_with_those_that_are_known(stream, tmp_path):
    result = alma_lm(stream, tmp_path / "run", "arch=transformer_lm_gtp")
    assert result.returncode == 2
    assert "did you mean transformer_lm_gpt?" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_network_is_not_scored_unless_it_is_named(transformer, stream):
    (checkpoint, _) = sorted(transformer.glob("stages/stage_001/*/checkpoint_best.pt"))
    result = run_command("alma-eval", checkpoint, "--stream", stream)
    assert result.returncode == 2
    assert "give --arch transformer_lm_gpt if you expect it" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_layers_to_keep", "__import__('os').system('touch canary')"),
        ("decoder_layers", "__import__('os').system('touch canary')"),
        ("character_filters", "[(1, 10**12)]"),
        ("decoder_layers", [2]),
    ],
)
def test_options_of_another_network_that_are_code_are_refused(transformer, name, value):
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    state = require_checkpoint(next(transformer.glob("stages/stage_001/member_1/checkpoint_best.pt")))
    stored_options(state, transformer, TransformerLanguageModelConfig)
    state["cfg"]["model"][name] = value
    with pytest.raises(SettingError, match=f"has {name}="):
        stored_options(state, transformer, TransformerLanguageModelConfig)


def test_sizes_of_another_network_that_are_not_those_of_its_weights_are_refused(transformer, stream, tmp_path):
    state = require_checkpoint(next(transformer.glob("stages/stage_001/member_1/checkpoint_best.pt")))
    state["cfg"]["model"]["decoder_ffn_embed_dim"] = 10**12
    torch.save(state, tmp_path / "huge.pt")
    with pytest.raises(SettingError, match="do not have the shape"):
        load_member(tmp_path / "huge.pt", StreamFolder.open(stream), CPU, "transformer_lm_gpt")


PLUGIN = '''
import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq_alma.lm.learners import SingleModel, register_learner


@register_criterion("halved", dataclass=CrossEntropyCriterionConfig)
class Halved(CrossEntropyCriterion):
    def compute_loss(self, *arguments, **more):
        loss, nll = super().compute_loss(*arguments, **more)
        return loss / 2, nll


@register_learner("deeper", label="Deeper")
class Deeper(SingleModel):
    """A transformer that gets a copy of its last layer, with an output of 0, before each stage."""

    def training_options(self, stage, updates):
        return {"decoder_layers": 1 + stage.index, "lr": [0.005 / stage.index]}

    def grow(self, stage):
        last, new = stage.index - 1, stage.index

        def deeper(weights):
            copied = {n.replace(f"layers.{last}.", f"layers.{new}."): w.clone()
                      for n, w in weights.items() if f"layers.{last}." in n}
            for name in copied:
                if "out_proj" in name or "fc2" in name:
                    copied[name].zero_()
            return {**weights, **copied}

        self.change_weights(stage, deeper)
        return super().grow(stage)
'''


def test_a_learner_of_a_plugin_grows_a_network_of_fairseq_with_a_criterion_and_an_optimizer(stream, tmp_path):
    (tmp_path / "parts.py").write_text(textwrap.dedent(PLUGIN))
    settings = (
        "plugin=parts", "learner=deeper", "arch=transformer_lm_gpt",
        f"fairseq={SMALL} --criterion halved --optimizer nag",
    )  # fmt: skip
    result = alma_lm(stream, tmp_path / "run", *settings, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    states = [
        require_checkpoint(tmp_path / "run" / "stages" / f"stage_00{k}" / "member_1" / "checkpoint_best.pt")
        for k in (1, 2)
    ]
    assert [state["cfg"]["model"]["decoder_layers"] for state in states] == [2, 3]
    assert all(state["cfg"]["criterion"]["_name"] == "halved" for state in states)
    assert states[1]["cfg"]["optimization"]["lr"] == [0.0025]
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    flops = [row["train_flops"] for row in rows[1:]]
    assert rows[2]["num_params"] > rows[1]["num_params"]
    assert flops[1] > flops[0] > 0
    again = alma_lm(stream, tmp_path / "run", *settings, folder=tmp_path)
    assert again.returncode == 0
    assert "nothing was left to do" in again.stdout.lower()
    (tmp_path / "parts.py").write_text(textwrap.dedent(PLUGIN) + "# another version\n")
    changed = alma_lm(stream, tmp_path / "run", *settings, folder=tmp_path)
    assert changed.returncode == 2
    assert "plugin_digest" in changed.stderr

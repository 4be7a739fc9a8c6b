"""The setting `compile`: when it pays, and that compiled layers train like others. On a CPU, with the same compiler."""

import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.lm.compilation import cost_so_far, keep_compiled_code, pays
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of
from tests.fairseq_alma.lm.test_learners import train_member_in_a_fork
from tests.fairseq_alma.lm.test_train_member import prepared
from tests.fairseq_alma.ranks import member_commands, run_ranks
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task

BASE = SimpleNamespace(decoder_embed_dim=512, decoder_ffn_embed_dim=2048, decoder_layers=6)
TOKENS = 192 * 512


def test_compiling_pays_in_long_stages_on_a_gpu():
    """An update of the base model has 6 x (6 x 12 x 512^2 + 50,000 x 512) x 98,304 = 2.6e13 operations."""
    assert pays(BASE, 50_000, 1200 * TOKENS, num_devices=1, is_gpu=True)
    assert not pays(BASE, 50_000, 1100 * TOKENS, num_devices=1, is_gpu=True)
    assert not pays(BASE, 50_000, 1200 * TOKENS, num_devices=2, is_gpu=True)  # each device has half of the work
    assert not pays(BASE, 50_000, 10**9 * TOKENS, num_devices=1, is_gpu=False)


def test_compiled_code_is_kept_where_other_runs_find_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "alma/compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


@pytest.mark.slow
def test_compiled_layers_train_like_others_and_are_compiled_once(stream, tmp_path):
    """Without dropout, whose random numbers are others. The last batch of the epoch is smaller, and not compiled."""
    perplexities, graphs = [], []
    for compile in (False, True):
        out = tmp_path / f"run_{compile}"
        command = prepared(stream, out, compile=compile, dropout=0.0, batch_size=4, precision="float32", updates=30)
        member = out / "stages/stage_001/member_1"
        assert train_member_in_a_fork(command, member / "log.txt") == 0, (member / "log.txt").read_text()[-2000:]
        records = re.findall(r"\| (?:train_inner|valid) \| (\{.*\})", (member / "log.txt").read_text())
        values = [json.loads(text) for text in records]
        perplexities.append([float(one.get("ppl", one.get("valid_ppl"))) for one in values])
        graphs.append([int(one["compiled_graphs"]) for one in values if "compiled_graphs" in one])
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-3)
    assert graphs[0] == []
    assert set(graphs[1]) == {3}  # a layer with a dense network, one with a mixture, and the loss


@pytest.mark.slow
def test_one_checkpoint_has_one_perplexity_compiled_and_not(stream, trained):
    weights = read_checkpoint(trained)["model"]
    task = make_task(stream, "--mega-batches", "1")
    task.load_dataset("train")
    full = [batch for batch in batches(task, "train") if batch["target"].shape == (8, 32)]
    perplexities, before = [], cost_so_far()[0]
    for compile_batch in (0, 8):
        config = config_of([str(stream), *map(str, STAGE[2:]), "--compile-batch", str(compile_batch)])
        model = task.build_model(config.model).train()
        model.load_state_dict(weights)
        nll = [model(one["net_input"]["src_tokens"], nll_of=one["target"], has_padding=False)[0] for one in full]
        perplexities.append(math.exp(float(torch.stack(nll).mean()) / (8 * 32)))
    assert cost_so_far()[0] == before + 3
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-4)
    assert perplexities[0] < 15  # of 20 words


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks_train_the_same_compiled_and_not(stream, tmp_path):
    options = ("--optimizer", "fused_adam", "--max-update", 6, "--log-interval", 1, "--compile-batch")
    found = []
    for compile_batch in (0, 8):
        folder = tmp_path / f"compile_{compile_batch}"
        (configs := tmp_path / f"configs_{compile_batch}").mkdir()
        (log, _) = run_ranks(member_commands(stream, folder, configs, 2, *options, compile_batch), seconds=600)
        records = [json.loads(text) for text in re.findall(r"\| train_inner \| (\{.*\})", log)]
        found.append([float(one["nll_loss"]) for one in records])
    assert len(found[0]) == 6
    assert "compiled_graphs" in log
    assert found[1] == pytest.approx(found[0], abs=1e-3)

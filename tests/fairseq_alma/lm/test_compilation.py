"""The setting `compile`: when it pays, and that compiled layers train like others. On a CPU, with the same compiler."""

import json
import os
import re
from types import SimpleNamespace

import pytest

from fairseq_alma.lm.compilation import keep_compiled_code, pays
from tests.fairseq_alma.lm.test_learners import train_member_in_a_fork
from tests.fairseq_alma.lm.test_train_member import prepared

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
    assert set(graphs[1]) == {2}  # a layer with a dense network, and one with a mixture

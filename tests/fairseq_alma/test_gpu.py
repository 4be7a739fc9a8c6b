"""alma-lm on a GPU: training, growth, resume, evaluation and ensembles, in bfloat16 against float32."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import LAST, num_updates, read_checkpoint
from fairseq_alma.core.files import read_json
from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT, RUN, run_command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"),
]

SHORT = (*RUN, "updates=40", "validations=4", "dropout=0.1")


def train(stream: Path, out: Path, *settings: str) -> list[float]:
    """Run alma-lm. Return the perplexity after each arrival but the untrained one."""
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *SHORT, *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    return [row.scores.perplexity for row in Ledger(out / "ledger.jsonl").rows()[1:]]


@pytest.mark.parametrize(
    "learner", [("learner=gmoe", "experts=4", "grow_experts=2"), ("learner=ens", "members=2")], ids=["gmoe", "ens"]
)
def test_bfloat16_learns_what_float32_learns(stream, tmp_path, learner):
    exact = train(stream, tmp_path / "float32", *learner, "precision=float32")
    rounded = train(stream, tmp_path / "bfloat16", *learner, "precision=bfloat16")
    assert len(exact) == 3
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded != exact


def test_bfloat16_is_the_default(stream, tmp_path):
    train(stream, tmp_path, "mega_batches=1", "updates=2", "precision=auto")
    assert read_json(tmp_path / "settings.json")["precision"] == "bfloat16"


def test_a_loss_that_is_not_finite_ends_the_stage_with_advice(stream, tmp_path):
    diverging = ("wait=3", "lr=1e18", "fairseq=--clip-norm 0", "updates=20")
    result = run_command("alma-lm", f"stream={stream}", f"out={tmp_path}", *RUN, *diverging)
    assert result.returncode == 2
    assert "lower lr=1e+18" in result.stderr, result.stderr[-3000:]
    assert "FloatingPointError" in result.stderr, result.stderr[-3000:]


def test_alma_eval_on_the_gpu_and_on_the_cpu_agree(stream, tmp_path):
    (*_, perplexity) = train(stream, tmp_path / "run", "precision=float32")
    for device in ("cuda", "cpu"):
        result = run_command("alma-eval", tmp_path / "run", "--device", device)
        assert result.returncode == 0, result.stderr[-3000:]
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("perplexity")]
        assert float(line.split()[1]) == pytest.approx(perplexity, rel=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_killed_run_ends_as_an_uninterrupted_one(stream, tmp_path, precision):
    settings = ("mega_batches=1", f"precision={precision}", "updates=400")
    (whole,) = train(stream, tmp_path / "whole", *settings)
    out = tmp_path / "killed"
    last = out / "stages/stage_001/member_1" / LAST
    program = Path(sys.executable).parent / "alma-lm"
    words = [str(program), f"stream={stream}", f"out={out}", *SHORT, *settings, "checkpoint_minutes=0.001"]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ}, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not last.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert num_updates(read_checkpoint(last)) < 400
    (resumed,) = train(stream, out, *settings)
    assert resumed == pytest.approx(whole, rel=1e-4)  # a GPU adds in an order that varies

"""Two ranks, on CPU with gloo: a stage, its validation, its resume."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.checkpoints import num_updates, read_whole, write_untrained
from tests.commands import ROOT, STAGE

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_on_two_ranks(stream, folder, updates, *extra) -> str:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fairseq_cli.train", str(stream), *map(str, STAGE), "--mega-batches", "3",
             "--max-update", str(updates), "--save-interval-updates", "3", "--update-freq", "2",
             "--save-dir", str(folder), "--load-checkpoint-on-all-dp-ranks", "--cpu",
             "--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-world-size", "2",
             "--distributed-rank", str(rank), "--distributed-no-spawn", "--distributed-backend", "gloo",
             "--ddp-backend", "legacy_ddp", *map(str, extra)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[1][-3000:] + said[0][-3000:]
    return said[0]


def test_two_ranks_train_validate_count_and_resume(stream, tmp_path):
    untrained = tmp_path / "untrained.pt"
    write_untrained([str(stream), *map(str, STAGE[2:]), "--save-dir", str(tmp_path)], untrained)
    folder = tmp_path / "stage"
    train_on_two_ranks(stream, folder, 5, "--finetune-from-model", untrained)
    log = train_on_two_ranks(stream, folder, 7, "--finetune-from-model", untrained)
    assert "Loaded checkpoint" in log
    state = read_whole(folder / "checkpoint_last.pt")
    assert num_updates(state) == 7
    # Each validation token is charged once, though one rank ran a batch twice to keep the other company.
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    charged = [v.sum().item() for k, v in state["model"].items() if k.endswith("valid_tokens_E")]
    assert charged == [tokens, tokens]
    # 94 blocks make 12 batches of 8 (the last of 6): 6 a rank, 3 updates an epoch, each of 2 x 2 batches.
    blocks = -(-StreamFolder.open(stream).counts("mega_batch_3")["tokens"] // 32)
    processed = state["extra_state"]["AlmaLanguageModelingTask"]["processed"]["training"]["tokens"]
    assert 7 * 4 * 8 * 32 * 0.9 < processed <= 7 * 4 * 8 * 32
    assert blocks > 0

"""Two ranks on the CPU, with gloo: a stage, its validation, and its resume."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from fairseq_alma.checkpoints import num_updates, read_checkpoint
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.fairseq_train import write_untrained_checkpoint
from tests.commands import ROOT, STAGE
from tests.fairseq_alma.configs import config_of
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task

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
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[1][-3000:] + outputs[0][-3000:]
    return outputs[0]


def test_two_ranks_train_validate_count_and_resume(stream, tmp_path):
    untrained = tmp_path / "untrained.pt"
    words = [str(stream), *map(str, STAGE[2:]), "--save-dir", str(tmp_path)]
    write_untrained_checkpoint(config_of(words), untrained)
    folder = tmp_path / "stage"
    train_on_two_ranks(stream, folder, 5, "--finetune-from-model", untrained)
    log = train_on_two_ranks(stream, folder, 7, "--finetune-from-model", untrained)
    assert "Loaded checkpoint" in log
    state = read_checkpoint(folder / "checkpoint_last.pt")
    assert num_updates(state) == 7
    # Each validation token is charged once, although one rank scored a batch again while the other had one more.
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    charged = [v.sum().item() for k, v in state["model"].items() if k.endswith("valid_tokens_E")]
    assert charged == [tokens, tokens]
    # 94 blocks make 12 batches of 8 blocks (the last of 6): 6 batches for each rank, and 3 updates an epoch, each of 2
    # batches on each rank. 7 updates are 2 epochs, and the first 2 batches of each rank in the third.
    task = make_task(stream, "--mega-batches", "3")
    task.load_dataset("train")
    expected = {"tokens": 0, "token_pairs": 0}
    for epoch, num_batches in ((1, 6), (2, 6), (3, 2)):
        for rank in (0, 1):
            shard = batches(task, "train", epoch, seed=1, num_shards=2, shard_id=rank)  # 1: fairseq's default
            assert len(shard) == 6
            for rows, length in (batch["target"].shape for batch in shard[:num_batches]):
                expected["tokens"] += rows * length
                expected["token_pairs"] += rows * length**2
    assert state["extra_state"]["AlmaLanguageModelingTask"]["processed"]["training"] == expected

"""Start the ranks (processes) of a training or of a computation on this machine."""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from fairseq_alma import demo
from launch.warm import warm_start
from tests.commands import ROOT, STAGE, read_text
from tests.fairseq_alma.configs import config_of


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def member_commands(stream: Path, folder: Path, configs: Path, num_ranks: int, *options: object) -> list[list[str]]:
    """Return the command of each rank with which alma-lm would train a member in `folder`.

    Args:
        stream: the stream folder.
        folder: the folder of the member.
        configs: the folder to which the configuration of each rank is written.
        num_ranks: number of ranks.
        options: further options of fairseq-train.
    """
    port, commands = free_port(), []
    for rank in range(num_ranks):
        words = [
            stream, *STAGE[2:], "--mega-batches", 3, "--save-dir", folder, "--load-checkpoint-on-all-dp-ranks", "--cpu",
            "--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-world-size", num_ranks,
            "--distributed-rank", rank, "--distributed-no-spawn", "--distributed-backend", "gloo",
            "--ddp-backend", "legacy_ddp", *options,
        ]  # fmt: skip
        OmegaConf.save(config_of(list(map(str, words))), configs / f"rank_{rank}.yaml")
        program = [sys.executable, "-m", "fairseq_alma.lm.train_member"]
        commands.append([*program, str(configs / f"rank_{rank}.yaml"), "--checkpoint-minutes", "1000"])
    return commands


def run_ranks(commands: Sequence[list[str]], seconds: float = 200) -> list[str]:
    """Run a command for each rank at the same time, and return what each has printed. All of them must succeed."""
    start = warm_start(demo.SLOW_IMPORTS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(ROOT))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [
            start(words, file.fileno(), os.environ, file.fileno()) for words, file in zip(commands, files, strict=True)
        ]
        statuses = [process.wait(seconds) for process in processes]
        outputs = [read_text(file) for file in files]
    assert not any(statuses), "\n".join(output[-3000:] for output in outputs)
    return outputs

"""Helpers for tests that run commands, and settings that make runs small."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from fairseq_alma import demo
from launch.local import Start
from launch.warm import warm_start

ROOT = Path(__file__).parents[1]


MODULES = {
    "alma-deploy": "fairseq_alma.deploy",
    "alma-eval": "fairseq_alma.evaluation.cli",
    "alma-export": "fairseq_alma.huggingface.export",
    "alma-forget": "fairseq_alma.forget.cli",
    "alma-generate": "fairseq_alma.generate",
    "alma-grow": "fairseq_alma.growth.checkpoint",
    "alma-import": "fairseq_alma.huggingface.importing",
    "alma-lm": "fairseq_alma.lm.run",
    "fairseq-eval-lm": "fairseq_cli.eval_lm",
    "fairseq-generate": "fairseq_cli.generate",
    "fairseq-interactive": "fairseq_cli.interactive",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-validate": "fairseq_cli.validate",
}
"""Module of each command that imports fairseq, which takes seconds."""

VISION_IMPORTS = ("vision.cli", "sklearn.datasets", "tensorboardX")
"""Modules that alma-vision needs, and which take seconds to import. They do not import fairseq."""


def run_command(*command, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command that is installed in .venv, e.g. `fairseq-train`. By default, the folder is the repository.

    A command of MODULES is a real process, but it is a fork of a process that has imported fairseq (see launch.warm),
    and so are the training processes that it starts. Other tests run the installed scripts: those of the pages and
    test_killed.
    """
    name, *arguments = map(str, command)
    if name not in MODULES or not sys.platform.startswith("linux"):
        program = Path(sys.executable).parent / name
        return subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True)
    start = warm_start(demo.SLOW_IMPORTS)
    return _run_module(start, MODULES[name], arguments, folder)


def run_vision(*arguments, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run alma-vision as a fork of a process that has imported torch. By default, the folder is the repository."""
    return run_module("vision.cli", *arguments, folder=folder)


def run_module(module: str, *arguments, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run `python -m` in a folder as a fork of a process that has imported torch and alma-vision."""
    return _run_module(warm_start(VISION_IMPORTS), module, [*map(str, arguments)], folder)


def _run_module(start: Start, module: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run `python -m` with a module and its arguments in a folder."""
    words = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, contextlib.chdir(folder):
        status = start(words, output.fileno(), os.environ, errors.fileno()).wait()
        texts = [read_text(file) for file in (output, errors)]
    return subprocess.CompletedProcess(words, status, *texts)


def read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


STAGE = (
    "--user-dir", "fairseq_alma", "--task", "alma_lm", "--arch", "switch_lm_tiny", "--num-experts", 4,
    "--criterion", "switch_lm", "--tokens-per-sample", 32, "--batch-size", 8, "--optimizer", "adam",
    "--lr", 0.005, "--dropout", 0.0, "--best-checkpoint-metric", "ppl", "--no-epoch-checkpoints",
    "--log-format", "json", "--log-interval", 5, "--num-workers", 0,
)  # fmt: skip
"""Options of fairseq-train for a small stage, which a test can train quickly."""

RUN = (
    "preset=quickstart", "precision=float32", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8",
    "lr=0.005", "validations=2",
)  # fmt: skip
"""Settings of alma-lm for a small run. One stage on the test stream takes about a second."""

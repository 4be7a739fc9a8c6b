"""Helpers for tests that run commands, and settings that make runs small."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_command(*command, **options) -> subprocess.CompletedProcess:
    """Run a command that is installed in .venv, e.g. `fairseq-train`. The working directory is the repository."""
    program = Path(sys.executable).parent / command[0]
    return subprocess.run([str(program), *map(str, command[1:])], cwd=ROOT, capture_output=True, text=True, **options)


STAGE = (
    "--user-dir", "fairseq_alma", "--task", "alma_lm", "--arch", "switch_lm_tiny", "--num-experts", 4,
    "--criterion", "switch_lm", "--tokens-per-sample", 32, "--batch-size", 8, "--optimizer", "adam",
    "--lr", 0.005, "--dropout", 0.0, "--best-checkpoint-metric", "ppl", "--no-epoch-checkpoints",
    "--log-format", "json", "--log-interval", 5, "--num-workers", 0,
)  # fmt: skip
"""Options of fairseq-train for a small stage, which a test can train quickly."""

RUN = (
    "preset=quickstart", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8", "lr=0.005",
)  # fmt: skip
"""Settings of alma-lm for a small run. One stage on the test stream takes about a second."""

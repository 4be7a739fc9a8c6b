"""benchmarks/gpu.py: its commands work, here at tiny sizes on the CPU, and end in time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def measure(out: Path, *options: object) -> subprocess.CompletedProcess:
    words = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--quick", "--out", out, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_command_writes_to_a_file_of_its_own(tmp_path):
    done = measure(tmp_path, "--only", "lm_layer", "vision_cifar")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("lm_layer: done in ")
    assert "vision_cifar: left out, because it needs --data-root" in done.stdout
    assert "| ours, capacity 1 | " in (tmp_path / "lm_layer.txt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["lm_layer.txt"]


def test_a_command_that_takes_too_long_is_killed(tmp_path):
    done = measure(tmp_path, "--only", "lm_layer", "lm_eval", "--minutes", 0.01)
    assert done.returncode == 1
    killed, left_out = done.stdout.splitlines()
    assert killed.startswith("lm_layer: killed after 1 s")
    assert left_out == "lm_eval: left out, because the time is over"


@pytest.mark.slow
def test_all_commands_work(tmp_path, alma_data):
    done = measure(tmp_path, "--data-root", alma_data)
    assert done.returncode == 0, done.stdout + "".join(path.read_text()[-1000:] for path in tmp_path.iterdir())
    assert "target: 0.95" in (tmp_path / "lm_train_base.txt").read_text()
    assert "compiling, s" in (tmp_path / "lm_train_small_updates.txt").read_text()

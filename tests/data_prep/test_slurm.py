"""Tasks as jobs of a real Slurm, which the fixture `slurm` starts. Skipped where it cannot be started."""

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.usefixtures("slurm")


def command(out, books, *more):
    argv = [sys.executable, "-m", "data_prep", str(out), "--source", f"books:{books}", "--mega-batches", "3"]
    return [*argv, "--vocab-size", "400", "--seed", "0", "--workers", "2", *more]


def jobs():
    return subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True).stdout.split()


def test_a_cluster_makes_the_bytes_of_one_machine_also_after_the_command_was_killed(
    tmp_path, write_corpus, folder_bytes
):
    books = write_corpus(tmp_path / "books", num_files=40)
    subprocess.run(command(tmp_path / "here", books), check=True, capture_output=True)
    there = command(tmp_path / "there", books, "--executor", "slurm")
    process = subprocess.Popen(there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any((tmp_path / "there" / ".alma-prep").glob("cut/*.done")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = subprocess.run(there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert folder_bytes(tmp_path / "there") == folder_bytes(tmp_path / "here")
    assert not (tmp_path / "there" / ".alma-prep").exists()


@pytest.mark.slow
def test_a_job_that_ends_without_its_work_ends_the_command_with_its_reason(tmp_path, write_corpus):
    books = write_corpus(tmp_path / "books", num_files=40)
    argv = command(tmp_path / "out", books, "--executor", "slurm", "--slurm-partition", "nowhere")
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sbatch refused the job" in done.stderr
    # A worker that is killed on its node.
    process = subprocess.Popen(argv[:-2], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    alive = []
    while not alive and process.poll() is None:
        assert time.monotonic() < deadline
        alive = list((tmp_path / "out" / ".alma-prep").glob("*/[0-9]*.alive"))
        time.sleep(0.02)
    os.kill(json.loads(alive[0].read_text())["pid"], 9)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 2, errors
    assert "ended without finishing their work" in errors
    assert "Run the same command again to continue" in errors
    deadline = time.monotonic() + 20
    while any(name.startswith("alma-prep") for name in jobs()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not any(name.startswith("alma-prep") for name in jobs())  # nothing is left in the queue
    subprocess.run(argv[:-2], check=True, capture_output=True)


def test_inside_a_job_it_is_refused(tmp_path, write_corpus):
    books = write_corpus(tmp_path / "books", num_files=12)
    argv = command(tmp_path / "out", books, "--executor", "slurm")
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "1"})
    assert done.returncode == 2
    assert "must not be used inside a Slurm job" in done.stderr

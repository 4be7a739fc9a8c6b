"""launch/row.sbatch: the job of a row of Table 2. Slurm is simulated by its variables, its signals and a scontrol."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_alma.core.files import read_json
from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT
from tests.streams import make_stream

SCRIPT, PRESETS = Path("launch/row.sbatch"), Path("fairseq_alma/lm/configs/preset/table2")
ROWS = sorted(path.stem for path in (ROOT / PRESETS).glob("*.yaml"))

TINY = (
    "arch=switch_lm_tiny", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8", "updates=6",
    "validations=2",
)  # fmt: skip

ALMA_LM = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
def stop(*_):
    if "wait" in sys.argv[1:]:
        pathlib.Path("O/checkpoint_last.pt").touch()
    sys.exit(1)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
pathlib.Path("command").write_text("\\n".join([os.environ.get("SLURM_JOB_ID", "no job id"), *sys.argv[1:]]))
# In short steps, because Python calls `stop` for a signal that comes just before a sleep only when the sleep has ended.
for _ in range(600 if "wait" in sys.argv[1:] or "stuck" in sys.argv[1:] else 0):
    time.sleep(0.1)
sys.exit(7)
"""


def environment(**variables) -> dict[str, str]:
    """Return the environment of this process, without the variables of a Slurm job around it."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "ALMA_HOME"}
    return {**outside, **{name: str(value) for name, value in variables.items()}}


def bash(script, *arguments, **options) -> subprocess.CompletedProcess:
    """Run a script by bash."""
    return subprocess.run(["bash", str(script), *map(str, arguments)], capture_output=True, text=True, **options)


def copy_script(home: Path) -> None:
    """Copy the script, and the presets that it lists, into another repository."""
    shutil.copytree(ROOT / PRESETS, home / PRESETS)
    (home / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, home / SCRIPT)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with the script. The alma-lm and scontrol of its .venv write down their arguments."""
    home = tmp_path / "repository"
    copy_script(home)
    programs = home / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    (programs / "alma-lm").write_text(ALMA_LM)
    (programs / "scontrol").write_text('#!/bin/sh\necho "$*" >>scontrol\n')
    for name in ("alma-lm", "scontrol"):
        (programs / name).chmod(0o755)
    return home


def test_bash_can_read_the_script():
    assert bash("-n", ROOT / SCRIPT).returncode == 0


def test_what_the_job_asks_of_slurm():
    lines = (ROOT / SCRIPT).read_text().splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=alma_row", "--output=%x-%j.log", "--open-mode=append", "--nodes=1", "--ntasks=1",
        "--time=1-00:00:00", "--requeue", "--signal=B:USR1@120",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("gmoe_w9", "streams/books", "runs/gmoe"), ("../paper", "S", "O")])
def test_without_a_row_or_with_an_unknown_one_all_rows_are_listed(arguments):
    result = bash(ROOT / SCRIPT, *arguments, env=environment())
    assert result.returncode == 2
    assert f"the rows are {' '.join(ROWS)}\n" in result.stderr
    assert "usage: sbatch launch/row.sbatch ROW STREAM OUT" in result.stderr
    if arguments:
        assert f"{arguments[0]} is not a row of Table 2" in result.stderr
    assert len(ROWS) == 15


@pytest.mark.parametrize("arguments", [(), ("streams/books",)])
def test_missing_arguments_are_reported_with_the_usage(arguments):
    result = bash(ROOT / SCRIPT, "sm_w3", *arguments, env=environment())
    assert result.returncode == 2
    assert "STREAM and OUT are missing\nusage: sbatch launch/row.sbatch sm_w3 STREAM OUT" in result.stderr


def test_a_repository_that_is_not_set_up_or_not_found_is_reported(repository, tmp_path):
    shutil.rmtree(repository / ".venv")
    result = bash(repository / SCRIPT, "sm_w3", "S", "O", env=environment())
    assert (result.returncode, "run make setup" in result.stderr) == (2, True)
    result = bash(repository / SCRIPT, "sm_w3", "S", "O", env=environment(ALMA_HOME=tmp_path))
    assert (result.returncode, f"{tmp_path}/{PRESETS} is missing" in result.stderr) == (2, True)
    assert "set ALMA_HOME to the path of the repository" in result.stderr


@pytest.mark.parametrize("name", ROWS)
def test_here_and_under_slurm_the_script_runs_the_row(repository, tmp_path, name):
    """Slurm runs a copy of the script from another folder, in the folder of submission."""
    (tmp_path / "spool").mkdir()
    arguments = (name, "a stream", "out", "arch=switch_lm_large", "seed=1")
    ran = ["no job id", "stream=a stream", "out=out", f"preset=table2/{name}", *arguments[3:]]
    assert bash(repository / SCRIPT, *arguments, cwd=tmp_path, env=environment()).returncode == 7  # that of alma-lm
    assert (tmp_path / "command").read_text().splitlines() == ran
    spooled = shutil.copy(repository / SCRIPT, tmp_path / "spool/slurm_script")
    job = environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=repository)
    assert bash(spooled, *arguments, cwd=repository, env=job).returncode == 7
    assert (repository / "command").read_text().splitlines() == ["4711", *ran[1:]]  # for lease and provenance
    elsewhere = environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=tmp_path, ALMA_HOME=repository)
    assert bash(spooled, *arguments, cwd=tmp_path, env=elsewhere).returncode == 7
    assert not (repository / "scontrol").exists()  # a job that fails by itself would fail again


def run_until_signal(repository: Path, what_alma_lm_does: str, number: int) -> subprocess.Popen:
    (repository / "command").unlink(missing_ok=True)
    job = subprocess.Popen(
        ["bash", str(SCRIPT), "gens_w1", "S", "O", what_alma_lm_does],
        cwd=repository,
        env=environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=repository),
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not (repository / "command").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    job.send_signal(number)
    return job


@pytest.mark.parametrize(("signal_number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_at_its_time_limit_stops_alma_lm_and_is_requeued(repository, signal_number, requeued):
    """A job that is cancelled stops alma-lm too, and is not requeued."""
    job = run_until_signal(repository, "wait", signal_number)
    errors = job.communicate(timeout=30)[1]
    assert job.returncode == 1  # the exit status of an interrupted alma-lm
    assert ("gens_w1 reached its time limit; job 4711 is requeued" in errors) == requeued
    assert (repository / "scontrol").exists() == requeued
    if requeued:
        assert (repository / "scontrol").read_text() == "requeue 4711\n"


def test_a_job_that_never_gets_anywhere_is_not_requeued_for_ever(repository):
    for number in (1, 2, 3):
        errors = run_until_signal(repository, "stuck", signal.SIGUSR1).communicate(timeout=30)[1]
        assert "job 4711 is requeued" in errors, number
    errors = run_until_signal(repository, "stuck", signal.SIGUSR1).communicate(timeout=30)[1]
    assert "reached its time limit 4 times without a checkpoint or a finished step; job 4711 is not requeued" in errors
    assert "Give it more time (sbatch --time=...)" in errors
    assert (repository / "scontrol").read_text().splitlines() == ["requeue 4711"] * 3
    # A checkpoint in between starts the count again.
    for what in ("stuck", "stuck", "wait", "stuck", "stuck", "stuck"):
        errors = run_until_signal(repository, what, signal.SIGUSR1).communicate(timeout=30)[1]
        assert "job 4711 is requeued" in errors


@pytest.mark.slow
def test_gmoe_runs_here_at_the_tiny_arch(tmp_path):
    if not (Path(sys.prefix) / "bin/activate").exists():
        pytest.skip("this interpreter is not that of a virtual environment")
    home = tmp_path / "repository"
    copy_script(home)
    (home / ".venv").symlink_to(sys.prefix)
    make_stream(tmp_path / "stream")
    result = bash(home / SCRIPT, "gmoe_w1", "stream", "runs/gmoe", *TINY, cwd=tmp_path, env=environment())
    assert result.returncode == 0, result.stderr[-3000:]
    rows = Ledger(tmp_path / "runs/gmoe/ledger.jsonl").rows()
    assert [r.scores.num_experts for r in rows] == [4, 4, 6, 8]
    assert [r.spent.num_updates for r in rows] == [0, 6, 6, 6]
    assert read_json(tmp_path / "runs/gmoe/settings.json")["preset"] == "table2/gmoe_w1"

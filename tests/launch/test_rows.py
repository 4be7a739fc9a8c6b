"""launch/table2: the scripts of the paper's rows. Slurm itself is played by its variables, signals and a scontrol."""

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

SCRIPTS = sorted((ROOT / "launch/table2").glob("*.sbatch"))
PRESETS = sorted((ROOT / "fairseq_alma/lm/configs/preset/table2").glob("*.yaml"))

TINY = (
    "arch=switch_lm_tiny", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8", "updates=6",
    "validations=2",
)  # fmt: skip

ALMA_LM = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only the interrupt ends it
try:
    pathlib.Path("command").write_text("\\n".join([os.environ.get("SLURM_JOB_ID", "no job id"), *sys.argv[1:]]))
    time.sleep(60 if "wait" in sys.argv[1:] else 0)
except KeyboardInterrupt:
    sys.exit(1)
sys.exit(7)
"""


def environment(**variables) -> dict[str, str]:
    """This process's, without what a Slurm job around it would set."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "ALMA_HOME"}
    return {**outside, **{name: str(value) for name, value in variables.items()}}


def row(script, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", str(script), *map(str, arguments)], capture_output=True, text=True, **options)


@pytest.fixture
def repository(tmp_path) -> Path:
    """The scripts in a repository of their own, whose .venv has an alma-lm and a scontrol that note their arguments."""
    home = tmp_path / "repository"
    shutil.copytree(ROOT / "launch/table2", home / "launch/table2")
    programs = home / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    (programs / "alma-lm").write_text(ALMA_LM)
    (programs / "scontrol").write_text('#!/bin/sh\necho "$*" >>scontrol\n')
    for name in ("alma-lm", "scontrol"):
        (programs / name).chmod(0o755)
    return home


def test_every_preset_has_one_script_and_every_script_its_preset():
    assert [path.stem for path in SCRIPTS] == [path.stem for path in PRESETS]
    assert len(SCRIPTS) == 15
    for path in SCRIPTS:
        assert path.read_text().count(path.stem) == 2  # the job's name, and the row that is run


def test_the_scripts_differ_in_their_row_only():
    assert len({path.read_text().replace(path.stem, "ROW") for path in SCRIPTS}) == 1


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / "launch/table2/row.sh"], ids=lambda path: path.name)
def test_bash_can_read_it(path):
    assert row("-n", path).returncode == 0


@pytest.mark.parametrize("arguments", [(), ("streams/books",)])
def test_missing_arguments_are_told_with_the_usage(arguments):
    for path in SCRIPTS:
        result = row(path, *arguments, env=environment())
        assert result.returncode == 2
        assert f"usage: sbatch launch/table2/{path.name} STREAM OUT" in result.stderr


def test_a_repository_that_is_not_set_up_or_not_found_is_told(repository, tmp_path):
    shutil.rmtree(repository / ".venv")
    result = row(repository / "launch/table2/sm_w3.sbatch", "S", "O", env=environment())
    assert (result.returncode, "run make setup" in result.stderr) == (2, True)
    result = row(repository / "launch/table2/sm_w3.sbatch", "S", "O", env=environment(ALMA_HOME=tmp_path))
    assert (result.returncode, f"{tmp_path}/launch/table2/row.sh" in result.stderr) == (2, True)


def test_here_and_under_slurm_a_script_runs_its_row(repository, tmp_path):
    """Slurm runs a copy from elsewhere, in the folder of submission; paths given are relative to that."""
    (tmp_path / "spool").mkdir()
    settings = ("a stream", "out", "arch=switch_lm_large", "seed=1")
    for path in SCRIPTS:
        ran = ["no job id", "stream=a stream", "out=out", f"preset=table2/{path.stem}", *settings[2:]]
        here = repository / "launch/table2" / path.name
        assert row(here, *settings, cwd=tmp_path, env=environment()).returncode == 7  # alma-lm's own
        assert (tmp_path / "command").read_text().splitlines() == ran
        spooled = shutil.copy(here, tmp_path / "spool/slurm_script")
        job = environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=repository)
        assert row(spooled, *settings, cwd=repository, env=job).returncode == 7
        assert (repository / "command").read_text().splitlines() == ["4711", *ran[1:]]  # for lease and provenance
        elsewhere = environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=tmp_path, ALMA_HOME=repository)
        assert row(spooled, *settings, cwd=tmp_path, env=elsewhere).returncode == 7
    assert not (repository / "scontrol").exists()  # a job that fails by itself would fail again


@pytest.mark.parametrize(("signal_number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_out_of_time_stops_alma_lm_and_goes_back_into_the_queue(repository, signal_number, requeued):
    """A job that is cancelled, or preempted, stops it too, and leaves the rest to Slurm."""
    job = subprocess.Popen(
        ["bash", "launch/table2/gens_w1.sbatch", "S", "O", "wait"],
        cwd=repository,
        env=environment(SLURM_JOB_ID=4711, SLURM_SUBMIT_DIR=repository),
        stderr=subprocess.PIPE,
        text=True,
        # As Slurm starts it, wherever this suite runs: the background of a shell would hand on an ignored interrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    end = time.monotonic() + 30
    while not (repository / "command").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    job.send_signal(signal_number)
    said = job.communicate(timeout=30)[1]
    assert job.returncode == 1  # what alma-lm ends with when it is interrupted
    assert ("job 4711 goes back into the queue" in said) == requeued
    assert (repository / "scontrol").exists() == requeued
    if requeued:
        assert (repository / "scontrol").read_text() == "requeue 4711\n"


def test_gmoe_runs_here_at_the_tiny_arch(tmp_path):
    if not (Path(sys.prefix) / "bin/activate").exists():
        pytest.skip("this interpreter is not that of a virtual environment")
    home = tmp_path / "repository"
    shutil.copytree(ROOT / "launch/table2", home / "launch/table2")
    (home / ".venv").symlink_to(sys.prefix)
    make_stream(tmp_path / "stream")
    script = home / "launch/table2/gmoe_w1.sbatch"
    result = row(script, "stream", "runs/gmoe", *TINY, cwd=tmp_path, env=environment())
    assert result.returncode == 0, result.stderr[-3000:]
    rows = Ledger(tmp_path / "runs/gmoe/ledger.jsonl").rows()
    assert [r.scores.num_experts for r in rows] == [4, 4, 6, 8]
    assert [r.spent.num_updates for r in rows] == [0, 6, 6, 6]
    assert read_json(tmp_path / "runs/gmoe/settings.json")["preset"] == "table2/gmoe_w1"

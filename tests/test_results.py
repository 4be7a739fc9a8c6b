"""What results/ and README.md show follows from the committed ledgers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """(folder, names of the files in it) of what one command makes."""
    out = tmp_path_factory.mktemp("rebuilt")
    command = [sys.executable, "-W", "ignore", "results/rebuild.py", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout.split()


def test_one_command_rebuilds_every_table_and_every_text_as_it_is_committed(rebuilt):
    out, names = rebuilt
    texts = [name for name in names if name.endswith(".md")]
    assert {"README.md", "results/books/claims.md", "results/mnist/mnist_B500/summary.md"} <= set(texts)
    differing = [name for name in texts if (out / name).read_text() != (ROOT / name).read_text()]
    assert differing == [], "run `make results`"


def test_every_committed_figure_is_one_that_is_rebuilt(rebuilt):
    out, names = rebuilt
    figures = {name for name in names if name.endswith(".png")}
    committed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "results").rglob("*.png")}
    assert committed == figures
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in figures)


def test_the_readme_shows_the_figures_that_it_should():
    text = (ROOT / "README.md").read_text()
    for figure in ("over_the_stream", "against_compute", "running_average"):
        assert f"/{figure}.png)" in text


def test_the_ledgers_of_a_study_are_run_folders_that_a_report_reads(tmp_path):
    from fairseq_alma.report.runs import read_runs

    shutil.copytree(ROOT / "results/demo/ledgers", tmp_path / "runs")
    found = read_runs([tmp_path / "runs"])
    assert not found.faults
    assert [run.learner for run in found.comparisons[0].runs] == ["sm", "sm", "ens", "gmoe"]
    assert all(run.command for run in found.comparisons[0].runs)

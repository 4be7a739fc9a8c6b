"""The tables and figures in results/ and README.md follow from the committed ledgers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.catalogue import NOT_COMPARED, SEED_SETTINGS, UNRECORDED, takes
from fairseq_alma.core.settings import defaults_of
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.report.reading import read_runs
from vision.settings import VisionSettings

ROOT = Path(__file__).parents[1]


def rebuilt(out: Path, *options: str) -> list[str]:
    """Run `results/rebuild.py` with the output folder `out` and return the names of the files in it."""
    command = [sys.executable, "-W", "ignore", "results/rebuild.py", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_one_command_rebuilds_every_committed_table_and_text(tmp_path):
    """Without the figures, which take most of the time. The next test draws them."""
    check_texts(tmp_path, rebuilt(tmp_path, "--tables-only"))


def check_texts(out: Path, names: list[str]) -> None:
    """Check that the rebuilt texts are the committed ones."""
    texts = [name for name in names if name.endswith(".md")]
    assert {"README.md", "results/books/claims.md", "results/mnist/mnist_B500/summary.md"} <= set(texts)
    differing = [name for name in texts if (out / name).read_text() != (ROOT / name).read_text()]
    assert differing == [], "run `make results`"


@pytest.mark.slow
def test_the_committed_figures_are_those_that_are_rebuilt(tmp_path):
    """Slow because 38 figures are drawn. The tests of alma-report draw figures of every kind in the quick suite."""
    names = rebuilt(tmp_path)
    check_texts(tmp_path, names)
    figures = {name for name in names if name.endswith(".png")}
    committed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "results").rglob("*.png")}
    assert committed == figures
    # Not compared byte for byte: another version of matplotlib or of its fonts draws other bytes.
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in figures)


def test_the_readme_and_the_pages_show_the_main_figures():
    assert "/over_the_stream.png)" in (ROOT / "README.md").read_text()
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for figure in ("over_the_stream", "against_compute", "running_average"):
        assert f"/{figure}.png)" in pages


def test_a_report_reads_the_committed_ledgers_of_a_study(tmp_path):
    shutil.copytree(ROOT / "results/demo/ledgers", tmp_path / "runs")
    data = read_runs([tmp_path / "runs"])
    assert not data.errors
    assert [group.learner for group in data.comparisons[0].groups] == ["sm", "sm", "sm", "ens", "gmoe"]
    assert all(group.command for group in data.comparisons[0].groups)


def test_settings_that_committed_runs_do_not_have_are_known_to_the_reports():
    """A run from before a setting existed had what is now the default of the setting, whatever other runs have."""
    checked = set()
    for path in (ROOT / "results").rglob("settings.json"):
        settings = json.loads(path.read_text())
        half = "vision" if "dataset" in settings else "language model"
        kind = VisionSettings if half == "vision" else LanguageModelSettings
        for name, default in defaults_of(kind).items():
            is_compared = takes(half, settings["learner"], name) and name not in (*NOT_COMPARED, *SEED_SETTINGS)
            if is_compared and name not in settings:
                checked.add((half, name, default))
    wrong = {one for one in checked if one[2] != UNRECORDED[one[0]].get(one[1], "missing")}
    assert wrong == {("language model", "precision", "auto")}  # before, there was only float32
    assert ("vision", "label_smoothing", 0.0) in checked

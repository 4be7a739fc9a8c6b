"""The tables and figures in results/ and README.md follow from the committed ledgers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.catalogue import all_settings, not_compared, takes
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import tables_of
from tests.studies import study_module
from vision.settings import VisionSettings

ROOT = Path(__file__).parents[1]


def rebuilt(out: Path, *options: str) -> list[str]:
    """Run `results/rebuild.py` with the output folder `out` and return the names of the files in it."""
    command = [sys.executable, "-W", "ignore", "results/rebuild.py", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_the_committed_tables_of_a_study_follow_from_its_ledgers():
    """The next test rebuilds those of all studies, which takes half a minute."""
    data = read_runs([ROOT / "results/demo/ledgers"])
    assert not data.errors and not data.notes
    for comparison in data.comparisons:
        tables = {f"{table.name}.md": table.markdown() for table in tables_of(comparison, all_numbers(comparison))}
        folder = ROOT / "results/demo" / comparison.slug
        assert {path.name for path in folder.glob("*.md")} == tables.keys()
        assert [name for name in tables if (folder / name).read_text() != tables[name]] == [], "run `make results`"


@pytest.mark.slow
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


def test_paths_of_the_machine_and_nothing_else_are_changed_in_committed_ledgers(tmp_path):
    grid = study_module("_grid.py")
    run = tmp_path / "studies" / "books" / "sm"
    run.mkdir(parents=True)
    paths = {"data": str(tmp_path / "data"), "file": str(tmp_path / "data" / "a.txt"), "other": f"{tmp_path}/data_2"}
    content = {"perplexity": 280.65, "name": "books", "out": str(run), "stream": f"{ROOT}/runs/books", **paths}
    for name in ("settings.json", "provenance.json", "summary.json"):
        (run / name).write_text(json.dumps(content))
    (run / "ledger.jsonl").touch()
    grid.copy_results(run, tmp_path / "copy", str(tmp_path / "data"), tmp_path / "studies" / "books")
    changed = {"data": "data", "file": "data/a.txt", "out": "runs/books/sm", "stream": "runs/books"}
    assert json.loads((tmp_path / "copy" / "provenance.json").read_text()) == content | changed


def test_a_report_reads_the_committed_ledgers_of_a_study(tmp_path):
    shutil.copytree(ROOT / "results/demo/ledgers", tmp_path / "runs")
    data = read_runs([tmp_path / "runs"])
    assert not data.errors
    assert [group.learner for group in data.comparisons[0].groups] == ["sm", "sm", "sm", "ens", "gmoe"]
    assert all(group.command for group in data.comparisons[0].groups)


def committed_settings() -> list[tuple[Path, dict]]:
    """Return the settings of all committed runs, but those of plugins, whose learners this process does not know."""
    found = [(path, json.loads(path.read_text())) for path in sorted((ROOT / "results").rglob("settings.json"))]
    return [(path, settings) for path, settings in found if settings.get("plugin") is None]


def test_committed_runs_have_the_settings_of_today():
    """Each setting that a run of the learner has, and no other key but those that describe the data."""
    for path, settings in committed_settings():
        half = "vision" if "dataset" in settings else "language model"
        expected = {one.name for one in all_settings(half) if takes(half, settings["learner"], one.name)}
        assert expected <= settings.keys(), path
        assert all(not_compared(name) or name.endswith("_digest") for name in settings.keys() - expected), path


def test_committed_runs_can_be_made_with_the_settings_of_today():
    for _, settings in committed_settings()[::20]:
        kind = VisionSettings if "dataset" in settings else LanguageModelSettings
        known = {one.name for one in all_settings(kind.program)}
        again = kind.from_mapping({name: value for name, value in settings.items() if name in known})
        assert again.to_json().items() <= settings.items()

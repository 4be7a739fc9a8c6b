"""The learner of docs/extending.md: short, its settings are recorded and swept, and its source belongs to the run."""

import pytest

from fairseq_alma.core.files import read_json
from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT, run_vision
from tests.docs.blocks import blocks_of

BLOCKS = {block.argument: block.text for block in blocks_of(ROOT / "docs/extending.md") if block.action == "save"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shrink.py").write_text(BLOCKS["shrink.py"])
    return tmp_path


def test_the_learner_has_two_settings_of_its_own_in_under_40_lines():
    assert BLOCKS["shrink.py"].count("\n") < 40


@pytest.mark.slow  # tests/vision/test_run.py sweeps the settings of another plugin
def test_its_settings_are_swept_and_recorded_and_make_it_another_learner_than_sm(folder):
    common = ("dataset=digits", "mega_batches=4", "epochs=2")
    swept = run_vision("-m", "plugin=shrink", "learner=shrink", "shrink=0.4,0.8", *common, "out=sweep", folder=folder)
    assert swept.returncode == 0, swept.stderr[-3000:]
    runs = [path.parent for path in sorted((folder / "sweep").rglob("settings.json"))]
    recorded = [read_json(run / "settings.json") for run in runs]
    assert [(one["learner"], one["shrink"], one["noise"]) for one in recorded] == [
        ("shrink", 0.4, 0.1),
        ("shrink", 0.8, 0.1),
    ]
    alone = run_vision("learner=sm", *common, "out=sm", folder=folder)
    assert alone.returncode == 0, alone.stderr[-3000:]
    errors = [[row.scores.error_rate for row in Ledger(run / "ledger.jsonl").rows()] for run in (*runs, folder / "sm")]
    assert errors[0][:2] == errors[1][:2] == errors[2][:2]  # they differ from the second stage on
    assert errors[0][2:] != errors[2][2:]


@pytest.mark.slow
def test_after_an_edit_of_the_plugin_the_old_run_folder_is_refused(folder):
    command = ("plugin=shrink", "learner=shrink", "dataset=digits", "mega_batches=2", "epochs=1", "out=run")
    assert run_vision(*command, folder=folder).returncode == 0
    (folder / "shrink.py").write_text(
        BLOCKS["shrink.py"].replace("alpha=self.learner_settings.noise", "alpha=-self.learner_settings.noise")
    )
    refused = run_vision(*command, folder=folder)
    assert refused.returncode == 2
    assert "plugin" in refused.stderr


def test_a_preset_without_its_first_line_is_refused(tmp_path):
    (tmp_path / "conf/preset").mkdir(parents=True)
    (tmp_path / "conf/preset/mine.yaml").write_text("# mine\n# @package _global_\nlearner: ens\n")
    result = run_vision("--config-dir", "conf", "preset=mine", "dataset=digits", "out=run", folder=tmp_path)
    assert result.returncode == 2
    assert "'# @package _global_'" in result.stderr

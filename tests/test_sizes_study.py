"""The study of the size of the model, results/frontier/sizes.py."""

from types import SimpleNamespace

import pytest

from fairseq_alma.checkpoints import require_checkpoint
from tests.commands import run_command
from tests.streams import make_stream
from tests.studies import study_module


@pytest.fixture(scope="module")
def study():
    return study_module("frontier/sizes.py")


def test_the_grid_of_a_width_is_that_of_the_tiny_model_over_the_width(study):
    wide, narrow = (study.SizeStudy.recipes[f"width_{width}_no_average"] for width in (256, 64))
    assert wide.grid == {"lr": ("0.0025", "0.00125", "0.005"), "warmup": ("40",)}
    assert narrow.grid["lr"] == ("0.01", "0.005", "0.02")
    assert wide.as_for == "width_256_anytime"
    assert study.rivals.RECIPES["no_average"].settings == wide.settings[:-1]
    assert [one.stream for one in study.STUDIES] == ["sotu", "books_1"]


@pytest.mark.parametrize("width", [64, 256])
def test_a_model_has_the_width(study, tmp_path, width):
    stream = make_stream(tmp_path / "markov")
    recipe = study.SizeStudy.recipes[f"width_{width}_anytime"]
    settings = [
        *study.SELECTED_ON.common, "dropout=0", "mega_batches=1", "updates=1",
        *recipe.arguments({"lr": "0.01", "warmup": "0"}),
    ]  # fmt: skip
    result = run_command("alma-lm", f"stream={stream}", f"out={tmp_path / 'run'}", *settings)
    assert result.returncode == 0, result.stderr[-2000:]
    state = require_checkpoint(tmp_path / "run/stages/stage_001/member_1/checkpoint_best.pt")["model"]
    assert state["decoder.embed_tokens.weight"].shape[1] == width


def run(level, parameters):
    scores = SimpleNamespace(num_params=parameters, bits_per_byte=level)
    return [SimpleNamespace(t=t, scores=scores) for t in range(5)]


def test_the_table_has_differences_and_their_slope(study, monkeypatch):
    runs = {
        "books_1_rival_anytime": {0: run(1, 10**6), 1: run(2, 10**6)},
        "books_1_rival_sm": {0: run(2, 10**6), 1: run(4, 10**6), 2: run(9, 10**6)},
        "books_1_rival_width_256_anytime": {0: run(3, 10**7)},
        "books_1_rival_width_256_sm": {0: run(4, 10**7)},
    }
    monkeypatch.setattr(study.SizeStudy, "rows_by_seed", lambda self, name: runs.get(name, {}))
    text = study.tables()["sizes.md"]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| books")
    ]
    assert rows == [
        ["books, one pass", "128", "1.0M", "-50.0 ± 0.0", "", "", "", "2"],
        ["books, one pass", "256", "10.0M", "-25.0", "", "", "", "1"],
        ["books, one pass", "slope", "", "+25.0 ± 0.0", "", "", "", ""],
    ]
    runs.clear()
    assert study.tables() == {}


def test_the_error_of_a_slope(study):
    # The residuals of the line y = x through these points are -1, 1, 1, -1, so s^2 = 4 / 2, and the spread of x is 4.
    assert study.slope_text([(0, -1), (0, 1), (2, 3), (2, 1)]) == "+1.0 ± 0.7"
    assert study.slope_text([(0, 1), (0, 2), (0, 3)]) == ""

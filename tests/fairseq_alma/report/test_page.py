import json
import re
import subprocess
import sys

import pytest

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import comparison_data, curve, page
from fairseq_alma.report.runs import read_runs
from tests.fairseq_alma.report.ledgers import write_text, write_vision

HOSTILE = "</script><script>alert(1)</script><!--<b>&amp;\u2028'\""


def data_in(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_all_that_it_needs(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.25], wait=2, wall_seconds=90, command=["alma-vision", "lr=0.1"])
    text = page(read_runs([tmp_path]))
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"'](?!data:)", outside)  # no file beside it, nothing from a network
    [comparison] = data_in(text)["comparisons"]
    [run] = comparison["runs"]
    assert (comparison["name"], comparison["vision"], comparison["B"]) == ("mnist, B = 2", True, 2)
    assert (run["quality"], run["final"], run["score"]) == ([0.75, None], [0.25, None], 1.15)
    assert (run["comp"], run["params"], run["mem"], run["wall_text"]) == (200, 10, 30, "1 min 30 s")
    assert run["command"] == ["alma-vision", "lr=0.1"]
    assert (run["t"], run["y"]) == ([0, 1, 2], [0.9, 0.5, 0.25])


def test_text_from_settings_is_escaped(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, dataset=f"m{HOSTILE}", command=[HOSTILE])
    (tmp_path / "empty <img src=x onerror=alert(1)>").mkdir()
    text = page(read_runs([tmp_path / "a", tmp_path / "empty <img src=x onerror=alert(1)>"]))
    assert "alert(1)</script>" not in text
    assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    [comparison] = data_in(text)["comparisons"]
    assert comparison["runs"][0]["command"] == [HOSTILE]
    assert comparison["common"]["knob"] == HOSTILE


def test_what_is_no_number_is_null(tmp_path):
    write_text(tmp_path / "a", [900.0, float("inf"), 50.0], validations=[900.0, float("nan"), 60.0])
    [run] = data_in(page(read_runs([tmp_path])))["comparisons"][0]["runs"]
    assert run["y"] == [900.0, None, 50.0]
    assert run["score"] is None
    assert run["quality"] == ["\0infinite", None]  # the script makes the number of it


def test_a_curve_is_kept_where_it_changes(tmp_path):
    for seed in (0, 1):
        write_vision(tmp_path / str(seed), [0.9, 0.9, 0.9, 0.5, *[0.5] * 10, 0.4], wait=3, seed=seed)
    [run] = read_runs([tmp_path]).comparisons[0].runs
    assert curve(run, 100) == ([0, 3, 14], [0.9, 0.5, 0.4], [0.0, 0.0, 0.0])


def test_a_short_curve_has_every_arrival_as_it_is_drawn_by_straight_lines(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.9, 0.9, 0.9, 0.3], wait=4)
    [run] = read_runs([tmp_path]).comparisons[0].runs
    assert curve(run, 100)[:2] == ([0, 1, 2, 3, 4], [0.9, 0.9, 0.9, 0.9, 0.3])


def test_scores_are_not_rounded_as_runs_are_chosen_by_them(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5734491])
    [run] = data_in(page(read_runs([tmp_path])))["comparisons"][0]["runs"]
    assert run["score"] == 0.5734491


def test_what_only_one_learner_takes_is_shown_with_its_run(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.4], learner="gmoe", grow_every=7, hard_gates=True)
    [comparison] = data_in(page(read_runs([tmp_path])))["comparisons"]
    own = {run["learner"]: run["own"] for run in comparison["runs"]}
    assert own == {"SM": {}, "gMoE": {"experts": "1", "grow_every": "7", "hard_gates": "yes"}}
    assert "width" in comparison["common"]


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path):
    write_vision(tmp_path / "a", [0.9 - t / 2000 for t in range(501)])
    [run] = read_runs([tmp_path]).comparisons[0].runs
    t, y, _ = curve(run, 50)
    assert len(t) == 50
    assert (t[0], t[-1], y[-1]) == (0, 500, pytest.approx(0.65))


def test_it_reloads_itself_only_while_it_is_watched(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    found = read_runs([tmp_path])
    assert 'data-reload="5"' in page(found, reload_seconds=5)
    assert "data-reload" not in re.sub(r"<script>.*?</script>", "", page(found), flags=re.DOTALL)


def test_what_was_left_out_is_on_the_page(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    bad = write_vision(tmp_path / "b", [0.9, 0.5])
    (bad / "ledger.jsonl").write_text("{\n")
    assert f"{bad / 'ledger.jsonl'}, line 1 is damaged" in page(read_runs([tmp_path]))


def test_the_data_of_a_comparison(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.25])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.2], wait=2)
    [comparison] = read_runs([tmp_path]).comparisons
    data = comparison_data(comparison)
    assert data["filters"] == [{"name": "wait", "values": ["1", "2"]}]
    assert [run["settings"] for run in data["runs"]] == [{"wait": "1"}, {"wait": "2"}]
    assert [run["others"] for run in data["runs"]] == [[["wait", 1]], [["wait", 0]]]
    assert [run["score"] for run in data["runs"]] == [one.validation_score for one in all_numbers(comparison)]


def test_a_report_needs_neither_torch_nor_fairseq():
    code = "import sys, fairseq_alma.report.cli; print({'torch', 'fairseq', 'hydra', 'sklearn'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr

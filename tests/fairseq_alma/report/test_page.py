import json
import re
import subprocess
import sys

import pytest

from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.page import comparison_data, curve, page
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.ledgers import write_text, write_vision

HOSTILE = "</script><script>alert(1)</script><!--<b>&amp;\u2028'\""


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_all_that_it_needs(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.25], wait=2, wall_seconds=90, command=["alma-vision", "lr=0.1"])
    text = page(read_runs([tmp_path]))
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"'](?!data:)", outside)  # no second file, nothing from a network
    [comparison] = data_of(text)["comparisons"]
    [group] = comparison["groups"]
    assert (comparison["name"], comparison["vision"], comparison["B"]) == ("mnist, B = 2", True, 2)
    assert group["quality"] == [0.75, None]
    assert group["score"] == {"all": [(0.9 + 0.25) / 2, None], "after": [0.25, None], "final": [0.25, None]}
    assert group["value"] == {"all": [0.375, None], "after": [0.25, None], "final": [0.25, None]}
    assert (group["comp"], group["params"], group["mem"], group["wall_text"]) == (200, 10, 30, "1 min 30 s")
    assert group["command"] == ["alma-vision", "lr=0.1", "out=runs/a"]
    assert (group["t"], group["mean"]) == ([0, 1, 2], [0.9, 0.5, 0.25])


def test_text_from_settings_is_escaped(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], learner=HOSTILE, knob=HOSTILE, dataset=f"m{HOSTILE}", command=[HOSTILE])
    (tmp_path / "empty <img src=x onerror=alert(1)>").mkdir()
    text = page(read_runs([tmp_path / "a", tmp_path / "empty <img src=x onerror=alert(1)>"]))
    assert "alert(1)</script>" not in text
    assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    [comparison] = data_of(text)["comparisons"]
    assert comparison["groups"][0]["command"] == [HOSTILE]
    assert comparison["common_settings"]["knob"] == HOSTILE


def test_values_without_a_number_in_json_are_null(tmp_path):
    write_text(tmp_path / "a", [900.0, float("inf"), 50.0], validations=[900.0, float("nan"), 60.0])
    [group] = data_of(page(read_runs([tmp_path])))["comparisons"][0]["groups"]
    assert group["mean"] == [None, 50.0]
    assert group["score"] == {"all": [None, None], "after": [None, None], "final": [60.0, None]}
    assert group["quality"] == [None, None]


def test_a_curve_is_kept_where_it_changes(tmp_path):
    for seed in (0, 1):
        write_vision(tmp_path / str(seed), [0.9, 0.9, 0.9, 0.5, *[0.5] * 10, 0.4], wait=3, seed=seed)
    [group] = read_runs([tmp_path]).comparisons[0].groups
    assert curve(group, 100) == {"t": [0, 3, 14], "mean": [0.9, 0.5, 0.4], "error": [0.0, 0.0, 0.0]}


def test_a_short_curve_has_every_arrival_because_it_is_drawn_with_straight_lines(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.9, 0.9, 0.9, 0.3], wait=4)
    [group] = read_runs([tmp_path]).comparisons[0].groups
    assert curve(group, 100) == {"t": [0, 1, 2, 3, 4], "mean": [0.9, 0.9, 0.9, 0.9, 0.3], "error": None}


def test_a_setting_that_only_one_learner_takes_is_shown_with_its_run(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    write_vision(tmp_path / "b", [0.9, 0.4], learner="gmoe", grow_every=7, hard_gates=True)
    [comparison] = data_of(page(read_runs([tmp_path])))["comparisons"]
    own = {group["learner"]: group["settings"] for group in comparison["groups"]}
    gmoe = {"learner": "gmoe", "experts": "1", "grow_every": "7", "hard_gates": "yes"}
    assert own == {"SM": {"learner": "sm"}, "gMoE": gmoe}
    assert "width" in comparison["common_settings"]


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path):
    write_vision(tmp_path / "a", [0.9 - t / 2000 for t in range(501)])
    [group] = read_runs([tmp_path]).comparisons[0].groups
    t, y = (curve(group, 50)[name] for name in ("t", "mean"))
    assert len(t) == 50
    assert (t[0], t[-1], y[-1]) == (0, 500, pytest.approx(0.65))


def test_the_page_reloads_itself_only_while_it_is_watched(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5])
    data = read_runs([tmp_path])
    assert 'data-reload="5"' in page(data, reload_seconds=5)
    assert "data-reload" not in re.sub(r"<script>.*?</script>", "", page(data), flags=re.DOTALL)


def test_skipped_runs_are_on_the_page(tmp_path):
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
    assert [group["settings"] for group in data["groups"]] == [{"wait": "1"}, {"wait": "2"}]
    assert [objective["ranking"] for objective in data["objectives"].values()] == [[0, 1], [1, 0], [1, 0]]
    assert data["columns"][:2] == ["seeds", "CER"] and data["groups"][0]["cells"][:2] == ["1", "0.75"]
    assert [group["score"]["all"][0] for group in data["groups"]] == [
        numbers.validation_score for numbers in all_numbers(comparison)
    ]


def test_a_report_needs_neither_torch_nor_fairseq():
    code = "import sys, fairseq_alma.report.cli; print({'torch', 'fairseq', 'hydra', 'sklearn'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr

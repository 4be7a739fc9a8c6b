"""A process of alma-vision that sleeps while another one finishes its run, and wakes up: it changes nothing."""

import sys
from collections import Counter

import pytest

import vision.runs
from tests.late_writers import late_writers
from tests.vision.test_killed import FF, GENS, GMOE, same_run
from tests.vision.tiny_runs import small_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="audit events and process states as on Linux")

SETTINGS = {"gens": GENS, "gmoe": GMOE, "ff": {**FF, "candidates": 5}}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_that_wakes_up_late_changes_nothing(tmp_path, monkeypatch, name, every):
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0)

    def run(out):
        small_run(out, **{"mega_batches": 2, **SETTINGS[name]}, epochs=1)

    run(tmp_path / "warm")  # imports modules before the forks
    runs = tmp_path / "runs"
    runs.mkdir()
    statuses = Counter(late_writers(run, runs, same_run, every, first=every // 2))
    print(name, dict(statuses))
    assert statuses.total() > (30 if every == 1 else 1)
    assert statuses[2]  # most of them say that they have lost the lease

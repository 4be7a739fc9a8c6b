"""What precision=auto means: measured for a new run, and recorded for a continued one."""

import contextlib
import subprocess
import sys

import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import write_json
from fairseq_alma.lm import precision
from fairseq_alma.lm.precision import fastest_precision, with_known_precision
from fairseq_alma.lm.settings import LanguageModelSettings


def settings(out, **more):
    return LanguageModelSettings.from_mapping({"stream": "S", "out": str(out), "updates": 1, **more})


def test_a_new_run_gets_what_is_faster_here(tmp_path, monkeypatch):
    assert fastest_precision() in ("float32", "bfloat16")
    for fastest in ("float32", "bfloat16"):
        monkeypatch.setattr(precision, "fastest_precision", lambda fastest=fastest: fastest)
        assert with_known_precision(settings(tmp_path / "run")).precision == fastest


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"precision": "bfloat16", "batch_size": None}, ("bfloat16", None)),
        ({"precision": "float32", "batch_size": 4}, ("float32", 4)),
    ],
)
def test_a_continued_run_keeps_what_it_was_started_with(tmp_path, recorded, expected):
    write_json(tmp_path / "settings.json", recorded)
    found = with_known_precision(settings(tmp_path))
    assert (found.precision, found.batch_size) == expected
    given = with_known_precision(settings(tmp_path, precision="float32", batch_size=2))
    assert (given.precision, given.batch_size) == ("float32", 2)  # then the run folder refuses it, if it differs


def test_another_precision_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"precision='fp8' is not one of auto, float32, bfloat16"):
        settings(tmp_path, precision="fp8")


@pytest.mark.slow
def test_the_choice_does_not_depend_on_other_processes_on_the_machine():
    busy = "import torch\nprint(flush=True)\nx = torch.randn(1000, 1000)\nwhile True: x @ x"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout.readline()
        assert len({fastest_precision() for _ in range(5)}) == 1


def test_a_seed_has_the_precision_of_the_seeds_that_were_started_before(tmp_path, monkeypatch):
    """For example, if a run with seeds=3 continues on another machine."""
    monkeypatch.setattr(precision, "fastest_precision", lambda: "float32")
    assert with_known_precision(settings(tmp_path / "seed_0")).precision == "float32"
    (tmp_path / "seed_1").mkdir()
    (tmp_path / "seed_1/settings.json").write_text('{"precision": "bfloat16"}')
    assert with_known_precision(settings(tmp_path / "seed_0")).precision == "bfloat16"
    assert with_known_precision(settings(tmp_path / "seed_0", precision="float32")).precision == "float32"
    assert with_known_precision(settings(tmp_path / "other")).precision == "float32"

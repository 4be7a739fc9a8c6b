"""What precision=auto means: by the hardware for a new run, and recorded for a continued one."""

import pytest
import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import write_json
from fairseq_alma.lm import precision
from fairseq_alma.lm.precision import precision_of_machine, with_known_precision
from fairseq_alma.lm.settings import LanguageModelSettings


def settings(out, **more):
    return LanguageModelSettings.from_mapping({"stream": "S", "out": str(out), "updates": 1, **more})


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "expected"),
    [(False, False, "float32"), (True, False, "bfloat16"), (False, True, "bfloat16")],
)
def test_a_new_run_gets_what_the_instructions_of_the_cpu_are_for(tmp_path, monkeypatch, amx, avx512_bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert with_known_precision(settings(tmp_path / "run")).precision == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_a_new_run_gets_what_the_gpu_can(tmp_path, monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert with_known_precision(settings(tmp_path / "run")).precision == expected


def test_this_machine_has_a_precision():
    assert precision_of_machine() in ("float32", "bfloat16")


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


def test_a_seed_has_the_precision_of_the_seeds_that_were_started_before(tmp_path, monkeypatch):
    """For example, if a run with seeds=3 continues on another machine."""
    monkeypatch.setattr(precision, "precision_of_machine", lambda: "float32")
    assert with_known_precision(settings(tmp_path / "seed_0")).precision == "float32"
    (tmp_path / "seed_1").mkdir()
    (tmp_path / "seed_1/settings.json").write_text('{"precision": "bfloat16"}')
    assert with_known_precision(settings(tmp_path / "seed_0")).precision == "bfloat16"
    assert with_known_precision(settings(tmp_path / "seed_0", precision="float32")).precision == "float32"
    assert with_known_precision(settings(tmp_path / "other")).precision == "float32"

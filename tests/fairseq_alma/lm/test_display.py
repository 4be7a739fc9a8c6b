"""The progress line of a stage, from the lines that fairseq logs."""

import io
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream import MegaBatch
from fairseq_alma.lm import display
from fairseq_alma.lm.display import RESUMED, StageDisplay

TRAINING = '| INFO | train_inner | {"num_updates": "%d", "nll_loss": "3.5", "ppl": "11.3", "wps": "0", "wpb": "256"}'
VALID = '| INFO | valid | {"valid_num_updates": "4", "valid_ppl": "12.5"}'


def lines_of(run: Path, monkeypatch, *log: str) -> list[str]:
    """Return the progress lines of a stage of the run, after each line of a log."""
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0)
    stage = Stage(1, new=(MegaBatch(1, ""),), past=(), replay=False, folder=run / "stages/stage_001")
    monkeypatch.setattr(sys, "stderr", output := io.StringIO())
    with StageDisplay(stage, {1: 4}, 2) as shown:
        for line in log:
            shown.member(1)(line)
    return output.getvalue().splitlines()


def test_values_that_are_not_known_are_left_out_and_the_speed_of_a_short_stage_is_measured(tmp_path, monkeypatch):
    first, second, third = lines_of(tmp_path, monkeypatch, TRAINING % 1, TRAINING % 3, VALID)
    assert " ".join(first.split()) == "mega-batch 1/2 stage 1 update 1/4 loss 3.500 bits ppl 11.30"
    assert "valid" not in second and " 0 tokens/s" not in second
    assert "tokens/s" in second
    assert "valid ppl 12.50" in third and "tokens/s" in third


@pytest.mark.parametrize(("folder", "start"), [("seed_3", "seed 3  mega-batch 1/2"), ("run", "mega-batch 1/2")])
def test_a_run_of_one_of_several_seeds_says_which(tmp_path, monkeypatch, folder, start):
    assert lines_of(tmp_path / folder, monkeypatch, VALID)[0].startswith(start)


def test_a_resumed_training_is_found_in_a_folder_with_spaces():
    found = RESUMED.search("Loaded checkpoint /a run/checkpoint_last.pt (epoch 1 @ 7 updates)")
    assert found is not None and found[1] == "7"

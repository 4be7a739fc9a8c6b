"""The loop of a stage does what fairseq's own loop does."""

import json
import re

import torch
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import BEST, LAST, read_checkpoint
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of
from tests.fairseq_alma.lm.test_learners import fairseq_train_in_a_fork, train_member_in_a_fork


def test_a_stage_ends_with_the_weights_and_log_of_fairseq_train(stream, tmp_path):
    """Two batches an update, dropout, clipping, a second epoch, and an end that is no multiple of the log interval."""
    words = [
        stream, *STAGE, "--dropout", 0.1, "--mega-batches", 2, "--max-update", 17, "--update-freq", 2,
        "--clip-norm", 0.5, "--save-interval-updates", 6, "--validate-interval-updates", 6, "--save-interval", 1000,
        "--lr-scheduler", "polynomial_decay", "--total-num-update", 17, "--warmup-updates", 3, "--seed", 3,
    ]  # fmt: skip
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert fairseq_train_in_a_fork([*words, "--save-dir", theirs], tmp_path / "theirs.txt") == 0
    ours.mkdir()
    OmegaConf.save(config_of([*map(str, words), "--save-dir", str(ours), "--cpu"]), tmp_path / "config.yaml")
    command = ["python", "-m", "fairseq_alma.lm.train_member", str(tmp_path / "config.yaml")]
    assert train_member_in_a_fork(command, tmp_path / "ours.txt") == 0, (tmp_path / "ours.txt").read_text()[-3000:]
    for name in (LAST, BEST):
        expected, found = read_checkpoint(theirs / name), read_checkpoint(ours / name)
        for key, weight in expected["model"].items():
            assert torch.equal(found["model"][key], weight), key
        assert found["extra_state"]["best"] == expected["extra_state"]["best"]
        assert found["extra_state"]["val_loss"] == expected["extra_state"]["val_loss"]
        assert found["extra_state"]["AlmaLanguageModelingTask"] == expected["extra_state"]["AlmaLanguageModelingTask"]
        position = {"epoch", "iterations_in_epoch", "sequences_in_epoch"}
        for key in position:
            assert found["extra_state"]["train_iterator"][key] == expected["extra_state"]["train_iterator"][key]
    for tag in ("train_inner", "valid"):
        expected, found = (values_in(tmp_path / f"{name}.txt", tag) for name in ("theirs", "ours"))
        assert len(found) == len(expected) == 3
        for one, other in zip(found, expected, strict=True):
            for key in one.keys() & other.keys() - {"wps", "ups", "wall", "valid_wps", "valid_wall"}:
                assert abs(float(one[key]) - float(other[key])) <= 2e-3 * abs(float(other[key])), (tag, key)


def values_in(log, tag: str) -> list[dict]:
    return [json.loads(text) for text in re.findall(rf"\| {tag} \| (\{{.*\}})", log.read_text())]

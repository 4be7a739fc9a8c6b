"""Processes of alma-lm that sleep while others finish their work, and wake up: they change nothing."""

import sys
from collections import Counter

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import BEST, repair_stage_folder, require_checkpoint
from fairseq_alma.lm import run as alma_lm
from fairseq_alma.lm import train_member
from fairseq_alma.lm.member_config import CONFIG
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.killing import same_run
from tests.fairseq_alma.lm.test_learners import ForkedProcesses
from tests.late_writers import late_writers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="audit events and process states as on Linux")

SETTINGS = {
    "precision": "float32", "tokens_per_sample": 32, "sequences_per_update": 8, "batch_size": 8, "lr": 0.005,
    "arch": "switch_lm_tiny",
    "learner": "gmoe", "experts": 2, "grow_experts": [1], "updates": 4, "mega_batches": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(stream, tmp_path_factory):
    """A finished run. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alma_lm, "LocalProcesses", ForkedProcesses)
        alma_lm.run(LanguageModelSettings.from_mapping({**SETTINGS, "stream": str(stream), "out": str(out)}))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 120])
def test_a_driver_that_wakes_up_late_changes_nothing(stream, tmp_path, every):
    def run(out):
        alma_lm.run(LanguageModelSettings.from_mapping({**SETTINGS, "stream": str(stream), "out": str(out)}))

    statuses = Counter(late_writers(run, tmp_path, same_run, every, first=every // 2))
    print(dict(statuses))
    assert statuses.total() > (30 if every == 1 else 0)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_a_training_that_wakes_up_late_changes_nothing(finished, tmp_path, every):
    config = OmegaConf.load(next(finished.glob(f"stages/stage_001/member_1/{CONFIG}")))

    def train(out):
        config.checkpoint.save_dir = str(out)
        out.mkdir(exist_ok=True)
        repair_stage_folder(out)  # as alma-lm does before it starts the process
        OmegaConf.save(config, tmp_path / "config.yaml")
        assert train_member.main([str(tmp_path / "config.yaml")]) == 0

    def same(a, b):
        first, second = (require_checkpoint(folder / BEST)["model"] for folder in (a, b))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    runs = tmp_path / "runs"
    runs.mkdir()
    statuses = Counter(late_writers(train, runs, same, every, first=every // 2))
    print(dict(statuses))
    assert statuses.total() > (5 if every == 1 else 0)


def test_a_training_that_starts_after_its_run_was_taken_over_changes_nothing(finished, capfd):
    """Its driver slept just before it started the training, and another one has finished the run since then."""
    run = finished
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    (config,) = run.glob(f"stages/stage_002/member_1/{CONFIG}")
    assert train_member.main([str(config), "--run-fence", str(run / ".lease.0123456789abcdef")]) == 2
    assert "was removed, or taken over by another process" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before

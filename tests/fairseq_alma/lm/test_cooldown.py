"""schedule=wsd: a stage ends with a cooldown that predicts, and the next stage continues from before the cooldown."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import AVERAGE, BEST, LAST, TRAINED, num_updates, write_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import read_json, sha256_of, write_json
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.flops import count_training_flops
from fairseq_alma.evaluation.perplexity import load_member
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.trainee import restart_if_trainee_is_lost
from tests.commands import RUN
from tests.fairseq_alma.killing import KilledRun, Moment, Reference, end_all, same_ledger, same_run
from tests.fairseq_alma.lm.test_average import checkpoint, rates_in_log, succeed, train_two_stages

WSD = (*RUN, "dropout=0.1", "validations=1", "updates=10", "tensorboard=false", "untrained_tokens=100", "schedule=wsd",
       "cooldown_share=0.3", "replay=uniform")  # fmt: skip
"""Stages of 7 updates, and 3 more in the cooldown."""


@pytest.mark.parametrize(
    ("updates", "share", "before"), [(10, None, 8), (265, 0.2, 212), (10, 0.01, 9), (10, 0.99, 1), (2, 0.9, 1)]
)
def test_the_cooldown_is_a_share_of_the_updates_of_a_stage(updates, share, before):
    settings = LanguageModelSettings(stream="s", out="o", updates=updates, schedule="wsd", cooldown_share=share)
    assert settings.updates_before_cooldown(updates) == before
    assert LanguageModelSettings(stream="s", out="o", updates=updates).updates_before_cooldown(updates) is None


@pytest.fixture(scope="module")
def cooled(stream, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run of two stages, and the checkpoints from which the next stages continue."""
    out = tmp_path_factory.mktemp("cooled") / "run"
    return out, train_two_stages(stream, out, *WSD, "optimizer_state=keep")


def test_the_training_continues_from_before_the_cooldown(cooled):
    out, trained = cooled
    assert [num_updates(one) for one in trained] == [7, 7]
    steps = [{int(state["step"]) for state in one["last_optimizer_state"]["state"].values()} for one in trained]
    assert steps == [{7}, {14}]
    config = (out / "stages/stage_002/member_1/config.yaml").read_text()
    assert f"finetune_from_model: {out}/stages/stage_001/member_1/{TRAINED}" in config
    constant, falling = [0.005] * 6, [0.005, 0.01 / 3, 0.005 / 3, 0.0]
    assert rates_in_log(out, 2) == pytest.approx([*constant, *falling], abs=1e-6)


def test_the_end_of_the_cooldown_predicts_and_its_updates_are_charged(cooled, stream):
    out, trained = cooled
    rows = Ledger(out / "ledger.jsonl").rows()
    deployed = json.loads((out / "predictor.json").read_text())["checkpoints"]
    assert [entry["path"] for entry in deployed] == [f"stages/stage_002/member_1/{BEST}"]
    for k in (1, 2):
        predictor = checkpoint(out, k, BEST)
        assert num_updates(predictor) == rows[k].spent.num_updates == 10
        best = out / f"stages/stage_{k:03d}/member_1/{BEST}"
        flops = count_training_flops(load_member(best, StreamFolder.open(stream), torch.device("cpu"))[0])
        processed, before = (
            one["extra_state"]["AlmaLanguageModelingTask"]["processed"]["training"]
            for one in (predictor, trained[k - 1])
        )
        assert rows[k].spent.train_flops == flops.total(processed["tokens"], processed["token_pairs"])
        assert processed["tokens"] > before["tokens"]


def test_a_stage_that_was_killed_when_the_cooldown_began_ends_alike(cooled, stream, tmp_path):
    """LAST has been written, and TRAINED has not."""
    out, _ = cooled
    killed = tmp_path / "run"
    shutil.copytree(out, killed)
    stage = killed / "stages/stage_002"
    (stage / "member_1" / TRAINED).rename(stage / "member_1" / LAST)
    for path in (stage / "member_1" / BEST, stage / "member_1/done.json", *stage.glob("*.done.json")):
        if path.name != "grow.done.json":
            path.unlink()
    lines = (killed / "ledger.jsonl").read_text().splitlines(keepends=True)
    (killed / "ledger.jsonl").write_text("".join(lines[:2]))
    trained = stage.parent / "stage_001/member_1" / TRAINED  # it was removed, and only its times are used
    shutil.copyfile(out / "stages/stage_001/member_1" / BEST, trained)
    for path in (stage.parent / "stage_001/train/learner.json", stage / "grow/learner.json"):
        state = read_json(path)
        state["trainees"][0]["sha256"] = sha256_of(trained)
        write_json(path, state)
    succeed("alma-lm", f"stream={stream}", f"out={killed}", *WSD, "optimizer_state=keep", "mega_batches=2")
    same_ledger(killed, out)
    for name in (TRAINED, BEST):
        one, other = (checkpoint(run, 2, name)["model"] for run in (killed, out))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_the_average_goes_on_from_before_the_cooldown_and_growth_too(stream, tmp_path):
    more = ("learner=gmoe", "grow_experts=[0,1]", "predict_with=average", "average_every=update", "mega_batches=3")
    succeed("alma-lm", f"stream={stream}", f"out={tmp_path}", *WSD, *more)
    assert [row.scores.num_experts for row in Ledger(tmp_path / "ledger.jsonl").rows()] == [4, 4, 4, 5]
    last = checkpoint(tmp_path, 3, TRAINED)
    assert "last_optimizer_state" not in last
    assert last["extra_state"][AVERAGE]["count"] == 7  # the growth began a new average
    predictor = checkpoint(tmp_path, 3, BEST)
    assert AVERAGE not in predictor["extra_state"]
    name = "decoder.embed_tokens.weight"
    assert not torch.equal(predictor["model"][name], last["extra_state"][AVERAGE]["model"][name])


@pytest.mark.parametrize(("updates", "trained", "restarts"), [(8, False, True), (7, False, False), (8, True, False)])
def test_a_stage_whose_trainee_is_lost_starts_again(tmp_path, updates, trained, restarts):
    write_checkpoint({"optimizer_history": [{"num_updates": updates}]}, tmp_path / LAST)
    if trained:
        shutil.copyfile(tmp_path / LAST, tmp_path / TRAINED)
    restart_if_trainee_is_lost(tmp_path, None)
    assert (tmp_path / LAST).exists()
    restart_if_trainee_is_lost(tmp_path, 7)
    assert (tmp_path / LAST).exists() != restarts


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_is_killed_in_the_cooldown_ends_alike(stream, tmp_path):
    settings = (*WSD, "optimizer_state=keep", "mega_batches=2", "updates=60", "cooldown_share=0.5")
    try:
        reference = Reference.of(stream, tmp_path / "whole", settings)
        run = KilledRun(stream, tmp_path / "run", (*settings, "checkpoint_minutes=0.001"))
        for k in (1, 2):
            member = f"stages/stage_{k:03d}/member_1"
            run.kill_at(Moment("the cooldown", lambda out, m=member: (out / m / TRAINED).exists() and not
                               (out / m / "done.json").exists()))  # fmt: skip
        run.report()
        run.finish()
        same_run(run.out, reference.out)
    finally:
        end_all()


@pytest.mark.parametrize(("total", "begin"), [(None, 0), (6, 6), (6, 20), (6, -1)])
def test_by_hand_the_end_of_the_cooldown_must_be_given_and_come_after_its_beginning(total, begin):
    from fairseq_alma.optim.cooldown import Cooldown, CooldownConfig

    with pytest.raises(SettingError, match=f"they are {total} and {begin}"):
        Cooldown(CooldownConfig(decay_from=begin, total_num_update=total, lr=[0.1]), optimizer=None)

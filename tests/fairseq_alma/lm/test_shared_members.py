"""A stage that two runs compute in the same way is computed once."""

import json
import shutil

import pytest
import torch

from fairseq_alma.checkpoints import CONTINUATION, digest_of_model, digest_of_state, read_checkpoint, write_checkpoint
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.fairseq_config import Member
from fairseq_alma.lm.member import MemberTraining
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.shared_members import SharedMembers, key_of
from tests.commands import RUN, run_command
from tests.fairseq_alma.processes import NoProcesses


@pytest.fixture
def finished(trained, tmp_path):
    """A member's folder as a finished stage leaves it."""
    folder = tmp_path / "run" / "member_1"
    folder.mkdir(parents=True)
    for name in ("log.txt", "done.json"):
        (folder / name).write_text(f"{name}\n")
    shutil.copy(trained, folder / "checkpoint_best.pt")
    return folder


def test_a_member_that_one_run_publishes_is_copied_by_another(finished, tmp_path):
    shared = SharedMembers(tmp_path / "shared")
    other = tmp_path / "other" / "member_2"
    assert not shared.copy_to(other, "key")
    assert not other.exists()
    shared.publish(finished, "key")
    assert shared.copy_to(other, "key")
    assert {p.name for p in other.iterdir()} == set(SharedMembers.FILES) - {CONTINUATION}
    assert (other / "checkpoint_best.pt").read_bytes() == (finished / "checkpoint_best.pt").read_bytes()
    assert "not trained here" in (other / "log.txt").read_text()


def test_the_first_to_finish_counts_and_nothing_unfinished_is_left(finished, tmp_path):
    shared = SharedMembers(tmp_path / "shared")
    shared.publish(finished, "key")
    (finished / "done.json").write_text("later\n")
    shared.publish(finished, "key")
    trained = shared.folder / "trained"
    assert shared.copy_to(tmp_path / "again", "key")
    assert (tmp_path / "again" / "done.json").read_text() == "done.json\n"
    assert [p.name for p in trained.iterdir()] == ["key"]
    with open(trained / "key" / "checkpoint_best.pt", "r+b") as file:
        file.truncate(1000)
    assert not shared.copy_to(tmp_path / "other", "key")  # a truncated copy is not used
    (finished / "log.txt").unlink()
    with pytest.raises(FileNotFoundError):
        shared.publish(finished, "other")
    assert [p.name for p in trained.iterdir()] == ["key"]


def test_the_key_names_options_data_and_weights_and_no_folder(trained, tmp_path):
    recipe = {"options": ["--seed", "0"], "new": ["digest"]}
    key = key_of(recipe, trained)
    assert key == key_of(dict(recipe), shutil.copy(trained, tmp_path / "moved.pt"))
    assert key != key_of({**recipe, "options": ["--seed", "1"]}, trained)
    assert key != key_of({**recipe, "new": ["other"]}, trained)
    checkpoint = read_checkpoint(trained)
    checkpoint["extra_state"]["previous_training_time"] = 7.0  # clock times differ between equal runs
    write_checkpoint(checkpoint, tmp_path / "other_clock.pt")
    assert key == key_of(recipe, tmp_path / "other_clock.pt")
    name = "decoder.layers.1.mixture.fc1_bias"
    checkpoint["model"][name] = checkpoint["model"][name] + torch.finfo(torch.float32).tiny
    write_checkpoint(checkpoint, tmp_path / "other_weight.pt")
    assert digest_of_model(tmp_path / "other_weight.pt") != digest_of_model(trained)


def test_the_state_of_the_optimizer_and_the_average_have_a_digest(trained, tmp_path):
    """A stage that continues with them depends on them, not only on the weights."""
    checkpoint = read_checkpoint(trained)
    checkpoint["extra_state"].pop("average", None)
    state = {"state": {0: {"exp_avg": torch.ones(3), "step": 4}}, "param_groups": [{"lr": 0.1}]}

    def digest(name: str, state: object, average: object = None) -> str | None:
        extra = checkpoint["extra_state"] | ({} if average is None else {"average": average})
        write_checkpoint({**checkpoint, "last_optimizer_state": state, "extra_state": extra}, tmp_path / name)
        return digest_of_state(tmp_path / name)

    assert digest("none.pt", None) is None
    one = digest("one.pt", state)
    assert one == digest("again.pt", {"param_groups": [{"lr": 0.1}], "state": dict(state["state"])})
    other = {**state, "state": {0: {"exp_avg": torch.tensor([1.0, 1.0, 2.0]), "step": 4}}}
    assert len({one, digest("other.pt", other), digest("average.pt", state, {"count": 1}), None}) == 4


def test_the_key_names_the_mega_batches_that_a_learner_has_chosen(stream, trained, tmp_path):
    folder = StreamFolder.open(stream)
    settings = LanguageModelSettings(
        stream=str(stream), out=str(tmp_path), arch="switch_lm_tiny", tokens_per_sample=32, sequences_per_update=8,
        precision="float32",
        updates=4,
    )  # fmt: skip
    arrivals = [*folder.stream()]
    stage = Stage(3, (arrivals[2],), (arrivals[0],), False, tmp_path)  # mega-batch 2 was skipped

    def key(**options) -> str:
        training = MemberTraining(
            settings, folder.without_test(), NoProcesses(), own_options=lambda stage, updates: options
        )
        config = training._configs.of(Member.of_run(1, 0, 1), 1, stage, tmp_path, trained)
        return training._key(stage, config, trained)

    replayed = [key(replay_mega_batches=one, replay_share=0.5) for one in ("1", "2", "1-2")]
    assert len({key(), key(mega_batches="2"), *replayed}) == 5


def test_an_ensemble_copies_its_first_member_from_a_run_of_one_model(stream, tmp_path):
    arguments = (
        f"stream={stream}",
        *RUN,
        "mega_batches=1",
        "updates=4",
        "validations=1",
        f"reuse_from={tmp_path}/shared",
    )
    ledgers, logs = {}, {}
    for learner in (("sm",), ("ens", "members=2")):
        out = tmp_path / learner[0]
        result = run_command("alma-lm", *arguments, f"out={out}", f"learner={learner[0]}", *learner[1:])
        assert result.returncode == 0, result.stderr[-2000:]
        ledgers[learner[0]] = Ledger(out / "ledger.jsonl").rows()
        if learner[0] == "sm":
            of_sm = {path: path.stat().st_mtime_ns for path in (tmp_path / "shared" / "evaluated").glob("*/*")}
        logs[learner[0]] = [path.read_text() for path in sorted(out.glob("stages/stage_001/*/log.txt"))]
    assert ["not trained here" in log for log in logs["sm"] + logs["ens"]] == [False, True, False]
    sm, ens = (json.loads((tmp_path / name / "predictor.json").read_text())["checkpoints"] for name in ("sm", "ens"))
    assert sm[0]["sha256"] == ens[0]["sha256"] != ens[1]["sha256"]
    # Its cost is counted as if it had been trained here: the cost of a result does not depend on earlier runs.
    assert ledgers["ens"][1].spent.num_updates == 2 * ledgers["sm"][1].spent.num_updates == 8
    assert ledgers["ens"][1].spent.train_flops == pytest.approx(2 * ledgers["sm"][1].spent.train_flops, rel=0.1)
    assert len(list((tmp_path / "shared" / "trained").iterdir())) == 2
    # Member 1, untrained and trained, is scored only by the first run.
    scored = list((tmp_path / "shared" / "evaluated").iterdir())
    assert (len(of_sm), len(scored)) == (2 * 3, 4)
    assert {path: path.stat().st_mtime_ns for path in of_sm} == of_sm
    assert not (tmp_path / "sm" / "evaluated").exists()
    assert not (tmp_path / "ens" / "evaluated").exists()

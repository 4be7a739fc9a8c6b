"""What the stages of a run have read, and that replay begins with what they have left."""

import random
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.files import read_json
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.read_order import StageReads
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.training_config import Member, TrainingConfigs
from tests.fairseq_alma.killing import KilledRun, Reference, end_all, same_run
from tests.fairseq_alma.lm.test_average import SHORT, succeed
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task

HALF = (*SHORT, "updates=6", "replay=0.5", "wait=1")
"""A stage has 48 of the about 94 blocks of a mega-batch."""


def history(stream: Path, out: Path, past: int, new: int, read: tuple[StageReads, ...], **settings) -> str | None:
    """Return the option --replay-history of a stage, before which `past` mega-batches were trained on."""
    folder = StreamFolder.open(stream)
    given = {"arch": "switch_lm_tiny", "tokens_per_sample": 32, "sequences_per_update": 8, "replay": 0.5}
    run = LanguageModelSettings(stream=str(stream), out=str(out), precision="float32", **given | settings)
    arrivals = tuple(folder.stream())
    stage = Stage(
        len(read) + 1, arrivals[past : past + new], arrivals[:past], run.replay, out / "stage", run.replay_memory
    )
    member = Member(1, 0, run.experts, read)
    return TrainingConfigs(run, folder.without_test(), None).of(member, 1, stage).task.replay_history


WHOLE = StageReads(1, 1, 12, 8, 0.0)
PART = StageReads(2, 2, 12, 8, 0.5)


@pytest.mark.parametrize(
    "past, new, read, updates, expected",
    [
        (0, 1, (), 12, None),  # the first stage reads all of its 94 blocks
        (0, 1, (), 11, "none"),
        (0, 2, (), 12, "none"),
        (1, 1, (WHOLE,), 6, None),  # nothing is left from earlier stages
        (2, 1, (WHOLE, PART), 12, "1/12/8/0.0,2/12/8/0.5"),
        (2, 1, (), 12, None),  # not known: a run of an earlier version, or new members
        (2, 1, (WHOLE,), 12, None),
    ],
)
def test_a_stage_is_told_what_was_read_if_something_was_left(stream, tmp_path, past, new, read, updates, expected):
    assert history(stream, tmp_path, past, new, read, updates=updates) == expected


def test_with_a_memory_a_stage_is_always_told_what_was_read(stream, tmp_path):
    """So the blocks that the memory keeps have the same numbers in all stages."""
    assert history(stream, tmp_path, 1, 1, (WHOLE,), updates=6, replay_memory=320) == "1/12/8/0.0"


@pytest.mark.parametrize("replay", [False, "all"])
def test_without_a_share_there_is_no_history(stream, tmp_path, replay):
    assert history(stream, tmp_path, 2, 1, (WHOLE, PART), updates=6, replay=replay) is None


def test_replay_begins_with_the_blocks_that_the_first_stage_has_left(stream):
    """Compare the tokens of the batches that fairseq reads."""
    first = make_task(stream, "--mega-batches", "1", "--replay-history", "none")
    first.load_dataset("train")
    dataset = first.dataset("train")
    all_blocks = {tuple(dataset[i]["target"].tolist()) for i in range(len(dataset))}
    read = {tuple(row) for batch in batches(first, "train")[:6] for row in batch["target"].tolist()}
    assert len(read) == 48
    assert len(all_blocks) == len(dataset)

    second = make_task(
        stream, "--mega-batches", "2", "--replay-mega-batches", "1", "--replay-share", "0.5",
        "--replay-history", "1/6/8/0.0",
    )  # fmt: skip
    second.load_dataset("train")
    replayed = [
        tuple(row)
        for batch in batches(second, "train")[:11]
        for i, row in zip(batch["id"].tolist(), batch["target"].tolist(), strict=True)
        if i >= second.dataset("train").order.num_new
    ]
    assert len(replayed) == 44
    assert set(replayed) <= all_blocks - read


def test_a_run_records_what_it_has_read_and_a_fork_keeps_it(stream, tmp_path):
    succeed("alma-lm", f"stream={stream}", f"out={tmp_path}", *HALF, "mega_batches=2")
    state = [read_json(tmp_path / f"stages/stage_00{k}/train/learner.json")["read"]["1"] for k in (1, 2)]
    reads = {"first": 1, "last": 1, "updates": 6, "sequences": 8, "share": 0.0}
    assert state == [[reads], [reads, {**reads, "first": 2, "last": 2, "share": 0.5}]]
    succeed("alma-lm", f"stream={stream}", f"out={tmp_path}", *HALF, "updates=3", "mega_batches=3", "fork=true")
    configs = [(tmp_path / f"stages/stage_00{k}/member_1/config.yaml").read_text() for k in (1, 2, 3)]
    for config, expected in zip(configs, ("none", "1/6/8/0.0", "1/6/8/0.0,2/6/8/0.5"), strict=True):
        assert f"replay_history: {expected}\n" in config


def test_what_only_the_cooldown_has_read_counts_as_unread(stream, tmp_path):
    settings = (*SHORT, "updates=12", "schedule=wsd", "cooldown_share=0.5", "replay=0.5", "wait=1", "mega_batches=1")
    succeed("alma-lm", f"stream={stream}", f"out={tmp_path}", *settings)
    (reads,) = read_json(tmp_path / "stages/stage_001/train/learner.json")["read"]["1"]
    assert reads["updates"] == 6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_at_random_it_ends_like_an_uninterrupted_run(stream, tmp_path):
    try:
        reference = Reference.of(stream, tmp_path / "reference", HALF)
        run = KilledRun(stream, tmp_path / "killed", HALF)
        run.kill_at_random(4, reference, random.Random(3))
        run.finish()
        run.report()
        same_run(reference.out, run.out)
    finally:
        end_all()

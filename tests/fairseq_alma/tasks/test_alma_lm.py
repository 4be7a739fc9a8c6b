import functools
import json
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from fairseq import tasks
from omegaconf import DictConfig

from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of


@functools.cache
def _task_config(*words: str) -> DictConfig:
    """Return the configuration of the task. fairseq needs half a second for it."""
    return config_of(words).task


def make_task(stream, *extra):
    config = _task_config(str(stream), *map(str, (*STAGE[2:], *extra)))  # without --user-dir: it is registered
    return tasks.setup_task(deepcopy(config))


def batches(task, split, epoch=1, seed=0, **kwargs):
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=8, seed=seed, epoch=epoch, **kwargs)
    return list(iterator.next_epoch_itr(shuffle=True))


def tokens_on_disk(stream, split):
    return np.fromfile(StreamFolder.open(stream).prefix(split).with_suffix(".bin"), dtype=np.uint16)


def test_a_stage_trains_on_its_mega_batches_end_to_end(stream):
    task = make_task(stream, "--mega-batches", "1,3")
    task.load_dataset("train")
    blocks = task.dataset("train")
    targets = np.concatenate([blocks[i]["target"].numpy() for i in range(len(blocks))])
    expected = np.concatenate([tokens_on_disk(stream, "mega_batch_1"), tokens_on_disk(stream, "mega_batch_3")])
    assert targets.tolist() == expected.tolist()
    # The first input of a block is the token before it, so every token is predicted once.
    assert blocks[1]["source"][0] == blocks[0]["target"][-1]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_no_block_is_dropped_whatever_the_batch_size_multiple(stream, split):
    task = make_task(stream, "--mega-batches", "2")
    task.load_dataset(split)
    for multiple in (1, 8):
        seen = [int(i) for batch in batches(task, split, required_batch_size_multiple=multiple) for i in batch["id"]]
        assert sorted(seen) == list(range(len(task.dataset(split))))


def test_an_epochs_batches_depend_on_seed_and_epoch_only(stream):
    # fairseq makes batches once, in the first epoch of a process: a stage resumed in epoch 3 would get other batches.
    def ids(task, epoch, seed=0):
        return [batch["id"].tolist() for batch in batches(task, "train", epoch, seed)]

    first, resumed = (make_task(stream, "--mega-batches", "1") for _ in range(2))
    for task in (first, resumed):
        task.load_dataset("train")
    uninterrupted = [ids(first, epoch) for epoch in (1, 2, 3)]
    assert ids(resumed, 3) == uninterrupted[2]
    assert uninterrupted[0] != uninterrupted[1]
    assert ids(resumed, 3, seed=1) != uninterrupted[2]


@pytest.mark.parametrize(
    ("share", "from_past"),
    [
        (0.25, [2, 2, 2, 2]),
        pytest.param(0.5, [4, 4, 4, 4], marks=pytest.mark.slow),
        (0.3, [2, 2, 3, 2]),
        pytest.param(0.1, [0, 1, 1, 1], marks=pytest.mark.slow),
    ],
)
def test_replay_by_share_gives_every_batch_its_part_and_changes_no_step(stream, share, from_past):
    plain = make_task(stream, "--mega-batches", "3")
    task = make_task(stream, "--mega-batches", "3", "--replay-mega-batches", "1-2", "--replay-share", share)
    for t in (plain, task):
        t.load_dataset("train")
    dataset = task.dataset("train")
    num_new = len(plain.dataset("train"))
    mixed = dataset.batch_by_size(dataset.ordered_indices(), max_sentences=8)
    assert len(mixed) == len(batches(plain, "train")) == len(batches(task, "train"))
    found = [sum(i >= num_new for i in batch) for batch in mixed]
    assert found[:4] == from_past
    assert sum(map(len, mixed)) == num_new
    assert abs(sum(found) - share * num_new) < 1
    assert all(len(batch) == 8 for batch in mixed[:-1])
    assert mixed[0] != sorted(mixed[0])  # drawn at random, not in order


def test_replay_by_share_works_one_block_at_a_time(stream):
    task = make_task(stream, "--mega-batches", "3", "--replay-mega-batches", "1", "--replay-share", "0.25")
    task.load_dataset("train")
    dataset = task.dataset("train")
    found = [batch[0] >= dataset.num_new for batch in dataset.batch_by_size(dataset.ordered_indices(), max_sentences=1)]
    assert found[:8] == [False, False, False, True] * 2


def test_every_rank_gets_the_same_number_of_batches(stream):
    # fairseq would add an empty batch, and then lose the logging outputs of the rank's other batches.
    for extra in ((), ("--replay-mega-batches", "1", "--replay-share", "0.5")):
        task = make_task(stream, "--mega-batches", "3", *extra)
        task.load_dataset("train")
        alone = len(batches(task, "train"))
        for num_shards in (2, 5):
            shards = [batches(task, "train", num_shards=num_shards, shard_id=i) for i in range(num_shards)]
            assert {len(shard) for shard in shards} == {-(-alone // num_shards)}
            assert all(len(batch["id"]) > 0 for shard in shards for batch in shard)


def test_replay_draws_other_blocks_in_each_epoch_and_all_before_any_twice(stream):
    task = make_task(stream, "--mega-batches", "3", "--replay-mega-batches", "1", "--replay-share", "0.5")
    task.load_dataset("train")
    epochs = [[i for batch in batches(task, "train", epoch) for i in batch["id"].tolist()] for epoch in (1, 2, 1)]
    assert sorted(epochs[0]) != sorted(epochs[1])
    assert epochs[0] == epochs[2]
    assert len(set(epochs[0])) == len(epochs[0])


@pytest.mark.parametrize("option", ["--train-subset", "--valid-subset"])
def test_the_test_set_is_refused_in_training_and_validation(stream, option):
    with pytest.raises(SettingError, match="may not be used for training or validation"):
        make_task(stream, option, "test")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--mega-batches", "4"), "1 to 3"),
        (("--replay-share", "0.5"), "must be given together"),
        (("--sample-break-mode", "eos"), "leave it at none"),
        (("--add-bos-token",), "is not supported by alma_lm"),
        (("--shorten-method", "truncate"), "is not supported by alma_lm"),
    ],
)
def test_options_that_do_not_fit_the_stream_are_refused(stream, extra, message):
    with pytest.raises(SettingError, match=message):
        make_task(stream, *extra)


def test_a_stream_of_another_format_version_is_refused(own_stream):
    description = json.loads((own_stream / "stream.json").read_text())
    (own_stream / "stream.json").write_text(json.dumps({**description, "format_version": 99}))
    with pytest.raises(StreamError, match="format version 99"):
        make_task(own_stream)


def test_another_split_than_the_streams_is_refused(stream):
    with pytest.raises(SettingError, match="a stream has train"):
        make_task(stream).load_dataset("valid1")


def test_a_batch_says_on_the_host_what_it_contains(stream):
    task = make_task(stream, "--mega-batches", "1")
    task.load_dataset("valid")
    pad = task.target_dictionary.pad()
    for batch in batches(task, "valid"):
        assert batch["net_input"]["has_padding"] is bool((batch["target"] == pad).any())
        assert batch["block_ids"] == batch["id"].tolist()
    dataset = task.dataset("valid")
    last = len(dataset) - 1
    assert len(dataset[last]["target"]) < len(dataset[0]["target"])
    assert dataset.collater([dataset[0], dataset[last]])["net_input"]["has_padding"] is True
    assert dataset.collater([]) == {}


def test_the_batches_of_an_epoch_are_let_go_of_when_the_next_one_begins(stream):
    """They refer to themselves, so their worker processes would exist until a garbage collection."""
    task = make_task(stream, "--mega-batches", "1")
    task.load_dataset("train")
    dataset = task.dataset("train")
    first = task.get_batch_iterator(dataset, max_sentences=8, seed=0)
    assert len(list(first.next_epoch_itr(shuffle=True))) == 12
    assert first.epoch_batch_sampler.ordered_batches is not None
    second = task.get_batch_iterator(dataset, max_sentences=8, seed=0, epoch=2)
    assert first.epoch_batch_sampler.ordered_batches is None
    assert len(list(second.next_epoch_itr(shuffle=True))) == 12


def iterator_of(stream, *extra):
    task = make_task(stream, "--mega-batches", "1", *extra)
    task.load_dataset("train")
    return task.get_batch_iterator(task.dataset("train"), max_sentences=8, seed=task.args.seed)


@pytest.fixture(scope="module")
def states(stream):
    """The states of an iterator after 3 batches of an epoch, which are continued as they began, and after the epoch."""
    began = iterator_of(stream)
    batches = began.next_epoch_itr(shuffle=True)
    rest = [batch["block_ids"] for batch in batches][3:]
    between_epochs = began.state_dict()
    began = iterator_of(stream)
    for _ in zip(range(3), began.next_epoch_itr(shuffle=True), strict=False):
        pass
    state = began.state_dict()
    assert state["sequences_in_epoch"] == 24
    same = iterator_of(stream)
    same.load_state_dict(deepcopy(state))
    assert [batch["block_ids"] for batch in same.next_epoch_itr(shuffle=True)] == rest
    return state, between_epochs


@pytest.mark.parametrize(
    ("extra", "changed"),
    [
        (("--mega-batches", "2"), "--mega-batches 1 (now 2)"),
        (("--seed", "3"), "--seed 1 (now 3)"),
        (("--mega-batches", "2", "--replay-share", "0.5", "--replay-mega-batches", "1"), "--replay-mega-batches None"),
    ],
)
def test_within_an_epoch_only_the_same_order_of_the_same_data_is_continued(stream, states, extra, changed):
    state, between_epochs = map(deepcopy, states)
    with pytest.raises(SettingError, match=re.escape(changed)):
        iterator_of(stream, *extra).load_state_dict(state)
    iterator_of(stream, *extra).load_state_dict(between_epochs)  # a new epoch may have other data


def test_a_checkpoint_of_another_dictionary_is_refused(stream):
    task = make_task(stream, "--mega-batches", "1")
    (state,) = task.get_checkpoint_dict().values()
    task.set_checkpoint_dict(state)
    with pytest.raises(SettingError, match="was trained with another dictionary than that of"):
        task.set_checkpoint_dict({**state, "dict_sha256": "0" * 64})


def test_a_training_or_evaluation_that_starts_from_another_dictionary_is_refused(stream, tmp_path):
    task = make_task(stream, "--mega-batches", "1")
    task.load_state_dict(task.state_dict())
    task.load_state_dict({})  # of an earlier version
    with pytest.raises(SettingError, match="was trained with another dictionary than that of"):
        task.load_state_dict({"dict_sha256": "0" * 64})
    (name,) = task.get_checkpoint_dict()
    for digest in (StreamFolder.open(stream).dictionary_digest, "0" * 64):
        torch.save({"extra_state": {name: {"dict_sha256": digest}}}, tmp_path / f"{digest}.pt")
        for option in ("--finetune-from-model", "--restore-file"):
            start = ("--mega-batches", "1", option, tmp_path / f"{digest}.pt")
            if digest[0:64] != "0" * 64:
                assert make_task(stream, *start).stream.path == stream
                continue
            with pytest.raises(SettingError, match=r"0\.pt was trained with another dictionary than that of"):
                make_task(stream, *start)

"""The configuration of a stage: its data, its initial checkpoint, its number of updates."""

import itertools
from pathlib import Path

import pytest
from omegaconf import DictConfig

from fairseq_alma.checkpoints import require_checkpoint
from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.learner_settings import LanguageModelGrowingMixtureSettings
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.fairseq_config import MEMBER_SEED_STRIDE, Member
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.processes import NoProcesses


def config_of_stage(stream: Path, out: Path, new, past, replay, index=2, **settings) -> DictConfig:
    """Return the configuration with which a stage trains."""
    processes = NoProcesses()
    folder = StreamFolder.open(stream)
    learner = make_learner(
        LanguageModelSettings(
            stream=str(stream),
            out=str(out),
            arch="switch_lm_tiny",
            tokens_per_sample=32,
            replay=replay,
            **{"sequences_per_update": 8, **settings},
        ),
        folder.without_test(),
        processes,
    )
    arrivals = list(folder.stream())
    stage = Stage(
        index, tuple(arrivals[t - 1] for t in new), tuple(arrivals[t - 1] for t in past), replay, out / "stage"
    )
    with pytest.raises(StageError, match="ended with status 1"):
        learner.train(stage)
    (config,) = processes.configs
    return config


def test_without_replay_a_stage_trains_on_what_is_new(stream, tmp_path):
    config = config_of_stage(stream, tmp_path, new=(2, 3), past=(1,), replay=False, updates=40)
    assert config.task.mega_batches == "2-3"
    assert config.task.replay_share == 0
    assert config.optimization.max_update == config.lr_scheduler.total_num_update == 40
    assert config.lr_scheduler.warmup_updates == 2  # 5% of the stage
    assert config.checkpoint.finetune_from_model.endswith("checkpoint_untrained.pt")


def test_replay_of_all_joins_the_past_and_its_cost_grows_with_history(stream, tmp_path):
    config = config_of_stage(stream, tmp_path, new=(3,), past=(1, 2), replay="all", updates_per_mega_batch=40)
    assert config.task.mega_batches == "1-3"
    assert config.optimization.max_update == 120


def test_replay_by_share_leaves_the_number_of_updates_alone(stream, tmp_path):
    config = config_of_stage(stream, tmp_path, new=(3,), past=(1, 2), replay=0.25, updates_per_mega_batch=40)
    assert (config.task.mega_batches, config.task.replay_mega_batches) == ("3", "1-2")
    assert config.task.replay_share == 0.25
    assert config.optimization.max_update == 40


def test_automatic_replay_is_a_half_and_more_if_the_new_text_would_be_read_often(stream, tmp_path):
    tokens = StreamFolder.open(stream).counts("mega_batch_3")["tokens"]
    for passes, share in ((1, 0.5), (4.5, 0.5), (10, 0.75), (20, 0.875)):
        updates = round(passes * tokens / (8 * 32))
        config = config_of_stage(stream, tmp_path / str(passes), new=(3,), past=(1, 2), replay="auto", updates=updates)
        assert config.task.replay_share == pytest.approx(share, abs=0.01)
        assert config.optimization.max_update == updates
    config = config_of_stage(stream, tmp_path / "first", new=(1,), past=(), replay="auto", updates=updates, index=1)
    assert config.task.replay_share == 0


def test_a_pass_takes_a_whole_number_of_updates(stream, tmp_path):
    tokens = StreamFolder.open(stream).counts("mega_batch_3")["tokens"]
    more = {"new": (3,), "past": (1, 2), "replay": "auto", "sequences_per_update": tokens // 32 - 8}
    config = config_of_stage(stream, tmp_path, updates=20, **more)  # 10 passes of a long and a short update
    assert config.task.replay_share == 0.75


def test_the_seeds_of_all_members_are_different_and_fit_numpy():
    seeds = [Member.of_run(number, run_seed, 4).seed for number in range(1, 1201) for run_seed in (0, 999_999)]
    assert seeds[2:4] == [10_000_000, 10_999_999]
    assert max(seeds) + MEMBER_SEED_STRIDE < 2**32
    # No update of a member has the seed of another one of the same run.
    of_run = sorted(seeds[::2])
    assert min(b - a for a, b in itertools.pairwise(of_run)) > 2_000_000


def test_updates_do_not_depend_on_the_wait_and_updates_per_mega_batch_do(stream, tmp_path):
    fixed = config_of_stage(stream, tmp_path / "a", new=(1, 2, 3), past=(), replay=False, updates=40)
    times = config_of_stage(stream, tmp_path / "b", new=(1, 2, 3), past=(), replay=False, updates_per_mega_batch=40)
    assert (fixed.optimization.max_update, times.optimization.max_update) == (40, 120)


@pytest.mark.parametrize(("learner", "own", "experts"), [
    ("sm", None, 4),
    ("gmoe", LanguageModelGrowingMixtureSettings(grow_experts=2), 6),
])  # fmt: skip
def test_a_stage_from_scratch_starts_from_new_weights_of_the_grown_size(stream, tmp_path, learner, own, experts):
    """It is the second stage."""
    given = {"learner": learner, "learner_settings": own, "updates": 4, "from_scratch": True}
    config = config_of_stage(stream, tmp_path, new=(2,), past=(1,), replay=False, **given)
    start = tmp_path / "stage/scratch/member_1/checkpoint_untrained.pt"
    assert config.checkpoint.finetune_from_model == str(start)
    assert (config.common.seed, config.model.num_experts) == (10_000_000, experts)  # the seed of gEns' second member
    assert require_checkpoint(start)["model"]["decoder.layers.1.mixture.router.weight"].shape[0] == experts


def test_the_papers_warm_up_is_at_most_4000_updates():
    settings = LanguageModelSettings(stream="s", out="o", updates=120_000)
    assert settings.warmup_of_stage(120_000) == 4000
    assert settings.warmup_of_stage(1000) == 50
    assert LanguageModelSettings(stream="s", out="o", updates=9, warmup_updates=7).warmup_of_stage(1000) == 7


@pytest.mark.parametrize("length", [{"updates": 9}, {"updates_per_mega_batch": 3, "wait": 3}])
def test_a_warm_up_is_not_longer_than_a_stage(length):
    LanguageModelSettings(stream="s", out="o", warmup_updates=9, **length)
    with pytest.raises(SettingError, match="warmup_updates=10 is more than the 9 updates of a stage"):
        LanguageModelSettings(stream="s", out="o", warmup_updates=10, **length)


@pytest.mark.parametrize(
    "others",
    [
        {"wait": [4, 5]}, {"replay": "all", "init_from": "m", "known_mega_batches": 9}, {"fork": True},
        {"fairseq": "--lr-scheduler inverse_sqrt"},  # its warm-up may last several stages
    ],
)  # fmt: skip
def test_stages_of_different_lengths_may_be_shorter_than_the_warm_up(others):
    settings = LanguageModelSettings(stream="s", out="o", warmup_updates=10, updates_per_mega_batch=3, **others)
    assert settings.warmup_of_stage(30) == 10

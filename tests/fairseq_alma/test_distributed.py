"""Several ranks on the CPU, with gloo: a stage, its validation and its resume, and the same result as on one rank."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fairseq_alma.checkpoints import (
    AVERAGE,
    BEST,
    CONTINUATION,
    EXPERT_DIGESTS,
    num_updates,
    read_checkpoint,
    write_checkpoint,
)
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.lm.average import finish_stage
from fairseq_alma.lm.fairseq_config import write_untrained_checkpoint
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.modules.expert_parallel import digests_of_experts
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of
from tests.fairseq_alma.ranks import free_port, member_commands, run_ranks
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def train_on_ranks(stream, folder, num_ranks, updates, *extra) -> str:
    """Run fairseq-train in `num_ranks` processes, and return what the first one prints."""
    words = [sys.executable, "-m", "fairseq_cli.train", str(stream), *map(str, STAGE), "--mega-batches", "3",
             "--max-update", str(updates), "--save-dir", str(folder), "--load-checkpoint-on-all-dp-ranks", "--cpu",
             *map(str, extra)]  # fmt: skip
    if num_ranks > 1:
        words += ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-no-spawn",
                  "--distributed-world-size", str(num_ranks), "--distributed-backend", "gloo",
                  "--ddp-backend", "legacy_ddp"]  # fmt: skip
    ranks = [["--distributed-rank", str(rank)] if num_ranks > 1 else [] for rank in range(num_ranks)]
    return run_ranks([[*words, *rank] for rank in ranks])[0]


SAVING = ("--save-interval-updates", 3, "--update-freq", 2)


def test_two_ranks_train_validate_count_and_resume(stream, tmp_path):
    untrained = tmp_path / "untrained.pt"
    words = [str(stream), *map(str, STAGE[2:]), "--save-dir", str(tmp_path)]
    write_untrained_checkpoint(config_of(words), untrained)
    folder = tmp_path / "stage"
    train_on_ranks(stream, folder, 2, 5, *SAVING, "--finetune-from-model", untrained)
    log = train_on_ranks(stream, folder, 2, 7, *SAVING, "--finetune-from-model", untrained)
    assert "Loaded checkpoint" in log
    state = read_checkpoint(folder / "checkpoint_last.pt")
    assert num_updates(state) == 7
    # Each validation token is charged once, although one rank scored a batch again while the other had one more.
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    charged = [v.sum().item() for k, v in state["model"].items() if k.endswith("valid_tokens_E")]
    assert charged == [tokens, tokens]
    # 94 blocks make 12 batches of 8 blocks (the last of 6): 6 batches for each rank, and 3 updates an epoch, each of 2
    # batches on each rank. 7 updates are 2 epochs, and the first 2 batches of each rank in the third.
    task = make_task(stream, "--mega-batches", "3")
    task.load_dataset("train")
    expected = {"tokens": 0, "token_pairs": 0}
    for epoch, num_batches in ((1, 6), (2, 6), (3, 2)):
        for rank in (0, 1):
            shard = batches(task, "train", epoch, seed=1, num_shards=2, shard_id=rank)  # 1: fairseq's default
            assert len(shard) == 6
            for rows, length in (batch["target"].shape for batch in shard[:num_batches]):
                expected["tokens"] += rows * length
                expected["token_pairs"] += rows * length**2
    assert state["extra_state"]["AlmaLanguageModelingTask"]["processed"]["training"] == expected


LAYOUTS = {
    "one rank": (1, ("--batch-size", 4, "--update-freq", 4)),
    "one rank, larger batches": (1, ("--batch-size", 16, "--update-freq", 1)),
    "two ranks": (2, ("--batch-size", 4, "--update-freq", 2)),
    "four ranks": (4, ("--batch-size", 4, "--update-freq", 1)),
    "two ranks, ZeRO": (2, ("--batch-size", 4, "--update-freq", 2, "--zero-sharding", "os")),
    "experts over two ranks": (2, ("--batch-size", 4, "--update-freq", 2, "--expert-parallel", 2)),
    "experts over four ranks": (4, ("--batch-size", 4, "--update-freq", 1, "--expert-parallel", 4)),
    "two ranks, recomputed": (2, ("--batch-size", 4, "--update-freq", 2, "--checkpoint-activations")),
    "experts over two ranks, recomputed": (
        2,
        ("--batch-size", 4, "--update-freq", 2, "--expert-parallel", 2, "--checkpoint-activations"),
    ),
    "experts over two of four ranks": (4, ("--batch-size", 4, "--update-freq", 1, "--expert-parallel", 2)),
}
"""Layouts of an update of 16 sequences."""
SAME = ("--optimizer", "fused_adam", "--lr", 5e-4, "--log-interval", 1, "--seed", 3, "--clip-norm", 1.0)


def losses(log: str) -> list[float]:
    """Return the loss of each update in a log."""
    records = [json.loads(found) for found in re.findall(r"\| train_inner \| (\{.*\})", log)]
    return [float(record["nll_loss"]) for record in records]


def weights(folder) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoint_last.pt")["model"]


def same_weights(a, b) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        x, y = value, b[name]
        if name.endswith("qkv_proj.bias"):
            # The gradient of the keys' bias is zero but for rounding errors, from which Adam makes whole steps.
            x, y = (torch.cat([part for n, part in enumerate(bias.chunk(3)) if n != 1]) for bias in (x, y))
        # Compare norms, because a rounding error of a gradient near 0 can change the direction of a step of Adam.
        assert (x - y).norm() <= 1e-3 * y.norm() + 1e-5, (name, (x - y).abs().max())


@pytest.fixture(scope="module")
def untrained(stream, tmp_path_factory):
    path = tmp_path_factory.mktemp("untrained") / "untrained.pt"
    words = [str(stream), *map(str, STAGE[2:]), "--save-dir", str(path.parent), *map(str, SAME[:2])]
    write_untrained_checkpoint(config_of(words), path)
    return path


@pytest.fixture(scope="module")
def trained_in(stream, untrained, tmp_path_factory):
    """trained_in(name): the log and the folder of 20 updates in a layout. Tests must not change the folder."""

    @functools.cache
    def train(name: str) -> tuple[str, Path]:
        folder, (num_ranks, options) = tmp_path_factory.mktemp("layout"), LAYOUTS[name]
        log = train_on_ranks(stream, folder, num_ranks, 20, *SAME, *options, "--finetune-from-model", untrained)
        return log, folder

    return train


@pytest.fixture(scope="module")
def on_one_rank(trained_in):
    """The log and the folder of 20 updates on one rank."""
    return trained_in("one rank")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two ranks", marks=pytest.mark.slow),
        pytest.param("four ranks", marks=pytest.mark.slow),
        pytest.param("two ranks, ZeRO", marks=pytest.mark.slow),
        "experts over two ranks",
        pytest.param("experts over four ranks", marks=pytest.mark.slow),
        pytest.param("experts over two of four ranks", marks=pytest.mark.slow),
        pytest.param("two ranks, recomputed", marks=pytest.mark.slow),
        pytest.param("experts over two ranks, recomputed", marks=pytest.mark.slow),
    ],
)
def test_twenty_updates_are_the_same_on_any_number_of_ranks(trained_in, on_one_rank, name):
    log, folder = trained_in(name)
    assert len(losses(log)) == 20
    assert losses(log) == pytest.approx(losses(on_one_rank[0]), abs=1e-5)
    same_weights(weights(folder), weights(on_one_rank[1]))
    # The 94 sequences of an epoch, in the order of their numbers, are 5 updates of 16 sequences and one of 14.
    states = [read_checkpoint(folder / "checkpoint_last.pt")["extra_state"] for folder in (folder, on_one_rank[1])]
    for state in states:
        assert (state["train_iterator"]["epoch"], state["train_iterator"]["sequences_in_epoch"]) == (4, 32)
    counts = [state["AlmaLanguageModelingTask"]["processed"]["training"] for state in states]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("one rank", "two ranks", marks=pytest.mark.slow),
        pytest.param("two ranks", "one rank", marks=pytest.mark.slow),
        pytest.param("four ranks", "two ranks, ZeRO", marks=pytest.mark.slow),
        pytest.param("two ranks, ZeRO", "four ranks", marks=pytest.mark.slow),
        ("experts over two ranks", "one rank"),
        pytest.param("one rank", "experts over two ranks", marks=pytest.mark.slow),
        pytest.param("experts over two ranks", "experts over four ranks", marks=pytest.mark.slow),
        pytest.param("experts over four ranks", "two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_on_another_number_of_ranks_in_the_middle_of_an_epoch(
    stream, untrained, on_one_rank, tmp_path, first, second
):
    for (num_ranks, options), updates in ((LAYOUTS[first], 9), (LAYOUTS[second], 20)):
        log = train_on_ranks(stream, tmp_path, num_ranks, updates, *SAME, *options, "--finetune-from-model", untrained)
    assert "@ 9 updates" in log
    assert losses(log) == pytest.approx(losses(on_one_rank[0])[9:], abs=1e-5)
    same_weights(weights(tmp_path), weights(on_one_rank[1]))


@pytest.mark.slow
def test_larger_batches_give_the_same_gradient_apart_from_capacity_and_balance_loss(
    stream, untrained, on_one_rank, tmp_path
):
    """Both are computed for each forward pass, so they depend on the size of the batches."""
    found = {}
    for name in ("one rank, larger batches", "two ranks"):
        num_ranks, options = LAYOUTS[name]
        more = ("--capacity-factor", 0, "--balance-loss-weight", 0, "--finetune-from-model", untrained)
        log = train_on_ranks(stream, tmp_path / name, num_ranks, 20, *SAME, *options, *more)
        found[name] = losses(log)
    assert found["two ranks"] == pytest.approx(found["one rank, larger batches"], rel=1e-5)
    assert found["two ranks"] != pytest.approx(losses(on_one_rank[0]), abs=1e-3)


@pytest.mark.parametrize("name", [pytest.param("two ranks", marks=pytest.mark.slow), "experts over two ranks"])
def test_a_model_grown_from_two_ranks_is_that_grown_from_one(trained_in, on_one_rank, tmp_path, name):
    grown = []
    for _, folder in (trained_in(name), on_one_rank):
        grow_checkpoint(folder / "checkpoint_best.pt", tmp_path / "grown.pt", 2, "copy", 0.01, 7)
        grown.append(read_checkpoint(tmp_path / "grown.pt")["model"])
    assert [v.shape[0] for k, v in grown[0].items() if k.endswith("valid_loss_E")] == [6, 6]
    same_weights(*grown)


@pytest.mark.slow  # ten processes
def test_an_average_and_a_kept_optimizer_of_spread_experts_go_on_as_on_each_rank(stream, untrained, tmp_path):
    """Two stages, in which each rank has half of the experts, or all of them. With half, the second is interrupted."""
    settings = LanguageModelSettings(
        stream=str(stream), out=str(tmp_path), updates=8, average="decay:0.8", optimizer_state="keep",
        schedule="constant",
    )  # fmt: skip
    found = {}
    for expert_parallel in (1, 2):
        start, stages = untrained, []
        for stage, stops in ((1, (8,)), (2, (5, 8) if expert_parallel == 2 else (8,))):
            folder = tmp_path / f"stage_{stage}_of_{expert_parallel}"
            for updates in stops:
                options = (*SAME[:4], "--expert-parallel", expert_parallel, "--max-update", updates)
                commands = member_commands(stream, folder, tmp_path, 2, *options, "--finetune-from-model", start)
                run_ranks(
                    [[*words, "--average", settings.average, "--keep-optimizer"] for words in commands], seconds=600
                )
            finish_stage(folder, settings)
            start = folder / CONTINUATION
            stages += [read_checkpoint(folder / name) for name in (BEST, CONTINUATION)]
        found[expert_parallel] = stages
    for spread, whole in zip(found[2], found[1], strict=True):
        same_weights(spread["model"], whole["model"])
        for name, digests in spread["extra_state"][EXPERT_DIGESTS].items():
            assert digests == digests_of_experts(spread["model"][name])
    assert [one["extra_state"][AVERAGE]["count"] for one in found[2][1::2]] == [8, 16]
    assert not torch.equal(*(one["model"]["decoder.layers.1.mixture.fc1_weight"] for one in found[2][2:]))
    states = [one[-1]["last_optimizer_state"]["state"] for one in (found[2], found[1])]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert int(state["step"]) == int(states[1][number]["step"]) == 16
        assert (state["exp_avg_sq"] - states[1][number]["exp_avg_sq"]).norm() <= 1e-2 * state["exp_avg_sq"].norm()


@pytest.mark.slow
def test_six_grown_experts_are_trained_on_four_ranks_as_on_one(stream, on_one_rank, tmp_path):
    grow_checkpoint(on_one_rank[1] / "checkpoint_best.pt", tmp_path / "grown.pt", 2, "copy", 0.01, 7)
    found = {}
    for name in ("one rank", "experts over four ranks"):
        num_ranks, options = LAYOUTS[name]
        more = ("--finetune-from-model", tmp_path / "grown.pt", "--num-experts", 6)
        log = train_on_ranks(stream, tmp_path / name, num_ranks, 5, *SAME, *options, *more)
        found[name] = (losses(log), weights(tmp_path / name))
    assert found["experts over four ranks"][0] == pytest.approx(found["one rank"][0], abs=1e-5)
    same_weights(found["experts over four ranks"][1], found["one rank"][1])


def test_the_log_has_the_load_of_the_ranks_and_the_time_of_the_exchange(trained_in):
    log, _ = trained_in("experts over two ranks")
    records = [json.loads(found) for found in re.findall(r"\| train_inner \| (\{.*\})", log)]
    for record in records:
        assert 1 <= float(record["busiest_rank_load"]) <= 2
        assert float(record["all_to_all_seconds"]) > 0


@pytest.mark.slow
def test_a_changed_expert_is_found_when_training_continues_and_when_the_model_grows(stream, tmp_path):
    options = ("--optimizer", "fused_adam", "--expert-parallel", 2, "--max-update")
    folder = tmp_path / "stage"
    run_ranks(member_commands(stream, folder, tmp_path, 2, *options, 2))
    path = folder / "checkpoint_last.pt"
    checkpoint = read_checkpoint(path)
    digests = checkpoint["extra_state"][EXPERT_DIGESTS]
    assert len(digests) == 8
    for name, of_experts in digests.items():
        assert of_experts == digests_of_experts(checkpoint["model"][name])
    averages = [state["exp_avg"].shape for state in checkpoint["last_optimizer_state"]["state"].values()]
    assert sum(shape[0] == 4 for shape in averages) == 8 + 2  # and two routers
    # It continues, also with all experts on one rank.
    shutil.copytree(folder, tmp_path / "copy")
    for num_ranks, more in ((2, ()), (1, ("--expert-parallel", 1))):
        run_ranks(member_commands(stream, tmp_path / "copy", tmp_path, num_ranks, *options, 3, *more))
    name = "decoder.layers.3.mixture.fc2_weight"
    checkpoint["model"] = {**checkpoint["model"], name: checkpoint["model"][name].clone()}
    checkpoint["model"][name][3] = 0
    write_checkpoint(checkpoint, path)
    expected = f"is damaged: the experts in {name} are not those that were saved"
    with pytest.raises(AssertionError, match=f"{path} {expected}. Remove {folder} to restart"):
        run_ranks(member_commands(stream, folder, tmp_path, 2, *options, 3))
    with pytest.raises(AssertionError, match=f"{path} {expected}. Remove the folder of the stage that wrote it"):
        more = ("--finetune-from-model", path)
        run_ranks(member_commands(stream, tmp_path / "new", tmp_path, 2, *options, 3, *more))
    with pytest.raises(SettingError, match=expected):
        grow_checkpoint(path, tmp_path / "grown.pt", 2)


@pytest.mark.slow
def test_too_little_memory_in_validation_ends_all_ranks(stream, tmp_path, monkeypatch):
    """fairseq would try the batch again on one rank, while the others wait for it in another mixture."""
    (tmp_path / "sitecustomize.py").write_text("""
import sys
if "train_member" in " ".join(sys.orig_argv):
    from fairseq_alma.modules import switch_feed_forward
    forward = switch_feed_forward.SwitchFeedForward.forward
    def fail(self, x):
        if not self.training and self.shard.group.position == 0:
            raise RuntimeError("CUDA out of memory (made up by the test)")
        return forward(self, x)
    switch_feed_forward.SwitchFeedForward.forward = fail
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ALMA_WARM", "0")
    options = ("--optimizer", "fused_adam", "--expert-parallel", 2, "--max-update", 2)
    with pytest.raises(AssertionError, match="out of memory in validation: lower --batch-size"):
        run_ranks(member_commands(stream, tmp_path / "stage", tmp_path, 2, *options), seconds=90)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(("--optimizer", "adam"), "needs --optimizer fused_adam, without", marks=pytest.mark.slow),
        pytest.param(("--zero-sharding", "os"), "needs --optimizer fused_adam, without", marks=pytest.mark.slow),
        pytest.param(("--store-ema",), "expert_parallel does not work with --store-ema", marks=pytest.mark.slow),
        pytest.param(("--num-experts", 1), "expert_parallel=2 needs at least 2 experts", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_work_with_spread_experts_is_refused(stream, tmp_path, options, expected):
    num_ranks, layout = LAYOUTS["experts over two ranks"]
    with pytest.raises(AssertionError, match=expected):
        train_on_ranks(stream, tmp_path, num_ranks, 2, *SAME, *layout, *options)

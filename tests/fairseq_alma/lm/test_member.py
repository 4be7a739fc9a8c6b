"""A member's stage apart from the training itself: devices, refused options, advice after a failure."""

import json
from dataclasses import replace

import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint, require_checkpoint, write_checkpoint
from fairseq_alma.core.catalogue import learners
from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.lm import fairseq_config
from fairseq_alma.lm.batches import SHARE_OF_MEMORY, bytes_of_training, sequences_per_pass, usable_devices
from fairseq_alma.lm.failures import failure_message
from fairseq_alma.lm.fairseq_config import Member, TrainingConfigs, identity_of_config, member_config
from fairseq_alma.lm.learners import LEARNERS, make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.processes import NoProcesses


class Devices(NoProcesses):
    """Like NoProcesses, on a machine with `count` devices."""

    def __init__(self, count, memory=None):
        super().__init__()
        self.count, self.memory = count, memory
        self.kind = "cpu" if memory is None else "cuda"

    def num_devices(self, num_jobs):
        return self.count // num_jobs


def settings(stream, out, **more):
    return LanguageModelSettings.from_mapping({
        "stream": str(stream), "out": str(out), "arch": "switch_lm_tiny", "tokens_per_sample": 32,
        "sequences_per_update": 8, "batch_size": 1, "updates": 4, **more,
    })  # fmt: skip


def train(stream, out, processes, **more):
    folder = StreamFolder.open(stream)
    learner = make_learner(settings(stream, out, **more), folder.without_test(), processes)
    (first, *_) = folder.stream()
    learner.train(Stage(1, (first,), (), False, out / "stages" / "stage_001"))


def test_every_learner_of_the_catalogue_is_implemented():
    assert set(LEARNERS) == {entry.name for entry in learners("language model")}


def test_members_share_the_devices_and_an_update_keeps_its_size(stream, tmp_path):
    processes = Devices(4)
    with pytest.raises(StageError):
        train(stream, tmp_path / "run", processes, learner="ens", members=2)
    for config in processes.configs:
        assert config.optimization.update_freq == [4]  # 8 sequences = 4 passes x 1 sequence x 2 devices
        assert config.distributed_training.distributed_world_size == 2
    assert [config.common.seed for config in processes.configs] == [0, 10_000_000]


@pytest.mark.slow
def test_a_stage_begun_on_other_devices_is_continued_and_not_shared(stream, tmp_path):
    def begin(devices):
        with pytest.raises(StageError, match="ended with status 1"):
            train(stream, tmp_path / "run", devices, reuse_from=str(tmp_path / "share"))
        return json.loads((folder / "started.json").read_text())

    folder = tmp_path / "run/stages/stage_001/member_1"
    on_two = begin(Devices(2))
    assert (on_two["devices"], on_two["kind"]) == (2, "cpu")
    on_four = begin(Devices(4))  # nothing was saved yet, so it starts again
    assert on_four["devices"] == 4
    assert on_four["key"] not in (None, on_two["key"])
    untrained = tmp_path / "run/stages/stage_000/member_1/checkpoint_untrained.pt"
    write_checkpoint({**require_checkpoint(untrained), "last_optimizer_state": {}}, folder / "checkpoint_last.pt")
    assert begin(Devices(4)) == on_four
    common = {"batch_size": 1, "expert_parallel": 1, "key": None}
    assert begin(Devices(2)) == {"kind": "cpu", "devices": 2, **common}
    assert begin(Devices(4, memory=1 << 40)) == {"kind": "cuda", "devices": 4, **common}


def test_with_a_larger_capacity_factor_fewer_sequences_fit(stream, tmp_path):
    sizes = {"batch_size": None, "sequences_per_update": 64, "tokens_per_sample": 512}
    found = []
    for number, factor in enumerate((1, 8)):
        gpu = Devices(1, memory=1_600_000_000)
        with pytest.raises(StageError):
            train(stream, tmp_path / str(number), gpu, fairseq=f"--capacity-factor {factor}", **sizes)
        found.append(gpu.configs[0].dataset.batch_size)
    assert found[1] < found[0]


def test_options_that_change_the_result_change_the_key_of_shared_stages(stream, tmp_path):
    def identity(number, options):
        processes = Devices(2)
        with pytest.raises(StageError):
            train(stream, tmp_path / str(number), processes, fairseq=options)
        return identity_of_config(processes.configs[0])

    plain, *others = (
        identity(number, options)
        for number, options in enumerate(("", "--num-workers 3", "--ddp-comm-hook fp16", "--fix-batches-to-gpus"))
    )
    assert others[0] == plain  # how the data are read has no effect
    assert plain not in others[1:]


@pytest.mark.parametrize(
    ("before", "log", "status", "members", "advice"),
    [
        ("", "OSError: [Errno 28] No space left on device", 1, 1, "free space on the disk"),
        (
            "OSError: No space left on device\n",
            "killed",
            -9,
            1,
            "if it was killed for lack of memory, give a batch_size= below 16",
        ),
        ("", "2026-11-23 | INFO | train_inner", 143, 1, "SIGTERM): (no error line)"),
        ("", "process 1 terminated with signal SIGKILL", 1, 1, "if it was killed for lack of memory, give"),
        ("", "torch.OutOfMemoryError: CUDA out of memory", 1, 2, "fewer members at the same time (parallel=1)"),
        ("", "FloatingPointError: the loss is nan", 1, 1, "lower lr="),
        (
            "FloatingPointError: the loss is nan\n",
            "ImportError: no iopath",
            1,
            1,
            "fix the problem that the log reports",
        ),
        # Two processes: the error of one of them ends the other, and Slurm ends the job step by SIGTERM.
        (
            "",
            "[rank0]: fairseq_alma.core.errors.SettingError: no\n[rank1]: RuntimeError: Connection closed by peer",
            143,
            1,
            "SIGTERM): fairseq_alma.core.errors.SettingError: no\n",
        ),
        ("", "[rank1]: ValueError: no --store-ema", 143, 1, "fix the problem that the log reports"),
        ("", "[rank1]: RuntimeError: Connection closed by peer", 143, 1, "): RuntimeError: Connection closed by peer"),
    ],
)
def test_advice_depends_on_the_log_of_this_attempt_only(tmp_path, before, log, status, members, advice):
    path = tmp_path / "log.txt"
    path.write_text(before + log)
    assert advice in failure_message(path, len(before), status, 0.001, 16, members)


def test_an_error_that_follows_a_loss_that_is_not_finite_does_not_hide_it(tmp_path):
    path, after = tmp_path / "log.txt", "During handling of the above exception, another exception occurred:\n"
    path.write_text(f"FloatingPointError: the loss is nan at update 3\n{after}RuntimeError: CUDA error: device-side\n")
    message = failure_message(path, 0, 1, 0.001, 16, 1)
    assert "status 1: FloatingPointError: the loss is nan at update 3\n" in message
    assert "lower lr=0.001" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cpu", "--cpu is refused"),
        ("--store-ema --ema-decay 0.9", "--ema-decay, --store-ema is refused, .*average="),
        ("-a switch_lm_base", "--arch is set by"),
        ("--max-valid-steps 1", "--max-valid-steps is refused"),
        ("--replay-mega-batches 3 --replay-share 0.5", "--replay-mega-batches, --replay-share is refused"),
        ("--mega-batches 3", "--mega-batches is refused"),
        ("--write-checkpoints-asynchronously", "--write-checkpoints-asynchronously is refused"),
        ("--num-shards=2 --shard-id=1", "--num-shards, --shard-id is refused"),
        ("--distributed-world-size 4", "--distributed-world-size is set by"),
        ("--dropout 0.1", "--dropout is set by"),  # the default of fairseq, but not of this run
        ("--bf16", "give precision=bfloat16"),
        ("--update-freq 7", "update-freq"),
        ("--weight-decay 0.1", "--weight-decay is set by"),
        ("--adam-eps much", "refuses the options from fairseq=: .*--adam-eps: invalid float value"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--adam-eps 'a", "cannot be split into options"),
    ],
)
def test_options_that_would_change_the_protocol_are_refused(stream, tmp_path, options, message):
    given = settings(stream, tmp_path / "run", fairseq=options, dropout=0.2)
    with pytest.raises(SettingError, match=message):
        make_learner(given, StreamFolder.open(stream).without_test(), NoProcesses())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arch", ["wav2vec2", "lstm_lm", "unknown"])
def test_what_is_no_language_model_with_a_dataclass_is_refused(stream, tmp_path, arch):
    given = settings(stream, tmp_path / "run", arch=arch, precision="float32")
    with pytest.raises(SettingError, match=f"arch={arch} is not a language model that fairseq or plugin= has"):
        make_learner(given, StreamFolder.open(stream).without_test(), NoProcesses())


def test_other_options_of_fairseq_reach_the_training(stream, tmp_path):
    processes = NoProcesses()
    options = "--balance-loss-weight 0.02 --adam-betas '(0.8, 0.9)' --decoder-layers 2"
    with pytest.raises(StageError):
        train(stream, tmp_path / "it's a run", processes, fairseq=options, weight_decay=0.1)
    (config,) = processes.configs
    assert (config.optimizer.weight_decay, config.criterion.balance_loss_weight) == (0.1, 0.02)
    assert (config.optimizer.adam_betas, config.model.decoder_layers) == ("(0.8, 0.9)", 2)
    assert config.checkpoint.save_dir == str(tmp_path / "it's a run/stages/stage_001/member_1")


@pytest.mark.parametrize("name", ["lr", "weight_decay", "checkpoint_minutes"])
def test_numbers_must_be_finite(stream, tmp_path, name):
    with pytest.raises(SettingError, match=f"{name}=nan must be a finite number"):
        settings(stream, tmp_path, **{name: float("nan")})


def test_options_that_vary_are_set_as_fairseq_would_set_them(stream, monkeypatch):
    values = {
        "data": stream, "arch": "switch_lm_tiny", "total_num_update": 17, "max_update": 17, "lr": [0.003],
        "warmup_updates": 3, "mega_batches": "3", "replay_mega_batches": "1-2", "replay_share": 0.5, "num_experts": 6,
        "seed": 10_000_003, "save_interval_updates": 4, "validate_interval_updates": 4, "log_interval": 2,
    }  # fmt: skip
    assert values.keys() >= fairseq_config.VARYING
    ours = [member_config({**values, "seed": seed}) for seed in (10_000_003, 4)]
    monkeypatch.setattr(fairseq_config, "VARYING", set())
    assert ours == [member_config({**values, "seed": seed}) for seed in (10_000_003, 4)]
    assert ours[0] != ours[1]


@pytest.mark.parametrize(("num_devices", "used", "batch_size", "passes"), [(1, 1, 8, 24), (64, 64, 3, 1), (7, 6, 8, 4)])
def test_an_update_is_divided_among_any_number_of_devices(num_devices, used, batch_size, passes):
    paper = LanguageModelSettings(stream="s", out="o", updates=1)  # 192 sequences of 512 tokens
    assert usable_devices(paper, num_devices) == used
    assert sequences_per_pass(paper, None, 50_000, used, memory=None) == batch_size
    assert batch_size * used * passes == 192


def test_on_a_gpu_the_forward_pass_fills_the_memory_but_no_more(stream, tmp_path):
    paper = LanguageModelSettings(stream="s", out="o", updates=1, arch="switch_lm_large", precision="bfloat16")
    values = {"data": stream, "arch": "switch_lm_large", "precision": "bfloat16", "total_num_update": 1}
    model = member_config(values).model
    sizes = [sequences_per_pass(paper, model, 50_000, 1, memory=gigabytes << 30) for gigabytes in (4, 24, 80, 140)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, 192)


def test_the_memory_of_an_average_is_counted(stream):
    """It has 4 bytes for each parameter, of which there are 18 bytes anyway."""
    model = member_config({"data": stream, "arch": "switch_lm_large", "total_num_update": 1}).model
    rest = 2**30 + bytes_of_training(model, 50_000, 2) - bytes_of_training(model, 50_000, 1)  # 1 GB, and one token
    plain, averaged = (bytes_of_training(model, 50_000, 1, averages=averages) - rest for averages in (False, True))
    assert averaged / plain == pytest.approx(22 / 18)
    summed = bytes_of_training(model, 50_000, 1, num_devices=2) - rest  # on two devices, the gradients are summed
    assert summed / plain == pytest.approx(22 / 18)
    alone, spread = (bytes_of_training(model, 50_000, 1, 2, num_devices=number) for number in (1, 2))
    assert 0 < spread - alone < summed - plain  # each device has experts of its own, whose gradients it does not sum
    paper = LanguageModelSettings(stream="s", out="o", updates=1, arch="switch_lm_large", precision="bfloat16")
    mean = replace(paper, average="power:0")
    memory = int(bytes_of_training(model, 50_000, 4 * 512) / SHARE_OF_MEMORY) + 1
    assert sequences_per_pass(paper, model, 50_000, 1, memory) == 4
    assert sequences_per_pass(mean, model, 50_000, 1, memory) < 4


def test_a_batch_size_that_does_not_divide_the_update_is_refused():
    with pytest.raises(SettingError, match="sequences_per_update=192 must be a multiple of batch_size=7"):
        usable_devices(LanguageModelSettings(stream="s", out="o", updates=1, batch_size=7), 1)


@pytest.mark.parametrize(("num_devices", "expert_parallel", "used"), [(8, 4, 8), (7, 4, 4), (16, 3, 12), (5, 1, 4)])
def test_the_number_of_devices_is_a_multiple_of_expert_parallel(num_devices, expert_parallel, used):
    paper = LanguageModelSettings(stream="s", out="o", updates=1, expert_parallel=expert_parallel)
    assert usable_devices(paper, num_devices) == used


def test_experts_over_more_devices_than_there_are_is_refused():
    paper = LanguageModelSettings(stream="s", out="o", updates=1, expert_parallel=4)
    with pytest.raises(
        SettingError, match="needs at least 4 devices for each member, but a member is trained on 3 dev"
    ):
        usable_devices(paper, 3)
    with pytest.raises(SettingError, match="sequences_per_update=192 is not a multiple of 4 x batch_size=96: change"):
        usable_devices(replace(paper, batch_size=96), 8)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"fairseq": "--zero-sharding os"}, "expert_parallel=2 cannot be combined with --zero-sharding"),
        ({"fairseq": "--ddp-backend slowmo"}, "expert_parallel=2 cannot be combined with --ddp-backend slowmo"),
        ({"fairseq": "--ddp-backend fully_sharded"}, "cannot be combined with --ddp-backend fully_sharded"),
    ],
)
def test_what_spread_experts_do_not_allow_is_refused_before_training(stream, tmp_path, more, expected):
    given = settings(stream, tmp_path, expert_parallel=2, batch_size=4, precision="float32", **more)
    configs = TrainingConfigs(given, StreamFolder.open(stream).without_test(), memory=80 << 30)
    with pytest.raises(SettingError, match=expected):
        configs.of(Member.of_run(1, 0, given.experts), num_devices=2)


@pytest.mark.parametrize("option", [{"average": "power:8"}, {"optimizer_state": "keep"}])
def test_what_needs_all_weights_in_one_process_is_refused_if_they_are_spread(stream, tmp_path, option):
    given = settings(stream, tmp_path, precision="float32", fairseq="--ddp-backend fully_sharded", **option)
    configs = TrainingConfigs(given, StreamFolder.open(stream).without_test(), memory=80 << 30)
    with pytest.raises(SettingError, match=" cannot be combined with --ddp-backend fully_sharded, where no process"):
        configs.of(Member.of_run(1, 0, given.experts), num_devices=2)


def test_a_model_is_built_where_the_stream_has_moved(trained, stream, tmp_path):
    """The checkpoint contains the path of the stream, and the mega-batches, of its training."""
    checkpoint = read_checkpoint(trained)
    checkpoint["cfg"]["task"] |= {"data": str(tmp_path / "moved"), "mega_batches": "1-99"}
    write_checkpoint(checkpoint, tmp_path / "old.pt")
    training_view = StreamFolder.open(stream).without_test()
    weights = load_member(tmp_path / "old.pt", training_view, torch.device("cpu"))[0].state_dict()
    assert all(torch.equal(weights[name], value) for name, value in checkpoint["model"].items())


def test_a_fork_with_options_of_fairseq_that_change_the_model_is_refused(stream, tmp_path):
    done = tmp_path / "stages" / "stage_001" / "train.done.json"
    done.parent.mkdir(parents=True)
    (tmp_path / "settings.json").write_text(json.dumps({"fairseq": "--attention-dropout 0.1"}))

    def check(fairseq, **more):
        given = settings(stream, tmp_path, precision="float32", fairseq=fairseq, **{"fork": True, **more})
        configs = TrainingConfigs(given, StreamFolder.open(stream).without_test(), memory=None)
        configs.check_fork(Member.of_run(1, 0, given.experts))

    check("--decoder-layers 6")  # nothing is trained yet
    done.write_text("{}")
    for fairseq in ("--decoder-layers 6", "--decoder-embed-dim 96"):
        with pytest.raises(
            SettingError, match=r"changes the model .* differs.* with fairseq='--attention-dropout 0.1'"
        ):
            check(fairseq)
    check("--attention-dropout 0.2 --adam-betas '(0.9,0.95)'")
    check("--decoder-layers 6", fork=False)  # SeedRecord refuses it


def test_more_devices_than_experts_is_refused(stream, tmp_path):
    with pytest.raises(SettingError, match="expert_parallel=2 needs at least 2 experts, but experts=1: lower"):
        settings(stream, tmp_path, expert_parallel=2, experts=1)


def test_spread_experts_leave_room_for_larger_batches(stream):
    common = {"arch": "switch_lm_large", "precision": "bfloat16"}
    paper = LanguageModelSettings(stream="s", out="o", updates=1, experts=64, **common)
    values = {"data": stream, "num_experts": 64, **common}
    model = member_config({**values, "total_num_update": 1}).model
    sizes = [
        sequences_per_pass(replace(paper, expert_parallel=n), model, 50_000, 8, memory=24 << 30) for n in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]

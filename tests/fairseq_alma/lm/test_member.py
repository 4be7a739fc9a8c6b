"""A member's stage apart from the training itself: devices, refused options, advice after a failure."""

import json

import pytest

from fairseq_alma.checkpoints import require_checkpoint, write_checkpoint
from fairseq_alma.core.catalogue import learners
from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.learners import LEARNERS, make_learner
from fairseq_alma.lm.member import failure_message
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.processes import NoProcesses


class Devices(NoProcesses):
    """Like NoProcesses, on a machine with `count` devices."""

    def __init__(self, count):
        super().__init__()
        self.count = count

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
    for command in processes.commands:
        assert command[command.index("--update-freq") + 1] == "4"  # 8 sequences = 4 passes x 1 sequence x 2 devices
    seeds = [command[command.index("--seed") + 1] for command in processes.commands]
    assert seeds == ["0", "10000000"]


def test_a_stage_begun_on_other_devices_is_not_continued(stream, tmp_path):
    with pytest.raises(StageError, match="ended with status 1"):
        train(stream, tmp_path / "run", Devices(2))
    folder = tmp_path / "run/stages/stage_001/member_1"
    assert json.loads((folder / "started.json").read_text())["devices"] == 2
    with pytest.raises(StageError, match="ended with status 1"):
        train(stream, tmp_path / "run", Devices(4))  # nothing was saved yet, so it starts again
    untrained = tmp_path / "run/stages/stage_000/member_1/checkpoint_untrained.pt"
    write_checkpoint({**require_checkpoint(untrained), "last_optimizer_state": {}}, folder / "checkpoint_last.pt")
    with pytest.raises(StageError, match=r"started on 4 device\(s\), but now it would get 2: continue with the same"):
        train(stream, tmp_path / "run", Devices(2))


@pytest.mark.parametrize(
    ("before", "log", "status", "members", "advice"),
    [
        ("", "OSError: [Errno 28] No space left on device", 1, 1, "free space on the disk"),
        (
            "OSError: No space left on device\n",
            "killed",
            -9,
            1,
            "if it was killed for lack of memory, halve batch_size=1",
        ),
        ("", "torch.OutOfMemoryError: CUDA out of memory", 1, 2, "fewer members at the same time (parallel=1)"),
        ("", "FloatingPointError: the loss is nan", 1, 1, "lower lr="),
        (
            "FloatingPointError: the loss is nan\n",
            "ImportError: no iopath",
            1,
            1,
            "fix the problem that the log reports",
        ),
    ],
)
def test_advice_depends_on_the_log_of_this_attempt_only(stream, tmp_path, before, log, status, members, advice):
    path = tmp_path / "log.txt"
    path.write_text(before + log)
    assert advice in failure_message(path, len(before), status, settings(stream, tmp_path), members)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--distributed-world-size 4", "--distributed-world-size is set by"),
        ("--cpu", "--cpu is set by"),
        ("--optimizer nag", "--optimizer is set by"),
        ("--bf16", "expects a TPU and fails"),
        (5, "must be options of fairseq-train"),
    ],
)
def test_options_that_would_change_an_update_are_refused(stream, tmp_path, options, message):
    with pytest.raises(SettingError, match=message):
        settings(stream, tmp_path, fairseq=options)

"""The program that trains a member: when it writes checkpoints, and how often."""

import pytest

from fairseq_alma.checkpoints import BEST, LAST, num_updates, read_checkpoint
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.lm.test_learners import train_member_in_a_fork
from tests.fairseq_alma.processes import NoProcesses


@pytest.mark.parametrize(("minutes", "num_saved"), [(10, 2), (1e-9, 12)])
def test_checkpoints_are_written_after_validations_and_at_intervals_of_time(stream, tmp_path, minutes, num_saved):
    settings = LanguageModelSettings.from_mapping({
        "stream": str(stream), "out": str(tmp_path / "run"), "arch": "switch_lm_tiny", "tokens_per_sample": 32,
        "sequences_per_update": 8, "updates": 12, "validations": 2, "lr": 0.005, "checkpoint_minutes": minutes,
    })  # fmt: skip
    processes, folder = NoProcesses(), StreamFolder.open(stream)
    learner = make_learner(settings, folder.without_test(), processes)
    (first, *_) = folder.stream()
    with pytest.raises(StageError):  # nothing is trained, but the configuration is written
        learner.train(Stage(1, (first,), (), False, tmp_path / "run/stages/stage_001"))
    member = tmp_path / "run/stages/stage_001/member_1"
    (command,) = processes.commands
    assert train_member_in_a_fork(command, member / "log.txt") == 0
    log = (member / "log.txt").read_text()
    assert log.count("Finished saving checkpoint") == num_saved
    assert log.count('begin validation on "valid"') == 2
    assert {path.name for path in member.glob("*.pt*")} == {LAST, BEST}
    assert num_updates(read_checkpoint(member / LAST)) == 12
    best = read_checkpoint(member / BEST)
    assert best["extra_state"]["val_loss"] == read_checkpoint(member / LAST)["extra_state"]["best"]
    if num_updates(best) == 12 and minutes == 10:
        assert (member / BEST).samefile(member / LAST)  # written once

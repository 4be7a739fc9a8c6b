"""Runs that are killed at any moment, run out of disk space, or are stopped by hand: the same command completes them.

`pytest -s` shows what each run was doing when it was killed; `-rP` shows it afterwards.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fairseq_alma.checkpoints import num_updates, read_checkpoint
from fairseq_alma.core.json_lines import JsonLines
from launch.local import GRACE_SECONDS
from tests.commands import RUN
from tests.fairseq_alma.killing import (
    DEADLINE_SECONDS,
    KilledRun,
    Moment,
    Reference,
    cut_short,
    end_all,
    rows_without_seconds,
    same_rows,
    same_run,
    trainings,
    wait_until,
    wait_until_gone,
)
from tests.streams import make_stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

UPDATES = 12
SHORT = (*RUN, "dropout=0.1", "validations=4", f"updates={UPDATES}")
GMOE = ("learner=gmoe", "experts=4", "grow_experts=[1,2]")
ENS = ("learner=ens", "members=2")


@pytest.fixture(autouse=True)
def end_started_processes():
    yield
    end_all()


@pytest.fixture(scope="module")
def gmoe(stream, tmp_path_factory) -> Reference:
    """A run of two stages with a growth between them."""
    return Reference.of(stream, tmp_path_factory.mktemp("gmoe") / "whole", (*SHORT, *GMOE, "mega_batches=2"))


def stage(out: Path, k: int) -> Path:
    return out / "stages" / f"stage_{k:03d}"


def member(out: Path, k: int, number: int = 1) -> Path:
    return stage(out, k) / f"member_{number}"


def exists(pattern: str):
    return lambda out: any(out.glob(pattern))


def half_written(pattern: str):
    """Return a condition: a file of this name has one megabyte. A whole checkpoint has more than five."""

    def is_half_written(out: Path) -> bool:
        with suppress(OSError):  # renamed meanwhile
            return any(path.stat().st_size >= 1 << 20 for path in out.glob(pattern))
        return False

    return is_half_written


def damaged(name: str):
    """Return a condition: a checkpoint of this name is truncated."""
    return lambda out: [path for path in cut_short(out) if path.match(name)]


def has_trained(out: Path, k: int) -> bool:
    """Return True if the training of stage k has saved its last checkpoint, and has no done mark yet."""
    log = member(out, k) / "log.txt"
    if not log.exists() or (member(out, k) / "done.json").exists():
        return False
    _, is_last, after = log.read_bytes().partition(b'"valid_num_updates": "%d"' % UPDATES)
    return bool(is_last) and b"end of epoch" in after


def num_rows(out: Path) -> int:
    ledger = out / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


DROP_STATE = "dropping the optimizer's state"
FAIRSEQ_WRITES = Moment(
    "fairseq's write of a checkpoint",
    half_written("stages/*/member_*/.lease.*/*.checkpoint_last.*"),
    damaged("*.checkpoint_last.*"),
)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["precision=float32", "precision=bfloat16", "compile=true"])
def test_a_growing_mixture_killed_at_random_and_inside_a_write_ends_like_an_uninterrupted_one(stream, tmp_path, more):
    """With a checkpoint about every second update, most of them without a validation."""
    settings = (*SHORT, *GMOE, "mega_batches=2", more)
    reference = Reference.of(stream, tmp_path / "whole", settings)
    run = KilledRun(stream, tmp_path / "run", (*settings, "checkpoint_minutes=0.001"))
    run.kill_at(FAIRSEQ_WRITES)
    kills = run.kill_at_random(2, reference, random.Random(1))
    run.report()
    run.finish()
    same_run(run.out, reference.out)
    assert kills >= 1  # if the machine has become faster meanwhile, the second kill may have come after the end


@pytest.mark.slow
@pytest.mark.parametrize("learner", [(*GMOE, "mega_batches=3"), (*ENS, "mega_batches=2")], ids=["gmoe", "ens"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_five_kills_at_random_and_one_inside_a_write_change_nothing(stream, tmp_path, learner, precision):
    settings = (*RUN, "dropout=0.1", "updates=40", "validations=5", f"precision={precision}", *learner)
    reference = Reference.of(stream, tmp_path / "whole", settings)
    chance, kills = random.Random(0), 0
    for life in range(
        3
    ):  # if the machine has become faster, late kills come after the end of a run; then another run is killed
        run = KilledRun(stream, tmp_path / f"killed_{life}", settings)
        run.kill_at(FAIRSEQ_WRITES)
        kills += run.kill_at_random(5 - kills, reference, chance)
        run.report()
        run.finish()
        same_run(run.out, reference.out)
        if kills == 5:
            break
    assert kills == 5


@pytest.mark.slow
def test_a_growing_mixture_killed_at_each_point_in_turn_ends_like_an_uninterrupted_one(stream, gmoe, tmp_path):
    points = [
        Moment(
            "the write of the untrained checkpoint",
            half_written(".lease.*/*.checkpoint_untrained.*"),
            damaged("*.checkpoint_untrained.*"),
        ),
        FAIRSEQ_WRITES,
        DROP_STATE,
        Moment(
            "between the done marks of the member and of the training",
            lambda out: (member(out, 1) / "done.json").exists() and not (stage(out, 1) / "train.done.json").exists(),
        ),
        Moment(
            "evaluation",
            lambda out: (stage(out, 1) / "train.done.json").exists() and num_rows(out) == 1,
        ),
        Moment(
            "between the row and the summary",
            lambda out: num_rows(out) == 2 and not (out / "summary.json").exists(),
        ),
        Moment(
            "the write of the grown checkpoint",
            half_written(".lease.*/*.checkpoint_grown.*"),
            damaged("*.checkpoint_grown.*"),
        ),
        Moment(
            "between the grown checkpoint and its done mark",
            lambda out: (
                (stage(out, 2) / "grow/member_1/checkpoint_grown.pt").exists()
                and not (stage(out, 2) / "grow.done.json").exists()
            ),
        ),
    ]
    run = KilledRun(stream, tmp_path / "run", (*SHORT, *GMOE, "mega_batches=2"))
    for point in points:
        if point == DROP_STATE:
            run.kill_in_write(point, f"{run.out.name}/.lease.*/*.checkpoint_best.*")
        else:
            run.kill_at(point)
    run.report()
    run.finish()
    same_run(run.out, gmoe.out)


@pytest.fixture(scope="module")
def ens(stream, tmp_path_factory) -> Reference:
    return Reference.of(stream, tmp_path_factory.mktemp("ens") / "whole", (*SHORT, *ENS, "mega_batches=1"))


@pytest.mark.slow
def test_a_run_that_chooses_its_waits_repeats_its_decisions_after_kills(tmp_path):
    """At the arrivals 6 and 7, the validation perplexities after 1, 2, 3 and 5 mega-batches decide."""
    stream = make_stream(tmp_path / "stream", num_mega_batches=8)
    settings = (*SHORT, "wait=auto")
    reference = Reference.of(stream, tmp_path / "whole", settings)
    run = KilledRun(stream, tmp_path / "run", settings)
    kills = run.kill_at_random(4, reference, random.Random(2))
    run.report()
    run.finish()
    same_run(run.out, reference.out)
    assert kills >= 2
    lines, expected = (JsonLines(out / "decisions.jsonl").values() for out in (run.out, reference.out))
    assert lines == expected
    assert [line["t"] for line in lines if line["due"]] == [1, 2, 3, 5, 8]
    assert "the error falls as N^" in lines[5]["reason"]


@pytest.mark.slow
def test_a_member_that_is_finished_is_not_trained_again(stream, ens, tmp_path):
    run = KilledRun(stream, tmp_path / "run", (*SHORT, *ENS, "mega_batches=1", "parallel=1"))
    one, two = (member(run.out, 1, number) for number in (1, 2))
    run.kill_at(
        Moment("the training of member 2, after that of member 1", exists("stages/*/member_2/checkpoint_last.pt"))
    )
    log = (one / "log.txt").read_bytes()
    assert num_updates(read_checkpoint(one / "checkpoint_last.pt")) == UPDATES
    assert num_updates(read_checkpoint(two / "checkpoint_last.pt")) < UPDATES

    run.kill_at(
        Moment(
            "between the done marks of members 1 and 2",
            lambda out: (one / "done.json").exists() and not (two / "done.json").exists(),
        )
    )
    best = identity(one / "checkpoint_best.pt")
    run.report()
    run.finish()
    same_run(run.out, ens.out)
    assert (one / "log.txt").read_bytes() == log
    assert identity(one / "checkpoint_best.pt") == best


def identity(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written again, even with the same bytes."""
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.slow
def test_a_growing_ensemble_killed_while_it_keeps_outputs_ends_like_an_uninterrupted_one(stream, tmp_path):
    settings = (*SHORT, "learner=gens", "mega_batches=2")
    reference = Reference.of(stream, tmp_path / "whole", settings)

    def keeping(number: int):
        """Return a condition: the outputs of `number` members are kept, and those of one more in part."""

        def is_keeping(out: Path) -> bool:
            return len(list(out.glob("evaluated/*"))) == number and any(out.glob(".lease.*/*.part/*.npy"))

        return is_keeping

    run = KilledRun(stream, tmp_path / "run", settings)
    # The untrained member is not frozen, so none of its outputs are kept.
    run.kill_at(Moment("keeping outputs of member 1", keeping(0)))
    run.kill_at(Moment("keeping outputs of member 2 beside those of member 1", keeping(1)))
    kept = {path: identity(path) for path in run.out.glob("evaluated/[0-9a-f]*/*")}
    run.report()
    run.finish()
    same_run(run.out, reference.out)
    assert len(kept) == 3
    assert {path: identity(path) for path in kept} == kept


def ends_at_once(run: KilledRun, process: subprocess.Popen, to_the_group: bool) -> None:
    """Send Ctrl-C in the middle of a stage of two members, and check how the run ends."""
    folders = [member(run.out, 1, number) for number in (1, 2)]
    before = [identity(path) for folder in folders for path in folder.glob("checkpoint_last.pt")]

    def have_saved() -> bool:
        """Return True if both members have written a checkpoint since the start."""
        with suppress(OSError):  # renamed meanwhile
            return all(identity(folder / "checkpoint_last.pt") not in before for folder in folders)
        return False

    wait_until(have_saved, process)
    running = trainings(process.pid)
    began = time.monotonic()
    if to_the_group:  # as a terminal sends it
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, run.errors()
    seconds = time.monotonic() - began
    assert len(running) == 2
    wait_until_gone(running, 0)  # the driver is the last to end
    print(f"Ctrl-C to {'the group' if to_the_group else 'the driver'}: it took {seconds:.2f} s")
    assert run.errors().splitlines()[-1] == "alma-lm: stopped; run the same command again to continue"
    assert "Traceback" not in run.errors()
    assert not (run.out / "lease.json").exists()
    assert not (member(run.out, 1) / "done.json").exists()
    assert seconds < GRACE_SECONDS  # no process had to be killed


@pytest.mark.slow
def test_ctrl_c_in_an_ensemble_stops_all_its_processes(stream, tmp_path):
    run = KilledRun(stream, tmp_path / "run", (*RUN, *ENS, "mega_batches=1", "updates=400", "validations=100"))
    ends_at_once(run, run.start(), to_the_group=False)


@pytest.mark.slow
def test_ctrl_c_in_an_ensemble_loses_nothing(stream, tmp_path):
    settings = (*RUN, *ENS, "mega_batches=1", "updates=80", "validations=8", "dropout=0.1")
    reference = Reference.of(stream, tmp_path / "whole", settings)
    run = KilledRun(stream, tmp_path / "run", settings)
    for to_the_group in (False, True):
        ends_at_once(run, run.start(), to_the_group)
    run.finish()
    same_run(run.out, reference.out)


class SmallDisk:
    """A small disk, mounted on `folder`."""

    def __init__(self, folder: Path, megabytes: int):
        self.folder = folder
        self._mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")

    def make_room(self, megabytes: int) -> None:
        self._mount("-o", f"remount,size={megabytes}m")

    def fill(self, but_megabytes: int) -> None:
        free = shutil.disk_usage(self.folder).free - (but_megabytes << 20)
        (self.folder / "of_others").write_bytes(bytes(free))

    def empty(self) -> None:
        (self.folder / "of_others").unlink()

    def _mount(self, *arguments: str) -> None:
        subprocess.run(["mount", *arguments, str(self.folder)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path):
    disks = []

    def mount(megabytes: int) -> SmallDisk:
        folder = tmp_path / "disk"
        folder.mkdir()
        try:
            disks.append(SmallDisk(folder, megabytes))
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this test needs the right to mount a small tmpfs")
        return disks[-1]

    yield mount
    for disk in disks:
        subprocess.run(["umount", str(disk.folder)], check=True)


def ends_for_lack_of_space(run: KilledRun) -> None:
    status = run.start().wait(DEADLINE_SECONDS)
    assert "No space left on device" in run.errors()
    # The message of alma-lm, or its advice for the training process, whichever needs the space first.
    assert re.search(r"free (disk space|space on the disk)", run.errors().splitlines()[-1])
    assert "Traceback" not in run.errors()
    assert status == 2


def whole_checkpoints(out: Path) -> dict[Path, tuple[int, int]]:
    damaged = cut_short(out)
    return {path: identity(path) for path in out.glob("stages/**/checkpoint*.pt") if path not in damaged}


# The untrained checkpoint has 7 MB, those of a stage 21 MB. The second one is written beside the first one.
@pytest.mark.slow
def test_a_full_disk_is_reported_and_with_more_space_the_same_command_continues(stream, gmoe, small_disk):
    disk = small_disk(megabytes=45)
    run = KilledRun(stream, disk.folder / "run", (*SHORT, *GMOE, "mega_batches=1"))
    ends_for_lack_of_space(run)
    assert cut_short(run.out) == []
    names = {"checkpoint_untrained.pt", "checkpoint_last.pt", "checkpoint_best.pt"}
    assert {path.name for path in whole_checkpoints(run.out)} == names
    assert rows_without_seconds(run.out) == rows_without_seconds(gmoe.out)[:1]

    disk.make_room(megabytes=200)
    run.finish()
    assert b"Loaded checkpoint" in (member(run.out, 1) / "log.txt").read_bytes()  # it continued and did not start again
    same_rows(rows_without_seconds(run.out), rows_without_seconds(gmoe.out)[:2])


@pytest.mark.slow
def test_a_disk_that_is_full_repeatedly_costs_no_work(stream, gmoe, small_disk):
    disk = small_disk(megabytes=25)
    run = KilledRun(stream, disk.folder / "run", (*SHORT, *GMOE, "mega_batches=2"))
    # In the first write of a stage; then in the second one.
    for megabytes in (25, 45):
        disk.make_room(megabytes)
        before = whole_checkpoints(run.out)
        ends_for_lack_of_space(run)
        assert before.items() <= whole_checkpoints(run.out).items()
    disk.make_room(300)
    run.finish()
    same_run(run.out, gmoe.out)


UNTRAINED = Moment("the untrained learner", exists("settings.json"))
EVALUATED = Moment("the end of stage 1", lambda out: num_rows(out) == 2)
TRAINED = Moment("the end of the last fairseq-train", lambda out: has_trained(out, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(UNTRAINED, id="untrained"),
        pytest.param(EVALUATED, id="growth"),
        pytest.param(TRAINED, id="drop_optimizer_state"),
    ],
)
def test_a_disk_that_is_full_when_the_driver_writes_a_checkpoint_is_reported(stream, gmoe, small_disk, moment):
    disk = small_disk(megabytes=300)
    run = KilledRun(stream, disk.folder / "run", (*SHORT, *GMOE, "mega_batches=2"))
    run.kill_at(moment)
    before = whole_checkpoints(run.out)
    disk.fill(but_megabytes=3)
    ends_for_lack_of_space(run)
    assert whole_checkpoints(run.out) == before
    disk.empty()
    run.finish()
    same_run(run.out, gmoe.out)

"""Runs and sweeps killed at any moment: the same command ends where it would have.

A killed run is a child of this process, which has torch in memory already: so that it can be killed dozens of times.
The slow campaign kills the installed command.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import vision.runs
from fairseq_alma.core.json_lines import JsonLines
from tests.commands import ROOT
from tests.vision.tiny_runs import as_arguments, ledger, small_run, small_settings
from vision.cli import main
from vision.runs import run_learner

DEADLINE_SECONDS = 300

GENS = {"learner": "gens", "seeds": 2, "replay": 0.5, "order": "classes"}
GMOE = {"learner": "gmoe", "experts": 2, "replay": "all", "hard_gates": True}
FF = {"learner": "ff", "seeds": 2, "candidates": 200}
"""Most of its time is growth."""
AUTO = {"wait": "auto", "seeds": 2, "mega_batches": 10}
"""Its decisions at arrivals 6 to 9 follow from the errors that the run has recorded."""
IDS = ["gens", "gmoe", "ff", "auto"]
CAMPAIGNS = pytest.mark.parametrize(
    "settings", [GENS, *(pytest.param(one, marks=pytest.mark.slow) for one in (GMOE, FF, AUTO))], ids=IDS
)


class Child:
    """A process that does one thing, and can be killed at it."""

    def __init__(self, do: Callable[[], object]):
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                do()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        self._status: int | None = None

    def is_over(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not self.is_over():
            if time.monotonic() > end:
                self.kill()
                pytest.fail("it does not end")
            time.sleep(0.002)
        assert self._status == 0

    def kill(self) -> bool:
        """kill -9; False where it had ended, well, by itself."""
        if not self.is_over():
            os.kill(self.pid, signal.SIGKILL)
            _, self._status = os.waitpid(self.pid, 0)
        assert self._status in (0, signal.SIGKILL)
        return self._status == signal.SIGKILL


def content(out: Path) -> dict[str, object]:
    """All that equal runs agree in, by path: networks to the bit; of hidden files a kill may leave a few.

    Of the saves, only the last one: its time decides which one is before it.
    """
    found: dict[str, object] = {}
    predicts = {
        one["path"] for path in out.rglob("predictor.json") for one in json.loads(path.read_text())["checkpoints"]
    }
    last = max((path.parent / "train" for path in out.rglob("stage_*/train.done.json")), default=out)
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or path.name[0] == "." or path.name == "provenance.json":
            continue
        if path.parent.name == "tensorboard":  # events hold the time
            continue
        is_saved = path.suffix == ".pt" or path.name == "learner.json" or path.name.endswith(".done.json")
        if is_saved and last not in path.parents and not any(name.endswith(name_of(path)) for name in predicts):
            continue
        if path.name == "ledger.jsonl":
            found[name] = ledger(path.parent)
        elif path.name.endswith(".done.json"):  # it has the cost of growth, if growth was too quick for its own mark
            if path.name != "grow.done.json":
                found[name] = None
        elif path.suffix == ".json":
            found[name] = without_clocks(json.loads(path.read_text()))
        else:
            found[name] = path.read_bytes()
    return found


def name_of(path: Path) -> str:
    return "/".join(path.parts[-4:])


def without_clocks(value: object) -> object:
    """Nor where the run lies."""
    if isinstance(value, list):
        return [without_clocks(one) for one in value]
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not key.endswith("_seconds") and key != "out"}
        return {key: without_clocks(one) for key, one in kept.items()}
    return value


@CAMPAIGNS
def test_killed_at_random_moments_a_run_ends_as_it_would_have(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0.02)
    # Growth imports modules of torch that take seconds. Import them before the forks, and not in each of them.
    small_run(tmp_path / "warm", **settings, arrivals=2)
    kill_at_random_moments(lambda out: Child(lambda: small_run(out, **settings, epochs=5)), tmp_path, random.Random(0))


def kill_at_random_moments(start: Callable[[Path], "Child | Command"], folder: Path, chance: random.Random) -> None:
    """Kill at least three processes, each at a random moment, and compare the runs with one that was not killed."""
    began = time.monotonic()
    start(folder / "whole").finish()
    seconds, kills = time.monotonic() - began, 0
    for life in range(20):
        out = folder / f"killed_{life}"
        for number in range(4):
            process = start(out)
            time.sleep(chance.uniform(0.1, 0.7) * seconds)
            if not process.kill():  # it has ended the run; then on to another run
                if number == 0:  # in one process: the machine is faster than it was
                    seconds /= 2
                break
            kills += 1
        start(out).finish()
        same_run(folder / "whole", out)
        if kills >= 3:
            return
    pytest.fail(f"only {kills} of the processes were still running when their kill came")


def same_run(whole: Path, killed: Path) -> None:
    a, b = content(whole), content(killed)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []
    assert any(name.endswith("networks.pt") for name in a)


class Killed(BaseException):
    """Stands for kill -9: nothing between the side effect and the test catches it."""


class Executioner:
    """Ends the run at its n-th side effect: before or after it."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at, self.num_moments = kill_at, 0

    def around(self, function: Callable) -> Callable:
        def watched(*arguments, **options):
            self._moment()
            result = function(*arguments, **options)
            self._moment()
            return result

        return watched

    def _moment(self) -> None:
        self.num_moments += 1
        if self.num_moments == self.kill_at:
            raise Killed


DELETED = ("networks.pt", "learner.json", "grow.done.json", "train.done.json")


def attempt(out: Path, monkeypatch, settings: dict, kill_at: int | None = None) -> int:
    """One process of a run; it ends before or after one of its renames, removals and appends. How many there were."""
    executioner = Executioner(kill_at)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", executioner.around(os.replace))
        # In what removes networks that nobody needs any more; the lease's own end would outlive its process here.
        unlink = Path.unlink
        watched = executioner.around(unlink)
        patch.setattr(Path, "unlink", lambda path, **kw: (watched if path.name in DELETED else unlink)(path, **kw))
        patch.setattr(JsonLines, "append", executioner.around(JsonLines.append))
        try:
            run_learner(small_settings(out, **{"mega_batches": 3, **settings}, epochs=1))
        except Killed:
            assert kill_at
    return executioner.num_moments


@pytest.mark.parametrize("moments", [5, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("save_seconds", [0, math.inf], ids=["saved at each step", "saved at the end"])
@pytest.mark.parametrize(
    "settings",
    [pytest.param(GENS, marks=pytest.mark.slow), GMOE, pytest.param(FF, marks=pytest.mark.slow), AUTO],
    ids=IDS,
)
def test_killed_between_any_two_writes_a_run_ends_as_it_would_have(
    tmp_path, monkeypatch, settings, save_seconds, moments
):
    """At about this many moments all over the run."""
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", save_seconds)
    num_moments = attempt(tmp_path / "whole", monkeypatch, settings)
    assert num_moments > 30
    # An odd step, because moments before and after a write take turns.
    for kill_at in range(1, num_moments + 1, max(8, num_moments // moments) | 1):
        out = tmp_path / f"killed_at_{kill_at}"
        attempt(out, monkeypatch, settings, kill_at)
        attempt(out, monkeypatch, settings)
        same_run(tmp_path / "whole", out)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_killed_in_the_stage_of_a_group_that_first_waited_is_continued(tmp_path, monkeypatch, seeds):
    waits = {"wait": 2, "arrivals": 3, "epochs": 1, "seeds": seeds}
    small_run(tmp_path / "whole", **waits, last_group="train")
    small_run(tmp_path / "killed", **waits, last_group="wait")

    def killed(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("vision.learners.base.train_stage", killed)
        with pytest.raises(Killed):
            small_run(tmp_path / "killed", **waits, last_group="train")
    small_run(tmp_path / "killed", **waits, last_group="train")
    for path in (tmp_path / "whole").rglob("ledger.jsonl"):
        assert ledger(tmp_path / "killed" / path.parent.relative_to(tmp_path / "whole")) == ledger(path.parent)


def sweep(out: Path, num_runs: int) -> None:
    sys.argv = ["alma-vision", "-m", *as_arguments(mega_batches=2, epochs=2), f"out={out}",
                "seed=" + ",".join(map(str, range(num_runs)))]  # fmt: skip
    main()


def finished(out: Path) -> dict[Path, tuple]:
    """The ledgers of finished runs: when each was last written, and what it holds."""
    ledgers = [path.parent / "ledger.jsonl" for path in out.glob("*/summary.json")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in ledgers}


@pytest.mark.parametrize(("num_runs", "num_finished"), [(3, 1), pytest.param(20, 10, marks=pytest.mark.slow)])
def test_a_sweep_killed_in_its_middle_goes_on_with_those_that_are_left(tmp_path, num_runs, num_finished):
    out, before = tmp_path / "sweep", {}
    child = Child(lambda: sweep(out, num_runs))
    while len(before) < num_finished and not child.is_over():
        before = finished(out)
        time.sleep(0.005)
    assert child.kill()
    before = finished(out)
    assert num_finished <= len(before) < num_runs
    Child(lambda: sweep(out, num_runs)).finish()
    after = finished(out)
    assert len(after) == num_runs
    assert all(after[path] == before[path] for path in before)  # not written again
    runs = json.loads((out / "sweep.json").read_text())
    assert len(runs) == num_runs
    by_seed = {json.loads((path.parent / "settings.json").read_text())["seed"]: path.parent for path in after}
    assert sorted(by_seed) == list(range(num_runs))
    for seed in (0, num_finished, num_runs - 1):
        small_run(tmp_path / str(seed), mega_batches=2, epochs=2, seed=seed)
        assert ledger(by_seed[seed]) == ledger(tmp_path / str(seed))


class Command:
    """A process of the installed command, and of its children."""

    def __init__(self, arguments: list[str]):
        program = str(Path(sys.executable).parent / "alma-vision")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([program, *arguments], cwd=ROOT, start_new_session=True, **quiet)

    def finish(self) -> None:
        assert self._process.wait(DEADLINE_SECONDS) == 0

    def kill(self) -> bool:
        """kill -9 to all; False where it had ended, well, by itself."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.wait() in (0, -signal.SIGKILL)
        return self._process.returncode != 0


@pytest.mark.slow
@CAMPAIGNS
def test_the_installed_command_killed_at_random_moments_ends_as_it_would_have(tmp_path, settings):
    arguments = as_arguments(**{"mega_batches": 8, **settings}, epochs=50)
    kill_at_random_moments(lambda out: Command([*arguments, f"out={out}"]), tmp_path, random.Random(1))

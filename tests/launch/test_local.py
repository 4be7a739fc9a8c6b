"""Processes on this machine: their output, how they end, and that they end with their parent. All are real."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local
from launch.local import Job, run_processes, share_of_machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def python(code):
    return [sys.executable, "-c", code]


def run_process(command, log, on_line=lambda line: None, environment=None):
    """Run one process, and return its exit status."""
    (status,) = run_processes([Job(command, log, on_line, environment or {})])
    return status


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in 20 seconds"
        time.sleep(0.005)


def test_what_a_process_prints_goes_to_the_log_and_line_by_line_to_the_callback(tmp_path):
    lines, log = [], tmp_path / "new" / "log.txt"
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); print('no line end', end='')"
    assert run_process(python(code), log, lines.append) == 0
    assert log.read_text() == "out\nerr\nno line end"
    assert lines == ["out", "err", "no line end"]


def test_lines_come_while_the_process_runs(tmp_path):
    answer = tmp_path / "answer"
    code = "import sys, time, pathlib\nprint('waiting', flush=True)\n"
    code += f"while not pathlib.Path({str(answer)!r}).exists(): time.sleep(0.01)\n"

    def reply(line):
        assert (tmp_path / "log").read_text() == "waiting\n"  # in the log before the callback gets it
        answer.touch()

    assert run_process(python(code), tmp_path / "log", reply) == 0


def test_a_second_process_appends_to_the_log(tmp_path):
    for word in ("first", "second"):
        run_process(python(f"print({word!r})"), tmp_path / "log")
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_bytes_that_are_not_utf8_stay_in_the_log_and_are_replaced_in_lines(tmp_path):
    lines = []
    code = r"import sys; sys.stdout.buffer.write('größe\n'.encode() + b'gr\xf6\xdfe\n')"
    assert run_process(python(code), tmp_path / "log", lines.append) == 0
    assert (tmp_path / "log").read_bytes() == "größe\n".encode() + b"gr\xf6\xdfe\n"
    assert lines == ["größe", "gr\ufffd\ufffde"]


def test_the_exit_status_is_returned(tmp_path):
    assert run_process(python("raise SystemExit(3)"), tmp_path / "log") == 3


def test_a_signal_gives_a_negative_status(tmp_path):
    assert run_process(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), tmp_path / "log") == -9


def test_environment_is_added_to_that_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("ALMA_INHERITED", "a")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    lines = []
    code = "import os; print(*(os.environ[name] for name in ('ALMA_INHERITED', 'ALMA_GIVEN', 'GOMP_SPINCOUNT')))"
    run_process(python(code), tmp_path / "log", lines.append, {"ALMA_GIVEN": "b"})
    assert lines == ["a b 10000"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # a value that the user sets is kept
    run_process(python(code), tmp_path / "log", lines.append, {"ALMA_GIVEN": "b"})
    assert lines[1] == "a b 7"


def test_a_command_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_process(["no-such-command"], tmp_path / "log")


def test_a_variable_can_be_taken_away(tmp_path, monkeypatch):
    monkeypatch.setenv("ALMA_INHERITED", "a")
    lines = []
    code = "import os; print('ALMA_INHERITED' in os.environ)"
    run_process(python(code), tmp_path / "log", lines.append, {"ALMA_INHERITED": None})
    assert lines == ["False"]


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


@linux
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_callback_ends_the_process(tmp_path, error):
    pids = []

    def on_line(line):
        pids.append(int(line))
        raise error

    with pytest.raises(error):
        run_process(python(SLEEP), tmp_path / "log", on_line)
    assert not is_alive(pids[0])


@linux
def test_a_process_that_will_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    pids = []

    def on_line(line):
        pids.append(int(line))
        raise ValueError

    with pytest.raises(ValueError):
        run_process(python(STUBBORN), tmp_path / "log", on_line)
    assert not is_alive(pids[0])


INTERRUPTED_TWICE = """
import os, signal, sys, threading, time
from pathlib import Path
from launch.local import Job, run_processes
signal.signal(signal.SIGINT, signal.default_int_handler)

def on_line(line):
    print(line)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()  # while it waits for the child to end
    raise KeyboardInterrupt

start = time.monotonic()
try:
    run_processes([Job([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), on_line)])
except KeyboardInterrupt:
    pid = int(Path(sys.argv[2]).read_text())
    print(time.monotonic() - start, Path(f"/proc/{pid}").exists())
"""


@linux
def test_a_second_ctrl_c_leaves_no_process_behind_either(tmp_path):
    command = [*python(INTERRUPTED_TWICE), STUBBORN, str(tmp_path / "log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, seconds, alive = parent.communicate()[0].split()
    assert (float(seconds) < local.GRACE_SECONDS, alive) == (True, "False")
    assert not is_alive(int(pid))


PARENT = """
import sys
from pathlib import Path
from launch.local import Job, run_processes
run_processes([Job([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), lambda line: print(line, flush=True))])
"""


@linux
@pytest.mark.parametrize("child", [SLEEP, STUBBORN])
def test_a_process_is_killed_with_its_parent(tmp_path, child):
    parent = subprocess.Popen([*python(PARENT), child, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_alive(pid))


@linux
def test_a_parent_that_is_process_1_of_a_container_can_have_children(tmp_path):
    namespace = ["unshare", "--pid", "--fork", "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no process namespaces here")
    command = [*namespace, *python("import os; assert os.getpid() == 1\n" + PARENT), "print('here')"]
    done = subprocess.run([*command, str(tmp_path / "log")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


def wait_for(path, then="pass"):
    """Return a program that prints `here` and continues when `path` exists."""
    code = f"import pathlib, time\nprint('here', flush=True)\nwhile not pathlib.Path({str(path)!r}).exists():\n"
    return python(code + f"    time.sleep(0.005)\n{then}")


def test_jobs_run_side_by_side(tmp_path):
    # Each waits for the file of the other: one after the other they would never end.
    code = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\nend = time.monotonic() + 20\n"
    code += "while not pathlib.Path(sys.argv[2]).exists():\n    assert time.monotonic() < end\n    time.sleep(0.005)"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    jobs = [Job([*python(code), *names], tmp_path / f"log_{i}") for i, names in enumerate([(a, b), (b, a)])]
    assert run_processes(jobs, slots=[{}, {}]) == [0, 0]


def test_no_more_run_at_once_than_there_are_slots_and_they_start_in_order(tmp_path):
    # Each has a file while it runs, and prints how many files there are.
    code = "import pathlib, sys, time\nhere = pathlib.Path(sys.argv[1])\n(here / sys.argv[2]).touch()\n"
    code += "print(sys.argv[2], flush=True)\ntime.sleep(0.05)\nprint(len(list(here.iterdir())), flush=True)\n"
    code += "(here / sys.argv[2]).unlink()"
    here = tmp_path / "here"
    here.mkdir()
    said: list[tuple[int, str]] = []
    jobs = [
        Job([*python(code), str(here), f"job_{i}"], tmp_path / f"log_{i}", lambda line, i=i: said.append((i, line)))
        for i in range(5)
    ]
    assert run_processes(jobs, slots=[{}, {}]) == [0] * 5
    assert max(int(line) for _, line in said if line.isdigit()) <= 2
    assert sorted(i for i, line in said if line.startswith("job")) == list(range(5))
    said.clear()
    assert run_processes(jobs) == [0] * 5  # with one slot they run one after the other
    assert [i for i, line in said if line.startswith("job")] == list(range(5))
    assert [line for _, line in said if line.isdigit()] == ["1"] * 5


def test_each_job_has_the_environment_of_its_slot_and_the_next_one_gets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ALMA_INHERITED", "machine")
    code = "import os; print(*(os.environ.get(f'ALMA_{name}') for name in ('INHERITED', 'GPU', 'JOB')), flush=True)"
    first_is_over = tmp_path / "over"
    lines: dict[int, list[str]] = {i: [] for i in range(3)}

    def heard(i):
        def on_line(line):
            lines[i].append(line)
            if i == 2:
                first_is_over.touch()  # job 0 keeps its slot until job 2 has used that of job 1

        return on_line

    jobs = [
        Job(wait_for(first_is_over, code), tmp_path / "0", heard(0), {"ALMA_JOB": "j0"}),
        Job(python(code), tmp_path / "1", heard(1), {"ALMA_JOB": "j1"}),
        Job(python(code), tmp_path / "2", heard(2)),
    ]
    assert run_processes(jobs, slots=[{"ALMA_GPU": "a"}, {"ALMA_GPU": "b"}]) == [0, 0, 0]
    assert lines == {0: ["here", "machine a j0"], 1: ["machine b j1"], 2: ["machine b None"]}
    # The environment of a job overrides that of its slot.
    own = Job(python(code), tmp_path / "2", heard(2), {"ALMA_GPU": "own"})
    assert run_processes([own], slots=[{"ALMA_GPU": "a"}]) == [0]
    assert lines[2][1:] == ["machine own None"]


def test_statuses_come_in_the_order_of_the_jobs_and_logs_are_kept_apart(tmp_path):
    # The first ends last.
    done = tmp_path / "done"
    jobs = [
        Job(wait_for(done, "print('slow')"), tmp_path / "a" / "log.txt"),
        Job(python(f"import pathlib; print('quick'); pathlib.Path({str(done)!r}).touch()"), tmp_path / "b" / "log.txt"),
    ]
    assert run_processes(jobs, slots=[{}, {}]) == [0, 0]
    assert (tmp_path / "a/log.txt").read_text() == "here\nslow\n"
    assert (tmp_path / "b/log.txt").read_text() == "quick\n"
    assert run_processes([]) == []


@linux
@pytest.mark.parametrize("failure", ["raise SystemExit(3)", "os.kill(os.getpid(), 9)"])
def test_when_one_fails_those_that_run_finish_and_those_that_wait_are_not_started(tmp_path, failure):
    released = tmp_path / "released"

    def release(line):
        wait_until(lambda: not is_alive(int(line)))  # so that the failing job ends first
        released.touch()

    late = f"import pathlib; pathlib.Path({str(tmp_path / 'work')!r}).touch()"
    jobs = [
        Job(wait_for(released, late), tmp_path / "0"),
        Job(python(f"import os; print(os.getpid(), flush=True); {failure}"), tmp_path / "1", release),
        Job(python("print('never')"), tmp_path / "2"),
        Job(python("print('never')"), tmp_path / "3"),
    ]
    statuses = run_processes(jobs, slots=[{}, {}])
    assert statuses == [0, 3 if "SystemExit" in failure else -9, None, None]
    assert (tmp_path / "work").exists()
    assert not (tmp_path / "2").exists()


@linux
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_all_processes(tmp_path, error):
    pids = []

    def on_line(line):
        pids.append(int(line))
        if len(pids) == 3:
            raise error

    jobs = [Job(python(SLEEP), tmp_path / str(i), on_line) for i in range(4)]
    start = time.monotonic()
    with pytest.raises(error):
        run_processes(jobs, slots=[{}] * 3)
    assert time.monotonic() - start < local.GRACE_SECONDS
    assert len(pids) == 3
    assert not any(map(is_alive, pids))
    assert not (tmp_path / "3").exists()


@linux
def test_a_command_that_is_not_there_ends_those_that_run(tmp_path):
    pids, started = [], tmp_path / "started"

    def on_line(line):
        pids.append(int(line))
        started.touch()

    jobs = [
        Job(python(SLEEP), tmp_path / "0", on_line),
        Job(wait_for(started), tmp_path / "1"),
        Job(["no-such-command"], tmp_path / "2"),
    ]
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_processes(jobs, slots=[{}, {}])
    assert [is_alive(pid) for pid in pids] == [False]


PARENT_OF_MANY = """
import sys
from pathlib import Path
from launch.local import Job, run_processes
heard = lambda line: print(line, flush=True)
jobs = [Job([sys.executable, "-c", code], Path(sys.argv[1]) / str(i), heard) for i, code in enumerate(sys.argv[2:])]
run_processes(jobs, [{}] * len(jobs))
"""


@linux
def test_all_processes_are_killed_with_their_parent(tmp_path):
    command = [*python(PARENT_OF_MANY), str(tmp_path), SLEEP, STUBBORN, SLEEP]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(3)]
    assert len(set(pids)) == 3
    assert all(map(is_alive, pids))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def gpus(*visible: str) -> list[dict[str, str]]:
    return [{"CUDA_VISIBLE_DEVICES": names} for names in visible]


@pytest.mark.parametrize(
    ("num_jobs", "num_gpus", "at_once", "slots"),
    [
        (1, 0, None, [{}]),  # a single job gets the whole machine
        (1, 8, None, [{}]),
        (4, 8, 1, [{}]),
        (2, 0, None, [{"OMP_NUM_THREADS": "4"}] * 2),
        (3, 0, None, [{"OMP_NUM_THREADS": "2"}] * 3),
        (20, 0, None, [{"OMP_NUM_THREADS": "1"}] * 8),  # not more at the same time than cores
        (20, 0, 2, [{"OMP_NUM_THREADS": "4"}] * 2),
        (2, 0, 4, [{"OMP_NUM_THREADS": "4"}] * 2),  # and not more than jobs
        (2, 0, 16, [{"OMP_NUM_THREADS": "4"}] * 2),
        (10, 0, 10, [{"OMP_NUM_THREADS": "1"}] * 10),  # unless at_once asks for it; each gets at least a core
        (2, 8, None, gpus("0,1,2,3", "4,5,6,7")),
        (3, 8, None, gpus("0,1", "2,3", "4,5")),  # equal jobs get equal shares, so two stay free
        (8, 8, None, gpus(*"01234567")),
        (4, 2, None, gpus("0", "1")),  # two wait
        (4, 2, 4, gpus("0", "1", "0", "1")),  # unless at_once asks for it
        (4, 1, 2, gpus("0", "0")),
    ],
)
def test_a_machine_is_divided_by_hand(eight_cores, num_jobs, num_gpus, at_once, slots):
    assert share_of_machine(num_jobs, num_gpus, at_once) == slots


def test_threads_and_gpus_of_the_environment_are_respected(eight_cores, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share_of_machine(3, 0) == [{}] * 3  # inherited by each
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert share_of_machine(2, 4) == gpus("4,5", "6,7")
    assert share_of_machine(3, 4) == gpus("4", "5", "6")
    assert share_of_machine(1, 4) == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert share_of_machine(2, 2) == gpus("GPU-aa", "GPU-bb")
    # CUDA stops at a name that it does not know, and sees one slice of a GPU only.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,99")
    assert share_of_machine(2, 2) == gpus("4", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert share_of_machine(2, 1, 2) == gpus("MIG-a", "MIG-a")


def test_the_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (slot, _) = share_of_machine(2, 0, at_once=2)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert slot == {"OMP_NUM_THREADS": str(max(1, cores // 2))}

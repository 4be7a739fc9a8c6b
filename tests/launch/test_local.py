"""Processes on this machine: what they print, how they end, and who ends with whom. All of them are real."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local
from launch.local import run_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def python(code):
    return [sys.executable, "-c", code]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
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
        assert (tmp_path / "log").read_text() == "waiting\n"  # in the log before it is handed on
        answer.touch()

    assert run_process(python(code), tmp_path / "log", reply) == 0


def test_a_second_process_appends_to_the_log(tmp_path):
    for word in ("first", "second"):
        run_process(python(f"print({word!r})"), tmp_path / "log")
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_bytes_that_are_no_utf8_stay_in_the_log_and_are_marked_for_people(tmp_path):
    lines = []
    code = r"import sys; sys.stdout.buffer.write('größe\n'.encode() + b'gr\xf6\xdfe\n')"
    assert run_process(python(code), tmp_path / "log", lines.append) == 0
    assert (tmp_path / "log").read_bytes() == "größe\n".encode() + b"gr\xf6\xdfe\n"
    assert lines == ["größe", "gr\ufffd\ufffde"]


def test_the_exit_status_is_handed_on(tmp_path):
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
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # who sets it knows better
    run_process(python(code), tmp_path / "log", lines.append, {"ALMA_GIVEN": "b"})
    assert lines[1] == "a b 7"


def test_a_command_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        run_process(["no-such-command"], tmp_path / "log")


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
from launch.local import run_process
signal.signal(signal.SIGINT, signal.default_int_handler)

def on_line(line):
    print(line)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()  # while it waits for the child to end
    raise KeyboardInterrupt

start = time.monotonic()
try:
    run_process([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), on_line)
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
from launch.local import run_process
run_process([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), lambda line: print(line, flush=True))
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

"""Who may write into a run folder, with real processes that hold it, die in it and race for it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_alma.app.run_commands import cancel_runs
from fairseq_alma.core import lease as lease_module
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.fence import LeaseLostError
from fairseq_alma.core.files import write_json
from fairseq_alma.core.holder import Holder, process_start
from fairseq_alma.core.lease import Lease
from tests.fairseq_alma.core.tiny_learner import ledger_without_seconds, tiny_run
from tests.leases import beating

HOLD = """
import os, signal, sys
from fairseq_alma.core import lease
lease.HEARTBEAT_SECONDS = float(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler if sys.argv[3] == "hears" else signal.SIG_IGN)
with lease.Lease(sys.argv[1]):
    print("held", os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start_holder():
    """start_holder(folder): a process that holds the folder until its stdin is closed."""
    processes = []

    def start(folder, heartbeat_seconds=15.0, sigint="hears"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), str(heartbeat_seconds), sigint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline().startswith("held ")
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def write_lease(folder, silent_seconds=0.0, **holder):
    """The lease of another process, whose heart beat so long ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lease.json"
    value = {"host": "elsewhere", "pid": 4321, "process_start": "1", "job_id": None, **holder}
    path.write_text(json.dumps(value))
    os.utime(path, (time.time() - silent_seconds,) * 2)
    return path


def test_the_lease_names_its_holder_and_is_gone_when_given_back(tmp_path):
    with Lease(tmp_path / "new" / "run"):
        holder = json.loads((tmp_path / "new" / "run" / "lease.json").read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_an_exception_gives_the_lease_back(tmp_path):
    with pytest.raises(KeyboardInterrupt), Lease(tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_one_process_does_not_hold_a_folder_twice(tmp_path):
    with Lease(tmp_path):
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} "):
            Lease(tmp_path).__enter__()
        assert (tmp_path / "lease.json").exists()


def test_a_folder_held_by_a_living_process_is_refused_with_its_number_and_host(tmp_path, start_holder):
    holder = start_holder(tmp_path)
    with pytest.raises(RunError) as error:
        Lease(tmp_path).__enter__()
    assert f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}" in str(error.value)
    assert "wait for it, stop it, or choose another out=" in str(error.value)
    holder.communicate()  # closes its stdin: it gives the lease back
    with Lease(tmp_path):
        pass


def test_the_job_of_the_holder_is_named(tmp_path):
    write_lease(tmp_path, job_id="1234_5")
    with beating(tmp_path), pytest.raises(RunError, match="process 4321 on elsewhere, job 1234_5 "):
        Lease(tmp_path).__enter__()


@pytest.mark.parametrize("reaped", [True, False])
def test_what_a_killed_process_held_is_taken_over_at_once(tmp_path, start_holder, reaped):
    holder = start_holder(tmp_path)
    holder.kill()
    # Until somebody asks for its status, a dead process keeps its number as a zombie.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    start = time.monotonic()
    with Lease(tmp_path):
        assert json.loads((tmp_path / "lease.json").read_text())["pid"] == os.getpid()
    assert time.monotonic() - start < 1


def test_a_process_that_was_given_the_number_of_the_dead_one_does_not_hold_its_lease(tmp_path, start_holder):
    lease = start_holder(tmp_path / "other")  # alive, and started at another time than the lease says
    identity = {**Holder.this_process().to_json(), "pid": lease.pid, "process_start": "1"}
    path = write_lease(tmp_path, **identity)
    with Lease(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()])  # the name of a host may be that of another
def test_a_lease_of_another_machine_holds_while_its_heart_beats(tmp_path, host, capsys):
    path = write_lease(tmp_path, silent_seconds=100, host=host)
    with beating(tmp_path), pytest.raises(RunError, match=rf"process 4321 on {host} \(heartbeat 0 s ago\)"):
        Lease(tmp_path).__enter__()
    assert json.loads(path.read_text())["pid"] == 4321
    assert f"{tmp_path} is held by process 4321 on {host}, which renewed its lease 100 s ago: waiting" in (
        capsys.readouterr().err
    )


def test_a_lease_of_another_machine_that_is_not_renewed_is_waited_for_and_taken_over(tmp_path, monkeypatch):
    path = write_lease(tmp_path, silent_seconds=1)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 3.0)
    start = time.monotonic()
    with Lease(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert time.monotonic() - start > 1.9


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_clock_of_this_machine_does_not_matter(tmp_path, monkeypatch, hours):
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + hours * 3600)
    for name, silent_seconds in (("alive", 0), ("dead", 1000)):
        (tmp_path / name).mkdir()
        path = write_lease(tmp_path / name)
        os.utime(path, (now() - silent_seconds,) * 2)
    with beating(tmp_path / "alive"), pytest.raises(RunError, match="in use by process 4321"):
        Lease(tmp_path / "alive").__enter__()
    with Lease(tmp_path / "dead"):
        pass


def unshare() -> list[str]:
    """Words that start a command in a PID namespace of its own, as in a container: there it is process 1.

    Skip the test where this is not allowed.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare")
    for user in ([], ["--user", "--map-root-user"]):
        words = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc"]
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    pytest.skip("this user may not create PID namespaces")


def test_of_two_containers_with_one_host_name_the_second_is_refused_until_the_first_has_ended(tmp_path):
    run = tmp_path / "run"
    hold = [*unshare(), sys.executable, "-c", HOLD, str(run), "0.2", "hears"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(hold, **pipes) as first:
        assert first.stdout.readline() == "held 1\n"
        path = run / "lease.json"
        holder = json.loads(path.read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), 1)
        # A process of this machine, where 1 is another process, and one of a second container, where it is process 1.
        with pytest.raises(RunError, match=f"in use by process 1 on {socket.gethostname()}"):
            Lease(run).__enter__()
        second = subprocess.run(hold, input="", capture_output=True, text=True)
        assert second.returncode == 1
        assert "in use by process 1 on" in second.stderr
        assert json.loads(path.read_text()) == holder
        first.kill()
    third = subprocess.run(
        [*hold[:-4], HOLD.replace("with lease", "lease.STALE_SECONDS = 2\nwith lease"), *hold[-3:]],
        input="",
        capture_output=True,
        text=True,
    )
    assert third.stdout == "held 1\n", third.stderr


def test_the_lease_names_its_holder_in_the_form_of_earlier_versions_too(tmp_path):
    with Lease(tmp_path):
        holder = json.loads((tmp_path / "lease.json").read_text())
    assert {"host", "pid", "process_start", "job_id", "job_restarts"} <= holder.keys()


def test_a_lease_of_another_machine_whose_heart_has_stopped_is_taken_over(tmp_path):
    path = write_lease(tmp_path, silent_seconds=121)
    with Lease(tmp_path):
        assert json.loads(path.read_text())["host"] == socket.gethostname()


@pytest.mark.parametrize("half", [b"", b'{"host": "else', b"[]", b'{"host": "elsewhere"}'])
def test_a_half_written_lease_whose_writer_died_is_taken_over(tmp_path, half):
    (tmp_path / "lease.json").write_bytes(half)
    os.utime(tmp_path / "lease.json", (time.time() - 3,) * 2)
    with Lease(tmp_path):
        assert json.loads((tmp_path / "lease.json").read_text())["pid"] == os.getpid()


HOSTILE = [
    *({"pid": pid} for pid in (-1, 0, True, 1.5, "1", None, [], 2**70)),
    *({"host": host} for host in (None, 7, ["x"], "", "\x1b[31mred", "x" * 300, "two words")),
    *({"job_id": job} for job in (5, "1; touch x", "--help", "1_", "")),
    *({"job_restarts": number} for number in (None, 0, "many")),
    *({"cluster": name} for name in ({}, "-M all", "a\nb")),
    *({"process_start": start} for start in (1, "soon", [])),
    *({name: 5} for name in ("boot_id", "pid_namespace")),
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_lease_with_values_that_no_process_writes_names_no_holder(tmp_path, change):
    path = write_lease(tmp_path, **{**Holder.this_process().to_json(), **change})
    assert lease_module.holder_of(tmp_path, ask_slurm=True) is None
    os.utime(path, (time.time() - 3,) * 2)
    with Lease(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lease_whose_content_is_too_deep_or_long_names_no_holder(tmp_path):
    for content in ("[" * 100_000, '{"host": "' + "x" * 10**6 + '"}', "NaN", '"text"'):
        (tmp_path / "lease.json").write_text(content)
        assert lease_module.holder_of(tmp_path) is None


def test_a_process_whose_environment_has_odd_values_has_a_lease_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "not a job")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "")
    monkeypatch.setattr(socket, "gethostname", lambda: "a host; with odd letters")
    with Lease(tmp_path):
        assert lease_module.holder_of(tmp_path) == Holder.this_process()


def test_cancel_signals_no_process_that_does_not_work_in_the_run(tmp_path, start_holder):
    (tmp_path / "settings.json").write_text("{}")
    innocent = start_holder(tmp_path / "other")
    write_lease(tmp_path, **{**Holder.this_process().to_json(), "pid": innocent.pid,
                             "process_start": process_start(innocent.pid)})  # fmt: skip
    with pytest.raises(RunError, match=r"names process \d+ on .*, which does not work there, so it was not stopped"):
        cancel_runs(tmp_path)
    assert innocent.poll() is None
    assert Holder.from_json(json.loads((tmp_path / "other" / "lease.json").read_text())).works_in(tmp_path / "other")


def test_a_lease_that_is_just_being_written_is_waited_for(tmp_path):
    (tmp_path / "lease.json").touch()
    writer = threading.Timer(0.2, write_lease, [tmp_path])
    writer.start()
    with beating(tmp_path), pytest.raises(RunError, match="process 4321 on elsewhere"):
        Lease(tmp_path).__enter__()
    writer.join()


RACE = """
import sys, time
from pathlib import Path
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.lease import Lease

me, num_processes, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def meet(place):
    (place / me).touch()
    while len(list(place.iterdir())) < num_processes:
        time.sleep(0.0002)

for run in sorted(root.iterdir()):
    meet(run / "start")
    try:
        with Lease(run):
            (run / "winners" / me).touch()
            meet(run / "end")  # held until all have tried
    except RunError:
        meet(run / "end")
"""


def test_of_processes_that_race_for_a_stale_lease_exactly_one_wins(tmp_path):
    num_races, num_processes = 40, 3
    for race in range(num_races):
        run = tmp_path / f"run_{race:02d}"
        write_lease(run, silent_seconds=1000)
        for name in ("start", "end", "winners"):
            (run / name).mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", RACE, str(i), str(num_processes), str(tmp_path)])
        for i in range(num_processes)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * num_processes
    assert [len(list((run / "winners").iterdir())) for run in sorted(tmp_path.iterdir())] == [1] * num_races


def test_who_comes_late_to_a_stale_lease_leaves_the_new_one_alone(tmp_path, start_holder):
    write_lease(tmp_path, silent_seconds=1000)
    late = Lease(tmp_path)
    assert late._is_left_behind()  # ... and here it is not the only one to have seen that
    holder = start_holder(tmp_path)
    with pytest.raises(RunError, match=f"in use by process {holder.pid}"):
        late._remove_left_behind()
    assert len(list(tmp_path.iterdir())) == 2  # the lease, and the place where its holder writes
    assert (tmp_path / "lease.json").exists()


def test_who_died_while_taking_over_does_not_block_the_next(tmp_path):
    write_lease(tmp_path, silent_seconds=1000)
    (tmp_path / ".lease.claim").mkdir()
    os.utime(tmp_path / ".lease.claim", (time.time() - 11,) * 2)
    with Lease(tmp_path):
        assert not (tmp_path / ".lease.claim").exists()


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_the_heart_of_a_held_lease_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.02)
    with Lease(tmp_path):
        path = tmp_path / "lease.json"
        os.utime(path, (time.time() - 1000,) * 2)
        wait_until(lambda: time.time() - path.stat().st_mtime < 500)
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lease_removed_by_hand_is_not_written_again(tmp_path, monkeypatch):
    # Whoever removed the whole run folder does not want to find a lease.json in it.
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.02)
    run = tmp_path / "run"
    with Lease(run):
        shutil.rmtree(run)
        time.sleep(0.1)
        assert not run.exists()


@pytest.mark.parametrize(("sigint", "ended_by"), [("hears", signal.SIGINT), ("ignores", signal.SIGTERM)])
def test_a_process_taken_for_dead_stops_and_leaves_the_lease_to_the_new_holder(
    tmp_path, start_holder, sigint, ended_by
):
    sleeper = start_holder(tmp_path, 0.02, sigint)
    path = tmp_path / "lease.json"
    taken = tmp_path / "taken"
    write_lease(taken)
    os.replace(taken / "lease.json", path)
    assert sleeper.wait(timeout=20) == -ended_by
    assert (
        "was taken over by process 4321 on elsewhere, because this process did not renew its lease in time"
        in sleeper.stderr.read()
    )
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=rf"{folder} is not writable \(.*\): .*another out="):
            Lease(folder).__enter__()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")  # noqa: PTH110
def test_a_run_killed_inside_a_stage_is_continued_at_once_by_the_same_command(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.fairseq_alma.core.tiny_learner", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("in stage 2")
    process.kill()
    process.communicate()
    with Lease(folder):
        tiny_run(folder)
    tiny_run(tmp_path / "whole")
    assert ledger_without_seconds(folder) == ledger_without_seconds(tmp_path / "whole")


@pytest.mark.parametrize(
    ("job_id", "restarts", "free"), [("77", "1", True), ("77", "0", False), ("78", "1", False), (None, None, False)]
)
def test_a_job_that_slurm_has_put_back_does_not_wait_for_what_it_was(tmp_path, monkeypatch, job_id, restarts, free):
    write_lease(tmp_path, silent_seconds=5, job_id="77", job_restarts="0")
    for name, value in {"SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": restarts}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if free:
        with Lease(tmp_path):
            pass
    else:
        with beating(tmp_path), pytest.raises(RunError, match="process 4321 on elsewhere, job 77"):
            Lease(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("answer", "cluster", "free"),
    [
        ("echo 'CANCELLED  0'", "ours", True),
        ("exit 0", "ours", False),  # Slurm does not show the job, perhaps because it is that of another user
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "ours", False),
        ("echo 'RUNNING  1'", "ours", True),  # it was restarted
        ("echo 'PENDING  1'", "ours", True),
        ("echo 'RUNNING  0'", "ours", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "ours", False),
        ("echo 'CANCELLED  0'", "theirs", False),  # this Slurm does not know the jobs of another cluster
    ],
)
def test_slurm_is_asked_about_the_job_of_a_holder_that_this_process_cannot_see(
    tmp_path, monkeypatch, answer, cluster, free
):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in (("squeue", answer), ("scontrol", "echo 'ClusterName             = ours'")):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    write_lease(run, silent_seconds=5, job_id="77", job_restarts="0", cluster=cluster)
    if free:
        with Lease(run):
            assert json.loads((run / "lease.json").read_text())["pid"] == os.getpid()
    else:
        with beating(run), pytest.raises(RunError, match="process 4321 on elsewhere, job 77"):
            Lease(run).__enter__()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])  # the mount options hidepid=2 and hidepid=1
def test_the_lease_of_a_process_that_proc_hides_is_not_taken_over_at_once(monkeypatch, error):
    process = subprocess.Popen(["sleep", "60"])
    other = replace(Holder.this_process(), pid=process.pid, process_start=process_start(process.pid))
    assert other.state() == "running"
    read_text = Path.read_text

    def hidden(path, *arguments, **more):
        if str(path) == f"/proc/{process.pid}/stat":
            raise error
        return read_text(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert other.state() == "unknown"  # then its heartbeat decides
    process.kill()
    process.wait()
    assert other.state() == "ended"


@pytest.mark.parametrize("out", ["run", "other/../run", "./run/.", "link/run"])
def test_however_the_folder_is_written_a_late_holder_cannot_change_it(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("link").symlink_to(tmp_path)
    with pytest.raises(LeaseLostError), Lease(out) as lease:
        write_json(Path(out) / "before.json", {})
        lease.fence.place.rename("taken")  # as who takes over the lease does
        write_json(Path(out) / "late.json", {})
    assert (tmp_path / "run/before.json").exists()
    assert not (tmp_path / "run/late.json").exists()

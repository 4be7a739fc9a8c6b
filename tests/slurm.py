"""A real Slurm for tests: munged, slurmctld and two virtual nodes on this machine, in a folder and on ports of its own.

Nodes are called 127.0.0.11 and 127.0.0.12, because jobs make network addresses from the names of their nodes.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("127.0.0.11", "127.0.0.12")
CORES_PER_NODE = 4

CONFIGURATION = """\
ClusterName=alma_test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start again after cred_expire seconds (default: 120).
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=3600
InactiveLimit=0
WaitTime=0
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""


class LocalSlurm:
    """A Slurm cluster of two nodes on this machine.

    Args:
        folder: an empty folder for its files. Its path must be short, because it contains a socket.
        more_configuration: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, more_configuration: str = ""):
        self.folder, self._more_configuration = folder, more_configuration
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    @staticmethod
    def missing() -> str | None:
        """Return why no cluster can be started here; None if it can."""
        programs = [name for name in PROGRAMS if shutil.which(name) is None]
        if programs:
            return f"needs Slurm: {', '.join(programs)} not found (packages slurmctld, slurmd, slurm-client, munge)"
        if os.geteuid() != 0:
            return "needs root to start a Slurm"
        return None

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        port, *node_ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={node_port} Sockets=1 "
            f"CoresPerSocket={CORES_PER_NODE} ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN"
            for name, node_port in zip(NODES, node_ports, strict=True)
        )
        for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        self.folder.chmod(0o755)
        configuration = CONFIGURATION.format(host=socket.gethostname(), port=port, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(f"{self._more_configuration}\n{configuration}")
        key = self.folder / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munge = self.folder / "munge"
        self.run(
            "munged", f"--key-file={key}", f"--socket={self.folder}/munge.sock", f"--pid-file={munge}/munged.pid",
            f"--log-file={munge}/munged.log", f"--seed-file={munge}/munged.seed",
        )  # fmt: skip
        self.run("slurmctld", "-c", "-f", self.environment["SLURM_CONF"])
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split() == [*NODES])

    def stop_controller(self) -> None:
        """End slurmctld, which keeps its state in files. Until `start_controller`, Slurm answers no command."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        self.wait_for(lambda: not Path(f"/proc/{pid}").exists())

    def start_controller(self) -> None:
        """Start slurmctld again, with the jobs that it had when it was stopped."""
        self.run("slurmctld", "-f", self.environment["SLURM_CONF"])

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self.run("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])

    def restart_node(self, node: str) -> None:
        """End the daemon of a node, and start it again. Its jobs go on."""
        pid = int((self.folder / f"slurmd.{node}.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        self.wait_for(lambda: not Path(f"/proc/{pid}").exists())
        self.start_node(node)

    def drain(self, node: str, is_on: bool = True) -> None:
        """Let a node start no new jobs, or let it start jobs again."""
        state = ["State=DRAIN", "Reason=test"] if is_on else ["State=RESUME"]
        self.run("scontrol", "update", f"NodeName={node}", *state)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons, with everything that they started."""
        with suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--partition=main,high", "--signal=KILL", "--full")
            self.run("scancel", "--partition=main,high")
            self.wait_for(lambda: not self.run("squeue", "-h"), seconds=5)
        pid_of_munged = self.folder / "munge/munged.pid"
        for path in [*self.folder.glob("*.pid"), pid_of_munged]:
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environment, name = path.read_bytes(), (path.parent / "comm").read_text()
                is_ours = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode() in environment
                # Not the processes that tests have started outside jobs, which other tests may still use.
                if is_ours and (b"SLURM_JOB_ID=" in environment or name.startswith("slurm")):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        # munged writes a file and deletes its pid file when it ends. The folder can be deleted only afterwards.
        with suppress(AssertionError):
            self.wait_for(lambda: not pid_of_munged.exists(), seconds=10)

    def run(self, *command: str) -> str:
        """Run a command of Slurm, and return its output."""
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **self.environment}, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: object, folder: Path) -> str:
        """Submit a job by sbatch from `folder`, with the environment of a login shell. Return the job id."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = subprocess.run(
            ["sbatch", "--parsable", *map(str, arguments)], cwd=folder, capture_output=True, text=True,
            env={**outside, **self.environment}, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, e.g. {"JobState": "RUNNING", "Restarts": "0"}."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = [f"== {path}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log")]
                raise AssertionError("waited in vain; the logs of Slurm:\n" + "\n".join(logs))
            time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports

"""The Slurm job in which this process runs, and questions to Slurm. The module `launch.slurm` submits jobs."""

import os
import shutil
import subprocess

JOB_VARIABLE = "ALMA_SLURM_JOB_ID"
"""Environment variable with the Slurm job id, for processes that must not see SLURM_JOB_ID."""
_SLURM_SECONDS = 10.0
"""Time limit in seconds for a question to Slurm. Without an answer, the state of a job counts as unknown."""
ENDED_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""What Slurm says of a job that has ended."""


def this_job() -> str | None:
    """Return the id of the Slurm job in which this process runs, for example "123" or, in an array, "123_2".

    It is not always SLURM_JOB_ID: for the last task of an array, this is the id of the whole array.
    """
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def cluster_name() -> str | None:
    """Return the name of the Slurm cluster of this machine; None without Slurm, or if Slurm is silent."""
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    answer = ask("scontrol", "show", "config")
    lines = answer.splitlines() if answer is not None else []
    return next((line.partition("=")[2].strip() for line in lines if line.split("=")[0].strip() == "ClusterName"), None)


def without_own_defaults() -> dict[str, str]:
    """Return the environment without the variables with which a user filters what squeue and scancel see."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}


def ask(program: str, *arguments: str) -> str | None:
    """Run a Slurm command, and return its output; None if it is missing, fails or takes too long."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=without_own_defaults(), timeout=_SLURM_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

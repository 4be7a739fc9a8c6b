"""What is needed to reproduce a run: command, commit, package versions, machine and seed."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the information needed to reproduce a run: command, commit, package versions, machine and seed."""
    versions = {"python": platform.python_version()}
    for name in ("fairseq-alma", "torch", "fairseq-fixed", "numpy", "tokenizers", "sentencepiece"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "versions": versions,
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "job_id": os.environ.get("SLURM_JOB_ID"),
        },
        "seed": settings.get("seed"),
    }


def _commit() -> str | None:
    """Return the git commit of this source code; None if git is missing or fails.

    "-dirty" is appended if there are uncommitted changes.
    """
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None

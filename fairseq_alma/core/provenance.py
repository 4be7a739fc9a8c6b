"""What is needed to reproduce a run: command, commit, package versions, machine and seed."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.slurm_job import this_job

SOURCES = ("fairseq_alma", "vision", "launch", "data_prep", "pyproject.toml")
"""Files of the repository on which the result of a run depends."""
MAX_DIFFERENCE = 20_000
"""Maximum length of a difference that provenance.json contains, in characters."""


class Provenance(TypedDict, total=False):
    """The content of provenance.json, as far as it is read."""

    command: list[str]
    continued: list[dict[str, Any]]


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return the content of provenance.json in a run folder. Raise RunError if the file is damaged."""
    advice = "restore the file, or remove it: the next process of the run writes it again"
    return dict(read_json(folder / "provenance.json", Provenance, advice=advice))


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the information needed to reproduce a run: command, commit, package versions, machine and seed."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **_commit(),
        "versions": {"python": platform.python_version(), **_package_versions()},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": machine_gpus(),
            "job_id": this_job(),
        },
        "seed": settings.get("seed"),
    }


def write_provenance(path: Path, settings: Mapping[str, Any]) -> None:
    """Write provenance.json of a run, which describes the command, versions and machine of its first process.

    If a later process continues the run with another command, commit, version or machine, its provenance is added to
    the list "continued" in the file.
    """
    now = provenance(settings)
    if not path.exists():
        write_json(path, {**now, "continued": []})
        return
    before = read_provenance(path.parent)
    first = {key: value for key, value in before.items() if key != "continued"}
    continued = before.get("continued", [])
    if now != first and now not in continued:
        write_json(path, {**first, "continued": [*continued, now]})


def machine_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of NVIDIA's GPUs in this machine, whether or not the run uses them.

    They are read from the driver's folder, because asking torch would take seconds. Without this folder, the list is
    empty.
    """
    try:
        texts = [file.read_text(errors="replace") for file in sorted(driver.glob("*/information"))]
    except OSError:
        return []
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    return [value.strip() for name, _, value in lines if name == "Model"]


@cache
def _package_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the result of a run. Missing packages are left out."""
    names = ("fairseq-alma", "torch", "fairseq-fixed", "numpy", "tokenizers", "sentencepiece")
    return {name: version for name in names if (version := version_of(name)) is not None}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed, as ALMA itself in a source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> dict[str, Any]:
    """Return the git commit of this source code, and what the source code contains beyond it.

    The key "commit" is None if git is missing or fails. "-dirty" is appended if the source code has uncommitted
    changes. Then the key "uncommitted" says which: the lines of `git status`, the digest of the difference, and the
    difference itself if it is short. Other files of the repository, such as results, do not count.
    """
    root = Path(__file__).resolve().parents[2]
    commit = _git(root, "describe", "--always", "--abbrev=12")
    if not commit:
        return {"commit": None}
    sources = [name for name in SOURCES if (root / name).exists()]
    changed = _git(root, "status", "--porcelain", "--", *sources)
    if not changed:
        return {"commit": commit}
    difference = _git(root, "diff", "HEAD", "--", *sources) or ""
    found: dict[str, Any] = {
        "files": changed.splitlines(),
        "sha256": hashlib.sha256(difference.encode("utf-8", "surrogateescape")).hexdigest(),
    }
    if len(difference) <= MAX_DIFFERENCE:
        found["difference"] = difference
    return {"commit": f"{commit}-dirty", "uncommitted": found}


def _git(root: Path, *words: str) -> str | None:
    """Return the output of git in the folder `root`; None if git is missing or fails."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, errors="surrogateescape", timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip("\n") if answer.returncode == 0 else None

"""launch/setup.sh: what it says when it cannot set up. That it can is shown by this suite running."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import ROOT


@pytest.fixture
def checkout(tmp_path) -> Path:
    """As much of a fresh clone as set-up reads before it installs."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "launch/setup.sh"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path


def set_up(checkout, **environment) -> str:
    """Run it through make; return the one line it gives up with."""
    # A `make test PYTHON=...` around this suite hands its variables on by these.
    outside = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "PYTHON")}
    result = subprocess.run(
        ["make", "setup"], cwd=checkout, env={**outside, **environment}, capture_output=True, text=True
    )
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("setup: ") and "/3 " not in line]
    assert len(lines) == 1, result.stderr
    assert not (checkout / ".venv/installed").exists()
    return lines[0]


def test_a_python_that_is_too_old(checkout):
    old = checkout / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.7\nexit 1\n')
    old.chmod(0o755)
    assert "is Python 3.9.7; Python 3.11 or 3.12 is needed" in set_up(checkout, PYTHON=str(old))


def test_no_python_at_all(checkout):
    assert "Python 3.11 or 3.12 is needed" in set_up(checkout, PYTHON=str(checkout / "nowhere"))


def test_no_compiler(checkout):
    assert "no C++ compiler" in set_up(checkout, CXX="no-such-compiler")


def test_no_disk(checkout):
    assert "999999 GB are needed" in set_up(checkout, ALMA_MINIMUM_DISK_GB="999999")


@pytest.mark.slow  # it makes a virtual environment before it asks for packages
def test_no_network(checkout):
    nobody_listens = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1",
                      "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_NO_CACHE_DIR": "1"}  # fmt: skip
    assert "no connection to a package index" in set_up(checkout, ALMA_MINIMUM_DISK_GB="0", **nobody_listens)


def test_a_second_call_starts_at_once(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/installed").touch()
    result = subprocess.run(["make", "setup"], cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 0
    assert "setup:" not in result.stderr

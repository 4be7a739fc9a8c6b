"""The functions with which the installed commands start."""

import importlib
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from fairseq_alma import programs
from tests.commands import ROOT

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_runs_the_main_function_of_its_module(name, monkeypatch):
    module, function = SCRIPTS[name].split(":")
    assert module == "fairseq_alma.programs"
    found = []

    def imported(name):
        found.append(name)
        return SimpleNamespace(main=lambda: 7)

    monkeypatch.setattr(importlib, "import_module", imported)
    assert getattr(programs, function)() == 7
    [path] = {ROOT / f"{found[0].replace('.', '/')}.py"}
    assert "def main(" in path.read_text() and name in path.read_text()


def test_ctrl_c_while_a_command_imports_its_libraries_ends_it_without_a_traceback(monkeypatch):
    def stopped(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", stopped)
    assert programs.alma_generate() == 130


def test_a_command_whose_output_nobody_reads_ends_without_a_message():
    code = "from fairseq_alma.core.program import command\n@command('x')\ndef main():\n  while True: print('x' * 999)\n"
    code += "import sys\nsys.exit(main())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait(60) == 1 and process.stderr.read() == b""

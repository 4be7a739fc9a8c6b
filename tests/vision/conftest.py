"""Fixtures of the tests of alma-vision."""

import sys
from collections import namedtuple

import pytest

from vision.cli import main

Said = namedtuple("Said", "status out err")


@pytest.fixture
def alma_vision(monkeypatch, capsys):
    """The command, in this process: starting another takes seconds."""

    def command(*arguments) -> Said:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["alma-vision", *map(str, arguments)])
            try:
                main()
                status = 0
            except SystemExit as end:
                # As the interpreter would: a text is an error, told on stderr.
                status = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
        return Said(status, *capsys.readouterr())

    return command

"""A mistyped option or choice gives one line with the nearest one; Ctrl-C gives status 130 and says how to continue."""

import os
import signal
from importlib import metadata
from pathlib import Path

import pytest

from fairseq_alma.core.errors import AlmaError
from fairseq_alma.core.program import Parser, command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--split", "vlaid"],
            "(choose from 'test', 'valid'): did you mean valid? (`alma-x --help` lists all options)\n",
        ),
        (
            ["--jason"],
            "alma-x: unrecognized arguments: --jason: did you mean --json? (`alma-x --help` lists all options)\n",
        ),
        (["--qqqqqqqq"], "alma-x: unrecognized arguments: --qqqqqqqq (`alma-x --help` lists all options)\n"),
    ],
)
def test_the_nearest_choice_is_named_without_the_usage(words, message, capsys):
    parser = Parser(prog="alma-x")
    parser.add_argument("--split", choices=("test", "valid"))
    parser.add_argument("--json", action="store_true")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    said = capsys.readouterr().err
    assert (ended.value.code, said.endswith(message), "usage" in said) == (2, True, False), said


def test_every_program_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        Parser(prog="alma-x").parse_args(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"alma-x {metadata.version('fairseq-alma')}\n")


def test_the_exit_status_says_how_a_program_has_ended(capsys):
    @command("alma-x")
    def main(how: str) -> int:
        if how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        if how == "error":
            raise AlmaError("no stream: make one")
        if how == "wrong path":
            Path("/nowhere/text.txt").read_text()
        return 0

    assert [main(how) for how in ("", "Ctrl-C", "error", "wrong path")] == [0, 130, 2, 2]
    assert capsys.readouterr().err.splitlines() == [
        "alma-x: stopped; run the same command again",
        "alma-x: no stream: make one",
        "alma-x: No such file or directory: /nowhere/text.txt: check the path",
    ]

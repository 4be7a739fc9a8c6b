"""Foreign text is printed without the characters that a terminal interprets."""

import io
import logging
import sys
import warnings

import pytest
from rich.table import Table

from fairseq_alma.app.tables import wide_console
from fairseq_alma.core.printing import hide_messages_of_libraries, json_text, log_to_stderr, printable, say

HOSTILE = "run\x1b]0;title\x07\x1b[2J\r\x9b1A\u202e\udcff"
SHOWN = r"run\x1b]0;title\x07\x1b[2J\r\x9b1A\u202e\udcff"


def test_characters_that_a_terminal_interprets_become_escapes():
    assert printable(HOSTILE) == SHOWN
    assert printable("Zürich\tπ 日本\n\u200d") == "Zürich\tπ 日本\n\u200d"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_text_is_printed_in_any_encoding(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say(f"{HOSTILE} ö", stream)
    said = stream.buffer.getvalue().decode(encoding)
    assert said == f"{SHOWN} {'ö' if encoding == 'utf-8' else chr(92) + 'xf6'}\n"


def test_tables_and_their_titles_are_safe():
    stream = io.StringIO()
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    wide_console(stream).print(table)
    wide_console(stream).print(HOSTILE)
    assert not set(HOSTILE) & set(stream.getvalue()) - set("run]0;title[2J1A")


def test_messages_in_logs_are_safe(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    before = logging.root.handlers[:], logging.root.level
    try:
        log_to_stderr("WARNING", force=True)
        logging.getLogger("alma").warning("%s", HOSTILE)
    finally:
        logging.root.handlers[:], logging.root.level = before
    assert stream.getvalue() == f"WARNING:alma:{SHOWN}\n"


def test_an_unknown_level_of_messages_is_told_and_warnings_are_shown(monkeypatch, capsys):
    monkeypatch.setenv("LOGLEVEL", "loud")
    with warnings.catch_warnings():
        hide_messages_of_libraries()
    assert "LOGLEVEL=LOUD is not known, WARNING is used: " in capsys.readouterr().err
    assert logging.getLogger("fairseq").level == logging.WARNING


@pytest.mark.parametrize(("module", "is_hidden"), [("torch.jit._script", True), ("my_plugin", False)])
def test_deprecation_in_libraries_is_hidden_and_in_own_code_shown(monkeypatch, module, is_hidden):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hide_messages_of_libraries()
        warnings.warn_explicit("old", FutureWarning, "file.py", 1, module=module)
    assert len(found) == (not is_hidden)


def test_numbers_of_a_diverged_model_are_null_in_json():
    assert json_text({"a": [float("inf"), float("nan"), 1.5], "b": {"c": -float("inf")}}) == (
        '{"a": [null, null, 1.5], "b": {"c": null}}'
    )

"""Kernels in C: compiled once, kept, and done without where there is no compiler."""

import ctypes
import logging

import pytest

from vision.networks.compiled import CompileError, compiled, kernels

SOURCE = """
REAL twice(REAL x) { return 2 * x; }
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("ALMA_COMPILE", "1")
    path = tmp_path / "twice.c"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("real", "kind"), [("float", ctypes.c_float), ("double", ctypes.c_double)])
def test_it_computes(source, real, kind):
    twice = kernels(source, real).twice
    twice.restype, twice.argtypes = kind, [kind]
    assert twice(1.5) == 3.0


def test_it_is_compiled_once_and_again_when_it_changes(source):
    first = compiled(source, "float")
    made = first.stat().st_mtime_ns
    assert compiled(source, "float") == first
    assert first.stat().st_mtime_ns == made
    assert compiled(source, "double") != first
    source.write_text(SOURCE.replace("2 *", "2.0f *"))
    assert compiled(source, "float") != first
    assert [path.suffix for path in first.parent.iterdir()] == [".so"] * 3  # and nothing else is left


@pytest.mark.parametrize(
    ("compiler", "says"), [("there-is-no-such-compiler", "a C compiler is wanted"), ("false", "does not run")]
)
def test_without_a_compiler_it_is_said_once_and_done_without(source, monkeypatch, caplog, compiler, says):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert kernels(source, "float") is None
        assert kernels(source, "float") is None
    assert len(caplog.records) == 1
    assert says in caplog.text and "twice.c is not used" in caplog.text


def test_what_the_compiler_says_is_passed_on(source):
    source.write_text("REAL twice(REAL x) { return nonsense; }")
    with pytest.raises(CompileError, match="nonsense"):
        compiled(source, "float")
    assert kernels(source, "float") is None


def test_it_can_be_turned_off(source, monkeypatch):
    monkeypatch.setenv("ALMA_COMPILE", "0")
    assert kernels(source, "float") is None
    assert not (source.parent / "cache").exists()


def test_a_home_that_cannot_be_written_is_done_without(source, monkeypatch, caplog):
    (source.parent / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "a file"))
    assert kernels(source, "float") is None
    assert "twice.c is not used" in caplog.text

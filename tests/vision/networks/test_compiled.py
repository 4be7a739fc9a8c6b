"""Kernels in C: compiled once, kept, and done without where there is no compiler."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vision.networks.compiled import CompileError, load, load_or_warn

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


@pytest.fixture
def kept(source):
    """What is kept of it, after a first process."""
    assert works(load(source, "float"))
    [path] = (source.parent / "cache" / "alma").iterdir()
    return path


def works(library, kind=ctypes.c_float):
    library.twice.restype, library.twice.argtypes = kind, [kind]
    return library.twice(1.5) == 3.0


@pytest.fixture
def no_compiler(monkeypatch):
    """To be asked for when a library should be there already."""

    def refuse(command):
        if "--version" in command:
            return run(command)
        raise AssertionError(f"compiled again: {command}")

    from vision.networks import compiled

    run = compiled._run
    return lambda: monkeypatch.setattr(compiled, "_run", refuse)


@pytest.mark.parametrize(("real", "kind"), [("float", ctypes.c_float), ("double", ctypes.c_double)])
def test_it_computes(source, real, kind):
    assert works(load(source, real), kind)


def test_it_is_compiled_once_and_again_when_it_changes(source, kept, no_compiler):
    load(source, "double")
    source.write_text(SOURCE.replace("2 *", "2.0f *"))
    load(source, "float")
    assert [path.suffix for path in kept.parent.iterdir()] == [".so"] * 3  # and nothing else is left
    no_compiler()
    assert works(load(source, "float"))


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:9000], lambda content: content + b"x"]
)
def test_a_damaged_one_is_made_anew(source, kept, damage, no_compiler):
    content = kept.read_bytes()
    kept.unlink()  # a new file: the old one is in use
    kept.write_bytes(damage(content))
    kept.chmod(0o700)
    assert works(load(source, "float"))
    assert kept.read_bytes() == content
    no_compiler()
    assert works(load(source, "float"))


def test_only_its_owner_can_write_what_is_loaded(source, kept):
    assert [path.stat().st_mode & 0o777 for path in (kept, kept.parent)] == [0o700, 0o700]
    kept.parent.chmod(0o777)
    kept.unlink()
    kept.touch()
    assert works(load(source, "float"))  # for this process alone
    assert kept.read_bytes() == b""
    kept.parent.chmod(0o700)
    kept.chmod(0o666)
    assert works(load(source, "float"))


def test_processes_that_start_together(source):
    program = "import sys, pathlib; from vision.networks.compiled import load; load(pathlib.Path(sys.argv[1]), 'float')"
    command = [sys.executable, "-c", program, str(source)]
    processes = [subprocess.Popen(command, cwd=Path.cwd()) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list((source.parent / "cache" / "alma").iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("there-is-no-such-compiler", "install a C compiler"),
        ("false", "failed with status 1"),
        ("gcc '", "is not a valid command"),
    ],
)
def test_without_a_compiler_it_is_said_once_and_done_without(source, monkeypatch, caplog, compiler, says):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert load_or_warn(source, "float") is None
        assert load_or_warn(source, "float") is None
    assert len(caplog.records) == 1
    assert says in caplog.text and "twice.c is not used" in caplog.text


def test_what_the_compiler_says_is_passed_on(source):
    source.write_text("REAL twice(REAL x) { return nonsense; }")
    with pytest.raises(CompileError, match="nonsense"):
        load(source, "float")
    assert load_or_warn(source, "float") is None


def test_it_can_be_turned_off(source, monkeypatch):
    monkeypatch.setenv("ALMA_COMPILE", "0")
    assert load_or_warn(source, "float") is None
    assert not (source.parent / "cache").exists()


@pytest.mark.parametrize("home", ["a file", "nowhere"])
def test_where_nothing_can_be_kept_it_is_compiled_for_the_process(source, monkeypatch, home):
    if home == "a file":
        (source.parent / "a file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "a file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr("pathlib.Path.home", no_home)
    assert works(load(source, "float"))

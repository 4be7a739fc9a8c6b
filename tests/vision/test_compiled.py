"""C code: compiled once, cached, and replaced by torch where there is no compiler."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vision.compiled import CompileError, load, load_or_warn

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
def cached(source):
    """Return the path of the library in the cache, after a first process compiled it."""
    assert works(load(source, "float"))
    [path] = (source.parent / "cache" / "alma").iterdir()
    return path


def works(library, kind=ctypes.c_float):
    library.twice.restype, library.twice.argtypes = kind, [kind]
    return library.twice(1.5) == 3.0


@pytest.fixture
def no_compiler(monkeypatch):
    """Return a function after whose call every compilation fails the test."""

    def refuse(command):
        if "--version" in command:
            return run(command)
        raise AssertionError(f"compiled again: {command}")

    from vision import compiled

    run = compiled._run
    return lambda: monkeypatch.setattr(compiled, "_run", refuse)


@pytest.mark.parametrize(("real", "kind"), [("float", ctypes.c_float), ("double", ctypes.c_double)])
def test_a_library_computes(source, real, kind):
    assert works(load(source, real), kind)


def test_a_source_is_compiled_once_and_again_when_it_changes(source, cached, no_compiler):
    load(source, "double")
    source.write_text(SOURCE.replace("2 *", "2.0f *"))
    load(source, "float")
    assert [path.suffix for path in cached.parent.iterdir()] == [".so"] * 3  # and no temporary file
    no_compiler()
    assert works(load(source, "float"))


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:9000], lambda content: content + b"x"]
)
def test_a_damaged_library_is_compiled_again(source, cached, damage, no_compiler):
    content = cached.read_bytes()
    cached.unlink()  # write a new file, because the old one is loaded
    cached.write_bytes(damage(content))
    cached.chmod(0o700)
    assert works(load(source, "float"))
    assert cached.read_bytes() == content
    no_compiler()
    assert works(load(source, "float"))


def test_a_library_that_others_can_write_is_not_loaded(source, cached):
    assert [path.stat().st_mode & 0o777 for path in (cached, cached.parent)] == [0o700, 0o700]
    cached.parent.chmod(0o777)
    cached.unlink()
    cached.touch()
    assert works(load(source, "float"))  # compiled for this process only
    assert cached.read_bytes() == b""
    cached.parent.chmod(0o700)
    cached.chmod(0o666)
    assert works(load(source, "float"))


def test_processes_that_start_together(source):
    program = "import sys, pathlib; from vision.compiled import load; load(pathlib.Path(sys.argv[1]), 'float')"
    command = [sys.executable, "-c", program, str(source)]
    processes = [subprocess.Popen(command, cwd=Path.cwd()) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list((source.parent / "cache" / "alma").iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "message_part"),
    [
        ("there-is-no-such-compiler", "install a C compiler"),
        ("false", "failed with status 1"),
        ("gcc '", "is not a valid command"),
    ],
)
def test_a_missing_compiler_gives_one_warning_and_no_library(source, monkeypatch, caplog, compiler, message_part):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert load_or_warn(source, "float") is None
        assert load_or_warn(source, "float") is None
    assert len(caplog.records) == 1
    assert message_part in caplog.text and "twice.c is not used" in caplog.text


def test_the_error_contains_the_output_of_the_compiler(source):
    source.write_text("REAL twice(REAL x) { return nonsense; }")
    with pytest.raises(CompileError, match="nonsense"):
        load(source, "float")
    assert load_or_warn(source, "float") is None


def test_compilation_can_be_turned_off(source, monkeypatch):
    monkeypatch.setenv("ALMA_COMPILE", "0")
    assert load_or_warn(source, "float") is None
    assert not (source.parent / "cache").exists()


@pytest.mark.parametrize("home", ["a file", "nowhere"])
def test_without_a_cache_folder_the_library_is_compiled_for_the_process(source, monkeypatch, home):
    if home == "a file":
        (source.parent / "a file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "a file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr("pathlib.Path.home", no_home)
    assert works(load(source, "float"))

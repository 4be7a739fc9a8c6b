"""Calls in a child process: results, limits on time and memory, crashes, kills, and the order of batches."""

import os
import signal
import threading
import time

import pytest

from data_prep.errors import Passing
from data_prep.sources import bounded
from data_prep.sources.base import no_report
from data_prep.sources.bounded import Failure, LimitExceeded, parse, parse_in_batches, stream


def act(what):
    """Do what a page can do to a parser. Runs in the child process."""
    if what == "compute":
        while True:
            pass
    if what == "fill":
        return len(bytearray(1 << 34))
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(2)
    if what == "wrong":
        raise ValueError("wrong\nin detail")
    if what == "import":
        import no_module  # noqa: F401
    return f"{what}!"


def count(number):
    """Yield numbers, and fill the memory at the end. Runs in the child process."""
    yield from range(number)
    bytearray(1 << 34)


def called(whats, monkeypatch, report=no_report):
    monkeypatch.setattr(bounded, "SECONDS", 1)
    monkeypatch.setattr(bounded, "BATCH_SECONDS", 1)
    return [result for _, result in parse_in_batches(act, ((None, what, 1) for what in whats), report)]


def test_each_page_that_exceeds_a_limit_is_set_aside_and_the_others_are_parsed(monkeypatch):
    whats = ["a", "crash", "b", "wrong", "compute", None, "fill", "c"]
    assert called(whats, monkeypatch) == [
        "a!", Failure("the parser crashes (SIGSEGV)", True), "b!", Failure("wrong"),
        Failure("parsing takes more than 1 s of CPU time", True), None,
        Failure("parsing needs more than 1,024 MiB of memory", True), "c!",
    ]  # fmt: skip


def test_results_do_not_depend_on_batches(monkeypatch):
    whats = [f"{number}" for number in range(50)]
    for most in (1, 7, 256):
        monkeypatch.setattr(bounded, "BATCH_PAGES", most)
        assert called(whats, monkeypatch) == [f"{what}!" for what in whats]


def test_the_results_before_an_error_come_first():
    def items():
        yield "one", "a", 1
        raise ValueError("the archive is damaged")

    found = parse_in_batches(act, items(), no_report)
    assert next(found) == ("one", "a!")
    with pytest.raises(ValueError, match="archive is damaged"):
        next(found)


def test_values_before_a_limit_are_yielded_and_a_stream_that_is_left_does_no_harm():
    found = stream(count, 3, no_report)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LimitExceeded, match="memory"):
        next(found)
    found = stream(count, 10**9, no_report)
    assert next(found) == 0
    found.close()
    assert parse(act, "a", no_report) == "a!"


def test_a_child_that_the_system_kills_is_no_fault_of_the_page(monkeypatch):
    with pytest.raises(Passing, match=r"killed twice at the same page.*--workers, or on a cluster.*--slurm-memory"):
        called(["killed"], monkeypatch)
    parse(act, "a", no_report)
    bounded._child._process.kill()
    assert parse(act, "a", no_report) == "a!"


def test_progress_is_reported_while_a_page_is_parsed_but_not_if_the_child_hangs(monkeypatch):
    beats = []
    parse(act, "a", no_report)
    assert called(["sleep"], monkeypatch, lambda: beats.append(1)) == ["sleep!"]
    assert len(beats) >= 3
    monkeypatch.setattr(bounded, "_PATIENCE", 1)
    beats.clear()
    os.kill(bounded._child._process.pid, signal.SIGSTOP)
    threading.Timer(4, os.kill, (bounded._child._process.pid, signal.SIGCONT)).start()
    assert called(["a"], monkeypatch, lambda: beats.append(time.monotonic())) == ["a!"]
    assert beats[-1] - beats[0] < 2.5


def test_a_library_that_cannot_be_imported_is_an_error_and_no_fault_of_the_page():
    with pytest.raises(RuntimeError, match="cannot be imported: No module named 'no_module'"):
        parse(act, "import", no_report)

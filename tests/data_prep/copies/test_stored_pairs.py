"""Pairs of near copies that are kept in a cache."""

import os
import socket

import numpy as np

from data_prep.copies.stored_pairs import stored_pairs

PAIRS = np.array([0, 0, 1]), np.array([2, 3, 2])


def documents(order: list[int], exact: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, priority and by_priority of documents; `order` has the number by priority of each document."""
    keys = np.array([bytes([65 + number]) * 16 for number in order], "V16")
    priority = np.array(order)
    by_priority = np.argsort(priority)
    priority[list(exact)] = -1
    return keys, priority, by_priority


def test_pairs_are_searched_for_once_whatever_the_order_of_the_documents(tmp_path):
    calls = []

    def find():
        calls.append(1)
        return PAIRS

    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        better, worse = stored_pairs(str(tmp_path / "cache"), *documents(order), find)
        assert (better.tolist(), worse.tolist()) == ([0, 0, 1], [2, 3, 2])
    assert len(calls) == 1
    # A fifth document, an exact copy, no cache: other pairs.
    stored_pairs(str(tmp_path / "cache"), *documents([0, 1, 2, 3, 4]), find)
    stored_pairs(str(tmp_path / "cache"), *documents([0, 1, 2, 3], exact=(1,)), find)
    stored_pairs(None, *documents([0, 1, 2, 3]), find)
    assert len(calls) == 4


def test_pairs_are_found_although_the_cache_cannot_be_written(tmp_path, capsys):
    (tmp_path / "near_copies").write_text("a file instead of a folder")
    assert stored_pairs(str(tmp_path), *documents([0, 1]), lambda: PAIRS)[0].tolist() == [0, 0, 1]
    assert "not stored in the cache" in capsys.readouterr().err


def test_the_temporary_file_is_named_after_the_host_and_removed(tmp_path, monkeypatch):
    def fail(aside, path):
        assert f".{socket.gethostname()}.{os.getpid()}." in aside.name
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    stored_pairs(str(tmp_path), *documents([0, 1]), lambda: PAIRS)
    assert not list((tmp_path / "near_copies").iterdir())


def test_no_pairs_are_stored_too_and_damaged_pairs_are_searched_for_again(tmp_path):
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    cache, texts = str(tmp_path / "cache"), documents([0, 1])
    assert stored_pairs(cache, *texts, lambda: none) == none
    better, worse = stored_pairs(cache, *texts, lambda: PAIRS)
    assert (len(better), len(worse)) == (0, 0)
    [file] = (tmp_path / "cache" / "near_copies").iterdir()
    file.write_bytes(file.read_bytes() + b"x" * 16)
    assert len(stored_pairs(cache, *texts, lambda: PAIRS)[0]) == 3

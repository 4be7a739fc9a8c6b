import time

import pytest

from data_prep.sources.bounded import Bounded, TooSlow


def test_a_call_in_a_child_process_returns_and_raises_as_a_direct_call():
    length = Bounded("builtins:len")
    assert length("abc") == 3
    with pytest.raises(TypeError, match="has no len"):
        length(5)
    assert length([1, 2]) == 2  # the same child


def test_a_call_that_takes_too_long_is_ended_and_the_next_call_works():
    match = Bounded("re:match", seconds=1)
    began = time.process_time()
    with pytest.raises(TooSlow, match="parsing takes longer than 1 s"):
        match("(a+)+$", "a" * 60 + "b")  # compiled code, for longer than anybody waits
    assert time.process_time() - began < 1  # not here
    assert match("x", "y") is None

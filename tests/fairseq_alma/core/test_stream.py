import pytest

from fairseq_alma.core.stream import MegaBatch, MegaBatchStream


def two_mega_batches():
    return [MegaBatch(1, "a", data="first"), MegaBatch(2, "b", data="second")]


def test_a_stream_offers_its_mega_batches_in_order():
    stream = MegaBatchStream(two_mega_batches())
    assert len(stream) == 2
    assert stream.digests == ["a", "b"]
    assert [(m.t, m.data) for m in stream] == [(1, "first"), (2, "second")]


def test_a_stream_is_offered_once():
    stream = MegaBatchStream(two_mega_batches())
    assert next(iter(stream)).t == 1  # left after the first arrival: the second chance is gone all the same
    with pytest.raises(RuntimeError, match="iterated only once"):
        list(stream)


def test_length_and_digests_can_be_asked_at_any_time():
    stream = MegaBatchStream(two_mega_batches())
    list(stream)
    assert (len(stream), stream.digests) == (2, ["a", "b"])


@pytest.mark.parametrize(("times", "position", "found"), [([0, 1], 1, 0), ([2, 1], 1, 2), ([1, 3], 2, 3)])
def test_arrivals_are_counted_from_1_without_gaps(times, position, found):
    with pytest.raises(ValueError, match=f"mega-batch number {position} of the stream has t={found}"):
        MegaBatchStream([MegaBatch(t, str(t)) for t in times])


def test_two_mega_batches_are_equal_when_time_and_digest_are():
    assert MegaBatch(1, "a", data="here", counts={"words": 3}) == MegaBatch(1, "a", data="moved")
    assert MegaBatch(1, "a") != MegaBatch(1, "b")

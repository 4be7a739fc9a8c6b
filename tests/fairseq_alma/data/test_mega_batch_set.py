import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.mega_batch_set import format_mega_batches, parse_mega_batches


@pytest.mark.parametrize(
    ("text", "ts"), [("1", [1]), ("2-4", [2, 3, 4]), ("1,3-5", [1, 3, 4, 5]), ("5, 1", [1, 5]), ("2-2", [2])]
)
def test_sets_are_read_and_written(text, ts):
    assert parse_mega_batches(text, 5) == ts
    assert parse_mega_batches(format_mega_batches(ts), 5) == ts


@pytest.mark.parametrize("text", ["", "0", "6", "2-6", "4-2", "a", "1-", "1;2", "-1"])
def test_what_is_no_set_of_the_stream_is_refused(text):
    with pytest.raises(SettingError, match="mega-batches"):
        parse_mega_batches(text, 5)


def test_runs_are_written_short():
    assert format_mega_batches([4, 1, 2, 3, 7]) == "1-4,7"

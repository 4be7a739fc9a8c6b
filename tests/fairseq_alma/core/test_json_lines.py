import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.json_lines import JsonLines


@pytest.mark.parametrize("durable", [True, False])
def test_lines_are_read_in_the_order_in_which_they_were_appended(tmp_path, durable):
    file = JsonLines(tmp_path / "new" / "file.jsonl", durable)
    assert file.values() == []
    for value in ({"t": 1}, {"t": 2, "due": True}):
        file.append(value)
    assert (tmp_path / "new" / "file.jsonl").read_text() == '{"t": 1}\n{"t": 2, "due": true}\n'
    assert JsonLines(file.path).values() == file.values() == [{"t": 1}, {"t": 2, "due": True}]


def test_an_incomplete_last_line_is_ignored_and_removed_by_the_next_append(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"t": 1}\n{"t": 2, "du')
    assert JsonLines(path).values() == [{"t": 1}]
    JsonLines(path).append({"t": 3})
    assert path.read_text() == '{"t": 1}\n{"t": 3}\n'


def test_a_file_that_another_object_has_changed_is_read_before_the_next_append(tmp_path):
    file = JsonLines(tmp_path / "file.jsonl")
    file.append({"t": 1})
    JsonLines(file.path).append({"t": 2})
    with open(file.path, "a") as damaged:
        damaged.write('{"half')
    file.append({"t": 3})
    assert file.values() == [{"t": 1}, {"t": 2}, {"t": 3}]


@pytest.mark.parametrize("line", ["", "{", "3", "\udcff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "file.jsonl"
    path.write_bytes(f'{{"t": 1}}\n{line}\n{{"t": 3}}\n'.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=r"file\.jsonl, line 2 is damaged"):
        JsonLines(path).values()

"""Files of the user, as alma-eval --text and the gate read them."""

import gzip
import json

import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.evaluation.documents import read_documents

TEXTS = ["the first document\nhas two lines", "größe 漢字"]


def lines(field="text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in TEXTS).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "A.JSONL", "a.jsonl.gz"])
def test_each_line_of_json_is_a_document(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines()) if name.endswith("gz") else b"\xef\xbb\xbf" + lines())
    assert read_documents(path, "--text", tmp_path) == TEXTS


def test_any_other_file_is_one_document_with_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo\n"))
    for name in ("a.txt", "a.txt.gz"):
        assert read_documents(tmp_path / name, "--text", tmp_path) == ["one\r\ntwo\n"]


def test_the_field_is_that_of_the_stream(own_stream, tmp_path):
    """With which `alma-prep --text-field` has read the text."""
    path, file = tmp_path / "a.jsonl", own_stream / "stream.json"
    path.write_bytes(lines("content"))
    content = file.read_text()
    try:
        description = json.loads(content)
        file.write_text(json.dumps({**description, "settings": {"text_field": "content"}}))
        assert read_documents(path, "--text", own_stream) == TEXTS
    finally:
        file.write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no field 'text', only body: rename"),
        ("a.jsonl", b'{"text": null}\n', "line 1: the field 'text' is not a text"),
        ("a.jsonl", b'["a"]\n', "line 1 is not a JSON object"),
        ("a.json", b"{\n", "line 1 is not JSON"),
        ("a.txt", b"\xff\xfe\xff", "is not text in UTF-8"),
        ("a.txt", b"", "contains no text"),
        ("a.jsonl", b'{"text": ""}\n', "contains no text"),
        ("a.txt.gz", b"no gzip", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_with_its_reason(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message):
        read_documents(tmp_path / name, f"--text {name}", tmp_path)

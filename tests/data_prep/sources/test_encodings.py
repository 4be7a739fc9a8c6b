"""The encoding of a text from its first bytes."""

import pytest

from data_prep.sources.encodings import looks_like_utf16, marked_encoding

TEXT = "Call me Ishmael.\nSome years ago"


@pytest.mark.parametrize(
    ("mark", "encoding", "codec"),
    [
        (b"\xef\xbb\xbf", "utf-8", "utf-8-sig"),
        (b"\xff\xfe", "utf-16-le", "utf-16"),
        (b"\xfe\xff", "utf-16-be", "utf-16"),
        (b"\xff\xfe\0\0", "utf-32-le", "utf-32"),
        (b"\0\0\xfe\xff", "utf-32-be", "utf-32"),
    ],
)
def test_a_byte_order_mark_names_the_codec_which_removes_it(mark, encoding, codec):
    content = mark + TEXT.encode(encoding)
    assert marked_encoding(content) == codec
    assert content.decode(codec) == TEXT


def test_utf_16_without_a_mark_is_recognised_by_its_nul_bytes():
    assert looks_like_utf16(TEXT.encode("utf-16-le")) == "UTF-16LE"
    assert looks_like_utf16(TEXT.encode("utf-16-be")) == "UTF-16BE"
    # In Cyrillic text only the spaces and the full stop have NUL bytes: 3 in 18 characters.
    assert looks_like_utf16("Река текла к дому.".encode("utf-16-le")) == "UTF-16LE"


@pytest.mark.parametrize("content", [b"", TEXT.encode(), "Река текла.".encode(), b"one\0two" * 9, bytes(100)])
def test_other_texts_do_not_look_like_utf_16(content):
    assert marked_encoding(content) is None
    assert looks_like_utf16(content) is None

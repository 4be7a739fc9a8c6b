"""Streams on disk. Each bad one is refused with the name of the file and what to do about it."""

import json
import shutil

import pytest

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from tests.streams import make_stream


@pytest.fixture(scope="module")
def whole_stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("whole") / "stream", num_mega_batches=3, tokens=300)


@pytest.fixture
def stream(tmp_path, whole_stream):
    """A copy to damage."""
    return shutil.copytree(whole_stream, tmp_path / "größe")


def change(stream, **values):
    file = stream / "stream.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refusal(stream):
    with pytest.raises(StreamError) as error:
        StreamFolder.open(stream)
    return str(error.value)


def test_a_whole_stream_is_opened(whole_stream):
    folder = StreamFolder.open(whole_stream)
    description = json.loads((whole_stream / "stream.json").read_text())
    assert folder.num_mega_batches == 3
    assert folder.splits == ["mega_batch_1", "mega_batch_2", "mega_batch_3", "valid", "test"]
    assert folder.prefix("mega_batch_2") == whole_stream / "mega_batch_2" / "train"
    assert folder.prefix("test") == whole_stream / "test" / "test"
    assert folder.counts("valid")["tokens"] == description["splits"]["valid"]["tokens"]
    assert "sha256" not in folder.counts("valid")


def test_its_mega_batches_carry_time_digest_place_and_counts(whole_stream):
    folder = StreamFolder.open(whole_stream)
    mega_batches = list(folder.stream())
    assert [m.t for m in mega_batches] == [1, 2, 3]
    assert mega_batches[1].digest == folder.digest("mega_batch_2")
    assert mega_batches[1].data == whole_stream / "mega_batch_2"
    assert mega_batches[1].counts["tokens"] * 2 == (whole_stream / "mega_batch_2" / "train.bin").stat().st_size


def test_the_test_set_is_no_mega_batch(whole_stream):
    folder = StreamFolder.open(whole_stream)
    assert not {folder.digest("test"), folder.digest("valid")} & set(folder.stream().digests)


def test_a_run_may_take_the_first_mega_batches_only(whole_stream):
    folder = StreamFolder.open(whole_stream)
    assert folder.stream(2).digests == folder.stream().digests[:2]
    with pytest.raises(StreamError, match=r"4 mega-batches are requested, but .* has 3: .*`alma-prep`"):
        folder.stream(4)


def test_a_relative_path_stays_right_when_the_process_moves(whole_stream, monkeypatch, tmp_path):
    monkeypatch.chdir(whole_stream.parent)
    folder = StreamFolder.open("stream")
    monkeypatch.chdir(tmp_path)
    folder.verify_bytes()
    assert folder.prefix("valid").with_suffix(".bin").is_file()


def test_a_folder_without_stream_json_is_no_stream(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert f"no stream at {tmp_path / 'nowhere'}" in message
    assert f"run `alma-prep {tmp_path / 'nowhere'} ...` first" in message
    for name in ("unfinished/.alma-prep", "partial/mega_batch_1", "texts", "streams/one"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text("text")
    (tmp_path / "streams/one/stream.json").write_text("{}")
    for name in ("unfinished", "partial"):
        assert f"run `alma-prep {tmp_path / name} ...` first" in refusal(tmp_path / name)
    assert f"alma-prep STREAM --source text:{tmp_path}/texts makes a stream" in refusal(tmp_path / "texts")
    assert refusal(tmp_path / "streams").endswith(f"give one of {tmp_path}/streams/one")


@pytest.mark.parametrize("text", ['{"format_version": 1, ', "[]", "3", "{}", ""])
def test_a_stream_json_that_is_none_is_named(stream, text):
    (stream / "stream.json").write_text(text)
    assert f"{stream / 'stream.json'} cannot be read" in refusal(stream)


def test_bytes_that_are_no_text_are_named(stream):
    (stream / "stream.json").write_bytes(b"\xff\xfe\x00")
    assert f"{stream / 'stream.json'} cannot be read" in refusal(stream)


def test_another_format_version_is_refused(stream):
    change(stream, format_version=2)
    message = refusal(stream)
    assert f"{stream / 'stream.json'} has format version 2, but this version of ALMA reads 1" in message
    assert "prepare the stream again" in message


@pytest.mark.parametrize("key", ["num_mega_batches", "tokenizer", "dtype", "splits"])
def test_a_missing_key_is_named(stream, key):
    change(stream, **{key: None})
    assert f"{stream / 'stream.json'} is damaged ({key} is None, expected" in refusal(stream)


def test_a_missing_key_of_a_split_is_named(stream):
    splits = json.loads((stream / "stream.json").read_text())["splits"]
    del splits["valid"]["tokens"]
    change(stream, splits=splits)
    assert "is damaged (splits.valid.tokens is missing)" in refusal(stream)
    del splits["valid"]
    change(stream, splits=splits)
    assert "is damaged (splits.valid is missing)" in refusal(stream)


def test_a_stream_that_says_more_mega_batches_than_it_describes_is_refused(stream):
    change(stream, num_mega_batches=4)
    assert "is damaged (splits.mega_batch_4 is missing)" in refusal(stream)
    change(stream, num_mega_batches=10**15)  # their names would not fit into memory
    assert "is damaged (splits.mega_batch_4 is missing)" in refusal(stream)


@pytest.mark.parametrize("number", [0, -1, "3", 3.0, True])
def test_the_number_of_mega_batches_is_a_whole_number_of_at_least_1(stream, number):
    change(stream, num_mega_batches=number)
    assert f"num_mega_batches is {number!r}, expected an integer" in refusal(stream)


def test_an_unknown_dtype_is_refused(stream):
    change(stream, dtype="float32")
    assert "dtype is 'float32', expected one of uint16, uint32, int32" in refusal(stream)


@pytest.mark.parametrize(("dtype", "item_size"), [("uint16", 2), ("uint32", 4), ("int32", 4)])
def test_the_size_of_a_bin_is_its_tokens_times_the_size_of_one(stream, dtype, item_size):
    change(stream, dtype=dtype)
    tokens = json.loads((stream / "stream.json").read_text())["splits"]["mega_batch_1"]["tokens"]
    if item_size == 2:
        StreamFolder.open(stream)
    else:
        assert f"train.bin has {2 * tokens:,} bytes, stream.json says {item_size * tokens:,}" in refusal(stream)


@pytest.mark.parametrize("lost", ["mega_batch_3/train.bin", "mega_batch_1/train.idx", "test/test.idx", "dict.txt",
                                  "tokenizer.json"])  # fmt: skip
def test_a_missing_file_is_named(stream, lost):
    (stream / lost).unlink()
    message = refusal(stream)
    assert f"{stream / lost} is missing" in message
    assert "copy the whole stream again, or remove the stream folder and run `alma-prep` again" in message


@pytest.mark.parametrize("cut", ["mega_batch_2/train.bin", "valid/valid.bin", "mega_batch_2/train.idx"])
def test_a_file_cut_short_by_one_byte_is_named_with_both_sizes(stream, cut):
    content = (stream / cut).read_bytes()
    (stream / cut).write_bytes(content[:-1])
    message = refusal(stream)
    assert f"{stream / cut} has {len(content) - 1:,} bytes, stream.json says {len(content):,}" in message
    assert "the file was truncated or overwritten; copy the whole stream again" in message


def test_another_dictionary_is_refused(stream):
    (stream / "dict.txt").write_text("other 1\n")
    message = refusal(stream)
    assert f"{stream / 'dict.txt'} is not the dictionary that this stream was encoded with" in message
    assert "restore the file" in message


def test_one_flipped_bit_is_found_when_every_byte_is_read(stream):
    flipped = stream / "mega_batch_2" / "train.bin"
    content = bytearray(flipped.read_bytes())
    content[100] ^= 1
    flipped.write_bytes(content)
    folder = StreamFolder.open(stream)  # sizes are right: opening does not read every byte
    with pytest.raises(StreamError, match=r"mega_batch_2/train\.bin has changed since alma-prep wrote it"):
        folder.verify_bytes()


def test_a_whole_stream_passes_when_every_byte_is_read(whole_stream):
    assert StreamFolder.open(whole_stream).verify_bytes() is None  # it raises where a byte differs (below)


def test_a_learners_view_has_no_test_set(whole_stream):
    folder = StreamFolder.open(whole_stream)
    view = folder.without_test()
    assert view.path == folder.path
    for split in folder.splits:
        if split != "test":
            assert view.digest(split) == folder.digest(split)
    with pytest.raises(StreamError, match="a learner has no access to split 'test'"):
        view.digest("test")
    assert folder.digest("test") not in repr(view)

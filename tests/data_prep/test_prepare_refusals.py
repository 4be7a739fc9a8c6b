"""What alma-prep refuses: one message that says what to do, exit code 2, and nothing touched."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from data_prep.cli import main
from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from data_prep.sources import Source


@pytest.fixture
def refused(alma_prep, capsys):
    """refused(out, source, ..): the one message of a run that must end with exit code 2."""

    def run(*arguments, **options) -> str:
        capsys.readouterr()
        assert alma_prep(*arguments, **options) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        last_line = captured.err.splitlines()[-1]
        assert last_line.startswith("alma-prep: ")
        return last_line

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_corpus, alma_prep):
    """A corpus and a finished stream that the tests below copy before they change it."""
    root = tmp_path_factory.mktemp("finished")
    write_corpus(root / "books", num_files=6)
    assert alma_prep(root / "stream", f"books:{root}/books") == 0
    return root


@pytest.fixture
def stream_copy(finished, tmp_path):
    shutil.copytree(finished / "stream", tmp_path / "stream")
    return tmp_path / "stream"


def test_a_missing_path(tmp_path, refused):
    assert "missing does not exist" in refused(tmp_path / "out", f"text:{tmp_path}/missing")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("target", "message"), [("gone", "File exists"), ("out", "Too many levels of symbolic links")])
def test_a_broken_link_as_stream_folder(tmp_path, refused, target, message):
    (tmp_path / "a.txt").write_text("one two three\n" * 100)
    (tmp_path / "out").symlink_to(tmp_path / target)
    assert refused(tmp_path / "out", f"text:{tmp_path}/a.txt").startswith(f"alma-prep: {message}: {tmp_path}/out")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs the limits of Linux")
def test_a_limit_on_the_size_of_files_is_named_with_the_file(tmp_path):
    lines = (f"line {number} of a text\n" for number in range(1000))
    (tmp_path / "a.txt").write_text("".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", str(tmp_path / "out"), "--source", f"text:{tmp_path}/a.txt",
         "--mega-batches", "3", "--workers", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"alma-prep: File too large: {tmp_path}/out/.alma-prep/" in done.stderr
    assert "ulimit -f" in done.stderr


def test_no_documents(tmp_path, refused):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    message = refused(tmp_path / "out", f"text:{tmp_path}/a.txt", more=["--max-bad", "1"])
    assert (
        "no documents in 1 files; skipped files or parts of files: 1, the first is a.txt: 1 line: not valid UTF-8"
        in message
    )


def test_too_little_text(tmp_path, refused):
    (tmp_path / "a.txt").write_text("one two three four five\n" * 100)
    # 3 mega-batches and the test set of 1000 words, 1% of 500 words for validation.
    message = refused(tmp_path / "out", f"text:{tmp_path}/a.txt", more=["--duplicates", "keep"])
    assert "found 500 words" in message
    assert "at least 4,005" in message
    assert f"is kept in {tmp_path / 'out' / '.alma-prep'}" in message


def test_settings_that_cannot_work(tmp_path, refused):
    source = f"text:{tmp_path}"
    assert "--mega-batches 0" in refused(tmp_path / "out", source, num_mega_batches=0)
    assert "--vocab-size 255 is too small: it must be at least 256" in refused(tmp_path, source, vocab_size=255)
    assert "--valid-words 0" in refused(tmp_path / "out", source, more=["--valid-words", "0"])
    assert "--workers 0" in refused(tmp_path / "out", source, workers=0)
    assert "more than once" in refused(tmp_path / "out", source, source)
    assert "'tweets' is unknown: use one of common-crawl, wikipedia, books, text, python-docs, hf" in refused(
        tmp_path / "out", "tweets:x"
    )
    with pytest.raises(ValueError, match="no source given"):
        PrepSettings(out=tmp_path, sources=(), num_mega_batches=2, vocab_size=300, seed=0)


@pytest.mark.parametrize(
    ("option", "message"),
    {
        ("--mega-batches", "2"): "num_mega_batches was 3 and is now 2",
        ("--vocab-size", "301"): "vocab_size was 300 and is now 301",
        ("--seed", "5"): "seed was 1 and is now 5",
        ("--tokenizer", "sentencepiece"): "tokenizer was byte-bpe and is now sentencepiece",
        # 6 books of 1200 words: 1% is 72; (7200 - 72) / 4 = 1782 words a mega-batch, 0.2% of it are 3.
        ("--valid-words", "100"): "valid_words was 72 and is now 100",
        ("--passage-words", "10"): "passage_words was 3 and is now 10",
    }.items(),
)
def test_a_changed_setting_is_named(finished, stream_copy, refused, folder_bytes, option, message):
    before = folder_bytes(stream_copy)
    assert f"other settings: {message}. " in refused(stream_copy, f"books:{finished}/books", more=option)
    assert folder_bytes(stream_copy) == before


def test_another_source_is_a_changed_setting(finished, stream_copy, refused):
    message = refused(stream_copy, f"books:{finished}/books", "python-docs")
    assert f"sources was ['books:{finished}/books'] and is now" in message


def test_a_source_whose_files_changed(tmp_path, write_corpus, alma_prep, refused):
    folder = write_corpus(tmp_path / "books", num_files=6)
    assert alma_prep(tmp_path / "out", f"books:{folder}") == 0
    os.utime(folder / "book_000.txt", ns=(0, 0))
    assert "files have changed since" in refused(tmp_path / "out", f"books:{folder}")


@pytest.mark.damages_streams
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mega_batch_2/train.bin", b"12", "train.bin has 2 bytes, stream.json says"),
        ("test/test.idx", None, "test.idx is missing"),
        ("dict.txt", b"a 1\n", "dict.txt is not the dictionary"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
    ],
)
def test_a_damaged_stream(finished, stream_copy, refused, name, content, message):
    if content is None:
        (stream_copy / name).unlink()
    else:
        (stream_copy / name).write_bytes(content)
    assert message in refused(stream_copy, f"books:{finished}/books")


@pytest.mark.damages_streams
def test_a_stream_of_another_format_version(finished, stream_copy, refused):
    stream = json.loads((stream_copy / "stream.json").read_text())
    (stream_copy / "stream.json").write_text(json.dumps(stream | {"format_version": 2}))
    assert "has format version 2, but this version of ALMA reads 1" in refused(stream_copy, f"books:{finished}/books")
    (stream_copy / "stream.json").write_text('{"format')
    assert "cannot be read" in refused(stream_copy, f"books:{finished}/books")


@pytest.mark.damages_streams
def test_a_stream_with_a_setting_that_no_longer_exists(finished, stream_copy, refused, write_corpus, tmp_path):
    new = write_corpus(tmp_path / "new", num_files=2, seed=5)
    extend = ["--extend", str(stream_copy), "--source", f"books:{new}", "--workers", "1"]
    path = stream_copy / "stream.json"
    stream = json.loads(path.read_text())
    stream["settings"] |= {"mask_pii": False, "rules": "", "sha256 of rules": "0"}
    path.write_text(json.dumps(stream))
    assert main(extend) == 0  # defaults
    extended = json.loads(path.read_text())
    extended["extensions"][0]["given"] |= {"mask_pii": False}
    path.write_text(json.dumps(extended))
    assert main(extend) == 0
    extended["extensions"][0]["settings"] |= {"rules": "c4"}
    path.write_text(json.dumps(extended))
    assert "was made with rules c4, a setting that alma-prep no longer has" in refused(stream_copy, f"books:{new}")
    path.write_text(json.dumps(stream | {"settings": stream["settings"] | {"mask_pii": True}}))
    message = refused(stream_copy, f"books:{finished}/books")
    assert "was made with mask_pii True, a setting that alma-prep no longer has" in message
    assert main(extend) == 2


def test_a_folder_with_files_that_are_not_ours(finished, tmp_path, refused):
    (tmp_path / "out" / "valid").mkdir(parents=True)
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    # The name of a shard alone does not make it ours: no run of alma-prep was killed here.
    (tmp_path / "out" / "dict.txt").write_text("my own")
    assert "already contains these files: dict.txt, thesis.tex, valid." in refused(
        tmp_path / "out", f"books:{finished}/books"
    )
    assert (tmp_path / "out" / "dict.txt").read_text() == "my own"
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file", f"books:{finished}/books")


def test_a_stream_folder_inside_its_source(finished, refused):
    assert "is inside the source" in refused(finished / "books" / "out", f"books:{finished}/books")


def test_a_cache_inside_a_source(finished, refused, tmp_path):
    cache = finished / "books" / "cache"
    message = refused(tmp_path / "out", f"books:{finished}/books", more=["--cache", cache])
    assert f"the cache {cache} is inside the source books:" in message
    assert not cache.exists()


def test_an_empty_folder_is_accepted_and_prepare_returns_stream_json(finished, tmp_path):
    (tmp_path / "out").mkdir()
    settings = PrepSettings(
        out=tmp_path / "out",
        sources=(Source("books", str(finished / "books")),),
        num_mega_batches=2,
        vocab_size=300,
        seed=0,
        workers=1,
    )
    assert prepare(settings) == json.loads((tmp_path / "out" / "stream.json").read_text(encoding="utf-8"))


def test_help_says_what_a_document_is(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "one document per non-empty line" in " ".join(capsys.readouterr().out.split())


def test_the_module_ends_with_the_status_of_the_command(tmp_path):
    """The demo runs it in this way, and must not go on after an error."""
    command = [sys.executable, "-m", "data_prep", str(tmp_path / "out"), "--source", "text:missing"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert "missing" in result.stderr

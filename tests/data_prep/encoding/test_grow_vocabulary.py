"""`alma-prep grow-vocab` copies a stream with more symbols: the same text in the same splits, the old ids as before."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet
import pytest

from data_prep.cli import main
from data_prep.encoding import grow_vocabulary
from data_prep.encoding.passages import passages_of
from data_prep.tokenization.tokenizers import load_tokenizer
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.forget.cli import main as alma_forget
from tests.commands import ROOT
from tests.data_prep.test_extend import write_texts
from tests.killed_here import killed_before_stream_json

NEW_WORDS = " ".join(f"blorptang{number % 7}" for number in range(400))


def texts_of(stream: StreamFolder, split: str) -> list[str]:
    """The text of each passage of a split, with « for each run of masked tokens."""
    tokenizer = load_tokenizer(stream.path / "tokenizer.json")
    found = []
    for passages in passages_of(stream, split):
        for ids in passages:
            parts = np.split(ids, np.flatnonzero(np.diff(ids == 1)) + 1)
            found.append("".join("«" if 1 in part else tokenizer.decode((part - 4).tolist()) for part in parts))
    return found


@pytest.fixture(scope="module")
def two_months(tmp_path_factory, alma_prep):
    """A stream of two months. The second one, which was added later, has words of its own, and new ids."""
    folder = tmp_path_factory.mktemp("two_months")
    write_texts(folder / "first.jsonl", 90, 0)
    write_texts(folder / "second.jsonl", 60, 1)
    with open(folder / "second.jsonl", "a") as file:
        file.write(json.dumps({"story": NEW_WORDS}) + "\n")
    out = folder / "old"
    more = ["--text-field", "story", "--duplicates", "exact"]
    assert alma_prep(out, f"text:{folder / 'first.jsonl'}", num_mega_batches=1, more=more) == 0
    assert main(["--extend", str(out), "--source", f"text:{folder / 'second.jsonl'}", "--workers", "1"]) == 0
    return out


@pytest.fixture
def old(tmp_path, two_months):
    """A copy of the stream of two months that a test may change."""
    return shutil.copytree(two_months, tmp_path / "old")


def grow(old, new, *more) -> int:
    return main(["grow-vocab", str(old), str(new), *map(str, more)])


def test_the_copy_has_the_same_text_in_fewer_tokens_and_the_old_ids(old, tmp_path, capsys):
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert grow(old, tmp_path / "new", "--symbols", 40) == 0
    assert "init_from=OLD_RUN known_mega_batches=K ..." in capsys.readouterr().out
    one, two = StreamFolder.open(old), StreamFolder.open(tmp_path / "new")
    two.verify_bytes()
    assert main(["check", str(two.path)]) == 0
    for split in one.splits:
        assert texts_of(one, split) == texts_of(two, split)
        assert {**one.counts(split), "tokens": 0} == {**two.counts(split), "tokens": 0}
    assert two.counts("mega_batch_2")["tokens"] < 0.9 * one.counts("mega_batch_2")["tokens"]
    symbols = [load_tokenizer(stream.path / "tokenizer.json").symbols() for stream in (one, two)]
    assert symbols[1][: len(symbols[0])] == symbols[0] and len(symbols[1]) == len(symbols[0]) + 40
    assert any("blorptang" in symbol for symbol in symbols[1][-40:])
    lines = [(stream.path / "dict.txt").read_text().split("\n") for stream in (one, two)]
    assert lines[1][: len(symbols[0])] == lines[0][: len(symbols[0])]
    assert two.description["grown_from"] == [
        {
            "dict_sha256": one.dictionary_digest, "num_symbols": len(symbols[0]), "wanted": 40, "learned_from": [2],
        }
    ]  # fmt: skip
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    # The same command only checks. Another number of symbols is another copy.
    assert grow(old, two.path, "--symbols", 40) == 0 and "nothing to do" in capsys.readouterr().err
    assert grow(old, two.path, "--symbols", 41) == 2 and "is not the copy of" in capsys.readouterr().err


@pytest.mark.damages_streams
def test_a_damaged_copy_is_named(old, tmp_path, capsys):
    new = tmp_path / "new"
    assert grow(old, new, "--symbols", 5) == 0
    with open(new / "valid/valid.bin", "r+b") as file:
        file.write(b"\xff")
    assert grow(old, new, "--symbols", 5) == 2
    assert f"{new / 'valid/valid.bin'} has changed" in capsys.readouterr().err


def test_a_copy_is_extended_and_grown_again(old, tmp_path):
    write_texts(tmp_path / "third.jsonl", 60, 2)
    new, third = tmp_path / "new", tmp_path / "third"
    assert grow(old, new, "--symbols", 10, "--learn-from", 1, 2) == 0
    extend = ["--extend", str(new), "--source", f"text:{tmp_path / 'third.jsonl'}", "--workers", "1"]
    assert main(extend) == 0 and main(extend) == 0
    assert grow(new, third, "--symbols", 5) == 0
    stream = StreamFolder.open(third)
    assert stream.num_mega_batches == 3
    assert [one["learned_from"] for one in stream.description["grown_from"]] == [[1, 2], [3]]
    assert len(load_tokenizer(third / "tokenizer.json").symbols()) == 300 + 15
    assert texts_of(stream, "mega_batch_3") == texts_of(StreamFolder.open(new), "mega_batch_3")
    assert main(["--drop-last", str(third)]) == 0


@pytest.mark.damages_streams  # alma-forget removes words
def test_masked_text_stays_masked_and_is_not_learned_from(old, tmp_path, capsys):
    assert alma_forget([str(old), "--match", "blorptang3", "--no-runs", "--yes"]) == 0
    assert grow(old, tmp_path / "new", "--symbols", 40) == 0
    one, two = StreamFolder.open(old), StreamFolder.open(tmp_path / "new")
    assert not any("blorp" in symbol for symbol in load_tokenizer(two.path / "tokenizer.json").symbols())
    assert texts_of(one, "mega_batch_2") == texts_of(two, "mega_batch_2")
    assert one.num_masked("mega_batch_2") == two.num_masked("mega_batch_2") > 0
    assert any("«" in text for text in texts_of(two, "mega_batch_2"))
    # The certificates stay with the stream that they are about. What is forgotten in the copy is numbered from 1.
    assert not (two.path / "forgotten").exists()
    text = texts_of(two, "mega_batch_2")[-1]
    assert alma_forget([str(two.path), "--match", text, "--no-runs", "--yes"]) == 0
    assert "tokenizer.json: it was trained on text of the mega-batches 1-2" in capsys.readouterr().out
    assert (two.path / "forgotten/1.json").exists() and text not in texts_of(two, "mega_batch_2")
    assert main(["check", str(two.path)]) == 0


@pytest.mark.damages_streams
def test_a_passage_that_needs_fewer_sequences_loses_rows(old, tmp_path, monkeypatch):
    """A sequence has at most 65,535 tokens. Here, it has 25, so nearly all passages have several."""
    from data_prep.encoding import mmap_writer

    for module in (mmap_writer, grow_vocabulary):
        monkeypatch.setattr(module, "MAX_SEQUENCE_TOKENS", 25)
    # The stream itself in short sequences: a copy that adds a symbol that no text has.
    stream = StreamFolder.open(old)
    rows = {}
    for split in stream.splits:
        sizes = [len(ids) + 1 for passages in passages_of(stream, split) for ids in passages]
        path = old / f"documents/{split}.parquet"
        table = pyarrow.parquet.read_table(path)
        rows[split] = [number for number, size in enumerate(sizes) for _ in range(-(-size // 25))]
        pyarrow.parquet.write_table(table.take(rows[split]), path)
    monkeypatch.setattr(grow_vocabulary, "check_bytes", lambda folder: None)
    assert grow(old, tmp_path / "new", "--symbols", 40) == 0
    new = StreamFolder.open(tmp_path / "new")
    new.verify_bytes()
    for split in stream.splits:
        sizes = [len(ids) + 1 for passages in passages_of(new, split) for ids in passages]
        pieces = [-(-size // 25) for size in sizes]
        assert new.counts(split)["sequences"] == sum(pieces) <= len(rows[split])
        names = pyarrow.parquet.read_table(old / f"documents/{split}.parquet")["document"].to_pylist()
        first = [rows[split].index(number) for number in range(len(sizes))]
        found = pyarrow.parquet.read_table(new.path / f"documents/{split}.parquet")["document"].to_pylist()
        assert found == [names[place] for place, count in zip(first, pieces, strict=True) for _ in range(count)]


def test_a_killed_copy_is_no_stream_and_the_same_command_makes_it(old, tmp_path):
    new = tmp_path / "new"
    words = [sys.executable, "-m", "data_prep", "grow-vocab", str(old), str(new), "--symbols", "40"]
    for seconds in (0.0, 0.05, 0.1):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (new / ".alma-prep/stream").exists():
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (new / "stream.json").exists():
            StreamFolder.open(new).verify_bytes()
    assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 0
    StreamFolder.open(new).verify_bytes()
    # It is the copy that a call makes that was not killed.
    assert grow(old, tmp_path / "whole", "--symbols", 40) == 0
    names = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert {path.relative_to(new) for path in new.rglob("*") if path.is_file()} == names
    assert all((new / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


def test_a_copy_that_is_killed_before_stream_json_is_begun_again(old, tmp_path):
    """All shards are in their places then."""
    with killed_before_stream_json():
        grow(old, tmp_path / "new", "--symbols", 40)
    assert (tmp_path / "new/valid/valid.bin").exists()
    assert grow(old, tmp_path / "new", "--symbols", 40) == 0
    StreamFolder.open(tmp_path / "new").verify_bytes()


def test_what_cannot_be_grown_is_refused_and_nothing_is_written(old, tmp_path, alma_prep, books, capsys):
    with_pieces = tmp_path / "pieces"
    assert alma_prep(with_pieces, f"books:{books}", vocab_size=341, more=["--tokenizer", "sentencepiece"]) == 0
    new = tmp_path / "new"
    for source, options, message in (
        (tmp_path / "none", ("--symbols", 1), "there is no stream in"),
        (old, ("--symbols", 0), "--symbols 0: give the number"),
        (old, ("--symbols", 5, "--learn-from", 3), "has no mega-batch 3: it has 2 of them"),
        (with_pieces, ("--symbols", 5), "is no plain byte-level BPE"),
    ):
        assert grow(source, new, *options) == 2
        assert message in capsys.readouterr().err and not new.exists()
    # A file that alma-prep could have written is somebody's, too.
    for name in ("tokenizer.json", "dict.txt", "valid/valid.bin"):
        (new / name).parent.mkdir(parents=True)
        (new / name).write_text("mine")
        assert grow(old, new, "--symbols", 5) == 2 and "already contains" in capsys.readouterr().err
        assert (new / name).read_text() == "mine" and len(list(new.rglob("*"))) == 1 + name.count("/")
        shutil.rmtree(new)
    assert grow(old, old / "new", "--symbols", 5) == 2 and "is in the folder" in capsys.readouterr().err
    new.mkdir()
    (new / "notes.txt").write_text("mine")
    assert grow(old, new, "--symbols", 5) == 2
    assert (
        "already contains these files: notes.txt" in capsys.readouterr().err
        and (new / "notes.txt").read_text() == "mine"
    )


def test_an_unfinished_extension_is_not_copied(old, tmp_path):
    write_texts(tmp_path / "third.jsonl", 60, 2)
    extend = ["--source", f"text:{tmp_path / 'third.jsonl'}", "--workers", "1"]
    with killed_before_stream_json():
        main(["--extend", str(old), *extend])
    new = tmp_path / "new"
    assert grow(old, new, "--symbols", 10) == 0
    assert not (new / "documents/mega_batch_3.parquet").exists()
    assert main(["--extend", str(new), *extend]) == 0 == main(["--extend", str(old), *extend])
    assert texts_of(StreamFolder.open(new), "mega_batch_3") == texts_of(StreamFolder.open(old), "mega_batch_3")


@pytest.mark.damages_streams
def test_a_stream_of_somebody_else_is_refused_in_one_line(old, tmp_path, capsys):
    (tmp_path / "secret.txt").write_text("secret")
    secret = {"bytes": 6, "sha256": sha256_of(tmp_path / "secret.txt")}

    def changed(name, change):
        copy = shutil.copytree(old, tmp_path / name)
        stream = json.loads((copy / "stream.json").read_text())
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["outputs"]["documents/../../secret.txt"] = secret  # a path that leaves the folder is not copied
        for path in change(copy):
            digest = sha256_of(copy / path)
            manifest["outputs"][path] |= {"sha256": digest, "bytes": (copy / path).stat().st_size}
            if path == "tokenizer.json":
                stream["tokenizer"]["sha256"] = digest
            else:
                stream["splits"]["valid"]["sha256"] = digest
        (copy / "stream.json").write_text(json.dumps(stream))
        (copy / "manifest.json").write_text(json.dumps(manifest))
        return copy

    def far_id(copy):
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["unheard"] = 3_000_000
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        return ["tokenizer.json"]

    def wrong(position, value):
        def change(copy):
            tokens = np.fromfile(copy / "valid/valid.bin", np.uint16)
            tokens[position] = value
            tokens.tofile(copy / "valid/valid.bin")
            return ["valid/valid.bin"]

        return change

    for name, change, message in (
        ("far", far_id, "its largest id is 3,000,000"),
        ("special", wrong(3, 0), "ids that are not in its vocabulary"),
        ("unused", wrong(3, 307), "ids that are not in its vocabulary"),
        ("end", wrong(-1, 100), "does not end with the end of a passage"),
    ):
        assert grow(changed(name, change), tmp_path / "new", "--symbols", 5) == 2
        assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "new").exists()
    assert grow(changed("path", lambda copy: []), tmp_path / "below/new", "--symbols", 5) == 0
    assert not list((tmp_path / "below").rglob("secret.txt"))

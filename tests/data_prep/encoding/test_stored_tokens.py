"""The tokens of passages in the cache: other streams with the same tokenizer take them, whatever their order."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.tokenizers import EOS
from fairseq_alma.core.files import read_json, sealed, sha256_of, write_json
from tests.data_prep.encoding.test_documents import prose, write_lines


@pytest.fixture
def corpus(tmp_path) -> str:
    """Short documents, and some that streams of this size cut into passages."""
    rows = [{"text": prose(length, seed)} for seed, length in enumerate([30] * 700 + [700, 900, 1500])]
    return f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"


def entries(cache: Path) -> dict[Path, tuple[int, int]]:
    """What shows whether an entry was written anew: its inode, which may be that of a removed file, and its time."""
    found = {path.parent: path.stat() for path in cache.glob("tokens/*/*/entry.json")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def splits(out: Path) -> dict:
    return json.loads((out / "stream.json").read_text())["splits"]


@pytest.fixture
def encoded_share(tmp_path, alma_prep):
    """encoded_share(cache, source, ..., more=..): the share of the tokens of a stream that are not from the cache.

    The stream is made with a copy of the cache in which all tokens are 5.
    """

    def measure(cache: Path, *sources: str, more=(), **settings) -> float:
        shutil.rmtree(tmp_path / "marked", ignore_errors=True)
        shutil.copytree(cache, tmp_path / "marked" / "cache")
        for entry in entries(tmp_path / "marked" / "cache"):
            tokens = np.full_like(np.fromfile(entry / "tokens", np.uint16), 5)
            tokens.tofile(entry / "tokens")
            mark = read_json(entry / "entry.json")
            mark["files"]["tokens"]["sha256"] = sha256_of(entry / "tokens")
            write_json(entry / "entry.json", sealed({name: mark[name] for name in ("files", "value")}))
        out, cached = tmp_path / "marked" / "out", ["--cache", tmp_path / "marked" / "cache"]
        assert alma_prep(out, *sources, more=[*more, *cached], **settings) == 0
        found = np.concatenate([np.fromfile(path, np.uint16) for path in out.rglob("*.bin")])
        return float(((found != 5) & (found != EOS)).mean())

    return measure


def test_another_stream_takes_the_tokens_from_the_cache(tmp_path, corpus, alma_prep, folder_bytes, encoded_share):
    cache = tmp_path / "cache"
    cached = ["--cache", cache]
    assert alma_prep(tmp_path / "plain", corpus, num_mega_batches=2) == 0
    assert alma_prep(tmp_path / "first", corpus, num_mega_batches=2, more=cached) == 0
    assert folder_bytes(tmp_path / "first") == folder_bytes(tmp_path / "plain")
    assert splits(tmp_path / "first") == splits(tmp_path / "plain")
    found = entries(cache)
    assert len(found) == 1

    other = ["--seed", 7, "--tokenizer", tmp_path / "first" / "tokenizer.json"]
    assert alma_prep(tmp_path / "wanted", corpus, num_mega_batches=2, more=other) == 0
    assert alma_prep(tmp_path / "second", corpus, num_mega_batches=2, more=[*other, *cached]) == 0
    assert folder_bytes(tmp_path / "second") == folder_bytes(tmp_path / "wanted")
    assert entries(cache) == found
    assert encoded_share(cache, corpus, num_mega_batches=2, more=other) == 0

    (entry,) = found
    content = bytearray((entry / "tokens").read_bytes())
    content[100] ^= 1
    (entry / "tokens").write_bytes(content)
    assert alma_prep(tmp_path / "third", corpus, num_mega_batches=2, more=[*other, *cached]) == 0
    assert folder_bytes(tmp_path / "third") == folder_bytes(tmp_path / "wanted")
    assert entries(cache).keys() == found.keys()
    assert entries(cache) != found
    assert encoded_share(cache, corpus, num_mega_batches=2, more=other) == 0


@pytest.mark.slow
def test_a_stream_with_other_passages_encodes_only_those(tmp_path, corpus, alma_prep, folder_bytes, encoded_share):
    cached = ["--cache", tmp_path / "cache"]
    assert alma_prep(tmp_path / "first", corpus, num_mega_batches=2, more=cached) == 0
    other = ["--tokenizer", tmp_path / "first" / "tokenizer.json", "--passage-words", 50]
    assert 0 < encoded_share(tmp_path / "cache", corpus, more=other) < 0.2
    assert alma_prep(tmp_path / "wanted", corpus, more=other) == 0
    assert alma_prep(tmp_path / "second", corpus, more=[*other, *cached]) == 0
    assert folder_bytes(tmp_path / "second") == folder_bytes(tmp_path / "wanted")


@pytest.mark.slow
def test_a_stream_adds_the_tokens_of_what_a_share_left_out(tmp_path, corpus, alma_prep, folder_bytes, encoded_share):
    cache = tmp_path / "cache"
    more = f"text:{write_lines(tmp_path / 'more.jsonl', [{'text': prose(60, seed)} for seed in range(1000, 1400)])}"
    assert alma_prep(tmp_path / "first", f"{corpus}@0.3", more, more=["--cache", cache]) == 0
    of_first = entries(cache)
    other = ["--tokenizer", tmp_path / "first" / "tokenizer.json"]
    assert 0 < encoded_share(cache, corpus, more, more=other) < 0.5
    assert alma_prep(tmp_path / "wanted", corpus, more, more=other) == 0
    assert alma_prep(tmp_path / "all", corpus, more, more=[*other, "--cache", cache]) == 0
    assert folder_bytes(tmp_path / "all") == folder_bytes(tmp_path / "wanted")
    assert len(entries(cache)) == len(of_first) + 1
    assert encoded_share(cache, corpus, f"{more}@0.5", more=[*other, "--seed", 5]) == 0


def test_a_second_stream_counts_what_a_tokenizer_loses(tmp_path, corpus, alma_prep, folder_bytes):
    """sentencepiece may lose text, so the text is compared with the tokens, also if they are from the cache."""
    cached, kind = ["--cache", tmp_path / "cache"], ["--tokenizer", "sentencepiece"]
    assert alma_prep(tmp_path / "first", corpus, num_mega_batches=2, more=[*kind, *cached]) == 0
    more = ["--tokenizer", tmp_path / "first" / "sentencepiece.model", "--seed", 7]
    assert alma_prep(tmp_path / "wanted", corpus, num_mega_batches=2, more=more) == 0
    assert alma_prep(tmp_path / "second", corpus, num_mega_batches=2, more=[*more, *cached]) == 0
    assert folder_bytes(tmp_path / "second") == folder_bytes(tmp_path / "wanted")
    assert splits(tmp_path / "second") == splits(tmp_path / "wanted")
    assert splits(tmp_path / "second")["valid"]["lost"]["of_characters"] > 0


def test_a_cache_that_cannot_be_written_is_noted(tmp_path, corpus, alma_prep, folder_bytes, capsys):
    assert alma_prep(tmp_path / "wanted", corpus, num_mega_batches=2) == 0
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens").write_text("a file in the place of the folder")
    assert alma_prep(tmp_path / "out", corpus, num_mega_batches=2, more=["--cache", tmp_path / "cache"]) == 0
    assert "not all tokens are stored in the cache" in capsys.readouterr().err
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")


def test_tokens_that_a_killed_call_collected_with_another_tokenizer_are_not_used(
    tmp_path, corpus, alma_prep, folder_bytes, monkeypatch
):  # fmt: skip
    class Killed(BaseException):
        """Stands for kill -9."""

    def killed(work, step, title, *arguments, **keywords):
        if title == "encode":
            raise Killed
        return finish(work, step, title, *arguments, **keywords)

    finish = WorkFolder.finish
    more = write_lines(tmp_path / "more.jsonl", [{"text": prose(120, seed)} for seed in range(1000, 1600)])
    cached = ["--cache", tmp_path / "cache"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(WorkFolder, "finish", killed)
        alma_prep(tmp_path / "out", corpus, num_mega_batches=2, more=cached)
    assert list((tmp_path / "out/.alma-prep/tokens").glob("*.tokens"))
    assert alma_prep(tmp_path / "out", corpus, f"text:{more}", num_mega_batches=2, more=cached) == 0
    assert alma_prep(tmp_path / "wanted", corpus, f"text:{more}", num_mega_batches=2) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")

"""A stream of a tokenizer that loses text: each split records how much, and one warning names the characters."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.cli import main

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

WORDS = ["the", "of", "and", "to", "that", "with", "have", "be", "this", "from", "they", "which", "would", "there"]


def write_texts(path, count, seed):
    rng = random.Random(seed)
    rows = [{"text": " ".join([*rng.choices(WORDS, k=60), f"n{seed}x{number}", "наука"])} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def given(tmp_path):
    """A tokenizer whose vocabulary has all words but the last two of each text."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    return ["--tokenizer", str(tmp_path / "words.json"), "--duplicates", "exact"]


def lost_in(out, *splits):
    stream = json.loads((out / "stream.json").read_text(encoding="utf-8"))
    return [stream["splits"][split]["lost"] for split in splits or stream["splits"]]


def test_streams_and_extensions_count_what_is_lost(tmp_path, alma_prep, given, capsys, folder_bytes):
    write_texts(tmp_path / "a.jsonl", 150, 1)
    out, source = tmp_path / "out", f"text:{tmp_path}/a.jsonl"
    assert alma_prep(out, source, num_mega_batches=2, more=given) == 0
    captured = capsys.readouterr()
    # Two unknown words in each of 150 documents. Some documents are cut, but no word is.
    assert sum(lost["unknown_tokens"] for lost in lost_in(out)) == 300
    assert "300 of 9,300 tokens (3.23%) are its unknown symbol" in captured.err
    assert "U+0430 а 300 times" in captured.err and "--tokenizer byte-bpe" in captured.err
    assert "unknown tokens: 300" in captured.out

    write_texts(tmp_path / "b.jsonl", 40, 2)
    more = ["--extend", str(out), "--source", f"text:{tmp_path}/b.jsonl", "--workers", "1"]
    assert main(more) == 0
    assert lost_in(out, "mega_batch_3")[0]["unknown_tokens"] == 80
    assert "80 of 2,480 tokens" in capsys.readouterr().err


def test_a_lossless_tokenizer_records_no_losses(tmp_path, alma_prep, capsys):
    write_texts(tmp_path / "a.jsonl", 60, 1)
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/a.jsonl", num_mega_batches=1) == 0
    stream = json.loads((tmp_path / "out" / "stream.json").read_text(encoding="utf-8"))
    assert not any("lost" in split for split in stream["splits"].values())
    assert "lost by the tokenizer" not in capsys.readouterr().out

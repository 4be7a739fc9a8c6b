"""Whole runs: what a finished stream holds, and what it does not depend on."""

import hashlib
import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, indexed_dataset
from fairseq_cli import preprocess

from data_prep.dividing.partition import cut_document
from data_prep.tokenization.tokenizers import TOKENIZERS
from fairseq_alma.core.stream_folder import split_names, split_prefix


def load(out: Path) -> dict:
    return json.loads((out / "stream.json").read_text(encoding="utf-8"))


def test_stream_json_describes_the_files(stream_folder, read_passages):
    stream = load(stream_folder)
    assert stream["format_version"] == 1
    assert (stream["num_mega_batches"], stream["seed"], stream["vocab_size"]) == (3, 1, 341)
    # 4 special symbols and 341 symbols are 345; the next multiple of 8 is 352.
    assert (stream["dictionary_size"], stream["dtype"]) == (352, "uint16")
    assert len(Dictionary.load(str(stream_folder / "dict.txt"))) == 352
    assert list(stream["splits"]) == ["valid", "mega_batch_1", "mega_batch_2", "mega_batch_3", "test"]
    for name, split in stream["splits"].items():
        prefix = split_prefix(stream_folder, name)
        content = Path(f"{prefix}.bin").read_bytes()
        assert split["tokens"] == len(content) // 2
        assert split["sha256"] == hashlib.sha256(content).hexdigest()
        assert split["passages"] == split["sequences"] == len(read_passages(prefix))
    tokenizer = stream["tokenizer"]
    for key, name in {"sha256": tokenizer["file"], "dict_sha256": "dict.txt"}.items():
        assert tokenizer[key] == hashlib.sha256((stream_folder / name).read_bytes()).hexdigest()
    assert stream["command"].startswith("alma-prep ")
    assert not (stream_folder / ".alma-prep").exists()


def test_words_are_shared_out_equally_and_none_is_lost(stream_folder):
    stream = load(stream_folder)
    words = {name: split["words"] for name, split in stream["splits"].items()}
    # 12 books of 30 paragraphs of 4 lines of 10 words; 1% is for validation.
    assert sum(words.values()) == stream["sources"][0]["words"] == 14_400
    assert stream["settings"]["valid_words"] == 144
    shares = np.array([words[name] for name in words if name != "valid"])
    assert np.abs(shares / shares.mean() - 1).max() < 0.01
    assert sum(split["bytes"] for split in stream["splits"].values()) == stream["sources"][0]["bytes"]


def test_every_passage_comes_back_exactly(stream_folder, books, read_passages):
    stream = load(stream_folder)
    # (14 400 - 144) / 4 = 3564 words a mega-batch: documents over 35 words are cut into passages of about 7.
    wanted = Counter()
    for path in books.iterdir():
        wanted.update(
            passage.text for passage in cut_document(path.read_text(encoding="utf-8"), passage_words=7, limit_words=35)
        )
    tokenizer = TOKENIZERS[stream["tokenizer"]["kind"]](stream_folder / stream["tokenizer"]["file"])
    found = Counter()
    for name, split in stream["splits"].items():
        texts = [tokenizer.decode((ids - 4).tolist()) for ids in read_passages(split_prefix(stream_folder, name))]
        assert sum(len(text.split()) for text in texts) == split["words"]
        assert sum(len(text.encode()) for text in texts) == split["bytes"]
        found.update(texts)
    assert found == wanted


def test_files_are_byte_for_byte_those_of_fairseq_preprocess(stream_folder, tmp_path, read_passages, monkeypatch):
    dictionary = Dictionary.load(str(stream_folder / "dict.txt"))
    prefixes = {"train": "mega_batch_1", "valid": "valid", "test": "test"}
    for theirs, ours in prefixes.items():
        passages = read_passages(split_prefix(stream_folder, ours))
        lines = [" ".join(dictionary[token] for token in passage) for passage in passages]
        (tmp_path / theirs).write_text("\n".join(lines) + "\n", encoding="utf-8")
    argv = ["fairseq-preprocess", "--only-source", "--dataset-impl", "mmap"]
    argv += [
        "--srcdict",
        str(stream_folder / "dict.txt"),
        "--destdir",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    for theirs in prefixes:
        argv += [f"--{theirs}pref", str(tmp_path / theirs)]
    monkeypatch.setattr(sys, "argv", argv)
    preprocess.cli_main()  # here, because a process of its own would import fairseq again
    for theirs, ours in prefixes.items():
        for ending in ("bin", "idx"):
            theirs_bytes = (tmp_path / "out" / f"{theirs}.{ending}").read_bytes()
            assert Path(f"{split_prefix(stream_folder, ours)}.{ending}").read_bytes() == theirs_bytes
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (stream_folder / "dict.txt").read_bytes()


def test_fairseq_loads_every_split(stream_folder, read_passages):
    for name in split_names(3):
        prefix = split_prefix(stream_folder, name)
        dataset = indexed_dataset.make_dataset(str(prefix), "mmap")
        passages = read_passages(prefix)
        assert len(dataset) == len(passages)
        assert dataset[0].tolist() == [*passages[0].tolist(), 2]
        assert dataset.sizes.tolist() == [len(passage) + 1 for passage in passages]


@pytest.mark.parametrize("tokenizer", ["byte-bpe", pytest.param("sentencepiece", marks=pytest.mark.slow)])
def test_bytes_depend_neither_on_workers_nor_on_files_and_their_order(
    tmp_path, books, alma_prep, folder_bytes, tokenizer
):
    more = ["--tokenizer", tokenizer]
    assert alma_prep(tmp_path / "one", f"books:{books}", workers=1, more=more) == 0
    # The same books in two folders, under other names, in another order, read by three processes.
    paths = sorted(books.iterdir())
    random.Random(1).shuffle(paths)
    for number, path in enumerate(paths):
        folder = tmp_path / ("a" if number % 2 else "b")
        (folder / "deeper").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "deeper" / f"{number}.md")
    assert alma_prep(tmp_path / "two", f"books:{tmp_path}/b", f"books:{tmp_path}/a", workers=3, more=more) == 0
    assert folder_bytes(tmp_path / "one", named=False) == folder_bytes(tmp_path / "two", named=False)
    assert load(tmp_path / "one")["splits"] == load(tmp_path / "two")["splits"]


def test_another_seed_gives_another_partition(tmp_path, books, stream_folder, alma_prep, folder_bytes):
    more = ["--seed", "2", "--tokenizer", load(stream_folder)["tokenizer"]["kind"]]
    assert alma_prep(tmp_path / "out", f"books:{books}", vocab_size=341, more=more) == 0
    assert folder_bytes(tmp_path / "out")["valid/valid.bin"] != folder_bytes(stream_folder)["valid/valid.bin"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_tokenizer_sees_training_text_only(tmp_path, alma_prep, folder_bytes, tokenizer):
    # Lines of 10 words, so that they are dealt out whole; every one has a word of its own.
    lines = [f"the stream of the expert and the router marker{number} end" for number in range(800)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    more = ["--tokenizer", tokenizer, "--duplicates", "keep"]
    assert alma_prep(tmp_path / "one", f"text:{tmp_path}/text", num_mega_batches=2, more=more) == 0
    stream = load(tmp_path / "one")
    read = TOKENIZERS[tokenizer](tmp_path / "one" / stream["tokenizer"]["file"])
    # Train anew on the text of mega-batches 1 and 2 as it stands in the files: the same tokenizer.
    train_texts = []
    for t in (1, 2):
        tokens = np.fromfile(tmp_path / "one" / f"mega_batch_{t}" / "train.bin", np.uint16).astype(int)
        passages = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]
        train_texts += [read.decode((passage[:-1] - 4).tolist()) for passage in passages]
    assert len(train_texts) < 800 * 0.7  # a third is the test set
    content = TOKENIZERS[tokenizer].train(iter(train_texts), 300)
    assert content == (tmp_path / "one" / stream["tokenizer"]["file"]).read_bytes()


def test_a_passage_beyond_65535_tokens_is_several_sequences_with_one_eos(tmp_path, alma_prep):
    # 200 000 letters without a space count as 1563 words, which is less than 1% of a mega-batch of 167 000 words, so
    # they are not cut. Their bytes are tokens of their own or pairs.
    rng = random.Random(0)
    long_word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=200_000))
    lines = ["a b c d e f g h i j " * 100] * 500
    (tmp_path / "a.txt").write_text("\n".join([*lines, long_word]), encoding="utf-8")
    out = tmp_path / "out"
    more = ["--duplicates", "keep"]
    assert alma_prep(out, f"text:{tmp_path}/a.txt", num_mega_batches=2, vocab_size=260, more=more) == 0
    splits = load(out)["splits"]
    [name] = [name for name, split in splits.items() if split["sequences"] > split["passages"]]
    dataset = indexed_dataset.make_dataset(str(split_prefix(out, name)), "mmap")
    sizes = dataset.sizes.tolist()
    first = sizes.index(65_535)
    # 200 000 letters, a few of them joined in pairs: between two and four times 65 535 tokens.
    sequences = [
        dataset[number].tolist()
        for number in range(first, first + splits[name]["sequences"] - splits[name]["passages"] + 1)
    ]
    assert [len(sequence) for sequence in sequences[:-1]] == [65_535] * (len(sequences) - 1)
    tokens = [token for sequence in sequences for token in sequence]
    assert tokens.index(2) == len(tokens) - 1
    tokenizer = TOKENIZERS["byte-bpe"](out / "tokenizer.json")
    assert tokenizer.decode([token - 4 for token in tokens[:-1]]) == long_word


def test_a_vocabulary_that_the_text_cannot_give_is_recorded_smaller(tmp_path, alma_prep, capsys):
    (tmp_path / "a.txt").write_text("one two three four\n" * 1000)
    more = ["--duplicates", "keep"]
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/a.txt", num_mega_batches=1, vocab_size=5000, more=more) == 0
    stream = load(tmp_path / "out")
    assert stream["settings"]["vocab_size"] == 5000
    assert 256 < stream["vocab_size"] < 300
    assert f"has only {stream['vocab_size']} symbols instead of 5000" in capsys.readouterr().err


def test_skipped_files_are_named_in_stream_json_and_in_the_table(tmp_path, write_corpus, alma_prep, capsys):
    folder = write_corpus(tmp_path / "books", num_files=6)
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "empty.md").touch()
    assert alma_prep(tmp_path / "out", f"books:{folder}", more=["--max-bad", "0.2"]) == 0
    bad, empty = load(tmp_path / "out")["sources"][0]["skipped"]
    assert bad["name"] == "bad.txt"
    assert bad["reason"].startswith("the text is not valid UTF-8 at byte 3. Replace the file by")
    assert empty == {"name": "empty.md", "reason": "empty file"}
    table = capsys.readouterr().out
    assert "skipped bad.txt: the text is not valid UTF-8 at byte 3" in table
    assert "2 files completely or partly skipped" in table
    assert "words on average" not in table


def test_files_with_other_endings_in_a_folder_are_counted(tmp_path, write_corpus, alma_prep, capsys):
    corpus = write_corpus(tmp_path / "corpus", num_files=6)
    for name in ("b.csv", "more/c.csv", "more/d.jsonl.zip", "e.md", "LICENSE", ".hidden"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text("not read\n")
    assert alma_prep(tmp_path / "out", f"text:{corpus}") == 0
    endings = {".csv": 2, ".md, which books: reads": 1, ".zip": 1, "none": 1}
    dropped = load(tmp_path / "out")["sources"][0]["dropped"]
    assert dropped == {f"files: not read because of the ending {ending}": count for ending, count in endings.items()}
    out, err = capsys.readouterr()
    assert f"source text:{corpus}: 5 files are not read because of their endings: .csv (2), " in err
    assert " words in 6 files, 5 files ignored, 0 files completely or partly skipped\n  left out 2 files: not " in out
    hint = "have 10 words on average. Of .txt files, each line is a document; if each file is one, give books:"
    assert f"  the documents {hint}{corpus}" in out


def test_a_second_run_finds_its_work_done(tmp_path, books, alma_prep, capsys):
    out = tmp_path / "out"
    assert alma_prep(out, f"books:{books}") == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert alma_prep(out, f"books:{books}", workers=2) == 0  # the number of workers is no setting of the stream
    assert "nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.slow  # the next test shares out real text, too, and tests/data_prep/sources reads this source
def test_the_python_documentation_makes_four_mega_batches(tmp_path, alma_prep):
    out = tmp_path / "out"
    assert alma_prep(out, "python-docs", num_mega_batches=4, vocab_size=1000, workers=2) == 0
    stream = load(out)
    assert min(split["words"] for name, split in stream["splits"].items() if name != "valid") > 40_000
    assert stream["sources"][0]["documents"] > 500


def test_real_books_are_shared_out_equally(tmp_path, shared_data, alma_prep):
    (tmp_path / "books").mkdir()
    for name in ("homer_the_iliad.md", "charles_darwin_on_the_origin_of_species.md"):
        shutil.copy(shared_data / "books" / name, tmp_path / "books" / name)
    out = tmp_path / "out"
    assert alma_prep(out, f"books:{tmp_path}/books", num_mega_batches=4, vocab_size=2000, workers=2) == 0
    splits = load(out)["splits"]
    shares = np.array([split["words"] for name, split in splits.items() if name != "valid"])
    assert np.abs(shares / shares.mean() - 1).max() < 0.01
    assert all(split["documents"] == 2 for split in splits.values())  # both books are spread over all splits

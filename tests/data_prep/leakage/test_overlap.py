"""Overlap of held-out text with training text: what is reported, and what --decontaminate removes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.encoding.mmap_writer import MAX_SEQUENCE_TOKENS, MMapWriter, sequence_sizes
from data_prep.leakage.measure import decoded_texts
from data_prep.leakage.overlap import count_overlaps, divided, find_overlaps, ngrams_of
from data_prep.reading import spool
from data_prep.reading.index import ENTRY, Texts
from data_prep.reading.spool import read_text, text_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.work_folder import WorkFolder
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, TOKENIZERS, load_tokenizer
from fairseq_alma.core.files import sha256_of
from tests.data_prep.cleaning.test_cleaner import of_words
from tests.data_prep.copies.test_duplicates import Here, chinese, english
from tests.data_prep.test_corpora import load, texts_of, word_ngrams


def here(folder):
    """A work folder whose tasks run in this process."""
    folder.mkdir(exist_ok=True)
    return WorkFolder(folder, executor=Here())


def write_texts(folder, texts):
    """Texts in the form of the spool."""
    folder.mkdir()
    rows, offset = [], 0
    with open(text_path(folder, 0), "wb") as file:
        for number, text in enumerate(texts):
            content = text.encode()
            rows.append((b"", number.to_bytes(16), offset, 0, len(content), len(text.split()), 0, 0, 0))
            offset += file.write(content)
    np.save(folder / "index.npy", np.array(rows, ENTRY))
    return Texts(str(folder / "index.npy"), sha256_of(folder / "index.npy"), str(folder), 0, len(texts))


@pytest.mark.parametrize(("maker", "space", "table_parts"), [(english, " ", 8), (english, " ", 1), (chinese, "", 8)])
def test_planted_overlaps_of_13_words_are_found_and_nothing_else(tmp_path, monkeypatch, maker, space, table_parts):
    rng = random.Random(0)
    held_out = [maker(rng, 150) for _ in range(300)]
    training = [maker(rng, 150) for _ in range(400)]
    for number in range(200):
        start = rng.randrange(130)
        training[number][start : start + 13] = held_out[number][50:63]
        training[number + 200][start : start + 10] = held_out[number][20:30]  # too few words
    monkeypatch.setattr("data_prep.leakage.overlap.TASK_BYTES", 20_000)  # several tasks
    monkeypatch.setattr("data_prep.leakage.overlap._MERGED_NGRAMS", 9_000)  # several files of hashes
    monkeypatch.setattr("data_prep.leakage.overlap._TABLE_PARTS", table_parts)
    texts = write_texts(tmp_path / "held_out", [space.join(words) for words in held_out])
    scanned = write_texts(tmp_path / "training", [space.join(words) for words in training])
    found = find_overlaps(here(tmp_path), 13, [texts._replace(end=250)], scanned, keep_ngrams=True)
    assert found.texts.tolist() == [number < 200 for number in range(400)]
    assert len(list((tmp_path / "merge").glob("*.ngrams"))) > 2
    # Without a table, a task reads more text.
    num_tasks = len(list((tmp_path / "scan").glob("*.found")))
    assert (num_tasks == len(divided(scanned))) == (table_parts == 8)
    assert 200 <= len(found.ngrams) < 215  # the words around an overlap can be equal by chance
    whole = {"a": texts._replace(end=250), "b": texts._replace(start=100, step=7)}
    counts = count_overlaps(here(tmp_path), 13, whole, found.ngrams)
    assert 200 * 13 <= counts["a"].pop("overlapping_words") < 215 * 13
    assert counts["a"] == {"documents": 250, "overlapping_documents": 200, "words": 250 * 150}
    assert counts["b"]["documents"] == len(range(100, 300, 7))
    assert counts["b"]["overlapping_documents"] == len(range(100, 200, 7))


def test_a_second_call_repeats_only_what_is_damaged_or_has_changed(tmp_path, monkeypatch):
    rng = random.Random(3)
    repeated = [english(rng, 20) for _ in range(100)]
    made = [english(rng, 12) + rng.choice(repeated)[: rng.choice((3, 9, 20))] for _ in range(400)]
    texts = [" ".join(words) for words in made]
    held_out, training = write_texts(tmp_path / "held_out", texts[:150]), write_texts(tmp_path / "train", texts[150:])
    monkeypatch.setattr("data_prep.leakage.overlap._MERGED_NGRAMS", 300)
    monkeypatch.setattr("data_prep.leakage.overlap.TASK_BYTES", 5_000)

    def find(training=training):
        return find_overlaps(here(tmp_path / "found"), 5, [held_out], training, keep_ngrams=True)

    expected = find()
    assert 50 < expected.texts.sum() < 250 and len(expected.ngrams) > 100
    marks = {path: path.stat().st_mtime_ns for path in (tmp_path / "found" / "scan").glob("*.done")}
    assert np.array_equal(find().texts, expected.texts)
    assert len(marks) > 3 and marks == {path: path.stat().st_mtime_ns for path in marks}
    (tmp_path / "found" / "scan" / "000001.found").write_bytes(b"")
    assert np.array_equal(find().ngrams, expected.ngrams)
    assert sum(path.stat().st_mtime_ns != time for path, time in marks.items()) == 1
    fewer = training._replace(start=1, step=3)
    assert find(fewer).texts.tolist() == expected.texts[1::3].tolist()
    assert find(training._replace(end=0)).texts.tolist() == []


def test_tasks_read_more_text_if_there_is_much_and_read_it_in_the_order_of_the_spool(tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "texts", ["a b c d e f"] * 100)
    monkeypatch.setattr("data_prep.leakage.overlap.TASK_BYTES", 23)
    entries = np.load(texts.path)[np.random.default_rng(0).permutation(100)]
    np.save(texts.path, entries)
    for many, most, expected in ((4000, 1000, 50), (10, 1000, 10), (10, 40, 34)):
        monkeypatch.setattr("data_prep.leakage.overlap._MANY_TASKS", many)
        monkeypatch.setattr("data_prep.leakage.overlap._MAX_TASK_BYTES", most)
        parts = divided(texts)
        assert expected <= len(parts) <= 1.2 * expected
        assert np.array_equal(np.concatenate([part.entries() for part in parts]), entries)
    offsets: list[int] = []
    read = spool._read
    monkeypatch.setattr(spool, "_read", lambda file, offset, count: offsets.append(offset) or read(file, offset, count))
    found = []
    for num_bytes in (1, 1 << 20):
        offsets.clear()
        monkeypatch.setattr("data_prep.leakage.overlap.READ_BYTES", num_bytes)
        with Heartbeat(tmp_path / "alive") as heartbeat:
            found.append(ngrams_of(texts, 3, heartbeat))
    assert offsets == sorted(offsets)
    assert np.array_equal(found[0], found[1])
    assert found[0][1].tolist() == np.repeat(np.arange(100), 4).tolist()


@pytest.fixture(scope="module")
def quotes(tmp_path_factory):
    """700 documents of 60 words. Each of 60 quotes of 14 words is in four documents. A benchmark has two of them."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("quotes")
    documents = [english(rng, 60) for _ in range(700)]
    quoted = [english(rng, 14) for _ in range(60)]
    for number in range(240):
        documents[number][20:34] = quoted[number % 60]
    lines = [json.dumps({"text": " ".join(words)}) + "\n" for words in documents]
    (folder / "a.jsonl").write_text("".join(lines[:600]))
    (folder / "later.jsonl").write_text("".join(lines[600:] + lines[:3]))
    more = [english(rng, 20) + quote + english(rng, 20) for quote in quoted]
    (folder / "new.jsonl").write_text(
        "".join(
            json.dumps({"text": " ".join(words)}) + "\n" for words in [*more, *(english(rng, 60) for _ in range(90))]
        )
    )
    quiz = [documents[650][10:30], documents[300][5:25]]
    (folder / "quiz.txt").write_text("".join(" ".join(words) + "\n" for words in quiz))
    return folder


def overlaps(out, held_out, training):
    """For each held-out text, whether it has 13 words in a row in common with training text."""
    known = set().union(*(word_ngrams(text, 13) for split in training for text in texts_of(out, split)))
    return [bool(word_ngrams(text, 13) & known) for text in texts_of(out, held_out)]


@pytest.fixture(scope="module")
def leaky(tmp_path_factory, quotes, alma_prep):
    out = tmp_path_factory.mktemp("leaky") / "stream"
    assert alma_prep(out, f"text:{quotes}/a.jsonl", num_mega_batches=2) == 0
    return out


def test_the_report_says_what_a_comparison_of_all_texts_finds(leaky, capsys, alma_prep, quotes):
    report = load(leaky)["leakage"]
    assert report["ngram_words"] == 13
    for name in ("valid", "test"):
        expected = overlaps(leaky, name, ["mega_batch_1", "mega_batch_2"])
        assert report[name]["documents"] == len(expected)
        assert report[name]["overlapping_documents"] == sum(expected)
        assert report[name]["words"] == load(leaky)["splits"][name]["words"]
        assert 13 * sum(expected) <= report[name]["overlapping_words"] <= 16 * sum(expected)
    assert report["test"]["overlapping_documents"] > 20
    capsys.readouterr()
    assert alma_prep(leaky, f"text:{quotes}/a.jsonl", num_mega_batches=2) == 0
    numbers = report["test"]["overlapping_documents"], report["test"]["documents"]
    assert f"{numbers[0]} of {numbers[1]} documents in test have 13 words in a row" in capsys.readouterr().out


@pytest.fixture(scope="module")
def clean(tmp_path_factory, quotes, alma_prep):
    out = tmp_path_factory.mktemp("clean") / "stream"
    more = ["--decontaminate", 13, "--decontaminate-against", quotes / "quiz.txt"]
    assert alma_prep(out, f"text:{quotes}/a.jsonl", num_mega_batches=2, more=more) == 0
    return out, more


def test_decontamination_removes_all_overlaps_and_keeps_sizes_equal(clean, leaky, quotes, folder_bytes):
    out, _ = clean
    batches = ["mega_batch_1", "mega_batch_2"]
    for name in ("valid", "test"):
        assert texts_of(out, name) == texts_of(leaky, name)
        assert not any(overlaps(out, name, batches))
        assert load(out)["leakage"][name]["overlapping_words"] == 0
    quiz = [word_ngrams(line, 13) for line in (quotes / "quiz.txt").read_text().splitlines()]
    training = [text for name in batches for text in texts_of(out, name)]
    assert not any(word_ngrams(text, 13) & grams for text in training for grams in quiz)
    before = [text for name in batches for text in texts_of(leaky, name)]
    held_out = [text for name in ("valid", "test") for text in texts_of(out, name)]
    known = set().union(*quiz, *(word_ngrams(text, 13) for text in held_out))
    assert sorted(training) == sorted(text for text in before if not word_ngrams(text, 13) & known)
    words = [load(out)["splits"][name]["words"] for name in batches]
    assert abs(words[0] - words[1]) <= 60
    [row] = [row for row in load(out)["cleaning"] if "overlap" in row["step"]]
    assert row["documents"] == len(before) - len(training) > 20
    assert row["words"] == 60 * row["documents"]
    assert "--decontaminate-against" in load(out)["command"]


def test_neither_workers_nor_the_order_of_files_show(tmp_path, clean, quotes, alma_prep, folder_bytes):
    out, more = clean
    lines = (quotes / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jsonl").write_text("".join(lines[400:]))
    (tmp_path / "a" / "2.jsonl").write_text("".join(lines[:400]))
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/a", num_mega_batches=2, workers=2, more=more) == 0
    assert folder_bytes(tmp_path / "out", named=False) == folder_bytes(out, named=False)


def test_only_the_passages_that_are_looked_at_are_decoded(tmp_path, monkeypatch):
    rng = random.Random(4)
    kind = TOKENIZERS["byte-bpe"]
    texts = [" ".join(english(rng, rng.randint(0, 30))) for _ in range(50)]
    texts[3] = " ".join(english(rng, 30_000))  # several sequences
    (tmp_path / kind.file_name).write_bytes(kind.train(iter(texts[4:]), 300))
    tokenizer = load_tokenizer(tmp_path / kind.file_name)
    tokens = [[*(ids + NUM_SPECIAL).tolist(), EOS] for ids in tokenizer.encode(texts)]
    tokens[5] = [tokens[3][0]] * (MAX_SEQUENCE_TOKENS - 1) + [EOS]  # one sequence of the largest size
    texts[5] = tokenizer.decode([ids - NUM_SPECIAL for ids in tokens[5][:-1]])
    (tmp_path / "test").mkdir()
    with MMapWriter(tmp_path / "test" / "test", "uint16") as writer:
        for ids in tokens:
            writer.write(np.array(ids), sequence_sizes(np.array([len(ids)])))
    assert sum(map(len, writer._sizes)) > len(texts)
    description = {"dictionary_size": 304, "tokenizer": {"file": kind.file_name}, "splits": {"test": {}}}
    decoded: list[str] = []
    decode = kind.decode
    monkeypatch.setattr(kind, "decode", lambda self, ids: decoded.append(decode(self, ids)) or decoded[-1])
    monkeypatch.setattr("data_prep.leakage.measure._TASK_TOKENS", 100)
    for every, many in ((1, 4000), (3, 4000), (3, 2), (60, 4000)):
        monkeypatch.setattr("data_prep.leakage.measure._MANY_TASKS", many)
        decoded.clear()
        found = decoded_texts(here(tmp_path / f"{every}_{many}"), tmp_path, "test", description, every)
        assert decoded == texts[::every]
        assert [read_text(Path(found.spool), entry) for entry in found.entries()] == decoded
        assert len(list((tmp_path / f"{every}_{many}").glob("*.text"))) <= (4 if many == 2 else 50)


def test_an_extension_is_compared_with_the_held_out_text_of_the_stream(clean, quotes, capsys, monkeypatch):
    out, more = clean
    again = ["--extend", str(out), "--source", f"text:{quotes}/new.jsonl", "--workers", "1"]
    assert main(again) == 0  # --decontaminate and its files are those of the stream
    assert f"decontaminate 13, decontaminate_against ('{more[-1]}',)" in capsys.readouterr().err
    assert not any(overlaps(out, "test", ["mega_batch_3"]))
    [extension] = load(out)["extensions"]
    removed = sum(row["documents"] for row in extension["cleaning"] if "overlap" in row["step"])
    assert removed > 20
    assert len(texts_of(out, "mega_batch_3")) == 150 - removed
    assert extension["leakage"]["test"]["overlapping_documents"] == 0
    assert extension["leakage"]["test"]["documents"] == len(texts_of(out, "test"))
    assert main(again) == 0
    shown = capsys.readouterr()
    assert "nothing to do" in shown.err
    num_texts = sum(extension["leakage"][name]["documents"] for name in ("valid", "test"))
    assert f"0 of {num_texts} held-out texts have 13 words in a row in common with the new mega-batches" in shown.out
    assert "To continue a run, give alma-lm the same command again." in shown.out
    off = [*again[:3], f"text:{quotes}/more.jsonl", *again[4:], "--decontaminate", "0"]
    (quotes / "more.jsonl").write_text("".join(json.dumps({"text": of_words(60, n)}) + "\n" for n in range(5000, 5030)))
    monkeypatch.setattr("data_prep.leakage.measure.MEASURED_BYTES", 10_000)
    assert main(off) == 0
    sampled, whole = load(out)["extensions"][1]["leakage"]["test"], texts_of(out, "test")
    assert sampled["every"] == -(-sum(len(text.encode()) for text in whole) // 10_000) > 2
    assert sampled["documents"] == len(whole[:: sampled["every"]])
    assert load(out)["extensions"][1]["settings"]["decontaminate"] is None
    assert load(out)["extensions"][1]["settings"]["decontaminate_against"] == []


def test_benchmark_files_that_are_damaged_or_have_changed_are_named(tmp_path, quotes, alma_prep, capsys):
    quiz, source = tmp_path / "quiz.jsonl", f"text:{quotes}/a.jsonl"
    quiz.write_text('{"text": "a question that no document contains"}\n{"text": \n')
    more = ["--decontaminate", 13, "--decontaminate-against", quiz]
    assert alma_prep(tmp_path / "o", source, num_mega_batches=2, more=more) == 0
    warning = f"--decontaminate-against {quiz}: quiz.jsonl is not compared completely: 1 line: not valid JSON"
    error = capsys.readouterr().err
    assert warning in error
    assert f"--decontaminate-against {quiz}: texts with fewer than 13 words cannot be found: 1." in error
    quiz.write_text('{"text": "another question"}\n')
    assert alma_prep(tmp_path / "o", source, num_mega_batches=2, more=more) == 2
    assert "a file of the decontaminate_against setting has changed" in capsys.readouterr().err
    # An extension takes the file from the stream, so it must be the same file, unless it is given again.
    extend = ["--extend", str(tmp_path / "o"), "--source", f"text:{quotes}/new.jsonl", "--workers", "1"]
    assert main(extend) == 2
    assert "--decontaminate-against, which is taken from the stream, have changed" in capsys.readouterr().err
    given = [*extend, "--decontaminate", "13", "--decontaminate-against", str(quiz)]
    assert main(given) == 0
    assert main(given) == 0
    quiz.write_text('{"text": "a third question"}\n')
    capsys.readouterr()
    assert main(given) == 2
    assert "a file of the decontaminate_against setting has changed" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_anything_is_read(tmp_path, quotes, alma_prep, capsys):
    source = f"text:{quotes}/a.jsonl"
    assert alma_prep(tmp_path / "o", source, more=["--decontaminate-against", quotes / "quiz.txt"]) == 2
    assert "give --decontaminate 13" in capsys.readouterr().err
    missing = ["--decontaminate", 13, "--decontaminate-against", quotes / "none.txt"]
    assert alma_prep(tmp_path / "o", source, more=missing) == 2
    assert "none.txt does not exist" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    (tmp_path / "empty.jsonl").write_text('{"question": "no text"}\n')
    empty = ["--decontaminate", 13, "--decontaminate-against", tmp_path / "empty.jsonl"]
    assert alma_prep(tmp_path / "o", source, more=empty) == 2
    assert "empty.jsonl contains no text" in capsys.readouterr().err

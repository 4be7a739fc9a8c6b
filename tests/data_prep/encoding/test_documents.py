"""The folder documents of a stream: the id and the date of each passage."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from data_prep.tokenization.tokenizers import TOKENIZERS
from fairseq_alma.core.stream_folder import split_prefix

WORDS = [f"{start}{end}" for start in "bdfgklmnprst" for end in ("ando", "eri", "ilum", "onta", "usk", "azed")]


def prose(num_words: int, seed: int) -> str:
    """Paragraphs of random words."""
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=num_words)
    return "\n\n".join(" ".join(words[start : start + 20]) for start in range(0, num_words, 20))


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def rows_of(out: Path, split: str) -> list[dict]:
    return pyarrow.parquet.read_table(out / "documents" / f"{split}.parquet").to_pylist()


def splits_of(out: Path) -> dict[str, dict]:
    """The entry in stream.json of every split, also of the held-out text of periods."""
    stream = json.loads((out / "stream.json").read_text())
    periods = {
        f"mega_batch_{t}/{part}": period[part]
        for t, period in enumerate(stream.get("periods", []), start=1)
        for part in ("valid", "test")
    }
    return stream["splits"] | periods


def texts_of(out: Path, split: str) -> list[str]:
    """The text of each sequence of a split."""
    stream = json.loads((out / "stream.json").read_text())
    tokenizer = TOKENIZERS[stream["tokenizer"]["kind"]](out / stream["tokenizer"]["file"])
    tokens = np.fromfile(f"{split_prefix(out, split)}.bin", stream["dtype"])
    sequences = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]
    return [tokenizer.decode((ids[:-1] - 4).tolist()) for ids in sequences]


def check_documents(out: Path, texts: dict[tuple[str, str | None], str], source: str) -> None:
    """Check every row of every split. `texts` maps (id, date) to the text of the document."""
    found: dict[tuple, dict[int, str]] = {}
    for split, entry in splits_of(out).items():
        rows, passages = rows_of(out, split), texts_of(out, split)
        assert len(rows) == len(passages) == entry["sequences"]
        assert sum(row["words"] for row in rows) == entry["words"]
        assert sum(row["bytes"] for row in rows) == entry["bytes"]
        for row, passage in zip(rows, passages, strict=True):
            text = texts[row["id"], row["date"]]
            assert passage in text and len(passage.split()) == row["words"]
            assert len(passage.encode()) == row["bytes"]
            assert row["document"] == hashlib.sha256(text.encode()).hexdigest()[:32]
            assert row["source"] == source
            if "/" not in split:
                found.setdefault((row["id"], row["date"]), {})[row["passage"]] = passage
    assert {name: "".join(parts[number] for number in sorted(parts)) for name, parts in found.items()} == texts


def test_every_passage_says_which_document_it_comes_from(tmp_path, alma_prep):
    rows = [{"id": f"doc-{n}", "date": f"19{n + 10}-05", "text": prose(40 + 17 * n, n)} for n in range(60)]
    rows += [{"url": "https://a.example/ä", "text": prose(300, 101)}]
    source = f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"
    assert alma_prep(tmp_path / "out", source) == 0
    texts = {(row.get("id") or row["url"], row.get("date")): row["text"] for row in rows}
    check_documents(tmp_path / "out", texts, source)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {name for name in manifest["outputs"] if name.startswith("documents/")} == {
        f"documents/{split}.parquet" for split in ("mega_batch_1", "mega_batch_2", "mega_batch_3", "test", "valid")
    }


@pytest.mark.damages_streams
def test_a_damaged_file_of_documents_is_named(tmp_path, books, alma_prep, capsys):
    assert alma_prep(tmp_path / "out", f"books:{books}") == 0
    path = tmp_path / "out" / "documents" / "mega_batch_2.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    assert alma_prep(tmp_path / "out", f"books:{books}") == 2
    assert f"{path} has changed since alma-prep wrote it" in capsys.readouterr().err


@pytest.mark.parametrize("duplicates", [pytest.param("exact", marks=pytest.mark.slow), "keep"])
def test_the_documents_do_not_depend_on_files_and_workers(tmp_path, alma_prep, folder_bytes, duplicates):
    rows = [{"id": f"doc-{n}", "text": prose(100, n)} for n in range(60)]
    copies = [{"id": f"copy-{n % 3}-{n}", "date": f"19{20 + n % 3}", "text": rows[n % 10]["text"]} for n in range(30)]
    rows += copies
    streams = {}
    for number in range(2):
        random.Random(number).shuffle(rows)
        folder = tmp_path / str(number) / "lines"
        for part in range(1 + 4 * number):
            write_lines(folder / f"{part}.jsonl", rows[part :: 1 + 4 * number])
        out = tmp_path / str(number) / "out"
        more = ["--duplicates", duplicates]
        with_name = f"text:{folder}"
        assert alma_prep(out, with_name, workers=1 + 2 * number, more=more) == 0
        streams[number] = folder_bytes(out, named=False)
        streams[number] |= {
            f"names in {split}": [(row["id"], row["date"]) for row in rows_of(out, split)] for split in splits_of(out)
        }
    assert streams[0] == streams[1]
    if duplicates == "exact":
        kept = {
            row["id"] for split in splits_of(tmp_path / "0" / "out") for row in rows_of(tmp_path / "0" / "out", split)
        }
        # Of each text there is an undated document, which comes before its dated copies.
        assert kept == {f"doc-{n}" for n in range(60)}


def test_names_and_dates_that_were_corrected_after_an_interruption_are_used(
    tmp_path, alma_prep, folder_bytes, monkeypatch
):
    """The text is the same, so everything else that was done is used again."""
    path, more = tmp_path / "lines.jsonl", ["--duplicates", "exact"]
    texts = [prose(60, n % 60) for n in range(80)]

    def interrupt(*arguments):
        raise KeyboardInterrupt

    write_lines(path, [{"id": f"http://a/{n}", "date": f"{1900 + n}", "text": text} for n, text in enumerate(texts)])
    with monkeypatch.context() as context:
        context.setattr("data_prep.pipeline.write_dictionary", interrupt)
        assert alma_prep(tmp_path / "out", f"text:{path}", num_mega_batches=1, more=more) == 130
    write_lines(path, [{"id": f"http://b/{n}", "date": f"{1800 + n}", "text": text} for n, text in enumerate(texts)])
    for out in ("out", "wanted"):
        assert alma_prep(tmp_path / out, f"text:{path}", num_mega_batches=1, more=more) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")
    assert all(row["id"].startswith("http://b/") for row in rows_of(tmp_path / "out", "mega_batch_1"))


def test_a_passage_that_is_stored_as_several_sequences_has_a_row_for_each(tmp_path, alma_prep):
    # 200 000 letters without a space count as 1563 words, less than 1% of a mega-batch, so they are not cut.
    long_word = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=200_000))
    rows = [{"id": str(n), "text": "a b c d e f g h i j " * 100} for n in range(500)] + [
        {"id": "long", "text": long_word}
    ]
    source = f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"
    more = ["--duplicates", "keep"]
    assert alma_prep(tmp_path / "out", source, num_mega_batches=2, vocab_size=260, more=more) == 0
    splits = splits_of(tmp_path / "out")
    [name] = [name for name, split in splits.items() if split["sequences"] > split["passages"]]
    count = splits[name]["sequences"] - splits[name]["passages"] + 1
    rows = rows_of(tmp_path / "out", name)
    assert len(rows) == splits[name]["sequences"]
    tokens = np.fromfile(tmp_path / "out" / name / f"{split_prefix(Path(), name).name}.idx", np.uint8)
    sizes = np.frombuffer(tokens[26:].tobytes(), np.int32, len(rows)).tolist()
    pieces = [number for number, row in enumerate(rows) if row["id"] == "long"]
    assert pieces == list(range(sizes.index(65_535), sizes.index(65_535) + count))
    assert [rows[number]["words"] for number in pieces] == [1563] + [0] * (count - 1)
    assert [rows[number]["bytes"] for number in pieces] == [200_000] + [0] * (count - 1)

"""Streams of languages with and without spaces between words: sizes, shares, passages, and nothing lost."""

import json

import numpy as np
import pyarrow.parquet
import pytest

from data_prep.words import count_words
from tests.data_prep.conserved import decoded
from tests.data_prep.languages import PARAGRAPHS, document


def write(path, language, count, num_words):
    texts = [document(language, seed, num_words) for seed in range(count)]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("language", ["zh", pytest.param("th", marks=pytest.mark.slow)])
def test_half_of_the_words_of_each_split_are_of_each_language(tmp_path, alma_prep, language):
    # Documents of English are ten times as long, and there is three times as much of it.
    english = write(tmp_path / "en.jsonl", "en", 60, 1000)
    other = write(tmp_path / "other.jsonl", language, 200, 100)
    sources = [f"text:{english}@0.5", f"text:{other}@0.5"]
    out = tmp_path / "out"
    assert alma_prep(out, *sources, more=["--duplicates", "exact"]) == 0
    for split, entry in json.loads((out / "stream.json").read_text())["splits"].items():
        rows = pyarrow.parquet.read_table(out / "documents" / f"{split}.parquet").to_pylist()
        texts = [text.decode("utf-8") for text in decoded(out, split)]
        assert len(rows) == len(texts)
        words = np.array([count_words(text) for text in texts])
        is_english = np.array([row["source"] == f"text:{english}" for row in rows])
        # A passage has up to 1% of a mega-batch of 10,000 words. The words of a passage by itself can differ from those
        # that it has in its document where ICU's dictionary finds other words.
        assert abs(words[is_english].sum() - words.sum() / 2) <= 0.02 * words.sum() + 100, split
        assert abs(words.sum() - entry["words"]) <= 0.02 * words.sum(), split


def test_each_of_twelve_languages_is_cut_into_passages_of_the_same_number_of_words(tmp_path, alma_prep):
    # One book of 3,000 words in each language. By white space, a line of 20 words would be one word in seven of them.
    books = tmp_path / "books"
    books.mkdir()
    for language in PARAGRAPHS:
        (books / f"{language}.txt").write_text(document(language, 0, 3000), encoding="utf-8")
    out = tmp_path / "out"
    assert alma_prep(out, f"books:{books}", more=["--passage-words", "50", "--duplicates", "exact"]) == 0
    words: dict[str, list[int]] = {}
    for split in ("valid", "mega_batch_1", "mega_batch_2", "mega_batch_3", "test"):
        for row in pyarrow.parquet.read_table(out / "documents" / f"{split}.parquet").to_pylist():
            words.setdefault(row["id"], []).append(row["words"])
    assert words.keys() == {f"{language}.txt" for language in PARAGRAPHS}
    for name, passages in words.items():
        assert max(passages) <= 50, name
        assert 2200 <= sum(passages) <= 3300, name
        assert np.mean(passages) >= 35, name

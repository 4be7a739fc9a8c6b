"""The study of shares of replay, results/frontier/replay.py."""

import json

import pytest

from tests.studies import study_module


@pytest.fixture(scope="module")
def study():
    return study_module("frontier/replay.py")


@pytest.fixture
def data(tmp_path):
    """A folder with the four kinds of text. Each word names its kind."""
    for folder in ("books", "dated", "wikitext-2"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    line = "{kind}{number} " * 20
    lines = {kind: [line.format(kind=kind, number=n) for n in range(1500)] for kind in ("book", "sotu", "peps", "wiki")}
    (tmp_path / "data/books/one.txt").write_text("\n".join(lines["book"]))
    for name in ("sotu", "peps"):
        texts = ("\n".join(lines[name][n : n + 50]) for n in range(0, 1500, 50))
        (tmp_path / f"data/dated/{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "data/wikitext-2/valid.txt").write_text("\n".join(lines["wiki"][:700]))
    (tmp_path / "data/wikitext-2/test.txt").write_text("\n".join(lines["wiki"][700:]))
    return tmp_path / "data"


def written(study, data, tmp_path, own):
    study.write_documents(tmp_path / "documents.jsonl", data, tmp_path / "links", own, 10_000)
    return [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("own", [1 / 4, 5 / 8, 1.0])
def test_the_part_of_each_kind_is_as_asked_for(study, data, tmp_path, own):
    words = {f"{year}-06-01": dict.fromkeys(("book", "sotu", "peps", "wiki"), 0) for year in range(2001, 2005)}
    for document in written(study, data, tmp_path, own):
        words[document["date"]][document["text"][:4]] += len(document["text"].split())
    for t, of_kind in enumerate(words.values()):
        total = 10_000 + study.HELD_OUT_WORDS
        for place, count in enumerate(of_kind.values()):
            wanted = total * (own if place == t else (1 - own) / 3)
            assert wanted <= count < wanted + study.WORDS_OF_DOCUMENT or wanted == count == 0


def test_streams_of_all_drifts_have_about_the_same_documents(study, data, tmp_path):
    found = [{document["text"] for document in written(study, data, tmp_path, own)} for own in (1 / 4, 5 / 8, 1.0)]
    for texts in found[1:]:
        assert len(texts & found[0]) >= 0.95 * len(found[0])


def test_too_little_text_is_refused(study, data, tmp_path):
    (data / "wikitext-2/test.txt").write_text("")
    with pytest.raises(SystemExit, match=r"wikitext-2 has too few words: found 14,000"):
        written(study, data, tmp_path, 1.0)

"""An extension is compared with the mega-batches before, and unusual text is a warning."""

import json
import os
import random
from pathlib import Path

import pytest

from data_prep.cli import main

ROOT = Path(os.environ.get("ALMA_DATA", "data"))


def scrambled(text: str) -> str:
    words = text.split()
    random.Random(len(words)).shuffle(words)
    return " ".join(words)


def other_letters(text: str) -> str:
    return " ".join("".join(random.Random(word).sample(word, len(word))) for word in text.split())


def extend(out, path, texts, *more) -> int:
    if not path.exists():  # a file that is written again is another file
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return main([str(out), "--source", f"text:{path}", "--workers", "1", "--duplicates", "exact", *more])


def months(num_months: int, seed: int = 0) -> list[list[str]]:
    """Texts in which each word is followed by one of four words, for each month."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 9))) for _ in range(400)]
    follows = {word: rng.sample(words, 4) for word in words}

    def text() -> str:
        found = [rng.choice(words)]
        while len(found) < 200:
            found.append(rng.choice(follows[found[-1]]))
        return " ".join(found)

    return [[text() for _ in range(60)] for _ in range(num_months)]


def test_scrambled_text_is_a_warning_and_ordinary_text_is_not(tmp_path, capsys):
    out, [first, second, third, fourth] = tmp_path / "out", months(4)
    assert extend(out, tmp_path / "0.jsonl", first, "--vocab-size", "700", "--mega-batches", "1") == 0
    for number, month in enumerate((second, third), start=1):
        assert extend(out, tmp_path / f"{number}.jsonl", month, "--extend") == 0
    assert "warning" not in capsys.readouterr().err
    for name, texts, expected in (
        ("order", [scrambled(text) for text in fourth], "new pairs of neighbouring tokens (before: "),
        ("letters", [other_letters(text) for text in fourth], "tokens per word (before: "),
        ("copies", [*fourth[:10], *third, *second], "of the words were removed as copies or by the cleaning"),
        ("short", fourth[:8], " words (before: "),
    ):  # fmt: skip
        for _ in range(2 if name == "order" else 1):  # also if the command is given again
            assert extend(out, tmp_path / f"{name}.jsonl", texts, "--extend") == 0
            message = capsys.readouterr().err
            assert expected in message and f"`alma-prep --drop-last {out}` takes it back" in message, name
        assert main(["--drop-last", str(out)]) == 0
        capsys.readouterr()
    assert extend(out, tmp_path / "good.jsonl", fourth, "--extend") == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "dated/peps.jsonl").is_file(), reason="needs Python's proposals in ALMA_DATA")
def test_twelve_months_of_proposals_are_ordinary_and_scrambled_ones_are_not(tmp_path, capsys):
    pytest.importorskip("datatrove", reason="needs the extra `corpora`")
    rows = [json.loads(line) for line in (ROOT / "dated/peps.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [row["text"] for row in sorted(rows, key=lambda row: row["date"])]
    total, done, parts = sum(map(len, texts)), 0, [[] for _ in range(13)]
    for text in texts:
        parts[13 * done // total].append(text)
        done += len(text)
    out, found = tmp_path / "out", []
    for number, part in enumerate(parts):
        more = ["--extend"] if number else ["--vocab-size", "8000", "--mega-batches", "1"]
        assert extend(out, tmp_path / f"{number}.jsonl", part, *more) == 0
        assert "warning: the new text" not in capsys.readouterr().err, number
        if number in (6, 9, 12):
            for change in (scrambled, other_letters):
                assert main(["--drop-last", str(out)]) == 0
                capsys.readouterr()
                assert extend(out, tmp_path / f"{change.__name__}.jsonl", map(change, part), "--extend") == 0
                found.append("new pairs of neighbouring tokens (before: " in capsys.readouterr().err)
            assert main(["--drop-last", str(out)]) == 0
            assert extend(out, tmp_path / f"{number}.jsonl", part, *more) == 0
            capsys.readouterr()
    assert found == [True] * 6

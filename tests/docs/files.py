"""Small files that the commands of the pages read. A page names the functions in `<!-- test files: NAME -->`."""

import json
import os
import random
from pathlib import Path

import numpy as np

from tests.data_prep.files import write_dump, write_warc
from tests.streams import make_stream

WORDS = """
the of and to that with have be whale sea ship sailor captain island harbour storm wind water night morning old small
great white long never always under over between before after came went saw said
"""


def english(num_words: int, seed: int) -> str:
    """Return English words in a seeded order: English to every filter, and near to no other text."""
    generator, words = random.Random(seed), WORDS.split()
    text = [generator.choice(words) for _ in range(num_words)]
    return ".\n".join(" ".join(text[start : start + 12]) for start in range(0, num_words, 12))


def own_texts(folder: Path) -> None:
    """Write my_texts/*.jsonl, three files of 40 documents."""
    (folder / "my_texts").mkdir()
    for number in range(3):
        lines = [json.dumps({"id": seed, "text": english(120, 100 * number + seed)}) for seed in range(40)]
        (folder / f"my_texts/part_{number}.jsonl").write_text("\n".join(lines) + "\n")


def letters(folder: Path) -> None:
    """Write letters/*.jsonl, 120 letters with names."""
    (folder / "letters").mkdir()
    lines = [json.dumps({"id": f"letter-{seed}", "text": english(120, seed)}) for seed in range(120)]
    (folder / "letters/all.jsonl").write_text("\n".join(lines) + "\n")


def corpora(folder: Path) -> None:
    """Write a crawl, a later one, a dump of Wikipedia, a folder of books, and a benchmark."""
    for name in ("crawl", "wiki", "books", "crawl-2024-18"):
        (folder / name).mkdir()
    write_warc(folder / "crawl/a.warc.wet.gz", [english(200, seed) for seed in range(150)], kind="conversion")
    later = [english(200, 900 + seed).replace("ship", "smartphone") for seed in range(20)]  # words of a later time
    write_warc(folder / "crawl-2024-18/b.warc.wet.gz", later, kind="conversion")
    write_dump(folder / "wiki/d.xml.bz2", [(f"Page {seed}", 0, None, english(200, 300 + seed)) for seed in range(50)])
    (folder / "quiz.jsonl").write_text(json.dumps({"text": english(200, 3)[100:400]}) + "\n")
    for seed in range(10):
        (folder / "books" / f"{seed}.txt").write_text(english(2000, 600 + seed))
    (folder / "news").mkdir()
    pages = [
        {
            "url": f"https://news.example/{seed}",
            "date": f"2024-0{1 + seed % 3}-{1 + seed % 28:02d}",
            "text": english(200, 1200 + seed),
        }
        for seed in range(60)
    ]
    (folder / "news" / "a.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))


def stream(folder: Path) -> None:
    """Write streams/docs, a stream of three mega-batches with something to learn in it."""
    (folder / "streams").mkdir(exist_ok=True)
    make_stream(folder / "streams/docs")


def own_images(folder: Path) -> None:
    """Write my_images/{train,test}/CLASS/*.png: 2 classes, 8 x 8 pixels, one of them brighter."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 20)):
        for number, name in enumerate(("cat", "dog")):
            (folder / "my_images" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(60 * number, 160 + 60 * number, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "my_images" / split / name / f"{index}.png")


def own_years(folder: Path) -> None:
    """Write my_years/train/YEAR/CLASS/*.png and my_years/test/CLASS/*.png: 2 years, 2 classes, 8 x 8 pixels."""
    from PIL import Image

    generator = np.random.default_rng(1)
    for part, count in (("train/2019", 30), ("train/2020", 30), ("test", 20)):
        for number, name in enumerate(("cat", "dog")):
            (folder / "my_years" / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(60 * number, 160 + 60 * number, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "my_years" / part / name / f"{index}.png")


def months_of_text(folder: Path) -> None:
    """Write texts/MONTH.jsonl for each month of 2025, texts/2025-07-broken.jsonl, and check.txt.

    The text is the beginning of Python's proposals, in their order, if ALMA_DATA has them.
    """
    path = Path(os.environ.get("ALMA_DATA", "data")) / "dated/peps.jsonl"
    texts = [english(150, seed) for seed in range(12 * 40)]
    if path.is_file():
        rows = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda row: row["date"])
        texts = [row["text"][:2000] for row in rows if len(row["text"]) >= 2000][: len(texts)]
    (folder / "texts").mkdir()
    (folder / "check.txt").write_text("\n".join(texts[20:24]))
    for month in range(1, 13):
        part = texts[(month - 1) * len(texts) // 12 : month * len(texts) // 12]
        dates = [f"2025-{month:02d}-{1 + number % 28:02d}" for number in range(len(part))]
        rows = [
            {"id": f"{month}-{number}", "date": date, "text": text}
            for number, (date, text) in enumerate(zip(dates, part, strict=True))
        ]
        (folder / f"texts/2025-{month:02d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if month == 7:
            for row in rows:
                row["text"] = " ".join("".join(random.Random(w).sample(w, len(w))) for w in row["text"].split())
            (folder / "texts/2025-07-broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def weeks_of_images(folder: Path) -> None:
    """Write photos/train/WEEK/CLASS/*.png for three weeks, photos/test/CLASS/*.png, and incoming/2026-W04."""
    from PIL import Image

    generator = np.random.default_rng(2)
    weeks = [f"photos/train/2026-W0{week}" for week in (1, 2, 3)]
    for part, count in (*((week, 30) for week in weeks), ("photos/test", 20), ("incoming/2026-W04", 30)):
        for number, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(60 * number, 160 + 60 * number, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{index}.png")

"""Whole runs over mutated files of every kind with random options: equal bytes however they are made, or no stream."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests.data_prep.encoding.test_documents import prose, write_lines
from tests.data_prep.files import write_dump, write_warc
from tests.data_prep.sources.test_fuzz import KINDS_OF_FILES, mutated, seeds_of

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")
pytest.importorskip("datatrove", reason="needs the extra `corpora`")

FILTER = """
def is_wanted(document):
    if document.text.count("ando") > 20:
        return False, "too much ando"
    return document.text.replace("eri", "ERI") if "usk" in document.text else True
"""
MINUTES = 5
SNAPSHOTS = ("by-date", "as-given")
"""The values of --partition with which each snapshot is a mega-batch."""


def story(rng: random.Random) -> str:
    """Return paragraphs of random sentences that pass all rules."""
    lines = []
    for _ in range(rng.randrange(8, 20)):
        words = prose(10, rng.randrange(10**9)).split()
        words.insert(rng.randrange(1, 9), rng.choice(["of", "to", "and", "that", "have", "with"]))
        lines.append(f"The {' '.join(words)}.")
    return "\n\n".join(lines)


def write_whole(folder, kind: str, rng: random.Random, num_texts: int) -> None:
    """Write a file of this kind that is not damaged, so that the source is not empty."""
    texts = [story(rng) for _ in range(num_texts)]
    if kind == "common-crawl":
        write_warc(folder / "whole.warc.wet.gz", texts, kind="conversion")
    elif kind == "wikipedia":
        write_dump(folder / "whole.xml.bz2", [(f"Title {n}", 0, None, text) for n, text in enumerate(texts)])
    elif kind == "books":
        (folder / "1999.txt").write_text("\n\n".join(texts))
    else:
        write_lines(folder / "1999.jsonl", [{"text": text} for text in texts])


def write_sources(
    folder, rng: random.Random, first_year: int = 1900, snapshots: Sequence[str] = ("",), num_texts: int = 5
) -> list[str]:
    """Write mutated files of two or three kinds, and whole text that is enough for a stream. Return the sources.

    Args:
        folder: where to write them.
        rng: decides what is written.
        first_year: the date of the first line of the whole text.
        snapshots: names of the subfolders of each source among which its files are divided.
        num_texts: number of texts in each source that are not damaged.
    """
    folder.mkdir(exist_ok=True)
    seeds, sources = seeds_of(folder / "seeds"), []
    for kind in rng.sample(KINDS_OF_FILES, rng.choice([2, 3])):
        for snapshot in snapshots:
            (folder / kind / snapshot).mkdir(parents=True)
            write_whole(folder / kind / snapshot, kind, rng, num_texts)
        for number in range(rng.randrange(1, 8)):
            name, content = rng.choice(seeds[kind])
            content = mutated(content, rng) if rng.random() < 0.7 else content
            (folder / kind / rng.choice(snapshots) / f"{number}{name}").write_bytes(content)
        sources.append(f"{kind}:{rng.choice(['', 'file://'])}{folder}/{kind}")
    rows = []
    for number in range(150):
        text = story(rng)
        if number % 10 == 9:  # a near copy, and a paragraph in common
            text = f"{rows[-1]['text']}\n\nThe same nine words are at the end here."
        url = f"http://{rng.choice('abc')}.example.org/{number}"
        rows.append(
            {"text": text, "url": url, "date": str(first_year + number // 2)} | ({"date": ""} if not number else {})
        )
    for number, snapshot in enumerate(snapshots):
        write_lines(folder / "whole" / snapshot / "lines.jsonl", rows[number :: len(snapshots)])
    # A benchmark: some of its lines are also in the text, and some may be damaged.
    lines = "".join(json.dumps({"text": row["text"]}) + "\n" for row in rows[::15])
    (folder / "quiz.jsonl").write_bytes(mutated(lines.encode(), rng) + lines.encode())
    (folder / "my_filters.py").write_text(FILTER)
    return [*sources, f"text:{folder}/whole"]


def random_options(folder, rng: random.Random) -> list[str]:
    """Return options that can be combined."""
    partition = rng.choice(["equal", "chronological", "by-date", "as-given"])
    duplicates = rng.choice(["near", "near", "exact", "keep"])
    options = ["--max-bad", "1", "--duplicates", duplicates]
    sometimes = [
        ["--filter", "my_filters:is_wanted"],
        ["--gopher", rng.choice(["all", "off"])],
        ["--language", "en"],
        ["--decontaminate", rng.choice(["8", "13"]), "--decontaminate-against", f"{folder}/quiz.jsonl"],
    ]
    options += [word for words in sometimes if rng.random() < 0.4 for word in words]
    if partition in SNAPSHOTS:
        options += ["--partition", partition]
    elif partition != "equal":
        options += ["--partition", "chronological", "--undated", "drop", "--test-words", "900"]
    return options


def command(out, sources, options, workers) -> list[str]:
    argv = [sys.executable, "-m", "data_prep", str(out), "--vocab-size", "300", "--workers", str(workers), *options]
    argv += [] if set(SNAPSHOTS) & set(options) else ["--mega-batches", "2"]
    return argv + [word for source in sources for word in ("--source", source)]


def check(folder, rng: random.Random, folder_bytes, num_ways: int) -> bool:
    """Make a stream in several ways, and compare. Return True if there is one."""
    options = random_options(folder, rng)
    is_dated = "by-date" in options
    num_texts = 30 if "as-given" in options else 5  # each source is a mega-batch
    sources = write_sources(folder, rng, 1900, ("2011-01", "2011-02") if is_dated else ("",), num_texts)
    if rng.random() < 0.3:
        sources[-1] += f"@{rng.uniform(0.85, 0.95):.2f}"
    print(" ".join(command("OUT", sources, options, 1)))

    def run(name, sources, options, workers=1):
        argv = command(folder / name, sources, options, workers)
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert (folder / name / "stream.json").exists() == (done.returncode == 0), done.stderr
        return done

    first = run("first", sources, options)
    shuffled = rng.sample(sources, len(sources)) if "as-given" not in options else sources
    cached = [*options, "--cache", str(folder / "cache")]
    ways = {"shuffled": (shuffled, options, 2), "filled": (sources, cached, 1), "cached": (shuffled, cached, 1)}
    ways = {name: ways[name] for name in rng.sample(list(ways), num_ways)}
    for name, way in ways.items():
        done = run(name, *way)
        assert done.returncode == first.returncode, f"{name}: {done.stderr}\n{first.stderr}"
    if num_ways > 1 and rng.random() < 0.5:
        ways["killed"] = (sources, options, 1)
        process = subprocess.Popen(
            command(folder / "killed", sources, options, 2), cwd=folder, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.5, 4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert run("killed", sources, options).returncode == first.returncode
    if first.returncode:
        print(first.stderr)
        return False
    for name in ways:
        assert folder_bytes(folder / name) == folder_bytes(folder / "first"), name
    if num_ways > 1:
        snapshots = ("2012-01",) if is_dated else ("",)
        more, last = write_sources(folder / "more", rng, 2030, snapshots, num_texts), list(ways)[-1]
        arrived = json.loads((folder / "first" / "stream.json").read_text())["num_mega_batches"]
        undated = ["--undated", "drop"] if "--undated" in options else []
        codes = []
        for name, workers, sources in (("first", 1, more), (last, 2, more[::-1])):
            argv = [sys.executable, "-m", "data_prep", "--extend", str(folder / name), "--workers", str(workers)]
            argv += ["--max-bad", "1", *undated, *(word for source in sources for word in ("--source", source))]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
            codes.append(done.returncode)
            is_complete = json.loads((folder / name / "stream.json").read_text())["num_mega_batches"] == arrived + 1
            assert is_complete == (done.returncode == 0)
        print(f"extended: {codes} {done.stderr[-500:] if codes[0] else ''}")
        assert codes[0] == codes[1]
        shards = [
            {
                path: content
                for path, content in folder_bytes(folder / name).items()
                if not path.startswith(".alma-prep")
            }
            for name in ("first", last)
        ]
        assert shards[0] == shards[1]
    return True


def test_a_stream_with_random_options_does_not_depend_on_how_it_is_made(tmp_path, folder_bytes):
    assert check(tmp_path, random.Random(3), folder_bytes, num_ways=1)


@pytest.mark.slow
def test_streams_with_random_options_for_minutes(tmp_path, folder_bytes):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    until, made, count = time.monotonic() + 60 * MINUTES, 0, 0
    while time.monotonic() < until:
        folder = tmp_path / str(count)
        folder.mkdir()
        made += check(folder, random.Random(seed + count), folder_bytes, num_ways=2)
        count += 1
    print(f"{made} streams in {count} attempts")
    assert made > count / 3

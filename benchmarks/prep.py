"""Speed and memory of `alma-prep`, in one run.

.venv/bin/python benchmarks/prep.py --data-root DATA --write          about half an hour on 2 cores
.venv/bin/python benchmarks/prep.py --data-root DATA --sizes 100      without the gigabyte

DATA holds books/ and warc/. Text of any size is made of the books' sentences, 30 at random to a document, so that
documents survive deduplication. warcio and Trafilatura run in an environment of their own, made below runs/. What is
compared takes turns; times are CPU times of whole process trees, unless said otherwise.
A benchmark judges nothing: the exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from _common import ROOT, cpu_seconds_of, provenance, ratio_columns, table, tree_cpu_seconds, verdict

SENTENCES_A_DOCUMENT = 30
VOCABULARY = 50_000
MEGA_BATCHES = 4
STEPS = ("read sources", "find duplicates", "cut long documents", "train byte-bpe", "encode", "end")
SMALL_MB = 50


def sentences(books: Path) -> list[str]:
    """Of all books but the second Moby-Dick."""
    found = []
    for path in sorted(books.iterdir()):
        if path.suffix in (".txt", ".md") and not path.name.startswith("gitenberg"):
            text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
            found += [one for one in re.split(r"(?<=[.!?]) (?=[A-Z“\"])", text) if 5 <= len(one.split()) <= 60]
    return found


def write_text(pool: list[str], num_bytes: int, path: Path, seed: int) -> int:
    """One document a line; how many."""
    rng, written, count = random.Random(seed), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            line = " ".join(rng.choices(pool, k=SENTENCES_A_DOCUMENT)) + "\n"
            written += len(line.encode("utf-8"))
            count += 1
            file.write(line)
    return count


# The whole command


class Watched:
    """A run of alma-prep: CPU seconds, wall seconds and the peak of memory of every step."""

    def __init__(self, command: list[str]):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        """MiB of the largest process, without files that are mapped."""
        self._now, over, lines = 0.0, threading.Event(), []
        watcher = threading.Thread(target=self._watch, args=(process.pid, over), daemon=True)
        watcher.start()
        before, began = 0.0, time.monotonic()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            step = next((step for step in STEPS if line.startswith(f"{step}: ")), None)
            if step:
                now = tree_cpu_seconds(process.pid)
                self.cpu[step], before = now - before, now
                self.wall[step], began = time.monotonic() - began, time.monotonic()
                self.peak[step], self._now = self._now, 0.0
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        over.set()
        watcher.join()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}\nended with status {process.returncode}:\n{''.join(lines[-30:])}")
        self.cpu["end"] = max(0.0, usage.ru_utime + usage.ru_stime - before)
        self.wall["end"], self.peak["end"] = time.monotonic() - began, self._now

    def _watch(self, pid: int, over: threading.Event) -> None:
        while not over.wait(0.1):
            for member in _tree(pid):
                self._now = max(self._now, _anonymous_mib(member))


def _tree(pid: int) -> set[int]:
    tree, found = set(), {pid}
    while found:
        tree |= found
        children: set[int] = set()
        for member in found:
            for path in Path(f"/proc/{member}/task").glob("*/children"):
                try:
                    children.update(map(int, path.read_text().split()))
                except OSError:
                    continue
        found = children - tree
    return tree


def _anonymous_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def alma_prep(out: Path, source: str, *more: object) -> list[str]:
    command = [sys.executable, "-m", "data_prep", out, "--source", source, "--mega-batches", MEGA_BATCHES]
    return list(map(str, [*command, "--vocab-size", VOCABULARY, *more]))


# Encoding: 50 MB


def measure_encoding(pool: list[str], scratch: Path, repeats: int) -> list[str]:
    import lm_quick

    path = scratch / "small.txt"
    num_documents = write_text(pool, SMALL_MB * 10**6, path, seed=1)
    ours, rivals, bare, encoding, near = [], [], [], [], []
    for number in range(repeats):
        stream = scratch / f"small_{number}"
        run = Watched(alma_prep(stream, f"text:{path}", "--workers", 1, "--duplicates", "keep"))
        ours.append(sum(run.cpu.values()) - run.cpu["train byte-bpe"])
        encoding.append(run.cpu["encode"])
        texts = scratch / f"texts_{number}"
        lm_quick.write_texts(stream, texts)
        rival = lm_quick.seconds_of_rival(stream, texts, scratch / f"rival_{number}")
        rivals.append(sum(rival.values()))
        lm_quick.check_same_bytes(stream, scratch / f"rival_{number}")
        bare.append(seconds_of_bare_tokenizer(stream / "tokenizer.json", texts))
        if number == 0:
            run = Watched(alma_prep(scratch / "near", f"text:{path}", "--workers", 1))
            near = [sum(run.cpu.values()) - run.cpu["train byte-bpe"], run.cpu["read sources"]]
    minima, median, spread = ratio_columns(ours, rivals)
    to_bare, to_bare_median, to_bare_spread = ratio_columns(bare, encoding)
    rows = [
        ["text to .bin/.idx", f"{statistics.median(ours):.1f}", "tokenizer to text + `fairseq-preprocess`",
         f"{statistics.median(rivals):.1f}", f"{minima:.2f} ({median:.2f}, spread {spread:.2f})",
         f"at most 0.45: {verdict(median, 0.45, at_most=True)}"],
        ["its step encode", f"{statistics.median(encoding):.1f}", "`encode_batch_fast` alone, ids thrown away",
         f"{statistics.median(bare):.1f}", f"{to_bare:.2f} ({to_bare_median:.2f}, spread {to_bare_spread:.2f}) as fast",
         f"at least 0.9: {verdict(to_bare_median, 0.9, at_most=False)}"],
    ]  # fmt: skip
    return [
        f"## {SMALL_MB} MB of text to fairseq's files",
        "",
        f"{num_documents:,} documents, {VOCABULARY:,} symbols, one worker, {repeats} rounds in turn; CPU seconds, "
        "median. Ratios: of the minima, in brackets the median of rounds. Training the tokenizer costs both the same "
        "and is left out. Both ways make the same bytes (checked in each round). Near-duplicates are not looked for "
        f"here: that adds {near[0] - statistics.median(ours):.0f} CPU seconds (all in all {near[0]:.1f}, of which "
        f"reading and signing {near[1]:.1f}). Encoding looks words up that it has encoded before, which is how it "
        "outruns the bare tokenizer.",
        "",
        *table(["alma-prep", "CPU s", "rival", "CPU s", "ratio", "target"], rows),
        "",
    ]


def seconds_of_bare_tokenizer(tokenizer: Path, texts: Path) -> float:
    """CPU seconds of `encode_batch_fast` on the same passages, one thread, without reading or writing."""
    script = (
        "import sys, time, pathlib\nfrom tokenizers import Tokenizer\n"
        "tokenizer, spent = Tokenizer.from_file(sys.argv[1]), 0.0\n"
        "for path in sorted(pathlib.Path(sys.argv[2]).iterdir()):\n"
        "    texts = path.read_bytes().decode().split(chr(0))\n"
        "    for start in range(0, len(texts), 1000):\n"
        "        began = time.process_time()\n"
        "        tokenizer.encode_batch_fast(texts[start:start + 1000], add_special_tokens=False)\n"
        "        spent += time.process_time() - began\n"
        "print(spent)"
    )
    one_thread = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return float(cpu_seconds_of([sys.executable, "-c", script, str(tokenizer), str(texts)], one_thread)[1])


# Web archives


def peers_environment(folder: Path) -> Path:
    """The interpreter of an environment with warcio and Trafilatura, made where missing."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        names = ["warcio==1.8.1", "trafilatura==2.0.0", "lxml_html_clean"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *names], check=True)
        (folder / "ready").touch()
    return python


RIVAL = """
import sys, time
from warcio.archiveiterator import ArchiveIterator
import trafilatura
trafilatura.extract("<html><body><p>warm up</p></body></html>")
began, pages, words = time.process_time(), 0, 0
with open(sys.argv[1], "rb") as file:
    for record in ArchiveIterator(file):
        if record.rec_type != "response" or record.http_headers is None:
            continue
        if record.http_headers.get_statuscode() != "200":
            continue
        if "html" not in (record.http_headers.get_header("Content-Type") or ""):
            continue
        text = trafilatura.extract(record.content_stream().read())
        if text:
            pages, words = pages + 1, words + len(text.split())
print(time.process_time() - began, pages, words)
"""
OURS = """
import os, sys
from benchmarks._common import tree_cpu_seconds
from data_prep.sources import Part, read_documents
from data_prep.sources.common_crawl import _MANY_TAGS, page_text
for times in (1, _MANY_TAGS):  # here, and in the child that parses pages of many tags
    page_text(b"<html><body>" + times * b"<p>warm up</p>" + b"</body></html>", "text/html", None)
began = tree_cpu_seconds(os.getpid())
texts = [text for text in read_documents(Part("common-crawl", sys.argv[1], "a", 0, 1)) if isinstance(text, str)]
words = sum(len(text.split()) for text in texts)
print(tree_cpu_seconds(os.getpid()) - began, len(texts), words)
"""


def measure_archives(warc: Path, scratch: Path, repeats: int) -> list[str]:
    python = peers_environment(ROOT / "runs" / "benchmarks" / "prep_peers")
    archive = scratch / "many.warc.gz"
    archive.write_bytes((warc / "aut-example.warc.gz").read_bytes() * 4)
    size = archive.stat().st_size / 1e6
    times: dict[str, list[float]] = {"ours": [], "rival": []}
    found: dict[str, str] = {}
    for _ in range(repeats):
        for name, command in (("ours", [sys.executable, "-c", OURS]), ("rival", [str(python), "-c", RIVAL])):
            seconds, *counts = cpu_seconds_of([*command, str(archive)], {"PYTHONPATH": str(ROOT)})[1].split()
            times[name].append(float(seconds))
            found[name] = f"{int(counts[0]):,} pages, {int(counts[1]):,} words"
    minima, median, spread = ratio_columns(times["rival"], times["ours"])
    seconds = [statistics.median(times[name]) for name in ("ours", "rival")]
    rows = [[f"{seconds[0]:.2f} ({found['ours']})", f"{seconds[1]:.2f} ({found['rival']})",
             f"{minima:.1f} ({median:.1f}, spread {spread:.1f})",
             f"at least 4: {verdict(median, 4, at_most=False)}"]]  # fmt: skip
    return [
        "## Web archives to text",
        "",
        f"A WARC of {size:.1f} MB gzipped (warc/aut-example.warc.gz four times over), one thread, {repeats} rounds in "
        "turn; CPU seconds of reading, unpacking and extracting, imports left out. Extractors disagree about what of a "
        "page is text; the quality is not compared.",
        "",
        *table(["FastWARC + Resiliparse (alma-prep)", "warcio + Trafilatura", "times as fast", "target"], rows),
        "",
    ]


# What a source and its cleaning cost


def measure_rates(data: Path, repeats: int) -> list[str]:
    """One thread, in this process: words of running text a second."""
    sys.path.insert(0, str(ROOT))
    from data_prep.cleaning import Cleaner, Cleaning
    from data_prep.duplicates import Signer
    from data_prep.sources import Part, read_documents

    text = (data / "books" / "leo_tolstoy_war_and_peace.md").read_text(encoding="utf-8")
    pages = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    words = len(text.split())
    dump = next(path for path in (data / "wikipedia").iterdir() if path.name.startswith("enwiki-latest"))
    archive = data / "warc" / "aut-example.warc.gz"

    def read(kind: str, path: Path) -> int:
        documents = read_documents(Part(kind, str(path), path.name, 0, path.stat().st_size))
        return sum(len(document.split()) for document in documents if isinstance(document, str))

    language, gopher, signer = Cleaner(Cleaning("en")), Cleaner(Cleaning(gopher=True)), Signer()
    ways = {
        "WARC to text, words that come out": lambda: read("common-crawl", archive),
        "Wikipedia XML to text, words that come out": lambda: read("wikipedia", dump),
        "language": lambda: [language.reason(page) for page in pages] and words,
        "Gopher's rules": lambda: [gopher.reason(page) for page in pages] and words,
        "signatures for near-duplicates": lambda: [signer.signature(page) for page in pages] and words,
    }
    rows = []
    for name, way in ways.items():
        way()  # imports and models
        rates = []
        for _ in range(repeats):
            began = tree_cpu_seconds(os.getpid())  # long pages are parsed in a child
            count = way()
            rates.append(count / (tree_cpu_seconds(os.getpid()) - began))
        rows.append([name, f"{statistics.median(rates):,.0f}"])
    return [
        "## What a source and its cleaning cost",
        "",
        f"Words of text a second on one core, median of {repeats}: the largest real archive and dump of DATA, and War "
        "and Peace in pages of 4000 characters.",
        "",
        *table(["step", "words a CPU second"], rows),
        "",
    ]


# Growth with size


def measure_sizes(pool: list[str], sizes: list[int], scratch: Path) -> list[str]:
    rows, told = [], []
    runs = {}
    for size in sizes:
        path = scratch / f"{size}.txt"
        num_documents = write_text(pool, size * 10**6, path, seed=size)
        out = scratch / f"stream_{size}"
        runs[size] = run = Watched(alma_prep(out, f"text:{path}", "--workers", 2))
        stream = json.loads((out / "stream.json").read_text())
        removed = sum(row["documents"] for row in stream["cleaning"])
        words = sum(split["words"] for split in stream["splits"].values())
        told.append(
            f"{size} MB: {num_documents:,} documents, {words:,} words, {removed} removed as copies; "
            f"{sum(run.wall.values()):.0f} s of wall time"
        )
        path.unlink()
    for step in STEPS:
        cells: list[object] = [step]
        for size in sizes:
            run = runs[size]
            cells += [
                f"{run.cpu.get(step, 0):.1f}",
                f"{run.cpu.get(step, 0) / size * 100:.1f}",
                f"{run.peak.get(step, 0):.0f}",
            ]
        rows.append(cells)
    totals: list[object] = ["all"]
    for size in sizes:
        run = runs[size]
        spent = sum(run.cpu.values())
        totals += [f"{spent:.1f}", f"{spent / size * 100:.1f}", f"{max(run.peak.values()):.0f}"]
    rows.append(totals)
    header = ["step"]
    for size in sizes:
        header += [f"{size} MB, CPU s", "per 100 MB", "peak, MiB"]
    lines = [
        "## Growth with the text",
        "",
        f"The whole command, near-duplicates and training of {VOCABULARY:,} symbols included, 2 workers. Peak: of the "
        "largest process in that step, sampled ten times a second, without mapped files (RssAnon). "
        + "; ".join(told)
        + ".",
        "",
        *table(header, rows),
        "",
    ]
    if len(sizes) > 1:
        first, last = runs[sizes[0]], runs[sizes[-1]]
        growth = (sum(last.cpu.values()) / sizes[-1]) / (sum(first.cpu.values()) / sizes[0])
        flat = last.peak["encode"] / first.peak["encode"]
        most = max(peak for run in runs.values() for peak in run.peak.values())
        lines += [
            f"CPU per byte at {sizes[-1]} MB is {growth:.2f} of that at {sizes[0]} MB; the peak of encoding {flat:.2f} "
            f"(flat within 10%: {verdict(flat, 1.1, at_most=True)}); the largest peak {most:.0f} MiB (under 2048: "
            f"{verdict(most, 2048, at_most=True)}).",
            "",
        ]
    return lines


def parts(arguments: argparse.Namespace, scratch: Path) -> Iterator[list[str]]:
    data = Path(arguments.data_root)
    pool = sentences(data / "books")
    if "encoding" in arguments.parts:
        yield measure_encoding(pool, scratch, arguments.repeats)
    if "archives" in arguments.parts:
        yield measure_archives(data / "warc", scratch, arguments.repeats)
    if "rates" in arguments.parts:
        yield measure_rates(data, arguments.repeats)
    if "sizes" in arguments.parts:
        yield measure_sizes(pool, arguments.sizes, scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], metavar="MB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["encoding", "archives", "rates", "sizes"])
    parser.add_argument("--write", action="store_true", help="into prep.md")
    arguments = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    lines = ["# alma-prep", "", "Written by `prep.py --write`. Not edited.", ""]
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" if (ROOT / "runs").is_dir() else None) as folder:
        for part in parts(arguments, Path(folder)):
            print("\n".join(part), flush=True)
            lines += part
    lines += [*provenance(load_at_start), ""]
    if arguments.write:
        Path(__file__).with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()

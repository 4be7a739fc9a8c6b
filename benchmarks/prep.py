"""Measure the speed and the memory of `alma-prep`, in about half an hour on two cores.

.venv/bin/python benchmarks/prep.py --data-root DATA --write          all parts, also written to benchmarks/prep.md
.venv/bin/python benchmarks/prep.py --data-root DATA --sizes 100      without the gigabyte of text

The parts measure:
  encoding   CPU time of alma-prep, compared with tokenizing to text and fairseq-preprocess, on 50 MB of text
  archives   CPU time of reading a WARC file (web archive), compared with warcio and Trafilatura
  rates      words per second of each source and of each cleaning step, without a comparison
  cache      CPU time of a second stream that takes its text from the cache (--cache), compared with the first stream
  sizes      CPU time and memory for 100 MB and for 1000 MB of text

DATA contains books/, warc/ and wikipedia/. The benchmark makes text of any size from the books: each document consists
of 30 random sentences, so that no document is removed as a near-duplicate. warcio and Trafilatura run in a separate
environment, which is created below runs/. The alternatives take turns. Times are CPU times of a process and all its
descendants, unless stated otherwise. The exit status is 0 whether targets are met or not.
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
from _prep_sources import measure_archives, measure_rates

SENTENCES_A_DOCUMENT = 30
VOCABULARY = 50_000
MEGA_BATCHES = 4
STEPS = (
    "read sources", "find similar documents", "compare similar documents", "cut long documents", "train byte-bpe",
    "encode", "join tokens", "describe passages", "search for held-out text", "end",
)  # fmt: skip
SMALL_MB = 50
ARCHIVE = "aut-example.warc.gz"
ARCHIVE_VOCABULARY = 5_000  # the archive has too few words for VOCABULARY symbols
PARTS = ("encoding", "archives", "rates", "cache", "sizes")


def sentences(books: Path) -> list[str]:
    """Return the sentences of all books in a folder, except those of gitenberg*, a second copy of Moby-Dick."""
    found = []
    for path in sorted(books.iterdir()):
        if path.suffix in (".txt", ".md") and not path.name.startswith("gitenberg"):
            text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
            split = re.split(r"(?<=[.!?]) (?=[A-Z“\"])", text)
            found += [sentence for sentence in split if 5 <= len(sentence.split()) <= 60]
    return found


def write_text(pool: list[str], num_bytes: int, path: Path, seed: int) -> int:
    """Write documents of random sentences to a file, one document per line. Return the number of documents.

    Args:
        pool: the sentences to choose from.
        num_bytes: size at which the file is large enough.
        path: the file.
        seed: seed of the random choice.
    """
    rng, written, count = random.Random(seed), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            line = " ".join(rng.choices(pool, k=SENTENCES_A_DOCUMENT)) + "\n"
            written += len(line.encode("utf-8"))
            count += 1
            file.write(line)
    return count


# Running alma-prep and measuring its steps


class MeasuredRun:
    """Runs alma-prep and measures the CPU seconds, the wall seconds and the peak memory of every step.

    Args:
        command: the command that starts alma-prep.
    """

    def __init__(self, command: list[str]):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.cpu: dict[str, float] = {}
        """CPU seconds by step."""
        self.wall: dict[str, float] = {}
        """Wall seconds by step."""
        self.peak: dict[str, float] = {}
        """Peak memory by step: MiB of the largest process, without memory-mapped files."""
        self._peak_of_step, ended, lines = 0.0, threading.Event(), []
        watcher = threading.Thread(target=self._watch, args=(process.pid, ended), daemon=True)
        watcher.start()
        before, start = 0.0, time.monotonic()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            step = next((step for step in STEPS if line.startswith(f"{step}: ")), None)
            if step:
                now = tree_cpu_seconds(process.pid)
                self.cpu[step], before = now - before, now
                self.wall[step], start = time.monotonic() - start, time.monotonic()
                self.peak[step], self._peak_of_step = self._peak_of_step, 0.0
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        watcher.join()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}\nended with status {process.returncode}:\n{''.join(lines[-30:])}")
        self.cpu["end"] = max(0.0, usage.ru_utime + usage.ru_stime - before)
        self.wall["end"], self.peak["end"] = time.monotonic() - start, self._peak_of_step

    def _watch(self, pid: int, ended: threading.Event) -> None:
        """Update the peak memory of the current step ten times a second, until the run has ended."""
        while not ended.wait(0.1):
            for member in _tree(pid):
                self._peak_of_step = max(self._peak_of_step, _anonymous_mib(member))


def _tree(pid: int) -> set[int]:
    """Return the ids of a process and its descendants."""
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
    """Return the resident memory of a process in MiB, without memory-mapped files, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def alma_prep(out: Path, source: str, *more: object) -> list[str]:
    """Return the command that starts alma-prep. `more` contains further arguments."""
    command = [sys.executable, "-m", "data_prep", out, "--source", source, "--mega-batches", MEGA_BATCHES]
    return list(map(str, [*command, "--vocab-size", VOCABULARY, *more]))


# Part encoding: 50 MB of text


def measure_encoding(pool: list[str], scratch: Path, repeats: int) -> list[str]:
    """Measure the encoding of 50 MB of text, and return the lines of the report about it.

    Args:
        pool: sentences from which the text is made.
        scratch: folder for temporary files.
        repeats: number of rounds.
    """
    from _lm_prep import check_same_bytes, seconds_of_alternative, write_texts

    path = scratch / "small.txt"
    num_documents = write_text(pool, SMALL_MB * 10**6, path, seed=1)
    ours, alternatives, bare, encoding, near = [], [], [], [], []
    for number in range(repeats):
        stream = scratch / f"small_{number}"
        run = MeasuredRun(alma_prep(stream, f"text:{path}", "--workers", 1, "--duplicates", "keep"))
        ours.append(sum(run.cpu.values()) - run.cpu["train byte-bpe"])
        encoding.append(run.cpu["encode"])
        texts = scratch / f"texts_{number}"
        write_texts(stream, texts)
        alternative = seconds_of_alternative(stream, texts, scratch / f"alternative_{number}")
        alternatives.append(sum(alternative.values()))
        check_same_bytes(stream, scratch / f"alternative_{number}")
        bare.append(seconds_of_bare_tokenizer(stream / "tokenizer.json", texts))
        if number == 0:
            run = MeasuredRun(alma_prep(scratch / "near", f"text:{path}", "--workers", 1))
            near = [sum(run.cpu.values()) - run.cpu["train byte-bpe"], run.cpu["read sources"]]
    minima, median, spread = ratio_columns(ours, alternatives)
    to_bare, to_bare_median, to_bare_spread = ratio_columns(bare, encoding)
    rows = [
        ["text to .bin/.idx", f"{statistics.median(ours):.1f}", "tokenizer to text + `fairseq-preprocess`",
         f"{statistics.median(alternatives):.1f}", f"{minima:.2f} ({median:.2f}, spread {spread:.2f})",
         f"at most 0.45: {verdict(median, 0.45, at_most=True)}"],
        ["its step encode", f"{statistics.median(encoding):.1f}", "`encode_batch_fast` alone, ids discarded",
         f"{statistics.median(bare):.1f}", f"{to_bare:.2f} ({to_bare_median:.2f}, spread {to_bare_spread:.2f}) as fast",
         f"at least 0.9: {verdict(to_bare_median, 0.9, at_most=False)}"],
    ]  # fmt: skip
    return [
        f"## {SMALL_MB} MB of text to fairseq's files",
        "",
        f"{num_documents:,} documents, {VOCABULARY:,} symbols, one worker, {repeats} rounds in turn; median CPU "
        "seconds. The ratio is that of the minima, in brackets the median of the rounds. Training the tokenizer costs "
        "both the same and is left out. Both write the same bytes (checked in each round). The search for near "
        f"duplicates is switched off here; it adds {near[0] - statistics.median(ours):.0f} CPU seconds (in total "
        f"{near[0]:.1f}, of which reading and computing signatures {near[1]:.1f}). The encoder caches words, which is "
        "why it is faster than the bare tokenizer.",
        "",
        *table(["alma-prep", "CPU s", "alternative", "CPU s", "ratio", "target"], rows),
        "",
    ]


def seconds_of_bare_tokenizer(tokenizer: Path, texts: Path) -> float:
    """Return the CPU seconds that `encode_batch_fast` alone needs, with one thread, without reading or writing files.

    Args:
        tokenizer: the file tokenizer.json.
        texts: folder of files that contain passages, each followed by a NUL character.
    """
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


# Part cache: what a second stream from the same files costs


def measure_cache(pool: list[str], archives: Path, scratch: Path) -> list[str]:
    """Make pairs of streams from the same files with one cache, and return the lines of the report about it.

    Args:
        pool: sentences from which the plain text is made.
        archives: folder that contains the WARC file ARCHIVE.
        scratch: folder for temporary files.
    """
    text = scratch / "cached.txt"
    write_text(pool, SMALL_MB * 10**6, text, seed=2)
    rows = []
    plain, archive = f"{SMALL_MB} MB of plain text", f"{ARCHIVE} ({ARCHIVE_VOCABULARY:,} symbols)"
    for name, source in ((plain, f"text:{text}"), (archive, f"common-crawl:{archives / ARCHIVE}")):
        folder = scratch / f"cached_{len(rows)}"
        vocabulary = [] if name == plain else ["--vocab-size", ARCHIVE_VOCABULARY]
        same_tokenizer = ["--tokenizer", folder / "0" / "tokenizer.json"]
        seconds = []
        for seed, more in enumerate((vocabulary, vocabulary, same_tokenizer)):
            common = ["--workers", 1, "--seed", seed, "--cache", folder / "cache"]
            run = MeasuredRun(alma_prep(folder / str(seed), source, *common, *more))
            seconds.append(sum(run.cpu.values()))
        first, own, shared = seconds
        for kind, second in (("a tokenizer of its own", own), ("the tokenizer of the first stream", shared)):
            ratio = second / first
            verdict_of_ratio = f"{ratio:.2f}, target at most 0.25: {verdict(ratio, 0.25, at_most=True)}"
            rows.append([name, f"{first:.1f}", kind, f"{second:.1f}", verdict_of_ratio])
    return [
        "## A second stream from the cache",
        "",
        "Two streams with different seeds from the same files and one `--cache`; CPU seconds of the whole command, one "
        "worker, one round. The perplexities of two streams can only be compared if they have the same tokenizer.",
        "",
        *table(["source", "first, CPU s", "the second stream has", "second, CPU s", "ratio"], rows),
        "",
    ]


# Part sizes: how CPU time and memory grow with the amount of text


def measure_sizes(pool: list[str], sizes: list[int], scratch: Path) -> list[str]:
    """Run alma-prep on texts of growing size, and return the lines of the report about CPU time and memory.

    Args:
        pool: sentences from which the texts are made.
        sizes: sizes of the texts in MB.
        scratch: folder for temporary files.
    """
    rows, descriptions = [], []
    runs = {}
    for size in sizes:
        path = scratch / f"{size}.txt"
        num_documents = write_text(pool, size * 10**6, path, seed=size)
        out = scratch / f"stream_{size}"
        runs[size] = run = MeasuredRun(alma_prep(out, f"text:{path}", "--workers", 2))
        stream = json.loads((out / "stream.json").read_text())
        removed = sum(row["documents"] for row in stream["cleaning"])
        words = sum(split["words"] for split in stream["splits"].values())
        descriptions.append(
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
        f"The whole command, with the search for near duplicates and the training of {VOCABULARY:,} symbols, 2 "
        "workers. The peak is the memory of the largest process in that step, sampled ten times a second, without "
        "mapped files (RssAnon). " + "; ".join(descriptions) + ".",
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
            f"CPU time per byte at {sizes[-1]} MB is {growth:.2f} of that at {sizes[0]} MB; the peak of encoding is "
            f"{flat:.2f} (at most 1.1: {verdict(flat, 1.1, at_most=True)}); the largest peak is {most:.0f} MiB (under "
            f"1024: {verdict(most, 1024, at_most=True)}).",
            "",
        ]
    return lines


def measure(arguments: argparse.Namespace, scratch: Path) -> Iterator[list[str]]:
    """Measure the parts chosen on the command line, and yield the report lines of each part."""
    data = Path(arguments.data_root)
    pool = sentences(data / "books")
    if "encoding" in arguments.parts:
        yield measure_encoding(pool, scratch, arguments.repeats)
    if "archives" in arguments.parts:
        yield measure_archives(data / "warc", scratch, arguments.repeats)
    if "rates" in arguments.parts:
        yield measure_rates(data, arguments.repeats)
    if "cache" in arguments.parts:
        yield measure_cache(pool, data / "warc", scratch)
    if "sizes" in arguments.parts:
        yield measure_sizes(pool, arguments.sizes, scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder with books/, warc/ and wikipedia/")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[100, 1000],
        metavar="MB",
        help="amounts of text for the part `sizes`, in MB (default: 100 1000)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/prep.md")
    arguments = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    lines = ["# alma-prep", "", "Written by `benchmarks/prep.py --write`.", ""]
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" if (ROOT / "runs").is_dir() else None) as folder:
        for part in measure(arguments, Path(folder)):
            print("\n".join(part), flush=True)
            lines += part
    lines += [*provenance(load_at_start), ""]
    if arguments.write:
        Path(__file__).with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()

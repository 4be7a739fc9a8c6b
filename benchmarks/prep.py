"""Measure the speed and the memory of `alma-prep`.

python benchmarks/prep.py --data-root DATA --write                                    all parts, about four hours
python benchmarks/prep.py --data-root DATA --parts encoding cache --write             only these parts, in minutes
python benchmarks/prep.py --data-root DATA --parts sizes --sizes 100 10000 --write    10 GB, in 40 GB of disk

With --write, each part replaces its section of benchmarks/prep.md. The other sections stay as they are.

The parts measure:
  encoding   CPU time of alma-prep, compared with tokenizing to text and fairseq-preprocess, on 50 MB of text
  archives   CPU time of reading a WARC file (web archive), compared with warcio and Trafilatura
  rates      words per second of each source and of each cleaning step, without a comparison
  cache      CPU time of a second stream that takes its text from the cache (--cache), compared with the first stream
  sizes      CPU time, memory and disk for texts of several sizes, each with a second stream from its cache, and what a
             terabyte and 100 terabytes would cost

DATA contains books/, warc/ and wikipedia/. The benchmark makes random text of any size from the books (see
`_random_text`). warcio and Trafilatura run in a separate environment, which is created below runs/. The alternatives
take turns. Times are CPU times of a process and all its descendants, unless stated otherwise. The exit status is 0
whether targets are met or not.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import ROOT, cpu_seconds_of, provenance, ratio_columns, table, verdict, write_part
from _prep_run import VOCABULARY, MeasuredRun, alma_prep
from _prep_sizes import TARGET_OF_SECOND, measure_sizes
from _prep_sources import measure_archives, measure_rates
from _random_text import RandomText

SMALL_MB = 50
ARCHIVE = "aut-example.warc.gz"
ARCHIVE_VOCABULARY = 5_000  # the archive has too few words for VOCABULARY symbols
CLEANING = ["--language", "en", "--gopher", "all"]
"""Options of a stream whose plain text is cleaned."""
SEARCH = "search for held-out text"
"""The step that finds n-grams of held-out text in training text, which the alternative does not have."""
SCRIPT = "benchmarks/prep.py --data-root DATA"
PARTS = {
    "encoding": f"{SMALL_MB} MB of text to fairseq's files",
    "archives": "Web archives to text",
    "rates": "What a source and its cleaning cost",
    "cache": "A second stream from the cache",
    "sizes": "Growth with the text",
}
"""The headings of the parts in the report."""
INTRODUCTION = """# alma-prep

Written by `benchmarks/prep.py --write`, one part at a time."""


# Part encoding: 50 MB of text


def measure_encoding(random_text: RandomText, scratch: Path, repeats: int) -> list[str]:
    """Measure the encoding of 50 MB of text, and return the lines of the report about it.

    Args:
        random_text: makes the text.
        scratch: folder for temporary files.
        repeats: number of rounds.
    """
    from _lm_prep import check_same_bytes, seconds_of_alternative, write_texts

    path = scratch / "small.txt"
    num_documents = random_text.write(SMALL_MB * 10**6, path, seed=1)
    ours, alternatives, bare, encoding, searching, near = [], [], [], [], [], []
    for number in range(repeats):
        stream = scratch / f"small_{number}"
        run = MeasuredRun(alma_prep(stream, f"text:{path}", "--workers", 1, "--duplicates", "keep"))
        ours.append(_without_training(run))
        encoding.append(run.cpu["encode"])
        searching.append(run.cpu[SEARCH])
        texts = scratch / f"texts_{number}"
        write_texts(stream, texts)
        alternative = seconds_of_alternative(stream, texts, scratch / f"alternative_{number}")
        alternatives.append(sum(alternative.values()))
        check_same_bytes(stream, scratch / f"alternative_{number}")
        bare.append(seconds_of_bare_tokenizer(stream / "tokenizer.json", texts))
        if number == 0:
            run = MeasuredRun(alma_prep(scratch / "near", f"text:{path}", "--workers", 1))
            near = [_without_training(run), run.cpu["read sources"]]
    without_search = [one - other for one, other in zip(ours, searching, strict=True)]
    minima, median, spread = ratio_columns(without_search, alternatives)
    with_search = ratio_columns(ours, alternatives)
    to_bare, to_bare_median, to_bare_spread = ratio_columns(bare, encoding)
    rows = [
        ["text to .bin/.idx", f"{statistics.median(without_search):.1f}", "tokenizer to text + `fairseq-preprocess`",
         f"{statistics.median(alternatives):.1f}", f"{minima:.2f} ({median:.2f}, spread {spread:.2f})",
         f"at most 0.15: {verdict(median, 0.15, at_most=True)}"],
        ["the same, and the search for held-out text in training text", f"{statistics.median(ours):.1f}",
         "the same, without a search", f"{statistics.median(alternatives):.1f}",
         f"{with_search[0]:.2f} ({with_search[1]:.2f}, spread {with_search[2]:.2f})", ""],
        ["its step encode", f"{statistics.median(encoding):.1f}", "`encode_batch_fast` alone, ids discarded",
         f"{statistics.median(bare):.1f}", f"{to_bare:.2f} ({to_bare_median:.2f}, spread {to_bare_spread:.2f}) as fast",
         f"at least 1: {verdict(to_bare_median, 1, at_most=False)}"],
    ]  # fmt: skip
    return [
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


def _without_training(run: MeasuredRun) -> float:
    """Return the CPU seconds of a run without those of the training of the tokenizer."""
    return run.total_cpu - run.cpu["count words"] - run.cpu["train byte-bpe"]


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


def measure_cache(random_text: RandomText, data: Path, scratch: Path) -> list[str]:
    """Make pairs of streams from the same files with one cache, and return the lines of the report about it.

    Args:
        random_text: makes the plain text.
        data: folder that contains warc/ARCHIVE and wikipedia/.
        scratch: folder for temporary files.
    """
    text = scratch / "cached.txt"
    random_text.write(SMALL_MB * 10**6, text, seed=2)
    plain, few = f"{SMALL_MB} MB of plain text", ["--vocab-size", ARCHIVE_VOCABULARY]
    few_symbols = f"{ARCHIVE_VOCABULARY:,} symbols"
    sources: tuple[tuple[str, str, list], ...] = (
        (plain, f"text:{text}", []),
        (f"{plain}, `{' '.join(CLEANING)}`", f"text:{text}", CLEANING),
        (f"{ARCHIVE} ({few_symbols})", f"common-crawl:{data / 'warc' / ARCHIVE}", few),
        (f"a dump of Wikipedia ({few_symbols})", f"wikipedia:{data / 'wikipedia'}/enwiki-latest*.bz2", few),
    )
    rows = []
    for number, (name, source, more) in enumerate(sources):
        folder = scratch / f"cached_{number}"
        tokenizers: tuple[list[Any], ...] = ([], [], ["--tokenizer", folder / "0" / "tokenizer.json"])
        seconds = []
        for seed, tokenizer in enumerate(tokenizers):
            common = ["--workers", 1, "--seed", seed, "--cache", folder / "cache"]
            run = MeasuredRun(alma_prep(folder / str(seed), source, *common, *more, *tokenizer))
            seconds.append(run.total_cpu)
        first, own, shared = seconds
        for kind, second in (("a tokenizer of its own", own), ("the tokenizer of the first stream", shared)):
            ratio = second / first
            target = f"target at most {TARGET_OF_SECOND}: {verdict(ratio, TARGET_OF_SECOND, at_most=True)}"
            rows.append([name, f"{first:.1f}", kind, f"{second:.1f}", f"{ratio:.2f}, {target}"])
    return [
        "Two streams with different seeds from the same files and one `--cache`; CPU seconds of the whole command, one "
        "worker, one round. A run has fixed costs of about a second, which count in small sources. The perplexities of "
        "two streams can only be compared if they have the same tokenizer.",
        "",
        *table(["source", "first, CPU s", "the second stream has", "second, CPU s", "ratio"], rows),
        "",
    ]


def measure(arguments: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Measure the parts chosen on the command line. Yield the name and the report lines of each part."""
    data = Path(arguments.data_root)
    random_text = RandomText(data / "books")
    measured = {
        "encoding": lambda: measure_encoding(random_text, scratch, arguments.repeats),
        "archives": lambda: measure_archives(data / "warc", scratch, arguments.repeats),
        "rates": lambda: measure_rates(data, arguments.repeats),
        "cache": lambda: measure_cache(random_text, data, scratch),
        "sizes": lambda: measure_sizes(random_text, arguments.sizes, scratch),
    }
    for part in PARTS:
        if part in arguments.parts:
            yield part, measured[part]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder with books/, warc/ and wikipedia/")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[100, 10_000],
        metavar="MB",
        help="amounts of text for the part `sizes`, in MB (default: 100 10000)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    parser.add_argument("--write", action="store_true", help="write these parts into benchmarks/prep.md")
    arguments = parser.parse_args()
    commands = {heading: f"{SCRIPT} --parts {part}" for part, heading in PARTS.items()}
    load_at_start = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=ROOT / "runs" if (ROOT / "runs").is_dir() else None) as folder:
        for part, lines in measure(arguments, Path(folder)):
            report = ["\n".join(lines).strip(), "", *provenance(load_at_start)]
            print("\n".join([f"## {PARTS[part]}", "", *report, ""]), flush=True)
            if arguments.write:
                write_part(INTRODUCTION, commands, PARTS[part], report)


if __name__ == "__main__":
    main()

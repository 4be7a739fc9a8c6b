"""Two parts of prep.py: a comparison with warcio and Trafilatura, and the rates of sources and cleaning steps."""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from _common import ROOT, cpu_seconds_of, environment_of, ratio_columns, table, tree_cpu_seconds, verdict

ALTERNATIVE = """
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
from _common import tree_cpu_seconds
from data_prep.sources import Document, Part, read_documents
from data_prep.sources.base import no_report
from data_prep.sources.bounded import parse
from data_prep.sources.web_page import Content, page_text
page = b"<html><body><p>warm up</p></body></html>"  # start the child process that parses pages, and warm it up
assert parse(page_text, Content(page, "text/html", False), no_report) == "warm up"
began = tree_cpu_seconds(os.getpid())
found = read_documents(Part("common-crawl", sys.argv[1], "a", 0, 1))
texts = [document.text for document in found if isinstance(document, Document)]
words = sum(len(text.split()) for text in texts)
print(tree_cpu_seconds(os.getpid()) - began, len(texts), words)
"""


def measure_archives(warc: Path, scratch: Path, repeats: int) -> list[str]:
    """Measure how fast a web archive is read, and return the lines of the report about it.

    Args:
        warc: folder that contains aut-example.warc.gz.
        scratch: folder for temporary files.
        repeats: number of rounds.
    """
    python = environment_of("prep_peers", ("warcio==1.8.1", "trafilatura==2.0.0", "lxml_html_clean"))
    archive = scratch / "many.warc.gz"
    archive.write_bytes((warc / "aut-example.warc.gz").read_bytes() * 4)
    size = archive.stat().st_size / 1e6
    times: dict[str, list[float]] = {"ours": [], "alternative": []}
    found: dict[str, str] = {}
    for _ in range(repeats):
        for name, command in (
            ("ours", [sys.executable, "-c", OURS]),
            ("alternative", [str(python), "-c", ALTERNATIVE]),
        ):
            seconds, *counts = cpu_seconds_of([*command, str(archive)], {"PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks"})[
                1
            ].split()
            times[name].append(float(seconds))
            found[name] = f"{int(counts[0]):,} pages, {int(counts[1]):,} words"
    minima, median, spread = ratio_columns(times["alternative"], times["ours"])
    medians = [statistics.median(times[name]) for name in ("ours", "alternative")]
    rows = [[f"{medians[0]:.2f} ({found['ours']})", f"{medians[1]:.2f} ({found['alternative']})",
             f"{minima:.1f} ({median:.1f}, spread {spread:.1f})",
             f"at least 10: {verdict(median, 10, at_most=False)}"]]  # fmt: skip
    return [
        f"A gzipped WARC of {size:.1f} MB (warc/aut-example.warc.gz, four copies), one thread, {repeats} rounds in "
        "turn; CPU seconds of reading, decompressing and extracting, without imports. The child process in which "
        "alma-prep parses pages is counted. The extractors take different parts of a page as its text; their quality "
        "is not compared.",
        "",
        *table(["FastWARC + Resiliparse (alma-prep)", "warcio + Trafilatura", "times as fast", "target"], rows),
        "",
    ]


def measure_rates(data: Path, repeats: int) -> list[str]:
    """Measure words of text per CPU second of each source and each cleaning step. Return the lines of the report.

    Everything runs in this process, with one thread.

    Args:
        data: folder that contains books/, warc/ and wikipedia/.
        repeats: number of measurements of each step.
    """
    sys.path.insert(0, str(ROOT))
    from data_prep.cleaning.cleaner import Cleaner, Cleaning
    from data_prep.reading.ngrams import unit_hashes
    from data_prep.reading.signatures import anchors, sign
    from data_prep.sources import Document, Part, read_documents

    text = (data / "books" / "leo_tolstoy_war_and_peace.md").read_text(encoding="utf-8")
    pages = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    words = len(text.split())
    dump = next(path for path in (data / "wikipedia").iterdir() if path.name.startswith("enwiki-latest"))
    archive = data / "warc" / "aut-example.warc.gz"

    def read(kind: str, path: Path) -> int:
        documents = read_documents(Part(kind, str(path), path.name, 0, path.stat().st_size))
        return sum(len(document.text.split()) for document in documents if isinstance(document, Document))

    def sign_page(page: str) -> int:
        units = unit_hashes(page)
        sign(units)
        anchors(units, 0)
        return len(units)

    language, gopher = Cleaner(Cleaning(language="en")), Cleaner(Cleaning(gopher=True))
    steps: dict[str, Callable[[], int]] = {
        "WARC to text, words that come out": lambda: read("common-crawl", archive),
        "Wikipedia XML to text, words that come out": lambda: read("wikipedia", dump),
        "language": lambda: len([language.clean(Document(page)) for page in pages]) and words,
        "Gopher's rules": lambda: len([gopher.clean(Document(page)) for page in pages]) and words,
        "signatures for near-duplicates": lambda: len([sign_page(page) for page in pages]) and words,
    }
    rows = []
    for name, step in steps.items():
        step()  # warm-up: the first call imports packages and loads models
        rates = []
        for _ in range(repeats):
            start = tree_cpu_seconds(os.getpid())  # with child processes, because one of them parses long pages
            count = step()
            rates.append(count / (tree_cpu_seconds(os.getpid()) - start))
        rows.append([name, f"{statistics.median(rates):,.0f}"])
    return [
        f"Words of text per second on one core, median of {repeats}. Data: the largest archive and dump of DATA, and "
        "War and Peace in pages of 4000 characters.",
        "",
        *table(["step", "words a CPU second"], rows),
        "",
    ]

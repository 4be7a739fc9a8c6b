"""The command `alma-prep`: corpora in, a stream folder out."""

import argparse
import os
import sys
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.prepare import prepare
from data_prep.settings import DUPLICATES, EXECUTORS, GOPHER, OPTIONS, PARTITIONS, Cluster, PrepSettings
from data_prep.sources import Source

SKIPPED_SHOWN = 10


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 with one message on stderr that says what to do."""
    options = _parser().parse_args(argv)
    try:
        settings = PrepSettings(
            out=Path(options.out),
            sources=tuple(Source.parse(text) for text in options.source),
            cluster=Cluster(options.slurm_partition, options.slurm_time, options.slurm_memory_gb),
            **{name: getattr(options, name) for name in (*OPTIONS, "workers", "executor", "extend", "stall_seconds")},
        )
    except ValueError as error:
        return _fail(str(error))
    try:
        stream = prepare(settings)
    except PrepError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or 'no file named'}")
    except KeyboardInterrupt:
        print("alma-prep: interrupted; the same command goes on where this one ended", file=sys.stderr)
        return 130
    print(summary(stream))
    return 0


def summary(stream: dict) -> str:
    """Tables of the splits and of what was removed, and what was set aside."""
    lines = [f"{'split':<16}{'documents':>12}{'passages':>12}{'words':>16}{'tokens':>16}"]
    for name, split in stream["splits"].items():
        counts = f"{split['documents']:>12,}{split['passages']:>12,}{split['words']:>16,}{split['tokens']:>16,}"
        lines.append(f"{name:<16}{counts}")
    added = stream.get("extensions", [])
    last = added[-1] if added else stream  # of what was done last
    if last.get("cleaning"):
        lines += ["", f"{'removed as':<36}{'documents':>12}{'words':>16}  source"]
        for row in last["cleaning"]:
            documents = f"{row['documents']:,}" if "documents" in row else ""
            lines.append(f"{row['step']:<36}{documents:>12}{row['words']:>16,}  {row['source']}")
        lines.append("")
    for source in last["sources"]:
        name = ":".join(filter(None, (source["kind"], source["path"])))
        lines.append(
            f"{name}: {source['documents']:,} documents, {source['words']:,} words in {source['files']:,} files, "
            f"{len({entry['name'] for entry in source['skipped']}):,} files skipped or skipped in part"
        )
        lines += [f"  skipped {entry['name']}: {entry['reason']}" for entry in source["skipped"][:SKIPPED_SHOWN]]
        if len(source["skipped"]) > SKIPPED_SHOWN:
            lines.append(f"  and {len(source['skipped']) - SKIPPED_SHOWN:,} more: all of them are in stream.json")
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"alma-prep: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alma-prep",
        description="Make a stream of mega-batches out of text: equal word counts, one tokenizer, fairseq mmap files. "
        "The same text and seed give the same bytes, whatever --workers, the executor and the order of files. A run "
        "that was killed goes on with the same command.",
    )
    parser.add_argument("out", metavar="OUT", help="the stream folder to write; a second run finds its work done")
    parser.add_argument(
        "--extend",
        action="store_true",
        help="OUT is a stream: add a mega-batch (or --mega-batches of them) with its tokenizer; nothing that is there "
        "is touched, and no copy of it is let in",
    )
    source = parser.add_argument_group("sources")
    source.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="KIND[:PATH][@SHARE]",
        help="where text comes from; may be given several times. common-crawl:PATH are WARC, WET or ARC archives "
        "(plain, gz, bz2, zst): a file, a folder, or a pattern between quotes. wikipedia:PATH are page-article dumps. "
        "books:DIR: one document per *.txt, *.md or *.epub file. text:PATH is a file or a folder of *.txt (one "
        "document per non-empty line, as fairseq reads text), *.jsonl or *.parquet. python-docs: the docstrings of "
        "this Python's standard library, one document per module. SHARE is of the words of the stream, as in "
        "common-crawl:PATH@0.6.",
    )
    source.add_argument("--text-field", default="text", metavar="NAME", help="of JSON and Parquet; default: text")
    source.add_argument(
        "--max-bad",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="of the input files may be damaged; with more the run fails when it has read them all; default: 0.01",
    )
    clean = parser.add_argument_group("cleaning")
    clean.add_argument("--language", default="", metavar="CODE", help="remove documents of other languages, as in en")
    clean.add_argument(
        "--gopher",
        choices=GOPHER,
        default="crawls",
        help="where Gopher's rules of quality and repetition are applied; default: to common-crawl sources",
    )
    clean.add_argument(
        "--duplicates",
        choices=DUPLICATES,
        default="near",
        help="what is removed across all sources: near and exact copies (default), exact ones, or none (keep)",
    )
    cut = parser.add_argument_group("mega-batches")
    cut.add_argument(
        "--mega-batches", dest="num_mega_batches", type=int, metavar="B", help="how many; one more becomes the test set"
    )
    cut.add_argument(
        "--partition",
        choices=PARTITIONS,
        default="equal",
        help="equal: as many words in each, sources in proportion (default). For streams that drift: by-date makes a "
        "mega-batch of each snapshot (CC-MAIN-2019-13, 20190325 in the path), as-given of each --source",
    )
    cut.add_argument("--seed", type=int, default=0, metavar="S", help="of the order of passages; default: 0")
    cut.add_argument(
        "--valid-words", type=int, metavar="N", help="words of the validation set; default: min(500000, 1%% of all)"
    )
    cut.add_argument("--valid-source", metavar="KIND", help="kind of source it is taken from; default: all")
    cut.add_argument(
        "--passage-words",
        type=int,
        metavar="N",
        help="documents longer than 1%% of a mega-batch are cut at paragraph ends into passages of about so many "
        "words; default: min(2000, 0.2%% of a mega-batch)",
    )
    token = parser.add_argument_group("tokenizer")
    token.add_argument(
        "--tokenizer",
        default="byte-bpe",
        metavar="NAME|PATH",
        help="byte-bpe (default) or sentencepiece, trained on mega-batches 1..B; or the path of a tokenizer.json, a "
        ".model, or GPT-2's vocab.bpe beside its encoder.json",
    )
    token.add_argument("--vocab-size", type=int, default=50_000, metavar="V", help="symbols; default: 50000")
    token.add_argument(
        "--tokenizer-words",
        type=int,
        default=200_000_000,
        metavar="N",
        help="of more training text, an even sample of so many words trains the tokenizer; default: 200 million "
        "(sentencepiece, which holds its text in memory: at most 50 million)",
    )
    run = parser.add_argument_group("where it runs")
    run.add_argument("--executor", choices=EXECUTORS, default="local", help="default: local")
    run.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: all cores. With slurm: jobs at a time",
    )
    run.add_argument(
        "--stall-seconds",
        type=float,
        default=40,
        metavar="S",
        help="without progress of a worker end the run, with the file that it was at; default: 40",
    )
    run.add_argument("--slurm-partition", metavar="NAME", help="default: the cluster's")
    run.add_argument("--slurm-time", default="04:00:00", metavar="HH:MM:SS", help="of a job; default: 04:00:00")
    run.add_argument("--slurm-memory-gb", type=int, default=4, metavar="N", help="of a job, of one core; default: 4")
    return parser

"""The command `alma-prep`: corpora in, a stream folder out."""

import argparse
import os
import sys
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from data_prep.sources import Source
from data_prep.tokenization import TOKENIZERS

SKIPPED_SHOWN = 10


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 with one message on stderr that says what to do."""
    options = _parser().parse_args(argv)
    try:
        settings = PrepSettings(
            out=Path(options.out),
            sources=tuple(Source.parse(text) for text in options.source),
            num_mega_batches=options.mega_batches,
            vocab_size=options.vocab_size,
            seed=options.seed,
            tokenizer=options.tokenizer,
            valid_words=options.valid_words,
            passage_words=options.passage_words,
            workers=options.workers,
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
        print("alma-prep: interrupted; the same command starts anew", file=sys.stderr)
        return 130
    print(summary(stream))
    return 0


def summary(stream: dict) -> str:
    """A table of the splits, and what was skipped."""
    lines = [f"{'split':<16}{'documents':>12}{'passages':>12}{'words':>16}{'tokens':>16}"]
    for name, split in stream["splits"].items():
        counts = f"{split['documents']:>12,}{split['passages']:>12,}{split['words']:>16,}{split['tokens']:>16,}"
        lines.append(f"{name:<16}{counts}")
    for source in stream["sources"]:
        name = ":".join(filter(None, (source["kind"], source["path"])))
        lines.append(
            f"{name}: {source['documents']:,} documents, {source['words']:,} words in {source['files']:,} files, "
            f"{len(source['skipped']):,} files skipped or skipped in part"
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
        "The same text and seed give the same bytes, whatever --workers and the order of files.",
    )
    parser.add_argument("out", metavar="OUT", help="the stream folder to write; a second run finds its work done")
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="KIND[:PATH]",
        help="where text comes from; may be given several times. text:PATH is a file, or a folder with *.txt in it or "
        "below: one document per non-empty line, as fairseq reads text. books:DIR: one document per *.txt or *.md "
        "file. python-docs: the docstrings of this Python's standard library, one document per module.",
    )
    parser.add_argument(
        "--mega-batches", type=int, required=True, metavar="B", help="how many; one more becomes the test set"
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="V", help="symbols of the tokenizer")
    parser.add_argument("--seed", type=int, required=True, metavar="S", help="of the order of passages")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="byte-bpe", help="default: %(default)s")
    parser.add_argument(
        "--valid-words",
        type=int,
        metavar="N",
        help="words of the validation set; default: min(500000, 1%% of all)",
    )
    parser.add_argument(
        "--passage-words",
        type=int,
        metavar="N",
        help="documents longer than 1%% of a mega-batch are cut at paragraph ends into passages of about so many "
        "words; default: min(2000, 0.2%% of a mega-batch)",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; default: all cores"
    )
    return parser

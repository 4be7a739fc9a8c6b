"""The command `alma-prep`: corpora in, a stream folder out."""

import argparse
import sys
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.options import add_options, parsed_settings
from data_prep.prepare import prepare
from data_prep.settings import Cluster, PrepSettings
from data_prep.sources import Source
from data_prep.summary import summary


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0; 2 after one message on stderr that says what to do; 130 after Ctrl-C.
    """
    parsed = _parser().parse_args(argv)
    try:
        settings = PrepSettings(
            out=Path(parsed.out),
            sources=tuple(Source.parse(text) for text in parsed.source),
            cluster=Cluster(**parsed_settings(parsed, Cluster)),
            **parsed_settings(parsed, PrepSettings),
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
        print("alma-prep: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    print(summary(stream))
    return 0


def _fail(message: str) -> int:
    print(f"alma-prep: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alma-prep",
        description="Make a stream of mega-batches out of text: equal word counts, one tokenizer, fairseq mmap files. "
        "The same text and seed give the same bytes, whatever --workers, the executor and the order of files. Run the "
        "same command again to continue a run that was killed.",
    )
    parser.add_argument("out", metavar="OUT", help="the stream folder to write; a finished stream is only checked")
    sources = parser.add_argument_group("sources")
    sources.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="KIND[:PATH][@SHARE]",
        help="where text comes from; may be given several times. common-crawl:PATH are WARC, WET or ARC archives "
        "(plain, gz, bz2, zst): a file, a folder, or a pattern between quotes. wikipedia:PATH are page-article dumps. "
        "books:DIR: one document per *.txt, *.md or *.epub file. text:PATH is a file or a folder of *.txt (one "
        "document per non-empty line, as fairseq reads text), *.jsonl or *.parquet. python-docs: the docstrings of "
        "this Python's standard library, one document per module. SHARE is the fraction of the words of the stream "
        "that the source provides, as in common-crawl:PATH@0.6.",
    )
    groups = {"options": parser, "sources": sources}
    add_options(parser, groups, PrepSettings)
    add_options(parser, groups, Cluster)
    return parser

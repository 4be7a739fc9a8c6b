"""The command `alma-prep`, which turns corpora into a stream folder."""

import argparse
import shlex
import sys
from pathlib import Path

from data_prep.encoding.grow_vocabulary import grow_vocabulary
from data_prep.errors import PrepError
from data_prep.look_ahead import check_stream, look_ahead
from data_prep.prepare import drop_last, prepare
from data_prep.settings import PrepSettings
from data_prep.settings.cluster import Cluster
from data_prep.settings.options import add_options, parsed_settings
from data_prep.sources import Source
from data_prep.summary import summary
from fairseq_alma.core.printing import say
from fairseq_alma.core.program import Parser, command
from fairseq_alma.core.settings import nearest_key
from fairseq_alma.core.signals import stopped_by_signals


@command("alma-prep", "run the same command again to continue")
def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the command-line arguments; None: use sys.argv[1:].

    Returns:
        The exit code: 0 after success, 2 after an error, 130 after Ctrl-C or SIGTERM. The error message is printed on
        stderr. `check --look-ahead` returns 1 if something in the stream looks ahead.
    """
    # A job that is cancelled gets SIGTERM. It must not leave jobs of its own in the queue.
    with stopped_by_signals("alma-prep", ""):
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    """Run the command or a subcommand, and return its exit code."""
    if argv[:1] == ["check"]:
        return _check(argv[1:])
    if argv[:1] == ["grow-vocab"]:
        return _grow_vocabulary(argv[1:])
    if "--drop-last" in argv:
        return _drop_last(argv)
    is_source = any(word.startswith("--source") for word in argv)
    if argv and not is_source and (near := nearest_key(argv[0], ["check", "grow-vocab"])):
        raise PrepError(f"there is no subcommand {argv[0]}: did you mean alma-prep {near}?")
    parsed = _parser().parse_args(argv)
    given = parsed_settings(parsed, PrepSettings)
    settings = PrepSettings(
        out=Path(parsed.out),
        sources=tuple(Source.parse(text) for text in parsed.source),
        cluster=Cluster(**parsed_settings(parsed, Cluster)),
        given=tuple(given),
        **given,
    )
    say(summary(prepare(settings)))
    if settings.extend:
        say(f"The stream is in {settings.out}. To continue a run, give alma-lm the same command again.")
        return 0
    words = shlex.join(["alma-lm", f"stream={settings.out}", "out=RUN", "preset=quickstart", "updates=300"])
    say(f"The stream is in {settings.out}. To train on it: {words}")
    return 0


def _check(argv: list[str]) -> int:
    """Run `alma-prep check`, and return its exit code."""
    parser = Parser(
        prog="alma-prep check", description="Compare all files of a finished stream with the digests in manifest.json."
    )
    parser.add_argument("out", metavar="STREAM", type=Path, help="the stream folder")
    parser.add_argument(
        "--look-ahead",
        action="store_true",
        help="also name everything in the stream that depends on text of later periods; the exit code is then 1",
    )
    parsed = parser.parse_args(argv)
    stream = check_stream(parsed.out)
    findings = look_ahead(stream) if parsed.look_ahead else []
    for finding in findings:
        say(f"{finding.verdict:<12} {finding.quantity}: {finding.why}")
    num_ahead = sum(finding.verdict == "looks ahead" for finding in findings)
    if not parsed.look_ahead:
        say(f"{parsed.out} is complete and undamaged.")
    elif num_ahead:
        say(f"{num_ahead} quantities of {parsed.out} depend on later text.")
    else:
        say(f"Nothing that was looked at in {parsed.out} depends on later text.")
    return min(num_ahead, 1)


def _grow_vocabulary(argv: list[str]) -> int:
    """Run `alma-prep grow-vocab`, and return its exit code."""
    parser = Parser(
        prog="alma-prep grow-vocab",
        description="Copy a stream with more symbols in its vocabulary, learned from new text. The old symbols keep "
        "their ids, and all text is encoded again.",
    )
    parser.add_argument("stream", metavar="STREAM", type=Path, help="the stream folder, which is not changed")
    parser.add_argument("new", metavar="NEW", type=Path, help="the folder of the copy")
    parser.add_argument("--symbols", type=int, required=True, metavar="N", help="largest number of symbols to add")
    parser.add_argument(
        "--learn-from", type=int, nargs="+", default=[], metavar="T",
        help="the mega-batches from whose text the symbols are learned (default: the last one)",
    )  # fmt: skip
    parsed = parser.parse_args(argv)
    stream = grow_vocabulary(parsed.stream, parsed.new, parsed.symbols, parsed.learn_from)
    say(summary(stream))
    symbols = stream["vocab_size"] - stream["grown_from"][-1]["num_symbols"]
    words = shlex.join(["alma-lm", f"stream={parsed.new}", "out=RUN", "init_from=OLD_RUN", "known_mega_batches=K"])
    say(
        f"{parsed.new} has {symbols:,} more symbols. A run of alma-lm on it starts from a run on {parsed.stream}: "
        f"{words} ..., where K is the number of mega-batches on which OLD_RUN was trained."
    )
    return 0


def _drop_last(argv: list[str]) -> int:
    """Run `alma-prep --drop-last`, and return its exit code."""
    parser = Parser(
        prog="alma-prep", description="Take back what the last --extend has added. The source files are not touched."
    )
    parser.add_argument("out", metavar="STREAM", type=Path, help="the stream folder")
    parser.add_argument("--drop-last", action="store_true", required=True, help="take the newest extension back")
    say(summary(drop_last(parser.parse_args(argv).out)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alma-prep",
        description="Make a stream of mega-batches from text. All mega-batches have the same number of words (unless "
        "--partition says otherwise), use one tokenizer, and are stored as fairseq mmap files. The same text and seed "
        "give the same bytes, regardless of --workers, --executor and the order of the files. Run the same command "
        "again to continue a run that was killed.",
        epilog="Other commands: `alma-prep check STREAM` compares a stream with its digests, and `alma-prep grow-vocab "
        "STREAM NEW --symbols N` copies it with a larger vocabulary (--help of each says more).",
    )
    parser.add_argument(
        "out", metavar="OUT", help="the stream folder to write; if it contains a finished stream, it is only checked"
    )
    sources = parser.add_argument_group("sources")
    sources.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="KIND[:PATH][@SHARE]",
        help="where to read text from; can be given several times. common-crawl:PATH reads WARC, WET or ARC archives "
        "(plain, gz, bz2, zst); PATH is a file, a folder, or a pattern in quotes. wikipedia:PATH reads page-"
        "article dumps. books:DIR reads each *.txt, *.md or *.epub file as one document. text:PATH reads a file "
        "or a folder of *.txt (one document per non-empty line, as fairseq reads text), *.json or *.jsonl (one JSON "
        "object per line, plain, gz, bz2, zst or xz), *.parquet or "
        "*.arrow. "
        "python-docs reads the docstrings of this Python's standard library, one document per module. "
        "hf:NAME[:CONFIG][:SPLIT] reads a dataset of the Hugging Face Hub. PATH can also be a URL that fsspec "
        "reads, such as s3://BUCKET/FOLDER. SHARE is the fraction of the stream's words that the source provides,"
        " as in common-crawl:PATH@0.6.",
    )
    parser.add_argument(
        "--drop-last", action="store_true",
        help="take back what the last --extend has added to the stream OUT; give no other option",
    )  # fmt: skip
    groups = {"options": parser, "sources": sources}
    add_options(parser, groups, PrepSettings)
    add_options(parser, groups, Cluster)
    return parser

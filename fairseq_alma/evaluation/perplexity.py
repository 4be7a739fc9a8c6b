"""alma-eval: perplexity of a model or an ensemble on a split of a stream. Every token is scored exactly once.

alma-eval RUN
alma-eval CHECKPOINT [CHECKPOINT ...] --stream STREAM
"""

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core.errors import AlmaError, StreamError, message_of
from fairseq_alma.core.printing import say
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, StreamFolder
from fairseq_alma.evaluation.devices import parse_devices
from fairseq_alma.evaluation.members import Members, find_members, load_member
from fairseq_alma.evaluation.scoring import score_tokens

# Names of array dimensions: N members, T tokens in a split. A name that ends in _NT belongs to an array [N, T].

TOKENS_PER_CHUNK = 1 << 20
"""Number of tokens in a chunk. To limit the memory use, `combine` processes one chunk of a split at a time."""


@dataclass(frozen=True)
class PerplexityScore:
    """The score of a predictor on a split. End-of-document tokens are scored like all other tokens."""

    nll_sum: float
    """Negative log-likelihood in nats, summed over all tokens that were scored."""
    num_tokens: int
    """Number of tokens that were scored."""
    num_words: int
    """Number of words in the text of the split. `alma-prep` counts them (see docs/corpora.md)."""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, in nats per token."""
        return self.nll_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word. Unlike the perplexity per token, it can be compared across different tokenizers."""
        return _exp(self.nll_sum / self.num_words)

    def to_json(self) -> dict[str, float]:
        """Return the score as a JSON object."""
        return {
            "num_tokens": self.num_tokens,
            "num_words": self.num_words,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
        }


def combine(log_probability_N: Sequence[np.ndarray], num_words: int) -> PerplexityScore:
    """Return the score of an ensemble on a split with `num_words` words.

    The ensemble predicts the mean of the probabilities of its members, computed in float64.

    Args:
        log_probability_N: for each of the N members, the float32 log-probabilities [T] of all tokens of one split.
        num_words: number of words in the split.
    """
    num_tokens, nll_sum = len(log_probability_N[0]), 0.0
    for start in range(0, num_tokens, TOKENS_PER_CHUNK):
        chunk_NT = np.stack(
            [np.asarray(member_T[start : start + TOKENS_PER_CHUNK], np.float64) for member_T in log_probability_N]
        )
        nll_sum -= float((np.logaddexp.reduce(chunk_NT, axis=0) - math.log(len(chunk_NT))).sum())
    return PerplexityScore(nll_sum, num_tokens, num_words)


def _positive_int(text: str) -> int:
    """Return the number in an argument of the command. It must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def _check_split(split: str, stream: StreamFolder) -> None:
    """Raise StreamError if the stream has no held-out text with this name."""
    known = ["test", "valid", *stream.period_splits]
    if split not in known:
        raise StreamError(f"--split {split} is not held-out text of {stream.path}: use one of {', '.join(known)}")


def _exp(nats: float) -> float:
    """Return exp(nats); infinity if the result is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-eval and return its exit status. It prints a table, or JSON with --json."""
    parser = argparse.ArgumentParser(
        prog="alma-eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="+", type=Path, metavar="RUN|CHECKPOINT", help="a run folder, or the checkpoints of an ensemble"
    )
    parser.add_argument("--stage", type=int, metavar="K", help="score RUN after stage K (default: the last stage)")
    parser.add_argument("--stream", type=Path, help="the stream folder (default: the stream of the run)")
    parser.add_argument(
        "--split",
        default="test",
        help="split to score: test (default) or valid; in a chronological stream also the held-out text of a period, "
        "such as mega_batch_3/test or mega_batch_3/valid",
    )
    parser.add_argument(
        "--device", help="cpu, cuda, or a list like cuda:0,cuda:2 (default: all GPUs, or the CPU if there is none)"
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=_positive_int,
        help="number of tokens in one forward pass on a device (default: 8192 on a CPU, 65536 on a GPU that has the "
        "memory); it changes the scores only if the experts have a capacity limit in evaluation",
    )
    parser.add_argument("--arch", help="architecture of the checkpoints, if it is not one of ours")
    parser.add_argument("--plugin", metavar="MODULE", help="module of yours that registers the architecture; it runs")
    parser.add_argument("--by-source", action="store_true", help="also score the text of each source alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    # Libraries that fairseq imports print such warnings. Their user can do nothing about them.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if arguments.plugin:
            load_plugin(arguments.plugin)
        found = find_members(arguments.path, arguments.stream, arguments.stage)
        stream = _open_stream(found)
        _check_split(arguments.split, stream)
        devices = parse_devices(arguments.device)
        members = []
        for checkpoint in found.checkpoints:  # load one model after the other, to limit the memory use
            model, task = load_member(checkpoint, stream, devices[0], arguments.arch)
            scores = score_tokens(model, task, arguments.split, devices, arguments.tokens_per_batch)
            members.append(scores.log_probability_T)
        result = combine(members, stream.counts(arguments.split)["words"])
        by_source = _by_source(members, stream, arguments.split) if arguments.by_source else {}
    except (AlmaError, OSError) as error:
        say(f"alma-eval: {message_of(error)}", sys.stderr)
        return 2
    _print_score(result, by_source, len(members), arguments.split, stream, as_json=arguments.json)
    return 0


def _by_source(members: Sequence[np.ndarray], stream: StreamFolder, split: str) -> dict[str, PerplexityScore]:
    """Return the score on each source whose text is in the split, by the name of the source.

    The first tokens of a passage are predicted from the passage before, as in the score of the complete split. Raise
    StreamError if the stream does not say from which source its passages come, or if the file has changed.
    """
    # Import pyarrow only here, because it is rarely needed, and the import takes a tenth of a second.
    import pyarrow.parquet

    path = stream.path / "documents" / f"{split}.parquet"
    if not path.is_file():
        raise StreamError(f"{path} is missing: make the stream again with this release, which writes this file")
    stream.verify_file(f"documents/{split}.parquet")
    table = pyarrow.parquet.read_table(path, columns=["source", "words"])
    num_sequences = stream.counts(split)["sequences"]
    if len(table) != num_sequences:
        raise StreamError(f"{path} has {len(table):,} rows, expected {num_sequences:,}: restore the file")
    sizes = np.fromfile(stream.prefix(split).with_suffix(".idx"), np.int32, num_sequences, offset=IDX_HEADER_BYTES)
    sources = table.column("source").combine_chunks().dictionary_encode()
    source_of, words = sources.indices.to_numpy(), table.column("words").to_numpy()
    source_T = np.repeat(source_of, sizes)
    scores = {}
    for name, number in sorted((name, number) for number, name in enumerate(sources.dictionary.to_pylist())):
        num_words = int(words[source_of == number].sum(dtype=np.int64))
        scores[name] = combine([member_T[source_T == number] for member_T in members], num_words)
    return scores


def _print_score(
    result: PerplexityScore, by_source: dict[str, PerplexityScore], num_members: int, split: str, stream: StreamFolder,
    as_json: bool,
) -> None:  # fmt: skip
    """Print a score, and those of each source if there are any, as text, or as one JSON object if `as_json`."""
    if as_json:
        summary = {"split": split, "num_members": num_members, **result.to_json()}
        parts = {name: score.to_json() for name, score in by_source.items()}
        print(json.dumps(summary | ({"by_source": parts} if parts else {})))
        return
    members = "1 member" if num_members == 1 else f"{num_members} members"
    say(f"{members} on {stream.path}, {split} split")
    print(f"tokens scored     {result.num_tokens:,} (all tokens of the split), {result.num_words:,} words")
    print(f"perplexity        {result.perplexity:.4f} per token, {result.word_perplexity:.4f} per word")
    print(f"loss              {result.loss:.6f} nats per token")
    for name, score in by_source.items():
        say(f"{name}: perplexity {score.perplexity:.4f} per token, {score.num_tokens:,} tokens")


def _open_stream(found: Members) -> StreamFolder:
    """Return the stream of models. Raise StreamError if it is missing, or has other held-out text than the run's."""
    try:
        stream = StreamFolder.open(found.stream)
    except StreamError as error:
        if not found.settings:
            raise
        raise StreamError(f"{error}; if the stream was moved, give --stream") from error
    if found.settings.get("evaluated_on") not in (None, [stream.digest(split) for split in ("valid", "test")]):
        raise StreamError(
            f"the held-out text of {stream.path} is not that of the stream with which the run was trained: give that "
            f"stream with --stream"
        )
    return stream


if __name__ == "__main__":
    sys.exit(main())

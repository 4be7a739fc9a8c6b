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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch

import fairseq_alma
from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import AlmaError, SettingError, StreamError, message_of
from fairseq_alma.core.predictors import checked_file, read_predictor, stages_with_predictor
from fairseq_alma.core.printing import say
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import IDX_HEADER_BYTES, StreamFolder, TrainingView
from fairseq_alma.evaluation.devices import parse_devices
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
    num_bytes: int | None = None
    """Number of UTF-8 bytes of the same text; None if it is not known."""

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

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte of the text. It depends neither on the tokenizer nor on what counts as a word."""
        return self.nll_sum / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_json(self) -> dict[str, float]:
        """Return the score as a JSON object, without what is not known."""
        values = {
            "num_tokens": self.num_tokens,
            "num_words": self.num_words,
            "num_bytes": self.num_bytes,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        return {name: value for name, value in values.items() if value is not None}


def load_member(
    checkpoint: Path, stream: StreamFolder | TrainingView, device: torch.device, user_dir: Path | None = None
) -> tuple[Any, Any]:
    """Load a checkpoint. Return its model, in evaluation mode, and the fairseq task that reads the data of `stream`.

    The checkpoint may come from somebody else: no code that it names is run (see `fairseq_alma.models.stored`).

    Args:
        checkpoint: a checkpoint of a switch_lm model.
        stream: the stream to evaluate on. It must have the dictionary with which the model was trained.
        device: device for the model.
        user_dir: a folder with code of the user that registers architectures of switch_lm, as for fairseq's option
            `--user-dir`. By default, only our architectures are known.

    Raises:
        StreamError: if the checkpoint is missing or damaged, or has another architecture or dictionary.
        SettingError: if its configuration or its weights are not those of a switch_lm model.
    """
    path = Path(checkpoint)
    state = _whole_checkpoint(path)
    name, options = _checked_options(state, path, user_dir)
    _check_dictionary(state, path, stream)
    from omegaconf import OmegaConf

    from fairseq_alma.tasks.alma_lm import AlmaLanguageModelingConfig, AlmaLanguageModelingTask

    task_options = AlmaLanguageModelingConfig(data=str(stream.path), tokens_per_sample=options.tokens_per_sample)
    task = AlmaLanguageModelingTask.setup_task(task_options)
    options._name = name
    try:
        model = task.build_model(OmegaConf.structured(options), from_checkpoint=True)
        model.load_state_dict(state["model"], strict=True)
    except (SettingError, RuntimeError) as error:
        raise SettingError(f"{path} cannot be loaded: {error}") from error
    return model.to(device).eval(), task


def _checked_options(state: Mapping[str, Any], path: Path, user_dir: Path | None) -> tuple[str, Any]:
    """Return the name of the model in a checkpoint, and its checked options. See `load_member`."""
    # Import fairseq only here, because the import takes seconds and is not needed to report bad arguments.
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
    from fairseq.utils import import_user_module

    fairseq_alma.register()
    from fairseq_alma.models.stored import stored_entry, stored_model
    from fairseq_alma.models.switch_lm import SwitchLanguageModel

    if user_dir is not None:
        import_user_module(argparse.Namespace(user_dir=str(user_dir)))
    architecture = stored_entry(state, path, "cfg", "model").get("_name")
    name = ARCH_MODEL_NAME_REGISTRY.get(architecture) if isinstance(architecture, str) else None
    if name is None or not issubclass(MODEL_REGISTRY[name], SwitchLanguageModel):
        shown = shortened(architecture).strip("'")
        raise StreamError(
            f"{path} is a checkpoint of {shown}, and alma-eval scores switch_lm models: use fairseq-eval-lm. If code "
            f"of yours registers {shown} as an architecture of switch_lm, give its folder: --user-dir FOLDER"
        )
    return name, stored_model(state, path, MODEL_DATACLASS_REGISTRY[name])


def combine(log_probability_N: Sequence[np.ndarray], num_words: int, num_bytes: int | None = None) -> PerplexityScore:
    """Return the score of an ensemble on a split.

    The ensemble predicts the mean of the probabilities of its members, computed in float64.

    Args:
        log_probability_N: for each of the N members, the float32 log-probabilities [T] of all tokens of one split.
        num_words: number of words in the split.
        num_bytes: number of UTF-8 bytes of the split's text; None if it is not known.
    """
    num_tokens, nll_sum = len(log_probability_N[0]), 0.0
    for start in range(0, num_tokens, TOKENS_PER_CHUNK):
        chunk_NT = np.stack(
            [np.asarray(member_T[start : start + TOKENS_PER_CHUNK], np.float64) for member_T in log_probability_N]
        )
        nll_sum -= float((np.logaddexp.reduce(chunk_NT, axis=0) - math.log(len(chunk_NT))).sum())
    return PerplexityScore(nll_sum, num_tokens, num_words, num_bytes)


def _whole_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file. Raise StreamError if the file is missing or damaged."""
    state = read_checkpoint(path)
    if state is None:
        hint = "train a stage first (alma-lm, or fairseq-train)"
        if path.is_file():
            hint = "the file is damaged: restore it from a backup, or score another stage (--stage)"
        elif path.is_dir():
            hint = "give a single run folder, or the checkpoint files that are listed in the predictor.json of each run"
        raise StreamError(f"no complete checkpoint at {path}: {hint}")
    return state


def _check_dictionary(state: Mapping[str, Any], path: Path, stream: StreamFolder | TrainingView) -> None:
    """Raise StreamError if the model in a checkpoint was trained with another dictionary than that of the stream."""
    num_words = len(state["model"]["decoder.embed_tokens.weight"])
    if num_words != stream.dictionary_size:
        raise StreamError(
            f"{path} was trained with a dictionary of {num_words} entries, but the dictionary of "
            f"{stream.path} has {stream.dictionary_size}: give the stream with which the model was trained, or a "
            f"stream made with the same tokenizer"
        )
    extra_state = state.get("extra_state")
    entry = extra_state.get("AlmaLanguageModelingTask") if isinstance(extra_state, dict) else None
    saved = entry.get("dict_sha256") if isinstance(entry, dict) else None
    if saved not in (None, stream.dictionary_digest):
        raise StreamError(
            f"{path} was trained with another dictionary than {stream.path}/dict.txt: give the stream with which the "
            f"model was trained"
        )


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
    parser.add_argument("--user-dir", type=Path, help="folder with code of yours that registers architectures; it runs")
    parser.add_argument("--by-source", action="store_true", help="also score the text of each source alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    # Libraries that fairseq imports print such warnings. Their user can do nothing about them.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        checkpoints, stream_path = _resolve(arguments.path, arguments.stream, arguments.stage)
        stream = StreamFolder.open(stream_path)
        _check_split(arguments.split, stream)
        devices = parse_devices(arguments.device)
        members = []
        for checkpoint in checkpoints:  # load one model after the other, to limit the memory use
            model, task = load_member(checkpoint, stream, devices[0], arguments.user_dir)
            scores = score_tokens(model, task, arguments.split, devices, arguments.tokens_per_batch)
            members.append(scores.log_probability_T)
        counts = stream.counts(arguments.split)
        result = combine(members, counts["words"], counts.get("bytes"))
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
    # Earlier versions did not write the bytes.
    units = [unit for unit in ("words", "bytes") if unit in pyarrow.parquet.read_schema(path).names]
    table = pyarrow.parquet.read_table(path, columns=["source", *units])
    num_sequences = stream.counts(split)["sequences"]
    if len(table) != num_sequences:
        raise StreamError(f"{path} has {len(table):,} rows, expected {num_sequences:,}: restore the file")
    sizes = np.fromfile(stream.prefix(split).with_suffix(".idx"), np.int32, num_sequences, offset=IDX_HEADER_BYTES)
    sources = table.column("source").combine_chunks().dictionary_encode()
    source_of = sources.indices.to_numpy()
    source_T = np.repeat(source_of, sizes)
    scores = {}
    for name, number in sorted((name, number) for number, name in enumerate(sources.dictionary.to_pylist())):
        sums = [int(table.column(unit).to_numpy()[source_of == number].sum(dtype=np.int64)) for unit in units]
        members_T = [member_T[source_T == number] for member_T in members]
        scores[name] = combine(members_T, *sums)
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
    print(f"loss              {result.loss:.6f} nats per token{_bits_text(result)}")
    for name, score in by_source.items():
        say(f"{name}: perplexity {score.perplexity:.4f} per token, {score.num_tokens:,} tokens{_bits_text(score)}")


def _bits_text(score: PerplexityScore) -> str:
    return "" if score.bits_per_byte is None else f", {score.bits_per_byte:.6f} bits per byte"


def _resolve(paths: Sequence[Path], stream: Path | None, stage: int | None) -> tuple[list[Path], Path]:
    """Return the checkpoint files and the stream folder that alma-eval uses.

    They are those of a run, if `paths` contains only its folder. For checkpoint files, `stream` must be given. Raise
    StreamError if a path does not exist, if the run has no finished stage, or if there is no stream.
    """
    if len(paths) == 1 and paths[0].is_dir():
        run = paths[0]
        if not RunFolder(run).predictor().is_file():
            runs = [str(path.parent) for path in sorted(run.glob("*/predictor.json"))]
            if runs:
                raise StreamError(f"{run} contains several runs. Score one of them: {', '.join(runs)}")
            raise StreamError(
                f"{run} has no predictor.json, so it is not a run with a finished stage: "
                f"give another folder, or let alma-lm finish a stage of this run"
            )
        if not RunFolder(run).predictor(stage).is_file():
            raise StreamError(f"{run} has no predictor of stage {stage}: {stages_with_predictor(run)}")
        checkpoints = [checked_file(run, entry) for entry in read_predictor(run, stage)["checkpoints"]]
        if not (run / "settings.json").is_file():
            files = ", ".join(str(path) for path in checkpoints)
            raise StreamError(
                f"{run} has no settings.json, so it is not a run folder: give the checkpoint files ({files}) and "
                f"--stream"
            )
        settings = read_settings(run)
        if "stream" not in settings:
            raise StreamError(
                f"{run} is not an alma-lm run, because its settings contain no stream: alma-eval scores only language "
                f"models"
            )
        return checkpoints, stream or _stream_of_run(run, settings)
    if stage is not None:
        raise StreamError("--stage needs a run folder, not checkpoint files: omit --stage")
    if missing := [str(path) for path in paths if not path.exists()]:
        raise StreamError(f"there is no run and no checkpoint at {', '.join(missing)}: check the path")
    if stream is None:
        raise StreamError("give --stream STREAM, the stream folder on which to score the checkpoints")
    return list(paths), stream


def _stream_of_run(run: Path, settings: Mapping[str, Any]) -> Path:
    """Return the stream folder that a run recorded. Raise StreamError if it has no stream, or other held-out text."""
    path = Path(settings["stream"])
    try:
        stream = StreamFolder.open(path)
    except StreamError as error:
        raise StreamError(f"{error}; if the stream was moved, give --stream") from error
    if settings.get("evaluated_on") not in (None, [stream.digest(split) for split in ("valid", "test")]):
        raise StreamError(
            f"the held-out text of {path} is not that of the stream with which {run} was trained: give that stream "
            f"with --stream"
        )
    return path


if __name__ == "__main__":
    sys.exit(main())

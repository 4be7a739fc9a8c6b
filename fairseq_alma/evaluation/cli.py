"""alma-eval: perplexity of a model or an ensemble on a split of a stream, or its scores on tasks.

alma-eval RUN
alma-eval CHECKPOINT [CHECKPOINT ...] --stream STREAM
alma-eval RUN --text FILE                                        any text: a text file, or JSON lines
alma-eval RUN --all-stages --tasks arc_easy,lambada_openai       tasks of lm-evaluation-harness
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_alma.api import load
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.ledger import Ledger, deployed_stage
from fairseq_alma.core.printing import hide_messages_of_libraries, json_text, perplexity_text, say
from fairseq_alma.core.program import Parser, add_models, command
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.core.task_scores import digests_of, record_task_scores
from fairseq_alma.evaluation.devices import parse_devices
from fairseq_alma.evaluation.documents import read_documents, score_documents
from fairseq_alma.evaluation.members import Members, find_members, load_member
from fairseq_alma.evaluation.perplexity import PerplexityScore, combine, scores_by_source
from fairseq_alma.evaluation.scoring import score_tokens


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


@command("alma-eval")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-eval and return its exit status. It prints a table, or JSON with --json."""
    parser = Parser(prog="alma-eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, "score")
    parser.add_argument(
        "--split",
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
    parser.add_argument(
        "--text", type=Path, metavar="FILE",
        help="score this text instead of a split: one document, or, if the name ends with .jsonl, .ndjson or .json, a "
        "document in each line, in the field that alma-prep has read (default: text). The file may be compressed. Of "
        "the stream, only the tokenizer is needed",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness, instead of the perplexity")
    tasks.add_argument(
        "--tasks", metavar="TASK,...", help="names of tasks, groups or tags; `lm_eval ls tasks` lists them"
    )
    tasks.add_argument(
        "--include-path", type=Path, metavar="FOLDER",
        help="folder with task files of yours (*.yaml); Python functions that they name run",
    )  # fmt: skip
    tasks.add_argument("--all-stages", action="store_true", help="evaluate RUN after each stage that is stored")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="solved examples before each question")
    tasks.add_argument("--limit", type=_positive_int, metavar="N", help="evaluate only the first N examples of a task")
    arguments = parser.parse_args(argv)
    hide_messages_of_libraries()
    _check_combination(arguments)
    # Known before: while a model is evaluated, which may take long, the run may finish another stage.
    arguments.stage = _stage(arguments)
    if arguments.plugin:
        load_plugin(arguments.plugin)
    if arguments.tasks:
        _evaluate_on_tasks(arguments)
        return 0
    if arguments.text:
        _evaluate_on_text(arguments)
        return 0
    found = find_members(arguments.path, arguments.stream, arguments.stage)
    stream = _open_stream(found)
    _check_split(arguments.split, stream)
    devices = parse_devices(arguments.device)
    members = []
    for number, checkpoint in enumerate(found.checkpoints, start=1):  # one after the other, to limit the memory use
        model, task = load_member(checkpoint, stream, devices[0], arguments.arch)
        title = f"the split {arguments.split}, model {number} of {len(found.checkpoints)}"
        scores = score_tokens(model, task, arguments.split, devices, arguments.tokens_per_batch, title=title)
        members.append(scores.log_probability_T)
    counts = stream.counts(arguments.split)
    num_masked = stream.num_masked(arguments.split)
    result = combine(members, counts["words"], counts.get("bytes"), num_masked)
    by_source = scores_by_source(members, stream, arguments.split) if arguments.by_source else {}
    _print_score(result, by_source, _models(arguments, len(members)), stream, arguments)
    return 0


def _check_combination(arguments: argparse.Namespace) -> None:
    """Raise SettingError if an option has no effect."""
    for name, others in (
        ("tasks", ("by_source", "split")),
        ("text", ("tasks", "by_source", "split", "tokens_per_batch")),
    ):
        for other in others if getattr(arguments, name) else ():
            if getattr(arguments, other):
                words = " and ".join(f"--{one.replace('_', '-')}" for one in (name, other))
                raise SettingError(f"{words} cannot be combined: leave one of them out")
    arguments.split = arguments.split or "test"
    if arguments.all_stages and arguments.stage is not None:
        raise SettingError("--all-stages and --stage cannot be combined: leave one of them out")
    for name in ("include_path", "all_stages", "num_fewshot", "limit"):
        if not arguments.tasks and getattr(arguments, name) not in (None, False):
            raise SettingError(f"--{name.replace('_', '-')} needs --tasks: add it, or leave the option out")


def _evaluate_on_tasks(arguments: argparse.Namespace) -> None:
    """Evaluate models on tasks, print the results, and add those of a run to its file task_scores.jsonl.

    A folder of alma-deploy is no run: it has no ledger.
    """
    is_run = len(arguments.path) == 1 and RunFolder(arguments.path[0]).ledger.exists()
    run = arguments.path[0] if is_run else None
    stages = [arguments.stage]
    if arguments.all_stages:
        stages = [*RunFolder(arguments.path[0]).stages_with_predictor()]
        if not stages:
            raise StreamError(f"--all-stages needs a run with finished stages, but {arguments.path[0]} has none")
    try:
        from fairseq_alma.evaluation import harness  # here, because it imports lm_eval, which takes seconds
    except ModuleNotFoundError as error:
        raise SettingError(
            f"--tasks needs lm-evaluation-harness, which is not installed ({error}): "
            f"pip install 'fairseq-alma[harness]'"
        ) from error
    names = arguments.tasks.split(",")
    manager = harness.find_tasks(names, arguments.include_path)
    device = parse_devices(arguments.device)[0]
    for stage in stages:
        digests = digests_of(run, stage) if run is not None else []
        predictor = load(arguments.path, stage, device, arguments.stream, arguments.arch)
        batch = arguments.tokens_per_batch and max(1, arguments.tokens_per_batch // predictor.window)
        model = harness.AlmaLM(predictor, batch_size=batch)
        scores = harness.evaluate(model, names, manager, arguments.num_fewshot, arguments.limit)
        for score in scores if run is None or stage is None else record_task_scores(run, stage, digests, scores):
            if arguments.json:
                print(json.dumps(score))
                continue
            metrics = [
                f"{name} {value:.4f}" + (f" ± {score['stderr'][name]:.4f}" if name in score["stderr"] else "")
                for name, value in score["metrics"].items()
            ]
            place = "" if run is None else f"stage {score['stage']}: "
            say(f"{place}{score['task']}: {', '.join(metrics)} ({score['num_examples']:,} examples)")


def _evaluate_on_text(arguments: argparse.Namespace) -> None:
    """Score the documents of a file, and print the result."""
    stream = find_members(arguments.path, arguments.stream, arguments.stage).stream
    documents = read_documents(arguments.text, f"--text {arguments.text}", stream)
    predictor = load(
        arguments.path, arguments.stage, parse_devices(arguments.device)[0], arguments.stream, arguments.arch
    )
    total = score_documents(predictor, documents)
    if arguments.json:
        counts = {"num_documents": len(documents), "num_tokens": total.num_tokens, "num_bytes": total.num_bytes}
        quality = {"perplexity": total.perplexity, "bits_per_byte": total.bits_per_byte}
        models = _models(arguments, len(predictor.members))
        print(json_text({"text": str(arguments.text), **models, **counts, **quality}))
        return
    count = "1 document" if len(documents) == 1 else f"{len(documents):,} documents"
    of_stage = "" if arguments.stage is None else f", by the predictor of stage {arguments.stage}"
    say(f"{count} of {arguments.text}{of_stage}: {total.num_tokens:,} tokens, {total.num_bytes:,} bytes")
    print(f"perplexity {total.perplexity:.4f} per token, {total.bits_per_byte:.6f} bits per byte")


def _stage(arguments: argparse.Namespace) -> int | None:
    """Return the stage whose predictor is evaluated; None if it is not that of a run, or if no stage is finished.

    A folder of alma-deploy is no run: it has no ledger.
    """
    run = RunFolder(arguments.path[0])
    if arguments.stage is not None or len(arguments.path) > 1 or not run.ledger.exists():
        return arguments.stage
    stage = deployed_stage(Ledger(run.ledger).rows())
    return stage if stage and run.predictor(stage).is_file() else None


def _models(arguments: argparse.Namespace, num_members: int) -> dict[str, int]:
    """Return which models are evaluated, as entries of a JSON object."""
    return {"num_members": num_members, **({} if arguments.stage is None else {"stage": arguments.stage})}


def _print_score(
    result: PerplexityScore, by_source: dict[str, PerplexityScore], models: dict[str, int], stream: StreamFolder,
    arguments: argparse.Namespace,
) -> None:  # fmt: skip
    """Print a score, and those of each source if there are any, as text, or as one JSON object with --json."""
    if arguments.json:
        summary = {"split": arguments.split, **models, **result.to_json()}
        parts = {name: score.to_json() for name, score in by_source.items()}
        print(json_text(summary | ({"by_source": parts} if parts else {})))
        return
    members = "1 member" if models["num_members"] == 1 else f"{models['num_members']} members"
    of_stage = f" of stage {models['stage']}" if "stage" in models else ""
    say(f"{members}{of_stage} on {stream.path}, {arguments.split} split")
    print(f"tokens scored     {result.num_tokens:,} (all tokens of the split), {result.num_words:,} words")
    print(f"perplexity        {result.perplexity:.4f} per token, {perplexity_text(result.word_perplexity, 4)} per word")
    print(f"loss              {result.loss:.6f} nats per token{_bits_text(result)}")
    for name, score in by_source.items():
        say(f"{name}: perplexity {score.perplexity:.4f} per token, {score.num_tokens:,} tokens{_bits_text(score)}")


def _bits_text(score: PerplexityScore) -> str:
    return "" if score.bits_per_byte is None else f", {score.bits_per_byte:.6f} bits per byte"


def _open_stream(found: Members) -> StreamFolder:
    """Return the stream of models. Raise StreamError if it is missing, or has other held-out text than the run's."""
    try:
        stream = StreamFolder.open(found.stream)
    except StreamError as error:
        if not found.settings:
            if (found.stream / "predictor.json").is_file():  # of alma-deploy
                raise StreamError(f"{found.stream} has no text: give --text FILE, or --stream STREAM") from error
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

"""Compare the training speed of switch_lm_base with fairseq's transformer_lm, Hugging Face's Switch and a plain loop.

.venv/bin/python benchmarks/lm_train.py                    on the CPU, printed, in about fifteen minutes
.venv/bin/python benchmarks/lm_train.py --peers FOLDER     with transformers from FOLDER (pip install --target FOLDER)
.venv/bin/python benchmarks/lm_train.py --device cuda --arch switch_lm_large
.venv/bin/python benchmarks/lm_train.py --write            also written to benchmarks/lm_train.md

All alternatives are whole processes that train on sequences of 512 tokens. A measurement lasts from the end of one
update to the end of the next: batches, forward and backward pass, clipping, optimizer and log line, without start,
validation and checkpoints. On a CPU, they take turns update by update, and the CPU time of one thread is measured. On a
GPU, which continues to compute while a process is stopped, they take turns ROUNDS times, each alone, and the time that
passes is measured. Each ratio is the median over the updates. The exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from _common import ROOT, StepByStep, provenance, ratio_columns, table, timed_lines, verdict, write_part
from _lm_stream import write_stream

VOCABULARY = 50_264  # size of a fairseq dictionary for the 50,257 symbols of GPT-2, with special and padding symbols
LENGTH = 512
SEQUENCES = {"cpu": 4, "cuda": 64}
"""Device -> number of sequences in an update."""
SKIPPED_UPDATES = {"cpu": 2, "cuda": 10}
"""Device -> number of first updates that are not measured. For example, Adam allocates its state in the first one."""
ROUNDS = 2
"""How often each alternative runs on a GPU."""
SIZES = {"switch_lm_base": (6, 512, 8), "switch_lm_large": (12, 768, 12)}
"""Architecture -> number of layers, width and number of heads, for fairseq's model of the same active size."""
PARTS = {
    f"{arch} on {device}": f"benchmarks/lm_train.py --device {device} --arch {arch} --peers FOLDER"
    for arch, device in (("switch_lm_base", "cpu"), ("switch_lm_base", "cuda"), ("switch_lm_large", "cuda"))
}
"""Part of the report -> the command that fills it."""
FAIRSEQ, PLAIN, HF = "fairseq transformer_lm", "plain loop, our model, bfloat16", "plain loop, HF Switch, bfloat16"
OURS = "ours, bfloat16, capacity 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SEQUENCES, default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--arch", choices=SIZES, default="switch_lm_base", help="model (default: switch_lm_base)")
    parser.add_argument("--repeats", type=int, default=10, help="number of measured updates (default: 10)")
    parser.add_argument("--sequences", type=int, help=f"sequences in an update (default: {SEQUENCES})")
    parser.add_argument("--peers", action="append", default=[], help="folder with transformers; may be repeated")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_train.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    sequences = options.sequences or SEQUENCES[options.device]
    with tempfile.TemporaryDirectory(prefix="lm_train_") as scratch:
        commands = _commands(options, sequences, Path(scratch))
        measured = measure(commands, options.repeats, options.device)
    text = "\n".join([*_section(measured, options, sequences), "", *provenance(load_at_start)])
    print(text)
    if options.write:
        introduction = "# Speed of training\n\nWritten by `benchmarks/lm_train.py --write`."
        write_part(introduction, PARTS, f"{options.arch} on {options.device}", text.splitlines())


def _commands(options: argparse.Namespace, sequences: int, scratch: Path) -> dict[str, list[str]]:
    """Return the commands of the alternatives, by name. `scratch` is a folder for the data."""
    stream = write_stream(scratch / "stream", VOCABULARY, tokens=400_000)
    plain = scratch / "plain"
    plain.mkdir()
    for link, target in {"dict.txt": "dict.txt", "train": "mega_batch_1/train", "valid": "valid/valid"}.items():
        for suffix in ("",) if link == "dict.txt" else (".bin", ".idx"):
            (plain / (link + suffix)).symlink_to(stream / (target + suffix))
    common = [
        *("--tokens-per-sample", LENGTH, "--batch-size", sequences, "--sample-break-mode", "none", "--dropout", 0.1),
        *("--adam-betas", "(0.9, 0.98)", "--adam-eps", 1e-8, "--clip-norm", 1.0, "--lr", 5e-4),
        *("--lr-scheduler", "polynomial_decay", "--warmup-updates", 4000, "--total-num-update", 100_000),
        *("--max-update", 100_000, "--seed", 0, "--num-workers", 0, "--log-format", "json", "--log-interval", 1),
        *("--no-save", "--disable-validation", *(["--cpu"] if options.device == "cpu" else [])),
    ]
    layers, dim, heads = SIZES[options.arch]
    theirs = [plain, "--task", "language_modeling", "--arch", "transformer_lm", "--criterion", "cross_entropy"]
    theirs += ["--decoder-layers", layers, "--decoder-embed-dim", dim, "--decoder-ffn-embed-dim", 4 * dim]
    theirs += ["--decoder-attention-heads", heads, "--decoder-learned-pos", "--max-target-positions", 1024]
    theirs += ["--share-decoder-input-output-embed", "--decoder-normalize-before", "--optimizer", "adam"]
    theirs += ["--fp16"] if options.device == "cuda" else []
    ours = [stream, "--user-dir", ROOT / "fairseq_alma", "--task", "alma_lm", "--arch", options.arch]
    ours += ["--criterion", "switch_lm", "--optimizer", "fused_adam"]
    bfloat16 = ["--precision", "bfloat16", "--num-experts"]
    loop = [sys.executable, ROOT / "benchmarks" / "_plain_loop.py", "--arch", options.arch, "--sequences", sequences]
    loop += ["--device", options.device, *(word for folder in options.peers for word in ("--peers", folder))]
    commands = {
        FAIRSEQ: fairseq_train(*theirs, *common),
        "ours, float32, dropless": fairseq_train(*ours, "--num-experts", 4, "--capacity-factor", 0, *common),
        "ours, bfloat16, dropless": fairseq_train(*ours, *bfloat16, 4, "--capacity-factor", 0, *common),
        OURS: fairseq_train(*ours, *bfloat16, 4, *common),
        "ours, bfloat16, capacity 1, 12 experts": fairseq_train(*ours, *bfloat16, 12, *common),
        PLAIN: list(map(str, loop)),
    }
    if options.peers:
        commands[HF] = [*map(str, loop), "--model", "hf"]
    return commands


def measure(commands: Mapping[str, list[str]], repeats: int, device: str) -> dict[str, tuple[list[float], list[float]]]:
    """Run the commands and measure `repeats` updates of each.

    Returns:
        For each command, the seconds of each measured update, and the percentage of dropped tokens.
    """
    environment = {
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    measured: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in commands}
    skipped = SKIPPED_UPDATES[device]
    if device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        processes = {name: StepByStep(command, environment, _is_update) for name, command in commands.items()}
        try:
            for update in range(skipped + repeats):
                for name, process in processes.items():
                    seconds, line = process.next()
                    if update >= skipped:
                        _add(measured[name], seconds, line)
        finally:
            for process in processes.values():
                process.end()
        return measured
    for _ in range(ROUNDS):
        for name, command in commands.items():
            updates = timed_lines(command, environment, _is_update)
            for seconds, line in islice(updates, skipped, skipped + -(-repeats // ROUNDS)):
                _add(measured[name], seconds, line)
            updates.close()
    return measured


def _is_update(line: str) -> bool:
    return "| train_inner |" in line


def _add(measured: tuple[list[float], list[float]], seconds: float, line: str) -> None:
    """Add the seconds of an update, and the percentage of dropped tokens in its log line."""
    values = json.loads(line[line.index("{") :])
    measured[0].append(seconds)
    measured[1].append(float(values.get("overflow_percent", values.get("train_overflow_percent", "nan"))))


def _section(
    measured: Mapping[str, tuple[list[float], list[float]]], options: argparse.Namespace, sequences: int
) -> list[str]:
    """Return the lines of the report."""
    rows = []
    for name, (seconds, dropped) in measured.items():
        of_fairseq = ratio_columns(measured[FAIRSEQ][0], seconds)[1]
        of_plain = ratio_columns(measured[PLAIN][0], seconds)[1]
        rate = sequences * LENGTH / statistics.median(seconds)
        share = statistics.mean(dropped)
        rows.append([
            name, f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}", f"{rate:,.0f}",
            "" if share != share else f"{share:.1f}%", f"{of_fairseq:.2f}", f"{of_plain:.2f}",
        ])  # fmt: skip
    ours = measured[OURS][0]
    targets = [
        ("against fairseq's transformer_lm", FAIRSEQ, 1.9 if options.device == "cpu" else 3.0),
        ("against the plain loop with our model", PLAIN, 0.95),
        *([("against HF Switch", HF, 3.0)] if HF in measured and options.device == "cuda" else []),
    ]
    header = ["", "s an update, smallest", "median", "tokens/s", "dropped", "of fairseq's rate", "of the plain loop's"]
    clock = "CPU time, one thread" if options.device == "cpu" else "time that passes"
    lines = [
        f"{sequences} sequences of {LENGTH} tokens in an update, {VOCABULARY:,} words, dropout 0.1, Adam, clipping; "
        f"{clock}; {len(ours)} updates each after {SKIPPED_UPDATES[options.device]} that are not measured. "
        "transformer_lm has the same active size, in "
        f"{'float32' if options.device == 'cpu' else 'fp16'}, the fastest way of fairseq. Adam updates the parameters "
        "of all experts, of which transformer_lm has none. In the first updates, the router is not balanced and drops "
        "many tokens, which makes capacity 1 look cheaper: compare the dropless rows.",
        "",
        *table(header, rows),
        "",
    ]
    for text, name, target in targets:
        ratio = ratio_columns(measured[name][0], ours)[1]
        lines.append(
            f"- {OURS} {text}: {ratio:.2f} of its tokens/s (target: {target}): {verdict(ratio, target, False)}"
        )
    return lines


def fairseq_train(*options: object) -> list[str]:
    """Return the command that starts fairseq-train with the given options."""
    return [sys.executable, "-m", "fairseq_cli.train", *map(str, options)]


if __name__ == "__main__":
    main()

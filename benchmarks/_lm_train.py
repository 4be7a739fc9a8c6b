"""Part (b) of lm_quick.py: compare the training speed of switch_lm_base with that of fairseq's transformer_lm."""

import json
import statistics
import sys
from pathlib import Path

from _common import ROOT, StepByStep, ratio_columns, table, verdict
from _lm_stream import write_stream

VOCABULARY = 50_264  # size of a fairseq dictionary for the 50,257 symbols of GPT-2, with special and padding symbols
SEQUENCE_TOKENS, SEQUENCES = 512, 4
MODEL_DIM, FFN_DIM = 512, 2048
SKIPPED_UPDATES = 2  # not measured, because Adam allocates its state in the first update
TARGET = 0.85
"""Smallest ratio that passes: tokens per second of switch_lm_base / tokens per second of transformer_lm."""


def measure_train(repeats: int, scratch: Path) -> list[str]:
    """Measure updates of fairseq-train, and return the lines of part (b) of the report.

    Args:
        repeats: number of measured updates of each model.
        scratch: folder for temporary files.
    """
    stream = write_stream(scratch / "train_stream", VOCABULARY, tokens=400_000)
    plain = scratch / "train_plain"
    plain.mkdir()
    for link, target in {"dict.txt": "dict.txt", "train": "mega_batch_1/train", "valid": "valid/valid"}.items():
        for suffix in ("",) if link == "dict.txt" else (".bin", ".idx"):
            (plain / (link + suffix)).symlink_to(stream / (target + suffix))
    common = [
        *("--tokens-per-sample", SEQUENCE_TOKENS, "--batch-size", SEQUENCES, "--sample-break-mode", "none"),
        *("--dropout", 0.1, "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", 1e-8),
        *("--clip-norm", 1.0, "--lr", 5e-4, "--lr-scheduler", "polynomial_decay", "--warmup-updates", 4000),
        *("--total-num-update", 100_000, "--max-update", 100_000, "--seed", 0, "--num-workers", 0),
        *("--log-format", "json", "--log-interval", 1, "--no-save", "--disable-validation"),
    ]
    theirs = [plain, "--task", "language_modeling", "--arch", "transformer_lm", "--criterion", "cross_entropy"]
    theirs += ["--decoder-layers", 6, "--decoder-embed-dim", MODEL_DIM, "--decoder-ffn-embed-dim", FFN_DIM]
    theirs += ["--decoder-attention-heads", 8, "--decoder-learned-pos", "--max-target-positions", 1024]
    theirs += ["--share-decoder-input-output-embed", "--decoder-normalize-before"]
    ours = [stream, "--user-dir", ROOT / "fairseq_alma", "--task", "alma_lm", "--arch", "switch_lm_base"]
    ours += ["--num-experts", 4, "--criterion", "switch_lm"]
    commands = {
        "transformer_lm": theirs,
        "switch_lm_base, dropless": [*ours, "--capacity-factor", 0],
        "switch_lm_base, capacity 1": [*ours, "--capacity-factor", 1],
    }
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = {
        name: StepByStep(fairseq_train(*options, *common), environment, lambda line: "| train_inner |" in line)
        for name, options in commands.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    dropped: dict[str, list[float]] = {name: [] for name in processes}
    try:
        for update in range(SKIPPED_UPDATES + repeats):
            for name, process in processes.items():
                cpu_seconds, line = process.next()
                if update >= SKIPPED_UPDATES:
                    seconds[name].append(cpu_seconds)
                    values = json.loads(line[line.index("{") :])
                    dropped[name].append(float(values.get("train_overflow_percent", values.get("overflow_percent", 0))))
    finally:
        for process in processes.values():
            process.end()
    rows = []
    for name, ours_seconds in seconds.items():
        best, median, spread = ratio_columns(seconds["transformer_lm"], ours_seconds)
        tokens_per_second = SEQUENCES * SEQUENCE_TOKENS / statistics.median(ours_seconds)
        columns = [name, f"{min(ours_seconds):.2f}", f"{statistics.median(ours_seconds):.2f}"]
        columns += [f"{tokens_per_second:.0f}", f"{statistics.mean(dropped[name]):.1f}%"]
        if name == "transformer_lm":
            rows.append([*columns, "1", "1", "", ""])
        else:
            columns += [f"{best:.3f}", f"{median:.3f}", f"{spread:.2f}"]
            rows.append([*columns, verdict(median, TARGET, at_most=False)])
    return _section(rows, repeats)


def _section(rows: list[list[str]], repeats: int) -> list[str]:
    """Return the lines of the report, from the rows of its table and the number of measured updates."""
    header = ["", "CPU s an update, smallest", "median", "tokens per CPU second", "tokens dropped"]
    header += ("tokens/s ratio of minima", "ratio, median", "spread of ratios", f"at least {TARGET}")
    return [
        "## (b) `fairseq-train`: `switch_lm_base` against fairseq's own `transformer_lm` of the same active size",
        "",
        f"Real processes on the same .bin, 6 layers, d = {MODEL_DIM}, ffn = {FFN_DIM}, 8 heads, {VOCABULARY:,} words, "
        f"learned positions, tied embeddings, dropout 0.1, Adam, clipping; ours with E = 4 in every other layer. "
        f"{SEQUENCES} sequences of {SEQUENCE_TOKENS} an update, fp32, 1 thread. The processes take turns update by "
        f"update; {repeats} updates each are measured after {SKIPPED_UPDATES} that are not, from the end of one update "
        "to the end of the next: batches, forward, backward, clipping, Adam and log line, without start, validation "
        "and checkpoint. Adam updates 3 (E - 1) = 9 more feed-forward networks in ours. "
        "Dropped tokens make capacity 1 look cheaper. In the first updates many tokens are dropped, because the router "
        "is not balanced yet. Compare the dropless row.",
        "",
        *table(header, rows),
    ]


def fairseq_train(*options: object) -> list[str]:
    """Return the command that starts fairseq-train with the given options."""
    return [sys.executable, "-m", "fairseq_cli.train", *map(str, options)]

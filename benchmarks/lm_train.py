"""Compare the training speed of switch_lm_base with fairseq's transformer_lm, Hugging Face's Switch and a plain loop.

.venv/bin/python benchmarks/lm_train.py                    on the CPU, printed, in about fifteen minutes
.venv/bin/python benchmarks/lm_train.py --peers FOLDER     with transformers from FOLDER (pip install --target FOLDER)
.venv/bin/python benchmarks/lm_train.py --device cuda --arch switch_lm_large
.venv/bin/python benchmarks/lm_train.py --compiled         only ours with compiled layers, and a compiled plain loop
.venv/bin/python benchmarks/lm_train.py --write            also written to benchmarks/lm_train.md

All alternatives are whole processes that train on sequences of 512 tokens. Ours are the processes that alma-lm starts
(train_member). A measurement lasts from one line of the log to the next: batches, forward and backward pass, clipping,
optimizer and log line, without start, validation and checkpoints. On a CPU, they take turns update by update, and the
CPU time of one thread is measured. On a GPU, which continues to compute while a process is stopped, they take turns
ROUNDS times, each alone, and the time that passes is measured, in steps of 10 updates. Each ratio is that of the
medians. The exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from _common import ROOT, StepByStep, provenance, table, timed_lines, verdict, write_part
from _lm_stream import write_stream
from fairseq import options as options_of_fairseq
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

import fairseq_alma

VOCABULARY = 50_264  # size of a fairseq dictionary for the 50,257 symbols of GPT-2, with special and padding symbols
LENGTH = 512
SEQUENCES = {"cpu": 4, "cuda": 64}
"""Device -> number of sequences in an update."""
UPDATES_PER_LINE = {"cpu": 1, "cuda": 10}
"""Device -> number of updates between two lines of the log. For each line, the host waits for the GPU."""
SKIPPED_UPDATES = {"cpu": 2, "cuda": 20}
"""Device -> number of first updates that are not measured. In the first one, Adam allocates its state, and layers are
compiled."""
ROUNDS = 2
"""How often each alternative runs on a GPU."""
SIZES = {"switch_lm_tiny": (4, 128, 4), "switch_lm_base": (6, 512, 8), "switch_lm_large": (12, 768, 12)}
"""Architecture -> number of layers, width and number of heads, for fairseq's model of the same active size."""
PARTS = {
    f"{arch} on {device}{part}": f"benchmarks/lm_train.py --device {device} --arch {arch} {option}"
    for arch, device in (("switch_lm_base", "cpu"), ("switch_lm_base", "cuda"), ("switch_lm_large", "cuda"))
    for part, option in (("", "--peers FOLDER"), *([(", compiled", "--compiled")] if device == "cuda" else []))
}
"""Part of the report -> the command that fills it."""
FAIRSEQ, PLAIN, HF = "fairseq transformer_lm", "plain loop, our model, bfloat16", "plain loop, HF Switch, bfloat16"
OURS = "ours, bfloat16, capacity 1"
COMPILED, PLAIN_COMPILED = f"{OURS}, compiled", f"{PLAIN}, compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SEQUENCES, default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--arch", choices=SIZES, default="switch_lm_base", help="model (default: switch_lm_base)")
    parser.add_argument("--repeats", type=int, help="number of measured updates (default: 10; cuda: 200)")
    parser.add_argument("--compiled", action="store_true", help="measure compiled layers, beside a compiled plain loop")
    parser.add_argument("--sequences", type=int, help=f"sequences in an update (default: {SEQUENCES})")
    parser.add_argument("--peers", action="append", default=[], help="folder with transformers; may be repeated")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_train.md")
    options = parser.parse_args()
    fairseq_alma.register()
    load_at_start, is_gpu = os.getloadavg()[0], options.device == "cuda"
    options.repeats = options.repeats or (200 if is_gpu else 10)
    sequences = options.sequences or SEQUENCES[options.device]
    with tempfile.TemporaryDirectory(prefix="lm_train_") as scratch:
        commands = _commands(options, sequences, Path(scratch))
        measured = measure(commands, options.repeats, options.device)
    text = "\n".join([*_section(measured, options, sequences), "", *provenance(load_at_start)])
    print(text)
    if options.write:
        introduction = "# Speed of training\n\nWritten by `benchmarks/lm_train.py --write`."
        part = f"{options.arch} on {options.device}{', compiled' if options.compiled else ''}"
        write_part(introduction, PARTS, part, text.splitlines())


def _commands(options: argparse.Namespace, sequences: int, scratch: Path) -> dict[str, list[str]]:
    """Return the commands of the alternatives, by name. `scratch` is a folder for the data."""
    # On a GPU, one epoch: its last batch is smaller, and not compiled.
    num_updates = 2 * (options.repeats + SKIPPED_UPDATES[options.device])
    tokens = sequences * LENGTH * num_updates if options.device == "cuda" else 400_000
    stream = write_stream(scratch / "stream", VOCABULARY, tokens)
    plain = scratch / "plain"
    plain.mkdir()
    for link, target in {"dict.txt": "dict.txt", "train": "mega_batch_1/train", "valid": "valid/valid"}.items():
        for suffix in ("",) if link == "dict.txt" else (".bin", ".idx"):
            (plain / (link + suffix)).symlink_to(stream / (target + suffix))
    common = [
        *("--tokens-per-sample", LENGTH, "--batch-size", sequences, "--sample-break-mode", "none", "--dropout", 0.1),
        *("--adam-betas", "(0.9, 0.98)", "--adam-eps", 1e-8, "--clip-norm", 1.0, "--lr", 5e-4),
        *("--lr-scheduler", "polynomial_decay", "--warmup-updates", 4000, "--total-num-update", 100_000),
        *("--max-update", 100_000, "--seed", 0, "--num-workers", 0, "--log-format", "json"),
        *("--log-interval", UPDATES_PER_LINE[options.device]),
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

    def train_member(*words: object) -> list[str]:
        """Return the command with which alma-lm would train a member with these options of fairseq-train."""
        folder = scratch / f"member_{len(list(scratch.glob('member_*')))}"
        folder.mkdir()
        words = (*words, *common, "--save-dir", folder)
        arguments = options_of_fairseq.parse_args_and_arch(options_of_fairseq.get_training_parser(), [*map(str, words)])
        OmegaConf.save(convert_namespace_to_omegaconf(arguments), folder / "config.yaml")
        return [sys.executable, "-m", "fairseq_alma.lm.train_member", str(folder / "config.yaml")]

    loop = [sys.executable, ROOT / "benchmarks" / "_plain_loop.py", "--arch", options.arch, "--sequences", sequences]
    loop += ["--device", options.device, "--log-interval", UPDATES_PER_LINE[options.device]]
    loop += [*(word for folder in options.peers for word in ("--peers", folder))]
    if options.compiled:
        compiled = train_member(*ours, *bfloat16, 4, "--compile-batch", sequences)
        return {COMPILED: compiled, PLAIN_COMPILED: [*map(str, loop), "--compile"]}
    commands = {
        FAIRSEQ: fairseq_train(*theirs, *common),
        "ours, float32, dropless": train_member(*ours, "--num-experts", 4, "--capacity-factor", 0),
        "ours, bfloat16, dropless": train_member(*ours, *bfloat16, 4, "--capacity-factor", 0),
        OURS: train_member(*ours, *bfloat16, 4),
        "ours, bfloat16, capacity 1, 12 experts": train_member(*ours, *bfloat16, 12),
        PLAIN: list(map(str, loop)),
    }
    if options.peers:
        commands[HF] = [*map(str, loop), "--model", "hf"]
    return commands


@dataclass
class Measured:
    """The measurements of one alternative."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of an update, one number for each line of the log."""
    dropped: list[float] = field(default_factory=list)
    """Percentage of dropped tokens in the same lines; NaN if the alternative does not log it."""
    compile_seconds: float | None = None
    """Seconds that compiling has taken, all before the measurements; None: nothing is compiled."""

    def add(self, seconds: float, line: str) -> None:
        """Add the seconds of an update, and what its line of the log says."""
        values = json.loads(line[line.index("{") :])
        self.seconds.append(seconds)
        self.dropped.append(float(values.get("overflow_percent", values.get("train_overflow_percent", "nan"))))
        if "compile_seconds" in values:
            self.compile_seconds = float(values["compile_seconds"])

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def measure(commands: Mapping[str, list[str]], repeats: int, device: str) -> dict[str, Measured]:
    """Run the commands and measure `repeats` updates of each."""
    environment = {
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    measured = {name: Measured() for name in commands}
    per_line = UPDATES_PER_LINE[device]
    skipped = SKIPPED_UPDATES[device] // per_line
    if device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        processes = {name: StepByStep(command, environment, _is_update) for name, command in commands.items()}
        try:
            for update in range(skipped + repeats):
                for name, process in processes.items():
                    seconds, line = process.next()
                    if update >= skipped:
                        measured[name].add(seconds, line)
        finally:
            for process in processes.values():
                process.end()
        return measured
    for _ in range(ROUNDS):
        for name, command in commands.items():
            lines = timed_lines(command, environment, _is_update)
            for seconds, line in islice(lines, skipped, skipped + -(-repeats // (ROUNDS * per_line))):
                measured[name].add(seconds / per_line, line)
            lines.close()
    return measured


def _is_update(line: str) -> bool:
    return "| train_inner |" in line


def _section(measured: Mapping[str, Measured], options: argparse.Namespace, sequences: int) -> list[str]:
    """Return the lines of the report."""
    rows, references = [], [name for name in (FAIRSEQ, PLAIN, PLAIN_COMPILED) if name in measured]
    for name, one in measured.items():
        share = statistics.mean(one.dropped)
        rows.append([
            name, f"{min(one.seconds):.3f}", f"{one.median:.3f}", f"{sequences * LENGTH / one.median:,.0f}",
            "" if share != share else f"{share:.1f}%", "" if one.compile_seconds is None else one.compile_seconds,
            *(f"{measured[other].median / one.median:.2f}" for other in references),
        ])  # fmt: skip
    is_cpu = options.device == "cpu"
    targets = [
        (OURS, FAIRSEQ, 1.9 if is_cpu else 3.0),
        (OURS, PLAIN, 0.95),
        *([] if is_cpu else [(OURS, HF, 3.0)]),
        (COMPILED, PLAIN_COMPILED, 0.95),
    ]
    header = [
        "", "s an update, smallest", "median", "tokens/s", "dropped", "compiling, s",
        *(f"of the rate of {name}" for name in references),
    ]  # fmt: skip
    clock = "CPU time, one thread" if is_cpu else "time that passes"
    explanation = (
        f"{sequences} sequences of {LENGTH} tokens in an update, {VOCABULARY:,} words, dropout 0.1, Adam, clipping; "
        f"{clock}; {options.repeats} updates each after {SKIPPED_UPDATES[options.device]} that are not measured. "
        "Ratios are those of the medians."
    )
    if FAIRSEQ in measured:
        explanation += (
            f" transformer_lm has the same active size, in {'float32' if is_cpu else 'fp16'}, the fastest way of "
            "fairseq. Adam updates the parameters of all experts, of which transformer_lm has none. In the first "
            "updates, the router is not balanced and drops many tokens, which makes capacity 1 look cheaper: compare "
            "the dropless rows."
        )
    lines = [
        explanation,
        "",
        *table(header, rows),
        "",
    ]
    for name, other, target in targets:
        if name not in measured or other not in measured:
            continue
        ratio = measured[other].median / measured[name].median
        lines.append(f"- {name}: {ratio:.2f} of the tokens/s of {other} (target: {target}): "
                     f"{verdict(ratio, target, False)}")  # fmt: skip
    return lines


def fairseq_train(*options: object) -> list[str]:
    """Return the command that starts fairseq-train with the given options."""
    return [sys.executable, "-m", "fairseq_cli.train", *map(str, options)]


if __name__ == "__main__":
    main()

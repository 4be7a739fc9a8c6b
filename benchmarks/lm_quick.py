"""The floor for the speed of the language-model stream, in one run of about ten minutes on two cores.

.venv/bin/python benchmarks/lm_quick.py                     all parts, to the screen
.venv/bin/python benchmarks/lm_quick.py --write             and into benchmarks/lm_quick.md
.venv/bin/python benchmarks/lm_quick.py --parts layer prep --repeats 5

Machines are noisy, so what is compared takes turns, times are CPU times, and a ratio is shown twice: that of
the two smallest times, and the median over the ratios of neighbours in time, which the verdict goes by.
A benchmark judges nothing: the exit status is 0 whether targets are met or not.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from _common import (
    ROOT,
    StepByStep,
    cpu_seconds_of,
    provenance,
    ratio_columns,
    table,
    tree_cpu_seconds,
    verdict,
)

from data_prep.dictionary import EOS, NUM_SPECIAL
from data_prep.mmap_writer import MMapWriter, best_dtype

MODEL_DIM, FFN_DIM, NUM_TOKENS = 512, 2048, 4096
NUM_EXPERTS = (4, 8, 12)
LAYER_TARGET, TRAIN_TARGET, PREP_TARGET, START_TARGET_SECONDS = 1.2, 0.85, 0.5, 10.0

VOCABULARY = 50_264  # words of a fairseq dictionary for 50 257 symbols: GPT-2's
SEQUENCE_TOKENS, SEQUENCES = 512, 4
SKIPPED_UPDATES = 2  # Adam makes its state in the first

PREP_MEGA_BATCHES, PREP_VOCABULARY = 4, 50_000
PREP_SPLITS = ("mega_batch_1", "valid", "mega_batch_2", "mega_batch_3", "mega_batch_4", "test")
SMALLEST_TEXT_BYTES = 10_000_000


# (a) One mixture layer


def measure_layer(repeats: int, threads: Sequence[int]) -> list[str]:
    from launch.local import SPIN

    os.environ |= SPIN  # as in a stage; read when torch is loaded
    import torch
    from torch import nn

    from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward

    torch.manual_seed(0)
    x_TD = torch.randn(NUM_TOKENS, MODEL_DIM, requires_grad=True)
    grad_TD = torch.randn(NUM_TOKENS, MODEL_DIM)
    dense = nn.Sequential(nn.Linear(MODEL_DIM, FFN_DIM), nn.ReLU(), nn.Linear(FFN_DIM, MODEL_DIM))
    mixtures = {
        (num_experts, factor): SwitchFeedForward(MODEL_DIM, FFN_DIM, num_experts, capacity_factor=factor)
        for num_experts in NUM_EXPERTS
        for factor in (0.0, 1.0)
    }

    def seconds_of(module: nn.Module) -> tuple[float, float]:
        module.zero_grad(set_to_none=True)
        x_TD.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        output = module(x_TD)
        if module is dense:
            output.backward(grad_TD)
        else:  # as in training, where the balance loss teaches the router
            torch.autograd.backward([output.y_TD, output.routing.balance_loss], [grad_TD, torch.tensor(0.01)])
        return time.process_time() - cpu, time.perf_counter() - wall

    shuffled, rows = random.Random(0), []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        times: dict = {key: [] for key in ["dense", *mixtures]}
        for repeat in range(-1, repeats):  # the first is a warm-up
            order = list(times)
            shuffled.shuffle(order)
            for key in order:
                seconds = seconds_of(dense if key == "dense" else mixtures[key])
                if repeat >= 0:
                    times[key].append(seconds)
        cpu_dense, wall_dense = zip(*times["dense"], strict=True)
        for (num_experts, factor), mixture in mixtures.items():
            cpu, wall = zip(*times[num_experts, factor], strict=True)
            best, median, _ = ratio_columns(cpu, cpu_dense)
            with torch.no_grad():
                dropped = mixture(x_TD).num_dropped / NUM_TOKENS
            rows.append(
                (
                    "none: dropless" if factor == 0 else f"{factor:g}",
                    num_experts,
                    num_threads,
                    f"{dropped:.1%}",
                    f"{1000 * min(cpu_dense):.0f}",
                    f"{1000 * min(cpu):.0f}",
                    f"{best:.2f}",
                    f"{median:.2f}",
                    f"{ratio_columns(wall, wall_dense)[1]:.2f}",
                    verdict(median, LAYER_TARGET, at_most=True) if num_experts == 4 else "",
                )
            )
    rows.sort(key=lambda row: (row[2], row[0] == "1"))
    header = ("capacity factor", "E", "threads", "tokens dropped", "dense CPU ms", "mixture CPU ms")
    header += ("CPU ratio of minima", "CPU ratio, median", "wall ratio, median", f"at E = 4 at most {LAYER_TARGET}")
    return [
        "## (a) Mixture layer against a dense feed-forward network of the same active size",
        "",
        f"Forward and backward, {NUM_TOKENS} tokens, d = {MODEL_DIM}, ffn = {FFN_DIM}, fp32, gradients of input and "
        f"weights, router and balance loss included; {repeats} rounds in random order; threads that wait spin as "
        f"briefly as in a stage ({', '.join(f'{name}={value}' for name, value in SPIN.items())}). The like-for-like is "
        "dropless: "
        "at capacity factor 1 dropped tokens are not computed, which makes the layer look cheaper by their share.",
        "",
        *table(header, rows),
    ]


# (b) fairseq-train


def measure_train(repeats: int, scratch: Path) -> list[str]:
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
            rows.append([*columns, verdict(median, TRAIN_TARGET, at_most=False)])
    header = ("", "CPU s an update, smallest", "median", "tokens per CPU second", "tokens dropped")
    header += ("tokens/s ratio of minima", "ratio, median", "spread of ratios", f"at least {TRAIN_TARGET}")
    return [
        "## (b) `fairseq-train`: `switch_lm_base` against fairseq's own `transformer_lm` of the same active size",
        "",
        f"Real processes on the same .bin, 6 layers, d = {MODEL_DIM}, ffn = {FFN_DIM}, 8 heads, {VOCABULARY:,} words, "
        f"learned positions, tied embeddings, dropout 0.1, Adam, clipping; ours with E = 4 in every other layer. "
        f"{SEQUENCES} sequences of {SEQUENCE_TOKENS} an update, fp32, 1 thread. The processes take turns update by "
        f"update; {repeats} updates each after {SKIPPED_UPDATES} that are not counted, from the end of one update to "
        "the end of the next: batches, forward, backward, clipping, Adam, log line; no start, no validation, no "
        "checkpoint. Ours has 3 (E - 1) = 9 more networks of weights for Adam to update. "
        "Dropped tokens make capacity 1 look cheaper, and in the first updates they are many: the router has learnt no "
        "balance yet. The like-for-like is dropless.",
        "",
        *table(header, rows),
    ]


def fairseq_train(*options: object) -> list[str]:
    return [sys.executable, "-m", "fairseq_cli.train", *map(str, options)]


# (c) alma-prep


def measure_prep(repeats: int, scratch: Path) -> list[str]:
    books, text_label = find_text(scratch)
    texts = scratch / "prep_texts"
    steps, rival, rival_pure, rival_steps = [], [], [], []
    for repeat in range(repeats):
        stream = scratch / f"prep_stream_{repeat}"
        steps.append(seconds_of_alma_prep(books, stream))
        if repeat == 0:
            write_texts(stream, texts)
        out = scratch / f"prep_rival_{repeat}"
        rival_steps.append(seconds_of_rival(stream, texts, out))
        rival.append(sum(rival_steps[-1].values()))
        rival_pure.append(sum(seconds for name, seconds in rival_steps[-1].items() if "start" not in name))
        check_same_bytes(stream, out)
    total = [sum(step.values()) for step in steps]
    training = [step["train byte-bpe"] for step in steps]
    no_training = [a - b for a, b in zip(total, training, strict=True)]
    compared = {
        "text files to `.bin/.idx`: the whole of `alma-prep` but training; rival: both commands": (no_training, rival),
        "encode step alone; rival: both commands less their start": ([step["encode"] for step in steps], rival_pure),
        "the whole of `alma-prep`; rival: the same seconds of training added": (
            total,
            [a + b for a, b in zip(rival, training, strict=True)],
        ),
    }
    rows = []
    for name, (ours, theirs) in compared.items():
        best, median, spread = ratio_columns(ours, theirs)
        result = verdict(median, PREP_TARGET, at_most=True) if name.startswith("text files") else "(no target)"
        columns = [name, f"{statistics.median(theirs):.1f}", f"{statistics.median(ours):.1f}"]
        rows.append([*columns, f"{best:.2f}", f"{median:.2f}", f"{spread:.2f}", result])
    stream_json = json.loads((scratch / "prep_stream_0" / "stream.json").read_text())
    tokens = sum(split["tokens"] for split in stream_json["splits"].values())
    header = ("CPU seconds", "rival", "alma-prep", "ratio of minima", "ratio, median", "spread of ratios")
    return [
        "## (c) `alma-prep` against tokenizing to text and `fairseq-preprocess`",
        "",
        f"{text_label}, {tokens:,} tokens, byte-level BPE with {stream_json['vocab_size']:,} symbols, "
        f"{PREP_MEGA_BATCHES} mega-batches, `--workers 1`; {repeats} rounds in turn. The rival gets the passages of "
        "each split ready made, in order, and the trained tokenizer: encode_batch_fast to a file of symbols, one "
        "thread, then one `fairseq-preprocess --only-source --dataset-impl mmap --srcdict dict.txt --workers 1` for "
        "all six splits. Both make the same .bin and .idx, byte for byte (checked in each round). alma-prep also "
        "reads and copies the sources, draws the partition, counts, takes digests and syncs to disk. Its encoding "
        "looks words up that it has encoded before, beginning with none in each run: part of what it saves, and "
        "fair, for the bytes are the same; the rest is the way through text. Training the tokenizer costs both the "
        "same.",
        "",
        *table([*header, f"at most {PREP_TARGET}"], rows),
        "",
        f"By step, median CPU seconds. `alma-prep`: {_by_step(steps)}. Rival: {_by_step(rival_steps)}.",
    ]


def _by_step(steps: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{name} {statistics.median(step[name] for step in steps):.1f}" for name in steps[0])


def find_text(scratch: Path) -> tuple[Path, str]:
    """A folder of text of at least SMALLEST_TEXT_BYTES, and what to call it."""
    data = os.environ.get("ALMA_DATA")
    if data and (Path(data) / "books").is_dir():
        books = Path(data) / "books"
        files = [path for path in books.rglob("*") if path.suffix in (".txt", ".md")]
        size = sum(path.stat().st_size for path in files)
        return books, f"{len(files)} books ($ALMA_DATA/books), {size / 1e6:.1f} MB"
    from data_prep.sources import python_docs

    documents = list(filter(None, (_docstrings(path) for path in python_docs.module_files())))
    copies = -(-SMALLEST_TEXT_BYTES // sum(len(text.encode()) for text in documents))
    folder = scratch / "python_docs"
    folder.mkdir()
    for copy in range(copies):
        (folder / f"{copy}.txt").write_text(f"{copy}\n\n" + "\n\n".join(documents), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return folder, f"python-docs {copies} times over (repetition favours a memory of words), {size / 1e6:.1f} MB"


def _docstrings(path: Path) -> str:
    from data_prep.sources import python_docs

    try:
        text = python_docs.docstrings(path.read_bytes())
        text.encode("utf-8")
    except (SyntaxError, ValueError):
        return ""
    return text


def seconds_of_alma_prep(books: Path, out: Path) -> dict[str, float]:
    """Run alma-prep: its CPU seconds by step, told apart by the lines it prints when a step is done."""
    command = [sys.executable, "-m", "data_prep", out, "--source", f"books:{books}", "--seed", 0]
    command += [
        "--mega-batches",
        PREP_MEGA_BATCHES,
        "--vocab-size",
        PREP_VOCABULARY,
        "--workers",
        1,
        "--duplicates",
        "keep",
    ]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    steps, before, lines = {}, 0.0, []
    for line in process.stderr:
        lines.append(line)
        if match := re.match(r"(read sources|cut long documents|train byte-bpe|encode): ", line):
            now = tree_cpu_seconds(process.pid)
            steps[match[1]], before = now - before, now
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode or len(steps) != 4:
        raise RuntimeError(f"alma-prep: status {process.returncode}, steps {list(steps)}:\n{''.join(lines)}")
    return {**steps, "end": usage.ru_utime + usage.ru_stime - before}


def write_texts(stream: Path, out: Path):
    """The passages of every split, back from tokens to text (byte-level BPE is lossless), a NUL after each."""
    from tokenizers import Tokenizer

    out.mkdir()
    tokenizer = Tokenizer.from_file(str(stream / "tokenizer.json"))
    for split in PREP_SPLITS:
        tokens = np.fromfile(f"{prefix_of(stream, split)}.bin", np.uint16).astype(np.int64)
        sequences = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
        ids = [(sequence[:-1] - NUM_SPECIAL).tolist() for sequence in sequences]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
        (out / split).write_bytes("".join(f"{text}\0" for text in texts).encode())


def seconds_of_rival(stream: Path, texts: Path, out: Path) -> dict[str, float]:
    """CPU seconds of tokenizing to text and of fairseq-preprocess, each apart from its start."""
    symbols = out.with_name(out.name + "_symbols")
    symbols.mkdir()
    script = Path(__file__).with_name("_tokenize_to_text.py")
    command = [sys.executable, script, stream / "tokenizer.json", symbols, *(texts / split for split in PREP_SPLITS)]
    one_thread = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    tokenizing, output = cpu_seconds_of(list(map(str, command)), one_thread)
    encoding = float(output.split()[-1])
    train, *valid, test = (symbols / split for split in PREP_SPLITS)
    preprocess = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--dataset-impl", "mmap"]
    preprocess += ["--srcdict", str(stream / "dict.txt"), "--workers", "1"]
    inputs = ["--trainpref", str(train), "--validpref", ",".join(map(str, valid)), "--testpref", str(test)]
    preprocessing, _ = cpu_seconds_of([*preprocess, *inputs, "--destdir", str(out)], one_thread)
    empty = symbols / "empty"
    empty.write_text("")
    start, _ = cpu_seconds_of([*preprocess, "--trainpref", str(empty), "--destdir", f"{symbols}/start"], one_thread)
    return {
        "start of tokenizing": tokenizing - encoding,
        "tokenize to text": encoding,
        "start of fairseq-preprocess": start,
        "fairseq-preprocess": preprocessing - start,
    }


def check_same_bytes(stream: Path, rival: Path):
    """Raise RuntimeError unless both ways made the same files: only then are their times comparable."""
    names = ["train", *(f"valid{number or ''}" for number in range(PREP_MEGA_BATCHES)), "test"]
    for split, name in zip(PREP_SPLITS, names, strict=True):
        for suffix in ("bin", "idx"):
            ours, theirs = Path(f"{prefix_of(stream, split)}.{suffix}"), rival / f"{name}.{suffix}"
            if ours.read_bytes() != theirs.read_bytes():
                raise RuntimeError(f"{ours} and {theirs} differ: the two ways did not do the same work")


def prefix_of(stream: Path, split: str) -> Path:
    return stream / split / ("train" if split.startswith("mega_batch_") else split)


# (d) The start of a stage


class FirstUpdateSeen(BaseException):
    """Ends a stage when it has been seen to start."""


def measure_start(repeats: int, scratch: Path) -> list[str]:
    from fairseq_alma.core.protocol import Stage
    from fairseq_alma.core.stream_folder import StreamFolder
    from fairseq_alma.lm.learners import make_learner
    from fairseq_alma.lm.settings import LanguageModelSettings
    from launch.local import run_process

    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    folder = StreamFolder.open(write_stream(scratch / "start_stream", 8_000, tokens=200_000))
    (mega_batch,) = folder.stream(1)
    walls, cpus = [], []

    def start(command: list[str], log: Path) -> int:
        wall, cpu = time.perf_counter(), tree_cpu_seconds(os.getpid()) - own_cpu_seconds()

        def on_line(line: str):
            if "| train_inner |" in line:
                walls.append(time.perf_counter() - wall)
                cpus.append(tree_cpu_seconds(os.getpid()) - own_cpu_seconds() - cpu)
                raise FirstUpdateSeen

        return run_process(command, log, on_line)

    class OneProcess:
        kind = "cpu"

        def num_devices(self, num_jobs: int) -> int:
            return 1

        def run(self, stage: Stage, jobs: dict, num_jobs: int) -> dict[int, int | None]:
            return {number: start(command, log) for number, (command, log) in jobs.items()}

    for repeat in range(-1, repeats):  # the first is a warm-up: files come into the cache
        settings = LanguageModelSettings(
            stream=str(folder.path), out=str(scratch / f"start_run_{repeat}"), arch="switch_lm_tiny", updates=20,
            tokens_per_sample=128, sequences_per_update=16, batch_size=16,
        )  # fmt: skip
        learner = make_learner(settings, folder, OneProcess())
        stage = Stage(1, (mega_batch,), (), False, Path(settings.out) / "stages" / "stage_001")
        try:
            learner.train(stage)
        except FirstUpdateSeen:
            continue
        raise RuntimeError(f"no update was logged: see {stage.folder}")
    walls, cpus = walls[1:], cpus[1:]
    row = [f"{min(walls):.1f}", f"{statistics.median(walls):.1f}", f"{max(walls):.1f}"]
    row += [f"{min(cpus):.1f}", f"{statistics.median(cpus):.1f}"]
    row += [verdict(statistics.median(walls), START_TARGET_SECONDS, at_most=True)]
    header = ("", "wall s, smallest", "median", "largest", "CPU s, smallest", "median")
    return [
        "## (d) Start of a stage",
        "",
        "From launching the `fairseq-train` process as the driver does (`switch_lm_tiny`, 8,000 words, E = 4, from the "
        f"untrained checkpoint, the threads torch chooses) to the log line of its first update; {repeats} times "
        "after one warm-up. Wall time means something on an idle machine only.",
        "",
        *table([*header, f"wall, under {START_TARGET_SECONDS:g} s"], [["launch to first update", *row]]),
    ]


def own_cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


# Common to (b) and (d)


def write_stream(folder: Path, dictionary_size: int, tokens: int) -> Path:
    """A stream folder with one mega-batch of random words, frequent and rare ones as in text (Zipf's law)."""
    generator = np.random.default_rng(0)
    num_words = dictionary_size - NUM_SPECIAL
    share = 1 / np.arange(10, num_words + 10)
    folder.mkdir()
    (folder / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(num_words)))
    (folder / "tokenizer.json").write_text("{}")
    splits, dtype = {}, best_dtype(dictionary_size)
    for split, wanted in {"mega_batch_1": tokens, "valid": 4096, "test": 4096}.items():
        prefix = prefix_of(folder, split)
        prefix.parent.mkdir()
        words = generator.choice(num_words, size=wanted, p=share / share.sum()) + NUM_SPECIAL
        with MMapWriter(prefix, dtype) as writer:
            for document in _documents(words, length=500):
                writer.write(document.astype(dtype), np.array([len(document)]))
        splits[split] = {"sequences": -(-wanted // 500), "tokens": wanted, "words": wanted, "sha256": writer.sha256()}
    description = {
        "format_version": 1,
        "num_mega_batches": 1,
        "dictionary_size": dictionary_size,
        "dtype": dtype,
        "tokenizer": {
            "kind": "none",
            "file": "tokenizer.json",
            "dict_sha256": hashlib.sha256((folder / "dict.txt").read_bytes()).hexdigest(),
        },
        "splits": splits,
    }
    (folder / "stream.json").write_text(json.dumps(description))
    return folder


def _documents(words: np.ndarray, length: int) -> Iterator[np.ndarray]:
    for start in range(0, len(words), length):
        document = words[start : start + length].copy()
        document[-1] = EOS
        yield document


PARTS = {"layer": 15, "train": 10, "prep": 3, "start": 5}
"""The parts (a) to (d), and how often each measures."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--repeats", type=int, help=f"how often each part measures; default: {PARTS}")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of (a); (b) and (c) take 1, (d) what torch chooses"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_quick.md (all parts)")
    options = parser.parse_args()
    if options.write and set(options.parts) != set(PARTS):
        parser.error("--write wants all parts")
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    load_at_start = os.getloadavg()[0]
    sections = []
    with tempfile.TemporaryDirectory(prefix="lm_quick_") as scratch:
        for part in options.parts:
            repeats = options.repeats or PARTS[part]
            if part == "layer":
                lines = measure_layer(repeats, options.threads)
            elif part == "train":
                lines = measure_train(repeats, Path(scratch))
            elif part == "prep":
                lines = measure_prep(repeats, Path(scratch))
            else:
                lines = measure_start(repeats, Path(scratch))
            print("\n".join([*lines, ""]), flush=True)
            sections.append("\n".join(lines))
    machine = "\n".join(provenance(load_at_start))
    print(machine)
    if options.write:
        title = "# Speed of the language-model stream\n\nWritten by `benchmarks/lm_quick.py --write`; not edited."
        how = "Ratios: of the smallest CPU times, and the median over neighbours in time, which the verdict goes by."
        text = "\n\n".join([title, machine, how, *sections])
        Path(__file__).with_suffix(".md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

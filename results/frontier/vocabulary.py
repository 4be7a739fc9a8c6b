"""Compare a vocabulary that grows with each period with one that is fixed: does it lower the bits per byte?

python results/frontier/vocabulary.py --dated FOLDER --runs RUNS                      run what has no ledger
python results/frontier/vocabulary.py --dated FOLDER --runs RUNS --only peps --seeds 1      only the proposals, seed 0
python results/frontier/vocabulary.py --dated FOLDER --runs RUNS --larger     only the larger vocabulary (see below)

The streams, the settings and the runs with the fixed vocabulary are the rows "SM" on the causal streams of causal.py.
RUNS is the folder of its runs (its option --out), which must be finished for these seeds. At each arrival from the
second on, `alma-prep grow-vocab` adds NEW symbols, learned from the training text that has just arrived. Then a run of
alma-lm starts from the last model (`init_from`, which gives the new symbols embeddings), and trains one stage as in SM;
`skip_mega_batches` leaves out the periods before. The stage has at most as many training FLOPs: as more symbols cost
more, it has fewer updates. To see what a run of its own for each stage changes, one of them adds no symbols.

A larger vocabulary could help also if it does not grow. So another run has as many symbols from the start as the grown
vocabulary has at the end, learned from the first period, with the same training FLOPs in each stage.

results/rebuild.py makes results/frontier/vocabulary.md of the committed ledgers and of vocabulary_streams.json, which
this script writes: the numbers of words, bytes and tokens of each period, for each tokenizer.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import causal  # noqa: E402
from _grid import copy_results  # noqa: E402
from _texts import SETTINGS, TOKENS_PER_SAMPLE, bits_per_byte, mean_text, run_command, size_of  # noqa: E402

from fairseq_alma.core.ledger import Ledger, LedgerRow  # noqa: E402
from fairseq_alma.core.run_folder import RunFolder  # noqa: E402

NEW = 1000
"""Number of symbols that are added at each arrival from the second on."""
SIZES = HERE / "vocabulary_streams.json"


def _stream(corpus: str, t: int, runs: Path) -> Path:
    """Return the stream whose tokenizer has the symbols up to mega-batch t. Up to t = 1, it is the causal stream.

    What does not exist is made.
    """
    if t == 1:
        return runs / f"{corpus}_causal/stream"
    folder = runs / f"{corpus}_vocabulary_{t}"
    words = ["grow-vocab", _stream(corpus, t - 1, runs), folder / "stream", "--symbols", NEW, "--learn-from", t]
    if not run_command(["alma-prep", *map(str, words)], folder / "stream.log"):
        sys.exit(1)
    return folder / "stream"


def _forward_flops(run: Path) -> int:
    """Return the FLOPs of a forward pass over a sequence, of the model of a run or of a committed ledger."""
    path = next(run.glob("ledger.jsonl*"))
    return Ledger(path).rows()[0].scores.forward_flops


def _symbols(stream: Path) -> int:
    return json.loads((stream / "stream.json").read_text())["vocab_size"]


def _train(corpus: str, t: int, seed: int, is_grown: bool, runs: Path) -> Path:
    """Train the stage of mega-batch t, unless it is trained. Return the run folder."""
    from fairseq_alma.checkpoints import require_checkpoint
    from fairseq_alma.evaluation.vocabulary import EMBEDDINGS

    study = causal.STUDIES[f"{corpus}_causal"]
    fixed = runs / f"{corpus}_causal/{corpus}_causal_sm/seed_{seed}"
    folder = runs / f"{corpus}_{'grown' if is_grown else 'control'}_{t}" / f"seed_{seed}"
    if (folder / "summary.json").exists():
        return folder
    before, stream = (_stream(corpus, one if is_grown else 1, runs) for one in (t - 1, t))
    last, stage = (fixed, t - 1) if t == 2 or not is_grown else (_train(corpus, t - 1, seed, True, runs), 1)
    start = RunFolder(last).member(stage, 1) / "checkpoint_best.pt"
    width = require_checkpoint(start)["model"][EMBEDDINGS].size(1)
    # Each symbol has an inner product of the output layer, for each token of a sequence.
    flops = _forward_flops(last) + 2 * width * TOKENS_PER_SAMPLE * (_symbols(stream) - _symbols(before))
    updates = study.updates_of_stage(runs / f"{corpus}_causal/stream") * _forward_flops(fixed) // flops
    row = study.rows[0]
    words = ["alma-lm", f"stream={stream}", f"out={folder}", *SETTINGS, *study.settings, *row.settings]
    words += [f"mega_batches={t}", f"skip_mega_batches={list(range(1, t))}", f"init_from={start}"]
    if not run_command([*words, f"{row.steps}={updates}", f"seed={seed}"], folder.with_suffix(".log")):
        sys.exit(1)
    return folder


def _large_stream(corpus: str, runs: Path, data: Path) -> Path:
    """Return the causal stream with a larger vocabulary of the first period. It is made if it does not exist."""
    folder = runs / f"{corpus}_large"
    words = causal.STUDIES[f"{corpus}_causal"].prepare(data, folder)
    at = words.index("--vocab-size") + 1
    words[at] = str(int(words[at]) + NEW * (causal.PERIODS - 1))
    if not run_command(["alma-prep", str(folder / "stream"), *words], folder / "stream.log"):
        sys.exit(1)
    return folder / "stream"


def _train_large(corpus: str, seed: int, runs: Path, data: Path) -> Path:
    """Train all stages with the larger vocabulary, unless they are trained. Return the run folder."""
    study, folder = causal.STUDIES[f"{corpus}_causal"], runs / f"{corpus}_large" / f"seed_{seed}"
    if (folder / "summary.json").exists():
        return folder
    # The run with the first vocabulary and the first grown one show what a symbol costs.
    fixed, grown = (
        _forward_flops(HERE / "ledgers" / name / f"seed_{seed}")
        for name in (f"{corpus}_causal_sm", f"{corpus}_grown_2")
    )
    flops = fixed + (grown - fixed) * (causal.PERIODS - 1)
    updates = study.updates_of_stage(runs / f"{corpus}_causal/stream") * fixed // flops
    row = study.rows[0]
    words = ["alma-lm", f"stream={_large_stream(corpus, runs, data)}", f"out={folder}", *SETTINGS, *study.settings]
    words += [*row.settings, f"mega_batches={causal.PERIODS}", f"{row.steps}={updates}", f"seed={seed}"]
    if not run_command(words, folder.with_suffix(".log")):
        sys.exit(1)
    return folder


def _note_sizes(name: str, stream: Path) -> None:
    """Write the sizes of the periods with the tokenizer of a stream into vocabulary_streams.json, under a name."""
    sizes = json.loads(SIZES.read_text()) if SIZES.exists() else {}
    description = json.loads((stream / "stream.json").read_text())
    sizes[name] = {
        "vocabulary": description["vocab_size"],
        "train": [size_of(description["splits"][f"mega_batch_{j}"]) for j in range(1, causal.PERIODS + 1)],
        "test": [size_of(period["test"]) for period in description["periods"]],
    }
    SIZES.write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n")


def run(corpus: str, seeds: int, runs: Path, data: Path) -> None:
    """Train what has no committed ledger, one seed after the other, and copy the ledgers."""
    for t in range(1, causal.PERIODS + 1):
        _note_sizes(f"{corpus}_{t}", _stream(corpus, t, runs))
    tasks = [(seed, t, True) for seed in range(seeds) for t in range(2, causal.PERIODS + 1)]
    # One run without new symbols shows what a run of its own for each stage changes.
    for seed, t, is_grown in [*tasks[: causal.PERIODS - 1], (0, 2, False), *tasks[causal.PERIODS - 1 :]]:
        name = f"{corpus}_{'grown' if is_grown else 'control'}_{t}"
        _run_one(name, seed, runs, data, functools.partial(_train, corpus, t, seed, is_grown, runs))


def run_large(corpus: str, seeds: int, runs: Path, data: Path) -> None:
    """Like `run`, with the larger vocabulary. The other ledgers of these seeds must be committed."""
    _note_sizes(f"{corpus}_large", _large_stream(corpus, runs, data))
    for seed in range(seeds):
        _run_one(f"{corpus}_large", seed, runs, data, functools.partial(_train_large, corpus, seed, runs, data))


def _run_one(name: str, seed: int, runs: Path, data: Path, train: Callable[[], Path]) -> None:
    target = HERE / "ledgers" / name / f"seed_{seed}"
    if not (target / "summary.json").exists():
        copy_results(train(), target, str(data), runs)
        print(f"{name} seed {seed}", flush=True)


def tables() -> dict[str, str]:
    """Return file name -> the tables as Markdown; {} without ledgers."""
    if not SIZES.exists():
        return {}
    sizes = json.loads(SIZES.read_text())
    lines = ["# A vocabulary that grows", "", *_bytes_per_token(sizes)]
    for corpus, heading in causal.CORPORA.items():
        lines += _losses(corpus, heading, sizes)
    return {"vocabulary.md": "\n".join(lines)}


def _bytes_per_token(sizes: Mapping[str, dict]) -> list[str]:
    heading = " | ".join(f"period {t}" for t in range(1, causal.PERIODS + 1))
    lines = [f"| corpus | symbols | {heading} |", f"|:---|---:|{'---:|' * causal.PERIODS}"]
    for corpus, title in causal.CORPORA.items():
        for name in (*range(1, causal.PERIODS + 1), "large"):
            if found := sizes.get(f"{corpus}_{name}"):
                ratios = [f"{part['bytes'] / part['tokens']:.3f}" for part in found["train"]]
                symbols = f"{found['vocabulary']:,}" + " from the start" * (name == "large")
                lines.append(f"| {title} | {symbols} | {' | '.join(ratios)} |")
    return [*lines, "", f"Bytes per token of training text. Each period from the second on adds {NEW} symbols.", ""]


def _losses(corpus: str, heading: str, sizes: Mapping[str, dict]) -> list[str]:
    """Return the lines about the losses on a corpus; [] without ledgers."""
    study = causal.STUDIES[f"{corpus}_causal"]
    fixed = study.rows_by_seed(f"{corpus}_causal_sm")
    lines = []
    later = range(2, causal.PERIODS + 1)
    for arm, title, ts in (
        ("control", "no new symbols", (2,)), ("grown", "grown", later), ("large", "larger from the start", later)
    ):  # fmt: skip
        for t in ts:
            ledgers = study.rows_by_seed(f"{corpus}_large" if arm == "large" else f"{corpus}_{arm}_{t}")
            seeds = sorted(ledgers.keys() & fixed.keys())
            if not seeds:
                continue
            key = {"control": 1, "grown": t, "large": "large"}[arm]
            old, new = (
                [bits_per_byte([_row_at(runs[seed], t)], [{"test": part} for part in test])[t] for seed in seeds]
                for runs, test in ((fixed, sizes[f"{corpus}_1"]["test"]), (ledgers, sizes[f"{corpus}_{key}"]["test"]))
            )
            cells = []
            for part in (slice(0, t - 1), slice(t - 1, t), slice(0, causal.PERIODS)):
                pairs = [(statistics.mean(a[part]), statistics.mean(b[part])) for a, b in zip(old, new, strict=True)]
                cells.append(mean_text([a for a, _ in pairs], digits=3))
                cells.append(mean_text([100 * (b / a - 1) for a, b in pairs], 2, signed=True))
            costs = [sum(_row_at(rows[seed], t).spent.train_flops for seed in seeds) for rows in (ledgers, fixed)]
            lines.append(f"| {t} | {title} | {' | '.join(cells)} | {costs[0] / costs[1]:.3f} | {len(seeds)} |")
    if not lines:
        return []
    columns = "".join(f" {part} | change, % |" for part in ("earlier periods", "newest period", "all periods"))
    note = (
        "Bits per byte of test text with the fixed vocabulary, and by how many percent those with the other one "
        "differ, paired over seeds; negative is better. FLOPs are those of the stage's training, relative to that with "
        "the fixed vocabulary."
    )
    head = f"| t | vocabulary |{columns} FLOPs | seeds |"
    return [f"## {heading}", "", head, f"|---:|:---|{'---:|' * 8}", *lines, "", note, ""]


def _row_at(rows: Sequence[LedgerRow], t: int) -> LedgerRow:
    return next(row for row in rows if row.t == t)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dated", type=Path, help="folder of the text (default: ALMA_DATA/dated)")
    parser.add_argument("--runs", type=Path, default=Path("runs/causal"), help="folder of the runs of causal.py")
    parser.add_argument("--only", default="", help="run only the corpus whose name starts with this")
    parser.add_argument("--seeds", type=int, default=causal.SEEDS, help="number of seeds (default: all of the study)")
    parser.add_argument("--larger", action="store_true", help="run only those with a larger vocabulary from the start")
    arguments = parser.parse_args()
    dated = arguments.dated or Path(os.environ["ALMA_DATA"]) / "dated"
    for corpus in causal.CORPORA:
        if corpus.startswith(arguments.only):
            for one in (run_large,) if arguments.larger else (run, run_large):
                one(corpus, arguments.seeds, arguments.runs.absolute(), dated)

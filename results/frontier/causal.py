"""Compare causal streams with others: how much do results on drift gain from a look at the future?

python results/frontier/causal.py run --dated FOLDER                     train what has no ledger, two runs at a time
python results/frontier/causal.py run --dated FOLDER --only sotu --seeds 1     only the speeches, only seed 0

FOLDER contains sotu.jsonl and peps.jsonl: one JSON object per line, with the fields text and date. Each is cut at the
same dates into five periods, once with --causal and once without. Both streams hold out the same documents of each
period. In the causal stream, the tokenizer, dict.txt and the validation set are those of the first period; in the other
one, those of all periods. A stage has as many updates as half a pass over the largest period; the settings are those of
results/frontier/drift.py, but in float32, because a CPU that has no instructions for bfloat16 is 14 times as slow with
it.

Losses are in bits per byte of the test text of a period, because perplexities of different tokenizers cannot be
compared. In the rows "SM", the validation set chooses the checkpoint of each stage. In the rows "average", nothing
does, so only the tokenizer differs.

results/rebuild.py makes results/frontier/causal.md of the committed ledgers and of causal_streams.json, which this
script writes: the numbers of words, bytes and tokens of each period.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import Row, TextStudy, bits_per_byte, mean_text, period_sizes, training_flops  # noqa: E402

from fairseq_alma.core.ledger import LedgerRow  # noqa: E402
from fairseq_alma.core.metrics import averages_by_part  # noqa: E402

LIMITS = {"sotu": "1851,1890,1913,1973", "peps": "2007,2014,2019,2023"}
"""Name of the corpus -> where its periods begin: at about a fifth of its words each."""
CORPORA = {"sotu": "Speeches of presidents, 1790 to 2026", "peps": "Python's proposals, 1996 to 2026"}
STREAMS = {"causal": "causal", "ahead": "validation and tokenizer of all periods"}
"""Name of the stream -> its name in the table."""
LEARNERS = {"sm": ((), "SM"), "average": (("schedule=constant", "average=power:8"), "average")}
"""Name -> settings, and the name in the table."""
PARTS = {"backward": "earlier periods", "in_distribution": "newest period", "forward": "later periods"}
SIZES = HERE / "causal_streams.json"
PERIODS, SEEDS = 5, 5


@dataclass(frozen=True)
class CausalStudy(TextStudy):
    """The runs on one of the streams of one of the corpora."""

    corpus: str = "sotu"
    stream: str = "causal"
    data: ClassVar[str] = "dated"

    def prepare(self, data: Path, out: Path) -> list[str]:
        words = ["--source", f"text:{data / f'{self.corpus}.jsonl'}", "--partition", "chronological"]
        words += ["--period", LIMITS[self.corpus], "--vocab-size", "8000"]
        if self.stream == "causal":
            return [*words, "--causal"]
        # Of each period, the same shares are held out, so the same documents.
        name = f"{self.corpus}_causal"
        causal = json.loads((STUDIES[name]._make_stream(data, out.parent / name) / "stream.json").read_text())
        total = sum(source["words"] for source in causal["sources"]) - sum(row["words"] for row in causal["cleaning"])
        for part, share in causal["held_out"].items():
            words += [f"--{part}-words", str(round(share * total))]
        return words

    def _make_stream(self, data: Path, out: Path) -> Path:
        stream = super()._make_stream(data, out)
        sizes = json.loads(SIZES.read_text()) if SIZES.exists() else {}
        sizes[f"{self.corpus}_{self.stream}"] = period_sizes(stream)
        others = [periods for name, periods in sizes.items() if name.startswith(f"{self.corpus}_")]
        texts = {tuple((period["test"]["words"], period["test"]["bytes"]) for period in each) for each in others}
        if len(texts) > 1:
            sys.exit(f"the streams of {self.corpus} have other test text: {texts}")
        SIZES.write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n")
        return stream


def _study(corpus: str, stream: str) -> CausalStudy:
    rows = [
        Row(f"{corpus}_{stream}_{name}", ("learner=sm", "experts=4", "wait=1", *more), seeds=tuple(range(SEEDS)))
        for name, (more, _) in LEARNERS.items()
    ]
    return CausalStudy(rows, HERE / "ledgers", ("dropout=0.2",), PERIODS, passes=0.5, corpus=corpus, stream=stream)


STUDIES = {f"{corpus}_{stream}": _study(corpus, stream) for corpus in CORPORA for stream in STREAMS}


def tables() -> dict[str, str]:
    """Return file name -> the tables of vocabularies and of losses; {} without the sizes of the streams."""
    if not SIZES.exists():
        return {}
    sizes = json.loads(SIZES.read_text())
    lines = ["# Streams that know nothing of the future", "", "## Bytes per token by period", "", *_vocabularies(sizes)]
    for corpus, heading in CORPORA.items():
        lines += _losses(corpus, heading, sizes)
    return {"causal.md": "\n".join(lines)}


def _vocabularies(sizes: dict) -> list[str]:
    lines = [
        "| corpus | tokenizer of | " + " | ".join(f"period {t}" for t in range(1, PERIODS + 1)) + " |",
        f"|:---|:---|{'---:|' * PERIODS}",
    ]
    for corpus, heading in CORPORA.items():
        for stream, of in (("causal", "the first period"), ("ahead", "all periods")):
            if periods := sizes.get(f"{corpus}_{stream}"):
                ratios = [f"{period['train']['bytes'] / period['train']['tokens']:.3f}" for period in periods]
                lines.append(f"| {heading} | {of} | {' | '.join(ratios)} |")
    return [*lines, "", "Training text. Both tokenizers have 8,000 symbols.", ""]


def _losses(corpus: str, heading: str, sizes: dict) -> list[str]:
    """Return the lines about the losses on a corpus; [] without ledgers."""
    found = {
        (stream, name): STUDIES[f"{corpus}_{stream}"].rows_by_seed(f"{corpus}_{stream}_{name}")
        for stream in STREAMS
        for name in LEARNERS
    }
    if not found["causal", "sm"]:
        return []
    lines = [
        f"## {heading}: bits per byte",
        "",
        "| learner | stream |" + "".join(f" {part} |" for part in (*PARTS.values(), "after the last arrival"))
        + " seeds | training FLOPs |",
        f"|:---|:---|{'---:|' * (len(PARTS) + 3)}",
    ]  # fmt: skip
    for name, (_, learner) in LEARNERS.items():
        base = found["causal", name]
        for stream, title in STREAMS.items():
            runs = found[stream, name]
            if seeds := sorted(runs.keys() & base.keys()):
                own, other = (
                    [_parts(each[seed], sizes[f"{corpus}_{kind}"]) for seed in seeds]
                    for each, kind in ((runs, stream), (base, "causal"))
                )
                cells = []
                for part in (*PARTS, "last"):
                    text = mean_text([values[part] for values in own], digits=3)
                    changes = [a[part] - b[part] for a, b in zip(own, other, strict=True)]
                    cells.append(text if stream == "causal" else f"{text} ({mean_text(changes, 3, signed=True)})")
                cost = training_flops(runs) / training_flops(base)
                lines.append(f"| {learner} | {title} | {' | '.join(cells)} | {len(seeds)} | {cost:.2f} |")
    note = (
        "Bits per byte of the test text, averaged over periods that arrived earlier, over the period that has just "
        "arrived, and over those that arrive later. In brackets: the difference from the causal stream, paired over "
        "seeds, with its standard error; where it is negative, results on a stream that looks ahead are too good."
    )
    return [*lines, "", note, ""]


def _parts(rows: Sequence[LedgerRow], periods: Sequence[dict]) -> dict[str, float]:
    """Return the bits per byte of a run, over each part of the matrix and after the last arrival."""
    matrix = bits_per_byte(rows, periods)
    return averages_by_part(matrix) | {"last": statistics.mean(matrix[max(matrix)])}


if __name__ == "__main__":
    for name, study in STUDIES.items():
        study.main(__doc__, out="runs/causal", subfolder=name)

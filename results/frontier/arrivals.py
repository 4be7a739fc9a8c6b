"""Train the recipe at 5, 9, 17 and 33 arrivals of the same text, and compare with retraining on all text so far.

python results/frontier/arrivals.py run --data FOLDER                          train what has no ledger
python results/frontier/arrivals.py run --data FOLDER --only sotu --seeds 1    only the speeches, only seed 0

FOLDER contains dated/sotu.jsonl and dated/peps.jsonl: one JSON object per line, with the fields text and date. Each is
cut into 40 periods of about equal words. The first stage trains on the first eight periods (a fifth of the text). After
that, a stage follows after each period, or after every second, fourth or eighth one, so a run has 33, 17, 9 or 5
stages. All have the same total number of updates: 40 times those of 0.3 passes over the largest period. A period has
the same test text in all of them. Because a period has few speeches, documents are cut into parts of about 200 words,
and some of these parts are held out. So the test text of a period is of the documents that a stage trains on; that of
the next period is not.

The streams do not look ahead: they are made with --causal, and their tokenizer is that of the first eight periods. All
scores are of arrivals from the eighth period on.

The oracle is retrained from random weights on all text so far, at five times, with as many updates as the recipe has
had until then. For that it needs three times the compute of the recipe, as only five models are retrained. It runs
with a constant rate and the average, and with a rate that falls to 0.

Rates and warm-ups are those that were chosen on WikiText-2 (results/SELECTION.md). A run takes five to fifteen minutes
of a CPU core.

results/rebuild.py makes results/frontier/arrivals.md of the committed ledgers and of arrivals_streams.json, which this
script writes.
"""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import (  # noqa: E402
    SETTINGS,
    Row,
    TextStudy,
    add_sizes,
    bits_per_byte,
    change_text,
    cut_at_lines,
    parts_of_matrix,
    read_sizes,
    run_command,
    training_flops,
)

from fairseq_alma.core.files import written_aside  # noqa: E402

SIZES = HERE / "arrivals_streams.json"
PERIODS, FIRST, SEEDS = 40, 8, 3
"""Number of periods, of those on which the first stage trains, and of seeds."""
WORDS_OF_DOCUMENT = 200
TIMES = range(FIRST, PERIODS + 1, FIRST)
"""The arrivals at which the oracle is retrained."""
GAPS = {33: 1, 17: 2, 9: 4, 5: 8}
"""Number of stages -> number of periods on which each stage but the first one trains."""
CONSTANT = ("schedule=constant", "lr=0.005", "warmup_updates=40")
AVERAGE = (*CONSTANT, "average=power:8")
KEEP = (*AVERAGE, "optimizer_state=keep")
DECAY = ("lr=0.01", "warmup_updates=40")
RETRAINED = ("from_scratch=true", "replay=all")
LEARNERS = {
    "anytime": ((*KEEP, "replay=0.5"), tuple(GAPS), "**anytime**"),
    "decay": (
        (*CONSTANT, "average=decay:0.99", "optimizer_state=keep", "replay=0.5"), (33, 5),
        "anytime with `average=decay:0.99`",
    ),
    "uniform": ((*KEEP, "replay=uniform"), (33, 5), "anytime with `replay=uniform`"),
    "no_replay": (KEEP, (33, 5), "anytime without replay"),
    # A stage of 33 would have 33 or 35 updates, fewer than the warm-up.
    "sm_replay": (("replay=0.5", *DECAY), (5,), "SM, `replay=0.5`"),
    "oracle": ((*AVERAGE, *RETRAINED), (5,), "retrained on all text, constant rate and average"),
    "oracle_decay": ((*DECAY, *RETRAINED), (5,), "retrained on all text, rate that falls to 0"),
}  # fmt: skip
"""Name -> settings, numbers of stages, and the name in the table."""
BASE, ORACLE = "anytime_33", "oracle_5"
PARTS = {"arrived": "arrived", "newest": "newest", "next": "next"}
"""Parts of the matrix of losses, averaged over all arrivals -> how the table names them."""
CORPORA = {"sotu": "speeches", "peps": "proposals"}
LIMITS = {
    "sotu": "1812-11-04,1825-12-06,1831-12-06,1836-12-06,1840-12-05,1845-12-02,1848-12-05,1852-12-06,1857-12-08,"
    "1861-12-03,1867-12-03,1873-12-01,1878-12-02,1882-12-04,1887-12-06,1891-12-09,1895-12-02,1898-12-05,1901-12-03,"
    "1904-12-06,1906-12-03,1908-12-08,1911-12-05,1913-12-02,1922-12-08,1928-12-04,1940-01-03,1947-01-06,1954-01-07,"
    "1961-01-30,1971-01-22,1973-03-04,1977-01-12,1980-01-23,1982-01-26,1991-01-29,2000-01-27,2011-01-25,2019-02-05",
    "peps": "2000-09-25,2001-05-14,2001-09-18,2002-08-12,2003-10-25,2005-05-12,2006-08-28,2007-04-29,2009-02-08,"
    "2010-07-09,2011-06-28,2012-05-24,2013-01-10,2013-08-10,2014-02-20,2014-10-08,2015-04-27,2015-09-30,2016-07-28,"
    "2017-01-12,2017-09-08,2018-05-10,2018-11-01,2019-06-04,2020-03-19,2020-09-02,2020-10-27,2021-05-28,2021-12-20,"
    "2022-06-15,2023-01-16,2023-08-24,2023-12-19,2024-07-24,2024-11-25,2025-04-04,2025-09-05,2025-12-18,2026-03-15",
}
"""Name of the corpus -> where its periods begin: at about a fortieth of its words each."""


@dataclass(frozen=True)
class ArrivalStudy(TextStudy):
    """The runs on one of the corpora."""

    corpus: str = "sotu"
    data: ClassVar[str] = "."
    common: ClassVar[tuple[str, ...]] = (
        *(text for text in SETTINGS if not text.startswith("lr=")),
        "precision=float32", "validations=1",
    )  # fmt: skip

    def prepare(self, data: Path, out: Path) -> list[str]:
        documents = out / "documents.jsonl"
        if not documents.exists():  # alma-prep refuses a file that was written again
            _write_documents(documents, data / "dated" / f"{self.corpus}.jsonl")
        cut = ["--source", f"text:{documents}", "--partition", "chronological", "--causal", "--test-words", "1000"]
        limits = LIMITS[self.corpus].split(",")
        first = out / "first"
        words = ["alma-prep", str(first), *cut, "--period", limits[FIRST - 1], "--vocab-size", "8000"]
        if not (first / "stream.json").exists() and not run_command(words, out / "first.log"):
            sys.exit(1)
        return [*cut, "--period", ",".join(limits), "--tokenizer", str(first / "tokenizer.json")]

    def _stream(self, arguments: Namespace, out: Path) -> Path:
        stream = super()._stream(arguments, out)
        add_sizes(SIZES, self.corpus, stream)
        return stream


def _write_documents(file: Path, corpus: Path) -> None:
    """Write the documents of a corpus, cut into parts of about WORDS_OF_DOCUMENT words."""
    with (
        written_aside(file) as temporary,
        open(temporary, "w", encoding="utf-8") as out,
        open(corpus, encoding="utf-8") as lines,
    ):
        for line in lines:
            document = json.loads(line)
            for text in cut_at_lines(document["text"], WORDS_OF_DOCUMENT):
                out.write(json.dumps({"text": text, "date": document["date"]}) + "\n")


def _study(corpus: str) -> ArrivalStudy:
    rows = []
    for name, (settings, numbers, _) in LEARNERS.items():
        for number in numbers:
            times = ",".join(map(str, range(FIRST, PERIODS + 1, GAPS[number])))
            learner = ("learner=sm", "experts=4", f"wait=[{times}]", *settings)
            seeds = tuple(range(SEEDS))
            rows.append(Row(f"{corpus}_arrivals_{name}_{number}", learner, "updates_per_mega_batch", seeds))
    return ArrivalStudy(rows, HERE / "ledgers", ("dropout=0",), PERIODS, passes=0.3, corpus=corpus)


STUDIES = {corpus: _study(corpus) for corpus in CORPORA}


def tables() -> dict[str, str]:
    """Return file name -> the table; {} without ledgers."""
    sizes = read_sizes(SIZES)
    rows = [row for corpus in CORPORA if corpus in sizes for row in _rows(corpus, sizes[corpus])]
    if not rows:
        return {}
    names = ["corpus", "learner", "stages", *PARTS.values(), *(f"t = {t}" for t in TIMES), "seeds", "FLOPs"]
    note = (
        "Bits per byte relative to anytime with 33 stages, in percent, averaged over all arrivals from "
        f"t = {FIRST} on: over the periods that have arrived, over the newest of them, and over the next one. "
        "Then the regret: bits per byte relative to the model that is retrained at a constant rate, in percent, over "
        "the periods that have arrived at the t-th of 40 arrivals. All differences are paired over seeds, with their "
        "standard error; negative is better. FLOPs are relative to anytime with 33 stages."
    )
    head = [f"| {' | '.join(names)} |", f"|:---|:---|{'---:|' * (len(names) - 2)}"]
    return {"arrivals.md": "\n".join(["# The same text in few or many arrivals", "", *head, *rows, "", note, ""])}


def _rows(corpus: str, periods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a corpus; [] without the runs with which the others are compared."""
    study = STUDIES[corpus]
    found = {row.name.removeprefix(f"{corpus}_arrivals_"): study.rows_by_seed(row.name) for row in study.rows}
    found = {name: runs for name, runs in found.items() if runs}
    if not {BASE, ORACLE} <= found.keys():
        return []
    scores = {
        name: {
            seed: parts_of_matrix([row for row in rows if row.t >= FIRST], periods)
            | {str(t): statistics.mean(losses[:t]) for t, losses in bits_per_byte(rows, periods).items() if t in TIMES}
            for seed, rows in runs.items()
        }
        for name, runs in found.items()
    }
    columns = [*((part, BASE) for part in PARTS), *((str(t), ORACLE) for t in TIMES)]
    lines = []
    for name, runs in found.items():
        cells = ["" if name == base else change_text(scores[base], scores[name], part) for part, base in columns]
        flops = training_flops(runs) / training_flops(found[BASE])
        learner, number = name.rsplit("_", 1)
        texts = [CORPORA[corpus], LEARNERS[learner][2], number, *cells, str(len(runs)), f"{flops:.2f}"]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


if __name__ == "__main__":
    for one in STUDIES.values():
        one.main(__doc__, out="runs/arrivals", subfolder=one.corpus)

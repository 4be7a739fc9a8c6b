"""Compare shares of replay: four numbers of passes over a mega-batch, and three strengths of drift, 60 rows.

What they show is then checked on other text, nine books, with 10 and 20 passes: 6 rows.

python results/frontier/replay.py run --data FOLDER                             train what has no ledger
python results/frontier/replay.py run --data FOLDER --only replay_abrupt_5_     only abrupt drift, five passes
python results/frontier/replay.py run --data FOLDER --seeds 1                   only seed 0

FOLDER contains the folder books, dated/sotu.jsonl, dated/peps.jsonl and wikitext-2/valid.txt and test.txt: four kinds
of text. All streams consist of the same number of words of each kind, in four mega-batches of 80,000 words divided by
the number of passes. The t-th mega-batch has a larger part of the t-th kind: a quarter of it ("no drift"), five eighths
("gradual"), or all ("abrupt"). Every mega-batch has test text of its own, of the same mix. There is one tokenizer for
all streams, of the longest one without drift.

A stage has 120 updates, about as many as the passes over its mega-batch need. With replay, they are the same, so the
new text is read in fewer passes. The rows differ in the share of replay alone. The other settings are those of
preset=anytime, with the rate and the warm-up that were chosen on WikiText-2 (results/SELECTION.md). A run takes two to
three minutes of a CPU core.

The books come in four mega-batches of 19,400 words (10 passes) or 9,700 words (20 passes), with 266 updates in a stage.

results/rebuild.py makes results/frontier/replay.md and replay_books.md of the committed ledgers and of
replay_streams.json, which this script writes.
"""

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import (  # noqa: E402
    SETTINGS,
    BookStudy,
    Row,
    TextStudy,
    add_sizes,
    arrived_and_last,
    change_text,
    cut_at_lines,
    link_books,
    mean_text,
    parts_of_matrix,
    read_sizes,
)

from fairseq_alma.core.files import written_aside  # noqa: E402

SIZES = HERE / "replay_streams.json"
WORDS, UPDATES, SEEDS = 80_000, 120, 3
KINDS = ("books", "sotu", "peps", "wikitext-2")
PASSES = (1, 2, 5, 10)
DRIFTS = {"none": ("none", 1 / 4), "gradual": ("gradual", 5 / 8), "abrupt": ("abrupt", 1.0)}
"""Name -> the name in the tables, and the part of the t-th mega-batch that is of the t-th kind."""
SHARES = {"no": "false", "quarter": "0.25", "half": "0.5", "most": "0.75", "uniform": "uniform"}
"""Name -> the value of replay=."""
BOOK_SHARES = {"half": "0.5", "most": "0.75", "eighths": "0.875"}
BOOK_PASSES = (10, 20)
BASE = "half"
MIXTURE = ("learner=sm", "experts=4")
PARTS = {"arrived": "", "newest": "newest: "}
"""Part of the matrix of losses -> how the names of its columns begin."""
WORDS_OF_DOCUMENT, TEST_WORDS, HELD_OUT_WORDS = 200, 5000, 5300
"""Words of a document; of the test text of a mega-batch; and of that together with its validation text."""


@dataclass(frozen=True)
class ReplayStudy(TextStudy):
    """The runs on one stream."""

    drift: str = "none"
    own: float = 1 / 4
    """Part of the t-th mega-batch that is of the t-th kind."""
    data: ClassVar[str] = "."
    common: ClassVar[tuple[str, ...]] = (*SETTINGS, "precision=float32", "validations=1")

    def prepare(self, data: Path, out: Path) -> list[str]:
        if not (out / "documents.jsonl").exists():  # alma-prep refuses a file that was written again
            write_documents(out / "documents.jsonl", data, out / "books", self.own, int(WORDS / self.passes))
        longest = STUDIES[0]
        tokenizer = out.parent / f"{longest.drift}_{longest.passes}" / "stream" / "tokenizer.json"
        if self is not longest and not tokenizer.exists():
            longest._make_stream(data, out.parent / f"{longest.drift}_{longest.passes}")
        which = ["--vocab-size", "8000"] if self is longest else ["--tokenizer", str(tokenizer)]
        cut = ["--partition", "chronological", "--period", "2002,2003,2004", "--duplicates", "exact"]
        held_out = ["--test-words", str(len(KINDS) * TEST_WORDS)]
        return ["--source", f"text:{out / 'documents.jsonl'}", *cut, *held_out, *which]

    def updates_of_stage(self, stream: Path) -> int:
        """Return the number of updates of a stage, which is that of the other streams, too."""
        super().updates_of_stage(stream)  # checks that the committed ledgers are of this stream
        return UPDATES

    def _stream(self, arguments: Namespace, out: Path) -> Path:
        stream = super()._stream(arguments, out)
        add_sizes(SIZES, f"{self.drift}_{self.passes}", stream)
        return stream


def write_documents(file: Path, data: Path, books: Path, own: float, words: int) -> None:
    """Write the documents of a stream as JSON lines, with dates in the years 2001 to 2004.

    Args:
        file: the file to write.
        data: the folder with the text.
        books: a folder for links to the books.
        own: part of the t-th mega-batch that is of the t-th kind. The others have equal parts of the rest.
        words: number of words of a mega-batch. As many of each kind are taken, and some more for test text.
    """
    rest = (1 - own) / (len(KINDS) - 1)
    with written_aside(file) as temporary, open(temporary, "w", encoding="utf-8") as out:
        for place, kind in enumerate(KINDS):
            documents = documents_of(kind, data, books)
            found = sum(len(text.split()) for text in documents)
            random.Random(kind).shuffle(documents)
            for t in range(len(KINDS)):
                wanted = (own if t == place else rest) * (words + HELD_OUT_WORDS)
                while wanted > 0:
                    if not documents:
                        sys.exit(f"{data / kind} has too few words: found {found:,}")
                    text = documents.pop()
                    wanted -= len(text.split())
                    out.write(json.dumps({"text": text, "date": f"{2001 + t}-06-01"}) + "\n")


def documents_of(kind: str, data: Path, books: Path) -> list[str]:
    """Return the text of a kind in documents of about WORDS_OF_DOCUMENT words each, cut at the ends of lines."""
    return [part for text in _texts_of(kind, data, books) for part in cut_at_lines(text, WORDS_OF_DOCUMENT)]


def _texts_of(kind: str, data: Path, books: Path) -> Iterator[str]:
    if kind == "books":
        for path in sorted(link_books(data / kind, books).iterdir()):
            yield path.read_text(encoding="utf-8")
    elif kind == "wikitext-2":
        for name in ("valid.txt", "test.txt"):
            yield (data / kind / name).read_text(encoding="utf-8")
    else:
        with open(data / "dated" / f"{kind}.jsonl", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def _rows(stream: str, shares: Mapping[str, str]) -> tuple[Row, ...]:
    common = ("optimizer_state=keep", "schedule=constant", "average=power:8", "warmup_updates=40")
    return tuple(
        Row(f"replay_{stream}_{name}", (*common, f"replay={share}"), seeds=tuple(range(SEEDS)))
        for name, share in shares.items()
    )


def _study(drift: str, own: float, passes: int) -> ReplayStudy:
    # As in the other studies: dropout only where a small text is read several times.
    settings = (*MIXTURE, f"dropout={0 if passes <= 2 else 0.2}")
    rows = _rows(f"{drift}_{passes}", SHARES)
    return ReplayStudy(rows, HERE / "ledgers", settings, len(KINDS), passes, drift=drift, own=own)


@dataclass(frozen=True)
class BookReplayStudy(BookStudy):
    """The runs on the books, with the folder of the other streams."""

    data: ClassVar[str] = "."

    def prepare(self, data: Path, out: Path) -> list[str]:
        return super().prepare(data / "books", out)


def _book_study(passes: int) -> BookStudy:
    rows = _rows(f"books_{passes}", BOOK_SHARES)
    settings = ("precision=float32", "validations=1", *MIXTURE, "dropout=0.2")
    return BookReplayStudy(rows, HERE / "ledgers", settings, passes=passes, parts=10 * passes)


STUDIES = tuple(_study(drift, own, passes) for drift, (_, own) in DRIFTS.items() for passes in PASSES)
BOOK_STUDIES = {passes: _book_study(passes) for passes in BOOK_PASSES}


def tables() -> dict[str, str]:
    """Return file name -> the table; {} without ledgers."""
    sizes = read_sizes(SIZES)
    found = {study: runs for study in STUDIES if len(runs := _runs(study, sizes)) > 1 and BASE in runs}
    if not found:
        return {}
    shares = [name for name in SHARES if name != BASE and any(name in runs for runs in found.values())]
    columns = [(part, name) for part in PARTS for name in shares]
    lines = [
        "# Shares of replay, by passes and drift",
        "",
        f"| drift | passes |{''.join(f' {PARTS[part]}`replay={SHARES[name]}` |' for part, name in columns)} seeds |",
        f"|:---|---:|{'---:|' * (len(columns) + 1)}",
    ]
    for study, runs in found.items():
        cells = [change_text(runs[BASE], runs.get(name, {}), part) for part, name in columns]
        lines.append(f"| {DRIFTS[study.drift][0]} | {study.passes} | {' | '.join(cells)} | {len(runs[BASE])} |")
    note = (
        "Bits per byte relative to `replay=0.5`, in percent, averaged from t = 2 on, over the text that has arrived, "
        "and over the newest mega-batch; paired over seeds, with their standard error. Negative is better."
    )
    return {"replay.md": "\n".join([*lines, "", note, ""]), **_book_table()}


def _book_table() -> dict[str, str]:
    """Return file name -> the table of the books; {} without ledgers."""
    others = [name for name in BOOK_SHARES if name != BASE]
    lines = [
        "# Shares of replay on nine books, many passes",
        "",
        f"| passes | `replay=0.5` |{''.join(f' `replay={BOOK_SHARES[name]}` |' for name in others)} seeds |",
        f"|---:|---:|{'---:|' * (len(others) + 1)}",
    ]
    for passes, study in BOOK_STUDIES.items():
        found = {
            name: {seed: arrived_and_last(rows) for seed, rows in study.rows_by_seed(row.name).items()}
            for name, row in zip(BOOK_SHARES, study.rows, strict=True)
        }
        if base := found[BASE]:
            cells = [mean_text([scores["arrived"] for scores in base.values()], digits=3)]
            cells += [change_text(base, found[name], "arrived") for name in others]
            lines.append(f"| {passes} | {' | '.join(cells)} | {len(base)} |")
    note = (
        "Bits per byte of the test text, averaged from t = 2 on; the others relative to `replay=0.5`, in percent, "
        "paired over seeds, with their standard error. Negative is better."
    )
    return {"replay_books.md": "\n".join([*lines, "", note, ""])} if len(lines) > 4 else {}


def _runs(study: ReplayStudy, sizes: dict[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    """Return share -> seed -> part -> bits per byte, of the runs whose ledgers are committed."""
    found = {}
    for name, row in zip(SHARES, study.rows, strict=True):
        if by_seed := study.rows_by_seed(row.name):
            periods = sizes[f"{study.drift}_{study.passes}"]
            found[name] = {seed: parts_of_matrix(rows, periods) for seed, rows in by_seed.items()}
    return found


if __name__ == "__main__":
    for one in STUDIES:
        one.main(__doc__, out="runs/replay", subfolder=f"{one.drift}_{one.passes}")
    for passes, study in BOOK_STUDIES.items():
        study.main(__doc__, out="runs/replay", subfolder=f"books_{passes}")

"""Compare one averaged model with SM and i.i.d. data at the size of switch_lm_base, in one pass over 4 million words.

python results/frontier/base.py run --data FOLDER --side-by-side 12    train what has no ledger, on a GPU

FOLDER contains the folders books, dated and wikipedia. Nine books, speeches of presidents, Python's proposals and
articles of Wikipedia are mixed and cut into five mega-batches of 1.05 million words and a test set of the same size.
The first four are trained on. Each stage is one pass over its mega-batch. With replay, a part of the
steps is taken from new text. All rows have the same number of updates. The settings are those of arch=switch_lm_base,
but an update has 4,096 tokens, so that a stage has some hundred updates. Nothing was tuned.

On a machine without the text, copy the stream from another one (runs/base/stream), and leave out --data and ALMA_DATA.
One row with one seed takes two to three minutes on an H200, beside 15 smaller runs.

results/rebuild.py makes results/frontier/base.md of the committed ledgers.
"""

import sys
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import Row, TextStudy, arrival_table, link_books  # noqa: E402

NUM_MEGA_BATCHES, NUM_TRAINED = 5, 4
SM = ("learner=sm", "wait=1")
IID = ("learner=sm", f"wait={NUM_TRAINED}")
AVERAGE = ("schedule=constant", "average=power:8")
SEEDS = (0, 1, 2)
WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

ROWS = (
    Row("base_sm", SM, seeds=SEEDS),
    Row("base_anytime", ("preset=anytime", *SM), seeds=SEEDS),
    Row("base_iid_average", (*IID, *AVERAGE), "updates_per_mega_batch", seeds=SEEDS),
    Row("base_iid", IID, "updates_per_mega_batch", seeds=SEEDS),
)
"""The rows in the order in which they run."""
TEXTS = {
    "base_sm": "SM, wait 1",
    "base_anytime": "**anytime** (`replay=0.5`)",
    "base_iid_average": "constant rate and average on all data at once (i.i.d.)",
    "base_iid": "SM on all data at once (i.i.d.)",
}
"""How the table names each row."""


def other_sources(data: Path) -> list[str]:
    """Return the arguments of alma-prep's --source for the articles, speeches and proposals in a folder."""
    dated = [f"text:{data / 'dated' / name}.jsonl" for name in ("sotu", "peps")]
    return [f"wikipedia:{data / 'wikipedia' / WIKIPEDIA}", *dated]


class BaseStudy(TextStudy):
    """The grid of runs of switch_lm_base."""

    common: ClassVar[tuple[str, ...]] = (
        *("arch=switch_lm_base", "experts=4", "dropout=0", "validations=4", "sequences_per_update=8"),
        *("precision=bfloat16", "parallel=1"),
    )
    tokens_per_update: ClassVar[int] = 8 * 512
    data: ClassVar[str] = "."

    def prepare(self, data: Path, out: Path) -> list[str]:
        sources = [f"books:{link_books(data / 'books', out / 'books')}", *other_sources(data)]
        cut = ["--mega-batches", str(NUM_MEGA_BATCHES), "--vocab-size", "32000", "--valid-words", "50000"]
        return [*(word for source in sources for word in ("--source", source)), *cut, "--seed", "0"]


STUDY = BaseStudy(ROWS, HERE / "ledgers", settings=(), mega_batches=NUM_TRAINED, passes=1)


def tables() -> dict[str, str]:
    """Return file name -> table: the perplexity after each arrival, with the rows whose ledgers are committed."""
    found = {name: STUDY.rows_by_seed(name) for name in TEXTS}
    if not found["base_sm"]:
        return {}
    heading = "switch_lm_base in one pass over 4 million words"
    return {"base.md": arrival_table(heading, TEXTS, found, base="base_sm")}


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/base")

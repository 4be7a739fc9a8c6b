"""Train all rows of the paper's Table 2, the recipe and its two strongest rivals in one pass over public-domain books.

python results/frontier/table2.py run --library FOLDER --only table2_tiny       train what has no ledger, on a CPU
python results/frontier/table2.py select --data FOLDER --side-by-side 4         choose settings, on a GPU
python results/frontier/table2.py run --library FOLDER --only table2_base --side-by-side 8
python results/frontier/table2.py run --library FOLDER --only table2_large      SM and the recipe with the large model

The FOLDER of --library contains the books of github.com/mlschmitt/classic-books-markdown (commit 944882722e9a): 59
million words (we had 754 of its 756 books). They are mixed and cut into mega-batches. A stage is one pass over its
mega-batch (in the paper, about 20):

- base, large: switch_lm_base and switch_lm_large, the first four of five parts of 11.7 million words, updates of 16,384
  tokens in bfloat16.
- tiny: switch_lm_tiny, the first four of 250 parts of 235,000 words, updates of 1,024 tokens.

All rows of Table 2 have the rate and the warm-up that were chosen for SM. As everywhere, settings are chosen on
validation text of another stream: for the tiny model WikiText-2 (results/frontier/rivals.py), for the others the
articles, speeches and proposals of results/frontier/base.py, in --data. All rows validate once, after the last update
of a stage, so that the last checkpoint predicts. Ensembles have more training FLOPs than the others, as in the paper.

A machine with a GPU but without the text needs runs/table2/*/stream from another one, where `select --hours 0` and
`run --hours 0` make the streams and train nothing. Leave out --library, --data and ALMA_DATA then.

results/rebuild.py makes results/frontier/table2_SIZE.md and table2_SIZE_claims.md of the committed ledgers.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import rivals  # noqa: E402
from _claims import Claim, claim_table  # noqa: E402
from _texts import Row, arrival_table, link_books  # noqa: E402
from base import other_sources  # noqa: E402

from fairseq_alma.lm.table2 import ROWS  # noqa: E402

SEEDS = (0, 1, 2)
LABELS = {
    "sm_w1_4": "SM_w1, 4 experts",
    "sm_w1_8": "SM_w1, 8 experts",
    "sm_w1_12": "SM_w1, 12 experts",
    "sm_w3": "SM_w3, 8 experts",
    "sm_w3_3x": "SM_w3 (3x steps), 8 experts",
    "sm_w4": "SM_w4, 12 experts",
    "sm_w4_4x": "SM_w4 (4x steps), 12 experts",
    "ens_w1_4at2": "Ens_w1, 4@2",
    "ens_w1_4at4": "Ens_w1, 4@4",
    "ens_w3": "Ens_w3, 4@2",
    "ens_w3_3x": "Ens_w3 (3x steps), 4@2",
    "ens_w4": "Ens_w4, 4@2",
    "ens_w4_4x": "Ens_w4 (4x steps), 4@2",
    "gens_w1": "gEns_w1, 4@1 to 4@4",
    "gmoe_w1": "gMoE_w1, 4, 6, 8, 12 experts",
}
"""The rows of Table 2, in the order of the paper, and how the tables name them."""
CLAIMS = (
    Claim("SM with 8 experts against 4", "sm_w1_8", "sm_w1_4"),
    Claim("SM with 12 experts against 8", "sm_w1_12", "sm_w1_8"),
    Claim("Ens 4@4 against SM with 12 experts", "ens_w1_4at4", "sm_w1_12"),
    Claim("Ens 4@4 against gEns", "ens_w1_4at4", "gens_w1"),
    Claim("Ens 4@4 against gMoE", "ens_w1_4at4", "gmoe_w1"),
    Claim("gMoE against SM with its first size, 4 experts", "gmoe_w1", "sm_w1_4"),
    Claim("SM with gMoE's last size, 12 experts, against gMoE", "sm_w1_12", "gmoe_w1"),
    Claim("gEns against SM with 4 experts", "gens_w1", "sm_w1_4"),
    Claim("SM_w3 (3x steps) against SM_w1, 8 experts", "sm_w3_3x", "sm_w1_8", t=3),
    Claim("SM_w4 (4x steps) against SM_w1, 12 experts", "sm_w4_4x", "sm_w1_12"),
    Claim("Ens_w3 (3x steps) against Ens_w1, 4@2", "ens_w3_3x", "ens_w1_4at2", t=3),
    Claim("Ens_w4 (4x steps) against Ens_w1, 4@2", "ens_w4_4x", "ens_w1_4at2"),
    Claim("SM_w1 against SM_w4 (1x steps), 12 experts", "sm_w1_12", "sm_w4"),
    Claim("Ens_w1 against Ens_w4 (1x steps), 4@2", "ens_w1_4at2", "ens_w4"),
)
"""What the paper says: larger is better; Ens 4@4 is the best row at wait 1; gMoE and gEns are between SM of their first
and last sizes; waiting ends lower, if there are more steps."""
RIVALS = ("anytime", "wsd_average", "schedule_free")
"""The recipe and the rivals that are closest to it in results/frontier/rivals.md."""


def _table2() -> dict[str, rivals.Recipe]:
    """Return the rows of Table 2 as recipes with the settings of SM."""
    recipes = {}
    for name, settings in ROWS.items():
        arguments = [f"preset=table2/{name}", *rivals.WARMED]
        if num := settings.get("mega_batches"):  # the study gives another number, which comes before these arguments
            arguments.append(f"mega_batches={num}")
        recipes[name] = rivals.Recipe(LABELS[name], tuple(arguments), as_for="sm")
    return recipes


def _scaled(ratio: float, *names: str) -> dict[str, rivals.Recipe]:
    """Return recipes whose grid has other rates: those of switch_lm_tiny, multiplied by `ratio`."""
    found = {name: rivals.RECIPES[name] for name in names}
    return {
        name: replace(one, grid={**one.grid, "lr": tuple(f"{float(rate) * ratio:g}" for rate in one.grid["lr"])})
        for name, one in found.items()
    }


class TinyStudy(rivals.RivalStudy):
    """The runs of switch_lm_tiny."""

    recipes: ClassVar[Mapping[str, rivals.Recipe]] = {**_table2(), **{name: rivals.RECIPES[name] for name in RIVALS}}
    common: ClassVar[tuple[str, ...]] = (
        *("arch=switch_lm_tiny", "sequences_per_update=8", "batch_size=8", "precision=float32"),
        *("parallel=1", "validations=1"),
    )
    data: ClassVar[str] = "library"
    folder: ClassVar[str] = "table2_tiny"
    """Name of the folder of the stream, which models of the same vocabulary share."""

    @property
    def prefix(self) -> str:
        return f"{self.stream}_"

    def prepare(self, data: Path, out: Path) -> list[str]:
        return ["--source", f"books:{link_books(data, out / 'books')}", *self.options]

    def row(self, name: str, values: Mapping[str, str], updates: int) -> Row:
        row = super().row(name, values, updates)
        # The presets of Table 2 compute the updates of a stage from this number.
        return replace(row, steps="table_updates" if name in ROWS else row.steps, seeds=SEEDS)


class BaseStudy(TinyStudy):
    """The runs of switch_lm_base."""

    common: ClassVar[tuple[str, ...]] = (
        *("arch=switch_lm_base", "sequences_per_update=32", "precision=bfloat16", "parallel=1", "validations=1"),
    )
    tokens_per_update: ClassVar[int] = 32 * 512
    folder: ClassVar[str] = "table2_large"


class LargeStudy(BaseStudy):
    """The runs of switch_lm_large."""

    recipes: ClassVar[Mapping[str, rivals.Recipe]] = {name: TinyStudy.recipes[name] for name in ("sm_w1_4", "anytime")}
    common: ClassVar[tuple[str, ...]] = ("arch=switch_lm_large", *BaseStudy.common[1:])


class BaseSelection(BaseStudy):
    """The runs that choose the settings of switch_lm_base.

    By default, its rate is a tenth of that of the tiny model. Its updates here have a sixth of its default tokens, and
    SM preferred the largest rates, so the rates to try are a fifth of those of the tiny model.
    """

    recipes: ClassVar[Mapping[str, rivals.Recipe]] = _scaled(0.2, "sm", *RIVALS)
    data: ClassVar[str] = "."
    folder: ClassVar[str] = "table2_settings"

    def prepare(self, data: Path, out: Path) -> list[str]:
        return [*(word for source in other_sources(data) for word in ("--source", source)), *self.options]


class LargeSelection(BaseSelection):
    """The runs that choose the settings of switch_lm_large, whose default rate is 0.6 times that of switch_lm_base."""

    recipes: ClassVar[Mapping[str, rivals.Recipe]] = _scaled(0.12, "sm", "anytime")
    common: ClassVar[tuple[str, ...]] = LargeStudy.common


def _study(kind: type[TinyStudy], stream: str, cut: str, **other: Any) -> TinyStudy:
    """Return the study of a model on the first four mega-batches of a stream. `cut`: arguments of alma-prep."""
    study = kind((), HERE / "ledgers", ("dropout=0",), 4, 1)
    return replace(study, stream=stream, options=tuple(cut.split()), **other)


_TINY = "--mega-batches 250 --vocab-size 8000 --valid-words 20000 --test-words 40000"
_LARGE = "--mega-batches 5 --vocab-size 32000 --valid-words 50000 --test-words 200000"
SELECTED_ON = (
    _study(BaseSelection, "table2_base_settings", _LARGE),
    _study(LargeSelection, "table2_large_settings", _LARGE),
)
STUDIES = (
    _study(
        TinyStudy,
        "table2_tiny",
        _TINY,
        heading="switch_lm_tiny on four mega-batches of 235,000 words",
        selected_on=rivals.SELECTED_ON,
    ),
    _study(
        BaseStudy,
        "table2_base",
        _LARGE,
        heading="switch_lm_base on four mega-batches of 11.7 million words",
        selected_on=SELECTED_ON[0],
    ),
    _study(
        LargeStudy,
        "table2_large",
        _LARGE,
        heading="switch_lm_large on four mega-batches of 11.7 million words",
        selected_on=SELECTED_ON[1],
    ),
)
"""One study for each model."""


def tables() -> dict[str, str]:
    """Return file name -> table: for each model with ledgers the perplexities, and the paper's claims."""
    found = {}
    for study in STUDIES:
        runs = {name: study.rows_by_seed(f"{study.prefix}{name}") for name in study.recipes}
        if runs["sm_w1_4"]:
            labels = {name: recipe.label for name, recipe in study.recipes.items()}
            found[f"{study.stream}.md"] = arrival_table(study.heading, labels, runs, base="sm_w1_4", best_first=False)
            claims = claim_table(CLAIMS, runs)
            found[f"{study.stream}_claims.md"] = "\n".join([f"# {study.heading}: the paper's claims", "", *claims, ""])
    return found


if __name__ == "__main__":
    for one in SELECTED_ON if sys.argv[1:2] == ["select"] else STUDIES:
        one.main(__doc__, out="runs/table2", subfolder=one.folder)

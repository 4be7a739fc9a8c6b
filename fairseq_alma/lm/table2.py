"""The presets table2/ROW, one for each row of the paper's Table 2 (appendix D).

Commands, times and results: docs/paper/table-2.md. The paper measures the rows with wait 3 after their third mega-batch
only. The number of updates follows from `table_updates`, which each architecture sets, so that it is not a setting.
"""

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore

_UPDATES = {"updates": "${table_updates}"}
_UPDATES_FOR_ALL_DATA = {"updates_per_mega_batch": "${table_updates}"}
"""As many updates as wait 1 spends on the same data."""

ROWS: Mapping[str, Mapping[str, Any]] = {
    # SM_w1 with 4, 8 or 12 experts: one model is trained on each mega-batch as it arrives.
    "sm_w1_4": {"learner": "sm", "wait": 1, "experts": 4, **_UPDATES},
    "sm_w1_8": {"learner": "sm", "wait": 1, "experts": 8, **_UPDATES},
    "sm_w1_12": {"learner": "sm", "wait": 1, "experts": 12, **_UPDATES},
    # SM_w3 and SM_w4: one model waits for three or four mega-batches, then trains one stage on them.
    "sm_w3": {"learner": "sm", "wait": 3, "mega_batches": 3, "experts": 8, **_UPDATES},
    "sm_w3_3x": {"learner": "sm", "wait": 3, "mega_batches": 3, "experts": 8, **_UPDATES_FOR_ALL_DATA},
    "sm_w4": {"learner": "sm", "wait": 4, "experts": 12, **_UPDATES},
    "sm_w4_4x": {"learner": "sm", "wait": 4, "experts": 12, **_UPDATES_FOR_ALL_DATA},
    # Ens_w1, 4@2 and 4@4: two or four models of 4 experts each are trained on each mega-batch as it arrives; their
    # probabilities are averaged. Table 1 of the paper uses 4@2 for the learner that trains on k = 3 or 4 mega-batches
    # one after the other.
    "ens_w1_4at2": {"learner": "ens", "wait": 1, "experts": 4, "members": 2, **_UPDATES},
    "ens_w1_4at4": {"learner": "ens", "wait": 1, "experts": 4, "members": 4, **_UPDATES},
    # Ens_w3 and Ens_w4, 4@2: two models wait for three or four mega-batches, then train one stage on them. Table 1 uses
    # those with 3x or 4x steps for the learner that trains on k = 3 or 4 mega-batches together (i.i.d.).
    "ens_w3": {"learner": "ens", "wait": 3, "mega_batches": 3, "experts": 4, "members": 2, **_UPDATES},
    "ens_w3_3x": {"learner": "ens", "wait": 3, "mega_batches": 3, "experts": 4, "members": 2, **_UPDATES_FOR_ALL_DATA},
    "ens_w4": {"learner": "ens", "wait": 4, "experts": 4, "members": 2, **_UPDATES},
    "ens_w4_4x": {"learner": "ens", "wait": 4, "experts": 4, "members": 2, **_UPDATES_FOR_ALL_DATA},
    # gEns_w1, 4@1 to 4@4: a new model of 4 experts joins the ensemble at each stage, and is the only one trained in it.
    "gens_w1": {"learner": "gens", "wait": 1, "experts": 4, **_UPDATES},
    # gMoE_w1: one model is trained on each mega-batch as it arrives; before each stage every mixture gets more experts,
    # 4, 6, 8 and 12.
    "gmoe_w1": {"learner": "gmoe", "wait": 1, "experts": 4, "grow_experts": [2, 2, 4], **_UPDATES},
}
"""Name of the row -> its settings, in the order of the paper's table."""

PRESETS = sorted(f"table2/{row}" for row in ROWS)
"""Names of the presets."""


def store_presets() -> None:
    """Register the presets with Hydra, which then finds them like those in YAML files."""
    for row, settings in ROWS.items():
        node = {"defaults": ["/preset/paper", "_self_"], "preset": f"table2/{row}", **settings}
        ConfigStore.instance().store(group="preset/table2", name=row, node=node, package="_global_")

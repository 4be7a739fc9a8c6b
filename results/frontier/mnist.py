"""Compare one averaged model that replays with the paper's learners on MNIST, B = 500, 5 seeds.

.venv/bin/python results/frontier/mnist.py run --data-root DATA       runs what is missing, two runs at a time

The settings of preset=anytime were chosen on other streams: seed 100, width 32. The study reports seeds 0 to 4.
results/rebuild.py makes results/frontier/mnist_hWIDTH.md of the ledgers.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _cer_tables import CerStudy, Row  # noqa: E402

CONSTANT = ("preset=anytime", "epochs=100", "extra_epochs=0")
"""The recipe with as many epochs as preset=paper, so that the compute of a run is that of SM."""
WIDE = {32: 141, 64: 260, 4: 20}
"""For each width, that of one network with about as many parameters as five networks."""
SMOOTH = "label_smoothing=0.1"
"""The usual value of label smoothing."""
FIFTH = {32: 400}
"""For each width, that of a network that takes about a fifth of the training FLOPs of Ens of 5 in the row's epochs."""
ROWS = (
    Row("sm_w10", ("learner=sm", "wait=10"), "SM, wait 10"),
    Row("anytime", ("preset=anytime",), "**anytime**"),
    Row("ens_w10", ("learner=ens", "wait=10"), "Ens of 5, wait 10"),
    Row("anytime_wide", ("preset=anytime",), "**anytime**, as many parameters as Ens of 5", WIDE),
    Row(
        "anytime_fifth", ("preset=anytime", "epochs=4", "extra_epochs=90"), "**anytime**, 400 units, few epochs", FIFTH
    ),
    Row(
        "anytime_320",
        ("preset=anytime", "epochs=5", "extra_epochs=125"),
        "**anytime**, 320 units, few epochs",
        {32: 320},
    ),
    Row(
        "anytime_320_share",
        ("preset=anytime", "epochs=5", "extra_epochs=125", "replay=0.8"),
        "**anytime**, 320 units, few epochs, `replay=0.8`",
        {32: 320},
    ),
    Row(
        "anytime_320_smooth",
        ("preset=anytime", "epochs=5", "extra_epochs=125", "replay=0.8", SMOOTH),
        f"**anytime**, 320 units, few epochs, `replay=0.8 {SMOOTH}`",
        {32: 320},
    ),
    Row(
        "anytime_wide_smooth",
        ("preset=anytime", SMOOTH),
        f"**anytime**, as many parameters as Ens of 5, `{SMOOTH}`",
        WIDE,
    ),
    Row("anytime_smooth", ("preset=anytime", SMOOTH), f"**anytime**, `{SMOOTH}`"),
    Row("smooth_sm_w5", ("learner=sm", "wait=5", SMOOTH), f"SM, wait 5, `{SMOOTH}`"),
    Row("smooth_ens_w5", ("learner=ens", "wait=5", SMOOTH), f"Ens of 5, wait 5, `{SMOOTH}`"),
    Row("anytime_100", CONSTANT, "anytime, 100 epochs"),
    Row("geometric", ("learner=sm", "wait=geometric"), "SM, geometric waits"),
    Row("auto", ("learner=sm", "wait=auto"), "SM, automatic waits"),
    Row("sm_w5", ("learner=sm", "wait=5"), "SM, wait 5"),
    Row("sm_w25", ("learner=sm", "wait=25"), "SM, wait 25"),
    Row(
        "no_average",
        (*CONSTANT, "average=null"),
        "anytime, 100 epochs, without the average",
    ),
    Row("no_replay", (*CONSTANT, "replay=false"), "anytime, 100 epochs, without replay"),
    Row("only_replay_share", (*CONSTANT, "replay=0.75"), "anytime, 100 epochs, replay=0.75"),
    Row(
        "geometric_uniform",
        ("learner=sm", "wait=geometric", "replay=uniform"),
        "SM, geometric waits, replay=uniform",
    ),
    Row("sm_w1", ("learner=sm", "wait=1"), "SM, wait 1"),
    Row("sm_w2", ("learner=sm", "wait=2"), "SM, wait 2"),
    Row("ens_w5", ("learner=ens", "wait=5"), "Ens of 5, wait 5"),
    Row("ens_w2", ("learner=ens", "wait=2"), "Ens of 5, wait 2"),
    Row("ens_w1", ("learner=ens", "wait=1"), "Ens of 5, wait 1"),
    Row("ens_w25", ("learner=ens", "wait=25"), "Ens of 5, wait 25"),
)
STUDY = CerStudy(HERE, "mnist", "MNIST", (32, 64, 4), ROWS, prefix="h", num_first=10)
tables = STUDY.tables


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])

"""Compare one averaged model that replays with SM on CIFAR-10, the reduced VGG19, B = 100, 30 epochs.

.venv/bin/python results/frontier/cifar10.py run --data-root DATA       runs what is missing, two runs at a time

Every row trains for as many epochs as SM at wait 10, so all have about its compute. The rows differ in one factor at a
time: the stages (wait 1 instead of 10), the replay, and the average of the networks. Nothing was tuned on CIFAR-10.
At width 16, run with --seed-by-seed: a seed of a row takes 10 minutes on one core.

results/rebuild.py makes results/frontier/cifar10_cWIDTH.md of the ledgers.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _cer_tables import CerStudy, Row  # noqa: E402

EPOCHS = "epochs=30"
RECIPE = ("preset=anytime", EPOCHS, "extra_epochs=0")
SMOOTH = "label_smoothing=0.1"
"""The usual value of label smoothing."""
NO_AVERAGE = ("average=null",)
ROWS = (
    Row("sm_w10", ("learner=sm", "wait=10", EPOCHS), "SM, wait 10"),
    Row("anytime", RECIPE, "**anytime**, 30 epochs"),
    Row("no_average", (*RECIPE, *NO_AVERAGE), "anytime, 30 epochs, without the average"),
    Row("no_replay", (*RECIPE, "replay=false"), "anytime, 30 epochs, without replay"),
    Row("anytime_smooth", (*RECIPE, SMOOTH), f"**anytime**, 30 epochs, `{SMOOTH}`"),
    Row("smooth_sm_w10", ("learner=sm", "wait=10", EPOCHS, SMOOTH), f"SM, wait 10, `{SMOOTH}`"),
    Row("half", (*RECIPE, "replay=0.5"), "anytime, 30 epochs, replay=0.5"),
    Row("geometric", ("learner=sm", "wait=geometric", EPOCHS), "SM, geometric waits"),
    Row("auto", ("learner=sm", "wait=auto", EPOCHS), "SM, automatic waits"),
    Row("sm_w5", ("learner=sm", "wait=5", EPOCHS), "SM, wait 5"),
    Row("sm_w20", ("learner=sm", "wait=20", EPOCHS), "SM, wait 20"),
    Row("sm_w1", ("learner=sm", "wait=1", EPOCHS), "SM, wait 1"),
)
STUDY = CerStudy(HERE, "cifar10", "CIFAR-10", (4, 8, 16), ROWS, prefix="c", num_first=4)
tables = STUDY.tables


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])

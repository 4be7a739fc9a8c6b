"""Anytime learning at macroscale, as a fairseq extension.

`fairseq-train --user-dir fairseq_alma` finds the task, the models and the criterion that this package registers.
What each part needs:

core                            the standard library only: the protocol, run folders, the catalogue of learners
app, report                     what the commands share; alma-report
modules, growth, checkpoints    torch
data, models, tasks, criteria   torch and fairseq
evaluation, lm                  alma-eval and alma-lm; one file of each imports fairseq
"""

import importlib
import sys

REGISTERED = (
    "fairseq_alma.models.switch_lm",  # switch_lm_tiny, switch_lm_base, switch_lm_large
    "fairseq_alma.tasks.alma_lm",  # alma_lm
    "fairseq_alma.criteria.switch_lm",  # switch_lm
)


def register() -> None:
    """Import the modules of REGISTERED, which register themselves with fairseq. A second call does nothing."""
    for module in REGISTERED:
        importlib.import_module(module)


# fairseq imports the package given as --user-dir and expects that this registers its parts. If fairseq is not imported,
# for example because only the core is used, this import must stay cheap. Our own commands call register() themselves.
if "fairseq" in sys.modules:
    register()

"""Code for the paper "On Anytime Learning at Macroscale", as a fairseq extension.

This package registers a task, a model, a criterion (loss function), an optimizer and a learning-rate scheduler with
fairseq, so that `fairseq-train --user-dir fairseq_alma` can use them.

The subpackages, and the libraries that each of them needs:

core                            Algorithm 1 of the paper, run folders, the list of learners; needs no libraries
app, report                     shared code of the commands, and alma-report; need neither torch nor fairseq
modules, growth, checkpoints    mixtures of experts, their growth, checkpoint files; need torch
data, models, tasks, criteria, optim   the parts that fairseq-train uses; need torch and fairseq
evaluation, lm                  alma-eval and alma-lm; need torch; three of their files import fairseq
"""

import importlib
import sys

REGISTERED = (
    "fairseq_alma.models.switch_lm",
    "fairseq_alma.tasks.alma_lm",
    "fairseq_alma.criteria.switch_lm",
    "fairseq_alma.optim.fused_adam",
)
"""Modules that register classes with fairseq when they are imported.

In this order, they register the model switch_lm with the architectures switch_lm_tiny, switch_lm_base and
switch_lm_large, the task alma_lm, the criterion switch_lm, and the optimizer fused_adam.
"""


def register() -> None:
    """Import our modules that register classes with fairseq (see REGISTERED).

    A second call does nothing.
    """
    for module in REGISTERED:
        importlib.import_module(module)


# Call register() here only if fairseq is already imported, for example when fairseq imports this package because of
# --user-dir. Otherwise register() would import fairseq, which takes seconds. Our commands call register() themselves
# when they need fairseq.
if "fairseq" in sys.modules:
    register()

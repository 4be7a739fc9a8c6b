"""Code for the paper "On Anytime Learning at Macroscale", as a fairseq extension.

This package registers a task, a model, a criterion (loss function), an optimizer and a tokenizer with fairseq, so that
`fairseq-train --user-dir fairseq_alma` can use them. `fairseq_alma.load` returns the trained model of a run.

The subpackages, and the libraries that each of them needs:

core                            Algorithm 1 of the paper, run folders, the list of learners; needs no libraries
app, report                     shared code of the commands, and alma-report; need neither torch nor fairseq
modules, growth, checkpoints    mixtures of experts, their growth, checkpoint files; need torch
data, models, tasks, criteria, optim   the parts that fairseq-train uses; need torch and fairseq
evaluation, lm                  alma-eval and alma-lm; need torch; a few of their files import fairseq
deploy                          alma-deploy; needs no libraries
python                          `fairseq_alma.run`, `prepare` and `extend`, for programs and notebooks
api, generate                   `fairseq_alma.load` and alma-generate; need torch and fairseq
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fairseq_alma.fairseq_import import postpone_imports_of_fairseq

if TYPE_CHECKING:
    from fairseq_alma.api import LanguagePredictor, load
    from fairseq_alma.python import Run, extend, prepare, run

REGISTERED = (
    "fairseq_alma.models.switch_lm",
    "fairseq_alma.tasks.alma_lm",
    "fairseq_alma.criteria.switch_lm",
    "fairseq_alma.optim.fused_adam",
    "fairseq_alma.data.stream_bpe",
)
"""Modules that register classes with fairseq when they are imported.

In this order, they register the model switch_lm with the architectures switch_lm_tiny, switch_lm_base and
switch_lm_large, the task alma_lm, the criterion switch_lm, the optimizer fused_adam, and the tokenizer alma_stream.
"""


def register() -> None:
    """Import our modules that register classes with fairseq (see REGISTERED).

    A second call does nothing.
    """
    for module in REGISTERED:
        importlib.import_module(module)


_MODULES = {
    "LanguagePredictor": "fairseq_alma.api",
    "load": "fairseq_alma.api",
    "Run": "fairseq_alma.python",
    "extend": "fairseq_alma.python",
    "prepare": "fairseq_alma.python",
    "run": "fairseq_alma.python",
}
"""The module of each name of this package. It is imported when the name is first used, because torch is slow to
import."""


__all__ = ["REGISTERED", "LanguagePredictor", "Run", "extend", "load", "prepare", "register", "run"]

if not TYPE_CHECKING:  # a type checker must not believe that the package has any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


# Call register() here only if fairseq is already imported, for example when fairseq imports this package because of
# --user-dir. Otherwise register() would import fairseq, which takes seconds. Our commands call register() themselves
# when they need fairseq.
if "fairseq" in sys.modules:
    register()
else:
    postpone_imports_of_fairseq()

"""Anytime learning at macroscale, as a fairseq extension.

`fairseq-train --user-dir fairseq_alma` finds the task, the models and the criterion that this
package registers. `fairseq_alma.core` is the protocol and needs neither torch nor fairseq.
"""

import importlib
import sys

REGISTERED = (
    "fairseq_alma.models.switch_lm",  # switch_lm_tiny, switch_lm_base, switch_lm_large
    "fairseq_alma.tasks.alma_lm",  # alma_lm
    "fairseq_alma.criteria.switch_lm",  # switch_lm
)


def register() -> None:
    """Register all of the above with fairseq. Calling it again does nothing."""
    for module in REGISTERED:
        importlib.import_module(module)


# fairseq imports a --user-dir to register what is in it. Whoever imports the core alone has not
# imported fairseq, and is not made to; our own commands call register() themselves.
if "fairseq" in sys.modules:
    register()

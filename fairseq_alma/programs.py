"""The functions with which the installed commands start. They import a command only after they have been called.

So Ctrl-C ends a command without a traceback also in the seconds in which it imports torch and fairseq.
"""

import importlib
from collections.abc import Callable


def _program(module: str) -> Callable[[], int | None]:
    def run() -> int | None:
        try:
            main = importlib.import_module(module).main
        except KeyboardInterrupt:
            return 130  # the exit status of shells after Ctrl-C
        return main()

    return run


alma_deploy = _program("fairseq_alma.deploy")
alma_eval = _program("fairseq_alma.evaluation.cli")
alma_export = _program("fairseq_alma.huggingface.export")
alma_forget = _program("fairseq_alma.forget.cli")
alma_generate = _program("fairseq_alma.generate")
alma_grow = _program("fairseq_alma.growth.checkpoint")
alma_import = _program("fairseq_alma.huggingface.importing")
alma_lm = _program("fairseq_alma.lm.run")
alma_prep = _program("data_prep.cli")
alma_report = _program("fairseq_alma.report.cli")
alma_vision = _program("vision.cli")

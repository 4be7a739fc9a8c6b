"""Algorithm 1 of the paper and its words. Standard library only: imports nothing of ours outside core.

stream.py         what arrives: MegaBatch, MegaBatchStream
stream_folder.py  a stream on disk, as `alma-prep` writes it and `--task alma_lm` reads it
protocol.py       Algorithm 1: run_stream, and what a learner and an evaluator must be able to do
ledger.py         one row per arrival; CER, Mem, Comp, average perplexity as pure functions of the rows
settings.py       settings: made from a mapping, checked value by value
run_record.py     the run folder: settings, provenance, done marks, resume
stack_record.py   the same for several seeds that are computed together
lease.py          who holds a run folder now
files.py          writing a file whole or not at all
"""

from fairseq_alma.core.ledger import (
    Ledger,
    LedgerRow,
    average_perplexity,
    average_perplexity_after_first_stage,
    cumulative_error_rate,
    cumulative_flops,
    cumulative_params,
)
from fairseq_alma.core.protocol import Evaluator, Learner, Scores, Spent, Stage, StreamSettings, run_stream
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.stream import MegaBatch, MegaBatchStream
from fairseq_alma.core.stream_folder import StreamFolder

__all__ = [
    "Evaluator",
    "Learner",
    "Ledger",
    "LedgerRow",
    "MegaBatch",
    "MegaBatchStream",
    "RunRecord",
    "Scores",
    "Spent",
    "Stage",
    "StreamFolder",
    "StreamSettings",
    "average_perplexity",
    "average_perplexity_after_first_stage",
    "cumulative_error_rate",
    "cumulative_flops",
    "cumulative_params",
    "run_stream",
]

"""The protocol of the paper: Algorithm 1 and its terms. Core imports only the standard library and itself.

errors.py            errors that the user can fix
files.py             writing files so that no reader sees half of one
lease.py             which process holds a run folder now
stream.py            what arrives: MegaBatch, MegaBatchStream
stream_folder.py     a stream on disk, as `alma-prep` writes it and `--task alma_lm` reads it
ledger.py            one row per arrival; CER, Mem, Comp and average perplexity as functions of the rows
protocol.py          Algorithm 1 (`run_stream`), and the types of learner, evaluator and record
run_record.py        the run folder: settings, provenance, done marks, resume
stack_record.py      the same for several seeds that are computed together
settings.py          settings that check their values and carry their documentation
learner_settings.py  the settings that belong to single learners
catalogue.py         every learner: name, label, settings
"""

from fairseq_alma.core.ledger import (
    Ledger,
    LedgerRow,
    Scores,
    Spent,
    average_perplexity,
    average_perplexity_after_first_stage,
    cumulative_error_rate,
    cumulative_flops,
    cumulative_params,
)
from fairseq_alma.core.protocol import Evaluator, Learner, Stage, StreamSettings, run_stream
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

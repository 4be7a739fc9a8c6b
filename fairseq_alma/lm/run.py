"""alma-lm: a language-model learner over a stream of mega-batches, from settings to ledger.

alma-lm stream=STREAM out=RUN learner=sm wait=1 experts=4 updates=1000 arch=switch_lm_tiny
alma-lm -m stream=STREAM out=SWEEP updates=1000 lr=0.001,0.002 dropout=0,0.1
alma-lm status RUN
"""

import logging
import os
import warnings
from contextlib import closing
from pathlib import Path

import hydra
from omegaconf import DictConfig

from fairseq_alma.app import command
from fairseq_alma.app.command import run_job, setting_values
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import LedgerRow, mean_and_standard_error
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.settings import DEFAULTS, FREE_SETTINGS, LanguageModelSettings
from fairseq_alma.lm.stage_processes import LocalProcesses

CONFIGS = Path(__file__).parent / "configs"

NO_SETTINGS = ("table_updates",)
"""Keys of the configuration that only other keys are made from."""


def run(settings: LanguageModelSettings) -> list[LedgerRow]:
    """Run one seed, or what is left of it. Returns its ledger.

    Raises:
        AlmaError: bad settings, a bad stream, a run folder of other settings, a failed stage.
    """
    # Here, because they import fairseq and torch: a bad setting should not wait for them.
    from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
    from fairseq_alma.lm.learners import make_learner

    stream_folder = StreamFolder.open(settings.stream)
    stream = stream_folder.stream(settings.mega_batches)
    stream_settings = settings.stream_settings(len(stream))

    scalars = RunScalars(settings.out, settings.tensorboard)
    learner = make_learner(settings, stream_folder, LocalProcesses(len(stream), settings.parallel, scalars))
    evaluated_on = [stream_folder.digest(split) for split in ("valid", "test")]
    identity = {
        **settings.to_json(),
        "evaluated_on": evaluated_on,
        "dictionary": stream_folder.dictionary_digest,
    }
    with Lease(settings.out), closing(scalars):
        record = RunRecord(settings.out, identity, stream.digests, FREE_SETTINGS, DEFAULTS, on_rows=scalars.rows)
        evaluator = PerplexityEvaluator(stream_folder, Path(settings.out) / "evaluated")
        return run_stream(stream, learner, evaluator, stream_settings, record)


def run_seeds(settings: LanguageModelSettings) -> float:
    """Run every seed; print ledgers; write RUN/summary.json over seeds. Returns the final validation perplexity."""
    console = wide_console()
    if settings.seeds == 1:
        rows = run(settings)
        console.print(ledger_table(rows, title=f"{settings.out}: learner={settings.learner} wait={settings.wait}"))
        console.print(f"ledger {settings.out}/ledger.jsonl, summary {settings.out}/summary.json")
        return rows[-1].scores.validation_perplexity
    out, summaries = Path(settings.out), []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        one = {**settings.to_json(), "seed": seed, "seeds": 1, "out": str(out / f"seed_{seed}")}
        run_seeds(LanguageModelSettings.from_mapping(one))
        summaries.append(read_json(out / f"seed_{seed}" / "summary.json"))
        write_json(out / "summary.json", mean_and_standard_error(summaries))
    return read_json(out / "summary.json")["mean"]["final_validation"]


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_lm")
def hydra_main(config: DictConfig) -> float | None:
    """One job of Hydra: a run, or one of a sweep."""
    return run_job(
        "alma-lm", setting_values(config, NO_SETTINGS), lambda v: run_seeds(LanguageModelSettings.from_mapping(v))
    )


def main() -> None:
    """The command alma-lm."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper())
    if "PYTHONWARNINGS" not in os.environ:
        # fairseq and fairscale use what torch and Hydra have since deprecated: nothing a user can mend.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|torch|fairseq")
    command.main("alma-lm", __doc__, hydra_main, example="runs/sm_w1")


if __name__ == "__main__":
    main()

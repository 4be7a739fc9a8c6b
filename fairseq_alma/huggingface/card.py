"""The model card, README.md, of an exported model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_alma.core.ledger import Ledger, deployed_stage
from fairseq_alma.core.printing import perplexity_text
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_description import STREAM_FILE, read_description
from fairseq_alma.report.tables import Table

_SETTINGS = ("learner", "wait", "replay", "arch", "experts", "tokens_per_sample", "average", "dropout", "lr", "seed")
"""Settings of a run that the card shows."""


def model_card(
    run: Path | None, stage: int | None, stream: Path, num_members: int, needs_code: bool, length: int
) -> str:
    """Return the text of the card.

    Args:
        run: the run folder; None for checkpoints without a run.
        stage: the exported stage of the run; None: the last one.
        stream: the stream folder. Without a stream.json, the card does not describe the data.
        num_members: number of members of an ensemble; 1 for a single model.
        needs_code: whether the model needs the code in the exported folder.
        length: number of tokens that the model reads at once.
    """
    trust = ", trust_remote_code=True" if needs_code else ""
    kind = {
        (False, False): "A decoder-only language model with the architecture of OPT.",
        (True, False): "A decoder-only language model, in which every second layer is a mixture of experts with top-1 "
        "routing (Switch Transformer).",
    }.get(
        (needs_code, num_members > 1), f"The mean of the probabilities of {num_members} decoder-only language models."
    )
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- alma\n---",
        "# Language model",
        f"{kind} It was trained with [ALMA](https://arxiv.org/abs/2106.09563) on data that arrived in mega-batches.",
        "## Use",
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."\n'
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})\n"
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})\n"
        'inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)\n'
        "output = model.generate(**inputs, max_new_tokens=50, do_sample=True, top_p=0.9)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))\n"
        "```",
        f"The tokenizer begins each text with `</s>`, which ends a document: the model has learned to begin a document "
        f"after it. Prompt and continuation have at most {length:,} tokens together.",
        "## Data",
        *([_data(read_description(stream))] if (stream / STREAM_FILE).is_file() else []),
        "The licences of the texts are not recorded. State them here before you publish the model.",
    ]
    if run is not None:
        parts += ["## Training", _training(run)]
        parts += [_arrivals(run, stage)] if RunFolder(run).ledger.exists() else []  # alma-deploy copies no ledger
    return "\n\n".join(parts) + "\n"


def _data(stream: Mapping[str, Any]) -> str:
    rows = []
    for source in stream.get("sources", []):
        counts = (f"{source.get(key, 0):,}" for key in ("documents", "words"))
        # Only the last part of a path: the rest describes the machine on which the stream was made.
        rows.append((str(source.get("kind", "")), Path(str(source.get("path", ""))).name, *counts))
    table = Table("sources", "What was read", ("kind", "name", "documents", "words"), tuple(rows)).markdown()
    splits = {
        name: sum(split.get("words", 0) for each, split in stream["splits"].items() if each.startswith(name))
        for name in ("mega_batch_", "valid", "test")
    }
    return (
        f"{table}\nThe stream has {stream['num_mega_batches']} mega-batches with {splits['mega_batch_']:,} words in "
        f"all, a validation set with {splits['valid']:,} words and a test set with {splits['test']:,} words."
    )


def _training(run: Path) -> str:
    settings = read_settings(run)
    # A setting that is switched off, such as replay=False, is left out like one without a value.
    values = {name: settings.get(name) for name in _SETTINGS}
    rows = tuple((name, str(value)) for name, value in values.items() if value is not None and value is not False)
    return Table("settings", "Settings of alma-lm", ("setting", "value"), rows).markdown()


def _arrivals(run: Path, stage: int | None) -> str:
    """Return the table of the ledger, until the exported stage, and the total cost."""
    rows_of_run = Ledger(RunFolder(run).ledger).rows()
    last = deployed_stage(rows_of_run) if stage is None else stage
    ledger = [row for row in rows_of_run if row.stage <= last]
    rows = []
    for row in ledger:
        scores = row.scores
        shown = (scores.perplexity, scores.word_perplexity, scores.bits_per_byte, scores.validation_perplexity)
        rows.append(
            (
                str(row.t), str(row.stage), *("" if score is None else perplexity_text(score, 2) for score in shown),
                f"{scores.num_params:,}", f"{row.spent.train_flops:.3g}",
            )
        )  # fmt: skip
    columns = (
        "arrival",
        "stage",
        "test perplexity",
        "per word",
        "bits per byte",
        "validation",
        "parameters",
        "training FLOPs",
    )
    note = f"Training took {sum(row.spent.train_flops for row in ledger):.3g} FLOPs in all."
    return Table("arrivals", "Scores after each arrival", columns, tuple(rows), note).markdown().rstrip()
